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
"""A state with its orders; the socket is this node's own."""


def frame(content: bytes) -> bytes:
    """A message as it goes over the socket."""
    return HEADER.pack(len(content)) + content


class FrameDecoder:
    """Puts messages together from what was read."""

    def __init__(self) -> None:
        self._read = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The messages that are whole now; `rt.FormatError` above the limit."""
        self._read += data
        at = 0
        while at + HEADER.size <= len(self._read):
            (size,) = HEADER.unpack_from(self._read, at)
            if size > FRAME_BYTES_MAX:
                raise FormatError("a message between processes above the limit", got=size)
            if at + HEADER.size + size > len(self._read):
                break
            yield bytes(self._read[at + HEADER.size : at + HEADER.size + size])
            at += HEADER.size + size
        del self._read[:at]
