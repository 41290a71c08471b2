"""The state that the commands add up to: the same on every node, and nothing of any node.

Pure. `apply` alone changes it; `state_encoding` turns it into bytes.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

from rt.log.layout import NUMBER_MAX
from rt.log.segment import SEGMENT_HEADER_BYTES, SegmentId
from rt.log.table import TrimReason

ROLL_BYTES: Final = 1 << 30
ROLL_MINUTES: Final = 0
SESSION_BYTES_MAX: Final = 16 << 20
TIME_MINUTES: Final = 7 * 24 * 60
DISK_PERCENT: Final = 90
HOLD_LIMIT_BYTES: Final = 10 << 30
HOLDS_MAX: Final = 1_000
"""Named subscribers that hold data back: some 100 KB of every snapshot."""
ASKED_MAX: Final = 256
"""Requests of operators that wait, or whose time is not over: some seconds' of them."""
LEASES_MAX: Final = 4096
"""Held at once: some 300 KB of every snapshot, ten times as much with the longest names."""
LEASES_PER_GROUP_MAX: Final = 1024
"""So that no group of holders keeps the others from theirs."""
LET_GO_MAX: Final = 1024
"""Requests of which leases were let go of: 18 KB of every snapshot. What is repeated when so many others were
let go of since is taken for a new one; its lease lapses."""
LIVES_MAX: Final = 1024
"""Starts of one publisher that wait to be merged."""
REQUEST_BYTES: Final = 16
"""Of the ids of requests, which nobody guesses."""
BEGIN: Final = (0, SEGMENT_HEADER_BYTES)
"""Segment and offset of an X's first batch."""


class End(NamedTuple):
    """Where something ends in an X: offset of segment `y`, in front of message `number`."""

    y: int
    offset: int
    number: int


@dataclass(frozen=True, slots=True)
class Configuration:
    """What operators change by command."""

    roll_bytes: int = ROLL_BYTES
    """A merged segment that has so many bytes is followed by the next."""
    roll_minutes: int = ROLL_MINUTES
    """So is one that is so old; 0: never by age."""
    session_bytes_max: int = SESSION_BYTES_MAX
    """Most bytes of one session in one instruction; one batch may be larger."""
    time_minutes: int = TIME_MINUTES
    """Merged segments are trimmed so long after they were sealed; 0: never by age."""
    limit_bytes: int = 0
    """So are the oldest while all that is kept has more bytes; 0: never by size."""
    disk_percent: int = DISK_PERCENT
    """And while a majority's disks are fuller than this; 0: never for want of space."""
    hold_limit_bytes: int = HOLD_LIMIT_BYTES
    """Most bytes that are kept for holds alone; 0: holds hold nothing back."""


CONFIGURABLE: Final = {
    "roll_bytes": (1, NUMBER_MAX),
    "roll_minutes": (0, 1 << 32),
    "session_bytes_max": (1, NUMBER_MAX),
    "time_minutes": (0, 1 << 32),
    "limit_bytes": (0, NUMBER_MAX),
    "disk_percent": (0, 101),
    "hold_limit_bytes": (0, NUMBER_MAX),
}
"""Each value of `Configuration`: the least, and one past the greatest."""


@dataclass(frozen=True, slots=True)
class Life:
    """One start of a publisher that is not merged whole yet."""

    x: int
    life: bytes
    is_fenced: bool = False
    end: End | None = None
    """Where X ends, once it is closed."""


@dataclass(frozen=True, slots=True)
class Consumed:
    """How far the first of a session's lives is merged, and the segment's chain there."""

    end: End
    chain: int


@dataclass(frozen=True, slots=True)
class Session:
    """One incarnation of a session."""

    id: int
    name: str
    incarnation: bytes
    dedup_id: str | None
    waits_for: int = 0
    """The incarnation of the name that is merged whole before this one is; 0: none."""
    is_superseded: bool = False
    """A newer incarnation of the name was opened: nothing more is opened here."""
    last_x: int = -1
    """The greatest X ever opened."""
    lives: tuple[Life, ...] = ()
    consumed: Consumed | None = None
    """Of the first of `lives`; None before its first range."""
    done: tuple[int, End] | None = None
    """The last X that was merged whole, and where it ended."""
    fenced_end: int = 0
    """Of every X below nothing more will be merged: a hard reset ended them."""

    @property
    def life(self) -> Life | None:
        """The life that is being merged."""
        return self.lives[0] if self.lives else None

    def life_of(self, x: int) -> Life | None:
        """The life of session number `x`, if it is not merged whole."""
        return next((life for life in self.lives if life.x == x), None)

    def with_life(self, life: Life) -> Session:
        """With another version of that life."""
        return replace(self, lives=tuple(life if one.x == life.x else one for one in self.lives))


class NodeDisk(NamedTuple):
    """The disk with the session copies of a node."""

    id: bytes
    """Made with the directory: one that was lost and made again is another disk."""
    joined: int
    """How many disks had joined, this one included."""
    is_whole: bool
    """Whatever the node ever said to hold of an open life, it still holds: see `sequencer.ends`."""


class Hold(NamedTuple):
    """What a named subscriber wants to be kept."""

    position: int
    """It has everything below."""
    at_ns: int
    """When it last said so, by the clock of the node that it told."""


class Asked(NamedTuple):
    """A request of an operator."""

    until_ns: int
    """Later it is not carried out."""
    command: bytes
    """As in the log; empty: it was decided."""


class Lease(NamedTuple):
    """A right that somebody has."""

    owner: str
    token: int
    """Greater than every one that was given before, of whatever lease."""
    duration_ms: int
    """It lapses when it is not renewed for so long."""
    request: bytes
    """By which it was acquired."""
    renewals: int


class LastReset(NamedTuple):
    """The reset with which the present epoch began."""

    is_hard: bool
    epoch: int
    at_ns: int
    request: bytes
    forced_by: str


class Force(NamedTuple):
    """What the cluster came of when an operator had it go on with one node, the last time."""

    request: bytes
    """No other force has it."""
    node: str
    """Whose state and data it went on with."""


class Cleared(NamedTuple):
    """The last hard reset: nothing is kept of what was merged, or was to be, before it."""

    epoch: int
    position: int
    """The first one from then on."""
    session_id: int
    """Sessions below are older."""
    x: int
    """Of merged segments from then on."""


@dataclass(frozen=True, slots=True)
class MergedSegment:
    """A merged segment that is sealed, and perhaps trimmed."""

    id: SegmentId
    first: int
    end: int
    size_bytes: int
    created_ns: int
    sealed_ns: int
    trimmed_ns: int = 0
    reason: TrimReason = TrimReason.NONE

    @property
    def is_trimmed(self) -> bool:
        """Whether its bytes are gone, or about to be."""
        return self.reason is not TrimReason.NONE

    def trimmed(self, reason: TrimReason, now_ns: int) -> MergedSegment:
        """This segment with its bytes gone."""
        return replace(self, trimmed_ns=now_ns, reason=reason)


@dataclass(slots=True)
class MergedEnd:
    """The growing end of the merged log."""

    segment: SegmentId | None = None
    """None before the first instruction."""
    offset: int = SEGMENT_HEADER_BYTES
    first: int = 0
    created_ns: int = 0
    declared: set[int] = field(default_factory=set)
    """Session ids that this segment has declared."""
    chain: int = 0
    total_bytes: int = 0
    """Of all merged segments, headers included."""
    next_x: int = 0
    """X of the segment that follows, if it is above this one's."""


@dataclass(slots=True)
class State:
    """Everything the nodes of a stream agree on."""

    cluster: bytes
    configuration: Configuration = Configuration()
    instruction: int = 0
    """The last one merged."""
    sequenced_ns: int = 0
    position: int = 0
    """The position that comes next."""
    merged: MergedEnd = field(default_factory=MergedEnd)
    sessions: dict[int, Session] = field(default_factory=dict)
    wanted: dict[str, int] = field(default_factory=dict)
    """The next id of each dedup id, once one was merged."""
    segments: deque[MergedSegment] = field(default_factory=deque)
    """Sealed merged segments, oldest first; the trimmed ones come before the others."""
    next_session_id: int = 1
    disks: dict[str, NodeDisk] = field(default_factory=dict)
    """By node: the disk that joined last."""
    joins: int = 0
    """How many disks have joined."""
    holds: dict[str, Hold] = field(default_factory=dict)
    """By name of the subscriber."""
    last_reset: LastReset | None = None
    cleared: Cleared | None = None
    asked: dict[bytes, Asked] = field(default_factory=dict)
    """By id: requests of operators whose time is not over."""
    decided_ns: int = 0
    """The latest time at which one was decided: the clock that they go by."""
    force: Force | None = None
    leases: dict[str, Lease] = field(default_factory=dict)
    """By name: those that are held."""
    lease_token: int = 0
    """The last one that was given; never less than before."""
    let_go: deque[bytes] = field(default_factory=lambda: deque(maxlen=LET_GO_MAX))
    """The last requests of which a lease was released, or lapsed: they get no more."""
    by_name: dict[str, int] = field(default_factory=dict)
    """The newest incarnation of each name. Follows from `sessions`."""
    encoded: dict[int, tuple[Session, bytes]] = field(default_factory=dict, compare=False, repr=False)
    """What `state_encoding` made of sessions, by id: most of them never change again."""

    @property
    def log_start(self) -> int:
        """The first position that is not trimmed."""
        return next((one.first for one in self.segments if not one.is_trimmed), self.merged.first)

    def session_of(self, name: str) -> Session | None:
        """The newest incarnation of that name."""
        found = self.by_name.get(name)
        return None if found is None else self.sessions[found]
