"""Kills everything that a run started, and what that started, at its end.

A publisher's push process outlives the publisher by design. So each process of a run carries a mark in its
environment, which its children inherit, and by which all of them are found.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

_VARIABLE: Final = "RT_RUN_MARK"
_PAUSE_S: Final = 0.01


@contextlib.contextmanager
def nothing_left() -> Iterator[None]:
    """Kill everything that was started inside and still runs."""
    mark = secrets.token_hex(16)
    before = os.environ.get(_VARIABLE)
    os.environ[_VARIABLE] = mark
    try:
        yield
    finally:
        if before is None:
            del os.environ[_VARIABLE]
        else:
            os.environ[_VARIABLE] = before
        while found := processes_with(f"{_VARIABLE}={mark}"):
            # All stop before one dies, so that no supervisor sees and reports the death of its child.
            for sent in (signal.SIGSTOP, signal.SIGKILL):
                for pid in found:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, sent)
            time.sleep(_PAUSE_S)


def processes_with(variable: str) -> list[int]:
    """The other processes that have `variable`, a name and a value, in their environment."""
    found = []
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        with contextlib.suppress(OSError):
            environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            if variable.encode() in environment and pid != os.getpid():
                found.append(pid)
    return found
