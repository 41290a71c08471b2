"""What the demo publishes: the lines of real files, each file a topic, in an order that can be made again.

Law: line i of a publisher's share is its message number i, so that a publisher which is started again knows
from `next_number` alone where to go on.
"""

from __future__ import annotations

import itertools
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple


class Line(NamedTuple):
    """One message to be: the file it stands in, and its bytes without the line end."""

    topic: str
    value: bytes


def standard_library() -> Path:
    """Real data that is on every machine that runs rt: the sources of Python's own library."""
    return Path(sysconfig.get_path("stdlib"))


def files_below(root: Path) -> list[Path]:
    """The text files to publish: all of a directory, or the one file that was named."""
    if root.is_file():
        return [root]
    skipped = {"site-packages", "__pycache__", "test", "tests", "idlelib"}
    found = []
    for directory, names, files in os.walk(root):
        names[:] = sorted(name for name in names if name not in skipped and not name.startswith("."))
        found += [
            Path(directory, name) for name in sorted(files) if name.endswith((".py", ".csv", ".txt", ".md"))
        ]
    return found


def share(root: Path, index: int, count: int) -> list[Path]:
    """The files of publisher `index` of `count`."""
    return files_below(root)[index::count]


def lines(root: Path, files: list[Path], start: int = 0) -> Iterator[Line]:
    """The lines of `files` from line `start` of them all."""
    every = itertools.chain.from_iterable(_lines_of(root, path) for path in files)
    return itertools.islice(every, start, None)


def _lines_of(root: Path, path: Path) -> Iterator[Line]:
    topic = _topic(root, path)
    return (Line(topic, value) for value in path.read_bytes().splitlines())


def _topic(root: Path, path: Path) -> str:
    return path.name if root.is_file() else path.relative_to(root).as_posix()
