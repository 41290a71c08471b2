"""What `rt pub` reads: files or stdin in large pieces, their lines, and the files below directories.

Law: before a read would wait, the caller gets to pass on what it holds, and only there a signal ends the
command; so a slow pipe is published as it comes, and no piece that was read is lost.
"""

from __future__ import annotations

import contextlib
import io
import os
import select
import stat
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import IO

from rt.cli.signals import Interrupts
from rt.errors import MessageTooLarge
from rt.log.layout import MESSAGE_BYTES_MAX

READ_BYTES = 2**20
STDIN = "-"


def total_bytes(paths: Sequence[str]) -> int | None:
    """How much there is to read; None where that cannot be known (pipes, terminals)."""
    sizes = []
    for path in paths:
        found = _stat_stdin() if path == STDIN else os.stat(path)
        if found is None or not stat.S_ISREG(found.st_mode):
            return None
        sizes.append(found.st_size)
    return sum(sizes)


def _stat_stdin() -> os.stat_result | None:
    try:
        return os.fstat(sys.stdin.fileno())
    except (OSError, ValueError):
        return None


@dataclass(frozen=True, slots=True)
class Reading:
    """How inputs are read: `on_wait` is called before a read that waits, `on_read` with the bytes of each."""

    interrupts: Interrupts
    on_wait: Callable[[], None]
    on_read: Callable[[int], None]

    def pieces(self, path: str) -> Iterator[bytes]:
        """The bytes of a file, or of stdin for `-`, as they come."""
        with contextlib.ExitStack() as opened:
            stream: IO[bytes] = sys.stdin.buffer
            if path != STDIN:
                with self.interrupts.waiting():
                    stream = opened.enter_context(open(path, "rb"))
            while piece := self._read(stream):
                self.on_read(len(piece))
                yield piece

    def _read(self, stream: IO[bytes]) -> bytes:
        """What there is now, past the stream's own buffer, which would wait for more."""
        try:
            descriptor = stream.fileno()
        except (io.UnsupportedOperation, AttributeError):
            return stream.read(READ_BYTES)
        ready = select.poll()
        ready.register(descriptor, select.POLLIN)
        if not ready.poll(0):
            self.on_wait()
        with self.interrupts.waiting():
            ready.poll()
        return os.read(descriptor, READ_BYTES)

    def lines(self, path: str) -> Iterator[list[bytes]]:
        """The lines of a file without their newlines, those of a piece together.

        Only a line feed ends a line; the last one need not have it. `rt.MessageTooLarge` names file and line.
        """
        name, number = shown(path), 1
        rest: list[bytes] = []
        rest_bytes = 0
        for piece in self.pieces(path):
            lines = piece.split(b"\n")
            if rest_bytes + len(lines[0]) > MESSAGE_BYTES_MAX:
                raise _too_long(f"{name}, line {number}")
            if len(lines) == 1:
                rest.append(piece)
                rest_bytes += len(piece)
                continue
            lines[0] = b"".join((*rest, lines[0]))
            rest = [lines.pop()]
            rest_bytes = len(rest[0])
            number += len(lines)
            yield lines
        if rest_bytes:
            yield [b"".join(rest)]


def shown(path: str) -> str:
    """What an input is called in messages."""
    return "stdin" if path == STDIN else path


def _too_long(where: str) -> MessageTooLarge:
    return MessageTooLarge(
        "line too long for a message", where=where, wanted=f"at most {MESSAGE_BYTES_MAX} bytes"
    )


def files_below(path: str, topic: str = "") -> Iterator[tuple[str, str]]:
    """The regular files of a directory and all below it, sorted, each with its relative path, `topic`.

    A link to a file counts as that file; links to directories are not followed. Of a file: itself, by name.
    """
    if not os.path.isdir(path):
        yield path, topic or os.path.basename(path)
        return
    for entry in sorted(os.scandir(path), key=lambda entry: entry.name):
        name = f"{topic}/{entry.name}" if topic else entry.name
        if entry.is_dir(follow_symlinks=False):
            yield from files_below(entry.path, name)
        elif entry.is_file():
            yield entry.path, name
