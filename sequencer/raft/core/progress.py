"""What a leader knows about one follower's log, and what it may send next. Pure. (Raft paper, section 5.3.)

The modes are etcd's. Invariants:
- `match` only grows within a term, for one disk.
- The bytes in flight are bounded, so a follower that does not answer costs bounded memory.
"""

from __future__ import annotations

from collections import deque
from enum import Enum, auto
from typing import Final

from msgspec import Struct, field

from sequencer.raft.model.messages import LogIndex

IN_FLIGHT_BYTES_MAX: Final = 8 << 20
"""Limit for the bytes of entries in flight to one follower. It is above the number of bytes that any link
here can hold.
"""
IN_FLIGHT_MESSAGES_MAX: Final = 256


class Mode(Enum):
    PROBE = auto()
    """The last common entry is unknown: one message at a time."""
    REPLICATE = auto()
    """The logs agree up to `next` - 1 if everything in flight arrives."""
    SNAPSHOT = auto()
    """The log does not contain the entries that the follower needs."""


class FollowerProgress(Struct):
    """One follower on one connection, in one term."""

    next: int
    """Index of the next entry to send."""
    match: int = 0
    """The follower's synced log agrees up to this index."""
    mode: Mode = Mode.PROBE
    commit_sent: int = 0
    """The highest commit index sent."""
    is_waiting: bool = False
    """A probe is in flight. Heartbeats probe the same position without entries."""
    is_confirmed: bool = False
    """The follower has answered on this connection."""
    in_flight: deque[tuple[int, int]] = field(default_factory=deque)
    """Last index and size of each message in flight."""
    in_flight_bytes: int = 0
    snapshot: LogIndex | None = None
    """The snapshot in flight, in SNAPSHOT mode."""

    @property
    def is_full(self) -> bool:
        """Whether nothing more may be sent before an acknowledgement."""
        if self.mode is Mode.REPLICATE:
            return (
                self.in_flight_bytes >= IN_FLIGHT_BYTES_MAX or len(self.in_flight) >= IN_FLIGHT_MESSAGES_MAX
            )
        return self.mode is Mode.SNAPSHOT or self.is_waiting

    def on_sent(self, last: int, size: int) -> None:
        """Entries up to index `last` were sent, `size` bytes."""
        if self.mode is Mode.REPLICATE:
            self.in_flight.append((last, size))
            self.in_flight_bytes += size
            self.next = last + 1
        else:
            self.is_waiting = True

    def has_lost(self, prev: int) -> bool:
        """Whether refusing `prev` proves that the follower lost acknowledged entries.

        The first probe asks for the last acknowledged entry, so the refusal cannot be a late answer.
        """
        return not self.is_confirmed and 0 < prev <= self.match

    def on_matched(self, index: int) -> None:
        """The follower's synced log agrees up to `index`."""
        self.is_confirmed = True
        self.match = max(self.match, index)
        self.next = max(self.next, self.match + 1)
        if self.mode is Mode.PROBE or (self.snapshot is not None and self.snapshot.index <= self.match):
            self._enter(Mode.REPLICATE, self.match + 1)
        while self.in_flight and self.in_flight[0][0] <= self.match:
            self.in_flight_bytes -= self.in_flight.popleft()[1]

    def on_refused(self, prev: int, hint: int) -> None:
        """The follower does not have `prev`. It may agree up to `hint`."""
        self.is_confirmed = True
        if self.mode is Mode.SNAPSHOT or prev <= self.match:
            return  # Late or duplicated: the follower has agreed to more since.
        if self.mode is Mode.PROBE and prev != self.next - 1:
            return  # An answer to an older probe.
        self._enter(Mode.PROBE, max(self.match, min(hint, prev - 1)) + 1)

    def on_snapshot(self, snapshot: LogIndex) -> None:
        self._enter(Mode.SNAPSHOT, snapshot.index + 1)
        self.snapshot = snapshot

    def _enter(self, mode: Mode, following: int) -> None:
        self.mode, self.next = mode, following
        self.is_waiting, self.snapshot = False, None
        self.in_flight.clear()
        self.in_flight_bytes = 0
