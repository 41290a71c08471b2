"""Messages on the Unix socket between a node's two processes: length u32, little-endian, then the message.

Pure.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Final

from rt.errors import FormatError

HEADER: Final = struct.Struct("<I")
FRAME_BYTES_MAX: Final = 1 << 30
"""A snapshot with its plans fits. Only this node's processes use the socket."""


def frame(content: bytes) -> bytes:
    return HEADER.pack(len(content)) + content


class FrameDecoder:
    """Splits a byte stream into messages."""

    def __init__(self) -> None:
        self._read = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The messages completed by `data`. `rt.FormatError` if one exceeds the limit."""
        self._read += data
        at = 0
        while at + HEADER.size <= len(self._read):
            (size,) = HEADER.unpack_from(self._read, at)
            if size > FRAME_BYTES_MAX:
                raise FormatError(
                    "a message between the processes of a node is too large",
                    got=size,
                    expected=f"{FRAME_BYTES_MAX} bytes at most",
                )
            if at + HEADER.size + size > len(self._read):
                break
            yield bytes(self._read[at + HEADER.size : at + HEADER.size + size])
            at += HEADER.size + size
        del self._read[:at]
