"""Encoding and decoding of Raft messages: round trips, size limits, versions and invalid bytes."""

from __future__ import annotations

import pickle
import struct
import tracemalloc

import pytest
from dump import Dump, diagram
from hypothesis import given, settings
from hypothesis import strategies as st

import sequencer.raft.transport.frames
from replicator.protocol.version import VersionRange
from rt.errors import FormatError, UnknownVersion
from sequencer.raft.model.messages import (
    APPEND_BYTES_MAX,
    CHUNK_BYTES_MAX,
    COMMAND_BYTES_MAX,
    ENTRY_BYTES_MAX,
    NOWHERE,
    SNAPSHOT_BYTES_MAX,
    Admit,
    AppendEntries,
    AppendEntriesReply,
    AppMessage,
    DiskClaim,
    FetchState,
    FetchStateChunk,
    Forward,
    Hello,
    InstallSnapshot,
    InstallSnapshotReply,
    LogIndex,
    MemberList,
    Message,
    RaftEntry,
    RequestVote,
    RequestVoteReply,
    TimeoutNow,
)
from sequencer.raft.transport import codec
from sequencer.raft.transport.codec import decode, encode, version_with
from sequencer.raft.transport.frames import (
    APPEND_ENTRIES_MAX,
    FRAME_BYTES_MAX,
    FRAME_HEADER_BYTES,
    HELLO_REST_BYTES_MAX,
    NUMBER_MAX,
    FrameKind,
    decode_header,
    ping,
)

CLAIM = DiskClaim(b"D" * 16, LogIndex(3, 2))
EXAMPLES: list[Message | Hello] = [
    Hello(b"C" * 16, 7, CLAIM, wants_bootstrap=True),
    RequestVote(5, LogIndex(9, 4), CLAIM, pre=True),
    RequestVoteReply(5, granted=True, claim=CLAIM, pre=False),
    AppendEntries(5, LogIndex(9, 4), 8, 7, 0x1234567, ()),
    AppendEntries(5, LogIndex(9, 4), 8, 7, 0x1234567, (RaftEntry(b"ten", 10, 4), RaftEntry(b"", 11, 5))),
    AppendEntriesReply(5, matched=True, prev=9, index=11, claim=CLAIM),
    InstallSnapshot(5, LogIndex(9, 4), 100, b"S" * 32, 90, b"the end..."),
    InstallSnapshotReply(5, LogIndex(9, 4), 120, 100, installed=True, claim=CLAIM),
    TimeoutNow(5),
    FetchState(b"h" * 32, 1 << 20),
    FetchStateChunk(LogIndex(9, 4), 1 << 21, b"h" * 32, 1 << 20, b"ten bytes."),
    Forward(b"a command"),
    Admit(b"a state"),
    AppMessage(b"a report"),
    MemberList(9, is_committed=True, content=b"a list"),
]

OFFSETS = st.integers(0, SNAPSHOT_BYTES_MAX)
NUMBERS = st.integers(0, NUMBER_MAX) | st.integers(0, 300)
IDS = st.binary(min_size=16, max_size=16)
PLACES = st.builds(LogIndex, st.integers(1, NUMBER_MAX), NUMBERS) | st.just(NOWHERE)
CLAIMS = st.builds(DiskClaim, IDS, PLACES)


def in_order(message: RequestVote | InstallSnapshot) -> RequestVote | InstallSnapshot:
    """Return the message with a term that is at least the term of its log index, as in every valid
    message.
    """
    place = message.last if isinstance(message, RequestVote) else message.snapshot
    return message._replace(term=max(message.term, place.term))


@st.composite
def appends(draw: st.DrawFn) -> AppendEntries:
    contents = draw(st.lists(st.binary(max_size=40), max_size=6))
    terms = sorted(draw(st.lists(NUMBERS, min_size=len(contents) + 2, max_size=len(contents) + 2)))
    index = draw(st.integers(1, NUMBER_MAX - len(contents)))
    entries = [RaftEntry(content, index + 1 + i, terms[1 + i]) for i, content in enumerate(contents)]
    chain = draw(st.integers(0, 2**64 - 1))
    return AppendEntries(
        terms[-1], LogIndex(index, terms[0]), draw(NUMBERS), draw(NUMBERS), chain, tuple(entries)
    )


@st.composite
def chunks(draw: st.DrawFn) -> InstallSnapshot:
    data = draw(st.binary(max_size=60))
    offset = draw(st.integers(0, SNAPSHOT_BYTES_MAX - len(data)))
    length = draw(st.integers(offset + len(data), SNAPSHOT_BYTES_MAX))
    return InstallSnapshot(
        draw(NUMBERS), draw(PLACES), length, draw(st.binary(min_size=32, max_size=32)), offset, data
    )


MESSAGES = st.one_of(
    st.builds(Hello, IDS, NUMBERS, CLAIMS, st.booleans()),
    st.builds(RequestVote, NUMBERS, PLACES, CLAIMS, st.booleans(), st.booleans()).map(in_order),
    st.builds(RequestVoteReply, NUMBERS, st.booleans(), CLAIMS, st.booleans()),
    appends(),
    st.builds(AppendEntriesReply, NUMBERS, st.booleans(), NUMBERS, NUMBERS, CLAIMS),
    chunks().map(in_order),
    st.builds(InstallSnapshotReply, NUMBERS, PLACES, OFFSETS, OFFSETS, st.booleans(), CLAIMS),
    st.builds(Forward, st.binary()),
    st.builds(Admit, st.binary()),
    st.builds(AppMessage, st.binary()),
    st.builds(TimeoutNow, NUMBERS),
    st.builds(FetchState, st.binary(min_size=32, max_size=32), OFFSETS),
    chunks().map(lambda chunk: FetchStateChunk(*chunk[1:])),
    st.builds(MemberList, NUMBERS, st.booleans(), st.binary()),
)


def parts(message: Message | Hello) -> tuple[int, bytearray]:
    """Return the kind and the body of a message's frame. The body can be changed."""
    frame = b"".join(encode(message, 1))
    return decode_header(frame).kind, bytearray(frame[FRAME_HEADER_BYTES:])


def patched(message: Message | Hello, offset: int, layout: str, *values: object) -> tuple[int, bytearray]:
    kind, body = parts(message)
    struct.pack_into(layout, body, offset, *values)
    return kind, body


@given(MESSAGES, NUMBERS)
@settings(max_examples=300)
def test_message_and_epoch_survive_encode_and_decode(message: Message | Hello, epoch: int) -> None:
    frame = b"".join(encode(message, epoch))
    length, kind, read_epoch = decode_header(frame)
    assert (FRAME_HEADER_BYTES + length, read_epoch) == (len(frame), epoch)
    assert decode(kind, frame[FRAME_HEADER_BYTES:]) == message
    assert decode(kind, memoryview(frame)[FRAME_HEADER_BYTES:]) == message


@given(MESSAGES, st.data())
@settings(max_examples=250)
def test_mutated_body_decodes_canonically_or_raises_format_error(
    message: Message | Hello, data: st.DataObject
) -> None:
    kind, body = parts(message)
    for _ in range(data.draw(st.integers(1, 3))):
        if body:
            place = data.draw(st.integers(0, len(body) - 1))
            body[place : place + data.draw(st.integers(0, 2))] = data.draw(st.binary(max_size=2))
    check_total(kind, bytes(body))


@given(st.sampled_from(FrameKind) | st.integers(0, 255), st.binary(max_size=200))
@settings(max_examples=250)
def test_random_body_decodes_canonically_or_raises_format_error(kind: int, body: bytes) -> None:
    check_total(kind, body)


@given(st.binary(min_size=FRAME_HEADER_BYTES, max_size=FRAME_HEADER_BYTES))
def test_random_header_is_within_frame_limit_or_raises_format_error(data: bytes) -> None:
    try:
        header = decode_header(data)
    except FormatError:
        return
    assert FRAME_HEADER_BYTES + header.length <= FRAME_BYTES_MAX


def check_total(kind: int, body: bytes) -> None:
    try:
        message = decode(kind, body)
    except FormatError:
        return
    # Every accepted message is canonical: it encodes to exactly these bytes, within the bounds of `encode`.
    encoded = b"".join(encode(message, 1))[FRAME_HEADER_BYTES:]
    assert encoded == (body[: len(encoded)] if isinstance(message, Hello) else body)


@pytest.mark.parametrize("message", EXAMPLES[1:-4], ids=range(1, len(EXAMPLES) - 4))
def test_body_of_wrong_length_raises_format_error(message: Message) -> None:
    kind, body = parts(message)
    has_data = kind in {FrameKind.INSTALL_SNAPSHOT, FrameKind.FETCH_STATE_CHUNK}
    if not has_data:
        with pytest.raises(FormatError):
            decode(kind, bytes(body) + b"\0")
    for size in range(len(body) - (10 if has_data else 0)):
        with pytest.raises(FormatError):
            decode(kind, bytes(body[:size]))


BAD = {
    "a kind that nobody has": (99, b""),
    "a ping, which is no message": (FrameKind.PING, b""),
    "neither yes nor no": patched(EXAMPLES[5], 8, "B", 2),
    "called neither yes nor no": patched(EXAMPLES[1], 57, "B", 2),
    "an absurd term to stand in": patched(EXAMPLES[8], 0, "<Q", 1 << 63),
    "an absurd offset to ask for": patched(EXAMPLES[9], 32, "<Q", SNAPSHOT_BYTES_MAX + 1),
    "a piece outside its snapshot": patched(EXAMPLES[10], 16, "<Q", 1 << 20),
    "a piece of no entry": patched(EXAMPLES[10], 0, "<Q", 0),
    "an absurd epoch": patched(EXAMPLES[0], 16, "<Q", 1 << 63),
    "an absurd term": patched(EXAMPLES[1], 0, "<Q", 1 << 63),
    "an absurd index": patched(EXAMPLES[1], 8, "<Q", 1 << 63),
    "a term where no entry stands": patched(EXAMPLES[1], 8, "<Q", 0),
    "an absurd commit": patched(EXAMPLES[3], 24, "<Q", 1 << 63),
    "indexes that pass the largest": patched(EXAMPLES[4], 8, "<Q", NUMBER_MAX - 1),
    "more entries than bytes": patched(EXAMPLES[4], 48, "<I", 1000),
    "more entries than any body has": patched(EXAMPLES[4], 48, "<I", 2**32 - 1),
    "fewer entries than bytes": patched(EXAMPLES[4], 48, "<I", 1),
    "no entries, but bytes": patched(EXAMPLES[4], 48, "<I", 0),
    "a content that ends too early": patched(EXAMPLES[4], 52, "<I", 2),
    "a content that ends too late": patched(EXAMPLES[4], 52, "<I", 4),
    "a content above the limit": patched(EXAMPLES[4], 52, "<I", ENTRY_BYTES_MAX + 1),
    "sizes that sum up beyond 32 bits": patched(EXAMPLES[4], 52, "<II", 2**32 - 1, 4),
    "an entry of an older term than the one before": patched(EXAMPLES[4], 60, "<Q", 3),
    "terms that fall": patched(EXAMPLES[4], 60, "<QQ", 5, 4),
    "an entry of a later term than the message": patched(EXAMPLES[4], 68, "<Q", 6),
    "a chunk behind the snapshot": patched(EXAMPLES[6], 64, "<Q", 91),
    "a chunk of a snapshot above the limit": patched(EXAMPLES[6], 24, "<Q", SNAPSHOT_BYTES_MAX + 1),
    "an offset above any snapshot": patched(EXAMPLES[7], 24, "<Q", SNAPSHOT_BYTES_MAX + 1),
    "a command above the limit": (FrameKind.FORWARD, bytes(ENTRY_BYTES_MAX + 1)),
    "a first snapshot above the limit": (FrameKind.ADMIT, bytes(CHUNK_BYTES_MAX + 1)),
    "something told above the limit": (FrameKind.APP_MESSAGE, bytes(COMMAND_BYTES_MAX + 1)),
    "a chunk above the limit": (FrameKind.INSTALL_SNAPSHOT, bytes(72 + CHUNK_BYTES_MAX + 1)),
    "a pickle": (
        FrameKind.APPEND_ENTRIES,
        pickle.dumps({"type": "append_entries", "term": 10**6, "entries": []}),
    ),
}


@pytest.mark.parametrize(("kind", "body"), BAD.values(), ids=BAD)
def test_invalid_body_raises_format_error(kind: int, body: bytes) -> None:
    with pytest.raises(FormatError):
        decode(kind, bytes(body))
    with pytest.raises(FormatError):
        decode(kind, memoryview(body))


@pytest.mark.parametrize(
    "header",
    [
        struct.pack("<IBBHQ", 0, 0, 1, 0, 1),
        struct.pack("<IBBHQ", 0, 12, 1, 0, 1),
        struct.pack("<IBBHQ", 0, FrameKind.PING, 1, 1, 1),
        struct.pack("<IBBHQ", 1, FrameKind.PING, 1, 0, 1),
        struct.pack("<IBBHQ", 57 + HELLO_REST_BYTES_MAX + 1, FrameKind.HELLO, 1, 0, 1),
        struct.pack("<IBBHQ", 56, FrameKind.HELLO, 1, 0, 1),
        struct.pack("<IBBHQ", 2**32 - 1, FrameKind.APPEND_ENTRIES, 1, 0, 1),
        struct.pack("<IBBHQ", FRAME_BYTES_MAX - FRAME_HEADER_BYTES + 1, FrameKind.APPEND_ENTRIES, 1, 0, 1),
        b"GET / HTTP/1.1\r\n"[:FRAME_HEADER_BYTES],
        pickle.dumps(list(range(9)))[:FRAME_HEADER_BYTES],
    ],
)
def test_invalid_header_raises_format_error(header: bytes) -> None:
    with pytest.raises(FormatError):
        decode_header(header)


def test_header_of_newer_version_raises_unknown_version() -> None:
    with pytest.raises(UnknownVersion):
        decode_header(struct.pack("<IBBHQ", 0, FrameKind.PING, 2, 0, 1))


# The version of the protocol


def hello_of(monkeypatch: pytest.MonkeyPatch, oldest: int, latest: int) -> bytes:
    monkeypatch.setattr(codec, "VERSIONS", VersionRange(oldest, latest))
    return b"".join(encode(EXAMPLES[0], 1))


def test_hello_carries_version_range_only_if_it_exceeds_version_1(monkeypatch: pytest.MonkeyPatch) -> None:
    assert hello_of(monkeypatch, 1, 1) == b"".join(encode(EXAMPLES[0], 1))
    assert len(hello_of(monkeypatch, 1, 1)) == FRAME_HEADER_BYTES + 57
    assert hello_of(monkeypatch, 1, 3)[FRAME_HEADER_BYTES + 57 :] == bytes([1, 3])


@pytest.mark.parametrize(
    ("own", "peer", "common"), [((1, 3), (2, 4), 3), ((1, 1), (1, 2), 1), ((1, 4), (1, 1), 1)]
)
def test_members_agree_on_latest_common_version(
    monkeypatch: pytest.MonkeyPatch, own: tuple[int, int], peer: tuple[int, int], common: int
) -> None:
    for here, there in ((own, peer), (peer, own)):
        frame = hello_of(monkeypatch, *there)
        monkeypatch.setattr(codec, "VERSIONS", VersionRange(*here))
        assert decode_header(frame).kind == FrameKind.HELLO
        for more in (b"", bytes(HELLO_REST_BYTES_MAX - 2)):  # A newer program may send more.
            body = frame[FRAME_HEADER_BYTES:] + more * (len(frame) > FRAME_HEADER_BYTES + 57)
            assert decode(FrameKind.HELLO, body) == EXAMPLES[0]
            assert version_with(body, "n2") == common


def test_unknown_version_error_names_both_ranges_without_common_version(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    body = hello_of(monkeypatch, 2, 3)[FRAME_HEADER_BYTES:]
    monkeypatch.setattr(codec, "VERSIONS", VersionRange(1, 1))
    with pytest.raises(UnknownVersion, match=r"\(at member n2\): got versions 2 to 3, expected version 1"):
        version_with(body, "n2")


def test_frame_of_other_than_negotiated_version_raises_unknown_version() -> None:
    for message in EXAMPLES[1:]:
        frame = b"".join(encode(message, 7, 3))
        assert decode_header(frame, 0, 3).epoch == 7
        with pytest.raises(UnknownVersion, match="got 3, expected 2"):
            decode_header(frame, 0, 2)


def test_largest_messages_round_trip_and_largest_append_fills_frame_limit() -> None:
    contents = [bytes(16)] * APPEND_ENTRIES_MAX
    largest = AppendEntries(
        1, LogIndex(1, 1), 0, 0, 0, tuple(RaftEntry(c, i + 2, 1) for i, c in enumerate(contents))
    )
    assert APPEND_ENTRIES_MAX * 16 == APPEND_BYTES_MAX
    for message in [
        largest,
        AppendEntries(1, LogIndex(1, 1), 0, 0, 0, (RaftEntry(bytes(ENTRY_BYTES_MAX), 2, 1),)),
        InstallSnapshot(1, NOWHERE, CHUNK_BYTES_MAX, bytes(32), 0, bytes(CHUNK_BYTES_MAX)),
        Forward(bytes(ENTRY_BYTES_MAX)),
        Admit(bytes(CHUNK_BYTES_MAX)),
    ]:
        frame = b"".join(encode(message, 1))
        header = decode_header(frame)
        assert decode(header.kind, frame[FRAME_HEADER_BYTES:]) == message
        assert len(frame) <= FRAME_BYTES_MAX
    assert len(b"".join(encode(largest, 1))) == FRAME_BYTES_MAX


def test_encode_does_not_copy_contents_and_decode_returns_bytes() -> None:
    content = bytes(1000)
    buffers = encode(AppendEntries(1, LogIndex(4, 1), 0, 0, 0, (RaftEntry(content, 5, 1),)), 1)
    assert buffers[1] is content
    assert encode(Forward(content), 1)[1] is content
    kind, body = parts(AppendEntries(1, LogIndex(4, 1), 0, 0, 0, (RaftEntry(content, 5, 1),)))
    decoded = decode(kind, memoryview(body))
    assert isinstance(decoded, AppendEntries)
    assert type(decoded.entries[0].content) is bytes


def test_encode_rejects_messages_outside_limits() -> None:
    with pytest.raises(AssertionError):
        encode(AppendEntries(1, LogIndex(4, 1), 0, 0, 0, (RaftEntry(b"", 6, 1),)), 1)
    with pytest.raises(AssertionError):
        encode(AppendEntries(1, LogIndex(4, 1), 0, 0, 0, (RaftEntry(bytes(ENTRY_BYTES_MAX + 1), 5, 1),)), 1)
    with pytest.raises(AssertionError):
        encode(Forward(bytes(ENTRY_BYTES_MAX + 1)), 1)
    with pytest.raises(struct.error):
        encode(AppendEntriesReply(-1, matched=True, prev=0, index=0, claim=CLAIM), 1)


def test_decode_of_oversized_entry_count_allocates_under_64_kib() -> None:
    kind, body = BAD["more entries than any body has"]
    tracemalloc.start()
    try:
        with pytest.raises(FormatError):
            decode(kind, bytes(body))
        assert tracemalloc.get_traced_memory()[1] < 64 << 10
    finally:
        tracemalloc.stop()


def test_frames_of_version_1_match_golden_bytes(golden) -> None:
    header = diagram(sequencer.raft.transport.frames)
    frames = [ping(7), *(b"".join(encode(message, 7)) for message in EXAMPLES)]
    dump = Dump(b"".join(frames))
    for frame, message in zip(frames, ["a ping", *EXAMPLES], strict=True):
        dump.title(str(message))
        dump.fields(header)
        dump.part(len(frame) - FRAME_HEADER_BYTES, "body")
    kept = golden("raft/codec/v1", dump.data, dump.text())
    for message in [None, *EXAMPLES]:
        length, kind, epoch = decode_header(kept)
        assert epoch == 7
        body, kept = kept[FRAME_HEADER_BYTES:][:length], kept[FRAME_HEADER_BYTES + length :]
        assert kind == FrameKind.PING if message is None else decode(kind, body) == message
    assert not kept
