"""Values to and from the bytes of `proto/rt/v1/replication.proto`.

Invariant: every decoded value was checked. Invalid values and invalid bytes raise `rt.ProtocolViolation`.

Chunks bypass protobuf (`replicator.protocol.chunk_framing`). `encode_…` and `decode_…` are the serialisers of
gRPC; an encoded message may go to several peers.
"""

from __future__ import annotations

from itertools import pairwise
from operator import attrgetter
from typing import Final, TypeAlias, TypeVar

from google.protobuf.message import DecodeError, Message

from replicator.protocol.chunk_framing import checked_chunk, frame_chunk, framed_chunk
from replicator.protocol.handshake import (
    PROTOCOL_VERSIONS,
    Acknowledged,
    HoldRejected,
    LogOutline,
    OpenReply,
    PullHello,
    PullMerged,
    PullProgress,
    PullSession,
    PullStart,
    PushHello,
    PushProgress,
    PushStart,
    PushStatus,
    SilenceLimit,
    Wanted,
    check_item,
    check_log_offset,
    check_progress,
)
from replicator.protocol.known_nodes import NO_NODES, KnownNodes
from replicator.protocol.messages import (
    CHUNK_BYTES_MAX,
    PULLED_CHUNK_BYTES_MAX,
    WHOLE_RUNS_MAX,
    Chunk,
    CompleteUpTo,
    LogOffset,
    LogTrimmed,
    Run,
    SegmentSealed,
    WholeRun,
    WholeRuns,
)
from replicator.protocol.version import common_version, range_of
from rt.errors import ProtocolViolation
from rt.log.format.constants import NUMBER_MAX
from rt.log.format.segment import SEGMENT_HEADER_BYTES, SegmentId
from rt.log.read.start_position import StartTime
from rt.log.read.topic_patterns import WANTED_BYTES_MAX
from rt.message_codec import FieldCodec, MessageCodec, UnionCodec, inlined
from rt.v1 import replication_pb2 as pb

PUSH_METHOD: Final = "/rt.v1.Replication/Push"
PULL_METHOD: Final = "/rt.v1.Replication/Pull"
PULL_REPLY_BYTES_MAX: Final = PULLED_CHUNK_BYTES_MAX + 2**16
"""A chunk and its message: a client's channel must accept it."""

PushRequest: TypeAlias = PushHello | Run | Chunk | SegmentSealed | WholeRuns | PushStatus
PushReply: TypeAlias = PushStart | OpenReply | PushProgress | SilenceLimit
PullRequest: TypeAlias = PullHello | PullProgress | Acknowledged
PullReply: TypeAlias = (
    PullStart | Chunk | SegmentSealed | LogTrimmed | CompleteUpTo | HoldRejected | LogOutline
)

_Value = TypeVar("_Value")

PULL_REQUEST_BYTES_MAX: Final = 2 * WANTED_BYTES_MAX
"""Enough for the largest filter and its request. The limit is needed because empty topics take much more
memory after decoding than on the wire.
"""

_IN_PUSH: Final = 0x1A  # The tag of `PushRequest.chunk`: field 3, a length follows.
_IN_PULL: Final = 0x12  # The tag of `PullReply.chunk`: field 2.


def encode_push_request(said: PushRequest) -> bytes:
    if isinstance(said, Chunk):
        return frame_chunk(_IN_PUSH, said)
    return pb.PushRequest(**_PUSH_REQUEST.encode(said)).SerializeToString()


def decode_push_request(data: bytes) -> PushRequest:
    """The data of a chunk are a view of `data`."""
    return framed_chunk(_IN_PUSH, data, CHUNK_BYTES_MAX) or _decoded(pb.PushRequest, data, _PUSH_REQUEST)


def encode_push_reply(answered: PushReply) -> bytes:
    return pb.PushReply(**_PUSH_REPLY.encode(answered)).SerializeToString()


def decode_push_reply(data: bytes) -> PushReply:
    return _decoded(pb.PushReply, data, _PUSH_REPLY)


def encode_pull_request(asked: PullRequest) -> bytes:
    return pb.PullRequest(**_PULL_REQUEST.encode(asked)).SerializeToString()


def decode_pull_request(data: bytes) -> PullRequest:
    if len(data) > PULL_REQUEST_BYTES_MAX:
        raise ProtocolViolation(
            "a peer sent a PullRequest that is too large", got=len(data), expected=PULL_REQUEST_BYTES_MAX
        )
    return _decoded(pb.PullRequest, data, _PULL_REQUEST)


def encode_pull_reply(answered: PullReply) -> bytes:
    if isinstance(answered, Chunk):
        return frame_chunk(_IN_PULL, answered)
    return pb.PullReply(**_PULL_REPLY.encode(answered)).SerializeToString()


def decode_pull_reply(data: bytes) -> PullReply:
    """The data of a chunk are a view of `data`."""
    chunk = framed_chunk(_IN_PULL, data, PULLED_CHUNK_BYTES_MAX)
    return chunk or _decoded(pb.PullReply, data, _PULL_REPLY, chunk_bytes_max=PULLED_CHUNK_BYTES_MAX)


def _decoded(
    kind: type[Message], data: bytes, codec: UnionCodec[_Value], *, chunk_bytes_max: int = CHUNK_BYTES_MAX
) -> _Value:
    try:
        said = codec.decode(kind.FromString(data))
        _check(said, chunk_bytes_max)
    except (DecodeError, ValueError) as error:
        raise ProtocolViolation(
            f"a peer sent an invalid {kind.__name__}: {error}",
            hint="The peer runs another version of rt, or another program.",
        ) from error
    return said


def _check(said: object, chunk_bytes_max: int) -> None:
    """Check the values that are not checked when they are made."""
    match said:
        case Chunk(start, data):
            check_log_offset(start)
            checked_chunk(start, data, chunk_bytes_max)
        case Run() | SegmentSealed() | LogTrimmed() | CompleteUpTo():
            check_item(said)
        case PushProgress():
            check_progress(said)


def _whole_runs_of(message: pb.WholeRuns) -> tuple[WholeRun, ...]:
    if not 1 <= len(message.runs) <= WHOLE_RUNS_MAX:
        raise ValueError(f"{len(message.runs)} whole runs: 1 to {WHOLE_RUNS_MAX}")
    if sum(len(one.data) for one in message.runs) > CHUNK_BYTES_MAX:
        raise ValueError(f"whole runs of more than {CHUNK_BYTES_MAX} bytes")
    runs = tuple(map(_WHOLE_RUN.decode, message.runs))
    for one in runs:
        if len(one.data) < SEGMENT_HEADER_BYTES or len(one.data) % 8 or one.end >= NUMBER_MAX:
            raise ValueError(f"a whole segment of {len(one.data)} bytes, up to number {one.end}")
        run, _, sealed = one.items
        check_item(run)
        check_item(sealed)
    for earlier, later in pairwise(runs):
        if earlier.run.number >= later.run.number:
            raise ValueError(f"whole runs out of order: run {earlier.run.number}, then {later.run.number}")
    return runs


def _known_versions(_: int) -> dict[str, int]:
    return {"version": PROTOCOL_VERSIONS.oldest, "version_latest": PROTOCOL_VERSIONS.latest}


def _version_of_hello(message: pb.PushHello | pb.PullHello) -> int:
    return common_version(PROTOCOL_VERSIONS, range_of(message.version, message.version_latest))


def _version_of_start(message: pb.PushStart | pb.PullStart) -> int:
    """The version that the node has chosen."""
    chosen = range_of(message.version, message.version)
    return common_version(PROTOCOL_VERSIONS, chosen, f"node {message.node}")


def _start_of(message: pb.PullMerged) -> Wanted:
    if message.WhichOneof("position") == "from_position":
        return message.from_position
    if message.WhichOneof("position") == "from_timestamp_ns":
        return StartTime(message.from_timestamp_ns)
    return "latest" if message.from_latest else "earliest"


_HELLO_VERSION: Final = FieldCodec(_known_versions, _version_of_hello)
_START_VERSION: Final = FieldCodec(lambda version: {"version": version}, _version_of_start)
_PLACE: Final = MessageCodec(LogOffset, pb.Place)
_PLACE_IF_ANY: Final = FieldCodec(
    lambda place: {} if place is None else {"place": _PLACE.encode(place), "has_place": True},
    lambda message: _PLACE.decode(message.place) if message.has_place else None,
)
_DATA: Final = FieldCodec(lambda data: {"data": bytes(data)}, attrgetter("data"))
_CHUNK: Final = MessageCodec(Chunk, pb.Chunk, start="place", data=_DATA)
_SEALED: Final = MessageCodec(SegmentSealed, pb.Sealed, end_offset="place")
_RUN_OF_WHOLE: Final = inlined(MessageCodec(Run, pb.WholeRun, number="run"))
_WHOLE_RUN: Final = MessageCodec(WholeRun, pb.WholeRun, run=_RUN_OF_WHOLE, data=_DATA)
_WHOLE_RUNS: Final = FieldCodec(lambda runs: {"runs": [*map(_WHOLE_RUN.encode, runs)]}, _whole_runs_of)
_BEFORE: Final = inlined(MessageCodec(SegmentId, pb.Trimmed))
_START: Final = FieldCodec(
    lambda position: {
        "from_position": position if isinstance(position, int) else None,
        "from_latest": True if position == "latest" else None,
        "from_timestamp_ns": position.timestamp_ns if isinstance(position, StartTime) else None,
    },
    _start_of,
)
_LOG: Final = UnionCodec[PullMerged | PullSession](
    pb.PullHello,
    "log",
    merged=MessageCodec(PullMerged, pb.PullMerged, offset=_PLACE_IF_ANY, position=_START),
    session=MessageCodec(PullSession, pb.PullSession, offset="place"),
)

_KNOWN_NODES: Final = MessageCodec(KnownNodes, pb.KnownNodes)
_NODES: Final = FieldCodec(
    lambda nodes: {"nodes": _KNOWN_NODES.encode(nodes)} if nodes.version else {},
    lambda message: _KNOWN_NODES.decode(message.nodes) if message.HasField("nodes") else NO_NODES,
)

_PUSH_REQUEST: Final = UnionCodec[PushRequest](
    pb.PushRequest,
    "kind",
    hello=MessageCodec(PushHello, pb.PushHello, version=_HELLO_VERSION),
    run=MessageCodec(Run, pb.Run, number="run"),
    chunk=_CHUNK,
    sealed=_SEALED,
    whole_runs=MessageCodec(WholeRuns, pb.WholeRuns, runs=_WHOLE_RUNS),
    status=PushStatus,
)
_PUSH_REPLY: Final = UnionCodec[PushReply](
    pb.PushReply,
    "kind",
    start=MessageCodec(PushStart, pb.PushStart, offset=_PLACE_IF_ANY, version=_START_VERSION, nodes=_NODES),
    opened=OpenReply,
    progress=PushProgress,
    silence_limit=SilenceLimit,
)
_PULL_REQUEST: Final = UnionCodec[PullRequest](
    pb.PullRequest,
    "kind",
    hello=MessageCodec(
        PullHello, pb.PullHello, log=FieldCodec(_LOG.encode, _LOG.decode), version=_HELLO_VERSION
    ),
    progress=PullProgress,
    acknowledged=Acknowledged,
)
_PULL_REPLY: Final = UnionCodec[PullReply](
    pb.PullReply,
    "kind",
    start=MessageCodec(PullStart, pb.PullStart, offset="place", version=_START_VERSION, nodes=_NODES),
    chunk=_CHUNK,
    sealed=_SEALED,
    trimmed=MessageCodec(LogTrimmed, pb.Trimmed, before=_BEFORE),
    complete=CompleteUpTo,
    hold_refused=HoldRejected,
    outline=LogOutline,
)
