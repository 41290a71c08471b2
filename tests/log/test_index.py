"""The sparse index: what verifies is given, what does not is passed over, and nothing is ever raised."""

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
def test_entries_are_read_as_they_were_written(offsets: list[int], data: st.DataObject) -> None:
    kinds, firsts = st.sampled_from(EntryKind), st.integers(0, NUMBER_MAX - 1)
    entries = [IndexEntry(data.draw(firsts), at, data.draw(i64), data.draw(kinds)) for at in offsets]
    assert read(b"".join(encode_entry(entry, SEED) for entry in entries)) == entries


def test_an_entry_is_32_bytes() -> None:
    assert len(DATA) == len(ENTRIES) * ENTRY_BYTES == len(ENTRIES) * 32


def test_an_index_is_named_after_its_segment_and_is_none() -> None:
    assert index_file_name(SegmentId(3, 10)) == "index.3.10"
    assert parse_segment_name("index.3.10") is None


def test_every_flipped_bit_costs_one_entry() -> None:
    for bit in range(8 * len(DATA)):
        flipped = bytearray(DATA)
        flipped[bit // 8] ^= 1 << bit % 8
        lost = bit // 8 // ENTRY_BYTES
        assert read(bytes(flipped)) == ENTRIES[:lost] + ENTRIES[lost + 1 :], bit


def test_an_index_cut_anywhere_keeps_its_whole_entries() -> None:
    for size in range(len(DATA) + 1):
        assert read(DATA[:size]) == ENTRIES[: size // ENTRY_BYTES]


@pytest.mark.parametrize("other", [session_header(roll=2), session_header(run=4), merged_header()])
def test_the_index_of_another_segment_is_passed_over(other) -> None:
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
def test_an_entry_that_has_an_impossible_value_is_passed_over(entry: bytes) -> None:
    assert read(DATA[:64] + entry + DATA[64:]) == ENTRIES


def test_the_limits_themselves_are_given() -> None:
    assert read(forged(NUMBER_MAX - 1, NUMBER_MAX - 1)) == [IndexEntry(NUMBER_MAX - 1, NUMBER_MAX - 1, 0)]


@given(st.binary(max_size=200))
def test_garbage_gives_nothing(data: bytes) -> None:
    assert read(data) == []
