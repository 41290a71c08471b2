"""What both sides of a replication stream say beside the items of the log, as values.

Pure. `proto/rt/v1/replication.proto` has them on the wire, and says what each field means; here stands what
is checked when one is made, so that an illegal one cannot exist. `replicator/protocol/codec.py` carries them
over.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Final, Literal, NamedTuple, TypeAlias

from replicator.protocol.messages import CompleteUpTo, LogOffset, LogTrimmed, Run, SegmentSealed
from rt.cluster_epoch import EPOCH_END
from rt.log.format.constants import NUMBER_MAX, TOPIC_BYTES_MAX
from rt.log.read.waypoint import Waypoint
from rt.names import check_dedup_id, check_name, check_session_name

PROTOCOL_VERSION: Final = 1
TOPICS_WANTED_MAX: Final = 1024
"""Topics a filtered pull may name; one that wants more takes all and filters itself."""
MEMBERS_MAX: Final = 7
WHY_CHARACTERS_MAX: Final = 1000
WAYPOINTS_MAX: Final = 4096

NOWHERE: Final = LogOffset(0, 0, 0)
"""Before the first byte of a log."""
Wanted: TypeAlias = int | Literal["earliest", "latest"]


@dataclass(frozen=True, slots=True)
class PushHello:
    """A push client's first word: whose log it brings. `cluster` is empty before the first push."""

    stream: str
    session: str
    incarnation: bytes
    dedup_id: str | None = None
    cluster: bytes = b""

    def __post_init__(self) -> None:
        check_name(self.stream, kind="stream")
        check_session_name(self.session)
        _check_id("incarnation", self.incarnation)
        _check_id("cluster", self.cluster, may_be_empty=True)
        if self.dedup_id is not None:
            check_dedup_id(self.dedup_id)


@dataclass(frozen=True, slots=True)
class PushStart:
    """The answer to a hello: who the node is, and from where on it wants the log (None: the oldest kept)."""

    cluster: bytes
    epoch: int
    members: int
    node: str
    place: LogOffset | None = None

    def __post_init__(self) -> None:
        _check_id("cluster", self.cluster)
        _check_bound("epoch", self.epoch, EPOCH_END)
        check_name(self.node, kind="node")
        if not 1 <= self.members <= MEMBERS_MAX:
            raise ValueError(f"a cluster of {self.members} members: 1 to {MEMBERS_MAX}")
        if self.place is not None:
            check_place(self.place)


@dataclass(frozen=True, slots=True)
class OpenReply:
    """The answer to a life: its chunks are welcome."""

    run: int

    def __post_init__(self) -> None:
        _check_bound("X", self.run, 2**32)


class PushProgress(NamedTuple):
    """How far a session is safe: `durable` on this node, `merged` in the cluster; numbers are one past.

    Made for every chunk, so it is checked only where it comes from a peer: `check_progress`.
    """

    durable: LogOffset = NOWHERE
    durable_number: int = 0
    merged_run: int = 0
    merged_number: int = 0
    merged: LogOffset = NOWHERE


@dataclass(frozen=True, slots=True)
class Acknowledged:
    """The subscriber of that name, which is the certificate's, wants nothing below `position` any more."""

    name: str
    position: int

    def __post_init__(self) -> None:
        check_name(self.name, kind="subscriber")
        _check_bound("position", self.position, NUMBER_MAX)


@dataclass(frozen=True, slots=True)
class HoldRejected:
    """Nothing is held back for the subscriber of that name, which is the certificate's, and why not."""

    name: str
    why: str

    def __post_init__(self) -> None:
        check_name(self.name, kind="subscriber")
        if len(self.why) > WHY_CHARACTERS_MAX or not self.why.isprintable():
            raise ValueError(f"no reason: {self.why[:50]!r}, {len(self.why)} characters")


@dataclass(frozen=True, slots=True)
class PullRange:
    """Only positions up to `end` are wanted; with `outline_bytes`, only how bytes lie along them."""

    end: int
    outline_bytes: int = 0

    def __post_init__(self) -> None:
        _check_bound("end of the range", self.end, NUMBER_MAX + 1)
        _check_bound("outline bytes", self.outline_bytes, NUMBER_MAX)


@dataclass(frozen=True, slots=True)
class PullMerged:
    """The merged log is wanted.

    A receiver that has some of it says where its whole blocks end (`place`, position `end`), of which cluster
    they are, and the header checksum of the last one (`chain`; 0 if there is none in that segment). One that
    has none (`place` None) says at which position it wants to start. `topics`: empty for all of them.
    `acknowledged`: what a named subscriber needs no more, if one is known that needs the rest. With `range`
    it keeps nothing, and only the position counts.
    """

    cluster: bytes = b""
    place: LogOffset | None = None
    end: int = 0
    chain: int = 0
    position: Wanted = "earliest"
    topics: tuple[str, ...] = ()
    name: str | None = None
    acknowledged: Acknowledged | None = None
    range: PullRange | None = None

    def __post_init__(self) -> None:
        _check_id("cluster", self.cluster, may_be_empty=self.place is None)
        if self.range is not None and (self.place is not None or self.topics):
            raise ValueError("a range is asked for by its positions")
        if self.place is not None:
            check_place(self.place)
        _check_bound("end", self.end, NUMBER_MAX + 1)
        _check_bound("chain", self.chain, 2**32)
        if isinstance(self.position, int):
            _check_bound("position", self.position, NUMBER_MAX + 1)
        if len(self.topics) > TOPICS_WANTED_MAX:
            raise ValueError(f"{len(self.topics)} topics wanted: {TOPICS_WANTED_MAX} at most")
        for topic in self.topics:
            if len(topic.encode()) > TOPIC_BYTES_MAX:
                raise ValueError(f"a topic of more than {TOPIC_BYTES_MAX} bytes")
        if self.name is not None:
            check_name(self.name, kind="subscriber")


@dataclass(frozen=True, slots=True)
class PullSession:
    """A node's copy of a session is wanted, from `place` on, where the segment's chain is `chain`."""

    session_id: int
    place: LogOffset = NOWHERE
    chain: int = 0

    def __post_init__(self) -> None:
        _check_bound("session id", self.session_id, 2**32)
        check_place(self.place)
        _check_bound("chain", self.chain, 2**32)


@dataclass(frozen=True, slots=True)
class PullHello:
    """A pull client's first word: which log of which stream it wants."""

    stream: str
    log: PullMerged | PullSession

    def __post_init__(self) -> None:
        check_name(self.stream, kind="stream")


@dataclass(frozen=True, slots=True)
class PullStart:
    """The answer to a hello: whose bytes come, from `place` on, which is position (or number) `first`.

    `cluster` is the cluster's id, or a session's incarnation; `session` and `dedup_id` are a session's. `end`
    is one past the last position that the node's merged log has now.
    """

    cluster: bytes
    epoch: int
    node: str
    place: LogOffset
    first: int
    session: str | None = None
    dedup_id: str | None = None
    end: int = 0

    def __post_init__(self) -> None:
        _check_id("cluster", self.cluster)
        _check_bound("epoch", self.epoch, EPOCH_END)
        check_name(self.node, kind="node")
        check_place(self.place)
        _check_bound("first", self.first, NUMBER_MAX + 1)
        _check_bound("end", self.end, NUMBER_MAX + 1)
        if self.session is not None:
            check_session_name(self.session)
        if self.dedup_id is not None:
            check_dedup_id(self.dedup_id)


@dataclass(frozen=True, slots=True)
class LogOutline:
    """How bytes lie along positions, in part; `rt.log.read.outline` makes the waypoints."""

    waypoints: tuple[Waypoint, ...]

    def __post_init__(self) -> None:
        if len(self.waypoints) > WAYPOINTS_MAX:
            raise ValueError(f"{len(self.waypoints)} waypoints: {WAYPOINTS_MAX} at most")
        for waypoint in self.waypoints:
            _check_bound("position", waypoint.position, NUMBER_MAX + 1)
            _check_bound("bytes", waypoint.log_bytes, 2**63)
        for earlier, later in pairwise(self.waypoints):
            if earlier.position >= later.position or earlier.log_bytes > later.log_bytes:
                raise ValueError(f"waypoints do not rise: {earlier}, {later}")


@dataclass(frozen=True, slots=True)
class PullProgress:
    """The receiver has everything below `position`; synced, if it says so."""

    position: int
    is_synced: bool = False

    def __post_init__(self) -> None:
        _check_bound("position", self.position, NUMBER_MAX + 1)


def check_progress(progress: PushProgress) -> PushProgress:
    """Return `progress`; `ValueError` if no node can say it."""
    check_place(progress.durable)
    check_place(progress.merged)
    _check_bound("X", progress.merged_run, 2**32)
    _check_bound("durable number", progress.durable_number, NUMBER_MAX + 1)
    _check_bound("merged number", progress.merged_number, NUMBER_MAX + 1)
    return progress


def check_place(place: LogOffset) -> LogOffset:
    """Return `place`; `ValueError` if no segment has it."""
    run, roll, offset = place
    if 0 <= run < 2**32 and 0 <= roll < 2**32 and 0 <= offset < NUMBER_MAX:
        return place
    _check_bound("X", place.run, 2**32)
    _check_bound("Y", place.roll, 2**32)
    _check_bound("offset", place.offset, NUMBER_MAX)
    return place


def check_item(item: SegmentSealed | Run | LogTrimmed | CompleteUpTo) -> None:
    """`ValueError` if no log can say it. (Chunks are checked as they are read from the wire.)"""
    match item:
        case SegmentSealed(place, end, _, sealed_ns):
            check_place(place)
            _check_bound("end", end, NUMBER_MAX + 1)
            _check_bound("seal time", abs(sealed_ns), 2**63)
        case Run(run, life):
            _check_bound("X", run, 2**32)
            if len(life) != 8:
                raise ValueError(f"a life id of {len(life)} bytes: 8")
        case LogTrimmed(before, log_start, _):
            check_place(LogOffset(*before, 0))
            _check_bound("log start", log_start, NUMBER_MAX + 1)
        case CompleteUpTo(position):
            _check_bound("position", position, NUMBER_MAX + 1)


def _check_id(what: str, value: bytes, *, may_be_empty: bool = False) -> None:
    if len(value) != 16 and not (may_be_empty and not value):
        raise ValueError(f"{what} of {len(value)} bytes: 16")


def _check_bound(what: str, value: int, end: int) -> None:
    if not 0 <= value < end:
        raise ValueError(f"{what} {value} is out of range")
