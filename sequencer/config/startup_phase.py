"""The steps by which a node returns, from its start until it keeps up with the others: which one it is at.

    starting ── snapshot ── commands ── copying ── merging ── ready          away: not heard of

Pure. Each process of a node tells its part: control how far Raft's log is applied, data how far the merged
log goes. The law: the first step that is not behind the node is the one that it is at. A node that was ready
is at a step again when it has fallen behind for `PATIENCE_NS`: that others have something more is no news.
"""

from __future__ import annotations

from typing import Final, NamedTuple

STARTING: Final = "starting"
"""No leader was known yet, or the data process is not there."""
SNAPSHOT: Final = "snapshot"
"""It receives a snapshot; in bytes."""
COMMANDS: Final = "commands"
"""It applies what is committed; in indices of Raft's log."""
COPYING: Final = "copying"
"""Merged bytes come from peers, or are mended by them; in positions."""
MERGING: Final = "merging"
"""It is behind in merging; in positions."""
READY: Final = "ready"
AWAY: Final = "unreachable"
STEPS: Final = (STARTING, SNAPSHOT, COMMANDS, COPYING, MERGING, READY, AWAY)

PATIENCE_NS: Final = 2 * 10**9


class Phase(NamedTuple):
    """Where a node is; `total` 0: it is not known how far it goes."""

    name: str
    done: int = 0
    total: int = 0


class LagDetector:
    """Whether one who follows keeps up with an end that moves on.

    It does once it has reached an end that it was shown; no more if it has not for `PATIENCE_NS`.
    """

    def __init__(self) -> None:
        self._goal: int | None = None
        self._since_ns = 0
        self.is_behind = True

    def look(self, done: int, end: int, now_ns: int) -> bool:
        """Whether it is behind, now that it is at `done` and the end is shown to be at `end`."""
        if self._goal is None:
            self._goal, self._since_ns = end, now_ns
        if done >= self._goal:
            self._goal, self._since_ns = end, now_ns
            self.is_behind = False
        elif now_ns - self._since_ns >= PATIENCE_NS:
            self.is_behind = True
        return self.is_behind


class MergedLogView(NamedTuple):
    """A node's merged log, as its data process sees it; positions."""

    done: int
    """Up to where it goes."""
    total: int
    """Up to where the cluster has merged, as far as this node knows."""
    copied: Phase | None = None
    """Bytes come from peers; how far that is."""
    is_cut_off: bool = False
    """It cannot go on without peers: bytes before the next order are not here, or some are damaged."""


class DataPhases:
    """The part of the data process."""

    def __init__(self) -> None:
        self._pace = LagDetector()

    def look(self, merged: MergedLogView | None, now_ns: int) -> Phase:
        """The step; `merged` is None before there is a merged log."""
        if merged is None:
            return Phase(STARTING)
        if merged.copied is not None:
            return merged.copied
        if merged.is_cut_off:
            return Phase(COPYING, merged.done, merged.total)
        if self._pace.look(merged.done, merged.total, now_ns):
            return Phase(MERGING, merged.done, merged.total)
        return Phase(READY)


class RaftLogView(NamedTuple):
    """Raft's log, as the control process sees it; indices."""

    is_led: bool
    """A leader is known."""
    applied: int
    committed: int
    """By what the leader said last."""
    is_caught_up: bool
    """All that earlier terms committed is applied, and this node's disk counts."""
    received: tuple[int, int] | None = None
    """Of a snapshot that comes: the bytes that are here, and all."""


class NodePhases:
    """The whole node's, as its control process tells it."""

    def __init__(self) -> None:
        self._pace = LagDetector()
        self._was_led = False

    def look(self, log: RaftLogView, data: Phase | None, now_ns: int) -> Phase:
        """The step; `data` is what the data process said, None if there is none."""
        if log.received is not None:
            return Phase(SNAPSHOT, *log.received)
        self._was_led = self._was_led or log.is_led
        if not self._was_led:
            return Phase(STARTING)
        # That nothing more is committed is believed once something of the present term was applied.
        end = log.committed if log.is_caught_up or log.committed > log.applied else log.applied + 1
        if self._pace.look(log.applied, end, now_ns):
            return Phase(COMMANDS, log.applied, log.committed)
        return Phase(STARTING) if data is None else data
