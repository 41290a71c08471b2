"""Writing buffers, and byte ranges of other open files, one behind the other with few system calls.

Large ranges are copied in the kernel; small ones are read, and written together with what stands around them.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple, TypeAlias

from rt.errors import Damaged
from rt.log.disk import File
from rt.log.layout import Buffer

KERNEL_BYTES_MIN: Final = 128 * 1024
"""A smaller range costs more as a system call of its own than as a copy through memory."""
_READ_BYTES_MAX: Final = 2 * 2**20
"""Small ranges that are held in memory for one write."""
_BUFFERS_MAX: Final = 1024
"""IOV_MAX of Linux: pwritev(2) takes no more."""


class CopyRange(NamedTuple):
    """`size` bytes from `offset` on of an open file, which does not change there; `path` is for errors."""

    file: File
    offset: int
    size: int
    path: str = "a file to copy from"


Piece: TypeAlias = Buffer | CopyRange


def size_of(piece: Piece) -> int:
    """The bytes that a piece stands for."""
    return piece.size if isinstance(piece, CopyRange) else len(piece)


def check_sources(pieces: Sequence[Piece]) -> None:
    """`rt.Damaged` unless every file to copy from is as long as its range."""
    for piece in pieces:
        if isinstance(piece, CopyRange) and (size := piece.file.size()) < piece.offset + piece.size:
            raise _cut_short(piece, size)


def write_pieces(file: File, pieces: Sequence[Piece], offset: int) -> tuple[int, OSError | Damaged | None]:
    """Write `pieces` at `offset`: how many bytes of them are there, and why not all."""
    written = 0
    try:
        for step in _steps(pieces):
            if isinstance(step, CopyRange):
                counts = _copy(file, step, offset + written)
            else:
                counts = _write(file, step, offset + written)
            for count in counts:
                written += count
    except (OSError, Damaged) as error:
        return written, error
    return written, None


def _steps(pieces: Sequence[Piece]) -> Iterator[list[Buffer] | CopyRange]:
    """What is done at once: a write of some buffers, or a copy of a large range."""
    buffers: list[Buffer] = []
    read_bytes = 0
    for piece in pieces:
        if not isinstance(piece, CopyRange):
            buffers.append(piece)
        elif piece.size < KERNEL_BYTES_MIN:
            buffers.append(_read(piece))
            read_bytes += piece.size
        else:
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
    return data


def _write(file: File, buffers: Sequence[Buffer], offset: int) -> Iterator[int]:
    """Yield what each write added, until all of `buffers` is there."""
    rest, left = buffers, sum(map(len, buffers))
    while left:
        count = file.pwritev(rest, offset)
        if count == 0:
            raise OSError(errno.ENOSPC, "nothing more could be written")
        yield count
        offset, left = offset + count, left - count
        rest = _behind(rest, count) if left else rest


def _copy(file: File, piece: CopyRange, offset: int) -> Iterator[int]:
    """Yield what each copy added, until all of the range is there."""
    done = 0
    while done < piece.size:
        count = file.copy_from(piece.file, piece.offset + done, piece.size - done, offset + done)
        if count == 0:
            raise _cut_short(piece, piece.offset + done)
        yield count
        done += count


def _behind(pieces: Sequence[Buffer], written: int) -> list[Buffer]:
    """What is left of `pieces` when their first `written` bytes are gone."""
    rest: list[Buffer] = []
    for piece in pieces:
        if written >= len(piece):
            written -= len(piece)
        else:
            rest.append(memoryview(piece)[written:])
            written = 0
    return rest


def _cut_short(piece: CopyRange, end: int) -> Damaged:
    return Damaged(
        "a file ends before the bytes that are to be copied from it",
        path=piece.path,
        offset=end,
        got=f"bytes up to {end}",
        wanted=f"bytes up to {piece.offset + piece.size}",
        hint="The bytes were there once: fetch the copy again.",
    )
