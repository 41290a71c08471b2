"""Fixtures for the tests of logs."""

from __future__ import annotations

import pytest
from disks import MemoryDisk
from verify_bench import publish


@pytest.fixture
def disk() -> MemoryDisk:
    return MemoryDisk()


@pytest.fixture
def sessions(disk: MemoryDisk) -> list[str]:
    made = [publish(disk, 6, name, size=1500, roll_bytes=12_000) for name in ("a", "b")]
    publish(disk, 3, "a")
    return made
