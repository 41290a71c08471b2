"""The bytes of the Raft log: segments, groups, records, and the synced end.

A log consists of consecutive segment files `log.1`, `log.2`, ... Integers are little-endian; everything is
padded with zeros to a multiple of 8 bytes. A segment is renamed to its name after its header is written and
everything before it is synced. So its header summarizes what came before, and older segments can be removed.

After its groups a segment is *filled* with zeros up to the end of the file, so that a sync of the next group
changes no metadata. The fill is optional. Zeros up to the end of the file are the clean end of a segment.
They were written into a new file, so no group of an older segment can be among them.

    offset  bytes  field of a segment's header
         0      8  magic "RTRAFTLG"
         8      2  version
        10      2  0
        12      4  checksum: CRC-32C of bytes 0-11 and 16-383
        16      8  segment number, as in the name
        24     16  id of the log, drawn when it was made
        40      8  index before the segment's first entry
        48      8  term at that index
        56      8  Raft term
        64      8  number of the segment's first group
        72      8  bytes of the vote, 0: none
        80    304  the vote: name of the member voted for, UTF-8

Then groups follow. A group is a header and the records that one sync made durable. The numbers of groups are
dense over the lifetime of the log. Group n + 1 is written only after the sync of group n. Both checksums
continue a checksum of (log id, segment number, offset), so that a group at a wrong position does not verify.

    offset  bytes  field of a group's header
         0      8  magic "RTRAFTGP"
         8      2  version
        10      2  0
        12      4  checksum of this header: CRC-32C of bytes 0-11 and 16-47
        16      8  group number
        24      8  offset of this header in the file
        32      8  bytes of the records
        40      4  checksum of the records
        44      4  0

    offset  bytes  field of a record
         0      4  bytes of the content
         4      4  kind: 1 entry, 2 truncate, 3 term, 4 reset
         8      8  index: of the entry; of the last entry kept (truncate); of the new base (reset); 0 (term)
        16      8  term at that index; the Raft term (term)
        24         content of the entry; the vote, UTF-8, empty if none (term)

The file `log.durable` stores how far the newest segment was synced, in two records that are written
alternately after each sync. They are not synced themselves: a lost record only lowers the known end, and a
torn record leaves the other record.

    offset  bytes  field of a synced end
         0      8  magic "RTRAFTDE"
         8      2  version
        10      2  0
        12      4  checksum: CRC-32C of bytes 0-11 and 16-63
        16      8  sequence, one higher at each write; record sequence % 2 is overwritten
        24      8  segment number
        32      8  offset: bytes below it are synced
        40      8  number of the last group below it
        48     16  id of the log
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from enum import IntEnum
from typing import Final, NamedTuple

from msgspec import Struct

from rt.errors import Corrupt, UnknownVersion
from rt.log.format.checksum import around, crc32c, sealed
from rt.log.format.constants import NEWER_HINT, VERSION, Buffer, padded
from sequencer.raft.model.messages import ID_BYTES, LogIndex
from sequencer.raft.storage.sealed_head import WIPE_HINT

SEGMENT_HEADER_BYTES: Final = 384
GROUP_HEADER_BYTES: Final = 48
SYNCED_END_BYTES: Final = 64
SYNCED_END_FILE: Final = "log.durable"
GROUP_MAGIC: Final = b"RTRAFTGP"
VOTE_BYTES_MAX: Final = 255
"""Limit for the bytes of a vote. It is above the length of any name."""

_SEGMENT_MAGIC = b"RTRAFTLG"
_SYNCED_END_MAGIC = b"RTRAFTDE"
_NAME = re.compile(r"log\.([1-9][0-9]{0,17})", re.ASCII)
_SEGMENT = struct.Struct("<8sHHIQ16sQQQQQ304s")
_GROUP = struct.Struct("<8sHHIQQQII")
_RECORD = struct.Struct("<IIQQ")
_SYNCED_END = struct.Struct("<8sHHIQQQQ16s")
_PLACE = struct.Struct("<16sQ")
_OFFSET = struct.Struct("<Q")
_PADDING = tuple(bytes(-size & 7) for size in range(8))


class RecordKind(IntEnum):
    ENTRY = 1
    TRUNCATE = 2
    TERM = 3
    RESET = 4


_KINDS: Final = {int(kind): kind for kind in RecordKind}


class LogRecord(NamedTuple):
    """One change of the log. The diagram explains the fields for each kind."""

    kind: RecordKind
    place: LogIndex
    content: bytes


def add_record(pieces: list[bytes], kind: RecordKind, index: int, term: int, content: bytes = b"") -> None:
    size = len(content)
    pieces += (_RECORD.pack(size, kind, index, term), content, _PADDING[size & 7])


def decode_records(payload: memoryview) -> Iterator[LogRecord]:
    """The records of a group with a correct checksum. `ValueError` describes an invalid one."""
    at, end = 0, len(payload)
    while at < end:
        if end - at < _RECORD.size:
            raise ValueError("truncated record")
        size, number, index, term = _RECORD.unpack_from(payload, at)
        start, at = at + _RECORD.size, at + _RECORD.size + padded(size)
        kind = _KINDS.get(number)
        if kind is None or at > end:
            raise ValueError(f"a record of kind {number} with {size} bytes")
        yield LogRecord(kind, LogIndex(index, term), bytes(payload[start : start + size]))


class RaftSegmentHeader(Struct, frozen=True):
    """A segment's number, and the state of the log when the segment was started."""

    number: int
    log: bytes
    base: LogIndex
    term: int
    voted_for: str | None
    group: int

    def __post_init__(self) -> None:
        assert self.number >= 1, self
        assert len(self.log) == ID_BYTES, self
        assert self.voted_for is None or 0 < len(self.voted_for.encode()) <= VOTE_BYTES_MAX, self

    @property
    def file_name(self) -> str:
        return f"log.{self.number}"

    @property
    def seed(self) -> int:
        """The start value of all checksums in the segment."""
        return crc32c(_PLACE.pack(self.log, self.number))


def parse_segment_name(name: str) -> int | None:
    match = _NAME.fullmatch(name)
    return int(match[1]) if match else None


def encode_segment_header(header: RaftSegmentHeader) -> bytes:
    vote = (header.voted_for or "").encode()
    fields = (header.number, header.log, *header.base, header.term, header.group, len(vote), vote)
    return sealed(_SEGMENT.pack(_SEGMENT_MAGIC, VERSION, 0, 0, *fields))


def decode_segment_header(data: Buffer, *, path: str, number: int) -> RaftSegmentHeader:
    """Raises `rt.UnknownVersion`. Raises `rt.Corrupt` for any other invalid header, because the header was
    synced.
    """
    if len(data) < SEGMENT_HEADER_BYTES:
        raise _bad_header(path, got=f"{len(data)} bytes", expected=f"a header of {SEGMENT_HEADER_BYTES}")
    head = bytes(data[:SEGMENT_HEADER_BYTES])
    magic, version, _, checksum, found, log, index, term, raft_term, group, size, vote = _SEGMENT.unpack(head)
    if magic != _SEGMENT_MAGIC or checksum != around(head):
        raise _bad_header(path, got=f"checksum {checksum:08x}", expected=f"{around(head):08x}")
    if version != VERSION:
        raise _unknown("Raft log segment", path, version)
    if found != number:
        raise _bad_header(path, got=f"the header of segment {found}", expected=number)
    voted_for = vote[:size].decode() if size else None
    return RaftSegmentHeader(found, log, LogIndex(index, term), raft_term, voted_for, group)


def _bad_header(path: str, *, got: object, expected: object) -> Corrupt:
    what = "the header of a Raft log segment does not verify"
    return Corrupt(what, path=path, offset=0, got=got, expected=expected, hint=WIPE_HINT)


def _unknown(what: str, where: str, version: int) -> UnknownVersion:
    return UnknownVersion(
        f"unknown version of a {what}", where=where, got=version, expected=VERSION, hint=NEWER_HINT
    )


class RecordGroup(NamedTuple):
    """A group whose header verifies. Its records are at `start` to `end`, if the file is that long."""

    number: int
    start: int
    end: int
    checksum: int


def encode_group_header(seed: int, number: int, offset: int, payload: bytes) -> bytes:
    """The header of the group at `offset` in the segment with this `seed`."""
    start = crc32c(_OFFSET.pack(offset), seed)
    fields = (number, offset, len(payload), crc32c(payload, start), 0)
    head = _GROUP.pack(GROUP_MAGIC, VERSION, 0, 0, *fields)
    checksum = crc32c(head[16:], crc32c(head[:12], start))
    return b"".join((head[:12], checksum.to_bytes(4, "little"), head[16:]))


def group_at(data: Buffer, offset: int, seed: int, *, path: str) -> RecordGroup | None:
    """The group at `offset`, or None if no header verifies there. Raises `rt.UnknownVersion`."""
    head = bytes(data[offset : offset + GROUP_HEADER_BYTES])
    if len(head) < GROUP_HEADER_BYTES or not head.startswith(GROUP_MAGIC):
        return None
    _, version, _, checksum, number, _, size, of_records, _ = _GROUP.unpack(head)
    if checksum != crc32c(head[16:], crc32c(head[:12], crc32c(_OFFSET.pack(offset), seed))):
        return None
    if version != VERSION:
        raise _unknown("Raft log group", f"{path}, offset {offset}", version)
    start = offset + GROUP_HEADER_BYTES
    return RecordGroup(number, start, start + size, of_records)


def verify_records(payload: memoryview, group: RecordGroup, seed: int) -> bool:
    """Whether the records match the checksum in the group's header."""
    return crc32c(payload, crc32c(_OFFSET.pack(group.start - GROUP_HEADER_BYTES), seed)) == group.checksum


class SyncedEnd(NamedTuple):
    """Bytes of segment `segment` below `offset` are synced; group `group` is the last of them."""

    sequence: int
    segment: int
    offset: int
    group: int
    log: bytes

    @property
    def file_offset(self) -> int:
        return (self.sequence & 1) * SYNCED_END_BYTES


def encode_synced_end(end: SyncedEnd) -> bytes:
    return sealed(_SYNCED_END.pack(_SYNCED_END_MAGIC, VERSION, 0, 0, *end))


def newest_synced_end(data: bytes) -> SyncedEnd | None:
    """The newer valid record of the file, or None. Raises `rt.UnknownVersion`."""
    found = (_decode_synced_end(data[at : at + SYNCED_END_BYTES]) for at in (0, SYNCED_END_BYTES))
    return max((end for end in found if end), default=None)


def _decode_synced_end(data: bytes) -> SyncedEnd | None:
    if len(data) < SYNCED_END_BYTES:
        return None
    magic, version, _, checksum, *fields = _SYNCED_END.unpack(data)
    if magic != _SYNCED_END_MAGIC or checksum != around(data):
        return None
    if version != VERSION:
        raise _unknown("synced end", SYNCED_END_FILE, version)
    return SyncedEnd(*fields)
