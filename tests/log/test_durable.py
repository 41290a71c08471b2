"""The durable end: two records in turn, of which the newer one that verifies counts."""

import struct

import pytest
from batches import INCARNATION
from hypothesis import given
from hypothesis import strategies as st

import rt
from rt.log.format.checksum import sealed
from rt.log.format.durable_end import (
    RECORD_BYTES,
    DurableEnd,
    encode_durable_end,
    newest_durable_end,
    record_place,
)
from rt.log.format.segment import SegmentId

u32 = st.integers(0, 2**32 - 1)
u64 = st.integers(0, 2**64 - 1)
records = st.builds(
    DurableEnd, u64, st.builds(SegmentId, u32, u32), u64, u64, st.binary(min_size=16, max_size=16)
)


def at(sequence: int) -> DurableEnd:
    return DurableEnd(sequence, SegmentId(3, 1), 64 + 100 * sequence, 10 * sequence, INCARNATION)


def file_of(*records: DurableEnd) -> bytes:
    """The file after the records were written one after the other."""
    data = bytearray(2 * RECORD_BYTES)
    for record in records:
        place = record_place(record.sequence)
        data[place : place + RECORD_BYTES] = encode_durable_end(record)
    return bytes(data)


@given(records)
def test_a_record_is_read_as_it_was_written(record: DurableEnd) -> None:
    assert len(encode_durable_end(record)) == RECORD_BYTES == 64
    assert newest_durable_end(encode_durable_end(record)) == record
    assert newest_durable_end(file_of(record)) == record


def test_records_are_written_in_turn() -> None:
    assert [record_place(sequence) for sequence in range(4)] == [0, 64, 0, 64]


@pytest.mark.parametrize("count", range(1, 6))
def test_the_newest_record_counts(count: int) -> None:
    assert newest_durable_end(file_of(*map(at, range(1, count + 1)))) == at(count)


def test_the_newest_record_counts_across_the_places_of_the_file() -> None:
    assert newest_durable_end(file_of(at(2), at(9))) == at(9)
    assert newest_durable_end(file_of(at(9), at(2))) == at(9)


@pytest.mark.parametrize("data", [b"", bytes(63), bytes(64), bytes(128), b"\xff" * 128])
def test_a_file_that_was_never_written_knows_nothing(data: bytes) -> None:
    assert newest_durable_end(data) is None


def test_a_record_torn_anywhere_leaves_the_one_before() -> None:
    before, after = file_of(at(4), at(5)), file_of(at(4), at(5), at(6))
    assert record_place(6) == 0
    for written in range(RECORD_BYTES):
        torn = after[:written] + before[written:]
        assert newest_durable_end(torn) == (at(6) if torn == after else at(5)), written


def test_a_first_record_torn_anywhere_knows_nothing() -> None:
    whole = file_of(at(1))
    for written in range(RECORD_BYTES):
        torn = whole[: RECORD_BYTES + written] + bytes(RECORD_BYTES - written)
        expected = None if torn != whole else at(1)
        assert newest_durable_end(torn) == expected


def test_every_flipped_bit_costs_no_more_than_its_record() -> None:
    whole = file_of(at(6), at(7))
    for bit in range(8 * len(whole)):
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << bit % 8
        assert newest_durable_end(bytes(flipped)) == (at(7) if bit < 8 * RECORD_BYTES else at(6)), bit


def test_a_file_cut_anywhere_knows_what_is_whole() -> None:
    whole = file_of(at(6), at(7))
    for size in range(len(whole) + 1):
        expected = None if size < 64 else at(6) if size < 128 else at(7)
        assert newest_durable_end(whole[:size]) == expected


@pytest.mark.parametrize("version", [0, 2, 65_535])
@pytest.mark.parametrize("place", [0, 64])
def test_another_version_is_refused_by_name_and_not_forgotten(version: int, place: int) -> None:
    data = bytearray(file_of(at(6), at(7)))
    struct.pack_into("<H", data, place + 8, version)
    data[place : place + 64] = sealed(bytes(data[place : place + 64]))
    with pytest.raises(rt.UnknownVersion, match=f"durable.*got {version}, expected 1"):
        newest_durable_end(bytes(data))
