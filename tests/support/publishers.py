"""Publishers on a simulated disk or on files, for tests of faults."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from disks import MemoryDisk, PowerCut

import rt

DIRECTORY = "/data/stream/sessions/feed"
DEADLINE_SECONDS = 120
SMALL: dict[str, int] = {"batch_bytes": 4096, "roll_bytes": 4096}
"""Four of `values` fill a batch, and eight fill a segment."""


def on_memory(disk: MemoryDisk, **options: Any) -> rt.Publisher:
    options = {"linger_ms": 60_000, "fsync": "never"} | options
    return rt.Publisher("/data", "stream", publisher_id="feed", disk=disk, **options)


def on_files(root: Path, **options: Any) -> rt.Publisher:
    return rt.Publisher(root, "stream", publisher_id="feed", **options)


def read(directory: str = DIRECTORY, **options: Any) -> list[rt.Message]:
    with rt.LogReader(directory, **options) as reader:
        return list(reader)


def numbers(disk: MemoryDisk, **options: Any) -> list[int]:
    return [message.number for message in read(disk=disk, **options)]


def values(count: int) -> list[bytes]:
    return [b"%d:" % i + bytes(600) for i in range(count)]


def pull_the_plug(publisher: rt.Publisher) -> None:
    """End a publisher without a flush, whether its disk has power or not."""
    with contextlib.suppress(PowerCut):
        publisher._abandon()


def is_told(error: type[Exception], call: Callable[[], object]) -> bool:
    try:
        call()
    except error:
        return True
    return False


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"


def files(disk: MemoryDisk) -> dict[str, bytes]:
    return {path: disk.read(path) for path in disk.paths() if path.startswith(DIRECTORY)}


def restore(content: dict[str, bytes]) -> MemoryDisk:
    disk = MemoryDisk()
    disk.make_directory(DIRECTORY)
    for path, data in content.items():
        disk.write(path, data)
    return disk
