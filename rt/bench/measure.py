"""Measuring: several rounds, medians, everything that is compared in the same round.

Law: a figure is a median of rounds with its least and greatest beside it, and a ratio is taken round by
round, so that a machine whose speed drifts does not make one.
"""

from __future__ import annotations

import os
import resource
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured quantity: its rounds, what they count, and what was hoped for."""

    name: str
    rounds: tuple[float, ...]
    unit: str
    goal: float | None = None

    @property
    def median(self) -> float:
        """The middle round."""
        return statistics.median(self.rounds)

    def as_dict(self) -> dict[str, object]:
        """For one JSON object a line."""
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
        """For people."""
        goal = "" if self.goal is None else f"  goal {_short(self.goal)}"
        least, most = _short(min(self.rounds)), _short(max(self.rounds))
        return f"{self.name:<52} {_short(self.median):>9} {self.unit:<11} ({least} to {most}){goal}"


def seconds(work: Callable[[], object]) -> float:
    """Wall-clock seconds of one call."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, ...]:
    """Ours over theirs, round by round."""
    return tuple(a / b for a, b in zip(ours, theirs, strict=True))


def peak_memory_mb() -> float:
    """The most memory this process ever had resident, MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6


@contextmanager
def one_core(core: int | None) -> Iterator[None]:
    """Keep this process, its threads included, on one processor; None: on all."""
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
