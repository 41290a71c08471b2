"""The messages of both sides of a replication stream other than the items of the log, as values. Pure.

`proto/rt/v1/replication.proto` describes the meaning of each field on the wire. Here each value is checked
when it is made, so that no invalid value exists. `replicator/protocol/codec.py` converts them.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Final, Literal, NamedTuple, TypeAlias, TypeVar

from msgspec import Struct

from replicator.protocol.known_nodes import MEMBERS_MAX, NO_NODES, KnownNodes
from replicator.protocol.messages import CompleteUpTo, LogOffset, LogTrimmed, Run, SegmentSealed
from replicator.protocol.version import VersionRange
from rt.cluster_epoch import EPOCH_END
from rt.errors import ProtocolViolation
from rt.log.format.constants import NUMBER_MAX
from rt.log.read.outline import Waypoint
from rt.log.read.start_position import StartTime
from rt.log.read.topic_patterns import check_wanted
from rt.names import check_dedup_id, check_name, check_session_name
from rt.units import SILENCE_MS_END

PROTOCOL_VERSIONS: Final = VersionRange(1, 1)
"""The versions of push and pull that this program knows."""
WHY_CHARACTERS_MAX: Final = 1000
WAYPOINTS_MAX: Final = 4096
STATUS_SECONDS: Final = 2.0
"""How often a push reports its status."""

NOWHERE: Final = LogOffset(0, 0, 0)  # Before the first byte of a log.
Wanted: TypeAlias = int | Literal["earliest", "latest"] | StartTime
_Item = TypeVar("_Item", bound=SegmentSealed | Run | LogTrimmed | CompleteUpTo)


class PushHello(Struct, frozen=True):
    """The first message of a push client: it names the session that is pushed. `cluster` is empty before the
    first push.

    `version`: in a received message, the version of the protocol that both sides use.
    """

    stream: str
    session: str
    incarnation: bytes
    dedup_id: str | None = None
    cluster: bytes = b""
    version: int = 1

    def __post_init__(self) -> None:
        check_name(self.stream, kind="stream")
        check_session_name(self.session)
        _check_id("incarnation", self.incarnation)
        _check_id("cluster", self.cluster, may_be_empty=True)
        if self.dedup_id is not None:
            check_dedup_id(self.dedup_id)


class SilenceLimit(Struct, frozen=True):
    """The publisher promised, at the start of this run, to be silent for at most `milliseconds`.

    0: the publisher was closed in order, and promises nothing any more.
    """

    run: int
    milliseconds: int

    def __post_init__(self) -> None:
        _check_bound("run", self.run, 2**32)
        _check_bound("limit of silence", self.milliseconds, SILENCE_MS_END)


class PushStart(Struct, frozen=True):
    """The answer to a hello: the identity of the node, and the offset from which it needs the log (None: from
    the oldest segment). `takes_status`: the node knows `PushStatus`. `silence_limit`: the committed limit of
    the session's last run; None if the node knows of none. `members`: the number of voting members; `nodes`
    names them. `version`: the version of the protocol that both sides use.
    """

    cluster: bytes
    epoch: int
    members: int
    node: str
    offset: LogOffset | None = None
    takes_status: bool = False
    silence_limit: SilenceLimit | None = None
    version: int = 1
    nodes: KnownNodes = NO_NODES

    def __post_init__(self) -> None:
        _check_id("cluster", self.cluster)
        _check_bound("epoch", self.epoch, EPOCH_END)
        check_name(self.node, kind="node")
        if not 1 <= self.members <= MEMBERS_MAX:
            raise ValueError(f"a cluster of {self.members} members: 1 to {MEMBERS_MAX}")
        if self.nodes.version and len(self.nodes.nodes) != self.members:
            raise ValueError(f"{len(self.nodes.nodes)} nodes of {self.members} members")
        if self.offset is not None:
            check_log_offset(self.offset)


class PushStatus(Struct, frozen=True):
    """The status of a push, sent every `STATUS_SECONDS`. `waiting_bytes` are on the publisher's disk and not
    synced by this node. For `stalled_ms`, none of them was synced. `silence_limit`: the limit that the
    publisher has or had.
    """

    waiting_bytes: int = 0
    stalled_ms: int = 0
    silence_limit: SilenceLimit | None = None

    def __post_init__(self) -> None:
        _check_bound("waiting bytes", self.waiting_bytes, 2**63)
        _check_bound("stalled time", self.stalled_ms, 2**63)


class OpenReply(Struct, frozen=True):
    """The answer to a run: its chunks are accepted."""

    run: int

    def __post_init__(self) -> None:
        _check_bound("run", self.run, 2**32)


class PushProgress(NamedTuple):
    """How much of a session is safe: `durable` on this node, `merged` in the cluster. A number is one past
    the last one.

    It is made for every chunk, so it is checked only if it comes from a peer: `check_progress`.
    """

    durable: LogOffset = NOWHERE
    durable_number: int = 0
    merged_run: int = 0
    merged_number: int = 0
    merged: LogOffset = NOWHERE


class Acknowledged(Struct, frozen=True):
    """The subscriber `name`, as in its certificate, needs nothing below `position` any more."""

    name: str
    position: int

    def __post_init__(self) -> None:
        check_name(self.name, kind="subscriber")
        _check_bound("position", self.position, NUMBER_MAX)


class HoldRejected(Struct, frozen=True):
    """The node holds nothing for the subscriber `name`, as in its certificate, and `why`."""

    name: str
    why: str

    def __post_init__(self) -> None:
        check_name(self.name, kind="subscriber")
        if len(self.why) > WHY_CHARACTERS_MAX or not self.why.isprintable():
            raise ValueError(f"an invalid reason: {self.why[:50]!r}, {len(self.why)} characters")


class PullRange(Struct, frozen=True):
    """Only positions up to `end` are requested. With `outline_bytes`, only an outline is requested: how the
    bytes are distributed over the positions.

    `end` is `rt.log.read.log_source.NO_END` to request all positions, also future ones.
    """

    end: int
    outline_bytes: int = 0

    def __post_init__(self) -> None:
        _check_bound("end of the range", self.end, NUMBER_MAX + 1)
        _check_bound("outline bytes", self.outline_bytes, NUMBER_MAX)


class PullMerged(Struct, frozen=True):
    """A request for the merged log.

    A receiver that has a part of the log sends the end of its whole blocks (`offset`, position `end`), their
    cluster, and the header checksum of the last block (`chain`; 0 if there is none in that segment). A
    receiver that has nothing (`offset` None) sends the position to start at. If it sends a time, the node
    answers with the position that it found, even if the receiver has a part of the log. `topics`: names and
    patterns; empty for all topics. `acknowledged`: the data that a named subscriber does not need any more.
    With `range` the receiver keeps nothing, and only the position and the topics count.
    """

    cluster: bytes = b""
    offset: LogOffset | None = None
    end: int = 0
    chain: int = 0
    position: Wanted = "earliest"
    topics: tuple[str, ...] = ()
    name: str | None = None
    acknowledged: Acknowledged | None = None
    range: PullRange | None = None

    def __post_init__(self) -> None:
        _check_id("cluster", self.cluster, may_be_empty=self.offset is None)
        if self.range is not None and self.offset is not None:
            raise ValueError("a range has only positions and topics")
        if self.range is not None and self.range.outline_bytes and self.topics:
            raise ValueError("an outline is of all topics")
        if self.offset is not None:
            check_log_offset(self.offset)
        _check_bound("end", self.end, NUMBER_MAX + 1)
        _check_bound("chain", self.chain, 2**32)
        if isinstance(self.position, int):
            _check_bound("position", self.position, NUMBER_MAX + 1)
        check_wanted(self.topics)
        if self.name is not None:
            check_name(self.name, kind="subscriber")


class PullSession(Struct, frozen=True):
    """A request for a node's session replica from `offset` on, where the segment's running checksum is
    `chain`.
    """

    session_id: int
    offset: LogOffset = NOWHERE
    chain: int = 0

    def __post_init__(self) -> None:
        _check_bound("session id", self.session_id, 2**32)
        check_log_offset(self.offset)
        _check_bound("chain", self.chain, 2**32)


class PullHello(Struct, frozen=True):
    """The first message of a pull client: the stream and the log that it asks for.

    `version`: as in `PushHello`.
    """

    stream: str
    log: PullMerged | PullSession
    version: int = 1

    def __post_init__(self) -> None:
        check_name(self.stream, kind="stream")


class TimeFound(Struct, frozen=True):
    """No message before `position` has the requested timestamp or a later one.

    If `is_message`, the message at `position` has it or a later one.
    """

    position: int
    is_message: bool = False

    def __post_init__(self) -> None:
        _check_bound("position", self.position, NUMBER_MAX + 1)


class PullStart(Struct, frozen=True):
    """The answer to a hello: bytes follow from `offset` on. The position (or number) at `offset` is `first`.

    `cluster` is the id of the cluster, or the incarnation of a session. `session` and `dedup_id` belong to a
    session. `end` is one past the last position in the node's merged log. `found`: where the requested time
    begins. `nodes`: the voting members of the cluster. `version`: as in `PushStart`.
    """

    cluster: bytes
    epoch: int
    node: str
    offset: LogOffset
    first: int
    session: str | None = None
    dedup_id: str | None = None
    end: int = 0
    found: TimeFound | None = None
    version: int = 1
    nodes: KnownNodes = NO_NODES

    def __post_init__(self) -> None:
        _check_id("cluster", self.cluster)
        _check_bound("epoch", self.epoch, EPOCH_END)
        check_name(self.node, kind="node")
        check_log_offset(self.offset)
        _check_bound("first", self.first, NUMBER_MAX + 1)
        _check_bound("end", self.end, NUMBER_MAX + 1)
        if self.session is not None:
            check_session_name(self.session)
        if self.dedup_id is not None:
            check_dedup_id(self.dedup_id)


class LogOutline(Struct, frozen=True):
    """A part of an outline: how bytes are distributed over positions. `rt.log.read.outline` makes the
    waypoints.
    """

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


class PullProgress(Struct, frozen=True):
    """The receiver has everything below `position`; on disk, if `is_synced`."""

    position: int
    is_synced: bool = False

    def __post_init__(self) -> None:
        _check_bound("position", self.position, NUMBER_MAX + 1)


def check_found(wanted: Wanted, start: PullStart) -> None:
    """Check the answer to a requested time. `rt.ProtocolViolation` if the node did not say where the time
    begins, or named a position beyond the end of its log.
    """
    if not isinstance(wanted, StartTime):
        return
    if start.found is None:
        raise ProtocolViolation(
            "the node's version of rt cannot start by time", where=start.node, hint="Upgrade the node."
        )
    if start.found.position + start.found.is_message > start.end:
        raise ProtocolViolation(
            "the node found a time beyond the end of its log",
            where=start.node,
            got=start.found.position,
            expected=f"at most {start.end - start.found.is_message}",
        )


def check_progress(progress: PushProgress) -> PushProgress:
    """Return `progress`. `ValueError` if no node can send these values."""
    check_log_offset(progress.durable)
    check_log_offset(progress.merged)
    _check_bound("merged run", progress.merged_run, 2**32)
    _check_bound("durable number", progress.durable_number, NUMBER_MAX + 1)
    _check_bound("merged number", progress.merged_number, NUMBER_MAX + 1)
    return progress


def check_log_offset(place: LogOffset) -> LogOffset:
    """Return `place`. `ValueError` if no segment contains it."""
    run, roll, offset = place
    if 0 <= run < 2**32 and 0 <= roll < 2**32 and 0 <= offset < NUMBER_MAX:
        return place
    _check_bound("run", place.run, 2**32)
    _check_bound("roll", place.roll, 2**32)
    _check_bound("offset", place.offset, NUMBER_MAX)
    return place


def check_item(item: _Item) -> _Item:
    """Return `item`. `ValueError` if no log contains it. Chunks are checked when they are decoded."""
    match item:
        case SegmentSealed(place, end, _, sealed_ns):
            check_log_offset(place)
            _check_bound("end", end, NUMBER_MAX + 1)
            _check_bound("seal time", abs(sealed_ns), 2**63)
        case Run(run, run_id):
            _check_bound("run", run, 2**32)
            if len(run_id) != 8:
                raise ValueError(f"a run id of {len(run_id)} bytes: 8")
        case LogTrimmed(before, log_start, _):
            check_log_offset(LogOffset(*before, 0))
            _check_bound("log start", log_start, NUMBER_MAX + 1)
        case CompleteUpTo(position):
            _check_bound("position", position, NUMBER_MAX + 1)
    return item


def _check_id(what: str, value: bytes, *, may_be_empty: bool = False) -> None:
    if len(value) != 16 and not (may_be_empty and not value):
        raise ValueError(f"{what} of {len(value)} bytes: 16")


def _check_bound(what: str, value: int, end: int) -> None:
    if not 0 <= value < end:
        raise ValueError(f"{what} {value} is out of range")
