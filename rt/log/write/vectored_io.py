"""Write buffers, and byte ranges of other open files, one after the other with few system calls.

Large ranges are copied in the kernel; small ones are read, and written together with their neighbours. A
range whose checksums are given is read, verified and written from memory.

Invariants:
- No byte of a range whose checksums do not hold is written.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple, TypeAlias

from rt.errors import Corrupt
from rt.log.disk import File
from rt.log.format.checksum import crc32c
from rt.log.format.constants import Buffer
from rt.log.format.running_checksum import Checksums

KERNEL_BYTES_MIN: Final = 128 * 1024
"""A smaller range costs more as a separate system call than as a copy through memory."""
_READ_BYTES_MAX: Final = 2 * 2**20
"""Limit of the small ranges held in memory for one write."""
_BUFFERS_MAX: Final = 1024
"""IOV_MAX of Linux: the limit of pwritev(2)."""


VERIFIED_BYTES_MAX: Final = 16 * 2**20
"""A range of up to this size is kept in memory while it is verified. A larger one is read twice."""
_PIECE_BYTES: Final = 2**20
"""Bytes per read and per write. After a read of this size, the bytes are checksummed in the processor's
cache. For larger writes the kernel allocates larger blocks, which may cost several times as much.
"""


class CopyRange(NamedTuple):
    """`size` bytes from `offset` on of an open file. They must not change. `path` is for errors.

    With `checksums` the bytes are verified before they are written.
    """

    file: File
    offset: int
    size: int
    path: str = "a file to copy from"
    checksums: Checksums | None = None


Piece: TypeAlias = Buffer | CopyRange


def size_of(piece: Piece) -> int:
    return piece.size if isinstance(piece, CopyRange) else len(piece)


def check_sources(pieces: Sequence[Piece]) -> None:
    """Raise `rt.Corrupt` unless each source file is as long as its range."""
    for piece in pieces:
        if isinstance(piece, CopyRange) and (size := piece.file.size()) < piece.offset + piece.size:
            raise _cut_short(piece, size)


class Scratch:
    """Memory for ranges while they are verified. Fresh memory for each would cost a quarter of the copy."""

    def __init__(self) -> None:
        self._memory = memoryview(bytearray())

    def reserve(self, size: int) -> memoryview:
        """Return `size` bytes. The next call overwrites them."""
        if len(self._memory) < size:
            self._memory = memoryview(bytearray(size))
        return self._memory[:size]


def write_pieces(
    file: File, pieces: Sequence[Piece], offset: int, scratch: Scratch
) -> tuple[int, OSError | Corrupt | None]:
    """Write `pieces` at `offset`. Returns how many bytes were written, and the error if not all were."""
    written = 0
    try:
        for step in _steps(pieces, scratch):
            if isinstance(step, CopyRange):
                counts = _copy(file, step, offset + written)
            else:
                counts = _write(file, step, offset + written)
            for count in counts:
                written += count
    except (OSError, Corrupt) as error:
        return written, error
    return written, None


def _steps(pieces: Sequence[Piece], scratch: Scratch) -> Iterator[list[Buffer] | CopyRange]:
    """The steps: each writes some buffers, or copies a large range."""
    buffers: list[Buffer] = []
    read_bytes = 0
    for piece in pieces:
        if not isinstance(piece, CopyRange):
            buffers.append(piece)
        elif piece.size < KERNEL_BYTES_MIN:
            buffers.append(_read(piece))
            read_bytes += piece.size
        elif piece.checksums is not None and piece.size <= VERIFIED_BYTES_MAX:
            data = _read_verified(piece, piece.checksums, scratch.reserve(piece.size))
            yield [*buffers, data[:_PIECE_BYTES]]
            for at in range(_PIECE_BYTES, piece.size, _PIECE_BYTES):
                yield [data[at : at + _PIECE_BYTES]]
            buffers, read_bytes = [], 0
        else:
            if piece.checksums is not None:
                _read_verified(piece, piece.checksums, scratch.reserve(_PIECE_BYTES))
            yield buffers
            yield piece
            buffers, read_bytes = [], 0
        if len(buffers) == _BUFFERS_MAX or read_bytes >= _READ_BYTES_MAX:
            yield buffers
            buffers, read_bytes = [], 0
    yield buffers


def _read(piece: CopyRange) -> bytes:
    data = piece.file.pread(piece.size, piece.offset)
    if len(data) != piece.size:
        raise _cut_short(piece, piece.offset + len(data))
    if piece.checksums is not None:
        _check(piece, piece.checksums, crc32c(data, piece.checksums.before))
    return data


def _read_verified(piece: CopyRange, checksums: Checksums, memory: memoryview) -> memoryview:
    """Read a range into `memory` and verify it. If the range is larger than `memory`, only its last piece
    stays.
    """
    checksum = checksums.before
    for at in range(0, piece.size, _PIECE_BYTES):
        start = at if len(memory) == piece.size else 0
        data = memory[start : start + min(_PIECE_BYTES, piece.size - at)]
        count = piece.file.pread_into(data, piece.offset + at)
        if count < len(data):
            raise _cut_short(piece, piece.offset + at + count)
        checksum = crc32c(data, checksum)
    _check(piece, checksums, checksum)
    return memory


def _check(piece: CopyRange, checksums: Checksums, got: int) -> None:
    if got != checksums.after:
        raise Corrupt(
            "the bytes of a file differ from those verified before",
            path=piece.path,
            offset=piece.offset,
            got=f"checksum {got:#010x}",
            expected=f"{checksums.after:#010x} at {piece.offset + piece.size}",
            hint="The bytes were good once: fetch the copy again.",
        )


def _write(file: File, buffers: Sequence[Buffer], offset: int) -> Iterator[int]:
    """Yield the bytes that each write added, until all of `buffers` are written."""
    rest, left = buffers, sum(map(len, buffers))
    while left:
        count = file.pwritev(rest, offset)
        if count == 0:
            raise OSError(errno.ENOSPC, "short write")
        yield count
        offset, left = offset + count, left - count
        rest = _rest_after(rest, count) if left else rest


def _copy(file: File, piece: CopyRange, offset: int) -> Iterator[int]:
    """Yield the bytes that each copy added, until the range is copied."""
    done = 0
    while done < piece.size:
        count = file.copy_from(piece.file, piece.offset + done, piece.size - done, offset + done)
        if count == 0:
            raise _cut_short(piece, piece.offset + done)
        yield count
        done += count


def _rest_after(pieces: Sequence[Buffer], written: int) -> list[Buffer]:
    """The rest of `pieces` after their first `written` bytes."""
    rest: list[Buffer] = []
    for piece in pieces:
        if written >= len(piece):
            written -= len(piece)
        else:
            rest.append(memoryview(piece)[written:])
            written = 0
    return rest


def _cut_short(piece: CopyRange, end: int) -> Corrupt:
    return Corrupt(
        "a source file ends before the range to copy",
        path=piece.path,
        offset=end,
        got=f"bytes up to {end}",
        expected=f"bytes up to {piece.offset + piece.size}",
        hint="The bytes existed before: fetch the copy again.",
    )
