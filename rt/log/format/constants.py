"""Sizes, limits and types that all formats of the log share: little-endian, multiples of 8, zero padding.

Law: what stands in a file of its own (segment, segments table, durable end) begins alike in every version:
magic 8 bytes, version 2, kind 2 (or 0), and at 12 the checksum of the rest (of a segment: of its first 64
bytes). So an older rt can tell what is newer from what is damaged. Batches, blocks and index entries are of
the version that their segment says.
"""

from __future__ import annotations

from typing import Final, TypeAlias

Buffer: TypeAlias = bytes | bytearray | memoryview

VERSION: Final = 1
"""The one version of every structure; a reader refuses any other by name."""
NEWER_HINT: Final = "It was written by a newer rt: use that one."

MESSAGE_BYTES_MAX: Final = 256 * 2**20
TOPIC_BYTES_MAX: Final = 1024
TOPICS_MAX: Final = 65_535
"""Topics in one batch: what a uint16 count can say."""
BATCH_BYTES_MAX: Final = 16 * 2**20
"""Bytes of a batch as read, uncompressed; only a batch of one message may be larger."""
NUMBER_MAX: Final = 2**62
"""Numbers, positions and offsets stay below this, so that sums of two of them fit an int64."""


def padded(size: int) -> int:
    """`size` rounded up to a multiple of 8."""
    return (size + 7) & ~7


def padding(size: int) -> bytes:
    """The zeros that follow `size` bytes."""
    return bytes(-size & 7)
