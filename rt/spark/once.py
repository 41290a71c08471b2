"""Files that are made once, on a disk that several processes see: by whoever comes first, whole, durable."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Iterator
from typing import Final

ASIDE: Final = ".aside-"
"""What the names of files begin with that are being made."""


def make_once(path: str, content: bytes) -> bool:
    """Make a file that nobody has made, in a directory that need not be there; False if somebody has.

    It is a hard link, of which only one can be made. `OSError`.
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
        # Also of one that another has just made: whoever goes on relies on it.
        sync(directory)


def make_directories(path: str) -> None:
    """Make a directory and what is missing above it, durably. `OSError`."""
    for missing in reversed([*_missing(path)]):
        with contextlib.suppress(FileExistsError):
            os.mkdir(missing)
        sync(os.path.dirname(missing))


def sync(path: str) -> None:
    """Have a file, or the names in a directory, on the medium. `OSError`."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _missing(path: str) -> Iterator[str]:
    while not os.path.isdir(path):
        yield path
        path = os.path.dirname(path)
