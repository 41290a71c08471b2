"""The durable end: how far the active segment of a directory is known to be synced.

The file `durable` has two 64-byte records, written alternately with pwrite after each fsync of the segment.
They are not synced: a lost record only makes the known end smaller, a torn one leaves the other.

    offset  bytes  field
         0      8  magic "RTDURBLE"
         8      2  version
        10      2  0
        12      4  checksum: CRC-32C of bytes 0-11 and 16-63
        16      8  sequence, one higher at each write; record sequence % 2 is overwritten
        24      4  X
        28      4  Y
        32      8  offset: bytes below it are synced
        40      8  end: the next number or position at that offset
        48     16  incarnation or cluster id
"""

from __future__ import annotations

import struct
from typing import Final

from msgspec import Struct

from rt.errors import UnknownVersion
from rt.log.format.checksum import around, sealed
from rt.log.format.constants import NEWER_HINT, VERSION
from rt.log.format.segment import SegmentId

DURABLE_FILE: Final = "durable"
RECORD_BYTES: Final = 64

_RECORD = struct.Struct("<8sHHIQIIQQ16s")
_MAGIC = b"RTDURBLE"


class DurableEnd(Struct, frozen=True):
    """Bytes of segment `id` below `offset` are synced; the next number or position after them is `end`."""

    sequence: int
    id: SegmentId
    offset: int
    end: int
    origin: bytes


def encode_durable_end(record: DurableEnd) -> bytes:
    run, roll = record.id
    fields = (VERSION, 0, 0, record.sequence, run, roll, record.offset, record.end, record.origin)
    return sealed(_RECORD.pack(_MAGIC, *fields))


def record_place(sequence: int) -> int:
    """The offset in the file of the record with this sequence."""
    return (sequence % 2) * RECORD_BYTES


def newest_durable_end(data: bytes) -> DurableEnd | None:
    """The newer valid record of a `durable` file's bytes; None if neither is valid.

    Raises `rt.UnknownVersion` if a newer rt wrote one of them, so that its synced end is not ignored.
    """
    records = (_decode(data[start : start + RECORD_BYTES]) for start in (0, RECORD_BYTES))
    return max((record for record in records if record), key=lambda record: record.sequence, default=None)


def _decode(data: bytes) -> DurableEnd | None:
    if len(data) < RECORD_BYTES:
        return None
    magic, version, _, checksum, sequence, run, roll, offset, end, origin = _RECORD.unpack(data)
    if magic != _MAGIC or checksum != around(data):
        return None
    if version != VERSION:
        raise UnknownVersion(
            "durable end of an unknown version",
            where=DURABLE_FILE,
            got=version,
            expected=VERSION,
            hint=NEWER_HINT,
        )
    return DurableEnd(sequence, SegmentId(run, roll), offset, end, origin)
