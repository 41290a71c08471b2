"""The sparse index: valid entries are returned, invalid ones are skipped, and no error is raised."""

import struct

import pytest
from batches import merged_header, session_header
from hypothesis import given
from hypothesis import strategies as st

from rt.log.format.checksum import crc32c
from rt.log.format.constants import NUMBER_MAX
from rt.log.format.index import (
    ENTRY_BYTES,
    EntryKind,
    IndexEntry,
    decode_entries,
    encode_entry,
    index_file_name,
)
from rt.log.format.segment import SegmentId, parse_segment_name

SEED = session_header().seed
ENTRIES = [
    IndexEntry(0, 64, -(2**63), EntryKind.DECLARATION),
    IndexEntry(0, 200, 0),
    IndexEntry(50, 2**20, 17),
    IndexEntry(90, 2**21, 2**63 - 1),
]
DATA = b"".join(encode_entry(entry, SEED) for entry in ENTRIES)

rising = st.lists(st.integers(0, NUMBER_MAX - 1), unique=True, max_size=8).map(sorted)
i64 = st.integers(-(2**63), 2**63 - 1)


def read(data: bytes, seed: int = SEED) -> list[IndexEntry]:
    return list(decode_entries(data, seed))


def forged(first: int, offset: int, kind: int = 1) -> bytes:
    body = struct.pack("<QQqI", first, offset, 0, kind)
    return body + crc32c(body, SEED).to_bytes(4, "little")


@given(rising, st.data())
def test_entries_decode_to_encoded_values(offsets: list[int], data: st.DataObject) -> None:
    kinds, firsts = st.sampled_from(EntryKind), st.integers(0, NUMBER_MAX - 1)
    entries = [IndexEntry(data.draw(firsts), at, data.draw(i64), data.draw(kinds)) for at in offsets]
    assert read(b"".join(encode_entry(entry, SEED) for entry in entries)) == entries


def test_entry_is_32_bytes() -> None:
    assert len(DATA) == len(ENTRIES) * ENTRY_BYTES == len(ENTRIES) * 32


def test_index_file_is_named_after_segment_and_is_not_parsed_as_segment() -> None:
    assert index_file_name(SegmentId(3, 10)) == "index.3.10"
    assert parse_segment_name("index.3.10") is None


def test_flipped_bit_loses_only_its_own_entry() -> None:
    for bit in range(8 * len(DATA)):
        flipped = bytearray(DATA)
        flipped[bit // 8] ^= 1 << bit % 8
        lost = bit // 8 // ENTRY_BYTES
        assert read(bytes(flipped)) == ENTRIES[:lost] + ENTRIES[lost + 1 :], bit


def test_index_truncated_at_any_byte_keeps_whole_entries() -> None:
    for size in range(len(DATA) + 1):
        assert read(DATA[:size]) == ENTRIES[: size // ENTRY_BYTES]


@pytest.mark.parametrize("other", [session_header(roll=2), session_header(run=4), merged_header()])
def test_index_of_another_segment_yields_no_entries(other) -> None:
    assert read(DATA, other.seed) == []


@pytest.mark.parametrize(
    "entry",
    [
        forged(0, 300, kind=0),
        forged(0, 300, kind=3),
        forged(0, 300, kind=2**32 - 1),
        forged(0, NUMBER_MAX),
        forged(0, 2**63),
        forged(0, 2**64 - 1),
        forged(NUMBER_MAX, 300),
        forged(2**64 - 1, 300),
        forged(0, 200),
        forged(0, 64),
    ],
)
def test_entry_with_impossible_value_is_skipped(entry: bytes) -> None:
    assert read(DATA[:64] + entry + DATA[64:]) == ENTRIES


def test_entry_with_values_at_limits_is_returned() -> None:
    assert read(forged(NUMBER_MAX - 1, NUMBER_MAX - 1)) == [IndexEntry(NUMBER_MAX - 1, NUMBER_MAX - 1, 0)]


@given(st.binary(max_size=200))
def test_random_bytes_yield_no_entries(data: bytes) -> None:
    assert read(data) == []
