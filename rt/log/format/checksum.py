"""CRC-32C (Castagnoli), and the seed that ties a batch or a block to its place.

`crc32c(data, start)` is the library's own: it continues the checksum `start` with `data`.

Invariants:
- The checksums of a batch start from the checksum of (incarnation, X, Y, offset). So a valid batch in another
  file, or elsewhere in its own, does not verify.
- The same is true of a block's header with (cluster id, X, Y, offset).
"""

from __future__ import annotations

import struct

from crc32c import crc32c

from rt.log.format.constants import Buffer

__all__ = ["around", "batch_seed", "crc32c", "sealed", "segment_seed"]

_PLACE = struct.Struct("<16sII")
_OFFSET = struct.Struct("<Q")


def around(data: Buffer) -> int:
    """The CRC-32C of `data` without its bytes 12-15, which store this checksum."""
    view = memoryview(data)
    return crc32c(view[16:], crc32c(view[:12]))


def sealed(data: bytes) -> bytes:
    """`data` with its checksum in bytes 12-15."""
    return data[:12] + around(data).to_bytes(4, "little") + data[16:]


def segment_seed(origin: bytes, run: int, roll: int) -> int:
    """The part of the seed that all batches or blocks of a segment share; `origin` as in its header."""
    return crc32c(_PLACE.pack(origin, run, roll))


def batch_seed(segment: int, offset: int) -> int:
    """The seed of the batch or block at `offset` in the segment whose `segment_seed` is `segment`."""
    return crc32c(_OFFSET.pack(offset), segment)
