"""Limits how often something is logged. Pure: the caller reads the clock."""

from __future__ import annotations

import math
from typing import Final


class LogLimit:
    """Allows at most `at_most` records in a period of `every_s` seconds. A period starts with a record. Not
    thread-safe.
    """

    __slots__ = ("_at_most", "_begun_s", "_count", "_every_s", "_left_out")

    def __init__(self, every_s: float, *, at_most: int = 1) -> None:
        self._every_s: Final = every_s
        self._at_most: Final = at_most
        self._begun_s = -math.inf
        self._count = 0
        self._left_out = 0

    def admit(self, now_s: float) -> int | None:
        """The number of records that were left out before this one; None if this one must be left out too."""
        if now_s - self._begun_s >= self._every_s:
            self._begun_s, self._count = now_s, 0
        if self._count >= self._at_most:
            self._left_out += 1
            return None
        self._count += 1
        left_out, self._left_out = self._left_out, 0
        return left_out
