"""Segment scanners: valid frames are found however bytes are split; all other bytes are rejected."""

import dataclasses
import itertools
import random
import struct
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from typing import Any

import numpy as np
import pytest
from batches import (
    CLUSTER,
    Heard,
    Range,
    Said,
    batch,
    block_of,
    columns,
    declaration_block,
    declaration_of,
    forge,
    in_place,
    merged_bytes,
    merged_header,
    read_merged_dumbly,
    read_session_dumbly,
    session_bytes,
    session_header,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from rt.log.format.batch import CODEC_NONE, CODEC_ZSTD, BadBatch
from rt.log.format.block import (
    BLOCK_HEADER_BYTES,
    BlockHeader,
    Declaration,
    decode_block_header,
    encode_block_header,
)
from rt.log.format.checksum import batch_seed, crc32c, segment_seed
from rt.log.format.constants import BATCH_BYTES_MAX, MESSAGE_BYTES_MAX, NUMBER_MAX, padding
from rt.log.format.segment import (
    SEGMENT_HEADER_BYTES,
    LogKind,
    SegmentHeader,
    SegmentId,
    encode_segment_header,
)
from rt.log.scan.batch_decoder import decode
from rt.log.scan.directory import read_frames
from rt.log.scan.placed_batches import groups
from rt.log.scan.scanner import MergedScanner, Scanner, ScanResult, SessionScanner, scanner_for

HEADER = session_header(first=40)
MERGED = merged_header(first=500)
RUNS = [
    [Said("trade", b"one"), Said("quote", b""), Said("trade", b"three")],
    [Said("", b"x" * 50)],
    [Said("trade", bytes(range(100)))] * 2,
]
SESSION = session_bytes(HEADER, RUNS)
SESSION_ENDS = [len(session_bytes(HEADER, RUNS[:count])) for count in range(len(RUNS) + 1)]

RANGES = [
    Range(1, (tuple(RUNS[0]), tuple(RUNS[1])), number=7, run=3, offset=4096),
    Range(2, (tuple(RUNS[2]),), number=0, skip=1),
    Range(1, (tuple(RUNS[1]), tuple(RUNS[0])), number=11, skip=2, run=3, roll=2),
]
BLOCKS = merged_bytes(RANGES, first=500)


# Reading a segment as a reader does


def read_all(
    header: SegmentHeader, data: bytes, sizes: Iterator[int] | None = None
) -> tuple[list[Heard], Scanner, ScanResult]:
    """Return every message that a scanner finds in pieces of `sizes`, the scanner, and its last scan.

    If a piece is too small for a frame, it is read again at the size that the frame needs, as a reader does.
    """
    scanner = scanner_for(header)
    messages: list[Heard] = []
    size = 0
    while True:
        at = scanner.offset - SEGMENT_HEADER_BYTES
        size = max(size, next(sizes)) if sizes is not None else len(data)
        piece = data[at : at + size]
        scan = scanner.scan(memoryview(piece))
        messages += decoded(scanner, piece, scan)
        if scan.problem is not None or at + scan.consumed == len(data):
            return messages, scanner, scan
        size = 0
        if scan.needed and not scan.consumed:
            if at + scan.needed > len(data) and len(piece) == len(data) - at:
                return messages, scanner, scan
            size = scan.needed


def decoded(scanner: Scanner, data: bytes, scan: ScanResult) -> Iterator[Heard]:
    names = {0: "s"}
    if isinstance(scanner, MergedScanner):
        names = {number: found.session for number, found in scanner.sessions.items()}
    for group in groups(scan.batches):
        found = decode(np.frombuffer(data, np.uint8), group, names)
        for message in found.messages() if found is not None else ():
            said = Said(message.topic, message.value, message.timestamp_ns)
            yield Heard(message.position, message.number, message.session, said)


def read_dumbly(header: SegmentHeader, data: bytes) -> list[Heard]:
    return list(read_session_dumbly(data) if header.kind is LogKind.SESSION else read_merged_dumbly(data))


topics = st.sampled_from(["", "a", "trade", "größe"])
messages = st.lists(
    st.builds(Said, topics, st.binary(max_size=60), st.integers(-(2**63), 2**63 - 1)), min_size=1, max_size=4
)


@st.composite
def session_segments(draw: st.DrawFn) -> tuple[SegmentHeader, bytes]:
    header = replace(HEADER, first=draw(st.integers(0, 1000)))
    return header, session_bytes(header, draw(st.lists(messages, max_size=5)))


@st.composite
def merged_segments(draw: st.DrawFn) -> tuple[SegmentHeader, bytes]:
    ranges, numbers = [], dict.fromkeys((1, 2, 3), 0)
    for _ in range(draw(st.integers(0, 4))):
        session_id = draw(st.sampled_from((1, 2, 3)))
        runs = tuple(map(tuple, draw(st.lists(messages, min_size=1, max_size=3))))
        count = sum(map(len, runs))
        place = {"run": draw(st.integers(0, 3)), "offset": draw(st.sampled_from([64, 72, 4096]))}
        skip = draw(st.sampled_from([0, 0, 1, count - 1]))
        ranges.append(Range(session_id, runs, number=numbers[session_id], skip=skip, **place))
        numbers[session_id] += count
    header = replace(MERGED, first=draw(st.integers(0, 1000)))
    return header, merged_bytes(ranges, first=header.first)


segments = st.one_of(session_segments(), merged_segments())


# Complete frames are found


@given(segments)
def test_scanner_finds_same_messages_as_reference_parser(segment: tuple[SegmentHeader, bytes]) -> None:
    header, data = segment
    found, scanner, scan = read_all(header, data)
    assert found == read_dumbly(header, data)
    assert (scan.problem, scan.needed, scan.consumed) == (None, 0, len(data))
    assert scanner.offset == scanner.boundary == SEGMENT_HEADER_BYTES + len(data)
    assert scanner.next == header.first + len(found)
    if header.kind is LogKind.MERGED:
        assert [one.position for one in found] == [*range(header.first, scanner.next)]


@given(segments, st.lists(st.integers(1, 300), min_size=1, max_size=8))
def test_scanner_result_is_same_however_bytes_are_split(
    segment: tuple[SegmentHeader, bytes], sizes: list[int]
) -> None:
    header, data = segment
    found, scanner, scan = read_all(header, data, itertools.cycle(sizes))
    whole, other, _ = read_all(header, data)
    assert found == whole
    assert scan.problem is None
    assert (scanner.offset, scanner.boundary, scanner.next) == (other.offset, other.boundary, other.next)
    if isinstance(scanner, MergedScanner) and isinstance(other, MergedScanner):
        assert (scanner.sessions, scanner.last_block) == (other.sessions, other.last_block)


@given(segments, st.data())
def test_growing_segment_yields_each_message_once(
    segment: tuple[SegmentHeader, bytes], data: st.DataObject
) -> None:
    header, content = segment
    scanner, found, size = scanner_for(header), [], 0
    while size < len(content):
        size = data.draw(st.integers(size + 1, len(content)))
        piece = content[scanner.offset - SEGMENT_HEADER_BYTES : size]
        scan = scanner.scan(memoryview(piece))
        assert scan.problem is None
        found += decoded(scanner, piece, scan)
    assert found == read_dumbly(header, content)


@given(segments)
def test_scanned_batch_offset_points_to_its_magic_bytes(segment: tuple[SegmentHeader, bytes]) -> None:
    header, data = segment
    scan = scanner_for(header).scan(memoryview(data))
    for one in scan.batches:
        assert one.offset == SEGMENT_HEADER_BYTES + one.start
        assert data[one.start : one.start + 4] == b"RTB1"


def test_compressed_and_uncompressed_batches_are_both_found() -> None:
    big = [[Said("t", b"again " * 50)] * 3] * 2
    data = session_bytes(HEADER, [*big, *big], codecs=[CODEC_ZSTD, CODEC_NONE, CODEC_ZSTD, CODEC_NONE])
    found, _, scan = read_all(HEADER, data)
    assert [one.said for one in found] == big[0] * 4
    assert [one.header.flags for one in scan.batches] == [1, 0, 1, 0]


def test_batch_with_unknown_flags_is_accepted_with_flags_kept() -> None:
    seed = batch_seed(HEADER.seed, 64)
    data = forge(columns([0, 1], [0], [], [0, 1], b"t"), b"v", seed=seed, first=40, flags=0xF0)
    scan = SessionScanner(HEADER).scan(memoryview(data))
    assert (scan.problem, len(scan.batches), scan.batches[0].header.flags) == (None, 1, 0xF0)


def test_scan_of_empty_buffer_changes_no_state() -> None:
    for header in (HEADER, MERGED):
        scanner = scanner_for(header)
        assert scanner.scan(memoryview(b"")) == ScanResult()
        assert (scanner.offset, scanner.next) == (64, header.first)


def test_segment_kind_selects_scanner_class() -> None:
    assert isinstance(scanner_for(HEADER), SessionScanner)
    assert isinstance(scanner_for(MERGED), MergedScanner)
    assert isinstance(scanner_for(merged_header(kind=LogKind.FILTERED)), MergedScanner)


def test_session_scan_can_start_at_any_batch() -> None:
    first = HEADER.first
    for start, run in zip(SESSION_ENDS, RUNS, strict=False):
        scanner = SessionScanner(HEADER, offset=64 + start, first=first)
        scan = scanner.scan(memoryview(SESSION[start:]))
        assert scan.problem is None
        assert scanner.next == HEADER.first + sum(map(len, RUNS))
        first += len(run)


def test_merged_scan_can_start_at_any_block_with_earlier_declarations() -> None:
    whole, _, _ = read_all(MERGED, BLOCKS)
    sessions = {number: declaration_of(number) for number in (1, 2)}
    last = block_of(RANGES[2], position=508 - RANGES[2].count + 1, instruction=3)
    start = BLOCKS.index(last[96:]) - 96
    position = MERGED.first + RANGES[0].count + RANGES[1].count
    scanner = MergedScanner(MERGED, offset=64 + start, first=position, sessions=sessions)
    scan = scanner.scan(memoryview(BLOCKS[start:]))
    assert scan.problem is None
    assert list(decoded(scanner, BLOCKS[start:], scan)) == whole[-RANGES[2].count :]
    undeclared = MergedScanner(MERGED, offset=64 + start, first=position)
    assert undeclared.scan(memoryview(BLOCKS[start:])).problem == "session id 1 is not declared"


def test_scan_with_copied_scanner_leaves_original_unchanged() -> None:
    for header, data in ((HEADER, SESSION), (MERGED, BLOCKS)):
        scanner = scanner_for(header)
        assert copy(scanner).scan(memoryview(data)).consumed == len(data)
        assert (scanner.offset, scanner.next, scanner.boundary) == (64, header.first, 64)
        assert scanner.scan(memoryview(data)).consumed == len(data)


# Incomplete frames are awaited


def block_at(data: bytes, at: int) -> BlockHeader:
    return decode_block_header(data, at, batch_seed(MERGED.seed, 64 + at))


def ends_of(header: SegmentHeader, data: bytes) -> tuple[list[int], list[int]]:
    """Return the ends of the frames that can be delivered, and the offsets where the segment may be cut."""
    if header.kind is LogKind.SESSION:
        return SESSION_ENDS, SESSION_ENDS
    frames, boundaries, at = [0], [0], 0
    while at < len(data):
        block = block_at(data, at)
        end, at = at + BLOCK_HEADER_BYTES + block.length_bytes, at + BLOCK_HEADER_BYTES
        if block.kind == 1:
            frames.append(at)
            while at < end:
                at += struct.unpack_from("<I", data, at + 8)[0]
                frames.append(at)
        else:
            at = end
            frames.append(at)
        boundaries.append(at)
    return frames, boundaries


def ends_in(data: bytes, end: int) -> BlockHeader | None:
    """The header of the block that ends at `end`."""
    at, last = 0, None
    while at < end:
        last = block_at(data, at)
        at += BLOCK_HEADER_BYTES + last.length_bytes
    return last


@pytest.mark.parametrize(("header", "data"), [(HEADER, SESSION), (MERGED, BLOCKS)], ids=["session", "merged"])
def test_truncated_segment_yields_whole_frames_and_waits_for_rest(header: SegmentHeader, data: bytes) -> None:
    frames, boundaries = ends_of(header, data)
    for size in range(len(data) + 1):
        scanner = scanner_for(header)
        scan = scanner.scan(memoryview(data[:size]))
        whole = max(end for end in frames if end <= size)
        assert (scan.problem, scan.consumed) == (None, whole), size
        assert (scan.needed > size - whole) == (size != whole), size
        assert scan.needed <= len(data) - whole
        cut = max(end for end in boundaries if end <= whole)
        assert scanner.boundary - 64 == cut, size
        assert scanner.next == header.first + len(read_dumbly(header, data[:cut])), size
        if isinstance(scanner, MergedScanner):
            assert scanner.last_block == ends_in(data, cut), size
        rest = scanner.scan(memoryview(data[whole:]))
        assert (rest.problem, whole + rest.consumed) == (None, len(data)), size


# Corruption is detected


def flips(data: bytes) -> Iterator[tuple[int, bytes]]:
    for bit in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        yield bit // 8, bytes(flipped)


@pytest.mark.parametrize(("header", "data"), [(HEADER, SESSION), (MERGED, BLOCKS)], ids=["session", "merged"])
def test_flipped_bit_is_detected_in_its_own_frame(header: SegmentHeader, data: bytes) -> None:
    frames, _ = ends_of(header, data)
    for place, flipped in flips(data):
        scanner = scanner_for(header)
        scan = scanner.scan(memoryview(flipped))
        assert scan.problem, place
        frame = max(end for end in frames if end <= place)
        assert scan.consumed == scanner.offset - 64 == frame, place


@pytest.mark.parametrize(("header", "data"), [(HEADER, SESSION), (MERGED, BLOCKS)], ids=["session", "merged"])
def test_scan_without_values_detects_flipped_bits_outside_values(header: SegmentHeader, data: bytes) -> None:
    frames, _ = ends_of(header, data)
    batches = scanner_for(header).scan(memoryview(data)).batches
    values = {
        place
        for one in batches
        for place in range(
            one.start + one.header.total_bytes - padded_values(one.header.values_stored),
            one.start + one.header.total_bytes,
        )
    }
    assert 0 < len(values) < len(data)
    for place, flipped in flips(data):
        scan = scanner_for(header).scan(memoryview(flipped), values=False)
        if place in values:
            assert (scan.problem, scan.consumed) == (None, len(data)), place
        else:
            assert scan.problem, place
            assert scan.consumed == max(end for end in frames if end <= place), place


def padded_values(size: int) -> int:
    return size + len(padding(size))


@given(segments, st.data())
def test_scan_stops_at_corrupt_frame_and_repeats_its_problem(
    segment: tuple[SegmentHeader, bytes], data: st.DataObject
) -> None:
    header, content = segment
    if content:
        place = data.draw(st.integers(0, len(content) - 1))
        flipped = content[:place] + bytes([content[place] ^ 0x41]) + content[place + 1 :]
        found, scanner, scan = read_all(header, flipped)
        assert scan.problem
        assert scanner.offset - 64 <= place
        assert found == read_dumbly(header, content)[: len(found)]
        again = scanner.scan(memoryview(flipped[scanner.offset - 64 :]))
        assert (again.problem, again.batches, again.consumed) == (scan.problem, [], 0)


@given(st.binary(max_size=400))
def test_random_bytes_yield_no_batches(data: bytes) -> None:
    for header in (HEADER, MERGED):
        for garbage in (data, b"RTB1" + data, b"RTK1" + data, bytes(len(data))):
            scan = scanner_for(header).scan(memoryview(garbage))
            assert (scan.batches, scan.consumed) == ([], 0)
            assert not garbage or scan.problem or 0 < scan.needed <= 128 + BATCH_BYTES_MAX + MESSAGE_BYTES_MAX


# Valid frames at a wrong position


@pytest.mark.parametrize(
    "elsewhere",
    [
        replace(HEADER, origin=CLUSTER),
        replace(HEADER, id=SegmentId(HEADER.id.run + 1, HEADER.id.roll)),
        replace(HEADER, id=SegmentId(HEADER.id.run, HEADER.id.roll + 1)),
        replace(HEADER, id=SegmentId(HEADER.id.roll, HEADER.id.run)),
    ],
    ids=["incarnation", "X", "Y", "X and Y changed about"],
)
def test_batch_of_another_segment_fails_columns_checksum(elsewhere: SegmentHeader) -> None:
    assert SessionScanner(HEADER).scan(memoryview(SESSION)).problem is None
    scan = SessionScanner(elsewhere).scan(memoryview(SESSION))
    assert (scan.problem, scan.batches) == ("columns fail their checksum", [])


@pytest.mark.parametrize("offset", [72, 128, 64 + 2**20, 64 + 2**32, 2**40])
def test_batch_at_another_offset_fails_columns_checksum(offset: int) -> None:
    scan = SessionScanner(HEADER, offset=offset).scan(memoryview(SESSION))
    assert scan.problem == "columns fail their checksum"


def test_values_of_another_batch_fail_values_checksum() -> None:
    data = session_bytes(HEADER, [[Said("t", b"a" * 16)], [Said("t", b"b" * 16)]])
    size = len(data) // 2
    swapped = data[: size - 16] + data[-16:] + data[size:-16] + data[size - 16 : size]
    scan = SessionScanner(HEADER).scan(memoryview(swapped))
    assert (scan.problem, scan.batches) == ("values fail their checksum", [])
    assert SessionScanner(HEADER).scan(memoryview(swapped), values=False).problem is None


@pytest.mark.parametrize("first", [39, 41, 0, 2**40])
def test_batch_with_wrong_first_number_is_rejected(first: int) -> None:
    data = batch(RUNS[0], first=first, seed=batch_seed(HEADER.seed, 64))
    scan = SessionScanner(HEADER).scan(memoryview(data))
    assert (scan.problem, scan.consumed) == (f"number {first} where 40 must follow", 0)


def test_repeated_batch_is_rejected() -> None:
    scan = SessionScanner(HEADER).scan(memoryview(SESSION + SESSION[SESSION_ENDS[2] :]))
    assert scan.problem == "columns fail their checksum"
    assert len(scan.batches) == 3
    seed = batch_seed(HEADER.seed, 64 + len(SESSION))
    again = batch(RUNS[2], first=HEADER.first + 4, seed=seed)
    scan = SessionScanner(HEADER).scan(memoryview(SESSION + again))
    assert scan.problem == "number 44 where 46 must follow"


def merged_problem(*blocks: bytes, header: SegmentHeader = MERGED) -> str | None:
    return MergedScanner(header).scan(memoryview(in_place(*blocks))).problem


PART = RANGES[0]
DECLARE = declaration_block(1, position=500)
BLOCK = block_of(PART, position=500)


def test_block_fixtures_are_valid() -> None:
    assert merged_problem(DECLARE, BLOCK) is None


@pytest.mark.parametrize(
    "fields", [{"source_run": 4}, {"source_roll": 1}, {"source_offset": 4104}, {"session_id": 2}]
)
def test_block_with_wrong_source_or_session_of_its_batches_is_rejected(fields: dict[str, int]) -> None:
    declare = declaration_block(2, position=500)
    assert merged_problem(DECLARE, declare, block_of(PART, position=500, **fields)) == (
        "columns fail their checksum"
    )


@pytest.mark.parametrize("position", [499, 501, 0, NUMBER_MAX - 10])
@pytest.mark.parametrize("kind", [LogKind.MERGED, LogKind.FILTERED])
def test_block_at_wrong_position_is_rejected_except_after_gap_in_filtered_log(
    position: int, kind: LogKind
) -> None:
    header = merged_header(kind=kind, first=500)
    for blocks in ([DECLARE, block_of(PART, position=position)], [declaration_block(1, position=position)]):
        problem = merged_problem(*blocks, header=header)
        if kind is LogKind.FILTERED and position > 500:
            assert problem is None
        else:
            assert problem == f"position {position} where 500 must follow"


def test_filtered_log_continues_after_each_position_gap() -> None:
    header = merged_header(kind=LogKind.FILTERED, first=500)
    blocks = [DECLARE, *(block_of(PART, position=position) for position in (510, 514, 600))]
    scanner = MergedScanner(header)
    data = in_place(*blocks)
    scan = scanner.scan(memoryview(data))
    assert [one.position for one in decoded(scanner, data, scan)] == [*range(510, 518), *range(600, 604)]
    assert scanner.next == 604
    assert merged_problem(*blocks, block_of(PART, position=603), header=header) == (
        "position 603 where 604 must follow"
    )


# Hostile frames with valid checksums


def hostile_block(content: bytes = b"", **fields: Any) -> bytes:
    """Return a block at the position of `PART`, with any content and any header."""
    header = decode_block_header(BLOCK, 0, 0)._replace(length_bytes=len(content))
    return encode_block_header(header._replace(**fields), 0) + content


def at_place(offset: int, session_id: int = 1) -> int:
    """Return the seed of a batch in the source of `PART`."""
    return batch_seed(segment_seed(declaration_of(session_id).incarnation, PART.run, PART.roll), offset)


CONTENT = BLOCK[BLOCK_HEADER_BYTES:]
FIRST_BYTES = struct.unpack_from("<I", CONTENT, 8)[0]
GAP = CONTENT[:FIRST_BYTES] + batch(RUNS[1], first=11, seed=at_place(4096 + FIRST_BYTES))
BACK = CONTENT[:FIRST_BYTES] + batch(RUNS[1], first=9, seed=at_place(4096 + FIRST_BYTES))

HOSTILE_BLOCKS: dict[str, tuple[list[bytes], str]] = {
    "an undeclared session": ([BLOCK], "session id 1 is not declared"),
    "a session declared under another id": (
        [declaration_block(2, position=500), BLOCK],
        "session id 1 is not declared",
    ),
    "a block without a batch": ([DECLARE, hostile_block(b"", message_count=0)], "without a batch"),
    "a block of half a header": ([DECLARE, hostile_block(CONTENT[:32])], "ends after its block"),
    "a block that ends inside its batch": (
        [DECLARE, hostile_block(CONTENT[: FIRST_BYTES - 8])],
        "ends after its block",
    ),
    "a block that ends inside its second batch": (
        [DECLARE, hostile_block(CONTENT[:-8])],
        "ends after its block",
    ),
    "a block that ends inside its batch, with the bytes behind it": (
        [DECLARE, hostile_block(CONTENT, length_bytes=len(CONTENT) - 8)],
        "ends after its block",
    ),
    "a block that goes on behind its batches": (
        [DECLARE, hostile_block(CONTENT + bytes(64))],
        "no batch starts here",
    ),
    "a block of zeros": ([DECLARE, hostile_block(bytes(200))], "no batch starts here"),
    "a block in a block": ([DECLARE, hostile_block(BLOCK)], "no batch starts here"),
    "more messages than it holds": ([DECLARE, hostile_block(CONTENT, message_count=5)], "batches end at"),
    "fewer messages than it holds": ([DECLARE, hostile_block(CONTENT, message_count=3)], "batches end at"),
    "no messages though it holds some": (
        [DECLARE, hostile_block(CONTENT, message_count=0)],
        "batches end at",
    ),
    "a skip that is not taken off the count": ([DECLARE, hostile_block(CONTENT, skip=1)], "batches end at"),
    "a skip larger than the block": (
        [DECLARE, hostile_block(CONTENT, skip=5, message_count=0)],
        "batches end at",
    ),
    "the largest skip": ([DECLARE, hostile_block(CONTENT, skip=2**32 - 1)], "batches end at"),
    "numbers with a gap": ([DECLARE, hostile_block(GAP)], "number 11 where 10 must follow"),
    "numbers that go back": ([DECLARE, hostile_block(BACK)], "number 9 where 10 must follow"),
    "a length that is no multiple of 8": (
        [DECLARE, hostile_block(CONTENT + b"x", length_bytes=len(CONTENT) + 1)],
        "out of range",
    ),
    "an id that is declared for two sessions": (
        [DECLARE, declaration_block(1, position=500, declared=declaration_of(2)), BLOCK],
        "session id 1 is declared for two sessions",
    ),
    "an id that changes its dedup id": (
        [DECLARE, declaration_block(1, position=500, declared=replace(declaration_of(1), dedup_id=None))],
        "session id 1 is declared for two sessions",
    ),
    "an unknown kind": ([DECLARE, hostile_block(CONTENT, kind=3)], "unknown to this rt"),
    "an unknown version": ([DECLARE, hostile_block(CONTENT, version=2)], "version 2"),
    "a declaration that is far too long": (
        [hostile_block(b"", kind=2, message_count=0, length_bytes=2**61)],
        "declaration of 2305843009213693952 bytes",
    ),
    "a declaration with messages": ([hostile_block(bytes(24), kind=2)], "and 4 messages"),
}


@pytest.mark.parametrize(("blocks", "says"), HOSTILE_BLOCKS.values(), ids=HOSTILE_BLOCKS)
def test_malformed_block_is_rejected_however_bytes_are_split(blocks: list[bytes], says: str) -> None:
    data = in_place(*blocks)
    _, scanner, scan = read_all(MERGED, data)
    assert scan.problem is not None
    assert says in scan.problem
    for size in (1, 8, 100, 250):
        _, other, last = read_all(MERGED, data, itertools.repeat(size))
        assert last.problem == scan.problem
        assert (other.offset, other.boundary, other.next) == (scanner.offset, scanner.boundary, scanner.next)


@pytest.mark.parametrize("count", range(4))
def test_messages_beyond_block_message_count_are_not_delivered(count: int) -> None:
    """The next block's positions start after this count, even if this block is invalid."""
    found, _, scan = read_all(MERGED, in_place(DECLARE, hostile_block(CONTENT, message_count=count)))
    assert scan.problem is not None
    assert len(found) == (3 if count == 3 else 0)


@pytest.mark.parametrize("name", ["../../etc/passwd", "..", "a/b", "a\0b", ""])
def test_declaration_with_invalid_session_name_is_rejected(name: str) -> None:
    content = struct.pack("<16sHH", bytes(16), len(name), 0) + name.encode()
    content += padding(len(content))
    data = hostile_block(
        content, kind=2, message_count=0, content_checksum=crc32c(content), chain_start=0, chain_end=0
    )
    scanner = MergedScanner(MERGED)
    scan = scanner.scan(memoryview(in_place(data)))
    assert scan.problem is not None
    assert "names no session" in scan.problem
    assert scanner.sessions == {}


def test_repeated_declaration_is_accepted() -> None:
    assert merged_problem(DECLARE, DECLARE, BLOCK) is None


def test_block_may_start_with_completely_skipped_batch() -> None:
    part = dataclasses.replace(PART, skip=3)
    data = in_place(DECLARE, block_of(part, position=500))
    found, scanner, scan = read_all(MERGED, data)
    assert [one.skip for one in scan.batches] == [3, 0]
    assert found == [Heard(500, 10, "session-1", RUNS[1][0])]
    assert scanner.next == 501


HEADERS = {
    "no messages": {"message_count": 0},
    "no topics": {"topic_count": 0},
    "more topics than messages": {"topic_count": 2},
    "the most messages": {"message_count": 2**32 - 1},
    "half of the most messages": {"message_count": 2**31},
    "a negative first number": {"first": -1},
    "the least first number": {"first": -(2**63)},
    "a first number above the limit": {"first": NUMBER_MAX},
    "the largest first number": {"first": 2**63 - 1},
    "a total of nothing": {"total_bytes": 0},
    "the largest total": {"total_bytes": 2**32 - 1},
    "the largest total that is a multiple of 8": {"total_bytes": 2**32 - 8},
    "the most columns": {"columns_bytes": 2**32 - 1},
    "the most values": {"values_bytes": 2**32 - 1},
    "the most stored columns": {"columns_stored": 2**32 - 1},
    "the most stored values": {"values_stored": 2**32 - 1},
    "stored far more than it holds": {"flags": 1, "columns_stored": 2**31, "total_bytes": 64 + 2**31 + 8},
    "stored far more than it holds, unknown codec": {
        "flags": 9,
        "values_stored": 2**31,
        "total_bytes": 64 + 2**31 + 32,
    },
    "no columns": {"columns_bytes": 0, "columns_stored": 0, "total_bytes": 72},
}


@pytest.mark.parametrize("fields", HEADERS.values(), ids=HEADERS)
def test_malformed_batch_header_is_rejected_before_batch_is_complete(fields: dict[str, int]) -> None:
    for header, seed, before in (
        (HEADER, batch_seed(HEADER.seed, 64), b""),
        (MERGED, at_place(4096), DECLARE),
    ):
        data = forge(columns([0, 1], [0], [], [0, 1], b"t"), b"v", seed=seed, **({"first": 40} | fields))
        if before:
            data = in_place(before, hostile_block(data, message_count=1))
        scan = scanner_for(header).scan(memoryview(data))
        assert scan.problem
        assert scan.batches == []
        if header is HEADER:
            assert SessionScanner(header).scan(memoryview(data[:64])).problem


@pytest.mark.parametrize("size", [BATCH_BYTES_MAX - 24 - 9, MESSAGE_BYTES_MAX])
def test_incomplete_large_frame_reports_bytes_needed(size: int) -> None:
    good = batch([Said("t", b"")], first=40)
    head = forge(
        good[64:89], b"", first=40, values_bytes=size, values_stored=size, total_bytes=64 + 32 + size + 7 & -8
    )
    scan = SessionScanner(HEADER).scan(memoryview(head))
    assert (scan.problem, scan.needed) == (None, 64 + 32 + size + 7 & -8)


@st.composite
def forged_batches(draw: st.DrawFn) -> bytes:
    """Draw a batch at the start of the segment with valid checksums and any header."""
    near = st.one_of(st.integers(0, 40), st.integers(2**32 - 70, 2**32 - 1), st.integers(0, 2**32 - 1))
    fields = draw(
        st.fixed_dictionaries(
            {},
            optional={
                "flags": st.sampled_from([0, 1, 2, 0x10, 0xFFFF]),
                "topic_count": st.integers(0, 5),
                "message_count": st.integers(0, 8) | near,
                "first": st.sampled_from([39, 40, 41, -1, NUMBER_MAX, 2**63 - 1]),
                "total_bytes": near,
                "columns_stored": near,
                "values_stored": near,
                "columns_bytes": near,
                "values_bytes": near,
                "timestamp_low_ns": st.sampled_from([0, 1, -(2**63)]),
            },
        )
    )
    count = draw(st.integers(1, 4))
    words = st.sampled_from([0, 1, 2, 3, 8, -1, 2**31 - 1, -(2**31)])
    some = draw(st.lists(words, min_size=count + 1, max_size=count + 1))
    names = draw(st.integers(1, count))
    index = draw(st.lists(st.integers(0, 3), min_size=count, max_size=count)) if names > 1 else []
    ends = draw(st.lists(words, min_size=names + 1, max_size=names + 1))
    content = columns(
        [0, *sorted(some[1:])] if draw(st.booleans()) else some,
        [0] * count,
        index,
        [0, *sorted(ends[1:])] if draw(st.booleans()) else ends,
        draw(st.binary(max_size=4)),
    )
    seed = batch_seed(HEADER.seed, 64)
    return forge(
        content,
        draw(st.binary(max_size=9)),
        seed=seed,
        **({"message_count": count, "topic_count": names, "first": 40} | fields),
    )


@settings(max_examples=200)
@given(forged_batches(), st.sampled_from([b"", bytes(8), SESSION]))
def test_forged_batch_is_rejected_or_decodes_completely(data: bytes, behind: bytes) -> None:
    scan = SessionScanner(HEADER).scan(memoryview(data + behind))
    assert scan.needed <= 64 + MESSAGE_BYTES_MAX + 2048
    buffer = np.frombuffer(data + behind, np.uint8)
    for group in groups(scan.batches):
        try:
            found = decode(buffer, group, {0: "s"})
        except BadBatch:
            continue
        assert found is not None
        found.to_arrow().validate(full=True)
        assert len(list(found.messages())) == len(found)


@st.composite
def forged_blocks(draw: st.DrawFn) -> bytes:
    """Draw a declaration, then a block of good batches with any header, then perhaps a good block."""
    number = st.one_of(st.integers(0, 12), st.integers(2**32 - 3, 2**32 - 1))
    fields = draw(
        st.fixed_dictionaries(
            {},
            optional={
                "version": st.sampled_from([0, 1, 1, 2]),
                "kind": st.sampled_from([1, 1, 2, 3]),
                "session_id": st.sampled_from([1, 1, 2]),
                "skip": number,
                "source_run": st.sampled_from([3, 3, 4]),
                "source_offset": st.sampled_from([4096, 4096, 4104, 2**62 - 1, 2**64 - 1]),
                "length_bytes": st.one_of(
                    st.sampled_from([0, 8, 64, FIRST_BYTES, len(CONTENT), 2**61, 2**64 - 8]),
                    st.integers(0, 60).map(lambda words: 8 * words),
                ),
                "first_position": st.sampled_from([500, 500, 501, 499, 2**62 - 5, 2**64 - 1]),
                "message_count": st.one_of(number, st.sampled_from([2**62, 2**64 - 1])),
            },
        )
    )
    behind = draw(st.sampled_from([[], [BLOCK], [DECLARE], [bytes(96)]]))
    return in_place(DECLARE, hostile_block(CONTENT, **fields), *behind)


@settings(max_examples=200)
@given(forged_blocks(), st.lists(st.integers(1, 400), min_size=1, max_size=4))
def test_forged_blocks_yield_only_dense_positions(data: bytes, sizes: list[int]) -> None:
    found, scanner, scan = read_all(MERGED, data, itertools.cycle(sizes))
    assert scan.needed <= 96 + 2048
    assert [one.position for one in found] == [*range(500, 500 + len(found))]
    if scan.problem is None and scanner.boundary == 64 + len(data):
        assert found == read_dumbly(MERGED, data)
    again, other, last = read_all(MERGED, data)
    assert (again, last.problem, other.offset) == (found, scan.problem, scanner.offset)


# Reads at size limits


@pytest.mark.parametrize("missing", [0, 8])
def test_frame_larger_than_read_size_is_read_again_only_if_complete(missing: int) -> None:
    content = encode_segment_header(HEADER) + session_bytes(HEADER, [[Said("trade", bytes(100_000))]])
    content = content[: len(content) - missing]
    reads: list[int] = []

    def pread(size: int, offset: int) -> bytes:
        reads.append(size)
        return content[offset : offset + size]

    data, scan = read_frames(pread, SessionScanner(HEADER), 4096)
    if missing:
        assert (len(data), scan.consumed, scan.problem, reads) == (4096, 0, None, [4096, 1])
    else:
        assert len(data) == scan.consumed == len(content) - 64
        assert reads == [4096, 1, len(data)]


def test_numbers_up_to_limit_are_readable() -> None:
    header = replace(HEADER, first=NUMBER_MAX - 2)
    data = batch(RUNS[2], first=NUMBER_MAX - 2, seed=batch_seed(header.seed, 64))
    found, scanner, _ = read_all(header, data)
    assert [one.number for one in found] == [NUMBER_MAX - 2, NUMBER_MAX - 1]
    assert scanner.next == NUMBER_MAX


def test_positions_up_to_limit_are_readable() -> None:
    header = replace(MERGED, first=NUMBER_MAX - 5)
    data = in_place(declaration_block(1, position=NUMBER_MAX - 5), block_of(PART, position=NUMBER_MAX - 5))
    found, scanner, scan = read_all(header, data)
    assert scan.problem is None
    assert found[-1].position == NUMBER_MAX - 2
    assert scanner.next == NUMBER_MAX - 1


def test_scanner_adds_declarations_without_changing_given_sessions() -> None:
    earlier = {9: Declaration("earlier", bytes(16))}
    scanner = MergedScanner(MERGED, sessions=earlier)
    scanner.scan(memoryview(BLOCKS))
    assert list(earlier) == [9]
    assert scanner.sessions == {
        9: Declaration("earlier", bytes(16)),
        1: declaration_of(1),
        2: declaration_of(2),
    }


@pytest.mark.slow
@pytest.mark.parametrize("make", [session_segments, merged_segments])
def test_edited_segment_yields_only_messages_before_first_edit(make: Callable[[], Any]) -> None:
    harms: Sequence[Callable[[bytes, int, int], bytes]] = [
        lambda data, a, b: data[:a] + data[b:],
        lambda data, a, b: data[:a] + data[a:b] + data[a:b] + data[b:],
        lambda data, a, b: data[:a] + bytes(b - a) + data[b:],
        lambda data, a, b: data[:a] + data[a:b][::-1] + data[b:],
        lambda data, a, b: (
            data[:a] + bytes([data[a] ^ 1]) + data[a + 1 : b] + bytes([data[b] ^ 8]) + data[b + 1 :]
        ),
        lambda data, a, b: data[:a] + data[b:] + data[a:b],
    ]

    # Drawing a segment takes ten times as long as reading it, so each one is corrupted in every way.
    @settings(max_examples=250)
    @given(make(), st.integers())
    def check(segment: tuple[SegmentHeader, bytes], seed: int) -> None:
        header, content = segment
        if len(content) < 2:
            return
        good, draw = read_dumbly(header, content), random.Random(seed)
        for harm in harms:
            a, b = sorted(draw.sample(range(len(content)), 2))
            harmed = harm(content, a, b)
            found, scanner, _ = read_all(header, harmed)
            assert found == good[: len(found)]
            pairs = enumerate(zip(content, harmed, strict=False))
            same = next((i for i, (x, y) in pairs if x != y), len(harmed))
            assert scanner.offset - 64 <= same or harmed == content

    check()
