"""Segment files: their names and their header.

A segment is `log.X.Y`: a 64-byte header, then batches (session) or blocks (merged) up to the end of the file.
It appears by rename, complete with its header, so a file of size 0 is always a trimmed one.

    offset  bytes  field
         0      8  magic "RTSEGMNT"
         8      2  version
        10      2  kind: 1 session, 2 merged, 3 filtered
        12      4  checksum: CRC-32C of bytes 0-11 and 16-63
        16      4  X, run number
        20      4  Y, roll number
        24      8  first number (session) or first position (merged, filtered)
        32      8  creation time, ns since the Unix epoch (merged: the instruction's sequencing time)
        40     16  incarnation (session) or cluster id (merged, filtered)
        56      8  run id (session), 0 (merged, filtered)
"""

from __future__ import annotations

import re
import struct
from enum import IntEnum
from typing import Final, NamedTuple

from msgspec import Struct

from rt.errors import Corrupt, UnknownVersion
from rt.log.format.checksum import around, sealed, segment_seed
from rt.log.format.constants import NEWER_HINT, NUMBER_MAX, VERSION, Buffer

SEGMENT_HEADER_BYTES: Final = 64
SEGMENT_MAGIC: Final = b"RTSEGMNT"

_HEADER = struct.Struct("<8sHHIIIqq16s8s")
_NAME = re.compile(r"log\.(0|[1-9][0-9]{0,9})\.(0|[1-9][0-9]{0,9})", re.ASCII)
_COORDINATE_MAX: Final = 2**32 - 1


class LogKind(IntEnum):
    SESSION = 1
    MERGED = 2
    FILTERED = 3


_KINDS: Final = frozenset(LogKind)


class SegmentId(NamedTuple):
    """Names the file `log.X.Y`: X is `run`, Y is `roll`. Sorts in log order."""

    run: int
    roll: int

    @property
    def file_name(self) -> str:
        return f"log.{self.run}.{self.roll}"

    def __str__(self) -> str:
        return self.file_name


def parse_segment_name(name: str) -> SegmentId | None:
    """The id in a file name; None if the name has not exactly the form of a segment's (leading zeros,
    signs).
    """
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    run, roll = int(match[1]), int(match[2])
    return SegmentId(run, roll) if max(run, roll) <= _COORDINATE_MAX else None


class SegmentHeader(Struct, frozen=True):
    """The first 64 bytes of a segment.

    `origin` is the incarnation of the session directory, or the id of the cluster that merged; `run_id` the
    random id of one start of the publisher, zeros in a merged log.
    """

    kind: LogKind
    id: SegmentId
    first: int
    created_ns: int
    origin: bytes
    run_id: bytes = bytes(8)

    def __post_init__(self) -> None:
        run, roll = self.id
        if len(self.origin) != 16 or len(self.run_id) != 8:
            raise ValueError(
                f"origin of {len(self.origin)} bytes, run id of {len(self.run_id)}: expected 16 and 8"
            )
        if not (0 <= self.first < NUMBER_MAX and max(run, roll) <= _COORDINATE_MAX and min(run, roll) >= 0):
            raise ValueError(f"out of range: first {self.first}, {self.id}")
        if not -(2**63) <= self.created_ns < 2**63:
            raise ValueError(f"creation time {self.created_ns} is outside int64")
        if self.kind is not LogKind.SESSION and any(self.run_id):
            raise ValueError("a run id in a merged log, whose bytes are the same on all nodes")

    @property
    def seed(self) -> int:
        """The `segment_seed` of its batches (session) or blocks (merged)."""
        return segment_seed(self.origin, self.id.run, self.id.roll)


def encode_segment_header(header: SegmentHeader) -> bytes:
    run, roll = header.id
    fields = (
        VERSION,
        header.kind,
        0,
        run,
        roll,
        header.first,
        header.created_ns,
        header.origin,
        header.run_id,
    )
    return sealed(_HEADER.pack(SEGMENT_MAGIC, *fields))


def decode_segment_header(data: Buffer, *, path: str) -> SegmentHeader:
    """Decode the first 64 bytes of a segment.

    Raises `rt.UnknownVersion` for a version or kind of a newer rt, and `rt.Corrupt` (offset 0 of `path`) for
    any other invalid header.
    """
    if len(data) < SEGMENT_HEADER_BYTES:
        raise Corrupt(
            "segment header is cut short", path=path, offset=0, got=len(data), expected=SEGMENT_HEADER_BYTES
        )
    head = bytes(data[:SEGMENT_HEADER_BYTES])
    magic, version, kind, checksum, run, roll, first, created_ns, origin, run_id = _HEADER.unpack(head)
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
        return SegmentHeader(LogKind(kind), SegmentId(run, roll), first, created_ns, origin, run_id)
    except ValueError as error:
        raise Corrupt(f"segment header has an impossible value: {error}", path=path, offset=0) from error
