"""The segments table: the identity of a log directory, and its sealed and trimmed segments.

The file `segments` is replaced atomically, so a crash leaves the old or the new one. It keeps the entries of
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
         0      4  X
         4      4  Y
         8      8  first number or position
        16      8  one past the last
        24      8  bytes of the file, before it was trimmed
        32      8  creation time, ns
        40      8  lowest timestamp, ns; 0 if it has no messages
        48      8  highest timestamp, ns; 0 if it has no messages
        56      8  seal time, ns
        64      8  trim time, ns; 0 if the bytes are kept
        72      4  reason of the trim
        76      4  0
        80      8  run id
"""

from __future__ import annotations

import struct
from bisect import bisect_left
from collections.abc import Sequence
from enum import IntEnum
from itertools import pairwise
from operator import attrgetter
from typing import Any, Final

from msgspec import Struct
from msgspec.structs import replace

from rt.errors import Corrupt, UnknownVersion
from rt.log.format.checksum import around, sealed
from rt.log.format.constants import NEWER_HINT, NUMBER_MAX, VERSION, padded, padding
from rt.log.format.segment import LogKind, SegmentId
from rt.names import check_dedup_id, check_name, check_session_name

TABLE_FILE: Final = "segments"
TRIMMED_ENTRIES_MAX: Final = 10_000
"""Trimmed segments that the table keeps; the files of older ones are removed."""

_MAGIC = b"RTSEGTAB"
_HEADER = struct.Struct("<8sHHI16sIHH24x")
_ENTRY = struct.Struct("<IIQQQqqqqqI4x8s")


class TrimReason(IntEnum):
    """Why a segment was trimmed."""

    NONE = 0
    TIME = 1
    SIZE = 2
    DISK = 3
    MERGED = 4
    REQUEST = 5
    RESET = 6
    FOLLOWED = 7
    LOST = 8


_KINDS: Final = frozenset(LogKind)
_REASONS: Final = frozenset(TrimReason)


class LogIdentity(Struct, frozen=True):
    """`origin` is the incarnation or the cluster id, `name` that of the session or stream."""

    kind: LogKind
    origin: bytes
    name: str
    dedup_id: str | None = None

    def __post_init__(self) -> None:
        if len(self.origin) != 16:
            raise ValueError(f"origin must be 16 bytes, not {len(self.origin)}")
        if self.kind is LogKind.SESSION:
            check_session_name(self.name)
        else:
            check_name(self.name, kind="stream")
        if self.dedup_id is not None:
            check_dedup_id(self.dedup_id)


class SealedSegment(Struct, frozen=True):
    """A segment that does not grow any more. `trimmed_ns` is 0 exactly while its bytes are kept."""

    id: SegmentId
    first: int
    end: int
    size_bytes: int
    created_ns: int
    timestamp_low_ns: int
    timestamp_high_ns: int
    sealed_ns: int
    run_id: bytes = bytes(8)
    trimmed_ns: int = 0
    reason: TrimReason = TrimReason.NONE

    def __post_init__(self) -> None:
        if not (0 <= self.first <= self.end <= NUMBER_MAX and 0 <= self.size_bytes < NUMBER_MAX):
            raise ValueError(f"{self.id} out of range: {self.first} to {self.end}, {self.size_bytes} bytes")
        if self.is_trimmed != (self.trimmed_ns != 0):
            raise ValueError(f"{self.id} trimmed at {self.trimmed_ns} for reason {self.reason.name}")

    @property
    def is_trimmed(self) -> bool:
        return self.reason is not TrimReason.NONE

    def trimmed(self, reason: TrimReason, now_ns: int) -> SealedSegment:
        return replace(self, trimmed_ns=max(now_ns, 1), reason=reason)


class SegmentTable(Struct, frozen=True):
    """Identity and sealed segments of a log directory, oldest first."""

    identity: LogIdentity
    segments: tuple[SealedSegment, ...] = ()

    def __post_init__(self) -> None:
        for earlier, later in pairwise(self.segments):
            if earlier.id >= later.id:
                raise ValueError(f"segments out of order: {earlier.id} before {later.id}")

    def find(self, segment: SegmentId) -> SealedSegment | None:
        at = bisect_left(self.segments, segment, key=attrgetter("id"))
        return self.segments[at] if at < len(self.segments) and self.segments[at].id == segment else None

    def with_sealed(self, segment: SealedSegment) -> SegmentTable:
        """The table with the newest segment added or replaced."""
        kept = self.segments[:-1] if self.segments and self.segments[-1].id == segment.id else self.segments
        return replace(self, segments=(*kept, segment))

    def forgotten(self, *, most: int = TRIMMED_ENTRIES_MAX) -> tuple[SegmentTable, Sequence[SegmentId]]:
        """The table without the oldest trimmed segments if there are more than `most`, and the removed
        ids.
        """
        trimmed = [segment.id for segment in self.segments if segment.is_trimmed]
        gone = trimmed[: max(len(trimmed) - most, 0)]
        forgotten = set(gone)
        return replace(self, segments=tuple(s for s in self.segments if s.id not in forgotten)), gone


def encode_table(table: SegmentTable) -> bytes:
    name = table.identity.name.encode()
    dedup = (table.identity.dedup_id or "").encode()
    text = name + dedup
    kind, origin = table.identity.kind, table.identity.origin
    head = _HEADER.pack(_MAGIC, VERSION, kind, 0, origin, len(table.segments), len(name), len(dedup))
    return sealed(b"".join((head, text, padding(len(text)), *map(_encode_entry, table.segments))))


def decode_table(data: bytes, *, path: str) -> SegmentTable:
    """Decode a `segments` file.

    Raises `rt.UnknownVersion` for a version or value of a newer rt, and `rt.Corrupt` if it does not verify.
    """
    if data[:8] != _MAGIC:
        raise Corrupt("not a segments table", path=path, offset=0, got=data[:8], expected=_MAGIC)
    if len(data) < _HEADER.size:
        got, expected = f"{len(data)} bytes", f"at least {_HEADER.size}"
        raise Corrupt("segments table is cut off", path=path, offset=0, got=got, expected=expected)
    _, version, kind, checksum, origin, count, name_bytes, dedup_bytes = _HEADER.unpack_from(data)
    if checksum != around(data):
        raise Corrupt(
            "segments table fails its checksum", path=path, offset=0, got=checksum, expected=around(data)
        )
    if version != VERSION:
        raise _newer("segments table of an unknown version", path, got=version, expected=VERSION)
    if kind not in _KINDS:
        raise _newer("segments table of an unknown kind", path, got=kind)
    text, start = data[_HEADER.size :], padded(_HEADER.size + name_bytes + dedup_bytes)
    if len(data) != start + count * _ENTRY.size:
        raise Corrupt("segments table of the wrong length", path=path, offset=0, got=len(data))
    rows = list(_ENTRY.iter_unpack(data[start:]))
    unknown = {row[10] for row in rows} - _REASONS
    if unknown:
        raise _newer("segments table with an unknown reason of a trim", path, got=min(unknown))
    try:
        name, dedup = text[:name_bytes].decode(), text[name_bytes : name_bytes + dedup_bytes].decode()
        return SegmentTable(
            LogIdentity(LogKind(kind), origin, name, dedup or None), tuple(map(_decode_entry, rows))
        )
    except ValueError as error:
        raise Corrupt(f"segments table has an impossible value: {error}", path=path, offset=0) from error


def _newer(what: str, path: str, *, got: int, expected: int | None = None) -> UnknownVersion:
    return UnknownVersion(what, where=path, got=got, expected=expected, hint=NEWER_HINT)


def _encode_entry(segment: SealedSegment) -> bytes:
    return _ENTRY.pack(
        segment.id.run,
        segment.id.roll,
        segment.first,
        segment.end,
        segment.size_bytes,
        segment.created_ns,
        segment.timestamp_low_ns,
        segment.timestamp_high_ns,
        segment.sealed_ns,
        segment.trimmed_ns,
        segment.reason,
        segment.run_id,
    )


def _decode_entry(row: tuple[Any, ...]) -> SealedSegment:
    run, roll, first, end, size, created, low_ns, high_ns, sealed_ns, trimmed_ns, reason, run_id = row
    times = (created, low_ns, high_ns, sealed_ns)
    return SealedSegment(
        SegmentId(run, roll), first, end, size, *times, run_id, trimmed_ns, TrimReason(reason)
    )
