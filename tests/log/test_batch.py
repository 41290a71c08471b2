"""Batches are encoded as specified, invalid ones are rejected, and the header bounds decompression."""

import tracemalloc
from typing import Any

import pytest
import zstandard
from batches import Said, batch, columns, draft, forge, read_batch_dumbly
from hypothesis import given
from hypothesis import strategies as st

from rt.log.format.batch import (
    BATCH_HEADER_BYTES,
    BATCH_MAGIC,
    CODEC_NONE,
    CODEC_ZSTD,
    CODECS,
    HEADER,
    BadBatch,
    BatchHeader,
    UnknownCodec,
    check_header,
    check_values,
    encode_batch,
    expand,
)
from rt.log.format.checksum import batch_seed, crc32c, segment_seed
from rt.log.format.constants import (
    BATCH_BYTES_MAX,
    MESSAGE_BYTES_MAX,
    NUMBER_MAX,
    TOPIC_BYTES_MAX,
    TOPICS_MAX,
    padded,
    padding,
)

stamps = st.integers(-(2**63), 2**63 - 1)
topics = st.sampled_from(["", "t", "trade", "größe", "数", "\0", "t" * 1024])
said = st.lists(st.builds(Said, topics, st.binary(max_size=40), stamps), min_size=1, max_size=12)
seeds = st.integers(0, 2**32 - 1)
numbers = st.integers(0, NUMBER_MAX - 12)


def header_of(data: bytes) -> BatchHeader:
    return BatchHeader._make(HEADER.unpack_from(data))


def dumb_crc32c(data: bytes, start: int = 0) -> int:
    """Compute CRC-32C bit by bit from its definition: the reflected polynomial 0x1EDC6F41."""
    crc = start ^ 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


# Checksums


def test_checksum_is_crc32c() -> None:
    assert crc32c(b"123456789") == dumb_crc32c(b"123456789") == 0xE3069283


@given(st.binary(max_size=100), st.binary(max_size=100))
def test_checksum_continues_from_earlier_checksum(one: bytes, other: bytes) -> None:
    assert crc32c(other, crc32c(one)) == dumb_crc32c(one + other) == dumb_crc32c(other, dumb_crc32c(one))


@given(st.binary(min_size=16, max_size=16), seeds, seeds, st.integers(0, 2**62))
def test_batch_seed_covers_incarnation_run_roll_and_offset(
    incarnation: bytes, run: int, roll: int, offset: int
) -> None:
    place = (
        incarnation + run.to_bytes(4, "little") + roll.to_bytes(4, "little") + offset.to_bytes(8, "little")
    )
    assert batch_seed(segment_seed(incarnation, run, roll), offset) == dumb_crc32c(place)


@given(said, numbers, seeds, st.sampled_from([CODEC_NONE, CODEC_ZSTD]))
def test_checksums_cover_all_bytes_except_magic_and_themselves(
    messages: list[Said], first: int, seed: int, codec: int
) -> None:
    data = batch(messages, first=first, seed=seed, codec=codec)
    header = header_of(data)
    values_at = BATCH_HEADER_BYTES + padded(header.columns_stored)
    assert header.checksum == dumb_crc32c(data[8:values_at], seed)
    assert header.values_checksum == dumb_crc32c(data[values_at:], seed)


# Writing


@given(said, numbers, seeds)
def test_uncompressed_batch_decodes_to_published_messages(
    messages: list[Said], first: int, seed: int
) -> None:
    data = batch(messages, first=first, seed=seed)
    assert read_batch_dumbly(data, 0) == (len(data), first, messages)


@given(said, numbers, seeds, st.sampled_from([CODEC_NONE, CODEC_ZSTD]))
def test_header_matches_batch_content(messages: list[Said], first: int, seed: int, codec: int) -> None:
    data = batch(messages, first=first, seed=seed, codec=codec)
    header = header_of(data)
    times = [message.timestamp_ns for message in messages]
    assert header.total_bytes == len(data)
    assert len(data) % 8 == 0
    assert (header.first, header.end, header.message_count) == (first, first + len(messages), len(messages))
    assert header.topic_count == len({message.topic for message in messages})
    assert (header.timestamp_low_ns, header.timestamp_high_ns) == (min(times), max(times))
    assert header.values_bytes == sum(len(message.value) for message in messages)
    assert header.codec == header.flags
    check_header(header)


@given(said, st.sampled_from([CODEC_NONE, CODEC_ZSTD]))
def test_padding_bytes_are_zero(messages: list[Said], codec: int) -> None:
    data = batch(messages, codec=codec)
    header = header_of(data)
    columns_end = BATCH_HEADER_BYTES + header.columns_stored
    values_at = BATCH_HEADER_BYTES + padded(header.columns_stored)
    assert not any(data[columns_end:values_at])
    assert not any(data[values_at + header.values_stored :])


def test_encode_batch_does_not_copy_values() -> None:
    made = draft([Said("t", bytes(100))])
    pieces = encode_batch(made, first=0, seed=0)
    assert any(piece is made.values for piece in pieces)


@pytest.mark.parametrize("size", [*range(18), 1000, 2**20 - 1])
@pytest.mark.parametrize("topic", ["", "t", "trade", "x" * 31, "x" * 32])
def test_batch_of_one_message_adds_at_most_128_bytes(size: int, topic: str) -> None:
    assert len(batch([Said(topic, bytes(size))])) - size <= 128


@pytest.mark.parametrize("count", [2, 10, 1000])
def test_further_message_adds_at_most_16_bytes(count: int) -> None:
    one, many = (len(batch([Said("t", bytes(8))] * n)) for n in (1, count))
    assert many - one <= (count - 1) * (8 + 16)


# Compressing


def test_compressible_batch_is_stored_compressed() -> None:
    messages = [Said("t", b"again and again") for _ in range(100)]
    data = batch(messages, codec=CODECS["zstd"])
    assert header_of(data).flags == CODEC_ZSTD
    assert len(data) < len(batch(messages)) / 5


def test_incompressible_batch_is_stored_uncompressed() -> None:
    messages = [Said("", bytes([7, 91, 3]), 2**62 + 12_345)]
    assert batch(messages, codec=CODEC_ZSTD) == batch(messages)


@given(said, numbers, st.integers(0, 5))
def test_expand_returns_batches_as_if_uncompressed(messages: list[Said], first: int, before: int) -> None:
    stored = [batch(messages, first=first, codec=codec) for codec in (CODEC_ZSTD, CODEC_NONE, CODEC_ZSTD)]
    starts = [8 * before, 8 * before + len(stored[0]), 8 * before + len(stored[0]) + len(stored[1])]
    data = bytes(8 * before) + b"".join(stored)
    plain, headers = expand(
        memoryview(data), [(at, header_of(one)) for at, one in zip(starts, stored, strict=True)]
    )
    assert len(headers) == 3
    at = 0
    for header in headers:
        assert header_of(plain[at:]) == header
        check_header(header)
        assert read_batch_dumbly(plain, at) == (header.total_bytes, first, messages)
        at += header.total_bytes
    assert at == len(plain)


@pytest.mark.parametrize("flags", [2, 3, 15, 0x12, 0x20, 0x8000, 0xFFFF])
def test_expand_of_unknown_flags_raises_unknown_codec(flags: int) -> None:
    header = header_of(batch([Said("t", b"v")]))._replace(flags=flags)
    with pytest.raises(UnknownCodec, match=f"flags {flags:#06x}"):
        expand(memoryview(bytes(header.total_bytes)), [(0, header)])


# Frames with a false size. The header announces only what a checked header may announce.

PLAIN = columns([0, 1000], [0], [], [0, 1], b"t")
VALUES = bytes(1000)


def frame(data: bytes, **options: Any) -> bytes:
    return zstandard.ZstdCompressor(**options).compress(data)


def without_size(data: bytes) -> bytes:
    return zstandard.ZstdCompressor(write_content_size=False).compress(data)


def skippable(size: int) -> bytes:
    return (0x184D2A50).to_bytes(4, "little") + size.to_bytes(4, "little") + bytes(size)


def one_block(said: int, held: int) -> bytes:
    """Return a frame whose header announces `said` bytes. Its only block repeats the letter a `held`
    times.
    """
    block = (held << 3 | 1 << 1 | 1).to_bytes(3, "little") + b"a"
    return b"\x28\xb5\x2f\xfd\xa0" + said.to_bytes(4, "little") + block


LIES = {
    "a byte less": (frame(bytes(999)), "999 bytes where 1000"),
    "a byte more": (frame(bytes(1001)), "1001 bytes where 1000"),
    "a thousand times more": (frame(bytes(2**20)), "1048576 bytes where 1000"),
    "nothing": (frame(b""), "0 bytes where 1000"),
    "no size": (without_size(VALUES), "where 1000 are announced"),
    "cut by a byte": (frame(VALUES)[:-1], "zstd"),
    "cut in its header": (frame(VALUES)[:5], "zstd"),
    "cut after its header": (frame(VALUES)[:9], "zstd"),
    "garbage after its header": (frame(VALUES)[:7] + b"\xff" * 12, "zstd"),
    "a frame to be skipped before it": (skippable(0) + frame(VALUES), "where 1000 are announced"),
    "a frame to be skipped": (skippable(1000), "zstd"),
    "a block that holds a byte less": (one_block(1000, 999), "zstd"),
    "a block that holds a byte more": (one_block(1000, 1001), "zstd"),
    "a block that holds far more": (one_block(1000, 100_000), "zstd"),
    "no bytes": (b"", "zstd"),
    "no frame": (b"not a frame at all", "zstd"),
}


@pytest.mark.parametrize("rest", [b"more", frame(PLAIN), skippable(10)])
def test_expand_rejects_bytes_after_columns_frame(rest: bytes) -> None:
    data = forge(
        frame(PLAIN) + rest, frame(VALUES), flags=CODEC_ZSTD, columns_bytes=len(PLAIN), values_bytes=1000
    )
    with pytest.raises(BadBatch, match="unused data"):
        expand(memoryview(data), [(0, header_of(data))])


@pytest.mark.parametrize("rest", [b"more", frame(VALUES), skippable(10)])
def test_expand_ignores_bytes_after_values_frame(rest: bytes) -> None:
    data = forge(
        frame(PLAIN), frame(VALUES) + rest, flags=CODEC_ZSTD, columns_bytes=len(PLAIN), values_bytes=1000
    )
    plain, _ = expand(memoryview(data), [(0, header_of(data))])
    assert read_batch_dumbly(plain, 0)[2] == [Said("t", VALUES, 0)]


@pytest.mark.parametrize("rest", [b"", b"more", frame(VALUES), skippable(10)])
def test_check_values_ignores_bytes_after_large_values_frame(rest: bytes) -> None:
    size = 2**20 + 1
    stored = frame(bytes(size)) + rest + bytes(4096)
    data = forge(frame(PLAIN), stored, flags=CODEC_ZSTD, columns_bytes=len(PLAIN), values_bytes=size)
    check_values(header_of(data), memoryview(data))


@pytest.mark.parametrize(("stored", "says"), LIES.values(), ids=LIES)
def test_expand_rejects_values_frame_contradicting_header(stored: bytes, says: str) -> None:
    data = forge(frame(PLAIN), stored, flags=CODEC_ZSTD, columns_bytes=len(PLAIN), values_bytes=len(VALUES))
    with pytest.raises(BadBatch, match=says):
        expand(memoryview(data), [(0, header_of(data))])


def test_forged_frame_with_correct_size_expands() -> None:
    data = forge(
        frame(PLAIN), one_block(1000, 1000), flags=CODEC_ZSTD, columns_bytes=len(PLAIN), values_bytes=1000
    )
    plain, _ = expand(memoryview(data), [(0, header_of(data))])
    assert read_batch_dumbly(plain, 0)[2] == [Said("t", b"a" * 1000, 0)]


def test_decompression_bomb_is_rejected_with_under_1_mib_of_memory() -> None:
    bomb = frame(bytes(200 * 2**20))
    lie = bytearray(bomb)
    lie[6:10] = (1000).to_bytes(4, "little")
    assert zstandard.get_frame_parameters(bytes(lie)).content_size == 1000
    tracemalloc.start()
    try:
        for stored in (bomb, bytes(lie)):
            data = forge(frame(PLAIN), stored, flags=CODEC_ZSTD, columns_bytes=len(PLAIN), values_bytes=1000)
            with pytest.raises(BadBatch):
                expand(memoryview(data), [(0, header_of(data))])
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


def test_frame_requiring_dictionary_is_rejected() -> None:
    words = zstandard.ZstdCompressionDict(
        b"trade quote order " * 40, dict_type=zstandard.DICT_TYPE_RAWCONTENT
    )
    trained = zstandard.train_dictionary(1024, [b"%d trade quote order" % i * 9 for i in range(2000)])
    for dictionary in (words, trained):
        stored = frame(b"trade quote order " * 55 + bytes(10), dict_data=dictionary)
        data = forge(frame(PLAIN), stored, flags=CODEC_ZSTD, columns_bytes=len(PLAIN), values_bytes=1000)
        with pytest.raises(BadBatch):
            expand(memoryview(data), [(0, header_of(data))])


@pytest.mark.slow
def test_largest_message_compresses_and_expands() -> None:
    value = b"0123456789abcdef" * (MESSAGE_BYTES_MAX // 16)
    data = batch([Said("t", value)], codec=CODEC_ZSTD)
    assert len(data) < 2**20
    plain, (header,) = expand(memoryview(data), [(0, header_of(data))])
    assert plain[-header.values_bytes :] == value


# Headers


GOOD = header_of(batch([Said("t", b"value")]))
MANY = header_of(batch([Said("t", b"a"), Said("u", b"b"), Said("t", b"c")]))


def sized(header: BatchHeader, **fields: int) -> BatchHeader:
    """Return `header` with `fields`. The stored sizes and the total are computed if they are not given."""
    new = header._replace(**fields)
    if "columns_stored" not in fields:
        new = new._replace(columns_stored=new.columns_bytes)
    if "values_stored" not in fields:
        new = new._replace(values_stored=new.values_bytes)
    if "total_bytes" not in fields:
        new = new._replace(total_bytes=64 + padded(new.columns_stored) + padded(new.values_stored))
    return new


def is_allowed(header: BatchHeader) -> bool:
    try:
        check_header(header)
    except BadBatch:
        return False
    return True


@pytest.mark.parametrize(
    "allowed",
    [
        GOOD,
        MANY,
        sized(GOOD, first=NUMBER_MAX - 1),
        sized(MANY, first=NUMBER_MAX - 3),
        sized(GOOD, values_bytes=0),
        sized(GOOD, values_bytes=MESSAGE_BYTES_MAX),
        sized(GOOD, columns_bytes=24),
        sized(GOOD, columns_bytes=24 + TOPIC_BYTES_MAX),
        sized(GOOD, columns_bytes=24 + TOPIC_BYTES_MAX, values_bytes=MESSAGE_BYTES_MAX),
        sized(MANY, values_bytes=BATCH_BYTES_MAX - MANY.columns_bytes),
        sized(MANY, topic_count=3, columns_bytes=16 + 24 + 8 + 16),
        sized(GOOD, flags=CODEC_ZSTD, columns_stored=9, values_stored=9),
        sized(GOOD, flags=CODEC_ZSTD, columns_stored=0, values_stored=0),
        sized(GOOD, flags=CODEC_ZSTD, values_stored=GOOD.values_bytes - 1),
        sized(GOOD, flags=5, values_stored=GOOD.values_bytes - 1),
        sized(GOOD, flags=0x10),
        sized(GOOD, timestamp_low_ns=-(2**63), timestamp_high_ns=2**63 - 1),
    ],
)
def test_header_within_limits_is_accepted(allowed: BatchHeader) -> None:
    check_header(allowed)
    check_header(tuple(allowed))


@pytest.mark.parametrize(
    ("refused", "says"),
    [
        (GOOD._replace(magic=0), "no batch starts here"),
        (GOOD._replace(magic=BATCH_MAGIC + 1), "no batch starts here"),
        (GOOD._replace(total_bytes=0), "total"),
        (GOOD._replace(total_bytes=GOOD.total_bytes - 8), "total"),
        (GOOD._replace(total_bytes=GOOD.total_bytes + 8), "total"),
        (GOOD._replace(columns_stored=2**32 - 1), "total"),
        (sized(GOOD, message_count=0), "^0 messages"),
        (sized(GOOD, topic_count=0), "with 0 topics"),
        (sized(GOOD, topic_count=2, columns_bytes=40), "^1 messages with 2 topics"),
        (sized(MANY, topic_count=4, columns_bytes=80), "^3 messages with 4 topics"),
        (sized(GOOD, message_count=70_000, topic_count=TOPICS_MAX + 1), "^70000 messages"),
        (sized(GOOD, first=-1), "first number"),
        (sized(GOOD, first=-(2**63)), "first number"),
        (sized(GOOD, first=NUMBER_MAX), "first number"),
        (sized(MANY, first=NUMBER_MAX - 2), "first number"),
        (sized(GOOD, first=2**63 - 1), "first number"),
        (sized(GOOD, columns_bytes=23), "columns of 23"),
        (sized(GOOD, columns_bytes=24 + TOPIC_BYTES_MAX + 1), "columns of 1049"),
        (sized(GOOD, message_count=2**32 - 1), "columns"),
        (sized(GOOD, message_count=2), "columns"),
        (sized(MANY, columns_bytes=16 + 24 + 8 + 11), "columns"),
        (sized(GOOD, values_bytes=MESSAGE_BYTES_MAX + 1), "above the limit"),
        (sized(MANY, values_bytes=BATCH_BYTES_MAX - MANY.columns_bytes + 1), "above the limit"),
        (sized(GOOD, columns_stored=24), "nothing is compressed"),
        (sized(GOOD, values_stored=6), "nothing is compressed"),
        (sized(GOOD, flags=0x10, values_stored=4), "nothing is compressed"),
        (sized(GOOD, flags=CODEC_ZSTD), "saved nothing"),
        (sized(GOOD, flags=CODEC_ZSTD, columns_stored=2**31), "saved nothing"),
        (sized(GOOD, flags=CODEC_ZSTD, values_stored=2**32 - 64), "saved nothing"),
        (sized(GOOD, flags=7, values_stored=GOOD.values_bytes + 1), "saved nothing"),
    ],
)
def test_invalid_header_is_rejected(refused: BatchHeader, says: str) -> None:
    with pytest.raises(BadBatch, match=says):
        check_header(refused)


u16, u32 = st.integers(0, 2**16 - 1), st.integers(0, 2**32 - 1)
near = st.one_of(u32, st.integers(0, 200), st.integers(2**32 - 70, 2**32 - 1))


@given(u16, near, near, near, near, near, near)
def test_accepted_header_bounds_stored_and_decompressed_bytes(
    topic_count: int,
    count: int,
    columns_in: int,
    values_in: int,
    columns_out: int,
    values_out: int,
    flags: int,
) -> None:
    header = sized(
        GOOD,
        flags=flags % 4,
        topic_count=topic_count % 5,
        message_count=count,
        columns_stored=columns_in,
        values_stored=values_in,
        columns_bytes=columns_out,
        values_bytes=values_out,
    )
    if is_allowed(header):
        plain = header.columns_bytes + header.values_bytes
        assert plain <= (BATCH_BYTES_MAX if count > 1 else MESSAGE_BYTES_MAX + 24 + TOPIC_BYTES_MAX)
        assert header.total_bytes <= 64 + plain + 14


@pytest.mark.parametrize(
    ("messages", "fields"),
    [
        ([Said("t", b"v")], {"first": -1}),
        ([Said("t", b"v")], {"first": NUMBER_MAX}),
        ([Said("t", b"v"), Said("t", b"w")], {"first": NUMBER_MAX - 1}),
        ([Said("t" * 1025, b"v")], {}),
        ([Said("t", bytes(BATCH_BYTES_MAX - 24)), Said("t", b"")], {}),
        ([Said(str(n), b"") for n in range(TOPICS_MAX + 1)], {}),
    ],
)
def test_encoding_invalid_batch_raises_bad_batch(messages: list[Said], fields: dict[str, int]) -> None:
    with pytest.raises(BadBatch):
        batch(messages, **fields)


def test_batches_at_limits_can_be_encoded() -> None:
    for messages in (
        [Said("t" * 1024, b"v")],
        [Said("t", bytes(BATCH_BYTES_MAX - 48)), Said("t", b"")],
        [Said(str(n), b"") for n in range(TOPICS_MAX)],
    ):
        data = batch(messages, first=NUMBER_MAX - len(messages))
        assert header_of(data).end == NUMBER_MAX


@given(st.binary(max_size=30), st.integers(0, 3))
def test_padding_matches_padded_size(data: bytes, more: int) -> None:
    size = len(data) + more
    assert size + len(padding(size)) == padded(size)
    assert padded(size) % 8 == 0
    assert padded(size) - size < 8
