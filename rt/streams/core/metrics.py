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


def _number(
    name: str, unit: str, text: str, value: Callable[[QueueStatus, QueueCounts], float]
) -> StreamMetric:
    """A metric without a further label. It is a counter if its name ends in `_total`."""
    kind = "counter" if name.endswith("_total") else "gauge"
    return StreamMetric(name, kind, unit, "", text, lambda status, counts: {"": value(status, counts)})


def _states(status: QueueStatus, _: QueueCounts) -> Mapping[str, float]:
    return {
        "served": status.consumers - status.behind,
        "behind": status.behind,
        "faulted": status.faulted,
        "unattended": status.unattended,
    }


METRICS: Final = (
    _number(
        "rt_streams_queue_owned",
        "0 or 1",
        "1 if this host serves the queue.",
        lambda s, _: s.state == "served",
    ),
    _number(
        "rt_streams_queue_failed",
        "0 or 1",
        "1 if its agent failed and will be restarted.",
        lambda s, _: s.state == "failed",
    ),
    StreamMetric(
        "rt_streams_consumers",
        "gauge",
        "subscriptions",
        "state",
        "Served from the cache; catching up (`behind`); faulted; without an observer here (`unattended`).",
        _states,
    ),
    _number(
        "rt_streams_slow_consumers",
        "consumers",
        "Consumers in the oldest part of a full cache.",
        lambda s, _: s.slow,
    ),
    _number(
        "rt_streams_failing_consumers",
        "consumers",
        "Consumers whose last delivery failed.",
        lambda s, _: s.failing,
    ),
    _number(
        "rt_streams_acknowledged_position",
        "position",
        "Every consumer served from the cache has everything before this position.",
        lambda s, _: s.low,
    ),
    _number(
        "rt_streams_lag_events",
        "positions",
        "From the acknowledged position to the end of the queue, as far as this host knows it.",
        lambda s, _: s.lag,
    ),
    _number("rt_streams_cache_events", "events", "Events in the cache.", lambda s, _: s.cache_events),
    _number("rt_streams_cache_bytes", "bytes", "Bytes in the cache.", lambda s, _: s.cache_bytes),
    _number(
        "rt_streams_cache_fill_ratio",
        "ratio",
        "Share of the cache that consumers still need. Reading pauses at 0.9.",
        lambda s, _: s.pressure,
    ),
    _number(
        "rt_streams_reads_total", "reads", "Reads of the queue that returned something.", lambda _, c: c.reads
    ),
    _number("rt_streams_events_total", "events", "Events read from the queue.", lambda _, c: c.events),
    _number(
        "rt_streams_delivered_total",
        "events",
        "Events accepted, summed over all consumers.",
        lambda _, c: c.delivered,
    ),
    _number("rt_streams_failures_total", "failures", "Failed deliveries.", lambda _, c: c.failures),
    _number(
        "rt_streams_dead_letters_total",
        "events",
        "Events sent to the dead letters.",
        lambda _, c: c.dead_letters,
    ),
    _number(
        "rt_streams_subscriptions_faulted_total",
        "subscriptions",
        "Subscriptions faulted.",
        lambda _, c: c.faults,
    ),
    _number(
        "rt_streams_gaps_total", "gaps", "Gaps: events that the queue no longer has.", lambda _, c: c.gaps
    ),
    _number(
        "rt_streams_catch_ups_total",
        "consumers",
        "Times that a consumer started to catch up.",
        lambda _, c: c.catch_ups,
    ),
    _number(
        "rt_streams_backpressure_waits_total",
        "waits",
        "Waits because the cache was full.",
        lambda _, c: c.waits,
    ),
    _number(
        "rt_streams_checkpoints_total", "commits", "Commits of the subscription store.", lambda _, c: c.saves
    ),
    _number(
        "rt_streams_agent_failures_total",
        "failures",
        "Failures of the agent: of the queue, or of the subscription store.",
        lambda _, c: c.agent_failures,
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
