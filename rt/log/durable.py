"""The durable end: how far the active segment of a directory is known to be synced.

The file `durable` holds two 64-byte records, written in turn with pwrite after each fsync of the segment and
not synced themselves: a lost one only makes the known end smaller, a torn one leaves the other.

    offset  bytes  field
         0      8  magic "RTDURBLE"
         8      4  checksum: CRC-32C of bytes 16-63
        12      4  version
        16      8  sequence, one higher at each write; record sequence % 2 is overwritten
        24      4  X
        28      4  Y
        32      8  offset: bytes below it are synced
        40      8  end: the next number or position at that offset
        48     16  incarnation or cluster id
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final

from rt.log.checksum import crc32c
from rt.log.layout import VERSION
from rt.log.segment import SegmentId

DURABLE_FILE: Final = "durable"
RECORD_BYTES: Final = 64

_RECORD = struct.Struct("<8sIIQIIQQ16s")
_MAGIC = b"RTDURBLE"


@dataclass(frozen=True, slots=True)
class DurableEnd:
    """Bytes of segment `id` below `offset` are synced; the message behind them has number `end`."""

    sequence: int
    id: SegmentId
    offset: int
    end: int
    origin: bytes


def encode_durable_end(record: DurableEnd) -> bytes:
    """The 64 bytes of a record."""
    body = struct.pack(
        "<QIIQQ16s", record.sequence, record.id.x, record.id.y, record.offset, record.end, record.origin
    )
    return struct.pack("<8sII", _MAGIC, crc32c(body), VERSION) + body


def record_place(sequence: int) -> int:
    """Where in the file the record with this sequence goes."""
    return (sequence % 2) * RECORD_BYTES


def newest_durable_end(data: bytes) -> DurableEnd | None:
    """The newer valid record of a `durable` file's bytes; None if neither is valid."""
    records = (_decode(data[start : start + RECORD_BYTES]) for start in (0, RECORD_BYTES))
    return max((record for record in records if record), key=lambda record: record.sequence, default=None)


def _decode(data: bytes) -> DurableEnd | None:
    if len(data) < RECORD_BYTES:
        return None
    magic, checksum, version, sequence, x, y, offset, end, origin = _RECORD.unpack(data)
    if magic != _MAGIC or version != VERSION or checksum != crc32c(data[16:]):
        return None
    return DurableEnd(sequence, SegmentId(x, y), offset, end, origin)
