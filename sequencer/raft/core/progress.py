"""What a leader knows of one follower's log, and what may be sent to it next.

Pure. The law: `match` only grows while a term and a disk last; what is under way is bounded, so a follower
that stands still costs a bounded amount of memory. (Raft paper, section 5.3; the modes are etcd's.)
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Final

from sequencer.raft.model.messages import LogIndex

IN_FLIGHT_BYTES_MAX: Final = 8 << 20
"""Bytes of entries under way to one follower: more than any link here holds."""
IN_FLIGHT_MESSAGES_MAX: Final = 256


class Mode(Enum):
    """How a follower is served."""

    PROBE = auto()
    """Where its log agrees is not known: one message at a time."""
    STREAM = auto()
    """It agrees up to `next` - 1 if everything under way arrives."""
    SNAPSHOT = auto()
    """What it lacks is no longer in the log."""


@dataclass(slots=True)
class FollowerProgress:
    """One follower, since this node leads and the follower's connection stands."""

    next: int
    """Index of the next entry to send."""
    match: int = 0
    """Its synced log is ours up to here."""
    mode: Mode = Mode.PROBE
    commit_sent: int = 0
    """The greatest commit index it was told."""
    is_waiting: bool = False
    """A probe is under way. Heartbeats probe at the same place, without entries."""
    is_confirmed: bool = False
    """It has answered on this connection."""
    in_flight: deque[tuple[int, int]] = field(default_factory=deque)
    """Last index and bytes of each message of entries under way."""
    in_flight_bytes: int = 0
    snapshot: LogIndex | None = None
    """The snapshot under way, in that mode."""

    @property
    def is_full(self) -> bool:
        """Whether nothing more may be sent until something is acknowledged."""
        if self.mode is Mode.STREAM:
            return (
                self.in_flight_bytes >= IN_FLIGHT_BYTES_MAX or len(self.in_flight) >= IN_FLIGHT_MESSAGES_MAX
            )
        return self.mode is Mode.SNAPSHOT or self.is_waiting

    def on_sent(self, last: int, size: int) -> None:
        """Entries up to index `last` were sent, `size` bytes."""
        if self.mode is Mode.STREAM:
            self.in_flight.append((last, size))
            self.in_flight_bytes += size
            self.next = last + 1
        else:
            self.is_waiting = True

    def has_lost(self, prev: int) -> bool:
        """Whether refusing `prev` proves that it lost what it had acknowledged.

        It is asked for the end of that first, so a refusal of it can be no late answer.
        """
        return not self.is_confirmed and 0 < prev <= self.match

    def on_matched(self, index: int) -> None:
        """Its log agrees, synced, up to `index`."""
        self.is_confirmed = True
        self.match = max(self.match, index)
        self.next = max(self.next, self.match + 1)
        if self.mode is Mode.PROBE or (self.snapshot is not None and self.snapshot.index <= self.match):
            self._become(Mode.STREAM, self.match + 1)
        while self.in_flight and self.in_flight[0][0] <= self.match:
            self.in_flight_bytes -= self.in_flight.popleft()[1]

    def on_refused(self, prev: int, hint: int) -> None:
        """It has not what was at `prev`, and may agree up to `hint`."""
        self.is_confirmed = True
        if self.mode is Mode.SNAPSHOT or prev <= self.match:
            return  # Late, or sent again by the network: it has agreed to more since.
        if self.mode is Mode.PROBE and prev != self.next - 1:
            return  # The answer to an older probe.
        self._become(Mode.PROBE, max(self.match, min(hint, prev - 1)) + 1)

    def on_snapshot(self, snapshot: LogIndex) -> None:
        """The snapshot is what it is sent from now on."""
        self._become(Mode.SNAPSHOT, snapshot.index + 1)
        self.snapshot = snapshot

    def _become(self, mode: Mode, following: int) -> None:
        self.mode, self.next = mode, following
        self.is_waiting, self.snapshot = False, None
        self.in_flight.clear()
        self.in_flight_bytes = 0
