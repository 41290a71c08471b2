"""The segments table: what a log directory is, and what its sealed and trimmed segments were.

The file `segments` is replaced whole, so that a crash leaves the old or the new one. It outlives the bytes of
trimmed segments. The active segment is not in it.

    offset  bytes  field
         0      8  magic "RTSEGTAB"
         8      2  version
        10      2  kind (as in a segment header)
        12      4  checksum: CRC-32C of bytes 0-11 and 16 to the end
        16     16  incarnation or cluster id
        32      4  entries
        36      2  bytes of the name (a session's, or the stream's)
        38      2  bytes of the dedup id, 0 if there is none
        40     24  0
        64         name, dedup id (UTF-8), padded to 8; then the entries, oldest first

    an entry, 88 bytes:
         0      8  X, Y
         8     16  first number or position, and one past the last
        24      8  bytes of the file, before it was trimmed
        32      8  creation time, ns
        40     16  lowest and highest timestamp, ns (0, 0 if it has no messages)
        56      8  seal time, ns
        64      8  trim time, ns; 0 if the bytes are kept
        72      4  reason of the trim
        76      4  0
        80      8  life id
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Final

from rt.errors import Damaged, UnknownVersion
from rt.log.checksum import crc32c
from rt.log.layout import VERSION, padding
from rt.log.segment import Kind, SegmentId
from rt.names import check_name, check_session_name

TABLE_FILE: Final = "segments"
TRIMMED_ENTRIES_MAX: Final = 10_000
"""Trimmed segments that are remembered; the files of older ones are removed."""

_MAGIC = b"RTSEGTAB"
_HEADER = struct.Struct("<8sHHI16sIHH24x")
_ENTRY = struct.Struct("<IIQQQqqqqqI4x8s")


class TrimReason(IntEnum):
    """Why the bytes of a segment are gone."""

    NONE = 0
    TIME = 1
    SIZE = 2
    DISK = 3
    MERGED = 4
    REQUEST = 5
    RESET = 6
    FOLLOWED = 7
    LOST = 8


@dataclass(frozen=True, slots=True)
class Identity:
    """What a log directory is: its kind, its incarnation or cluster id, the name of its session or stream."""

    kind: Kind
    origin: bytes
    name: str
    dedup_id: str | None = None

    def __post_init__(self) -> None:
        if len(self.origin) != 16:
            raise ValueError(f"origin must be 16 bytes, not {len(self.origin)}")
        check = check_session_name if self.kind is Kind.SESSION else _check_stream
        check(self.name)
        if self.dedup_id is not None:
            check_name(self.dedup_id, kind="dedup id")


@dataclass(frozen=True, slots=True)
class SealedSegment:
    """A segment that will not grow any more. `trimmed_ns` is 0 while its bytes are kept."""

    id: SegmentId
    first: int
    end: int
    size_bytes: int
    created_ns: int
    timestamp_low_ns: int
    timestamp_high_ns: int
    sealed_ns: int
    life: bytes = bytes(8)
    trimmed_ns: int = 0
    reason: TrimReason = TrimReason.NONE

    @property
    def is_trimmed(self) -> bool:
        """Whether the bytes are gone."""
        return self.reason is not TrimReason.NONE

    def trimmed(self, reason: TrimReason, now_ns: int) -> SealedSegment:
        """This segment with its bytes gone."""
        return replace(self, trimmed_ns=max(now_ns, 1), reason=reason)


@dataclass(frozen=True, slots=True)
class Table:
    """Identity and sealed segments of a log directory, oldest first."""

    identity: Identity
    segments: tuple[SealedSegment, ...] = ()

    def __post_init__(self) -> None:
        ids = [segment.id for segment in self.segments]
        assert ids == sorted(set(ids)), "segments out of order"

    def with_sealed(self, segment: SealedSegment) -> Table:
        """The table with `segment`, the newest, in it."""
        kept = self.segments[:-1] if self.segments and self.segments[-1].id == segment.id else self.segments
        return replace(self, segments=(*kept, segment))

    def forgotten(self, *, most: int = TRIMMED_ENTRIES_MAX) -> tuple[Table, Sequence[SegmentId]]:
        """The table without the oldest trimmed segments above `most`, and their ids."""
        trimmed = sum(segment.is_trimmed for segment in self.segments)
        excess = max(trimmed - most, 0)
        return replace(self, segments=self.segments[excess:]), [
            segment.id for segment in self.segments[:excess]
        ]


def encode_table(table: Table) -> bytes:
    """The bytes of a `segments` file."""
    name = table.identity.name.encode()
    dedup = (table.identity.dedup_id or "").encode()
    text = name + dedup
    body = b"".join((text, padding(len(text)), *map(_encode_entry, table.segments)))
    head = _HEADER.pack(
        _MAGIC,
        VERSION,
        table.identity.kind,
        0,
        table.identity.origin,
        len(table.segments),
        len(name),
        len(dedup),
    )
    checksum = crc32c(body, crc32c(head[16:], crc32c(head[:12])))
    return head[:12] + checksum.to_bytes(4, "little") + head[16:] + body


def decode_table(data: bytes, *, path: str) -> Table:
    """Read a `segments` file; `rt.UnknownVersion`, or `rt.Damaged` for anything that does not verify."""
    if len(data) < _HEADER.size or data[:8] != _MAGIC:
        raise Damaged("not a segments table", path=path, offset=0, got=data[:8], wanted=_MAGIC)
    _, version, kind, checksum, origin, count, name_bytes, dedup_bytes = _HEADER.unpack_from(data)
    if checksum != crc32c(data[16:], crc32c(data[:12])):
        raise Damaged("segments table fails its checksum", path=path, offset=0)
    if version != VERSION:
        raise UnknownVersion("segments table of an unknown version", where=path, got=version, wanted=VERSION)
    start = _HEADER.size + name_bytes + dedup_bytes
    start += -start % 8
    if len(data) != start + count * _ENTRY.size:
        raise Damaged("segments table of the wrong length", path=path, offset=0, got=len(data))
    try:
        name = data[_HEADER.size : _HEADER.size + name_bytes].decode()
        dedup = data[_HEADER.size + name_bytes : _HEADER.size + name_bytes + dedup_bytes].decode()
        identity = Identity(Kind(kind), origin, name, dedup or None)
        entries = tuple(_decode_entry(data, at) for at in range(start, len(data), _ENTRY.size))
        return Table(identity, entries)
    except (ValueError, AssertionError) as error:
        raise Damaged(f"segments table says what it cannot: {error}", path=path, offset=0) from error


def _encode_entry(segment: SealedSegment) -> bytes:
    return _ENTRY.pack(
        segment.id.x,
        segment.id.y,
        segment.first,
        segment.end,
        segment.size_bytes,
        segment.created_ns,
        segment.timestamp_low_ns,
        segment.timestamp_high_ns,
        segment.sealed_ns,
        segment.trimmed_ns,
        segment.reason,
        segment.life,
    )


def _decode_entry(data: bytes, at: int) -> SealedSegment:
    x, y, first, end, size, created, low_ns, high_ns, sealed, trimmed, reason, life = _ENTRY.unpack_from(
        data, at
    )
    return SealedSegment(
        SegmentId(x, y), first, end, size, created, low_ns, high_ns, sealed, life, trimmed, TrimReason(reason)
    )


def _check_stream(name: str) -> str:
    return check_name(name, kind="stream")
