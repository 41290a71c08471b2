"""Chains: running checksums that show, by four bytes, that two copies of a log are the same up to a place.

The *chain* of a session segment at a batch boundary is a CRC-32C over headers: at its start (offset 64) that
of the segment's 64-byte header, behind each batch that of the batch's 64-byte header, going on from the chain
before it. The *merged chain* is the CRC-32C of the headers of all blocks, and of the content of declarations,
in their order from the start of the merged log, over all segments; at the very start it is 0.

Law: a batch header holds the checksums of all the rest of its batch, and a block header the chains of its
batches, so equal chains at a place mean equal bytes up to there; whoever computes one need not read values.

The *content checksum* of a session segment at a batch boundary is the CRC-32C of all its bytes from the
first batch up to there. Two of them verify the bytes between two boundaries at once, however many batches
these are.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from rt.log.format.checksum import crc32c
from rt.log.format.constants import Buffer

MERGED_CHAIN_START: Final = 0
CONTENT_START: Final = 0


class ChecksummedBoundary(NamedTuple):
    """A batch boundary of a session segment. Marks of one place can be compared across nodes.

    `number` is the one that must follow there and `chain` the chain up to there; the timestamps are those of
    the batch that ends there. `content` is the content checksum: a node compares it with nobody but itself.
    """

    offset: int
    number: int
    chain: int
    timestamp_low_ns: int
    timestamp_high_ns: int
    content: int


class Checksums(NamedTuple):
    """A running CRC-32C of a segment's content: in front of a range of them, and behind it."""

    before: int
    behind: int


def chain_of_segment(header_bytes: Buffer) -> int:
    """The chain at the start of the session segment with this 64-byte header."""
    return crc32c(header_bytes)


def chain_behind(chain: int, batch_header_bytes: Buffer) -> int:
    """The chain behind the batch with this 64-byte header; `chain` is that before it."""
    return crc32c(batch_header_bytes, chain)


def merged_chain(chain: int, block_header_bytes: Buffer, content: Buffer = b"") -> int:
    """The merged chain behind a block; `content` is what follows the header of a declaration."""
    chain = crc32c(block_header_bytes, chain)
    return crc32c(content, chain) if content else chain
