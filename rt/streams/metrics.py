"""What a host tells of its queues, in the text format of Prometheus; `docs/streams.md` lists it.

Law: every queue of the provider has every sample on every host, so that a rule never waits for one: of a
queue that is served elsewhere, zeros and what this host has counted. No stream and no subscription is in a
label.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final


@dataclass(slots=True)
class QueueCounts:
    """Since the provider was started, of a queue; they outlive its agents."""

    reads: int = 0
    events: int = 0
    delivered: int = 0
    failures: int = 0
    dead_letters: int = 0
    faults: int = 0
    gaps: int = 0
    gaps_told: int = 0
    catch_ups: int = 0
    waits: int = 0
    saves: int = 0
    agent_failures: int = 0


@dataclass(frozen=True, slots=True)
class QueueStatus:
    """A queue on this host, now. `state` is "served", "failed" (to be tried again) or "elsewhere"."""

    queue: str
    state: str = "elsewhere"
    consumers: int = 0
    behind: int = 0
    failing: int = 0
    slow: int = 0
    faulted: int = 0
    unattended: int = 0
    low: int = 0
    lag: int = 0
    cache_events: int = 0
    cache_bytes: int = 0
    pressure: float = 0.0


@dataclass(frozen=True, slots=True)
class Metric:
    """One of them, and how its samples are had: by labels besides provider, host and queue."""

    name: str
    kind: str
    unit: str
    labels: str
    help: str
    samples: Callable[[QueueStatus, QueueCounts], Mapping[str, float]]


def _one(value: Callable[[QueueStatus, QueueCounts], float]) -> Callable[..., Mapping[str, float]]:
    return lambda status, counts: {"": value(status, counts)}


def _states(status: QueueStatus, _: QueueCounts) -> Mapping[str, float]:
    return {
        "served": status.consumers - status.behind,
        "behind": status.behind,
        "faulted": status.faulted,
        "unattended": status.unattended,
    }


METRICS: Final = (
    Metric(
        "rt_streams_queue_owned",
        "gauge",
        "0 or 1",
        "",
        "1 if this host serves the queue.",
        _one(lambda s, _: s.state == "served"),
    ),
    Metric(
        "rt_streams_queue_failed",
        "gauge",
        "0 or 1",
        "",
        "1 if its agent broke, and is to be started again.",
        _one(lambda s, _: s.state == "failed"),
    ),
    Metric(
        "rt_streams_consumers",
        "gauge",
        "subscriptions",
        "state",
        "Served from the cache; reading for themselves (`behind`); given up; with nobody here to consume.",
        _states,
    ),
    Metric(
        "rt_streams_slow_consumers",
        "gauge",
        "consumers",
        "",
        "That stand in the oldest bucket of a full cache.",
        _one(lambda s, _: s.slow),
    ),
    Metric(
        "rt_streams_failing_consumers",
        "gauge",
        "consumers",
        "",
        "That did not take what they were handed last.",
        _one(lambda s, _: s.failing),
    ),
    Metric(
        "rt_streams_low_position",
        "gauge",
        "position",
        "",
        "Everything before it is with every consumer that is served from the cache.",
        _one(lambda s, _: s.low),
    ),
    Metric(
        "rt_streams_lag_events",
        "gauge",
        "positions",
        "",
        "From there to the end of the queue, as far as this host knows it.",
        _one(lambda s, _: s.lag),
    ),
    Metric(
        "rt_streams_cache_events", "gauge", "events", "", "In the cache.", _one(lambda s, _: s.cache_events)
    ),
    Metric("rt_streams_cache_bytes", "gauge", "bytes", "", "In the cache.", _one(lambda s, _: s.cache_bytes)),
    Metric(
        "rt_streams_pressure_ratio",
        "gauge",
        "ratio",
        "",
        "How full the cache is with what somebody lacks; nothing is read at 0.9 and more.",
        _one(lambda s, _: s.pressure),
    ),
    Metric(
        "rt_streams_reads_total",
        "counter",
        "reads",
        "",
        "That brought something.",
        _one(lambda _, c: c.reads),
    ),
    Metric(
        "rt_streams_events_total",
        "counter",
        "events",
        "",
        "Read from the queue.",
        _one(lambda _, c: c.events),
    ),
    Metric(
        "rt_streams_delivered_total",
        "counter",
        "events",
        "",
        "Taken by consumers, each of which counts.",
        _one(lambda _, c: c.delivered),
    ),
    Metric(
        "rt_streams_failures_total",
        "counter",
        "failures",
        "",
        "Consumers did not take what they were handed.",
        _one(lambda _, c: c.failures),
    ),
    Metric(
        "rt_streams_dead_letters_total",
        "counter",
        "events",
        "",
        "Went to the dead letters.",
        _one(lambda _, c: c.dead_letters),
    ),
    Metric(
        "rt_streams_faults_total",
        "counter",
        "subscriptions",
        "",
        "Were given up.",
        _one(lambda _, c: c.faults),
    ),
    Metric(
        "rt_streams_gaps_total",
        "counter",
        "gaps",
        "",
        "Events that the queue did not have any more.",
        _one(lambda _, c: c.gaps),
    ),
    Metric(
        "rt_streams_catch_ups_total",
        "counter",
        "consumers",
        "",
        "Began to read for themselves.",
        _one(lambda _, c: c.catch_ups),
    ),
    Metric(
        "rt_streams_waits_total",
        "counter",
        "waits",
        "",
        "Nothing could be read, for the cache was full.",
        _one(lambda _, c: c.waits),
    ),
    Metric("rt_streams_saves_total", "counter", "commits", "", "Of the books.", _one(lambda _, c: c.saves)),
    Metric(
        "rt_streams_agent_failures_total",
        "counter",
        "failures",
        "",
        "Of the agent: the queue, or the disk of the books.",
        _one(lambda _, c: c.agent_failures),
    ),
)


def exposition(provider: str, host: str, queues: Iterable[tuple[QueueStatus, QueueCounts]]) -> str:
    """All samples of a provider. Names are names of `rt.names`, so that nothing needs to be escaped."""
    return "".join(f"{line}\n" for line in _lines(provider, host, list(queues)))


def _lines(provider: str, host: str, queues: list[tuple[QueueStatus, QueueCounts]]) -> Iterator[str]:
    for metric in METRICS:
        yield f"# HELP {metric.name} {metric.help}"
        yield f"# TYPE {metric.name} {metric.kind}"
        for status, counts in queues:
            base = f'provider="{provider}",host="{host}",queue="{status.queue}"'
            for label, value in metric.samples(status, counts).items():
                labels = f'{base},{metric.labels}="{label}"' if metric.labels else base
                yield f"{metric.name}{{{labels}}} {float(value):.10g}"
