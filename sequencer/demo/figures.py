"""The figures of the demo, from the times that its processes noted by the machine's clock."""

from __future__ import annotations

from pathlib import Path
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from rt.log.check.status import read_status
from rt.log.disk import REAL
from rt.log.scan.catalog import segment_path
from rt.log.scan.directory import read_header, scans
from rt.log.scan.scanner import MergedScanner

Int64s: TypeAlias = npt.NDArray[np.int64]

NS: Final = 10**9


class Latency(Struct, frozen=True):
    """From `publish` to the subscriber, of `count` messages."""

    count: int
    p50_ms: float
    p99_ms: float


class Burst(Struct, frozen=True):
    """Messages published at full speed, and the seconds until the subscriber had received all."""

    count: int
    value_bytes: int
    seconds: float


class Failover(Struct, frozen=True):
    """The longest times without a merged message, and without one for the subscriber, after a kill."""

    killed: str
    took_over: str
    unmerged_s: float
    unread_s: float


class DeliveryTimes(Struct, frozen=True):
    """When each message was published and when the subscriber received it, ns, by position."""

    published_ns: Int64s
    arrived_ns: Int64s

    @classmethod
    def load(cls, path: Path) -> DeliveryTimes:
        published, arrived = np.load(path)
        return cls(published, arrived)

    def latency(self, start_ns: int, end_ns: int) -> Latency | None:
        """Latency of the messages published in [start_ns, end_ns); None if there are none."""
        rows = (self.published_ns >= start_ns) & (self.published_ns < end_ns)
        if not rows.any():
            return None
        taken_ms = (self.arrived_ns[rows] - self.published_ns[rows]) / 1e6
        p50, p99 = np.percentile(taken_ms, [50, 99])
        return Latency(len(taken_ms), float(p50), float(p99))


def longest_pause_s(times_ns: Int64s, start_ns: int, end_ns: int) -> float:
    """The longest time without an event between two moments. `times_ns`: the events."""
    inside = np.sort(times_ns[(times_ns > start_ns) & (times_ns < end_ns)])
    return float(np.diff(inside, prepend=start_ns, append=end_ns).max()) / NS


def sequenced_ns(directory: Path) -> Int64s:
    """When each block of a merged log was sequenced."""
    found: list[int] = []
    path = str(directory)
    for segment in read_status(path).kept:
        header = read_header(REAL, path, segment.id)
        assert header is not None, segment
        file = REAL.open(segment_path(path, segment.id))
        try:
            for scan in scans(file.pread, MergedScanner(header), values=False):
                found += [placed.header.sequenced_ns for placed in scan.blocks]
        finally:
            file.close()
    return np.array(found, np.int64)
