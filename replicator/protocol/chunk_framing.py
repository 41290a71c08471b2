"""Chunks on the wire, without protobuf's own copies.

Invariants:
- A chunk is framed by hand around the bytes of the file, exactly as protobuf encodes it. A message of this
  form is read in place. So the sender makes one copy and the receiver none, where protobuf makes three and
  two.
- This module reads the same values that protobuf would read.

    tag of the chunk, length | 0x0a, length, Place | 0x12, length, data up to the end
"""

from __future__ import annotations

from typing import Final

from google.protobuf.message import DecodeError

from replicator.protocol.handshake import check_log_offset
from replicator.protocol.messages import Chunk, LogOffset
from rt.errors import ProtocolViolation
from rt.log.format.constants import Buffer
from rt.v1 import replication_pb2 as pb

_PLACE: Final = 0x0A
_DATA: Final = 0x12
_PLACE_BYTES_MAX: Final = 6 + 6 + 11  # Three fields, each a tag and a number of 32 or 64 bits.


def frame_chunk(tag: int, chunk: Chunk) -> bytes:
    """The message that holds `chunk` in the field of `tag`. The data are copied once."""
    place = pb.Place(
        run=chunk.start.run, roll=chunk.start.roll, offset=chunk.start.offset
    ).SerializeToString()
    size = len(chunk.data)
    inner = b"".join((bytes((_PLACE, len(place))), place, bytes((_DATA,)), _varint(size)))
    return b"".join((bytes((tag,)), _varint(len(inner) + size), inner, chunk.data))


def framed_chunk(tag: int, data: bytes, bytes_max: int) -> Chunk | None:
    """The chunk in a message of the form that `frame_chunk` makes. None for any other message, which protobuf
    must read.

    The data of the chunk are a view of `data`, with at most `bytes_max` bytes.
    """
    if len(data) < 6 or data[0] != tag:
        return None
    inner, at = _read_varint(data, 1)
    if inner != len(data) - at or inner < 4 or data[at] != _PLACE or data[at + 1] > _PLACE_BYTES_MAX:
        return None
    start = at + 2
    stop = start + data[at + 1]
    if stop + 1 >= len(data) or data[stop] != _DATA:
        return None
    size, content = _read_varint(data, stop + 1)
    if size != len(data) - content:
        return None
    try:
        said = pb.Place.FromString(data[start:stop])
        place = check_log_offset(LogOffset(said.run, said.roll, said.offset))
    except (DecodeError, ValueError) as error:
        raise ProtocolViolation(f"a chunk without a valid offset: {error}") from error
    return checked_chunk(place, memoryview(data)[content:], bytes_max)


def checked_chunk(place: LogOffset, data: Buffer, bytes_max: int) -> Chunk:
    """The chunk. `rt.ProtocolViolation` if it is empty or has more than `bytes_max`."""
    if not 0 < len(data) <= bytes_max:
        raise ProtocolViolation(
            "a chunk has an invalid size",
            where=place,
            got=len(data),
            expected=f"1 to {bytes_max}",
        )
    return Chunk(place, data)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    """The number at `at` and where it ends; -1 if it is not a number of up to five bytes."""
    value = 0
    for index, byte in enumerate(data[at : at + 5]):
        value |= (byte & 0x7F) << 7 * index
        if byte < 0x80:
            return value, at + index + 1
    return -1, at
