"""The state that the commands add up to: the same on every node, and nothing of any node.

Pure. `apply` alone changes it; `state_encoding` turns it into bytes.
"""

from __future__ import annotations

import hashlib
from collections import Counter, deque
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

from rt.log.format.constants import NUMBER_MAX
from rt.log.format.segment import SEGMENT_HEADER_BYTES, SegmentId
from rt.log.format.segment_table import TrimReason
from rt.names import session_owner

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
SESSIONS_MAX: Final = 10_000
SESSIONS_PER_NAME_MAX: Final = 1_000
SESSION_IDLE_MINUTES: Final = 7 * 24 * 60
CLOSED_KEPT: Final = 1_000
"""Closed sessions that are remembered whole: some 100 KB of every snapshot. Their publishers may come again.
Of older ones only what `forgotten_key` makes is kept."""
FORGOTTEN_MAX: Final = 1 << 17
"""Incarnations that are remembered by their key alone: 1 MiB of every snapshot."""
FORGOTTEN_KEY_BYTES: Final = 8
DEDUP_IDS_MAX: Final = 10_000
"""Dedup ids of one owner: their watermarks are in every snapshot, and are never dropped."""
LIVES_MAX: Final = 1024
"""Maximum number of active runs of a session."""
RUNS_PER_SESSION: Final = 16
RUNS_PER_OWNER_MAX: Final = 4096
"""A session may always have `RUNS_PER_SESSION` active runs. It may have more while all sessions of its owner
together have fewer than this: each run is in every snapshot."""
REQUEST_BYTES: Final = 16
"""Of the ids of requests, which nobody guesses."""
BEGIN: Final = (0, SEGMENT_HEADER_BYTES)
"""Segment and offset of an X's first batch."""


class End(NamedTuple):
    """Where something ends in an X: offset of segment `roll`, in front of message `number`."""

    roll: int
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
    retention_minutes: int = TIME_MINUTES
    """Merged segments are trimmed so long after they were sealed; 0: never by age."""
    retention_bytes: int = 0
    """So are the oldest while all that is kept has more bytes; 0: never by size."""
    retention_disk_percent: int = DISK_PERCENT
    """And while a majority's disks are fuller than this; 0: never for want of space."""
    hold_bytes_max: int = HOLD_LIMIT_BYTES
    """Most bytes that are kept for holds alone; 0: holds hold nothing back."""
    sessions_max: int = SESSIONS_MAX
    """Most sessions that are open at once."""
    sessions_per_name_max: int = SESSIONS_PER_NAME_MAX
    """Most of them that belong to certificates of one name."""
    session_idle_minutes: int = SESSION_IDLE_MINUTES
    """A session is closed if no publisher of it came for so long; 0: never."""


CONFIGURABLE: Final = {
    "roll_bytes": (1, NUMBER_MAX),
    "roll_minutes": (0, 1 << 32),
    "session_bytes_max": (1, NUMBER_MAX),
    "retention_minutes": (0, 1 << 32),
    "retention_bytes": (0, NUMBER_MAX),
    "retention_disk_percent": (0, 101),
    "hold_bytes_max": (0, NUMBER_MAX),
    "sessions_max": (1, 1 << 20),
    "sessions_per_name_max": (1, 1 << 20),
    "session_idle_minutes": (0, 1 << 32),
}
"""Each value of `Configuration`: the least, and one past the greatest."""


@dataclass(frozen=True, slots=True)
class ActiveRun:
    """One start of a publisher that is not merged whole yet."""

    run: int
    run_id: bytes
    is_fenced: bool = False
    end: End | None = None
    """Where X ends, once it is closed."""


@dataclass(frozen=True, slots=True)
class ConsumedEnd:
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
    last_run: int = -1
    """The greatest X ever opened."""
    lives: tuple[ActiveRun, ...] = ()
    consumed: ConsumedEnd | None = None
    """Of the first of `lives`; None before its first range."""
    done: tuple[int, End] | None = None
    """The last X that was merged whole, and where it ended."""
    fenced_end: int = 0
    """Of every X below nothing more will be merged: a hard reset ended them."""

    @property
    def life(self) -> ActiveRun | None:
        """The life that is being merged."""
        return self.lives[0] if self.lives else None

    def life_of(self, run: int) -> ActiveRun | None:
        """The life of run number `run`, if it is not merged whole."""
        return next((life for life in self.lives if life.run == run), None)

    def with_life(self, life: ActiveRun) -> Session:
        """With another version of that life."""
        return replace(self, lives=tuple(life if one.run == life.run else one for one in self.lives))


class NodeDisk(NamedTuple):
    """The disk with the session copies of a node."""

    id: bytes
    """Made with the directory: one that was lost and made again is another disk."""
    joined: int
    """How many disks had joined, this one included."""
    is_whole: bool
    """Whatever the node ever said to hold of an open life, it still holds: see
    `sequencer.leader.session_close`."""


class SubscriberHold(NamedTuple):
    """What a named subscriber wants to be kept."""

    position: int
    """It has everything below."""
    at_ns: int
    """When it last said so, by the clock of the node that it told."""


class PendingRequest(NamedTuple):
    """A request of an operator."""

    until_ns: int
    """Later it is not carried out."""
    command: bytes
    """As in the log; empty: it was decided."""


class LeaseState(NamedTuple):
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


class ForcedQuorum(NamedTuple):
    """What the cluster came of when an operator had it go on with one node, the last time."""

    request: bytes
    """No other force has it."""
    node: str
    """Whose state and data it went on with."""


class ClearedRange(NamedTuple):
    """The last hard reset: nothing is kept of what was merged, or was to be, before it."""

    epoch: int
    position: int
    """The first one from then on."""
    session_id: int
    """Sessions below are older."""
    run: int
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
    next_run: int = 0
    """X of the segment that follows, if it is above this one's."""


@dataclass(slots=True)
class SequencerState:
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
    holds: dict[str, SubscriberHold] = field(default_factory=dict)
    """By name of the subscriber."""
    last_reset: LastReset | None = None
    cleared: ClearedRange | None = None
    asked: dict[bytes, PendingRequest] = field(default_factory=dict)
    """By id: requests of operators whose time is not over."""
    decided_ns: int = 0
    """The latest time at which one was decided: the clock that they go by."""
    force: ForcedQuorum | None = None
    leases: dict[str, LeaseState] = field(default_factory=dict)
    """By name: those that are held."""
    lease_token: int = 0
    """The last one that was given; never less than before."""
    let_go: deque[bytes] = field(default_factory=lambda: deque(maxlen=LET_GO_MAX))
    """The last requests of which a lease was released, or lapsed: they get no more."""
    closed: dict[int, None] = field(default_factory=dict)
    """Sessions of which nothing is open or to be merged, in the order in which they came to that."""
    forgotten: dict[bytes, None] = field(default_factory=dict)
    """Keys of incarnations whose record is gone, oldest first: they never come back."""
    by_name: dict[str, int] = field(default_factory=dict)
    """The newest incarnation of each name. Follows from `sessions`, as the next two do."""
    by_incarnation: dict[tuple[str, bytes], int] = field(default_factory=dict)
    """By name and incarnation."""
    open_of: Counter[str] = field(default_factory=Counter)
    """How many sessions are open, by the certificate's name."""
    runs_of: Counter[str] = field(default_factory=Counter)
    """How many runs are active, by the certificate's name."""
    encoded: dict[int, tuple[Session, bytes]] = field(default_factory=dict, compare=False, repr=False)
    """What `state_encoding` made of sessions, by id: most of them never change again."""

    @property
    def log_start(self) -> int:
        """The first position that is not trimmed."""
        return next((one.first for one in self.segments if not one.is_trimmed), self.merged.first)

    @property
    def open_count(self) -> int:
        """How many sessions are open."""
        return len(self.sessions) - len(self.closed)

    def put(self, session: Session) -> None:
        """Add a session, or another version of it."""
        known = self.sessions.get(session.id)
        self.sessions[session.id] = session
        before, now = 0 if known is None else len(known.lives), len(session.lives)
        if known is None:
            self._index(session)
        if before != now:
            self._count(session, before, now)
        if now:
            self.closed.pop(session.id, None)
        elif before or known is None:
            self.closed[session.id] = None

    def forget(self, session_id: int) -> None:
        """Drop the record of a closed session; its incarnation stays fenced."""
        del self.closed[session_id]
        session = self.sessions.pop(session_id)
        self.encoded.pop(session_id, None)
        del self.by_incarnation[session.name, session.incarnation]
        if self.by_name[session.name] == session_id:
            del self.by_name[session.name]
        self.forgotten[forgotten_key(session.name, session.incarnation)] = None
        while len(self.forgotten) > FORGOTTEN_MAX:
            del self.forgotten[next(iter(self.forgotten))]

    def is_forgotten(self, name: str, incarnation: bytes) -> bool:
        """Whether the record of that incarnation is gone."""
        return forgotten_key(name, incarnation) in self.forgotten

    def index(self) -> None:
        """Make what follows from `sessions`."""
        for _, session in sorted(self.sessions.items()):  # So the newest of a name is the last one.
            self._index(session)
            if session.lives:
                self._count(session, 0, len(session.lives))

    def _index(self, session: Session) -> None:
        if not session.is_superseded:  # Its successor may be forgotten before it.
            self.by_name[session.name] = session.id
        self.by_incarnation[session.name, session.incarnation] = session.id

    def _count(self, session: Session, before: int, now: int) -> None:
        owner = session_owner(session.name)
        self.open_of[owner] += bool(now) - bool(before)
        self.runs_of[owner] += now - before
        if not self.open_of[owner]:
            del self.open_of[owner], self.runs_of[owner]

    def session_of(self, name: str) -> Session | None:
        """The newest incarnation of that name."""
        found = self.by_name.get(name)
        return None if found is None else self.sessions[found]


def forgotten_key(name: str, incarnation: bytes) -> bytes:
    """What is remembered of an incarnation whose record is gone.

    That of a new one, which is drawn at random, is among `FORGOTTEN_MAX` others once in 10^14 times.
    """
    return hashlib.blake2b(name.encode() + incarnation, digest_size=FORGOTTEN_KEY_BYTES).digest()
