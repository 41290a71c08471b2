"""Measures how long syncs of session replicas take."""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from typing import Final

from replicator.receive.group_commit import GroupCommit, OnFailed, OnSynced, Syncable
from rt.exposition import Histogram
from rt.log.write.writer import SyncPoint

BOUNDS_S: Final = (0.00025, 0.0005, 0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.128, 0.256, 1.0, 4.0)


class Durations:
    """Counts durations by size. Any thread may call `add`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = [0] * (len(BOUNDS_S) + 1)
        self._total_s = 0.0

    def add(self, seconds: float) -> None:
        with self._lock:
            self._counts[bisect_left(BOUNDS_S, seconds)] += 1
            self._total_s += seconds

    def histogram(self) -> Histogram:
        with self._lock:
            return Histogram(BOUNDS_S, tuple(self._counts), self._total_s)


class TimedGroupCommit(GroupCommit):
    """A `GroupCommit` that measures each sync of a receiver, also one that fails."""

    def __init__(self) -> None:
        super().__init__()
        self.durations: Final = Durations()
        self._timed: dict[Syncable, _Timed] = {}

    def add(self, receiver: Syncable, on_synced: OnSynced, on_failed: OnFailed) -> None:
        timed = self._timed[receiver] = _Timed(receiver, self.durations)
        super().add(timed, on_synced, on_failed)

    def discard(self, receiver: Syncable) -> None:
        timed = self._timed.pop(receiver, None)
        if timed is not None:
            super().discard(timed)

    def request_sync(self, receiver: Syncable) -> None:
        timed = self._timed.get(receiver)
        if timed is not None:
            super().request_sync(timed)


class _Timed:
    def __init__(self, receiver: Syncable, durations: Durations) -> None:
        self._receiver, self._durations = receiver, durations
        self.sync_point = receiver.sync_point

    @property
    def path(self) -> str:
        return self._receiver.path

    def sync_to(self, point: SyncPoint) -> None:
        begun_s = time.perf_counter()
        try:
            self._receiver.sync_to(point)
        finally:
            self._durations.add(time.perf_counter() - begun_s)
