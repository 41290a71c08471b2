"""The outcomes of applied commands, on which other parts act. Pure."""

from __future__ import annotations

from enum import Enum
from typing import TypeAlias

from msgspec import Struct

from rt.log.format.segment_table import TrimReason
from sequencer.state.state import End, MemberRequest
from sequencer.state.write_plan import WritePlan


class RangesMerged(Struct, frozen=True):
    plan: WritePlan


class MembersRequested(Struct, frozen=True):
    number: int


class MembersSettled(Struct, frozen=True):
    """`why`: why the request was not carried out completely; empty if it was."""

    request: MemberRequest
    why: str


class RunOpened(Struct, frozen=True):
    """A run is open: nodes accept its bytes."""

    session_id: int
    run: int


class RunFenced(Struct, frozen=True):
    """No node accepts another byte of these runs. `is_given_up`: an operator abandoned the rest of them."""

    session_id: int
    run: int
    is_given_up: bool = False
    later: tuple[int, ...] = ()


class RunClosed(Struct, frozen=True):
    """The run ends at `end`. The runs `later` end before their first byte."""

    session_id: int
    run: int
    end: End
    later: tuple[int, ...] = ()
    cut_short: tuple[int, ...] = ()
    """The runs, of those closed here, that lost messages: the publisher announced more, or nodes had more."""


class SilenceLimited(Struct, frozen=True):
    """The promise of a session's last run, or the end of that promise, is recorded."""

    session_id: int


class Forgotten(Struct, frozen=True):
    session_ids: tuple[int, ...]


class DiskJoined(Struct, frozen=True):
    """A disk of session replicas counts from now on, instead of the node's previous disk."""

    node: str


class DiskRestored(Struct, frozen=True):
    """The disk of that node counts again for the ends of runs."""

    node: str


class SegmentsTrimmed(Struct, frozen=True):
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


class HoldMoved(Struct, frozen=True):
    name: str
    position: int


class HoldReleased(Struct, frozen=True):
    name: str


class GroupReset(Struct, frozen=True):
    """The positions of a group were moved to `position`, or deleted (None). `names` are the names of their
    holds.
    """

    names: tuple[str, ...]
    position: int | None


class LeasesGranted(Struct, frozen=True):
    """The outcome of a request for leases, with the number of leases that were granted, renewed or released
    now.
    """

    request: bytes
    tokens: tuple[int, ...]
    """The token of each requested lease; 0 if the lease was not acquired, or is not held with the token in
    the request.
    """
    granted: int = 0
    renewed: int = 0
    released: int = 0


class LeasesExpired(Struct, frozen=True):
    names: tuple[str, ...]


class TableAnswer(Enum):
    """The result for a part of a commit to a lease's table."""

    WRITTEN = "written"
    NOT_OWNER = "not-owner"
    """The lease is not held with that token: another owner may have it."""
    OUT_OF_ORDER = "out-of-order"
    """The table has another number of commits, or an earlier part is missing."""
    NO_ROOM = "no-room"


class TableWritten(Struct, frozen=True):
    id: tuple[bytes, int]
    answer: TableAnswer
    commits: int
    """Number of commits of the table now."""


class TableDeleted(Struct, frozen=True):
    lease: str


class PostAnswer(Enum):
    """The status of a request to the owner of a lease."""

    WAITING = "waiting"
    ANSWERED = "answered"
    UNKNOWN = "unknown"
    """It was never posted, or it is forgotten."""
    NO_TABLE = "no-table"
    """The lease has no table: it never had an owner that kept something."""
    NO_ROOM = "no-room"


class RequestPosted(Struct, frozen=True):
    id: bytes
    answer: PostAnswer


class RequestWaits(Struct, frozen=True):
    """A request of an operator waits for the leader, or is known already."""


class RequestLapsed(Struct, frozen=True):
    """The time of a request is over."""

    may_be_done: bool
    """It may have been decided before. Otherwise it was not executed and never will be."""


class ClusterReset(Struct, frozen=True):
    """The epoch is over. The cluster continues in the next one."""

    is_hard: bool
    epoch: int


class ConfigurationChanged(Struct, frozen=True):
    """The configuration changed, or a roll was requested."""


class FeatureLevelRaised(Struct, frozen=True):
    level: int


class CommandRejected(Struct, frozen=True):
    """Nothing was changed.

    `is_fenced`: the command is never possible, because another run or incarnation took over. `is_full`: a
    limit is reached.
    """

    why: str
    is_fenced: bool = False
    is_full: bool = False


class NotWaiting(CommandRejected, frozen=True):
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
