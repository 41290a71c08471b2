"""Wire codec of push and pull: round trips, limits, versions, and hand-written chunk framing."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from replicator.protocol import codec
from replicator.protocol.chunk_framing import frame_chunk, framed_chunk
from replicator.protocol.codec import (
    decode_pull_reply,
    decode_pull_request,
    decode_push_reply,
    decode_push_request,
    encode_pull_reply,
    encode_pull_request,
    encode_push_reply,
    encode_push_request,
)
from replicator.protocol.handshake import (
    WAYPOINTS_MAX,
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
    PushStatus,
    TimeFound,
    check_found,
    check_progress,
)
from replicator.protocol.known_nodes import KnownNode, KnownNodes
from replicator.protocol.messages import (
    CHUNK_BYTES_MAX,
    PULLED_CHUNK_BYTES_MAX,
    Chunk,
    CompleteUpTo,
    LogOffset,
    LogTrimmed,
    Run,
    SegmentSealed,
)
from replicator.protocol.version import VersionRange
from rt.errors import InvalidName, ProtocolViolation, UnknownVersion
from rt.log.format.constants import NUMBER_MAX
from rt.log.format.segment import SegmentId
from rt.log.format.segment_table import TrimReason
from rt.log.read.outline import Waypoint
from rt.log.read.start_position import StartTime
from rt.log.read.topic_patterns import WANTED_MAX
from rt.v1 import replication_pb2 as pb

ID = bytes(range(16))
words = st.integers(0, 2**32 - 1)
numbers = st.integers(0, NUMBER_MAX)
places = st.builds(LogOffset, words, words, st.integers(0, NUMBER_MAX - 1))
ids = st.binary(min_size=16, max_size=16)
ids_or_none = st.one_of(st.just(b""), ids)
topics = st.text(max_size=20).map(lambda text: text.replace("[", "[[]"))  # A lone [ is no pattern.
names = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,20}", fullmatch=True)
chunks = st.builds(Chunk, places, st.binary(min_size=1, max_size=300))
seals = st.builds(SegmentSealed, places, numbers, st.booleans(), st.integers(-(2**63) + 1, 2**63 - 1))

pushed = st.one_of(
    chunks,
    seals,
    st.builds(Run, words, st.binary(min_size=8, max_size=8)),
    st.builds(PushStatus, st.integers(0, 2**63 - 1), st.integers(0, 2**63 - 1)),
    st.builds(PushHello, names, names, ids, st.none() | names, ids_or_none),
)
known_nodes = st.builds(
    lambda nodes, version: KnownNodes(tuple(KnownNode(name, f"{name}:1") for name in nodes), version),
    st.lists(st.sampled_from(["n1", "n2", "n3", "n4"]), min_size=1, unique=True),
    st.integers(1, 2**63 - 1),
)
push_answers = st.one_of(
    st.builds(PushStart, ids, words, st.integers(1, 7), names, st.none() | places, st.booleans()),
    known_nodes.map(lambda nodes: PushStart(ID, 0, len(nodes.nodes), "n1", nodes=nodes)),
    st.builds(OpenReply, words),
    st.builds(PushProgress, places, numbers, words, numbers, places),
)
acknowledged = st.builds(Acknowledged, names, st.integers(0, NUMBER_MAX - 1))
merged = st.builds(
    PullMerged,
    ids,
    st.none() | places,
    numbers,
    words,
    st.one_of(
        numbers,
        st.sampled_from(["earliest", "latest"]) | st.builds(StartTime, st.integers(-(2**63), 2**63 - 1)),
    ),
    st.lists(topics, max_size=4).map(tuple),
    st.none() | names,
    st.none() | acknowledged,
)
ranges = st.builds(
    PullMerged,
    ids_or_none,
    position=st.one_of(numbers, st.just("earliest")),
    name=st.none() | names,
    range=st.builds(PullRange, numbers, st.integers(0, 2**40)),
)
pull_asks = st.one_of(
    st.builds(PullHello, names, st.one_of(merged, ranges, st.builds(PullSession, words, places, words))),
    st.builds(PullProgress, numbers, st.booleans()),
    acknowledged,
)
outlines = st.lists(
    st.tuples(st.integers(1, 2**40), st.integers(0, 2**40), st.none() | st.integers(-(2**63), 2**63 - 1)),
    max_size=20,
).map(
    lambda steps: LogOutline(
        tuple(
            Waypoint(sum(step[0] for step in steps[:i]), sum(step[1] for step in steps[:i]), step[2])
            for i, step in enumerate(steps)
        )
    )
)
pull_answers = st.one_of(
    outlines,
    chunks,
    seals,
    st.builds(LogTrimmed, st.builds(SegmentId, words, words), numbers, st.sampled_from(TrimReason)),
    st.builds(CompleteUpTo, numbers),
    st.builds(HoldRejected, names, st.text("abc :", max_size=20)),
    st.builds(PullStart, ids, words, names, places, numbers, st.none() | names, st.none() | names),
    st.builds(PullStart, ids, words, names, places, numbers, nodes=known_nodes),
    st.builds(
        PullStart,
        ids,
        words,
        names,
        places,
        numbers,
        end=numbers,
        found=st.builds(TimeFound, numbers, st.booleans()),
    ),
)


@given(pushed)
def test_push_requests_survive_encoding(said: Any) -> None:
    assert decode_push_request(encode_push_request(said)) == said


@given(push_answers)
def test_push_replies_survive_encoding(said: Any) -> None:
    assert decode_push_reply(encode_push_reply(said)) == said


@given(pull_asks)
def test_pull_requests_survive_encoding(said: Any) -> None:
    assert decode_pull_request(encode_pull_request(said)) == said


@given(pull_answers)
def test_pull_replies_survive_encoding(said: Any) -> None:
    assert decode_pull_reply(encode_pull_reply(said)) == said


def as_protobuf(chunk: Chunk) -> pb.Chunk:
    run, roll, offset = chunk.start
    return pb.Chunk(place=pb.Place(run=run, roll=roll, offset=offset), data=bytes(chunk.data))


@given(chunks)
def test_hand_framed_chunk_equals_protobuf_encoding(chunk: Chunk) -> None:
    assert encode_push_request(chunk) == pb.PushRequest(chunk=as_protobuf(chunk)).SerializeToString()
    assert encode_pull_reply(chunk) == pb.PullReply(chunk=as_protobuf(chunk)).SerializeToString()


def test_largest_chunk_is_decoded_in_place_and_larger_one_is_rejected() -> None:
    chunk = Chunk(LogOffset(2**32 - 1, 2**32 - 1, NUMBER_MAX - 1), bytes(CHUNK_BYTES_MAX))
    read = decode_push_request(encode_push_request(chunk))
    assert read == chunk
    assert isinstance(read, Chunk)
    assert isinstance(read.data, memoryview)
    pulled = Chunk(chunk.start, bytes(PULLED_CHUNK_BYTES_MAX))
    assert decode_pull_reply(encode_pull_reply(pulled)) == pulled
    with pytest.raises(ProtocolViolation, match="size"):
        decode_push_request(encode_push_request(pulled))


@given(chunks, st.data())
def test_chunk_decoded_in_place_equals_protobuf_decoding(chunk: Chunk, data: st.DataObject) -> None:
    message = bytearray(frame_chunk(0x1A, chunk))
    for _ in range(data.draw(st.integers(0, 3))):
        message[data.draw(st.integers(0, min(len(message), 24) - 1))] = data.draw(st.integers(0, 255))
    try:
        mine = framed_chunk(0x1A, bytes(message), CHUNK_BYTES_MAX)
    except ProtocolViolation:
        mine = None
    if mine is not None:
        read = pb.PushRequest.FromString(bytes(message))
        assert read.WhichOneof("kind") == "chunk"
        assert as_protobuf(mine).data == read.chunk.data
        assert mine.start == (read.chunk.place.run, read.chunk.place.roll, read.chunk.place.offset)


@given(st.binary(max_size=64))
def test_random_bytes_are_rejected_or_decode_to_valid_message(data: bytes) -> None:
    for decode, encode in (
        (decode_push_request, encode_push_request),
        (decode_push_reply, encode_push_reply),
        (decode_pull_request, encode_pull_request),
        (decode_pull_reply, encode_pull_reply),
    ):
        try:
            said = decode(data)
        except (ProtocolViolation, UnknownVersion):
            continue
        assert decode(encode(said)) == said  # type: ignore[arg-type]


BAD_PUSHES = [
    pb.PushRequest(),
    pb.PushRequest(run=pb.Run(run=1, run_id=b"short")),
    pb.PushRequest(chunk=pb.Chunk(place=pb.Place(run=1), data=b"")),
    pb.PushRequest(chunk=pb.Chunk(data=bytes(CHUNK_BYTES_MAX + 1))),
    pb.PushRequest(chunk=pb.Chunk(place=pb.Place(offset=2**63), data=b"x")),
    pb.PushRequest(sealed=pb.Sealed(end=2**63)),
    pb.PushRequest(hello=pb.PushHello(version=1, stream="s", session="../x", incarnation=ID)),
    pb.PushRequest(hello=pb.PushHello(version=1, stream="s/t", session="x", incarnation=ID)),
    pb.PushRequest(hello=pb.PushHello(version=1, stream="s", session="x", incarnation=ID[:3])),
    pb.PushRequest(hello=pb.PushHello(version=1, stream="s", session="x", incarnation=ID, dedup_id="/")),
    pb.PushRequest(hello=pb.PushHello(version=1, stream="s", session="x", incarnation=ID, cluster=b"1")),
]


@pytest.mark.parametrize("index", range(len(BAD_PUSHES)))
def test_push_request_out_of_bounds_is_rejected(index: int) -> None:
    with pytest.raises(ProtocolViolation):
        decode_push_request(BAD_PUSHES[index].SerializeToString())


BAD_PULL_REPLIES = [
    pb.PullReply(),
    pb.PullReply(chunk=pb.Chunk(data=bytes(PULLED_CHUNK_BYTES_MAX + 1))),
    pb.PullReply(trimmed=pb.Trimmed(reason=99)),
    pb.PullReply(start=pb.PullStart(cluster=ID, node="../n")),
    pb.PullReply(complete=pb.CompleteUpTo(position=2**63)),
    pb.PullReply(hold_refused=pb.HoldRefused(name="../s", why="no")),
    pb.PullReply(hold_refused=pb.HoldRefused(name="sub", why="a\nforged line")),
    pb.PullReply(hold_refused=pb.HoldRefused(name="sub", why="x" * 2000)),
]


@pytest.mark.parametrize("index", range(len(BAD_PULL_REPLIES)))
def test_pull_reply_out_of_bounds_is_rejected(index: int) -> None:
    with pytest.raises(ProtocolViolation):
        decode_pull_reply(BAD_PULL_REPLIES[index].SerializeToString())


def test_pull_request_out_of_bounds_is_rejected() -> None:
    many = [str(topic) for topic in range(WANTED_MAX + 1)]
    for hello in (
        pb.PullHello(version=1, stream="s"),
        pb.PullHello(version=1, stream="s", merged=pb.PullMerged(topics=many)),
        pb.PullHello(version=1, stream="s", merged=pb.PullMerged(topics=["x" * 2000])),
        pb.PullHello(version=1, stream="s", merged=pb.PullMerged(topics=["trades/["])),
        pb.PullHello(
            version=1, stream="s", merged=pb.PullMerged(topics=[f"{n}*" + "x" * 999 for n in range(5)])
        ),
        pb.PullHello(version=1, stream="s", merged=pb.PullMerged(topics=["[ab]" * 65])),
        pb.PullHello(version=1, stream="s", merged=pb.PullMerged(topics=["x" * 1000] * 66)),
        pb.PullHello(version=1, stream="s", merged=pb.PullMerged(topics=[""] * 500_000)),
        pb.PullHello(version=1, stream="s", merged=pb.PullMerged(has_place=True)),
        pb.PullHello(version=1, stream="s", merged=pb.PullMerged(name="a/b")),
        pb.PullHello(version=1, stream="s", merged=pb.PullMerged(acknowledged=pb.Acknowledged())),
    ):
        with pytest.raises(ProtocolViolation):
            decode_pull_request(pb.PullRequest(hello=hello).SerializeToString())
    for said in (pb.Acknowledged(name="../x"), pb.Acknowledged(name="x", position=NUMBER_MAX)):
        with pytest.raises(ProtocolViolation):
            decode_pull_request(pb.PullRequest(acknowledged=said).SerializeToString())


def test_unchanged_node_list_adds_no_bytes_to_start_replies() -> None:
    start = PushStart(ID, 1, 3, "n1", LogOffset(1, 2, 64), takes_status=True)
    place = pb.Place(run=1, roll=2, offset=64)
    message = pb.PushStart(
        cluster=ID, epoch=1, members=3, node="n1", place=place, has_place=True, takes_status=True, version=1
    )
    assert encode_push_reply(start) == pb.PushReply(start=message).SerializeToString()
    pulled = PullStart(ID, 1, "n1", LogOffset(1, 2, 64), 5, end=9)
    answer = pb.PullStart(cluster=ID, epoch=1, node="n1", place=place, first=5, end=9, version=1)
    assert encode_pull_reply(pulled) == pb.PullReply(start=answer).SerializeToString()


BAD_NODES = [
    pb.KnownNodes(version=1),
    pb.KnownNodes(nodes=[pb.KnownNode(name="n1", endpoint="n1:1")]),
    pb.KnownNodes(nodes=[pb.KnownNode(name=f"n{i}", endpoint=f"n{i}:1") for i in range(8)], version=1),
    pb.KnownNodes(nodes=[pb.KnownNode(name="n1", endpoint="n1")], version=1),
    pb.KnownNodes(nodes=[pb.KnownNode(name="n1", endpoint="dns:///n1:1")], version=1),
    pb.KnownNodes(nodes=[pb.KnownNode(name="../n1", endpoint="n1:1")], version=1),
    pb.KnownNodes(nodes=[pb.KnownNode(name="n1", endpoint="n1:1")], version=2**63),
]


@pytest.mark.parametrize("index", range(len(BAD_NODES)))
def test_invalid_node_list_is_rejected(index: int) -> None:
    nodes = BAD_NODES[index]
    push = pb.PushStart(cluster=ID, members=len(nodes.nodes) or 1, node="n1", nodes=nodes)
    with pytest.raises(ProtocolViolation):
        decode_push_reply(pb.PushReply(start=push).SerializeToString())
    with pytest.raises(ProtocolViolation):
        decode_pull_reply(
            pb.PullReply(start=pb.PullStart(cluster=ID, node="n1", nodes=nodes)).SerializeToString()
        )


def test_node_list_with_different_member_count_is_rejected() -> None:
    nodes = pb.KnownNodes(nodes=[pb.KnownNode(name="n1", endpoint="n1:1")], version=1)
    push = pb.PushStart(cluster=ID, members=3, node="n1", nodes=nodes)
    with pytest.raises(ProtocolViolation, match="1 nodes of 3 members"):
        decode_push_reply(pb.PushReply(start=push).SerializeToString())


def test_unknown_version_is_rejected_with_its_number() -> None:
    hello = pb.PushHello(version=2, stream="s", session="x", incarnation=ID)
    with pytest.raises(UnknownVersion, match="got version 2, expected version 1"):
        decode_push_request(pb.PushRequest(hello=hello).SerializeToString())


def known(monkeypatch: pytest.MonkeyPatch, oldest: int, latest: int) -> None:
    monkeypatch.setattr(codec, "PROTOCOL_VERSIONS", VersionRange(oldest, latest))


PUSH, PULL = PushHello("s", "x", ID), PullHello("s", PullMerged())


@pytest.mark.parametrize(
    ("client", "node", "common"), [((1, 3), (2, 4), 3), ((1, 1), (1, 2), 1), ((1, 4), (2, 2), 2)]
)
def test_both_sides_use_latest_common_version(
    monkeypatch: pytest.MonkeyPatch, client: tuple[int, int], node: tuple[int, int], common: int
) -> None:
    known(monkeypatch, *client)
    push, pull = encode_push_request(PUSH), encode_pull_request(PULL)
    known(monkeypatch, *node)
    assert decode_push_request(push) == replace(PUSH, version=common)
    assert decode_pull_request(pull) == replace(PULL, version=common)
    pushed = PushStart(ID, 1, 3, "n1", version=common)
    pulled = PullStart(ID, 1, "n1", LogOffset(0, 0, 0), 0, version=common)
    push, pull = encode_push_reply(pushed), encode_pull_reply(pulled)
    known(monkeypatch, *client)
    assert (decode_push_reply(push), decode_pull_reply(pull)) == (pushed, pulled)


def test_unknown_version_error_names_both_version_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    known(monkeypatch, 3, 4)
    push, pull = encode_push_request(PUSH), encode_pull_request(PULL)
    start = encode_push_reply(PushStart(ID, 1, 3, "n1", version=4))
    known(monkeypatch, 1, 2)
    for decode, said in ((decode_push_request, push), (decode_pull_request, pull)):
        with pytest.raises(UnknownVersion, match="got versions 3 to 4, expected versions 1 to 2"):
            decode(said)
    with pytest.raises(UnknownVersion, match=r"\(at node n1\): got version 4, expected versions 1 to 2"):
        decode_push_reply(start)


def test_peer_without_version_range_is_treated_as_version_1() -> None:
    hello = pb.PushHello(version=1, stream="s", session="x", incarnation=ID)
    assert decode_push_request(pb.PushRequest(hello=hello).SerializeToString()) == PUSH
    start = pb.PushStart(cluster=ID, epoch=1, members=3, node="n1")
    assert decode_push_reply(pb.PushReply(start=start).SerializeToString()) == PushStart(ID, 1, 3, "n1")


UNKNOWN = b"\xf8\x7f\x07"
"""Field 2047, the number 7."""


def test_unknown_fields_of_newer_program_are_ignored() -> None:
    known_push, known_pull = pb.PushRequest(), pb.PullRequest()
    known_push.ParseFromString(encode_push_request(PUSH))
    known_pull.ParseFromString(encode_pull_request(PULL))
    known_push.hello.MergeFromString(UNKNOWN)
    known_pull.hello.MergeFromString(UNKNOWN)
    known_pull.hello.merged.MergeFromString(UNKNOWN)
    assert decode_push_request(known_push.SerializeToString() + UNKNOWN) == PUSH
    assert decode_pull_request(known_pull.SerializeToString() + UNKNOWN) == PULL
    chunk = Chunk(LogOffset(0, 0, 0), bytes(64))
    found = decode_push_request(encode_push_request(chunk) + UNKNOWN)
    assert isinstance(found, Chunk)
    assert (found.start, bytes(found.data)) == (chunk.start, chunk.data)


def test_invalid_hello_start_and_progress_raise_errors() -> None:
    with pytest.raises(InvalidName):
        PushHello("s", "..", ID)
    with pytest.raises(ValueError, match="members"):
        PushStart(ID, 0, 0, "n1")
    with pytest.raises(ValueError, match="out of range"):
        check_progress(PushProgress(durable_number=-1))


def test_truncated_push_request_is_rejected() -> None:
    whole = encode_push_request(Chunk(LogOffset(1, 2, 3), b"some bytes"))
    for size in range(1, len(whole)):
        with pytest.raises(ProtocolViolation):
            decode_push_request(whole[:size])


@pytest.mark.parametrize(
    "waypoints",
    [
        [(5, 0), (5, 1)],
        [(5, 3), (6, 2)],
        [(NUMBER_MAX + 1, 0)],
        [(position, 0) for position in range(WAYPOINTS_MAX + 1)],
    ],
)
def test_outline_with_unordered_or_too_many_waypoints_is_rejected(waypoints: list[tuple[int, int]]) -> None:
    said = pb.Outline(
        waypoints=[pb.Waypoint(position=position, log_bytes=size) for position, size in waypoints]
    )
    with pytest.raises(ProtocolViolation, match=r"waypoints|out of range"):
        decode_pull_reply(pb.PullReply(outline=said).SerializeToString())


def test_reply_without_found_time_is_rejected_if_start_is_by_time() -> None:
    start = PullStart(ID, 1, "n1", LogOffset(0, 0, 0), 0)
    check_found("earliest", start)
    check_found(StartTime(5), replace(start, found=TimeFound(0)))
    with pytest.raises(ProtocolViolation, match="cannot start by time"):
        check_found(StartTime(5), start)


def test_found_time_position_beyond_log_end_is_rejected() -> None:
    start = PullStart(ID, 1, "n1", LogOffset(0, 0, 0), 0, end=100)
    for good in (TimeFound(100), TimeFound(99, True), TimeFound(0)):
        check_found(StartTime(5), replace(start, found=good))
    for wrong in (TimeFound(101), TimeFound(100, True), TimeFound(2**62)):
        with pytest.raises(ProtocolViolation, match="beyond the end"):
            check_found(StartTime(5), replace(start, found=wrong))
        check_found("latest", replace(start, found=wrong))


def test_pull_range_rejects_log_offset_and_outline_of_selected_topics() -> None:
    with pytest.raises(ValueError, match="only positions"):
        PullMerged(ID, LogOffset(0, 0, 64), range=PullRange(5))
    with pytest.raises(ValueError, match="of all topics"):
        PullMerged(topics=("trade",), range=PullRange(5, outline_bytes=1))
