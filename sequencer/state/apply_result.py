"""What applying a committed command comes to: what others act on. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from rt.log.format.segment_table import TrimReason
from sequencer.state.state import End
from sequencer.state.write_plan import WritePlan


@dataclass(frozen=True, slots=True)
class RangesMerged:
    """An instruction was merged."""

    order: WritePlan


@dataclass(frozen=True, slots=True)
class RunOpened:
    """A life is open: its bytes are welcome."""

    session_id: int
    run: int


@dataclass(frozen=True, slots=True)
class RunFenced:
    """No node takes a further byte of that X. `is_given_up`: an operator wants no more of it."""

    session_id: int
    run: int
    is_given_up: bool = False


@dataclass(frozen=True, slots=True)
class RunClosed:
    """The X ends there."""

    session_id: int
    run: int
    end: End


@dataclass(frozen=True, slots=True)
class Forgotten:
    """The records of these sessions are gone."""

    session_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DiskJoined:
    """A disk of session copies counts from now on, in place of the node's last one."""

    node: str


@dataclass(frozen=True, slots=True)
class DiskRestored:
    """The disk of that node has a say about the ends of lives again."""

    node: str


@dataclass(frozen=True, slots=True)
class SegmentsTrimmed:
    """The oldest sealed segments are gone."""

    reason: TrimReason
    trimmed_ns: int
    log_start: int
    """The first position that is kept."""
    segments: int
    """How many of them went now."""
    size_bytes: int
    """What they held."""
    overridden: tuple[str, ...] = ()
    """The subscribers that hold back something that is gone, by name."""


@dataclass(frozen=True, slots=True)
class HoldMoved:
    """A subscriber's hold is where it said."""

    name: str
    position: int


@dataclass(frozen=True, slots=True)
class HoldReleased:
    """A subscriber's hold is gone."""

    name: str


@dataclass(frozen=True, slots=True)
class LeasesGranted:
    """What a request about leases came to: how many it was granted, or renewed, or released just now."""

    request: bytes
    tokens: tuple[int, ...]
    """Of each lease that was asked for; 0: it was not acquired, or not held by that token."""
    granted: int = 0
    renewed: int = 0
    released: int = 0


@dataclass(frozen=True, slots=True)
class LeasesExpired:
    """Leases of these names lapsed: nobody renewed them."""

    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RequestWaits:
    """A request of an operator waits for the leader, or was heard of before."""


@dataclass(frozen=True, slots=True)
class RequestLapsed:
    """The time of a request is over."""

    may_be_done: bool
    """It may have been decided before; else it is not carried out, and never will be."""


@dataclass(frozen=True, slots=True)
class ClusterReset:
    """The epoch is over; the cluster goes on in that one."""

    is_hard: bool
    epoch: int


@dataclass(frozen=True, slots=True)
class ConfigurationChanged:
    """Configuration, or that a roll is wanted."""


@dataclass(frozen=True, slots=True)
class CommandRejected:
    """Nothing was changed.

    `is_fenced`: for good, because another life or incarnation took over. `is_full`: for want of room.
    """

    why: str
    is_fenced: bool = False
    is_full: bool = False


@dataclass(frozen=True, slots=True)
class NotWaiting(CommandRejected):
    """A request of an operator was decided before, or is not known: what came of it is not said."""


Outcome: TypeAlias = (
    RangesMerged
    | RunOpened
    | RunFenced
    | RunClosed
    | Forgotten
    | DiskJoined
    | DiskRestored
    | SegmentsTrimmed
    | HoldMoved
    | HoldReleased
    | LeasesGranted
    | LeasesExpired
    | RequestWaits
    | RequestLapsed
    | ClusterReset
    | ConfigurationChanged
    | CommandRejected
)
