"""Takes snapshots of this node's state, compacts the log, and prepares the file of its next segment.

For the loop's thread. The worker writes files. Invariant (rule 3 of docs/raft.md): only entries that a
durable snapshot covers are dropped from the log.

A snapshot contains the whole state, so its cost is proportional to the size of the state. A large state is
written again when the log has grown by a fraction of that size. So the cost is proportional to the changes.
"""

from __future__ import annotations

import logging
from typing import Final

from rt.errors import DiskFull, StorageError
from sequencer.raft.core.pysyncobj_adapter import now
from sequencer.raft.lifecycle.epoch_transition import EpochExit
from sequencer.raft.lifecycle.install_snapshot import SnapshotInstaller
from sequencer.raft.lifecycle.services import NodeServices
from sequencer.raft.lifecycle.state_transfer import StateFetcher
from sequencer.raft.model.cluster_state import encode_state
from sequencer.raft.model.config import RaftConfig
from sequencer.raft.model.messages import LogIndex
from sequencer.raft.storage.log import DurableLog
from sequencer.raft.storage.snapshots import SnapshotMeta
from sequencer.raft.storage.worker import BackgroundWorker

HOLD_FACTOR: Final = 8
"""For a connected follower that needs them, the log keeps this many times the usual number of entries."""
SMALL_STATE_BYTES: Final = 1 << 20
"""A state up to this size is small: it is written in a few milliseconds."""
GROWTH: Final = 4
"""A large state is written when the log since its last snapshot has a fourth of the state's bytes."""
REPLAY_FACTOR: Final = 16
"""A large state is also written when the log since the last snapshot has this many times `keep_entries`
entries. A node that starts applies 65,536 entries in a few seconds.
"""
LONGEST_S: Final = 300.0
"""Maximum time until the next snapshot, if anything changed."""

logger = logging.getLogger("sequencer.raft")


def has_grown(state_bytes: int, log_bytes: int, entries: int, config: RaftConfig) -> bool:
    """Whether a new snapshot is worth its cost. `state_bytes`: size of the last snapshot. `log_bytes`,
    `entries`: size and number of the log entries since that snapshot.
    """
    return (
        state_bytes <= SMALL_STATE_BYTES
        or GROWTH * log_bytes >= state_bytes
        or log_bytes >= config.keep_bytes
        or entries >= REPLAY_FACTOR * config.keep_entries
    )


class Snapshotter:
    """Takes a snapshot when something was applied: after `snapshot_ms` if the log `has_grown`, or after
    `LONGEST_S`.
    """

    def __init__(
        self,
        services: NodeServices,
        epoch_exit: EpochExit,
        state_fetcher: StateFetcher,
        installer: SnapshotInstaller,
    ) -> None:
        self._config = services.config
        self._own, self._machine, self._raft = services.own, services.machine, services.raft
        self._log, self._snapshots, self._worker = services.log, services.snapshots, services.worker
        self._epoch_exit, self._state_fetcher, self._installer = epoch_exit, state_fetcher, installer
        self._is_under_way = False
        self._began = now()
        """Time when the last snapshot was written. Before the first snapshot: time when this node started."""
        self._counted = LogIndex(0, 0)
        """`_log_bytes` is the size of the entries after this snapshot, up to the entry `_counted_to`."""
        self._counted_to = self._log_bytes = 0

    @property
    def due(self) -> float:
        """When to take the next snapshot, if `is_wanted`."""
        after_s = self._config.snapshot_ms / 1000
        return self._began + (after_s if self._has_grown() else max(after_s, LONGEST_S))

    def _has_grown(self) -> bool:
        newest, applied = self._snapshots.newest, self._own.state.applied.index
        if newest is None or newest.length <= SMALL_STATE_BYTES:
            return True
        if newest.place != self._counted:
            self._counted, self._counted_to, self._log_bytes = newest.place, newest.place.index, 0
        if applied > self._counted_to >= self._log.base.index:
            entries = self._log.entries(self._counted_to + 1, applied + 1)
            self._log_bytes += sum(len(entry.content) for entry in entries)
            self._counted_to = applied
        return has_grown(newest.length, self._log_bytes, applied - newest.place.index, self._config)

    def is_wanted(self) -> bool:
        """Whether there is something to snapshot, and no snapshot or state is being made or received."""
        newest = self._snapshots.newest
        return (
            newest is not None
            and self._own.state.applied.index > newest.place.index
            and not self._is_under_way
            and self._installer.incoming is None
            and not self._epoch_exit.is_over
            and self._state_fetcher.incoming is None
        )

    def take_snapshot(self) -> None:
        """Freeze the state. The worker does the rest."""
        state, place = self._own.state, self._own.state.applied
        head, encode = encode_state(state), self._machine.snapshot()
        self._is_under_way = True

        def write() -> SnapshotMeta:
            return self._snapshots.write(state.cluster, state.epoch, place, b"".join([head, encode()]))

        self._worker.run(write, self._on_written, self._on_failed)

    def compact(self, place: LogIndex) -> None:
        """Drop the entries that the snapshot covers, except a tail for slow followers.

        Entries that a connected follower needs next are kept up to a larger bound. Otherwise, a follower that
        is slower than the growth of the log would receive one snapshot after another.
        """
        log, config, size = self._log, self._config, 0
        needed = self._raft.leader_role.keep_from() or place.index + 1
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
        except DiskFull as error:  # Some file systems need space to free space. The next snapshot retries.
            logger.error("compaction_failed error=%r", str(error))

    def _on_written(self, meta: SnapshotMeta) -> None:
        self._is_under_way = False
        self._began = now()
        self.compact(meta.place)

    def _on_failed(self, error: BaseException) -> None:
        self._is_under_way = False
        if not isinstance(error, DiskFull):
            raise error
        logger.error("snapshot_failed error=%r", str(error))
        self._began = now()


class SegmentPreparer:
    """Has the worker prepare the log's next segment. After a failure it waits for `retry_s`."""

    def __init__(self, log: DurableLog, worker: BackgroundWorker, retry_s: float) -> None:
        self._log, self._worker, self._retry_s = log, worker, retry_s
        self._due = 0.0

    def prepare(self, began: float) -> None:
        if began >= self._due and (prepare := self._log.prepare_spare()) is not None:
            self._worker.run(prepare, lambda _: None, self._on_failed)

    def _on_failed(self, error: BaseException) -> None:
        """The log continues without a prepared file."""
        if not isinstance(error, StorageError):
            raise error
        logger.error("no_spare_segment error=%r", str(error))
        self._due = now() + self._retry_s
