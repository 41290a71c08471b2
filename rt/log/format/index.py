"""A sparse index of a segment, so that a reader finds a number or position with one seek.

The index is only a hint, derived from the segment. A reader uses an entry only if the frame at its offset
verifies with the entry's first number. Otherwise it scans from the segment's start. So lost or torn entries
only cost time.

The file `index.X.Y` has 32-byte entries in log order, appended as the segment grows and not synced: about one
for each MiB, and one for each declaration, because a scanner that starts after a declaration needs it.

    offset  bytes  field
         0      8  first number or position of the frame
         8      8  offset of the frame in the segment
        16      8  highest timestamp of the segment's messages before the frame, ns; 0 if there are none
        24      4  kind: 1 frame, 2 declaration block (merged)
        28      4  checksum: CRC-32C of bytes 0-27, seeded with (incarnation or cluster id, X, Y)
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from enum import IntEnum
from typing import Final, NamedTuple

from rt.log.format.checksum import crc32c
from rt.log.format.constants import NUMBER_MAX, Buffer
from rt.log.format.segment import SegmentId

INDEX_STRIDE_BYTES: Final = 2**20
ENTRY_BYTES: Final = 32

_ENTRY = struct.Struct("<QQqII")
_BODY = struct.Struct("<QQqI")


class EntryKind(IntEnum):
    FRAME = 1
    DECLARATION = 2


_KINDS: Final = frozenset(EntryKind)


class IndexEntry(NamedTuple):
    first: int
    offset: int
    timestamp_high_ns: int
    kind: EntryKind = EntryKind.FRAME


def index_file_name(segment: SegmentId) -> str:
    return f"index.{segment.run}.{segment.roll}"


def encode_entry(entry: IndexEntry, seed: int) -> bytes:
    body = _BODY.pack(*entry)
    return body + crc32c(body, seed).to_bytes(4, "little")


def decode_entries(data: Buffer, seed: int, *, ends_at_corrupt: bool = False) -> Iterator[IndexEntry]:
    """The valid entries in the bytes of an index file whose offsets rise. Other entries are skipped.

    With `ends_at_corrupt`, the result ends before the first entry with a wrong checksum or kind. In a merged
    log this may be the entry of a declaration, and without the declaration a scanner cannot read what
    follows.
    """
    last = -1
    whole = memoryview(data)[: len(data) // ENTRY_BYTES * ENTRY_BYTES]
    for start in range(0, len(whole), ENTRY_BYTES):
        first, offset, timestamp_high_ns, kind, checksum = _ENTRY.unpack_from(whole, start)
        if crc32c(whole[start : start + _BODY.size], seed) != checksum or kind not in _KINDS:
            if ends_at_corrupt:
                return
            continue
        if last < offset < NUMBER_MAX and first < NUMBER_MAX:
            last = offset
            yield IndexEntry(first, offset, timestamp_high_ns, EntryKind(kind))
