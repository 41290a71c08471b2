"""Creates files exactly once, whole and durable, on a disk that several processes share."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Iterator
from typing import Final

ASIDE: Final = ".aside-"
"""The prefix of the names of temporary files."""


def make_once(path: str, content: bytes) -> bool:
    """Create a file, and its directory if necessary. False if it exists already.

    Uses a hard link, which only one process can create. Raises `OSError`.
    """
    directory = os.path.dirname(path)
    aside = os.path.join(directory, f"{ASIDE}{uuid.uuid4().hex}")
    make_directories(directory)
    try:
        with open(aside, "xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(FileExistsError):
            os.link(aside, path)
            return True
        return False
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.remove(aside)
        # Sync also if another process has just created it: the caller relies on it.
        sync(directory)


def make_directories(path: str) -> None:
    """Create a directory and its missing parents, durably. `OSError`."""
    for missing in reversed([*_missing(path)]):
        with contextlib.suppress(FileExistsError):
            os.mkdir(missing)
        sync(os.path.dirname(missing))


def sync(path: str) -> None:
    """Sync a file, or the names in a directory. `OSError`."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _missing(path: str) -> Iterator[str]:
    while not os.path.isdir(path):
        yield path
        path = os.path.dirname(path)
