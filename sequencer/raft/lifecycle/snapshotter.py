"""Snapshots of this node's own state, and letting go of the log behind them.

For the loop's thread; the state is encoded and written aside. The law (rule 3 of docs/raft.md): of
the log only that goes away which a durable snapshot covers.
"""

from __future__ import annotations

import logging
from typing import Final

from rt.errors import DiskFull
from sequencer.raft.core.core import SyncObj
from sequencer.raft.core.local_member import LocalMembership
from sequencer.raft.core.pysyncobj_adapter import now
from sequencer.raft.lifecycle.epoch_transition import EpochExit
from sequencer.raft.lifecycle.install_snapshot import SnapshotInstaller
from sequencer.raft.lifecycle.state_fetch import StateFetcher
from sequencer.raft.model.api import StateMachine
from sequencer.raft.model.cluster_state import encode_state
from sequencer.raft.model.config import RaftConfig
from sequencer.raft.model.messages import LogIndex
from sequencer.raft.storage.log import DurableLog
from sequencer.raft.storage.snapshots import SnapshotMeta, SnapshotStore
from sequencer.raft.storage.worker import BackgroundWorker

HOLD_FACTOR: Final = 8
"""For a follower that is being served, so many times the usual tail of the log is kept."""

logger = logging.getLogger("sequencer.raft")


class Snapshotter:
    """Takes a snapshot every `snapshot_ms` in which something was applied."""

    def __init__(
        self,
        config: RaftConfig,
        own: LocalMembership,
        machine: StateMachine,
        raft: SyncObj,
        log: DurableLog,
        snapshots: SnapshotStore,
        aside: BackgroundWorker,
        leaving: EpochExit,
        fetching: StateFetcher,
        installing: SnapshotInstaller,
    ) -> None:
        self._config, self._own, self._machine, self._raft = config, own, machine, raft
        self._log, self._snapshots, self._aside = log, snapshots, aside
        self._leaving, self._fetching, self._installing = leaving, fetching, installing
        self._is_under_way = False
        self.due = now() + config.snapshot_ms / 1000
        """When the next one is to be taken, if it is wanted then."""

    def is_wanted(self) -> bool:
        """Whether there is something that the newest snapshot lacks, and none is being made.

        Nor is one taken while another state is on its way here, or the one for the next epoch is made.
        """
        newest = self._snapshots.newest
        return (
            newest is not None
            and self._own.state.applied.index > newest.place.index
            and not self._is_under_way
            and self._installing.incoming is None
            and not self._leaving.is_over
            and not self._fetching.is_under_way
        )

    def take(self) -> None:
        """Freeze the state as it is; the rest is done aside."""
        state, place = self._own.state, self._own.state.applied
        head, encode = encode_state(state), self._machine.snapshot()
        self._is_under_way = True

        def write() -> SnapshotMeta:
            return self._snapshots.write(state.cluster, state.epoch, place, b"".join([head, encode()]))

        self._aside.run(write, self._on_written, self._on_failed)

    def compact(self, place: LogIndex) -> None:
        """Let go of what the snapshot covers, but for a tail that spares slow followers the snapshot.

        What a connected follower needs next is kept within a wider bound: else one that is slower than the
        log grows would get snapshot after snapshot and never the log behind one.
        """
        log, config, size = self._log, self._config, 0
        needed = self._raft.keep_from() or place.index + 1
        keep_from = place.index + 1
        while keep_from > log.base.index + 1:
            size += len(log.entry(keep_from - 1).content)
            kept = place.index - keep_from + 2
            held = max(size / config.keep_bytes, kept / config.keep_entries)
            if held > (1 if keep_from <= needed else HOLD_FACTOR):
                break
            keep_from -= 1
        try:
            log.compact(keep_from)
        except DiskFull as error:  # Some file systems need space to free some; the next snapshot tries again.
            logger.error("compaction_failed error=%r", str(error))

    def _on_written(self, meta: SnapshotMeta) -> None:
        self._is_under_way = False
        self.due = now() + self._config.snapshot_ms / 1000
        self.compact(meta.place)

    def _on_failed(self, error: BaseException) -> None:
        self._is_under_way = False
        if not isinstance(error, DiskFull):
            raise error
        logger.error("snapshot_failed error=%r", str(error))
        self.due = now() + self._config.snapshot_ms / 1000
