"""What each message of a comparison carries, and whether a consumer receives all once, in order. Pure.

value = number (8 bytes) + time at which it was due, ns (8 bytes), little-endian, + random bytes
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

HEAD_BYTES: Final = 16
_HEAD: Final = struct.Struct("<qq")
_COLUMNS: Final = np.dtype("<i8")


def make_values(first: int, due_ns: Sequence[int], filler: bytes) -> list[bytes]:
    """Values with these times, numbered from `first`, each with `filler` at its end."""
    return [_HEAD.pack(first + at, due) + filler for at, due in enumerate(due_ns)]


def read_heads(values: Sequence[bytes]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """The numbers and times of values."""
    heads = np.frombuffer(b"".join([value[:HEAD_BYTES] for value in values]), _COLUMNS).reshape(-1, 2)
    return heads[:, 0], heads[:, 1]


class SequenceCheck:
    """Counts messages that are missing, repeated or out of order. Numbers start at 0."""

    def __init__(self) -> None:
        self.received = 0
        self.lost = 0
        """Numbers that were skipped."""
        self.wrong = 0
        """Numbers that came again, or after a higher one."""
        self._highest = -1

    def add(self, numbers: npt.NDArray[np.int64]) -> None:
        highest = np.maximum.accumulate(np.append(self._highest, numbers))
        steps = numbers - highest[:-1]
        self.received += len(numbers)
        self.lost += int((steps[steps > 1] - 1).sum())
        self.wrong += int((steps < 1).sum())
        self._highest = int(highest[-1])
