"""Processes held still, so that what is on disk is what it would be if they were killed just then."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

DEADLINE_SECONDS = 240
ONE_STOP_SECONDS = 0.1


@contextlib.contextmanager
def frozen(group: int) -> Iterator[None]:
    """Inside, no process of the process group `group` does anything; then they go on.

    A thread that starts a program (vfork) does not stop before that program has begun. Where both
    were stopped in between they would wait for ever, so they go on and are stopped again.
    """
    deadline = time.monotonic() + DEADLINE_SECONDS
    try:
        while not _stop(group):
            assert time.monotonic() < deadline, "a process does not stop"
            os.killpg(group, signal.SIGCONT)
        yield
    finally:
        os.killpg(group, signal.SIGCONT)


def _stop(group: int) -> bool:
    """Whether all of it has stopped a moment after it was told to."""
    os.killpg(group, signal.SIGSTOP)
    deadline = time.monotonic() + ONE_STOP_SECONDS
    while not all(is_still(pid) for pid in _members(group)):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.002)
    return True


def descendants(pid: int) -> list[int]:
    """All that a process has started, and what those have."""
    children: dict[int, list[int]] = {}
    for child, (_, parent, _) in _all().items():
        children.setdefault(parent, []).append(child)
    found, left = [], [pid]
    while left:
        below = children.get(left.pop(), [])
        found += below
        left += below
    return found


def _members(group: int) -> list[int]:
    return [pid for pid, (_, _, of) in _all().items() if of == group]


def _all() -> dict[int, tuple[str, int, int]]:
    """State, parent and process group of each process."""
    found = {}
    for entry in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            state, parent, group = _stat(Path("/proc", entry, "stat"))[:3]
            found[int(entry)] = state, int(parent), int(group)
    return found


def is_still(pid: int) -> bool:
    """Whether each thread has stopped: until then, one may be in the middle of a write."""
    with contextlib.suppress(OSError):
        return all(_stat(task / "stat")[0] in "TtZX" for task in Path("/proc", str(pid), "task").iterdir())
    return True


def _stat(path: Path) -> list[str]:
    return path.read_text().rpartition(")")[2].split()
