"""Sizes, limits and types that all formats of the log share: little-endian, multiples of 8, zero padding.

Invariants:
- Each kind of file (segment, segments table, durable end) starts in the same way in every version: magic (8
  bytes), version (2), kind (2) or 0, and at 12 the checksum of the rest (of a segment: of its first 64
  bytes). So an older rt can distinguish a newer file from a corrupt one.
- Batches, blocks and index entries have the version of their segment.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeAlias

if TYPE_CHECKING:  # A push and a pull do not need numpy.
    import numpy as np
    import numpy.typing as npt

Buffer: TypeAlias = bytes | bytearray | memoryview
Int64s: TypeAlias = "npt.NDArray[np.int64]"

VERSION: Final = 1
"""The only version of every structure; a reader rejects others with `rt.UnknownVersion`."""
NEWER_HINT: Final = "It was written by a newer rt: use that one."

MESSAGE_BYTES_MAX: Final = 256 * 2**20
TOPIC_BYTES_MAX: Final = 1024
TOPICS_MAX: Final = 65_535
"""Topics in one batch: a uint16 counts them."""
BATCH_BYTES_MAX: Final = 16 * 2**20
"""Uncompressed bytes of a batch; only a batch of one message may be larger."""
NUMBER_MAX: Final = 2**62
"""Numbers, positions and offsets stay below this, so that sums of two of them fit an int64."""


def padded(size: int) -> int:
    """`size` rounded up to a multiple of 8."""
    return (size + 7) & ~7


def padding(size: int) -> bytes:
    """The zeros after `size` bytes, up to a multiple of 8."""
    return bytes(-size & 7)
