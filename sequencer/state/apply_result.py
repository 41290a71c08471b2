"""The outcomes of applied commands, on which other parts act. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

from rt.log.format.segment_table import TrimReason
from sequencer.state.state import End, MemberRequest
from sequencer.state.write_plan import WritePlan


@dataclass(frozen=True, slots=True)
class RangesMerged:
    plan: WritePlan


@dataclass(frozen=True, slots=True)
class MembersRequested:
    number: int


@dataclass(frozen=True, slots=True)
class MembersSettled:
    """`why`: why the request was not carried out whole; empty: it was."""

    request: MemberRequest
    why: str


@dataclass(frozen=True, slots=True)
class RunOpened:
    """A run is open: nodes accept its bytes."""

    session_id: int
    run: int


@dataclass(frozen=True, slots=True)
class RunFenced:
    """No node accepts another byte of these runs. `is_given_up`: an operator abandoned the rest of them."""

    session_id: int
    run: int
    is_given_up: bool = False
    later: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class RunClosed:
    """The run ends at `end`, and later ones before their first byte."""

    session_id: int
    run: int
    end: End
    later: tuple[int, ...] = ()
    cut_short: tuple[int, ...] = ()
    """Those of these runs of which messages are lost: the publisher announced more, or nodes had more."""


@dataclass(frozen=True, slots=True)
class SilenceLimited:
    """The promise of a session's last run is recorded, or its end."""

    session_id: int


@dataclass(frozen=True, slots=True)
class Forgotten:
    session_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DiskJoined:
    """A disk of session replicas counts from now on, in place of the node's last one."""

    node: str


@dataclass(frozen=True, slots=True)
class DiskRestored:
    """The disk of that node counts again for the ends of runs."""

    node: str


@dataclass(frozen=True, slots=True)
class SegmentsTrimmed:
    """The oldest sealed segments were trimmed."""

    reason: TrimReason
    trimmed_ns: int
    log_start: int
    """The first position that is kept."""
    segments: int
    """Number of segments trimmed now."""
    size_bytes: int
    overridden: tuple[str, ...] = ()
    """Names of the subscribers whose hold was overridden."""


@dataclass(frozen=True, slots=True)
class HoldMoved:
    name: str
    position: int


@dataclass(frozen=True, slots=True)
class HoldReleased:
    name: str


@dataclass(frozen=True, slots=True)
class GroupReset:
    """The positions of a group, by their holds, were moved, or deleted (None)."""

    names: tuple[str, ...]
    position: int | None


@dataclass(frozen=True, slots=True)
class LeasesGranted:
    """The outcome of a request for leases, with the number that was granted, renewed or released now."""

    request: bytes
    tokens: tuple[int, ...]
    """For each requested lease its token; 0 if it was not acquired, or is not held with that token."""
    granted: int = 0
    renewed: int = 0
    released: int = 0


@dataclass(frozen=True, slots=True)
class LeasesExpired:
    names: tuple[str, ...]


class TableAnswer(Enum):
    """What became of a part of a commit to a lease's table."""

    WRITTEN = "written"
    NOT_OWNER = "not-owner"
    """The lease is not held with that token: another owner may have it."""
    OUT_OF_ORDER = "out-of-order"
    """The table has another number of commits, or an earlier part is missing."""
    NO_ROOM = "no-room"


@dataclass(frozen=True, slots=True)
class TableWritten:
    id: tuple[bytes, int]
    answer: TableAnswer
    commits: int
    """Number of commits of the table now."""


@dataclass(frozen=True, slots=True)
class TableDeleted:
    lease: str


class PostAnswer(Enum):
    """What became of a request to the owner of a lease."""

    WAITING = "waiting"
    ANSWERED = "answered"
    UNKNOWN = "unknown"
    """It was never posted, or it is forgotten."""
    NO_TABLE = "no-table"
    """The lease has no table: it never had an owner that kept something."""
    NO_ROOM = "no-room"


@dataclass(frozen=True, slots=True)
class RequestPosted:
    id: bytes
    answer: PostAnswer


@dataclass(frozen=True, slots=True)
class RequestWaits:
    """A request of an operator waits for the leader, or is known already."""


@dataclass(frozen=True, slots=True)
class RequestLapsed:
    """The time of a request is over."""

    may_be_done: bool
    """It may have been decided before. Otherwise it was not executed and never will be."""


@dataclass(frozen=True, slots=True)
class ClusterReset:
    """The epoch is over. The cluster continues in the next one."""

    is_hard: bool
    epoch: int


@dataclass(frozen=True, slots=True)
class ConfigurationChanged:
    """The configuration changed, or a roll was requested."""


@dataclass(frozen=True, slots=True)
class FeatureLevelRaised:
    level: int


@dataclass(frozen=True, slots=True)
class CommandRejected:
    """Nothing was changed.

    `is_fenced`: never possible, because another run or incarnation took over. `is_full`: a limit is reached.
    """

    why: str
    is_fenced: bool = False
    is_full: bool = False


@dataclass(frozen=True, slots=True)
class NotWaiting(CommandRejected):
    """A request of an operator was decided before, or is not known. The outcome is not repeated."""


Outcome: TypeAlias = (
    RangesMerged
    | RunOpened
    | RunFenced
    | RunClosed
    | SilenceLimited
    | Forgotten
    | DiskJoined
    | MembersRequested
    | MembersSettled
    | DiskRestored
    | SegmentsTrimmed
    | HoldMoved
    | HoldReleased
    | GroupReset
    | LeasesGranted
    | LeasesExpired
    | TableWritten
    | TableDeleted
    | RequestPosted
    | RequestWaits
    | RequestLapsed
    | ClusterReset
    | ConfigurationChanged
    | FeatureLevelRaised
    | CommandRejected
)
