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


def _number(field: str, name: str, unit: str, text: str) -> StreamMetric:
    """A metric of one field of `QueueStatus`, or of `QueueCounts` if its name ends in `_total`."""
    if name.endswith("_total"):
        return StreamMetric(name, "counter", unit, "", text, lambda _, counts: {"": getattr(counts, field)})
    return StreamMetric(name, "gauge", unit, "", text, lambda status, _: {"": getattr(status, field)})


def _state(state: str, name: str, text: str) -> StreamMetric:
    return StreamMetric(name, "gauge", "0 or 1", "", text, lambda status, _: {"": status.state == state})


def _consumers(status: QueueStatus, _: QueueCounts) -> Mapping[str, float]:
    return {
        "served": status.consumers - status.behind,
        "behind": status.behind,
        "faulted": status.faulted,
        "unattended": status.unattended,
    }


METRICS: Final = (
    _state("served", "rt_streams_queue_owned", "1 if this host serves the queue."),
    _state("failed", "rt_streams_queue_failed", "1 if its agent failed and will be restarted."),
    StreamMetric(
        "rt_streams_consumers",
        "gauge",
        "subscriptions",
        "state",
        "Served from the cache; catching up (`behind`); faulted; without an observer here (`unattended`).",
        _consumers,
    ),
    _number(
        "slow", "rt_streams_slow_consumers", "consumers", "Consumers in the oldest part of a full cache."
    ),
    _number("failing", "rt_streams_failing_consumers", "consumers", "Consumers whose last delivery failed."),
    _number(
        "low",
        "rt_streams_acknowledged_position",
        "position",
        "Every consumer served from the cache has everything before this position.",
    ),
    _number(
        "lag",
        "rt_streams_lag_events",
        "positions",
        "From the acknowledged position to the end of the queue, as far as this host knows it.",
    ),
    _number("cache_events", "rt_streams_cache_events", "events", "Events in the cache."),
    _number("cache_bytes", "rt_streams_cache_bytes", "bytes", "Bytes in the cache."),
    _number(
        "pressure",
        "rt_streams_cache_fill_ratio",
        "ratio",
        "Share of the cache that consumers still need. Reading pauses at 0.9.",
    ),
    _number("reads", "rt_streams_reads_total", "reads", "Reads of the queue that returned something."),
    _number("events", "rt_streams_events_total", "events", "Events read from the queue."),
    _number(
        "delivered", "rt_streams_delivered_total", "events", "Events accepted, summed over all consumers."
    ),
    _number("failures", "rt_streams_failures_total", "failures", "Failed deliveries."),
    _number("dead_letters", "rt_streams_dead_letters_total", "events", "Events sent to the dead letters."),
    _number("faults", "rt_streams_subscriptions_faulted_total", "subscriptions", "Subscriptions faulted."),
    _number("gaps", "rt_streams_gaps_total", "gaps", "Gaps: events that the queue no longer has."),
    _number(
        "catch_ups", "rt_streams_catch_ups_total", "consumers", "Times that a consumer started to catch up."
    ),
    _number("waits", "rt_streams_backpressure_waits_total", "waits", "Waits because the cache was full."),
    _number("saves", "rt_streams_checkpoints_total", "commits", "Commits of the subscription store."),
    _number(
        "agent_failures",
        "rt_streams_agent_failures_total",
        "failures",
        "Failures of the agent: of the queue, or of the subscription store.",
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
