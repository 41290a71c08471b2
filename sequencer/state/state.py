"""The replicated state of the sequencer: the result of all commands, equal on every node.

Pure. Only `apply` changes it; `state_codec` encodes it.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field  # noqa: TID251
from typing import Final, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from rt.log.format.segment import SEGMENT_HEADER_BYTES, SegmentId
from rt.log.format.segment_table import TrimReason
from rt.names import session_owner
from sequencer.state.configuration import Configuration
from sequencer.state.forgotten_sessions import ForgottenSessions
from sequencer.state.leases.table_rows import LeaseTables

HOLDS_MAX: Final = 1_000
"""Named subscribers and groups' positions: about 100 KB of every snapshot."""
HOLDS_PER_NAME_MAX: Final = 256
"""Maximum number of positions of groups with one certificate's name, so that no name uses up all holds."""
ASKED_MAX: Final = 256
"""Maximum number of operators' requests that wait, or whose time is not over: the requests of a few
seconds.
"""
LEASES_MAX: Final = 4096
"""Leases held at the same time: about 300 KB of every snapshot, ten times that with the longest names."""
LEASES_PER_GROUP_MAX: Final = 1024
"""Limits each group, so that no group of owners uses up all leases."""
RELEASED_MAX: Final = 1024
"""Remembered requests whose leases were released: 18 KB of every snapshot. A repeated request that was
dropped from this list counts as a new one; its lease expires."""
CLOSED_KEPT: Final = 1_000
"""Closed sessions whose whole record is kept: about 100 KB of every snapshot. Their publishers may come back.
Of older ones only a key is kept: see `sequencer.state.forgotten_sessions`."""
DEDUP_IDS_MAX: Final = 10_000
"""Maximum number of dedup ids of one owner: their watermarks are in every snapshot, and are never dropped."""
RUNS_MAX: Final = 1024
"""Maximum number of active runs of a session."""
RUNS_PER_SESSION: Final = 16
RUNS_PER_OWNER_MAX: Final = 4096
"""A session may always have `RUNS_PER_SESSION` active runs. It may have more while all sessions of its owner
together have fewer than this: each run is in every snapshot."""
REQUEST_BYTES: Final = 16
"""Size of request ids, which cannot be guessed."""
BEGIN: Final = (0, SEGMENT_HEADER_BYTES)
"""Roll and offset of a run's first batch."""


class End(NamedTuple):
    """An end within a run: offset of segment `roll`, before message `number`."""

    roll: int
    offset: int
    number: int


class ActiveRun(Struct, frozen=True):
    """A run of a session that is not merged completely."""

    run: int
    run_id: bytes
    is_fenced: bool = False
    end: End | None = None
    """Where the run ends, once it is closed."""
    announced: End | None = None
    """The end up to which the publisher said that it has the run, if a fenced run might end before it."""


class ConsumedEnd(Struct, frozen=True):
    """The end up to which the first of a session's runs is merged, and the segment's running checksum
    there.
    """

    end: End
    chain: int


class Session(Struct, frozen=True):
    id: int
    name: str
    incarnation: bytes
    dedup_id: str | None
    waits_for: int = 0
    """The incarnation that must be merged completely before this one; 0: none."""
    is_superseded: bool = False
    """A newer incarnation was opened, so no run of this one is opened any more."""
    last_run: int = -1
    """The greatest run number ever opened."""
    active_runs: tuple[ActiveRun, ...] = ()
    consumed: ConsumedEnd | None = None
    """The end up to which the first of `active_runs` is merged; None before its first range is merged."""
    done: tuple[int, End] | None = None
    """The last run that was merged completely, and its end."""
    fenced_end: int = 0
    """A hard reset ended all runs below this number: nothing more of them is merged."""
    runs_cut_short: int = 0
    """Number of runs that were closed before the end that the publisher had announced."""
    silence_ms_max: int = 0
    """The publisher of `last_run` promised to be silent for no longer than this; 0: no promise, or it has
    ended.
    """
    is_closed_in_order: bool = False
    """Whether the publisher was closed in order, or an operator closed the session."""

    @property
    def active(self) -> ActiveRun | None:
        """The run that is being merged."""
        return self.active_runs[0] if self.active_runs else None

    def run_of(self, run: int) -> ActiveRun | None:
        """The run with this number, if it is not merged completely."""
        return next((active for active in self.active_runs if active.run == run), None)

    def with_run(self, active: ActiveRun) -> Session:
        return replace(
            self, active_runs=tuple(active if one.run == active.run else one for one in self.active_runs)
        )


class NodeDisk(NamedTuple):
    """A node's disk of session replicas."""

    id: bytes
    """Created with the directory: a directory that was lost and created again is another disk."""
    joined: int
    """Number of disks that had joined, including this one."""
    is_whole: bool
    """Whether the disk holds everything that the node ever reported of open runs: see
    `sequencer.leader.session_close`.
    """
    address: str = ""
    """host:port of the node's gRPC server when the disk joined; empty if the node did not report it."""


class SubscriberHold(NamedTuple):
    position: int
    """The first position that is held."""
    at_ns: int
    """When it was last moved, by the clock of the node that received the acknowledgement."""


class PendingRequest(NamedTuple):
    """A request of an operator that waits or was decided."""

    until_ns: int
    """The request is not executed after this time."""
    command: bytes
    """The operation, encoded as in the log; empty if the request was decided."""


class LeaseState(NamedTuple):
    owner: str
    token: int
    """Greater than every token granted before, of any lease."""
    duration_ms: int
    """The lease expires if it is not renewed for this time."""
    request: bytes
    renewals: int
    attempt: int = 0
    """The owner's attempts to change the lease's table are refused if they are earlier than this one. A new
    owner starts at 0.
    """


class MemberRequest(NamedTuple):
    """An operator's change of the members that is being carried out."""

    number: int
    adds: str
    """The new node; empty: none."""
    address: str
    """host:port of its Raft."""
    removes: str
    """The node that is removed; empty: none."""

    @property
    def brief(self) -> str:
        if self.adds and self.removes:
            return f"replace {self.removes} by {self.adds}"
        return f"add {self.adds}" if self.adds else f"remove {self.removes}"


class SettledMembers(NamedTuple):
    """The last change of the members that ended. `why`: why it was not carried out whole; empty: it was."""

    number: int
    why: str


class LastReset(NamedTuple):
    """The reset that started the current epoch."""

    is_hard: bool
    epoch: int
    at_ns: int
    request: bytes
    forced_by: str


class ForcedQuorum(NamedTuple):
    """The last forced reset, in which the cluster continued with one node."""

    request: bytes
    """Unique to this forced reset."""
    node: str
    """The node with whose state and data the cluster continued."""


class ClearedRange(NamedTuple):
    """The last hard reset, which dropped everything merged, or waiting to be merged, before it."""

    epoch: int
    position: int
    """The first position after it."""
    session_id: int
    """Sessions with a lower id are older than it."""
    run: int
    """The run number of merged segments after it."""


class MergedSegment(Struct, frozen=True):
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
        """Whether its bytes were trimmed, or will be soon."""
        return self.reason is not TrimReason.NONE

    def trimmed(self, reason: TrimReason, now_ns: int) -> MergedSegment:
        return replace(self, trimmed_ns=now_ns, reason=reason)


class MergedEnd(Struct):
    """The active end of the merged log."""

    segment: SegmentId | None = None
    """None before the first instruction."""
    offset: int = SEGMENT_HEADER_BYTES
    first: int = 0
    created_ns: int = 0
    declared: set[int] = set()
    """Session ids that this segment has declared."""
    chain: int = 0
    total_bytes: int = 0
    """Size of all merged segments, headers included."""
    next_run: int = 0
    """The run number of the next segment, if it is greater than the run number of this segment."""


@dataclass(slots=True)
class SequencerState:
    """Everything on which the nodes of a stream agree."""

    cluster: bytes
    configuration: Configuration = field(default_factory=Configuration)
    instruction: int = 0
    """The last merged instruction."""
    sequenced_ns: int = 0
    position: int = 0
    """The next position."""
    merged: MergedEnd = field(default_factory=MergedEnd)
    sessions: dict[int, Session] = field(default_factory=dict)
    wanted: dict[str, int] = field(default_factory=dict)
    """By dedup id: the message id that is expected next, after the first one was merged."""
    segments: deque[MergedSegment] = field(default_factory=deque)
    """Sealed merged segments, oldest first. Trimmed ones come before the others."""
    next_session_id: int = 1
    disks: dict[str, NodeDisk] = field(default_factory=dict)
    """By node: the disk that joined last."""
    joins: int = 0
    """Number of disks that have joined."""
    holds: dict[str, SubscriberHold] = field(default_factory=dict)
    """By name of the subscriber."""
    last_reset: LastReset | None = None
    cleared: ClearedRange | None = None
    asked: dict[bytes, PendingRequest] = field(default_factory=dict)
    """By id: requests of operators whose time is not over."""
    decided_ns: int = 0
    """The latest time of a decision: the clock of requests."""
    force: ForcedQuorum | None = None
    leases: dict[str, LeaseState] = field(default_factory=dict)
    """By name: the leases that are held."""
    lease_token: int = 0
    """The last token that was granted. It never decreases."""
    released: deque[bytes] = field(default_factory=lambda: deque(maxlen=RELEASED_MAX))
    """The last requests of which a lease was released or has expired: no more leases are granted to them."""
    tables: LeaseTables = field(default_factory=LeaseTables)
    """The tables of leases, held or not."""
    closed: dict[int, None] = field(default_factory=dict)
    """Sessions without an open or waiting run, in the order in which they were closed."""
    forgotten: ForgottenSessions = field(default_factory=ForgottenSessions)
    """The incarnations whose records were deleted."""
    runs_cut_short: int = 0
    """Number of runs cut short in all sessions, also in sessions whose records were deleted."""
    feature_level: int = 1
    """See `sequencer.state.feature_level`."""
    member_requests: int = 0
    """Number of changes of the members that were ever requested."""
    member_request: MemberRequest | None = None
    settled_members: SettledMembers | None = None
    by_name: dict[str, int] = field(init=False, default_factory=dict)
    """The id of the newest incarnation of each name. Derived from `sessions`, like the next four."""
    by_incarnation: dict[tuple[str, bytes], int] = field(init=False, default_factory=dict)
    """Session ids by name and incarnation."""
    open_of: Counter[str] = field(init=False, default_factory=Counter)
    """Number of open sessions, by name of the certificate."""
    runs_of: Counter[str] = field(init=False, default_factory=Counter)
    """Number of active runs, by name of the certificate."""
    promising: dict[int, None] = field(init=False, default_factory=dict, repr=False)
    """Sessions with a limit of silence that were not superseded."""
    encoded: dict[int, tuple[Session, bytes]] = field(
        init=False, default_factory=dict, compare=False, repr=False
    )
    """The encoded sessions of `state_codec`, by id, because most sessions never change again."""

    @property
    def log_start(self) -> int:
        """The first position that is not trimmed."""
        return next((one.first for one in self.segments if not one.is_trimmed), self.merged.first)

    @property
    def open_count(self) -> int:
        """Number of open sessions."""
        return len(self.sessions) - len(self.closed)

    def put(self, session: Session) -> None:
        """Add a session, or replace it by a new version."""
        known = self.sessions.get(session.id)
        self.sessions[session.id] = session
        before, now = 0 if known is None else len(known.active_runs), len(session.active_runs)
        if known is None:
            self._index(session)
        if before != now:
            self._count(session, before, now)
        self._note_promise(session)
        if now:
            self.closed.pop(session.id, None)
        elif before or known is None:
            self.closed[session.id] = None

    def forget(self, session_ids: Iterable[int]) -> None:
        """Delete the records of closed sessions. Their incarnations stay fenced."""
        gone = list[tuple[str, bytes]]()
        for session_id in session_ids:
            del self.closed[session_id]
            session = self.sessions.pop(session_id)
            self.encoded.pop(session_id, None)
            self.promising.pop(session_id, None)
            del self.by_incarnation[session.name, session.incarnation]
            if self.by_name.get(session.name) == session_id:
                del self.by_name[session.name]
            gone.append((session.name, session.incarnation))
        self.forgotten.add(gone)

    def index(self) -> None:
        """Build the fields that are derived from `sessions`."""
        for _, session in sorted(self.sessions.items()):  # Ascending, so the newest of a name comes last.
            self._index(session)
            if session.active_runs:
                self._count(session, 0, len(session.active_runs))

    def _index(self, session: Session) -> None:
        if not session.is_superseded:  # Its successor may be forgotten before it.
            self.by_name[session.name] = session.id
        self.by_incarnation[session.name, session.incarnation] = session.id
        self._note_promise(session)

    def _note_promise(self, session: Session) -> None:
        if session.silence_ms_max and not session.is_superseded:
            self.promising[session.id] = None
        else:
            self.promising.pop(session.id, None)

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
