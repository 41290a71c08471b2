"""The metrics of a host's queues in the text format of Prometheus. `docs/streams.md` lists them.

Invariants:
- Every host exports every sample for every queue of the provider. For a queue served elsewhere the values are
  zeros and this host's own counters. So alert rules never miss a series.
- No label holds a stream or a subscription.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final


@dataclass(slots=True)
class QueueCounts:
    """Counters of a queue since the provider started. They outlive its agents."""

    reads: int = 0
    events: int = 0
    delivered: int = 0
    failures: int = 0
    dead_letters: int = 0
    faults: int = 0
    gaps: int = 0
    gaps_reported: int = 0
    catch_ups: int = 0
    waits: int = 0
    saves: int = 0
    agent_failures: int = 0


@dataclass(frozen=True, slots=True)
class QueueStatus:
    """A queue on this host, now. `state` is "served", "failed" (will be retried) or "elsewhere"."""

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
class StreamMetric:
    """A metric, and how to compute its samples. Every sample also has provider, host and queue as labels."""

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
    StreamMetric(
        "rt_streams_queue_owned",
        "gauge",
        "0 or 1",
        "",
        "1 if this host serves the queue.",
        _one(lambda s, _: s.state == "served"),
    ),
    StreamMetric(
        "rt_streams_queue_failed",
        "gauge",
        "0 or 1",
        "",
        "1 if its agent failed and will be restarted.",
        _one(lambda s, _: s.state == "failed"),
    ),
    StreamMetric(
        "rt_streams_consumers",
        "gauge",
        "subscriptions",
        "state",
        "Served from the cache; catching up (`behind`); faulted; without an observer here (`unattended`).",
        _states,
    ),
    StreamMetric(
        "rt_streams_slow_consumers",
        "gauge",
        "consumers",
        "",
        "Consumers in the oldest part of a full cache.",
        _one(lambda s, _: s.slow),
    ),
    StreamMetric(
        "rt_streams_failing_consumers",
        "gauge",
        "consumers",
        "",
        "Consumers whose last delivery failed.",
        _one(lambda s, _: s.failing),
    ),
    StreamMetric(
        "rt_streams_acknowledged_position",
        "gauge",
        "position",
        "",
        "Every consumer served from the cache has everything before this position.",
        _one(lambda s, _: s.low),
    ),
    StreamMetric(
        "rt_streams_lag_events",
        "gauge",
        "positions",
        "",
        "From the acknowledged position to the end of the queue, as far as this host knows it.",
        _one(lambda s, _: s.lag),
    ),
    StreamMetric(
        "rt_streams_cache_events",
        "gauge",
        "events",
        "",
        "Events in the cache.",
        _one(lambda s, _: s.cache_events),
    ),
    StreamMetric(
        "rt_streams_cache_bytes",
        "gauge",
        "bytes",
        "",
        "Bytes in the cache.",
        _one(lambda s, _: s.cache_bytes),
    ),
    StreamMetric(
        "rt_streams_cache_fill_ratio",
        "gauge",
        "ratio",
        "",
        "Share of the cache that consumers still need. Reading pauses at 0.9.",
        _one(lambda s, _: s.pressure),
    ),
    StreamMetric(
        "rt_streams_reads_total",
        "counter",
        "reads",
        "",
        "Reads of the queue that returned something.",
        _one(lambda _, c: c.reads),
    ),
    StreamMetric(
        "rt_streams_events_total",
        "counter",
        "events",
        "",
        "Events read from the queue.",
        _one(lambda _, c: c.events),
    ),
    StreamMetric(
        "rt_streams_delivered_total",
        "counter",
        "events",
        "",
        "Events accepted, summed over all consumers.",
        _one(lambda _, c: c.delivered),
    ),
    StreamMetric(
        "rt_streams_failures_total",
        "counter",
        "failures",
        "",
        "Failed deliveries.",
        _one(lambda _, c: c.failures),
    ),
    StreamMetric(
        "rt_streams_dead_letters_total",
        "counter",
        "events",
        "",
        "Events sent to the dead letters.",
        _one(lambda _, c: c.dead_letters),
    ),
    StreamMetric(
        "rt_streams_subscriptions_faulted_total",
        "counter",
        "subscriptions",
        "",
        "Subscriptions faulted.",
        _one(lambda _, c: c.faults),
    ),
    StreamMetric(
        "rt_streams_gaps_total",
        "counter",
        "gaps",
        "",
        "Gaps: events that the queue no longer has.",
        _one(lambda _, c: c.gaps),
    ),
    StreamMetric(
        "rt_streams_catch_ups_total",
        "counter",
        "consumers",
        "",
        "Times that a consumer started to catch up.",
        _one(lambda _, c: c.catch_ups),
    ),
    StreamMetric(
        "rt_streams_backpressure_waits_total",
        "counter",
        "waits",
        "",
        "Waits because the cache was full.",
        _one(lambda _, c: c.waits),
    ),
    StreamMetric(
        "rt_streams_checkpoints_total",
        "counter",
        "commits",
        "",
        "Commits of the subscription store.",
        _one(lambda _, c: c.saves),
    ),
    StreamMetric(
        "rt_streams_agent_failures_total",
        "counter",
        "failures",
        "",
        "Failures of the agent: of the queue, or of the subscription store.",
        _one(lambda _, c: c.agent_failures),
    ),
)


def exposition(provider: str, host: str, queues: Iterable[tuple[QueueStatus, QueueCounts]]) -> str:
    """All samples of a provider. Names follow `rt.names`, so they need no escaping."""
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
