"""Decoding batches to columns: equality with the published messages, hostile columns, slices, Arrow."""

import itertools
import struct
import sys
import tracemalloc
from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa
import pytest
from batches import CREATED_NS, Heard, Said, batch, columns, forge
from hypothesis import given, settings
from hypothesis import strategies as st

import rt
from rt.log.format.batch import (
    CODEC_NONE,
    CODEC_ZSTD,
    HEADER,
    BadBatch,
    BatchHeader,
    UnknownCodec,
    check_header,
)
from rt.log.format.constants import NUMBER_MAX, TOPICS_MAX, padding
from rt.log.scan.batch_decoder import decode
from rt.log.scan.message_batch import MessageBatch
from rt.log.scan.placed_batches import PlacedBatch, groups

SESSIONS = {0: "feed", 1: "feed~backup", 7: "other"}

stamps = st.integers(-(2**63), 2**63 - 1)
topics = st.one_of(
    st.sampled_from(["", "a", "b", "trade", "größe", "数量", "\U0001f600", "\0", "x" * 1024]),
    st.text(max_size=4),
)
values = st.one_of(st.binary(max_size=12), st.integers(0, 3000).map(lambda size: b"ab" * size))
messages = st.lists(st.builds(Said, topics, values, stamps), min_size=1, max_size=6)
codecs = st.sampled_from([CODEC_NONE, CODEC_NONE, CODEC_ZSTD])


class Part:
    """A batch to decode: its messages and its position in the log."""

    def __init__(
        self, said: list[Said], *, number: int, position: int, skip: int = 0, session: int = 0, codec: int = 0
    ) -> None:
        self.said, self.number, self.position = said, number, position
        self.skip, self.session = skip, session
        self.data = batch(said, first=number, codec=codec)

    def expected(self) -> list[Heard]:
        return [
            Heard(self.position + i, self.number + i, SESSIONS[self.session], said)
            for i, said in enumerate(self.said)
            if i >= self.skip
        ]

    def __repr__(self) -> str:
        return f"Part({self.said}, number={self.number}, position={self.position}, skip={self.skip})"


parts = st.builds(
    Part,
    messages,
    number=st.integers(0, NUMBER_MAX - 6),
    position=st.integers(0, NUMBER_MAX - 6),
    skip=st.sampled_from([0, 0, 0, 1, 2, 6, 9]),
    session=st.sampled_from(sorted(SESSIONS)),
    codec=codecs,
)


def placed(
    datas: Sequence[bytes], parts: Sequence[Part] = (), before: int = 0
) -> tuple[np.ndarray, list[PlacedBatch]]:
    """Put the batches in one buffer, `before` bytes from its start, as a scanner does."""
    found, at = [], before
    for index, data in enumerate(datas):
        header = BatchHeader._make(HEADER.unpack_from(data))
        check_header(header)
        part = parts[index] if parts else None
        found.append(
            PlacedBatch(
                at,
                header,
                part.position if part else header.first,
                part.skip if part else 0,
                part.session if part else 0,
                run=index % 3,
                offset=64 + at,
            )
        )
        at += len(data)
    return np.frombuffer(bytes(before) + b"".join(datas), np.uint8), found


def heard(batch: MessageBatch | None) -> list[Heard]:
    if batch is None:
        return []
    return [
        Heard(m.position, m.number, m.session, Said(m.topic, m.value, m.timestamp_ns))
        for m in batch.messages()
    ]


def check_whole(batch: MessageBatch | None) -> None:
    """Check what must be true for every delivered batch."""
    if batch is None:
        return
    assert len(batch) > 0
    assert batch.end == batch.positions[-1] + 1
    arrow = batch.to_arrow()
    arrow.validate(full=True)
    assert arrow.num_rows == len(batch)
    for array in (batch.positions, batch.numbers, batch.timestamps_ns, batch.runs):
        assert (array.dtype, array.shape) == (np.int64, (len(batch),))
    for names, index in ((batch.session_names, batch.session_index), (batch.topic_names, batch.topic_index)):
        assert index is not None or len(names) == 1
        assert index is None or (len(index) == len(batch) and index.max() < len(names))
    assert len(batch.session_runs) == len(batch.session_names)
    assert arrow["run"].to_pylist() == batch.runs.tolist()
    assert arrow["session"].to_pylist() == batch.sessions
    assert len(batch.value_offsets) == len(batch) + 1
    assert batch.value_offsets.dtype == np.int32
    assert batch.value_offsets[-1] <= len(batch.value_bytes)


# Decoding


@given(parts)
def test_batch_decodes_to_published_messages(part: Part) -> None:
    buffer, batches = placed([part.data], [part])
    decoded = decode(buffer, batches, SESSIONS)
    assert heard(decoded) == part.expected()
    check_whole(decoded)


@given(st.lists(parts, min_size=1, max_size=6), st.sampled_from([0, 8, 64, 4096]))
def test_many_batches_decode_to_same_messages_as_each_alone(parts: list[Part], before: int) -> None:
    buffer, batches = placed([part.data for part in parts], parts, before)
    alone = [decode(buffer, [one], SESSIONS) for one in batches]
    together = decode(buffer, batches, SESSIONS)
    assert heard(together) == [message for one in alone for message in heard(one)]
    assert heard(together) == [message for part in parts for message in part.expected()]
    assert (together is None) == (not any(part.expected() for part in parts))
    check_whole(together)


@given(st.lists(parts, min_size=1, max_size=6), st.integers(0, 6), st.integers(0, 6))
def test_consecutive_batches_decode_from_anywhere_in_buffer(parts: list[Part], start: int, stop: int) -> None:
    buffer, batches = placed([part.data for part in parts], parts)
    if batches[start:stop]:
        expected = [message for part in parts[start:stop] for message in part.expected()]
        assert heard(decode(buffer, batches[start:stop], SESSIONS)) == expected


def test_messages_with_empty_values_are_decoded() -> None:
    part = Part([Said("", b"", 0)] * 5, number=0, position=0)
    buffer, batches = placed([part.data] * 3, [part] * 3)
    assert heard(decode(buffer, batches, SESSIONS)) == part.expected() * 3
    assert heard(decode(buffer, batches[:1], SESSIONS)) == part.expected()


@pytest.mark.parametrize(
    ("count", "codec"),
    [(1, CODEC_NONE), (255, CODEC_NONE), (257, CODEC_ZSTD), (TOPICS_MAX, CODEC_NONE)],
)
def test_batch_with_up_to_65535_topics_is_decoded(count: int, codec: int) -> None:
    said = [Said(f"topic {n}", b"v%d" % n, n) for n in range(count)]
    said.append(Said(said[-1].topic, b"once more", count))
    buffer, batches = placed([batch(said, codec=codec), batch(said, first=len(said), codec=codec)])
    expected = [Heard(n, n, "feed", one) for n, one in enumerate(said + said)]
    assert heard(decode(buffer, batches[:1], SESSIONS)) == expected[: len(said)]
    assert heard(decode(buffer, batches, SESSIONS)) == expected


def test_batch_of_one_topic_decodes_at_end_of_buffer() -> None:
    """Its messages have no topic index. Reading one would reach past the buffer."""
    many = [Said("t", b"", n) for n in range(100)]
    two = [Said("a", b""), Said("b", b"")]
    buffer, batches = placed([batch(two), batch(many, first=2)])
    assert [one.said for one in heard(decode(buffer, batches, SESSIONS))] == two + many


# Columns against lists


batches_of_messages = st.lists(parts, min_size=1, max_size=4).map(
    lambda parts: decode(*placed([part.data for part in parts], [*parts]), SESSIONS)
)
some_batches = batches_of_messages.filter(lambda found: found is not None)


bounds = st.integers(-26, 26)


@given(some_batches, bounds, bounds, bounds, bounds)
def test_batch_slice_equals_slice_of_message_list(
    whole: MessageBatch, start: int, stop: int, again: int, end: int
) -> None:
    part = whole.slice(start, stop)
    assert heard(part) == heard(whole)[start:stop]
    assert heard(part.slice(again, end)) == heard(whole)[start:stop][again:end]
    assert len(part) == len(part.values) == len(part.topics) == len(part.sessions)
    part.to_arrow().validate(full=True)


@given(some_batches, st.data())
def test_batch_select_keeps_exactly_masked_messages(whole: MessageBatch, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(whole)))
    part = whole.slice(start, len(whole))
    mask = data.draw(st.lists(st.booleans(), min_size=len(part), max_size=len(part)))
    chosen = part.select(np.array(mask, np.bool_))
    assert heard(chosen) == [one for one, keep in zip(heard(part), mask, strict=True) if keep]
    chosen.to_arrow().validate(full=True)


@given(some_batches, st.frozensets(topics, max_size=4), st.integers(0, 20), st.integers(0, 20))
def test_with_topics_keeps_only_messages_of_given_topics(
    whole: MessageBatch, wanted: frozenset[str], own: int, start: int
) -> None:
    wanted |= {*whole.topics[own : own + 1]}
    part = whole.slice(min(start, len(whole) - 1), len(whole))
    expected = [one for one in heard(part) if one.said.topic in wanted]
    found = part.with_topics(wanted)
    assert heard(found) == expected
    assert (found is None) == (not expected)
    check_whole(found)


def test_with_topics_returns_none_if_slice_has_no_message_of_the_topic() -> None:
    whole = decode(*placed([batch([Said("a", b""), Said("b", b""), Said("c", b"")])]), SESSIONS)
    assert whole is not None
    assert whole.slice(1, 3).with_topics(frozenset("a")) is None
    assert heard(whole.slice(1, 3).with_topics(frozenset("ac")))[0].said.topic == "c"


@given(some_batches)
def test_column_properties_match_message_fields(whole: MessageBatch) -> None:
    said = [one.said for one in heard(whole)]
    assert whole.values == [one.value for one in said]
    assert whole.topics == [one.topic for one in said]
    assert whole.timestamps_ns.tolist() == [one.timestamp_ns for one in said]
    assert whole.sessions == [one.session for one in heard(whole)]


@given(some_batches, st.integers(0, 10))
def test_messages_consume_positions_from_given_iterator_one_by_one(whole: MessageBatch, taken: int) -> None:
    positions = iter(whole.positions.tolist())
    rows = whole.messages(positions)
    assert [
        row.position for row in (next(rows, None) for _ in range(taken)) if row
    ] == whole.positions.tolist()[:taken]
    assert list(positions) == whole.positions.tolist()[taken:]


def test_message_is_tuple_with_named_fields() -> None:
    whole = decode(*placed([batch([Said("t", b"v", 5)], first=9)]), SESSIONS)
    assert whole is not None
    (message,) = whole.messages()
    wanted = {"position": 9, "timestamp_ns": 5, "session": "feed", "run": 0, "number": 9}
    assert message == rt.Message(**wanted, topic="t", value=b"v")
    assert type(message) is rt.Message


@pytest.mark.parametrize("size", [1000, 5000])
def test_values_of_slice_allocate_less_than_64_kib(size: int) -> None:
    whole = decode(*placed([batch([Said("t", bytes(size))] * (4 * 2**20 // size))]), SESSIONS)
    assert whole is not None
    part = whole.slice(10, 12)
    tracemalloc.start()
    try:
        assert part.values == [bytes(size)] * 2
        assert tracemalloc.get_traced_memory()[1] < 2**16
    finally:
        tracemalloc.stop()


def test_batches_are_compared_by_identity() -> None:
    found = placed([batch([Said("t", b"v")] * 3)])
    one, other = decode(*found, SESSIONS), decode(*found, SESSIONS)
    assert one == one  # noqa: PLR0124 - not an error of numpy
    assert one != other
    assert len({one, other}) == 2


# Groups


def header_of_size(plain: int) -> BatchHeader:
    return BatchHeader(0, 0, 0, 0, 0, 1, 1, 0, 0, 0, 0, 0, plain // 3, plain - plain // 3)


@given(st.lists(st.sampled_from([40, 1000, 65_535, 65_536, 65_537, 2**20, 16 * 2**20]), max_size=400))
def test_groups_keep_batch_order_and_are_maximal_within_size_limits(sizes: list[int]) -> None:
    batches = [PlacedBatch(index, header_of_size(size), 0, 0, 0, 0, 0) for index, size in enumerate(sizes)]
    found = list(groups(batches))
    assert [one for group in found for one in group] == batches
    for group in found:
        plain = [sizes[one.start] for one in group]
        assert len(group) == 1 or (max(plain) <= 64 * 1024 and sum(plain) <= 16 * 2**20)
    for earlier, later in itertools.pairwise(found):
        # A group ends only if the next batch is large or would not fit, or if this group's batch is large.
        plain = [sizes[one.start] for one in earlier]
        follows = sizes[later[0].start]
        assert max(*plain, follows) > 64 * 1024 or sum(plain) + follows > 16 * 2**20


def test_small_compressed_batches_are_grouped_by_decompressed_size() -> None:
    data = batch([Said("t", bytes(60_000))], codec=CODEC_ZSTD)
    assert len(data) < 300
    _, batches = placed([data] * 600)
    assert [len(group) for group in groups(batches)] == [279, 279, 42]


# Memory


def address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


def test_large_batch_is_decoded_without_copy() -> None:
    said = [Said("ab"[n % 2], bytes([n % 256]) * 100, CREATED_NS + n) for n in range(5000)]
    buffer, batches = placed([batch(said)])
    whole = decode(buffer, batches, SESSIONS)
    assert whole is not None
    part = whole.slice(100, 4000)
    for one in (whole, part):
        assert np.shares_memory(one.timestamps_ns, buffer)
        assert np.shares_memory(one.value_offsets, buffer)
        assert one.topic_index is not None
        assert np.shares_memory(one.topic_index, buffer)
        assert np.shares_memory(np.frombuffer(one.value_bytes, np.uint8), buffer)


def test_arrow_table_shares_values_offsets_timestamps_numbers_and_positions() -> None:
    said = [Said("ab"[n % 2], bytes([n % 256]) * 100, CREATED_NS + n) for n in range(5000)]
    buffer, batches = placed([batch(said)])
    whole = decode(buffer, batches, SESSIONS)
    assert whole is not None
    for one in (whole, whole.slice(100, 4000)):
        table = one.to_arrow()
        _, offsets, data = table["value"].buffers()
        assert offsets.address == address(one.value_offsets)
        assert data.address == address(np.frombuffer(one.value_bytes, np.uint8))
        assert table["timestamp"].buffers()[1].address == address(one.timestamps_ns)
        assert table["number"].buffers()[1].address == address(one.numbers)
        assert table["position"].buffers()[1].address == address(one.positions)
        assert table["value"].to_pylist() == one.values


# Arrow


PAIR = pa.struct(
    [pa.field("key", pa.string(), nullable=False), pa.field("value", pa.binary(), nullable=False)]
)


def test_arrow_schema_matches_schema_expected_by_spark() -> None:
    whole = decode(*placed([batch([Said("t", b"v", 5)])]), SESSIONS)
    assert whole is not None
    text = pa.dictionary(pa.int32(), pa.string())
    assert whole.to_arrow().schema.equals(
        pa.schema(
            [
                pa.field("position", pa.int64(), nullable=False),
                pa.field("timestamp", pa.timestamp("ns", tz="UTC"), nullable=False),
                pa.field("session", text, nullable=False),
                pa.field("run", pa.int64(), nullable=False),
                pa.field("number", pa.int64(), nullable=False),
                pa.field("topic", text, nullable=False),
                pa.field("value", pa.binary(), nullable=False),
                pa.field("headers", pa.list_(PAIR), nullable=False),
            ]
        )
    )


@given(some_batches)
def test_arrow_table_has_same_content_as_messages(whole: MessageBatch) -> None:
    table = whole.to_arrow()
    assert [
        Heard(position, number, session, Said(topic, value, stamp))
        for position, stamp, session, number, topic, value in zip(
            table["position"].to_pylist(),
            table["timestamp"].cast(pa.int64()).to_pylist(),
            table["session"].to_pylist(),
            table["number"].to_pylist(),
            table["topic"].to_pylist(),
            table["value"].to_pylist(),
            strict=True,
        )
    ] == heard(whole)


def test_to_arrow_without_pyarrow_raises_error_with_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = decode(*placed([batch([Said("t", b"v")])]), SESSIONS)
    assert whole is not None
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.delitem(sys.modules, "rt.log.scan.arrow", raising=False)
    monkeypatch.delattr("rt.log.scan.arrow", raising=False)
    with pytest.raises(rt.RtError, match=r"pip install 'rt-transport\[arrow\]'"):
        whole.to_arrow()


# Hostile columns: the checksums and the header are valid, but no writer of rt creates such contents


def offsets(*ends: int) -> bytes:
    """Return a batch of one topic whose messages end at `ends`. It has as many value bytes as the last
    end.
    """
    good = columns([0, *ends], [0] * len(ends), [], [0, 1], b"t")
    return forge(good, bytes(max(ends[-1], 0)), message_count=len(ends))


def topic_index(*index: int, count: int = 2) -> bytes:
    names = "abcdefgh"[:count].encode()
    data = columns([0] * (len(index) + 1), [0] * len(index), index, range(count + 1), names)
    return forge(data, message_count=len(index), topic_count=count)


def topic_offsets(ends: Sequence[int], text: bytes) -> bytes:
    count = len(ends) - 1
    index = range(count) if count > 1 else []
    data = columns([0] * (count + 1), [0] * count, index, ends, text)
    return forge(data, message_count=count, topic_count=count)


def times(*stamps: int, low: int, high: int) -> bytes:
    data = columns([0] * (len(stamps) + 1), stamps, [], [0, 1], b"t")
    return forge(data, message_count=len(stamps), timestamp_low_ns=low, timestamp_high_ns=high)


MOST, LEAST = 2**31 - 1, -(2**31)
BAD_OFFSETS = "value offsets do not rise"
BAD_TOPICS = "topic offsets do not rise"
HOSTILE = {
    "value offsets fall": (offsets(2, 1, 3), BAD_OFFSETS),
    "a value of negative size": (offsets(-1, 3), BAD_OFFSETS),
    "a value far below the start": (offsets(LEAST, 3), BAD_OFFSETS),
    "a value beyond the end": (offsets(4, 3), BAD_OFFSETS),
    "a value far beyond the end": (offsets(MOST, 3), BAD_OFFSETS),
    "offsets that go round the int32": (offsets(MOST, -2, 5), BAD_OFFSETS),
    "offsets that go round in small steps": (offsets(2**30, MOST, -(2**30), 5), BAD_OFFSETS),
    "offsets that go round twice": (offsets(MOST, -2, MOST - 2, -4, 5), BAD_OFFSETS),
    "the first offset is not 0": (
        forge(columns([1, 3], [0], [], [0, 1], b"t"), bytes(3)),
        BAD_OFFSETS,
    ),
    "the first offset is negative": (
        forge(columns([-8, 3], [0], [], [0, 1], b"t"), bytes(3)),
        BAD_OFFSETS,
    ),
    "values that belong to no message": (
        forge(columns([0, 3], [0], [], [0, 1], b"t"), bytes(4)),
        BAD_OFFSETS,
    ),
    "fewer values than the messages say": (
        forge(columns([0, 5], [0], [], [0, 1], b"t"), bytes(4)),
        BAD_OFFSETS,
    ),
    "a topic index equal to the topics": (topic_index(0, 2), "topic index"),
    "a topic index of the largest kind": (topic_index(0, 65_535), "topic index"),
    "a topic index in the last message": (topic_index(0, 1, 2, 1, 3, count=3), "topic index"),
    "topic offsets fall": (topic_offsets([0, 2, 1, 3], b"abc"), BAD_TOPICS),
    "the first topic does not start at 0": (topic_offsets([1, 2, 3], b"abc"), BAD_TOPICS),
    "the one topic does not start at 0": (topic_offsets([1, 3], b"abc"), BAD_TOPICS),
    "the topics end before their bytes": (topic_offsets([0, 1, 2], b"abc"), BAD_TOPICS),
    "the one topic ends before its bytes": (topic_offsets([0, 2], b"abc"), BAD_TOPICS),
    "the topics end behind their bytes": (topic_offsets([0, 1, 4], b"abc"), BAD_TOPICS),
    "the one topic ends behind its bytes": (topic_offsets([0, 4], b"abc"), BAD_TOPICS),
    "topic offsets that go round the int32": (topic_offsets([0, MOST, -2, 3], b"abc"), BAD_TOPICS),
    "a topic of negative size": (topic_offsets([0, -1, 3], b"abc"), BAD_TOPICS),
    "a topic that is not UTF-8": (topic_offsets([0, 2], b"\xff\xfe"), "not UTF-8"),
    "a topic with a surrogate": (topic_offsets([0, 3], b"\xed\xa0\x80"), "not UTF-8"),
    "a topic that is overlong": (topic_offsets([0, 2], b"\xc0\x80"), "not UTF-8"),
    "a character in two topics": (topic_offsets([0, 1, 2], "é".encode()), "not UTF-8"),
    "a topic above 1,024 bytes among others": (
        topic_offsets([0, 1, 1026], b"a" * 1026),
        "a topic above 1024 bytes",
    ),
    "an earlier message than the header says": (times(4, 5, 9, low=5, high=9), "time range"),
    "a later message than the header says": (times(5, 10, 6, low=5, high=9), "time range"),
    "no message as early as the header says": (times(6, 9, low=5, high=9), "time range"),
    "no message as late as the header says": (times(5, 8, low=5, high=9), "time range"),
    "a time range upside down": (times(5, 9, low=9, high=5), "time range"),
    "a time range that goes round": (times(-1, low=2**63 - 1, high=-(2**63)), "time range"),
}
GOOD = batch([Said("a", b"good"), Said("b", b"also")])


@pytest.mark.parametrize(("hostile", "says"), HOSTILE.values(), ids=HOSTILE)
def test_hostile_columns_are_rejected_alone_and_among_valid_batches(hostile: bytes, says: str) -> None:
    for datas in ([hostile], [hostile, GOOD], [GOOD, hostile], [GOOD, hostile, GOOD], [hostile, hostile]):
        buffer, batches = placed(datas)
        with pytest.raises(BadBatch, match=says):
            decode(buffer, batches, SESSIONS)


@pytest.mark.parametrize(("hostile", "says"), HOSTILE.values(), ids=HOSTILE)
def test_hostile_columns_are_rejected_when_compressed(hostile: bytes, says: str) -> None:
    import zstandard

    header = BatchHeader._make(HEADER.unpack_from(hostile))
    plain_columns, plain_values = hostile[64 : 64 + header.columns_bytes], bytes(header.values_bytes)
    frames = [zstandard.ZstdCompressor().compress(part) for part in (plain_columns, plain_values)]
    stored = header._replace(
        flags=CODEC_ZSTD,
        columns_stored=len(frames[0]),
        values_stored=len(frames[1]),
        total_bytes=64 + sum(len(part) + len(padding(len(part))) for part in frames),
    )
    data = HEADER.pack(*stored) + b"".join(part + padding(len(part)) for part in frames)
    for datas in ([data], [GOOD, data], [data, GOOD]):
        # A scanner refuses data that grows when compressed, as here. The columns must be refused anyway.
        found, at = [], 0
        for one in datas:
            found.append(PlacedBatch(at, BatchHeader._make(HEADER.unpack_from(one)), 0, 0, 0, 0, at))
            at += len(one)
        with pytest.raises(BadBatch, match=says):
            decode(np.frombuffer(b"".join(datas), np.uint8), found, SESSIONS)


def test_topic_dictionary_is_not_reused_for_same_bytes_with_another_topic_count() -> None:
    """Batches with the same topic bytes share the decoded topics. The topic count is not among these
    bytes.
    """
    one = columns([0, 0, 0], [0, 0], [0, 0], [0, 8], b"12345678")
    many = forge(one, message_count=2, topic_count=2)
    alone = forge(columns([0, 0], [0], [], [0, 8], b"12345678"))
    for datas in ([alone, many], [many, alone], [alone, alone, many]):
        with pytest.raises(BadBatch, match=BAD_TOPICS):
            decode(*placed(datas), SESSIONS)


def test_valid_forged_batches_are_decoded() -> None:
    """The hostile batches are refused for their contents, not for the way they are made."""
    for good in (
        offsets(1, 1, 3),
        topic_index(0, 1, 0),
        topic_offsets([0, 1, 3], b"abc"),
        topic_offsets([0, 0, 2], "é".encode()),
        topic_offsets([0, 1, 1025], b"a" * 1025),
        topic_offsets([0, 0, 0], b""),
        times(5, 9, 6, low=5, high=9),
        times(-(2**63), 2**63 - 1, low=-(2**63), high=2**63 - 1),
    ):
        for datas in ([good], [good, GOOD], [GOOD, good]):
            decoded = decode(*placed(datas), SESSIONS)
            check_whole(decoded)


def test_unknown_flags_raise_unknown_codec_with_flag_value() -> None:
    data = forge(columns([0, 1], [0], [], [0, 1], b"t"), b"v", flags=0x20)
    for datas in ([data], [GOOD, data]):
        with pytest.raises(UnknownCodec, match="unknown to this rt: flags 0x0020"):
            decode(*placed(datas), SESSIONS)


def test_topic_repeated_in_dictionary_is_decoded() -> None:
    data = forge(
        columns([0, 1, 2, 3], [0] * 3, [0, 1, 1], [0, 1, 2], b"aa"), b"xyz", message_count=3, topic_count=2
    )
    for datas in ([data], [data, data], [GOOD, data]):
        decoded = decode(*placed(datas), SESSIONS)
        check_whole(decoded)
        assert decoded is not None
        assert decoded.topics[-3:] == ["a", "a", "a"]
        assert decoded.with_topics(frozenset(["a"])) is not None


@st.composite
def broken(draw: st.DrawFn) -> list[bytes]:
    """Draw batches and change some bytes or words in the columns of one of them."""
    datas = [part.data for part in draw(st.lists(parts.filter(is_plain), min_size=1, max_size=3))]
    which = draw(st.integers(0, len(datas) - 1))
    data = bytearray(datas[which])
    (columns_bytes,) = struct.unpack_from("<I", data, 56)
    for _ in range(draw(st.integers(1, 3))):
        if draw(st.booleans()):
            data[64 + draw(st.integers(0, columns_bytes - 1))] = draw(st.integers(0, 255))
        else:
            at = 64 + 4 * draw(st.integers(0, columns_bytes // 4 - 1))
            word = draw(st.sampled_from([0, 1, 2, -1, MOST, LEAST, MOST - 1, 2**30, -(2**30)]))
            struct.pack_into("<i", data, at, word)
    datas[which] = bytes(data)
    return datas


def is_plain(part: Part) -> bool:
    return part.data[16] == CODEC_NONE


@settings(max_examples=150)
@given(broken())
def test_corrupt_columns_are_rejected_or_decoded_alike_alone_and_together(datas: list[bytes]) -> None:
    def outcome(batches: list[PlacedBatch]) -> list[Heard] | str:
        try:
            decoded = decode(buffer, batches, SESSIONS)
        except BadBatch:
            return "bad"
        check_whole(decoded)
        return heard(decoded)

    buffer, batches = placed(datas)
    alone = [outcome([one]) for one in batches]
    together = outcome(batches)
    if "bad" in alone:
        assert together == "bad"
    else:
        assert together == [message for one in alone for message in one]


def every_single_bit(data: bytes, start: int, end: int) -> Iterator[bytes]:
    for bit in range(8 * start, 8 * end):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        yield bytes(flipped)


def test_columns_with_any_flipped_bit_are_rejected_or_decode_to_valid_batch() -> None:
    """The checksums are valid, as if the publisher's memory had failed before the write."""
    data = batch([Said("a", b"xy"), Said("bc", b""), Said("a", b"z")])
    (columns_bytes,) = struct.unpack_from("<I", data, 56)
    refused = 0
    for flipped in every_single_bit(data, 64, 64 + columns_bytes):
        buffer, batches = placed([flipped, GOOD])
        for group in (batches[:1], batches):
            try:
                check_whole(decode(buffer, group, SESSIONS))
            except BadBatch:
                refused += 1
    assert refused > 500
