"""The bytes of a frame that has come in part.

Law: it takes as much memory as there are bytes, whatever size the frame says it has, and gives all of it back
to the kernel when it is dropped. A bytearray that grows would be moved again and again, and leave holes.
"""

from __future__ import annotations

import mmap
from typing import Final

from rt.log.format.constants import Buffer

_MAPPED_BYTES_MIN: Final = 2**20
"""Above it memory comes from the kernel, page by page as it is written."""
_SPARE_BYTES: Final = 2**20
"""What may come behind the frame with its last bytes."""


class PartialFrame:
    """Bytes that are added at the end. `total_bytes` is how many there will be, as far as it is known."""

    def __init__(self, data: Buffer = b"", total_bytes: int = 0) -> None:
        self._size = 0
        self._buffer: bytearray | mmap.mmap = bytearray()
        if data:
            self.add(data, total_bytes)

    def __len__(self) -> int:
        return self._size

    def add(self, data: Buffer, total_bytes: int = 0) -> None:
        """Add bytes. There must be no view."""
        end = self._size + len(data)
        if end > len(self._buffer):
            self._grow(max(end, total_bytes))
        memoryview(self._buffer)[self._size : end] = data
        self._size = end

    def cut(self, size: int) -> None:
        """Forget all but the first `size` bytes."""
        self._size = min(self._size, size)

    def view(self) -> memoryview:
        """The bytes, as long as none are added."""
        return memoryview(self._buffer)[: self._size]

    def _grow(self, size: int) -> None:
        held = self.view()
        is_large = size > _MAPPED_BYTES_MIN
        buffer = mmap.mmap(-1, size + _SPARE_BYTES) if is_large else bytearray(size)
        memoryview(buffer)[: self._size] = held
        self._buffer = buffer
