"""Block headers and declarations: round trips, corrupt bits, and rejection of invalid values and names."""

import struct
from typing import Any

import pytest
from batches import CLUSTER, CREATED_NS, INCARNATION
from hypothesis import given
from hypothesis import strategies as st

import rt
from rt.log.format.block import (
    BLOCK_HEADER_BYTES,
    BLOCK_MAGIC,
    DECLARATION_BYTES_MAX,
    BadBlock,
    BlockHeader,
    BlockKind,
    Declaration,
    decode_block_header,
    decode_declaration,
    encode_block_header,
    encode_declaration,
)
from rt.log.format.checksum import batch_seed, crc32c, segment_seed
from rt.log.format.constants import NUMBER_MAX, VERSION, padding

u32 = st.integers(0, 2**32 - 1)
u64 = st.integers(0, 2**64 - 1)
places = st.integers(0, NUMBER_MAX - 1)
block_headers = st.builds(
    BlockHeader,
    version=st.just(VERSION),
    kind=st.just(BlockKind.BATCHES),
    instruction_index=u32,
    instruction=u64,
    session_id=u32,
    source_run=u32,
    source_roll=u32,
    skip=u32,
    source_offset=places,
    length_bytes=st.integers(0, NUMBER_MAX // 8 - 1).map(lambda words: 8 * words),
    first_position=st.integers(0, NUMBER_MAX // 2),
    message_count=st.integers(0, NUMBER_MAX // 2 - 1),
    sequenced_ns=st.integers(-(2**63), 2**63 - 1),
    content_checksum=u32,
    chain_start=u32,
    chain_end=u32,
)
names = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,126}", fullmatch=True)
declarations = st.builds(
    Declaration,
    st.one_of(names, st.builds("{}~{}".format, names, names)),
    st.binary(min_size=16, max_size=16),
    st.none() | names,
)

HEADER = BlockHeader(
    VERSION, BlockKind.BATCHES, 2, 99, 7, 3, 1, 4, 4096, 640, 1000, 50, CREATED_NS, 0, 0xC0FFEE, 0xDECAF
)
DECLARES = HEADER._replace(
    kind=BlockKind.DECLARATION, message_count=0, skip=0, length_bytes=64, chain_start=0, chain_end=0
)
SEED = batch_seed(segment_seed(CLUSTER, 0, 7), 64)
LONGEST = Declaration("a" * 128 + "~" + "b" * 126, INCARNATION, "d" * 128 + "~" + "e" * 126)


def test_block_header_is_96_bytes() -> None:
    assert len(encode_block_header(HEADER, SEED)) == BLOCK_HEADER_BYTES == 96


@given(block_headers, st.binary(max_size=16), st.binary(max_size=16))
def test_header_decodes_to_encoded_value(header: BlockHeader, before: bytes, behind: bytes) -> None:
    data = before + encode_block_header(header, SEED) + behind
    assert decode_block_header(data, len(before), SEED) == header
    assert decode_block_header(memoryview(bytearray(data)), len(before), SEED) == header
    assert header.end == header.first_position + header.message_count


def test_header_with_any_flipped_bit_raises_bad_block() -> None:
    data = encode_block_header(HEADER, SEED)
    for bit in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(BadBlock):
            decode_block_header(flipped, 0, SEED)


@pytest.mark.parametrize(
    "place",
    [
        batch_seed(segment_seed(INCARNATION, 0, 7), 64),
        batch_seed(segment_seed(CLUSTER, 1, 7), 64),
        batch_seed(segment_seed(CLUSTER, 0, 8), 64),
        batch_seed(segment_seed(CLUSTER, 7, 0), 64),
        batch_seed(segment_seed(CLUSTER, 0, 7), 72),
        batch_seed(segment_seed(CLUSTER, 0, 7), 64 + 2**32),
        0,
    ],
    ids=["cluster", "X", "Y", "X and Y changed about", "offset", "offset above 4 GiB", "no place"],
)
def test_header_read_with_seed_of_another_place_fails_its_checksum(place: int) -> None:
    with pytest.raises(BadBlock, match="fails its checksum"):
        decode_block_header(encode_block_header(HEADER, SEED), 0, place)


@given(st.binary(min_size=96, max_size=96))
def test_header_of_random_bytes_is_rejected(data: bytes) -> None:
    for garbage in (data, BLOCK_MAGIC.to_bytes(4, "little") + data[4:]):
        with pytest.raises(BadBlock):
            decode_block_header(garbage, 0, SEED)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"version": 0}, "block of version 0"),
        ({"version": 2}, "block of version 2"),
        ({"kind": 0}, "kind 0"),
        ({"kind": 3}, "kind 3"),
        ({"kind": 65_535}, "kind 65535"),
        ({"length_bytes": 639}, "out of range: 639 bytes"),
        ({"length_bytes": NUMBER_MAX}, "out of range"),
        ({"length_bytes": 2**64 - 8}, "out of range"),
        ({"source_offset": NUMBER_MAX}, "out of range"),
        ({"first_position": NUMBER_MAX - 50}, "out of range"),
        ({"message_count": 2**64 - 1}, "out of range"),
        ({"first_position": 2**64 - 1, "message_count": 2**64 - 1}, "out of range"),
        ({"kind": BlockKind.DECLARATION}, "declaration of 640 bytes"),
        ({"kind": BlockKind.DECLARATION, "length_bytes": 64}, "50 messages"),
        (
            {
                "kind": BlockKind.DECLARATION,
                "message_count": 0,
                "length_bytes": DECLARATION_BYTES_MAX + 8,
            },
            "declaration of",
        ),
        ({"kind": BlockKind.DECLARATION, "message_count": 0, "length_bytes": 2**61}, "declaration of"),
        (DECLARES._replace(chain_start=1)._asdict(), "declaration with chains 0x1 and 0x0"),
        (DECLARES._replace(chain_end=2)._asdict(), "declaration with chains 0x0 and 0x2"),
    ],
)
def test_header_with_invalid_value_is_rejected(fields: dict[str, int], says: str) -> None:
    with pytest.raises(BadBlock, match=says):
        decode_block_header(encode_block_header(HEADER._replace(**fields), SEED), 0, SEED)


@pytest.mark.parametrize(
    "fields",
    [
        {"first_position": NUMBER_MAX - 51},
        {"source_offset": NUMBER_MAX - 1},
        {"length_bytes": NUMBER_MAX - 8},
        DECLARES._replace(length_bytes=DECLARATION_BYTES_MAX)._asdict(),
        {"skip": 2**32 - 1, "message_count": 0},
    ],
)
def test_header_with_values_at_limits_is_accepted(fields: dict[str, int]) -> None:
    header = HEADER._replace(**fields)
    assert decode_block_header(encode_block_header(header, SEED), 0, SEED) == header


@pytest.mark.parametrize("place", range(92, 96))
def test_header_with_nonzero_reserved_byte_is_rejected(place: int) -> None:
    data = bytearray(encode_block_header(HEADER, SEED))
    data[place] = 1
    data[4:8] = crc32c(data[8:], SEED).to_bytes(4, "little")
    with pytest.raises(BadBlock, match="unknown to this rt"):
        decode_block_header(data, 0, SEED)


# Declarations


@given(block_headers, declarations)
def test_declaration_decodes_to_encoded_value(header: BlockHeader, declared: Declaration) -> None:
    data = encode_declaration(header, declared, SEED)
    found = decode_block_header(data, 0, SEED)
    assert len(data) == BLOCK_HEADER_BYTES + found.length_bytes
    assert len(data) % 8 == 0
    assert decode_declaration(found, data[BLOCK_HEADER_BYTES:]) == declared


@given(block_headers, declarations)
def test_declaration_header_keeps_ordering_fields_and_clears_source_fields(
    header: BlockHeader, declared: Declaration
) -> None:
    found = decode_block_header(encode_declaration(header, declared, SEED), 0, SEED)
    assert found == BlockHeader(
        VERSION,
        BlockKind.DECLARATION,
        header.instruction_index,
        header.instruction,
        header.session_id,
        source_run=0,
        source_roll=0,
        skip=0,
        source_offset=0,
        length_bytes=found.length_bytes,
        first_position=header.first_position,
        message_count=0,
        sequenced_ns=header.sequenced_ns,
        content_checksum=found.content_checksum,
    )


def test_declaration_with_longest_names_has_maximum_size_and_decodes() -> None:
    data = encode_declaration(HEADER, LONGEST, SEED)
    assert len(data) == BLOCK_HEADER_BYTES + DECLARATION_BYTES_MAX
    assert decode_declaration(decode_block_header(data, 0, SEED), data[BLOCK_HEADER_BYTES:]) == LONGEST


def test_declaration_with_any_flipped_bit_raises_bad_block() -> None:
    data = encode_declaration(HEADER, Declaration("feed~1", INCARNATION, "twins"), SEED)
    header = decode_block_header(data, 0, SEED)
    for bit in range(8 * header.length_bytes):
        flipped = bytearray(data[BLOCK_HEADER_BYTES:])
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(BadBlock):
            decode_declaration(header, flipped)


def test_declaration_truncated_at_any_byte_raises_bad_block() -> None:
    data = encode_declaration(HEADER, Declaration("feed", INCARNATION), SEED)
    header, content = decode_block_header(data, 0, SEED), data[BLOCK_HEADER_BYTES:]
    for size in range(len(content)):
        with pytest.raises(BadBlock):
            decode_declaration(header, content[:size])


def content_of(name: bytes, dedup: bytes = b"", sizes: tuple[int, int] | None = None) -> bytes:
    name_bytes, dedup_bytes = sizes or (len(name), len(dedup))
    content = struct.pack("<16sHH", INCARNATION, name_bytes, dedup_bytes) + name + dedup
    return content + padding(len(content))


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (content_of(b"../../etc/passwd"), "names no session"),
        (content_of(b".."), "names no session"),
        (content_of(b"a/b"), "names no session"),
        (content_of(b""), "names no session"),
        (content_of(b"a\0b"), "names no session"),
        (content_of(b"a\n"), "names no session"),
        (content_of(b"\xff\xfe"), "names no session"),
        (content_of("größe".encode()), "names no session"),
        (content_of(b"a~b~c"), "names no session"),
        (content_of(b"a" * 128 + b"~" + b"b" * 127), "names no session"),
        (content_of(b"feed", b"../x"), "names no session"),
        (content_of(b"feed", b"a~b~c"), "names no session"),
        (content_of(b"feed", b"~b"), "names no session"),
        (content_of(b"feed", b"\xff"), "names no session"),
        (content_of(b"feed", b"", (5, 0)), "wrong length"),
        (content_of(b"feed", b"", (400, 0)), "wrong length"),
        (content_of(b"feed", b"", (4, 65_535)), "wrong length"),
        (content_of(b"feed") + bytes(8), "wrong length"),
        (content_of(b"feed" + bytes(64), b"", (4, 0)), "wrong length"),
        (content_of(b"")[:16], "fails its checksum"),
        (b"", "fails its checksum"),
    ],
)
def test_hostile_declaration_with_valid_checksum_is_rejected(content: bytes, says: str) -> None:
    header = DECLARES._replace(length_bytes=len(content), content_checksum=crc32c(content))
    with pytest.raises(BadBlock, match=says):
        decode_declaration(header, content)


def test_block_of_batches_is_rejected_as_declaration() -> None:
    content = content_of(b"feed")
    header = HEADER._replace(length_bytes=len(content), content_checksum=crc32c(content))
    with pytest.raises(BadBlock, match="no declaration"):
        decode_declaration(header, content)


@given(st.binary(max_size=420))
def test_random_declaration_content_with_valid_checksum_raises_only_bad_block(content: bytes) -> None:
    header = DECLARES._replace(length_bytes=len(content), content_checksum=crc32c(content))
    try:
        declared = decode_declaration(header, content)
    except BadBlock:
        return
    assert (
        encode_declaration(header, declared, SEED)[BLOCK_HEADER_BYTES:][: len(declared.session) + 20]
        == (content[: len(declared.session) + 20])
    )


@pytest.mark.parametrize(
    "fields",
    [
        {"session": "../x"},
        {"session": ""},
        {"session": "a" * 129},
        {"dedup_id": ""},
        {"dedup_id": "a~"},
        {"dedup_id": "a" * 128 + "~" + "b" * 127},
        {"incarnation": bytes(15)},
        {"incarnation": b""},
    ],
)
def test_declaration_with_invalid_field_cannot_be_created(fields: dict[str, Any]) -> None:
    with pytest.raises((rt.InvalidName, ValueError)):
        Declaration(**{"session": "feed", "incarnation": INCARNATION} | fields)
