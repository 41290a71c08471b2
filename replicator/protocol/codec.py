"""Values to and from the bytes of `proto/rt/v1/replication.proto`.

Invariant: every decoded value was checked. Invalid values and invalid bytes raise `rt.ProtocolViolation`.

Chunks bypass protobuf (`replicator.protocol.chunk_framing`). `encode_…` and `decode_…` are the serialisers of
gRPC; an encoded message may go to several peers.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Final, TypeAlias, TypeVar

from google.protobuf.message import DecodeError, Message

from replicator.protocol.chunk_framing import checked_chunk, frame_chunk, framed_chunk
from replicator.protocol.handshake import (
    PROTOCOL_VERSION,
    TOPICS_WANTED_BYTES_MAX,
    Acknowledged,
    HoldRejected,
    LogOutline,
    OpenReply,
    PullHello,
    PullMerged,
    PullProgress,
    PullRange,
    PullSession,
    PullStart,
    PushHello,
    PushProgress,
    PushStart,
    check_item,
    check_log_offset,
    check_progress,
)
from replicator.protocol.messages import (
    CHUNK_BYTES_MAX,
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
from rt.errors import ProtocolViolation, UnknownVersion
from rt.log.format.constants import NUMBER_MAX
from rt.log.format.segment import SEGMENT_HEADER_BYTES, SegmentId
from rt.log.format.segment_table import TrimReason
from rt.log.read.outline import Waypoint
from rt.v1 import replication_pb2 as pb

PUSH_METHOD: Final = "/rt.v1.Replication/Push"
PULL_METHOD: Final = "/rt.v1.Replication/Pull"

PushRequest: TypeAlias = PushHello | Run | Chunk | SegmentSealed | WholeRuns
PushReply: TypeAlias = PushStart | OpenReply | PushProgress
PullRequest: TypeAlias = PullHello | PullProgress | Acknowledged
PullReply: TypeAlias = (
    PullStart | Chunk | SegmentSealed | LogTrimmed | CompleteUpTo | HoldRejected | LogOutline
)

_Said = TypeVar("_Said", bound=Message)
_Value = TypeVar("_Value")

PULL_REQUEST_BYTES_MAX: Final = 2 * TOPICS_WANTED_BYTES_MAX
"""The largest filter and its request. Decoded, empty topics take much more memory than on the wire."""

_IN_PUSH: Final = 0x1A  # The tag of `PushRequest.chunk`: field 3, a length follows.
_IN_PULL: Final = 0x12  # The tag of `PullReply.chunk`: field 2.


def encode_push_request(said: PushRequest) -> bytes:
    match said:
        case Chunk():
            return frame_chunk(_IN_PUSH, said)
        case Run(number, run_id):
            return pb.PushRequest(run=pb.Run(run=number, run_id=run_id)).SerializeToString()
        case SegmentSealed():
            return pb.PushRequest(sealed=_sealed(said)).SerializeToString()
        case WholeRuns(runs):
            whole = pb.WholeRuns(
                runs=[
                    pb.WholeRun(
                        run=one.run.number,
                        run_id=one.run.run_id,
                        data=bytes(one.data),
                        end=one.end,
                        sealed_ns=one.sealed_ns,
                    )
                    for one in runs
                ]
            )
            return pb.PushRequest(whole_runs=whole).SerializeToString()
        case PushHello(stream, session, incarnation, dedup_id, cluster):
            hello = pb.PushHello(
                version=PROTOCOL_VERSION,
                stream=stream,
                session=session,
                incarnation=incarnation,
                dedup_id=dedup_id,
                cluster=cluster,
            )
            return pb.PushRequest(hello=hello).SerializeToString()


def decode_push_request(data: bytes) -> PushRequest:
    """The data of a chunk are a view of `data`."""
    return framed_chunk(_IN_PUSH, data) or _checked(pb.PushRequest, data, _push_request)


def encode_push_reply(answered: PushReply) -> bytes:
    match answered:
        case PushStart(cluster, epoch, members, node, place):
            start = pb.PushStart(
                cluster=cluster,
                epoch=epoch,
                members=members,
                node=node,
                place=_place(place),
                has_place=place is not None,
            )
            return pb.PushReply(start=start).SerializeToString()
        case OpenReply(run):
            return pb.PushReply(opened=pb.RunOpened(run=run)).SerializeToString()
        case PushProgress(durable, durable_number, merged_run, merged_number, merged):
            progress = pb.Progress(
                durable=_place(durable),
                durable_number=durable_number,
                merged_run=merged_run,
                merged_number=merged_number,
                merged=_place(merged),
            )
            return pb.PushReply(progress=progress).SerializeToString()


def decode_push_reply(data: bytes) -> PushReply:
    return _checked(pb.PushReply, data, _push_reply)


def encode_pull_request(asked: PullRequest) -> bytes:
    match asked:
        case PullHello(stream, log):
            hello = pb.PullHello(version=PROTOCOL_VERSION, stream=stream)
            match log:
                case PullMerged():
                    hello.merged.CopyFrom(_merged(log))
                case PullSession(session_id, place, chain):
                    hello.session.CopyFrom(
                        pb.PullSession(session_id=session_id, place=_place(place), chain=chain)
                    )
            return pb.PullRequest(hello=hello).SerializeToString()
        case PullProgress(position, is_synced):
            progress = pb.PullProgress(position=position, is_synced=is_synced)
            return pb.PullRequest(progress=progress).SerializeToString()
        case Acknowledged(name, position):
            acknowledged = pb.Acknowledged(name=name, position=position)
            return pb.PullRequest(acknowledged=acknowledged).SerializeToString()


def decode_pull_request(data: bytes) -> PullRequest:
    if len(data) > PULL_REQUEST_BYTES_MAX:
        raise ProtocolViolation(
            "a peer sent a PullRequest that is too large", got=len(data), expected=PULL_REQUEST_BYTES_MAX
        )
    return _checked(pb.PullRequest, data, _pull_request)


def encode_pull_reply(answered: PullReply) -> bytes:
    match answered:
        case Chunk():
            return frame_chunk(_IN_PULL, answered)
        case SegmentSealed():
            return pb.PullReply(sealed=_sealed(answered)).SerializeToString()
        case LogTrimmed(before, log_start, reason):
            trimmed = pb.Trimmed(run=before.run, roll=before.roll, log_start=log_start, reason=int(reason))
            return pb.PullReply(trimmed=trimmed).SerializeToString()
        case CompleteUpTo(position):
            return pb.PullReply(complete=pb.CompleteUpTo(position=position)).SerializeToString()
        case HoldRejected(name, why):
            return pb.PullReply(hold_refused=pb.HoldRefused(name=name, why=why)).SerializeToString()
        case LogOutline(waypoints):
            outline = pb.Outline(waypoints=[pb.Waypoint(**each._asdict()) for each in waypoints])
            return pb.PullReply(outline=outline).SerializeToString()
        case PullStart(cluster, epoch, node, place, first, session, dedup_id, end):
            start = pb.PullStart(
                cluster=cluster,
                epoch=epoch,
                node=node,
                place=_place(place),
                first=first,
                session=session,
                dedup_id=dedup_id,
                end=end,
            )
            return pb.PullReply(start=start).SerializeToString()


def decode_pull_reply(data: bytes) -> PullReply:
    """The data of a chunk are a view of `data`."""
    return framed_chunk(_IN_PULL, data) or _checked(pb.PullReply, data, _pull_reply)


# From protobuf


def _checked(kind: type[_Said], data: bytes, read: Callable[[_Said], _Value]) -> _Value:
    try:
        return read(kind.FromString(data))
    except (DecodeError, ValueError) as error:
        raise ProtocolViolation(
            f"a peer sent an invalid {kind.__name__}: {error}",
            hint="The peer runs another version of rt, or another program.",
        ) from error


def _push_request(message: pb.PushRequest) -> PushRequest:
    match message.WhichOneof("kind"):
        case "hello":
            said = message.hello
            _check_version(said.version)
            return PushHello(said.stream, said.session, said.incarnation, said.dedup_id or None, said.cluster)
        case "run":
            return check_item(Run(message.run.run, message.run.run_id))
        case "chunk":
            return checked_chunk(_read_place(message.chunk.place), message.chunk.data)
        case "sealed":
            return _read_sealed(message.sealed)
        case "whole_runs":
            return _read_whole_runs(message.whole_runs)
        case _:
            raise ValueError("it is empty")


def _push_reply(message: pb.PushReply) -> PushReply:
    match message.WhichOneof("kind"):
        case "start":
            start = message.start
            place = _read_place(start.place) if start.has_place else None
            return PushStart(start.cluster, start.epoch, start.members, start.node, place)
        case "opened":
            return OpenReply(message.opened.run)
        case "progress":
            said = message.progress
            return check_progress(
                PushProgress(
                    LogOffset(said.durable.run, said.durable.roll, said.durable.offset),
                    said.durable_number,
                    said.merged_run,
                    said.merged_number,
                    LogOffset(said.merged.run, said.merged.roll, said.merged.offset),
                )
            )
        case _:
            raise ValueError("it is empty")


def _pull_request(message: pb.PullRequest) -> PullRequest:
    match message.WhichOneof("kind"):
        case "hello":
            hello = message.hello
            _check_version(hello.version)
            match hello.WhichOneof("log"):
                case "merged":
                    return PullHello(hello.stream, _read_merged(hello.merged))
                case "session":
                    said = hello.session
                    wanted = PullSession(said.session_id, _read_place(said.place), said.chain)
                    return PullHello(hello.stream, wanted)
                case _:
                    raise ValueError("it names no log")
        case "progress":
            return PullProgress(message.progress.position, message.progress.is_synced)
        case "acknowledged":
            return Acknowledged(message.acknowledged.name, message.acknowledged.position)
        case _:
            raise ValueError("it is empty")


def _pull_reply(message: pb.PullReply) -> PullReply:
    match message.WhichOneof("kind"):
        case "start":
            start = message.start
            return PullStart(
                start.cluster,
                start.epoch,
                start.node,
                _read_place(start.place),
                start.first,
                start.session or None,
                start.dedup_id or None,
                start.end,
            )
        case "chunk":
            return checked_chunk(_read_place(message.chunk.place), message.chunk.data)
        case "sealed":
            return _read_sealed(message.sealed)
        case "trimmed":
            said = message.trimmed
            before = SegmentId(said.run, said.roll)
            return check_item(LogTrimmed(before, said.log_start, TrimReason(said.reason)))
        case "complete":
            return check_item(CompleteUpTo(message.complete.position))
        case "hold_refused":
            return HoldRejected(message.hold_refused.name, message.hold_refused.why)
        case "outline":
            return LogOutline(tuple(map(_read_waypoint, message.outline.waypoints)))
        case _:
            raise ValueError("it is empty")


def _read_place(place: pb.Place) -> LogOffset:
    return check_log_offset(LogOffset(place.run, place.roll, place.offset))


def _read_waypoint(said: pb.Waypoint) -> Waypoint:
    high_ns = said.timestamp_high_ns if said.HasField("timestamp_high_ns") else None
    return Waypoint(said.position, said.log_bytes, high_ns)


def _read_sealed(said: pb.Sealed) -> SegmentSealed:
    return check_item(SegmentSealed(_read_place(said.place), said.end, said.is_last_of_run, said.sealed_ns))


def _read_whole_runs(said: pb.WholeRuns) -> WholeRuns:
    if not 1 <= len(said.runs) <= WHOLE_RUNS_MAX:
        raise ValueError(f"{len(said.runs)} whole runs: 1 to {WHOLE_RUNS_MAX}")
    if sum(len(one.data) for one in said.runs) > CHUNK_BYTES_MAX:
        raise ValueError(f"whole runs of more than {CHUNK_BYTES_MAX} bytes")
    runs = tuple(WholeRun(Run(one.run, one.run_id), one.data, one.end, one.sealed_ns) for one in said.runs)
    for one in runs:
        if len(one.data) < SEGMENT_HEADER_BYTES or len(one.data) % 8 or one.end >= NUMBER_MAX:
            raise ValueError(f"a whole segment of {len(one.data)} bytes, up to number {one.end}")
        run, _, sealed = one.items
        check_item(run)
        check_item(sealed)
    for earlier, later in pairwise(runs):
        if earlier.run.number >= later.run.number:
            raise ValueError(f"whole runs out of order: run {earlier.run.number}, then {later.run.number}")
    return WholeRuns(runs)


def _read_merged(said: pb.PullMerged) -> PullMerged:
    position = said.from_position if said.WhichOneof("position") == "from_position" else None
    held = said.acknowledged
    return PullMerged(
        said.cluster,
        _read_place(said.place) if said.has_place else None,
        said.end,
        said.chain,
        position if position is not None else "latest" if said.from_latest else "earliest",
        tuple(said.topics),
        said.name or None,
        Acknowledged(held.name, held.position) if said.HasField("acknowledged") else None,
        PullRange(said.range.end, said.range.outline_bytes) if said.HasField("range") else None,
    )


def _check_version(version: int) -> None:
    if version != PROTOCOL_VERSION:
        raise UnknownVersion(
            "the peer uses another version of the protocol",
            got=version,
            expected=PROTOCOL_VERSION,
            hint="Upgrade the older side. Nodes are upgraded before their clients.",
        )


# To protobuf


def _place(place: LogOffset | None) -> pb.Place | None:
    return None if place is None else pb.Place(run=place.run, roll=place.roll, offset=place.offset)


def _sealed(sealed: SegmentSealed) -> pb.Sealed:
    return pb.Sealed(
        place=_place(sealed.end_offset),
        end=sealed.end,
        is_last_of_run=sealed.is_last_of_run,
        sealed_ns=sealed.sealed_ns,
    )


def _merged(wanted: PullMerged) -> pb.PullMerged:
    said, part = wanted.acknowledged, wanted.range
    return pb.PullMerged(
        cluster=wanted.cluster,
        place=_place(wanted.offset),
        has_place=wanted.offset is not None,
        end=wanted.end,
        chain=wanted.chain,
        from_position=wanted.position if isinstance(wanted.position, int) else None,
        from_latest=True if wanted.position == "latest" else None,
        topics=wanted.topics,
        name=wanted.name,
        acknowledged=pb.Acknowledged(name=said.name, position=said.position) if said else None,
        range=pb.PullRange(end=part.end, outline_bytes=part.outline_bytes) if part else None,
    )
