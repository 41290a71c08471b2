"""The bytes of a frame that was received in part.

Invariant: it uses memory only for the bytes that it has, whatever size the frame claims. It returns all of
this memory to the kernel when it is dropped. A growing bytearray would be moved repeatedly, and leave holes
in the memory.
"""

from __future__ import annotations

import mmap
from typing import Final

from rt.log.format.constants import Buffer

_MAPPED_BYTES_MIN: Final = 2**20
"""Above this size memory comes from the kernel, page by page as it is written."""
_SPARE_BYTES: Final = 2**20  # Room for bytes after the frame that come with its last ones.


class PartialFrame:
    """Bytes that are added at the end. `total_bytes` is their final number, as far as it is known."""

    def __init__(self, data: Buffer = b"", total_bytes: int = 0) -> None:
        self._size = 0
        self._buffer: bytearray | mmap.mmap = bytearray()
        if data:
            self.add(data, total_bytes)

    def __len__(self) -> int:
        return self._size

    def add(self, data: Buffer, total_bytes: int = 0) -> None:
        """Add bytes. No view may exist."""
        end = self._size + len(data)
        if end > len(self._buffer):
            self._grow(max(end, total_bytes))
        memoryview(self._buffer)[self._size : end] = data
        self._size = end

    def cut(self, size: int) -> None:
        self._size = min(self._size, size)

    def view(self) -> memoryview:
        """The bytes. Valid until more are added."""
        return memoryview(self._buffer)[: self._size]

    def _grow(self, size: int) -> None:
        held = self.view()
        is_large = size > _MAPPED_BYTES_MIN
        buffer = mmap.mmap(-1, size + _SPARE_BYTES) if is_large else bytearray(size)
        memoryview(buffer)[: self._size] = held
        self._buffer = buffer
