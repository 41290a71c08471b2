"""Measurements: several rounds and their median. Things that are compared run in the same round.

Invariant: a figure is the median of its rounds, with the least and the greatest. A ratio is computed per
round, so that a machine whose speed drifts does not distort it.
"""

from __future__ import annotations

import os
import resource
import shutil
import statistics
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured quantity: its rounds, its unit and its target."""

    name: str
    rounds: tuple[float, ...]
    unit: str
    goal: float | None = None

    @property
    def median(self) -> float:
        return statistics.median(self.rounds)

    def as_dict(self) -> dict[str, object]:
        """For one JSON object per line."""
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
        """A line for people."""
        goal = "" if self.goal is None else f"  goal {_short(self.goal)}"
        least, most = _short(min(self.rounds)), _short(max(self.rounds))
        return f"{self.name:<52} {_short(self.median):>9} {self.unit:<11} ({least} to {most}){goal}"


class Bench(ABC):
    """One run of a benchmark, with `rounds` of each measurement, in a temporary folder of `directory`."""

    def __init__(self, directory: str | None, rounds: int) -> None:
        self._root = tempfile.mkdtemp(prefix="rt-bench-", dir=directory)
        self._rounds = rounds

    @abstractmethod
    def figures(self) -> Generator[Figure, None, None]:
        """Measure everything."""

    def run(self, on_figure: Callable[[Figure], None]) -> None:
        """Measure everything. Reports each figure when it is known, and leaves no files."""
        figures = self.figures()
        try:
            for figure in figures:
                on_figure(figure)
        finally:
            figures.close()
            self.close()

    def close(self) -> None:
        """Delete what was written."""
        shutil.rmtree(self._root, ignore_errors=True)


def seconds(work: Callable[[], object]) -> float:
    """Wall-clock seconds of one call."""
    return measured(work)[0]


def measured(work: Callable[[], object]) -> tuple[float, float]:
    """Seconds of wall-clock time and of CPU time of one call."""
    wall, processor = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - wall, time.process_time() - processor


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, ...]:
    """Ours over theirs, round by round."""
    return tuple(a / b for a, b in zip(ours, theirs, strict=True))


def peak_memory_mb() -> float:
    """The peak resident memory of this process, MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6


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
