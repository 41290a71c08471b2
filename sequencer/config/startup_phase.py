"""The phases of a node from its start until it keeps up with the others. Pure.

    starting ── snapshot ── commands ── copying ── merging ── ready     data-hung, unreachable: silent

Each process of a node reports its part: the control process reports how far Raft's log is applied, the data
process reports how far the merged log extends. Invariant: a node is in the first phase that it has not
completed. A ready node that was behind for `PATIENCE_NS` returns to an earlier phase. A new entry on another
node alone is no lag.
"""

from __future__ import annotations

from typing import Final, NamedTuple

STARTING: Final = "starting"
"""No leader was known yet, or the data process is not connected."""
SNAPSHOT: Final = "snapshot"
"""The node receives a snapshot. Progress is in bytes."""
COMMANDS: Final = "commands"
"""The node applies committed commands. Progress is in indices of Raft's log."""
COPYING: Final = "copying"
"""The node copies or repairs merged bytes from peers. Progress is in positions."""
MERGING: Final = "merging"
"""The node is behind in merging. Progress is in positions."""
READY: Final = "ready"
DATA_HUNG: Final = "data-hung"
"""The data process has reported nothing for too long."""
UNREACHABLE: Final = "unreachable"
PHASES: Final = (STARTING, SNAPSHOT, COMMANDS, COPYING, MERGING, READY, DATA_HUNG, UNREACHABLE)

PATIENCE_NS: Final = 2 * 10**9


class Phase(NamedTuple):
    """The phase and its progress. `total` 0: unknown."""

    name: str
    done: int = 0
    total: int = 0


class LagDetector:
    """Tracks whether a follower keeps up with an end that moves.

    The follower keeps up after it has reached a reported end. It is behind when it has not reached one for
    `PATIENCE_NS`.
    """

    def __init__(self) -> None:
        self._goal: int | None = None
        self._since_ns = 0
        self.is_behind = True

    def update(self, done: int, end: int, now_ns: int) -> bool:
        """Return whether the follower is behind. It is now at `done`, and the end is at `end`."""
        if self._goal is None:
            self._goal, self._since_ns = end, now_ns
        if done >= self._goal:
            self._goal, self._since_ns = end, now_ns
            self.is_behind = False
        elif now_ns - self._since_ns >= PATIENCE_NS:
            self.is_behind = True
        return self.is_behind


class MergedLogView(NamedTuple):
    """A node's merged log in its data process; positions."""

    done: int
    """End of the merged log here."""
    total: int
    """End of the cluster's merged log, as this node knows it."""
    copied: Phase | None = None
    """Progress of a copy from peers."""
    is_cut_off: bool = False
    """Whether the node cannot continue without peers, because bytes are missing or corrupt."""


class DataPhases:
    """Determines the phase of the data process."""

    def __init__(self) -> None:
        self._lag = LagDetector()

    def update(self, merged: MergedLogView | None, now_ns: int) -> Phase:
        """`merged` is None before there is a merged log."""
        if merged is None:
            return Phase(STARTING)
        if merged.copied is not None:
            return merged.copied
        if merged.is_cut_off:
            return Phase(COPYING, merged.done, merged.total)
        if self._lag.update(merged.done, merged.total, now_ns):
            return Phase(MERGING, merged.done, merged.total)
        return Phase(READY)


class RaftLogView(NamedTuple):
    """Raft's log in the control process; indices."""

    is_led: bool
    applied: int
    committed: int
    """The commit index that the leader last reported."""
    is_caught_up: bool
    """Everything that earlier terms committed is applied, and this node's disk counts."""
    received: tuple[int, int] | None = None
    """While a snapshot is received: bytes received, total bytes."""


class NodePhases:
    """The phase of the whole node, in its control process."""

    def __init__(self) -> None:
        self._lag = LagDetector()
        self._was_led = False

    def update(self, log: RaftLogView, data: Phase | None, now_ns: int) -> Phase:
        """`data` is what the data process reported, None if it reported nothing."""
        if log.received is not None:
            return Phase(SNAPSHOT, *log.received)
        self._was_led = self._was_led or log.is_led
        if not self._was_led:
            return Phase(STARTING)
        # The leader's commit index is trusted after an entry of the current term was applied.
        end = log.committed if log.is_caught_up or log.committed > log.applied else log.applied + 1
        if self._lag.update(log.applied, end, now_ns):
            return Phase(COMMANDS, log.applied, log.committed)
        return Phase(STARTING) if data is None else data
