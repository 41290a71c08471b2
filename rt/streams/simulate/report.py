"""The result of a simulation, as a table and as JSON."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from msgspec import Struct, to_builtins

from rt.streams.simulate.options import SimulationOptions


class SimulatedPhase(Struct, frozen=True):
    """Times in virtual seconds. `requests_per_s`: requests of all hosts to all clusters, by kind."""

    name: str
    lasted_s: float
    queues_moved: int
    streams_moved: int
    served_again: int
    served_again_p50_s: float | None
    served_again_p99_s: float | None
    served_again_max_s: float | None
    requests_per_s: Mapping[str, float]


class Spread(Struct, frozen=True):
    least: int
    mean: float
    most: int
    deviation: float
    """The standard deviation as a share of the mean."""

    @classmethod
    def of(cls, counts: Sequence[int]) -> Spread:
        mean = sum(counts) / len(counts)
        variance = sum((count - mean) ** 2 for count in counts) / len(counts)
        return cls(min(counts), mean, max(counts), math.sqrt(variance) / mean if mean else 0.0)

    def __str__(self) -> str:
        return f"{self.least:,} / {self.mean:,.1f} / {self.most:,} (deviation {self.deviation:.1%})"


class SimulationReport(Struct, frozen=True):
    options: SimulationOptions
    phases: tuple[SimulatedPhase, ...]
    streams_per_cluster: Spread
    queues_per_host: Spread
    """The queues of each host at the end."""
    streams_per_host: Spread
    share_moved: float
    """The share of all streams that move if a cluster is added."""
    share_expected: float
    share_bound: float
    moved_elsewhere: int
    """Streams that moved to another cluster than the added one."""
    virtual_s: float
    violations: tuple[str, ...]
    violation_count: int

    @property
    def is_good(self) -> bool:
        """Whether all invariants hold, and the share that moved is within its bound."""
        moved_as_expected = abs(self.share_moved - self.share_expected) <= self.share_bound
        return not self.violation_count and not self.moved_elsewhere and moved_as_expected

    def as_json(self) -> dict[str, Any]:
        return {
            **to_builtins(self),
            "serve_again_bound_s": self.options.serve_again_s,
            "is_good": self.is_good,
        }


def percentile(ordered: Sequence[float], share: float) -> float | None:
    """The percentile by the nearest rank. None if there are no values."""
    return round(ordered[max(math.ceil(share * len(ordered)) - 1, 0)], 3) if ordered else None


def lines(report: SimulationReport) -> Iterator[str]:
    """The table for people."""
    options = report.options
    yield (
        f"{options.clusters:,} clusters, {options.hosts:,} hosts, {options.streams:,} streams, "
        f"balancer {options.balancer}, lease {options.times.lease_s:g} s, look {options.times.look_s:g} s, "
        f"seed {options.seed}"
    )
    yield ""
    head = ("phase", "lasted", "queues", "streams", "served", "p50", "p99", "max", "requests a second")
    below = ("", "s", "moved", "moved", "again", "s", "s", "s", "look", "renew", "acquire", "release")
    widths = (24, 7, 7, 10, 7, 7, 7, 7, 9, 9, 8, 8)
    yield _row(head, widths)
    yield _row(below, widths)
    for phase in report.phases:
        times = (phase.served_again_p50_s, phase.served_again_p99_s, phase.served_again_max_s)
        yield _row(
            (
                phase.name,
                f"{phase.lasted_s:.0f}",
                f"{phase.queues_moved:,}",
                f"{phase.streams_moved:,}",
                f"{phase.served_again:,}",
                *("-" if time is None else f"{time:.2f}" for time in times),
                *(f"{rate:,.0f}" for rate in phase.requests_per_s.values()),
            ),
            widths,
        )
    yield ""
    yield f"streams per cluster, least / mean / most   {report.streams_per_cluster}"
    yield f"queues per host                            {report.queues_per_host}"
    yield f"streams per host                           {report.streams_per_host}"
    yield (
        f"streams that move if a cluster is added    {report.share_moved:.4%}, expected "
        f"{report.share_expected:.4%} ± {report.share_bound:.4%}; to other clusters: {report.moved_elsewhere}"
    )
    yield f"bound of the time to serve again           {options.serve_again_s:g} s"
    yield f"violations of invariants                   {report.violation_count:,}"
    yield from (f"  {violation}" for violation in report.violations)


def _row(cells: Sequence[str], widths: Sequence[int]) -> str:
    first, *rest = cells
    return " ".join(
        [first.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=False))]
    ).rstrip()
