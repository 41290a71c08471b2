"""Encoding of Raft log segments, groups and synced ends, and their replay after a crash."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import pytest
from dump import Dump, diagram
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

import sequencer.raft.storage.log_format
from rt.errors import Corrupt, UnknownVersion
from rt.log.format.checksum import crc32c, sealed
from sequencer.raft.model.messages import NOWHERE, LogIndex
from sequencer.raft.storage.log_format import (
    GROUP_HEADER_BYTES,
    GROUP_MAGIC,
    SEGMENT_HEADER_BYTES,
    SYNCED_END_BYTES,
    LogRecord,
    RaftSegmentHeader,
    RecordKind,
    SyncedEnd,
    add_record,
    decode_records,
    decode_segment_header,
    encode_group_header,
    encode_segment_header,
    encode_synced_end,
    group_at,
    newest_synced_end,
    parse_segment_name,
    verify_records,
)
from sequencer.raft.storage.log_recovery import Replay, newest_run, replay_segments

LOG = bytes(range(16))
HEADER = RaftSegmentHeader(1, LOG, NOWHERE, 0, None, 1)
SEGMENT, GROUP, RECORD, SYNCED_END = (diagram(sequencer.raft.storage.log_format, which) for which in range(4))

u64 = st.integers(0, 2**64 - 1)
places = st.builds(LogIndex, u64, u64)
records = st.builds(LogRecord, st.sampled_from(RecordKind), places, st.binary(max_size=20))
names = st.none() | st.text(st.characters(codec="ascii", exclude_characters="\0"), min_size=1)


def bytes_of(records: Sequence[LogRecord]) -> bytes:
    pieces: list[bytes] = []
    for record in records:
        add_record(pieces, record.kind, *record.place, record.content)
    return b"".join(pieces)


def entry(index: int, term: int = 1, content: bytes = b"entry") -> LogRecord:
    return LogRecord(RecordKind.ENTRY, LogIndex(index, term), content)


def grown(segment: bytes, header: RaftSegmentHeader, number: int, *records: LogRecord) -> bytes:
    """Return the segment with one more group."""
    payload = bytes_of(records)
    return segment + encode_group_header(header.seed, number, len(segment), payload) + payload


def segment_of(*groups: Sequence[LogRecord], header: RaftSegmentHeader = HEADER) -> bytes:
    data = encode_segment_header(header)
    for number, group in enumerate(groups, header.group):
        data = grown(data, header, number, *group)
    return data


def replay(*segments: bytes, synced: SyncedEnd | None = None) -> Replay:
    fed = ((number, f"log.{number}", bytearray(data)) for number, data in enumerate(segments, 1))
    return replay_segments(fed, len(segments), synced)


# --- Structures ------------------------------------------------------------------------------------------


@given(st.lists(records))
def test_records_round_trip(written: list[LogRecord]) -> None:
    data = bytes_of(written)
    assert len(data) % 8 == 0
    assert list(decode_records(memoryview(data))) == written


@pytest.mark.parametrize("data", [bytes(8), bytes(24), bytes_of([entry(1)])[:-8]])
def test_records_truncated_or_of_unknown_kind_raise_value_error(data: bytes) -> None:
    with pytest.raises(ValueError, match="record"):
        list(decode_records(memoryview(data)))


@given(st.integers(1, 2**63), st.binary(min_size=16, max_size=16), places, u64, names, u64)
def test_segment_header_round_trips(
    number: int, log: bytes, base: LogIndex, term: int, vote: str | None, group: int
) -> None:
    header = RaftSegmentHeader(number, log, base, term, vote and vote[:255], group)
    data = encode_segment_header(header)
    assert len(data) == SEGMENT_HEADER_BYTES
    assert decode_segment_header(data, path="log.1", number=number) == header


def test_segment_under_another_file_name_raises_corrupt() -> None:
    with pytest.raises(Corrupt, match="segment 1, expected 2"):
        decode_segment_header(encode_segment_header(HEADER), path="log.2", number=2)


@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("log.1", 1),
        ("log.100", 100),
        ("log.0", None),
        ("log.01", None),
        ("log.durable", None),
        (".log.1.new", None),
    ],
)
def test_segment_name_parses_as_decimal_number_or_none(name: str, number: int | None) -> None:
    assert parse_segment_name(name) == number


def test_group_verifies_only_at_its_offset_in_its_segment_and_log() -> None:
    payload = bytes_of([entry(1)])
    header = encode_group_header(HEADER.seed, 7, 400, payload)
    data = bytes(400) + header + payload
    group = group_at(data, 400, HEADER.seed, path="log.1")
    assert group == (7, 448, len(data), crc32c(payload, group_start(400)))
    assert verify_records(memoryview(payload), group, HEADER.seed)
    for other in (replace(HEADER, number=2), replace(HEADER, log=bytes(16))):
        assert group_at(data, 400, other.seed, path="log.1") is None
    assert group_at(bytes(8) + data, 408, HEADER.seed, path="log.1") is None


def group_start(offset: int) -> int:
    return crc32c(offset.to_bytes(8, "little"), HEADER.seed)


ends = st.builds(SyncedEnd, u64, u64, u64, u64, st.binary(min_size=16, max_size=16))


@given(ends)
def test_synced_end_round_trips(end: SyncedEnd) -> None:
    assert len(encode_synced_end(end)) == SYNCED_END_BYTES
    assert newest_synced_end(encode_synced_end(end)) == end


def test_newest_valid_synced_end_is_used() -> None:
    older, newer = (SyncedEnd(sequence, 1, 400 + sequence, sequence, LOG) for sequence in (8, 9))
    assert (older.file_offset, newer.file_offset) == (0, 64)
    data = encode_synced_end(older) + encode_synced_end(newer)
    assert newest_synced_end(data) == newer
    assert newest_synced_end(data[:127]) == older
    assert newest_synced_end(data[:64] + bytes(64)) == older
    assert newest_synced_end(bytes(64) + data[64:]) == newer
    assert newest_synced_end(bytes(128)) is None


def with_version(data: bytes, version: int = 2) -> bytes:
    return data[:8] + version.to_bytes(2, "little") + data[10:]


def test_segment_group_or_synced_end_of_newer_rt_raises_unknown_version() -> None:
    with pytest.raises(UnknownVersion, match="unknown version of a Raft log segment"):
        replay(sealed(with_version(encode_segment_header(HEADER))))
    with pytest.raises(UnknownVersion, match="synced end"):
        newest_synced_end(sealed(with_version(encode_synced_end(SyncedEnd(1, 1, 400, 1, LOG)))))
    data = with_version(segment_of([entry(1)])[SEGMENT_HEADER_BYTES:])
    head = data[:GROUP_HEADER_BYTES]
    checksum = crc32c(head[16:], crc32c(head[:12], group_start(SEGMENT_HEADER_BYTES)))
    newer = head[:12] + checksum.to_bytes(4, "little") + data[16:]
    with pytest.raises(UnknownVersion, match="unknown version of a Raft log group"):
        replay(encode_segment_header(HEADER) + newer)


# --- Golden bytes ----------------------------------------------------------------------------------------


def test_segment_matches_golden_bytes(golden: Callable[..., bytes]) -> None:
    header = RaftSegmentHeader(3, LOG, LogIndex(41, 6), 7, "north", 12)
    groups = [
        [LogRecord(RecordKind.TERM, LogIndex(0, 8), b"south"), entry(42, 8, b"forty-two"), entry(43, 8, b"")],
        [
            LogRecord(RecordKind.TRUNCATE, LogIndex(42, 8), b""),
            LogRecord(RecordKind.TERM, LogIndex(0, 9), b""),
        ],
        [LogRecord(RecordKind.RESET, LogIndex(100, 9), b"")],
    ]
    data = segment_of(*groups, header=header) + bytes(24)
    dump = Dump(data)
    dump.title("the segment's header")
    dump.fields(SEGMENT)
    for records in groups:
        dump.title("a group's header")
        end = dump.fields(GROUP)["bytes of the records"] + dump.at
        for record in records:
            dump.title(f"a record: {record.kind.name.lower()}")
            dump.part(dump.fields(RECORD)["bytes of the content"], "content")
            dump.padding()
        assert dump.at == end
    dump.title("no group: written ahead")
    dump.part(24, "zeros up to the end of the file")
    found = golden("raft/log/segment", data, dump.text())
    result = replay_segments([(3, "log.3", bytearray(found))], 3, None)
    assert (result.term, result.voted_for, result.entries.base, len(result.entries)) == (9, None, (100, 9), 1)
    assert (result.end, result.torn_bytes) == (len(found) - 24, 0)


def test_synced_end_matches_golden_bytes(golden: Callable[..., bytes]) -> None:
    ends = [SyncedEnd(4, 2, 8_000_384, 11, LOG), SyncedEnd(5, 3, 520, 12, LOG)]
    data = b"".join(map(encode_synced_end, ends))
    dump = Dump(data)
    for number in range(2):
        dump.title(f"record {number}")
        dump.fields(SYNCED_END)
    assert newest_synced_end(golden("raft/log/synced_end", data, dump.text())) == ends[1]


# --- Decisions -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("numbers", "run"),
    [([1], [1]), ([1, 2, 3], [1, 2, 3]), ([1, 3, 4], [3, 4]), ([9, 2, 3, 7, 8], [7, 8, 9]), ([1, 2, 9], [9])],
)
def test_newest_run_is_the_contiguous_segments_up_to_the_newest(numbers: list[int], run: list[int]) -> None:
    assert list(newest_run(numbers)) == run


def test_torn_last_group_keeps_all_groups_before_it() -> None:
    data = segment_of([entry(1)], [entry(2)])
    end = len(segment_of([entry(1)]))
    for size in range(end + 1, len(data)):
        result = replay(data[:size])
        torn_bytes = len(data[end:size].rstrip(b"\0"))
        assert (result.entries.last, result.end, result.torn_bytes) == ((1, 1), end, torn_bytes)


@pytest.mark.parametrize("zeros", [0, 8, 512, 3000])
def test_last_group_is_discarded_if_any_of_its_pages_is_missing(zeros: int) -> None:
    before = segment_of([entry(1)])
    data = segment_of([entry(1)], [entry(2, content=GROUP_MAGIC * 250)])
    places = [*range(512, len(data), 512)]
    pages = list(zip([len(before), *places], [*places, len(data)], strict=True))
    for kept in itertools.product([False, True], repeat=len(pages)):
        torn = bytearray(data)
        for (start, end), is_kept in zip(pages, kept, strict=True):
            torn[start:end] = data[start:end] if is_kept else bytes(end - start)
        result = replay(bytes(torn) + bytes(zeros))
        assert (result.entries.last, result.torn_bytes > 0) == (
            ((2, 1), False) if all(kept) else ((1, 1), any(kept))
        )


ZEROS = [0, 1, 8, 1000, 1 << 16, (1 << 17) + 24]


@pytest.mark.parametrize("zeros", ZEROS)
@pytest.mark.parametrize("contents", [[], [b""], [b"entry"], [b"entry", bytes(300)]])
def test_zeros_up_to_end_of_file_are_a_clean_end(contents: list[bytes], zeros: int) -> None:
    """This holds for the newest segment and for an earlier one, whether or not the last group itself ends
    with zeros.
    """
    groups = [[entry(index, content=content)] for index, content in enumerate(contents, 1)]
    data = segment_of(*groups)
    result = replay(data + bytes(zeros))
    assert (result.entries.last.index, result.end, result.torn_bytes) == (len(contents), len(data), 0)
    header = RaftSegmentHeader(2, LOG, result.entries.last, 0, None, len(contents) + 1)
    result = replay(data + bytes(zeros), segment_of([entry(len(contents) + 1)], header=header) + bytes(zeros))
    assert (result.entries.last.index, result.torn_bytes) == (len(contents) + 1, 0)


@given(st.binary(max_size=20), st.sampled_from(ZEROS), st.binary(max_size=20), st.sampled_from(ZEROS))
def test_torn_bytes_extend_to_last_nonzero_byte(first: bytes, zeros: int, second: bytes, behind: int) -> None:
    before = segment_of([entry(1)])
    rest = first + bytes(zeros) + second + bytes(behind)
    result = replay(before + rest)
    assert (result.end, result.torn_bytes) == (len(before), len(rest.rstrip(b"\0")))


def test_zeros_in_place_of_synced_group_raise_corrupt() -> None:
    one, two = segment_of([entry(1)]), segment_of([entry(1)], [entry(2)])
    gone = one + bytes(len(two) - len(one) + 1000)
    with pytest.raises(Corrupt, match="got groups up to 1, expected groups up to 2"):
        replay(gone, synced=SyncedEnd(2, 1, len(two), 2, LOG))
    second = encode_segment_header(RaftSegmentHeader(2, LOG, LogIndex(2, 1), 0, None, 3))
    with pytest.raises(Corrupt, match="does not continue"):
        replay(gone, second)
    three = segment_of([entry(1)], [entry(2)], [entry(3)])
    with pytest.raises(Corrupt, match=f"a later group exists at {len(two)}"):
        replay(one + bytes(len(two) - len(one)) + three[len(two) :] + bytes(1000))


def test_nonzero_byte_in_trailing_zeros_counts_as_bad_group() -> None:
    data = segment_of([entry(1)])
    second = encode_segment_header(RaftSegmentHeader(2, LOG, LogIndex(1, 1), 0, None, 2))
    synced = SyncedEnd(1, 1, len(data), 1, LOG)
    for at in range(64):
        rotten = bytearray(data + bytes(64))
        rotten[len(data) + at] ^= 1 << at % 8
        result = replay(bytes(rotten), synced=synced)
        assert (result.entries.last, result.end, result.torn_bytes) == ((1, 1), len(data), at + 1)
        with pytest.raises(Corrupt, match="a later segment exists"):
            replay(bytes(rotten), second)


def test_bad_group_before_later_group_raises_corrupt() -> None:
    whole = segment_of([entry(1)], [entry(2, content=bytes(50))], [entry(3)])
    start, behind = (
        len(segment_of([entry(1)])),
        len(whole) - len(segment_of([entry(3)])) + SEGMENT_HEADER_BYTES,
    )
    for at in range(start, behind):
        bad = bytearray(whole + bytes(at % 3 * 8))
        bad[at] ^= 1
        with pytest.raises(Corrupt, match=f"a later group exists at {behind}") as caught:
            replay(bytes(bad))
        assert (caught.value.path, caught.value.offset) == ("log.1", start)


def test_bad_group_before_corrupt_group_with_valid_header_raises_corrupt() -> None:
    bad = bytearray(segment_of([entry(1)], [entry(2)]))
    bad[SEGMENT_HEADER_BYTES] ^= 1
    bad[-1] ^= 1
    with pytest.raises(Corrupt, match="later group"):
        replay(bytes(bad))


def test_copy_of_group_inside_torn_group_does_not_count_as_later_group() -> None:
    inner = segment_of([entry(1)])[SEGMENT_HEADER_BYTES:]
    torn = bytearray(segment_of([entry(1, content=inner + bytes(8) + inner)]))
    torn[-1] ^= 1
    assert replay(bytes(torn)).torn_bytes == len(torn) - SEGMENT_HEADER_BYTES


def test_torn_or_missing_group_before_later_segment_raises_corrupt() -> None:
    first = segment_of([entry(1)])
    second = encode_segment_header(RaftSegmentHeader(2, LOG, LogIndex(1, 1), 0, None, 2))
    assert replay(first, second).bases == [(0, 0), (1, 1)]
    with pytest.raises(Corrupt, match="a later segment exists"):
        replay(first[:-1], second)
    with pytest.raises(Corrupt, match="does not continue"):
        replay(first[:SEGMENT_HEADER_BYTES], second)


@pytest.mark.parametrize(
    "change",
    [
        {"log": bytes(16)},
        {"base": LogIndex(0, 0)},
        {"base": LogIndex(1, 2)},
        {"term": 3},
        {"voted_for": "x"},
        {"group": 3},
    ],
)
def test_segment_not_continuing_previous_one_raises_corrupt(change: dict[str, object]) -> None:
    header = replace(RaftSegmentHeader(2, LOG, LogIndex(1, 1), 0, None, 2), **change)
    with pytest.raises(Corrupt, match="does not continue"):
        replay(segment_of([entry(1)]), encode_segment_header(header))


def test_log_shorter_than_its_synced_end_raises_corrupt() -> None:
    data = segment_of([entry(1)], [entry(2)])
    first, second = (SyncedEnd(number, 1, end, number, LOG) for number, end in ((1, 456), (2, len(data))))
    for size in range(len(segment_of([entry(1)])), len(data)):
        assert replay(data[:size], synced=first).entries.last == (1, 1)
        with pytest.raises(Corrupt, match=r"groups up to 2 in log\.1, which were synced"):
            replay(data[:size], synced=second)
    with pytest.raises(Corrupt, match=r"in log\.2, which were synced"):
        replay(data, synced=SyncedEnd(3, 2, SEGMENT_HEADER_BYTES, 2, LOG))
    with pytest.raises(Corrupt, match="belongs to another Raft log"):
        replay(data, synced=first._replace(log=bytes(16)))


def test_group_with_wrong_number_raises_corrupt() -> None:
    with pytest.raises(Corrupt, match="got 3, expected 2"):
        replay(grown(segment_of([entry(1)]), HEADER, 3, entry(2)))


@pytest.mark.parametrize(
    "record",
    [
        entry(3),
        entry(1),
        entry(2, term=0),
        LogRecord(RecordKind.TRUNCATE, LogIndex(1, 2), b""),
        LogRecord(RecordKind.TRUNCATE, LogIndex(2, 1), b""),
        LogRecord(RecordKind.TERM, LogIndex(0, 4), b""),
        LogRecord(RecordKind.TERM, LogIndex(0, 5), b"b"),
        LogRecord(RecordKind.TERM, LogIndex(0, 5), b""),
    ],
)
def test_valid_group_with_record_contradicting_earlier_ones_raises_corrupt(record: LogRecord) -> None:
    start = [LogRecord(RecordKind.TERM, LogIndex(0, 5), b"a"), entry(1)]
    with pytest.raises(Corrupt, match="invalid record in a group"):
        replay(segment_of(start, [record]))


def test_truncate_record_below_first_segment_lowers_log_base() -> None:
    header = RaftSegmentHeader(1, LOG, LogIndex(10, 2), 3, None, 5)
    result = replay(
        segment_of([LogRecord(RecordKind.TRUNCATE, LogIndex(7, 1), b""), entry(8, 3)], header=header)
    )
    assert (result.entries.base, result.entries.last) == ((7, 1), (8, 3))
