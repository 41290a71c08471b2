"""Chains: running checksums that show with four bytes that two copies of a log are equal up to a boundary.

The *chain* of a session segment at a batch boundary is a CRC-32C of headers. At the start (offset 64) it is
the CRC-32C of the segment's 64-byte header; each batch continues it with its 64-byte header. The *merged
chain* is the CRC-32C of the headers of all blocks, and of the content of declarations, in their order from
the start of the merged log, over all segments. It starts at 0.

Invariants:
- A batch header has the checksums of the rest of its batch, and a block header the chains of its batches. So
  equal chains at a boundary mean equal bytes up to there, and computing one needs no values.

The *content checksum* of a session segment at a batch boundary is the CRC-32C of all its bytes from the first
batch up to there. Two content checksums verify all bytes between two boundaries at once.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from rt.log.format.checksum import crc32c
from rt.log.format.constants import Buffer

CONTENT_START: Final = 0


class ChecksummedBoundary(NamedTuple):
    """A batch boundary of a session segment, to be compared between nodes.

    `number` is the next number, and `chain` is the chain up to the boundary. The timestamps are those of the
    batch that ends there. `content` is the content checksum, which a node never compares with another node's.
    """

    offset: int
    number: int
    chain: int
    timestamp_low_ns: int
    timestamp_high_ns: int
    content: int


class Checksums(NamedTuple):
    """A running CRC-32C of a segment's content before and after a range of it."""

    before: int
    after: int


def chain_of_segment(header_bytes: Buffer) -> int:
    """The chain at the start of a session segment."""
    return crc32c(header_bytes)


def chain_after(chain: int, batch_header_bytes: Buffer) -> int:
    """The chain after a batch; `chain` is the one before it."""
    return crc32c(batch_header_bytes, chain)


def merged_chain(chain: int, block_header_bytes: Buffer, content: Buffer = b"") -> int:
    """The merged chain after a block; `content` is that of a declaration."""
    chain = crc32c(block_header_bytes, chain)
    return crc32c(content, chain) if content else chain
