"""Segment files: their names and their header.

A segment is `log.X.Y`: a 64-byte header, then batches (session) or blocks (merged) up to the end of the file.
It appears by rename with its header in it, so a file of size 0 always means: trimmed.

    offset  bytes  field
         0      8  magic "RTSEGMNT"
         8      2  version
        10      2  kind: 1 session, 2 merged, 3 filtered
        12      4  checksum: CRC-32C of bytes 0-11 and 16-63
        16      4  X, session number
        20      4  Y, roll index
        24      8  first number (session) or first position (merged, filtered)
        32      8  creation time, ns since the Unix epoch (merged: the instruction's sequencing time)
        40     16  incarnation (session) or cluster id (merged, filtered)
        56      8  life id (session), 0 (merged, filtered)
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Final, NamedTuple

from rt.errors import Corrupt, UnknownVersion
from rt.log.format.checksum import around, sealed, segment_seed
from rt.log.format.constants import NEWER_HINT, NUMBER_MAX, VERSION, Buffer

SEGMENT_HEADER_BYTES: Final = 64
SEGMENT_MAGIC: Final = b"RTSEGMNT"

_HEADER = struct.Struct("<8sHHIIIqq16s8s")
_NAME = re.compile(r"log\.(0|[1-9][0-9]{0,9})\.(0|[1-9][0-9]{0,9})", re.ASCII)
_COORDINATE_MAX: Final = 2**32 - 1


class LogKind(IntEnum):
    """What a log directory and its segments hold."""

    SESSION = 1
    MERGED = 2
    FILTERED = 3


_KINDS: Final = frozenset(LogKind)


class SegmentId(NamedTuple):
    """X and Y of `log.X.Y`; sorts in log order."""

    x: int
    y: int

    @property
    def file_name(self) -> str:
        """`log.X.Y`, in decimal."""
        return f"log.{self.x}.{self.y}"

    def __str__(self) -> str:
        return self.file_name


def parse_segment_name(name: str) -> SegmentId | None:
    """The id in a file name; None if it is no segment's (leading zeros, signs, anything else)."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    x, y = int(match[1]), int(match[2])
    return SegmentId(x, y) if max(x, y) <= _COORDINATE_MAX else None


@dataclass(frozen=True, slots=True)
class SegmentHeader:
    """What the first 64 bytes of a segment say.

    `origin` is the incarnation of the session directory, or the id of the cluster that merged; `life` the
    random id of one start of the publisher, zeros in a merged log.
    """

    kind: LogKind
    id: SegmentId
    first: int
    created_ns: int
    origin: bytes
    life: bytes = bytes(8)

    def __post_init__(self) -> None:
        x, y = self.id
        if len(self.origin) != 16 or len(self.life) != 8:
            raise ValueError(f"origin of {len(self.origin)} bytes, life of {len(self.life)}: not 16 and 8")
        if not (0 <= self.first < NUMBER_MAX and max(x, y) <= _COORDINATE_MAX and min(x, y) >= 0):
            raise ValueError(f"out of range: first {self.first}, {self.id}")
        if not -(2**63) <= self.created_ns < 2**63:
            raise ValueError(f"creation time {self.created_ns} is outside int64")
        if self.kind is not LogKind.SESSION and any(self.life):
            raise ValueError("a life id in a merged log, whose bytes are the same on all nodes")

    @property
    def seed(self) -> int:
        """The part of the seeds of its batches (session) or blocks (merged) that this segment gives."""
        return segment_seed(self.origin, self.id.x, self.id.y)


def encode_segment_header(header: SegmentHeader) -> bytes:
    """The 64 bytes a segment starts with."""
    x, y = header.id
    fields = (VERSION, header.kind, 0, x, y, header.first, header.created_ns, header.origin, header.life)
    return sealed(_HEADER.pack(SEGMENT_MAGIC, *fields))


def decode_segment_header(data: Buffer, *, path: str) -> SegmentHeader:
    """Read the first 64 bytes of a segment.

    `rt.UnknownVersion` if it is of a version or kind that a newer rt wrote, `rt.Corrupt` (offset 0 of `path`)
    for anything else that is not a whole, valid header.
    """
    if len(data) < SEGMENT_HEADER_BYTES:
        raise Corrupt(
            "segment header is cut short", path=path, offset=0, got=len(data), expected=SEGMENT_HEADER_BYTES
        )
    head = bytes(data[:SEGMENT_HEADER_BYTES])
    magic, version, kind, checksum, x, y, first, created_ns, origin, life = _HEADER.unpack(head)
    if magic != SEGMENT_MAGIC:
        raise Corrupt("not a segment file", path=path, offset=0, got=magic, expected=SEGMENT_MAGIC)
    if checksum != around(head):
        raise Corrupt(
            "segment header fails its checksum", path=path, offset=0, got=checksum, expected=around(head)
        )
    if version != VERSION:
        raise UnknownVersion(
            "segment of an unknown version", where=path, got=version, expected=VERSION, hint=NEWER_HINT
        )
    if kind not in _KINDS:
        raise UnknownVersion("segment of an unknown kind", where=path, got=kind, hint=NEWER_HINT)
    try:
        return SegmentHeader(LogKind(kind), SegmentId(x, y), first, created_ns, origin, life)
    except ValueError as error:
        raise Corrupt(f"segment header says what it cannot: {error}", path=path, offset=0) from error
