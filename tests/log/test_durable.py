"""The file of the durable end: two records written in turn, of which the newest valid one is used."""

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
    """Return the file after these records were written in order."""
    data = bytearray(2 * RECORD_BYTES)
    for record in records:
        place = record_place(record.sequence)
        data[place : place + RECORD_BYTES] = encode_durable_end(record)
    return bytes(data)


@given(records)
def test_record_decodes_to_encoded_value(record: DurableEnd) -> None:
    assert len(encode_durable_end(record)) == RECORD_BYTES == 64
    assert newest_durable_end(encode_durable_end(record)) == record
    assert newest_durable_end(file_of(record)) == record


def test_records_alternate_between_two_offsets() -> None:
    assert [record_place(sequence) for sequence in range(4)] == [0, 64, 0, 64]


@pytest.mark.parametrize("count", range(1, 6))
def test_newest_record_is_used(count: int) -> None:
    assert newest_durable_end(file_of(*map(at, range(1, count + 1)))) == at(count)


def test_newest_record_is_used_at_either_offset() -> None:
    assert newest_durable_end(file_of(at(2), at(9))) == at(9)
    assert newest_durable_end(file_of(at(9), at(2))) == at(9)


@pytest.mark.parametrize("data", [b"", bytes(63), bytes(64), bytes(128), b"\xff" * 128])
def test_file_without_written_record_returns_none(data: bytes) -> None:
    assert newest_durable_end(data) is None


def test_record_torn_at_any_byte_leaves_previous_record() -> None:
    before, after = file_of(at(4), at(5)), file_of(at(4), at(5), at(6))
    assert record_place(6) == 0
    for written in range(RECORD_BYTES):
        torn = after[:written] + before[written:]
        assert newest_durable_end(torn) == (at(6) if torn == after else at(5)), written


def test_first_record_torn_at_any_byte_returns_none() -> None:
    whole = file_of(at(1))
    for written in range(RECORD_BYTES):
        torn = whole[: RECORD_BYTES + written] + bytes(RECORD_BYTES - written)
        expected = None if torn != whole else at(1)
        assert newest_durable_end(torn) == expected


def test_flipped_bit_invalidates_only_its_own_record() -> None:
    whole = file_of(at(6), at(7))
    for bit in range(8 * len(whole)):
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << bit % 8
        assert newest_durable_end(bytes(flipped)) == (at(7) if bit < 8 * RECORD_BYTES else at(6)), bit


def test_file_truncated_at_any_byte_returns_newest_whole_record() -> None:
    whole = file_of(at(6), at(7))
    for size in range(len(whole) + 1):
        expected = None if size < 64 else at(6) if size < 128 else at(7)
        assert newest_durable_end(whole[:size]) == expected


@pytest.mark.parametrize("version", [0, 2, 65_535])
@pytest.mark.parametrize("place", [0, 64])
def test_record_of_another_version_raises_unknown_version(version: int, place: int) -> None:
    data = bytearray(file_of(at(6), at(7)))
    struct.pack_into("<H", data, place + 8, version)
    data[place : place + 64] = sealed(bytes(data[place : place + 64]))
    with pytest.raises(rt.UnknownVersion, match=f"durable.*got {version}, expected 1"):
        newest_durable_end(bytes(data))
