"""Shared by both test disks: calls that fail on demand, and a space limit."""

from __future__ import annotations

import errno
import os
import threading
from collections import Counter
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

Operation: TypeAlias = Literal[
    "copy_from",
    "create",
    "list_directory",
    "lock",
    "make_directory",
    "open",
    "pread",
    "pwritev",
    "remove",
    "rename",
    "sync",
    "sync_directory",
    "truncate",
]


class PowerCut(BaseException):
    """The power is off. Not an `Exception`, so that the program under test does not handle it."""


def os_error(code: int, path: str | None = None) -> OSError:
    return OSError(code, os.strerror(code), path) if path is not None else OSError(code, os.strerror(code))


@dataclass(frozen=True, slots=True)
class _Fault:
    """Calls `first` to `end` (counted from 1, half-open) of `operation` raise `error`."""

    operation: Operation
    first: int
    end: int
    error: int


class Faults:
    """Configured faults and a space limit.

    `capacity_bytes` may be changed at any time (None: no limit). `used_bytes` is the total size of the files
    on this disk or, for a `FaultyDisk`, what was added since it was created.
    """

    def __init__(self, capacity_bytes: int | None = None) -> None:
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0
        self.guard = threading.RLock()
        """Held during every call."""
        self._calls: Counter[Operation] = Counter()
        self._faults: list[_Fault] = []

    def fail(self, operation: Operation, *, at: int = 1, error: int = errno.EIO, times: int = 1) -> None:
        """Let `times` calls of `operation`, from the `at`-th from now on, raise `OSError(error)`.

        A failed call changes nothing, except for a failed `sync` (see `MemoryDisk`). "pread" includes
        `pread_into`.
        """
        if operation not in get_args(Operation) or at < 1 or times < 1:
            raise ValueError(f"invalid fault: got {operation=} {at=} {times=}")
        with self.guard:
            first = self._calls[operation] + at
            self._faults.append(_Fault(operation, first, first + times, error))

    def check(self, operation: Operation) -> None:
        """Count a call of `operation`, and raise if it must fail."""
        with self.guard:
            self._calls[operation] += 1
            call = self._calls[operation]
            for fault in self._faults:
                if fault.operation == operation and fault.first <= call < fault.end:
                    raise os_error(fault.error)

    def fitting(self, size: int, offset: int, wanted: int) -> int:
        """How many of `wanted` bytes may be written at `offset` into a file of `size`. ENOSPC if none."""
        growth = offset + wanted - size
        if self.capacity_bytes is None or wanted == 0 or growth <= 0:
            return wanted
        fitting = wanted - max(0, growth - max(0, self.capacity_bytes - self.used_bytes))
        if fitting <= 0:
            raise os_error(errno.ENOSPC)
        return fitting

    def require_room(self, growth: int) -> None:
        """Raise ENOSPC unless a file may grow by `growth`. Holes count like data."""
        if self.fitting(0, 0, max(0, growth)) < growth:
            raise os_error(errno.ENOSPC)
