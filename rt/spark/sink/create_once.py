"""Creates files exactly once, whole and durable, on a disk that several processes share.

A record is a file with a line of JSON and its CRC-32C.
"""

from __future__ import annotations

import contextlib
import json
import os
import uuid
from collections.abc import Iterator
from typing import Any, Final

from rt.log.format.checksum import crc32c

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
        # Sync also if another process has just created the file: the caller relies on that file.
        sync(directory)


def encode_record(record: dict[str, Any]) -> bytes:
    line = json.dumps(record).encode()
    return line + b"\n%08x\n" % crc32c(line)


def decode_record(content: bytes) -> dict[str, Any] | None:
    """None if the checksum is wrong."""
    line, _, checksum = content.partition(b"\n")
    if checksum != b"%08x\n" % crc32c(line):
        return None
    record: dict[str, Any] = json.loads(line)
    return record


def make_directories(path: str) -> None:
    """Create a directory and its missing parents, durably. `OSError`.

    With the permissions of the umask, unlike `rt.log.disk`: other users may read what Spark writes.
    """
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
