"""Batch boundaries and running checksums match their definitions; blocks with wrong ones are rejected."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from batches import (
    CLUSTER,
    INCARNATION,
    Range,
    Said,
    block_of,
    declaration_block,
    in_place,
    merged_bytes,
    merged_header,
    session_bytes,
    session_header,
)
from crc32c import crc32c
from disks import MemoryDisk
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

import rt
from rt.log.check.verify import verify
from rt.log.format.block import BLOCK_HEADER_BYTES, decode_block_header, encode_block_header
from rt.log.format.checksum import batch_seed
from rt.log.format.running_checksum import (
    ChecksummedBoundary,
    chain_after,
    chain_of_segment,
    merged_chain,
)
from rt.log.format.segment import SegmentHeader, SegmentId, decode_segment_header, encode_segment_header
from rt.log.scan.scanner import MergedScanner, PlacedBlock, SessionScanner
from rt.testing.merged import MergedLogBuilder

HEADER = session_header(first=40)
MERGED = merged_header(first=500)
RUNS = [[Said("a", b"one", 5), Said("b", b"two", 3)], [Said("", b"x" * 50, 9)], [Said("a", b"", 7)] * 3]
SESSION = session_bytes(HEADER, RUNS)
RANGES = [
    Range(1, (tuple(RUNS[0]), tuple(RUNS[1])), number=7, run=3, offset=4096),
    Range(2, (tuple(RUNS[2]),), number=0, skip=1, chain=77),
    Range(1, (tuple(RUNS[1]), tuple(RUNS[0])), number=11, skip=2, run=3, roll=2),
]
BLOCKS = merged_bytes(RANGES, first=500)


def dumb_marks(header: SegmentHeader, data: bytes) -> list[ChecksummedBoundary]:
    """Compute the batch boundaries header by header, as the format's diagram describes them."""
    marks, at, chain = [], 0, crc32c(encode_segment_header(header))
    while at < len(data):
        head = data[at : at + 64]
        chain = crc32c(head, chain)
        at += int.from_bytes(head[8:12], "little")
        number = int.from_bytes(head[24:32], "little") + int.from_bytes(head[20:24], "little")
        low, high = (int.from_bytes(head[start : start + 8], "little", signed=True) for start in (32, 40))
        marks.append(ChecksummedBoundary(64 + at, number, chain, low, high, crc32c(data[:at])))
    return marks


def dumb_merged_chain(data: bytes, chain: int = 0) -> int:
    """Compute the checksum of all relevant bytes, joined into one piece."""
    at, counts = 0, b""
    while at < len(data):
        length = int.from_bytes(data[at + 48 : at + 56], "little")
        is_declaration = data[at + 10] == 2
        counts += data[at : at + 96 + length] if is_declaration else data[at : at + 96]
        at += 96 + length
    return crc32c(counts, chain)


# Batch boundaries

runs = st.lists(
    st.lists(
        st.builds(Said, st.sampled_from(["", "a"]), st.binary(max_size=40), st.integers(-9, 9)),
        min_size=1,
        max_size=3,
    ),
    max_size=6,
)


@given(runs, st.lists(st.integers(1, 400), min_size=1, max_size=4))
def test_batch_boundaries_match_reference_parser_however_bytes_are_split(
    said: Sequence[Sequence[Said]], sizes: list[int]
) -> None:
    data = session_bytes(HEADER, said)
    scanner, marks, turn = SessionScanner(HEADER, marks=True), [], 0
    while scanner.offset < 64 + len(data):
        at = scanner.offset - 64
        size = sizes[turn % len(sizes)]
        scan = scanner.scan(memoryview(data[at : at + size]))
        if not scan.consumed:
            scan = scanner.scan(memoryview(data[at:]))
        assert len(scan.marks) == len(scan.batches)
        marks += scan.marks
        turn += 1
    assert marks == dumb_marks(HEADER, data)
    assert scanner.chain == (marks[-1].chain if marks else chain_of_segment(encode_segment_header(HEADER)))


def test_scanner_records_no_batch_boundaries_by_default() -> None:
    assert SessionScanner(HEADER).scan(memoryview(SESSION)).marks == []


def test_scanner_started_at_batch_boundary_continues_its_checksums() -> None:
    marks = dumb_marks(HEADER, SESSION)
    for index, mark in enumerate(marks):
        behind = {"offset": mark.offset, "first": mark.number, "chain": mark.chain, "content": mark.content}
        scanner = SessionScanner(HEADER, marks=True, **behind)
        assert scanner.scan(memoryview(SESSION[mark.offset - 64 :])).marks == marks[index + 1 :]
    with pytest.raises(ValueError, match="the chain there is missing"):
        SessionScanner(HEADER, offset=marks[0].offset, marks=True)


def test_scanner_records_no_batch_boundary_after_corrupt_batch() -> None:
    marks = dumb_marks(HEADER, SESSION)
    bad = SESSION[: marks[1].offset - 1 - 64] + b"!" + SESSION[marks[1].offset - 64 :]
    scanner = SessionScanner(HEADER, marks=True)
    scan = scanner.scan(memoryview(bad))
    assert (scan.problem is not None, scan.marks, scanner.chain) == (True, marks[:1], marks[0].chain)


@pytest.mark.parametrize(
    "other",
    [
        replace(HEADER, run_id=bytes(8)),
        replace(HEADER, created_ns=0),
        replace(HEADER, origin=CLUSTER),
        replace(HEADER, id=SegmentId(3, 2)),
    ],
    ids=["life", "creation time", "incarnation", "Y"],
)
def test_running_checksum_depends_on_segment_header(other: SegmentHeader) -> None:
    assert dumb_marks(other, SESSION)[-1].chain != dumb_marks(HEADER, SESSION)[-1].chain


# Running checksums of merged logs


@given(st.lists(st.integers(1, 600), min_size=1, max_size=4))
def test_merged_checksum_covers_whole_blocks_however_bytes_are_split(sizes: list[int]) -> None:
    scanner = MergedScanner(MERGED, chain=99)
    blocks: list[PlacedBlock] = []
    turn = 0
    while scanner.offset < 64 + len(BLOCKS):
        at = scanner.offset - 64
        size = sizes[turn % len(sizes)]
        scan = scanner.scan(memoryview(BLOCKS[at : at + size]))
        if not scan.consumed:
            scan = scanner.scan(memoryview(BLOCKS[at : at + 300]))
        assert scan.problem is None
        assert scan.consumed
        blocks += scan.blocks
        assert scanner.chain == dumb_merged_chain(BLOCKS[: scanner.boundary - 64], 99)
        turn += 1
    assert scanner.last_block is not None
    assert scanner.last_block.instruction == 3
    assert [block.header.session_id for block in blocks] == [1, 1, 2, 2, 1]
    assert all(BLOCKS[block.offset - 64 :][:4] == b"RTK1" for block in blocks)


def test_merged_checksum_continues_across_segments() -> None:
    chain = 0
    for _ in range(2):
        scanner = MergedScanner(MERGED, chain=chain)
        scanner.scan(memoryview(BLOCKS))
        assert scanner.chain is not None
        chain = scanner.chain
    assert chain == dumb_merged_chain(BLOCKS + BLOCKS)


def test_merged_scanner_without_checksum_computes_none_and_starts_without_last_block() -> None:
    scanner = MergedScanner(MERGED)
    assert (scanner.chain, scanner.last_block) == (None, None)
    scanner.scan(memoryview(BLOCKS))
    assert scanner.last_block is not None
    assert (scanner.chain, scanner.last_block.instruction) == (None, 3)


def test_checksum_functions_match_reference_definitions() -> None:
    size = int.from_bytes(SESSION[8:12], "little")
    chain = chain_after(chain_of_segment(encode_segment_header(HEADER)), memoryview(SESSION)[:64])
    assert chain == dumb_marks(HEADER, SESSION[:size])[0].chain
    length = int.from_bytes(BLOCKS[48:56], "little")
    assert merged_chain(5, BLOCKS[:96], BLOCKS[96 : 96 + length]) == dumb_merged_chain(
        BLOCKS[: 96 + length], 5
    )
    assert merged_chain(5, BLOCKS[:96]) == crc32c(BLOCKS[:96], 5)


# Source fields of a block

DECLARE = declaration_block(1, position=500)
BLOCK = block_of(RANGES[0], position=500)


@pytest.mark.parametrize("field", ["chain_start", "chain_end"])
def test_block_with_wrong_running_checksum_is_rejected_only_if_checksums_are_verified(
    field: str,
) -> None:
    data = in_place(DECLARE, block_of(RANGES[0], position=500, **{field: 1}))
    scan = MergedScanner(MERGED, chain=0).scan(memoryview(data))
    assert scan.problem is not None
    assert "their block has" in scan.problem
    assert MergedScanner(MERGED).scan(memoryview(data)).problem is None


@pytest.mark.parametrize(
    ("header", "offset"),
    [
        (replace(MERGED, origin=INCARNATION), 64),
        (replace(MERGED, id=SegmentId(1, 7)), 64),
        (replace(MERGED, id=SegmentId(0, 8)), 64),
        (MERGED, 64 + len(DECLARE)),
    ],
    ids=["cluster", "X", "Y", "offset"],
)
def test_block_in_other_cluster_segment_or_offset_fails_header_checksum(
    header: SegmentHeader, offset: int
) -> None:
    scanner = MergedScanner(header, offset=offset)
    scan = scanner.scan(memoryview(in_place(DECLARE, BLOCK)))
    assert (scan.problem, scan.consumed) == ("block header fails its checksum", 0)


# Corruption in a merged log


@pytest.fixture
def disk() -> MemoryDisk:
    """Return a merged log. Its segment log.0.1 has a declaration and two blocks of one batch each, of equal
    size.
    """
    disk = MemoryDisk()
    with rt.Publisher("/root", "s", publisher_id="feed", linger_ms=60_000, disk=disk) as publisher:
        for index in range(3):
            publisher.publish(b"%d" % index, timestamp_ns=5)
            publisher.flush()
    with MergedLogBuilder("/merged", cluster_id=CLUSTER, stream="s", disk=disk) as merged:
        source = publisher.directory
        size = len(disk.read(f"{source}/log.0.0"))
        step = (size - 64) // 3
        merged.merge(source, end=64 + step)
        merged.roll()
        merged.merge(source, end=64 + 2 * step)
        merged.merge(source)
        merged.roll()
    return disk


PATH = "/merged/log.0.1"


def starts(data: bytes) -> list[int]:
    found, at = [], 64
    while at < len(data):
        found.append(at)
        at += BLOCK_HEADER_BYTES + int.from_bytes(data[at + 48 : at + 56], "little")
    return found


def damage(disk: MemoryDisk) -> list[tuple[str, int]]:
    return [(problem.path, problem.offset) for problem in verify("/merged", disk=disk).damage]


def test_merged_log_fixture_is_valid_and_has_three_blocks(disk: MemoryDisk) -> None:
    assert damage(disk) == []
    assert len(starts(disk.read(PATH))) == 3


@pytest.mark.parametrize("field", ["chain_start", "chain_end"])
def test_verify_reports_block_with_wrong_running_checksum(disk: MemoryDisk, field: str) -> None:
    data = bytearray(disk.read(PATH))
    at = starts(data)[1]
    seed = batch_seed(decode_segment_header(data, path=PATH).seed, at)
    block = decode_block_header(data, at, seed)
    data[at : at + 96] = encode_block_header(block._replace(**{field: 1}), seed)
    disk.write(PATH, bytes(data))
    assert (PATH, at + BLOCK_HEADER_BYTES) in damage(disk)
    with rt.LogReader("/merged", disk=disk) as reader:
        assert len(list(reader)) == 3  # A reader does not check running checksums.


def test_verify_reports_block_continuing_from_wrong_running_checksum(
    disk: MemoryDisk,
) -> None:
    data = bytearray(disk.read(PATH))
    at = starts(data)[2]
    seed = batch_seed(decode_segment_header(data, path=PATH).seed, at)
    head = bytes(data[at + 96 : at + 160])
    block = decode_block_header(data, at, seed)._replace(chain_start=1, chain_end=chain_after(1, head))
    data[at : at + 96] = encode_block_header(block, seed)
    disk.write(PATH, bytes(data))
    problems = verify("/merged", disk=disk).damage
    assert [(problem.path, problem.offset) for problem in problems] == [(PATH, at)]
    assert "with the chain 0x00000001, expected" in problems[0].what


def test_block_moved_within_its_segment_is_corrupt(disk: MemoryDisk) -> None:
    data = disk.read(PATH)
    _, first, second = starts(data)
    disk.write(PATH, data[:first] + data[second:] + data[first:second])
    assert damage(disk) == [(PATH, first)]
    with rt.LogReader("/merged", disk=disk) as reader, pytest.raises(rt.Corrupt):
        list(reader)


def test_block_fails_header_checksum_in_other_segment_or_cluster(disk: MemoryDisk) -> None:
    data = disk.read(PATH)
    header = decode_segment_header(data, path=PATH)
    for origin, other in ((CLUSTER, SegmentId(0, 3)), (INCARNATION, SegmentId(0, 1))):
        elsewhere = replace(header, origin=origin, id=other)
        scan = MergedScanner(elsewhere).scan(memoryview(data)[64:])
        assert (scan.problem, scan.consumed) == ("block header fails its checksum", 0)
