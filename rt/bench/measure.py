"""Measurements: several rounds and their median. Things that are compared run in the same round.

Invariant: a figure is the median of its rounds, with the least and the greatest. A ratio is computed per
round, so that a machine whose speed drifts does not distort it.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from msgspec import Struct


class Figure(Struct, frozen=True):
    name: str
    rounds: tuple[float, ...]
    unit: str
    goal: float | None = None

    @property
    def median(self) -> float:
        return statistics.median(self.rounds)

    def as_dict(self) -> dict[str, object]:
        """The figure for an output with one JSON object per line."""
        return {
            "name": self.name,
            "median": self.median,
            "min": min(self.rounds),
            "max": max(self.rounds),
            "unit": self.unit,
            "goal": self.goal,
            "rounds": len(self.rounds),
        }

    def as_line(self) -> str:
        goal = "" if self.goal is None else f"  goal {_short(self.goal)}"
        return f"{self.name:<52} {_short(self.median):>9} {self.unit:<11} {self._range()}{goal}"

    def as_cell(self) -> str:
        """The figure for a cell of a table. The name is in the table's row."""
        return f"{_short(self.median)} {self.unit} {self._range()}"

    def _range(self) -> str:
        return f"({_short(min(self.rounds))} to {_short(max(self.rounds))})"


class TimeUsed(NamedTuple):
    """Seconds of wall-clock time, and of CPU time of this process."""

    wall_s: float
    cpu_s: float


class Stopwatch:
    """Measures the time since it was made."""

    def __init__(self) -> None:
        self._wall_s, self._cpu_s = time.perf_counter(), time.process_time()

    def read(self) -> TimeUsed:
        return TimeUsed(time.perf_counter() - self._wall_s, time.process_time() - self._cpu_s)


def timed(work: Callable[[], object]) -> TimeUsed:
    stopwatch = Stopwatch()
    work()
    return stopwatch.read()


def seconds(work: Callable[[], object]) -> float:
    return timed(work).wall_s


def wall_and_cpu(
    name: str,
    rounds: Sequence[TimeUsed],
    unit: str,
    goal: float | None = None,
    *,
    convert: Callable[[float], float],
) -> Iterator[Figure]:
    """Two figures: one of the wall-clock time, one of the CPU time, which hardly depends on other load.

    `convert` makes a value in `unit` from seconds.
    """
    for suffix, taken_s in zip(("", ", CPU"), zip(*rounds, strict=True), strict=True):
        yield Figure(f"{name}{suffix}", tuple(map(convert, taken_s)), unit, goal)


def milliseconds(taken_s: float) -> float:
    return taken_s * 1000


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, ...]:
    """Ours over theirs, round by round."""
    return tuple(a / b for a, b in zip(ours, theirs, strict=True))


@contextmanager
def scratch_directory(directory: str | None) -> Iterator[str]:
    """A temporary folder of `directory` (default: the system's). It is deleted at the end."""
    with tempfile.TemporaryDirectory(prefix="rt-bench-", dir=directory, ignore_cleanup_errors=True) as root:
        yield root


@contextmanager
def one_core(core: int | None) -> Iterator[None]:
    """Pin this process, with its threads, to one CPU; None: no pinning."""
    before = os.sched_getaffinity(0)
    if core is not None:
        os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _short(value: float) -> str:
    if value >= 10_000:
        return f"{value:,.0f}"
    return f"{value:.0f}" if value >= 100 else f"{value:.2f}"
