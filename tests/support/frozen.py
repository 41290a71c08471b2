"""Stops processes, so that the files on disk are as a kill at that moment would leave them."""

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
    """Stop the processes of process group `group` inside the `with` block, and continue them after it.

    A thread that starts a program (vfork) does not stop until that program has started. If both are stopped
    in between, they wait for each other indefinitely. So they are continued and stopped again.
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
    """Stop the group. Return whether all its threads stopped within `ONE_STOP_SECONDS`."""
    os.killpg(group, signal.SIGSTOP)
    deadline = time.monotonic() + ONE_STOP_SECONDS
    while not all(is_still(pid) for pid in _members(group)):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.002)
    return True


def descendants(pid: int) -> list[int]:
    """Return the direct and indirect child processes of a process."""
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
    """Whether every thread has stopped. A running thread may be in the middle of a write."""
    with contextlib.suppress(OSError):
        return all(_stat(task / "stat")[0] in "TtZX" for task in Path("/proc", str(pid), "task").iterdir())
    return True


def _stat(path: Path) -> list[str]:
    return path.read_text().rpartition(")")[2].split()
