"""The end of an epoch on a node that has applied its reset: it stays a while, and goes on in the next epoch.

For the loop's thread. The law: from the reset on this node applies nothing in its epoch, and takes no
snapshot of it; it ends with `EpochOver`, once the state that the next epoch begins with is durable. One that
was forced to go on by itself falls silent: it says and hears nothing more in the old epoch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from rt.epochs import is_later
from rt.errors import DiskFull
from sequencer.raft.aside import Aside
from sequencer.raft.epochs import STAY_S, EpochOver
from sequencer.raft.snapshots import SnapshotMeta, SnapshotStore
from sequencer.raft.state import ClusterState, encode_state

logger = logging.getLogger("sequencer.raft")


class Leaving:
    """Leaves one epoch for the next. What cannot be written now is tried again every `retry_s`."""

    def __init__(self, snapshots: SnapshotStore, aside: Aside, retry_s: float) -> None:
        self._snapshots, self._aside, self._retry_s = snapshots, aside, retry_s
        self._stays_until: float | None = None
        self._retry_at = 0.0
        self._is_writing = False
        self.forced: bytes | None = None
        """The command with which an operator had this node go on by itself."""
        self._begins: tuple[ClusterState, Callable[[], bytes]] | None = None
        """What the next epoch begins with, and what encodes the state machine's part."""

    @property
    def is_over(self) -> bool:
        """Whether the epoch has ended here."""
        return self._stays_until is not None

    @property
    def due(self) -> float:
        """When `is_to_leave` may become true by time alone."""
        if self._stays_until is None or self._is_writing:
            return float("inf")
        return max(self._stays_until, self._retry_at)

    def begin(self, now: float) -> None:
        """The reset was applied."""
        self._stays_until = now + STAY_S

    def is_to_leave(self, now: float, *, is_awaited: bool) -> bool:
        """Whether to `write` now. `is_awaited`: this node leads others that have not left yet."""
        if self._stays_until is None or self._is_writing or now < self._retry_at:
            return False
        return now >= self._stays_until or not is_awaited

    def force(self, command: bytes, state: ClusterState, encode: Callable[[], bytes], now: float) -> None:
        """Fall silent, and `write`."""
        self.forced = command
        self.write(state, encode, now)

    @property
    def is_silent(self) -> bool:
        """Whether the old epoch is nothing to this node any more."""
        return self.forced is not None

    @property
    def is_begun(self) -> bool:
        """Whether it is settled what the next epoch begins with."""
        return self._begins is not None

    def write(self, state: ClusterState, encode: Callable[[], bytes], now: float) -> None:
        """Make durable aside what the next epoch begins with; the loop ends behind that. Once."""
        assert self._begins is None, "two epochs that follow this one"
        self._begins = state, encode
        self._stays_until = now if self._stays_until is None else self._stays_until
        self.write_again(now)

    def write_again(self, now: float) -> None:
        """Try once more to write the very same."""
        assert self._begins is not None
        state, encode = self._begins
        self._is_writing = True

        def write() -> SnapshotMeta:
            newest = self._snapshots.newest
            if newest is not None and not is_later(newest.epoch, state.epoch):
                return newest  # It came from a peer meanwhile.
            content = b"".join([encode_state(state), encode()])
            return self._snapshots.write(state.cluster, state.epoch, state.applied, content)

        self._aside.run(write, self._on_written, lambda error: self._on_failed(error, now))

    def _on_written(self, meta: SnapshotMeta) -> None:
        raise EpochOver(meta.epoch)

    def _on_failed(self, error: BaseException, now: float) -> None:
        if not isinstance(error, DiskFull):
            raise error
        logger.error("epoch_cannot_begin error=%r", str(error))
        self._is_writing, self._retry_at = False, now + self._retry_s
