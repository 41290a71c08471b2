"""CRC-32C, and the seed that ties a batch to its place.

Law: the checksums of a batch start from the checksum of (incarnation, X, Y, offset), so that a batch which is
whole but stands in another file, or elsewhere in its own, does not verify.
"""

from __future__ import annotations

import struct

from crc32c import crc32c as _crc32c

from rt.log.layout import Buffer

_PLACE = struct.Struct("<16sII")
_OFFSET = struct.Struct("<Q")


def crc32c(data: Buffer, start: int = 0) -> int:
    """The CRC-32C (Castagnoli) of `data`, going on from the checksum `start` of what came before."""
    return _crc32c(data, start)


def segment_seed(incarnation: bytes, x: int, y: int) -> int:
    """The part of a batch's seed that all batches of one session segment share."""
    return crc32c(_PLACE.pack(incarnation, x, y))


def batch_seed(segment: int, offset: int) -> int:
    """The seed of the batch at `offset` in the segment whose `segment_seed` is `segment`."""
    return crc32c(_OFFSET.pack(offset), segment)
