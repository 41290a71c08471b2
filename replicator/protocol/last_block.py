"""The last block before an offset of a merged log: its header checksum identifies a copy.

A block's header holds the running checksums of its batches, and is seeded with its offset. So an equal
checksum at an equal offset shows that two copies are equal up to there, as far as each of them was verified.
"""

from __future__ import annotations

from copy import copy
from typing import NamedTuple

from rt.log.disk import Disk, File
from rt.log.format.block import BLOCK_HEADER_BYTES, BlockHeader, encode_block_header
from rt.log.format.checksum import batch_seed
from rt.log.format.segment import SegmentHeader
from rt.log.scan.catalog import scanner_before
from rt.log.scan.directory import scans
from rt.log.scan.scanner import MergedScanner, Scanner


class LastBlock(NamedTuple):
    """The data before an offset of a segment.

    The whole blocks end at `boundary`, with position `next`. `checksum` is the header checksum of the last
    block; 0 if there is none. `goes_beyond`: the next block is here, and ends after the offset.
    """

    boundary: int
    next: int
    checksum: int
    goes_beyond: bool


def last_block_before(disk: Disk, path: str, header: SegmentHeader, file: File, offset: int) -> LastBlock:
    """Find the last block before `offset`, starting at the last index entry before it. `OSError` as the disk
    raises it.
    """
    scanner = scanner_before(disk, path, header, file, offset - 1)
    walk_to(file, scanner, offset)
    assert isinstance(scanner, MergedScanner)
    last = scanner.last_block
    checksum = 0 if last is None else block_checksum(last, header, scanner.boundary)
    goes_beyond = scanner.boundary < offset and reaches_beyond(file, scanner, offset)
    return LastBlock(scanner.boundary, scanner.next, checksum, goes_beyond)


def block_checksum(block: BlockHeader, segment: SegmentHeader, end_offset: int) -> int:
    offset = end_offset - BLOCK_HEADER_BYTES - block.length_bytes
    head = encode_block_header(block, batch_seed(segment.seed, offset))
    return int.from_bytes(head[4:8], "little")


def walk_to(file: File, scanner: Scanner, end: int) -> str | None:
    """Walk over the frames that end at or before `end`. Return the problem of a bad frame before `end`."""

    def pread(size: int, offset: int) -> bytes:
        return file.pread(min(size, end - offset) if offset < end else 0, offset)

    return [scan.problem for scan in scans(pread, scanner, values=False)][-1]


def reaches_beyond(file: File, scanner: Scanner, end: int) -> bool:
    """Whether the walk to `end` stopped in a frame that ends after `end`. Then no frame ends at `end`."""
    beyond = copy(scanner)
    return any(beyond.boundary > end for _ in scans(file.pread, beyond, values=False))
