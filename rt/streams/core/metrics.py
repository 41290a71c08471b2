"""The metrics of a host's queues. `docs/streams.md` lists them.

Invariants:
- Every host exports every sample for every queue of the provider. If a queue is served elsewhere, the values
  are zeros and this host's own counters. So alert rules never miss a series.
- Labels contain a stream or a subscription only for the oldest stuck calls, and for the explicit
  subscriptions that are furthest behind. Their number is limited for each queue.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from operator import attrgetter
from typing import Final, NamedTuple

from msgspec import Struct

from rt.exposition import CONDITION, Metric


class QueueCounts(Struct):
    """Counters of a queue since the provider started. They outlive its agents."""

    reads: int = 0
    events: int = 0
    delivered: int = 0
    filtered: int = 0
    failures: int = 0
    dead_letters: int = 0
    faults: int = 0
    gaps: int = 0
    catch_ups: int = 0
    waits: int = 0
    saves: int = 0
    agent_failures: int = 0
    misplaced: int = 0
    losses: int = 0
    resets: int = 0
    owner_timeouts: int = 0


STUCK_CALLS_MAX: Final = 10
"""The maximum number of stuck calls that are named for a queue."""


class StuckCall(NamedTuple):
    """A consumer that hangs in a call, or fails, for too long. `subscription`: the name of the subscription,
    of its pattern, or of its consumer's factory, or else the id of the subscription.
    """

    age_s: float
    stream: str
    subscription: str


SUBSCRIPTIONS_MAX: Final = 100
"""The maximum number of explicit subscriptions that are named for a queue."""


class SubscriptionLag(NamedTuple):
    """An explicit subscription, and how many positions it is behind the end of the queue. `subscription` as
    in `StuckCall`.
    """

    lag: int
    stream: str
    subscription: str
    state: str


class QueueStatus(Struct, frozen=True):
    """A queue on this host, now. `state` is "served", "failed" (will be retried) or "elsewhere"."""

    queue: str
    state: str = "elsewhere"
    consumers: int = 0
    behind: int = 0
    failing: int = 0
    slow: int = 0
    stuck: int = 0
    stuck_calls: tuple[StuckCall, ...] = ()
    """The oldest ones."""
    explicit: tuple[SubscriptionLag, ...] = ()
    """The explicit subscriptions that are furthest behind."""
    is_paused: bool = False
    faulted: int = 0
    unattended: int = 0
    low: int = 0
    lag: int = 0
    cache_events: int = 0
    cache_bytes: int = 0
    pressure: float = 0.0


class QueueMetric(NamedTuple):
    """A metric. Its values are stored by the values of `labels`, which follow the labels provider, host and
    queue.
    """

    name: str
    unit: str
    help: str
    read: Callable[[QueueStatus, QueueCounts], Mapping[tuple[str, ...], float]]
    labels: tuple[str, ...] = ()


def _number(field: str, name: str, unit: str, text: str) -> QueueMetric:
    """A metric of one field of `QueueStatus`, or of `QueueCounts` if its name ends in `_total`."""
    is_count, value_of = name.endswith("_total"), attrgetter(field)
    return QueueMetric(
        name, unit, text, lambda status, counts: {(): value_of(counts if is_count else status)}
    )


def _state(state: str, name: str, text: str) -> QueueMetric:
    return QueueMetric(name, CONDITION, text, lambda status, _: {(): status.state == state})


def _consumers(status: QueueStatus, _: QueueCounts) -> Mapping[tuple[str, ...], float]:
    return {
        ("served",): status.consumers - status.behind,
        ("behind",): status.behind,
        ("faulted",): status.faulted,
        ("unattended",): status.unattended,
    }


def _stuck_calls(status: QueueStatus, _: QueueCounts) -> Mapping[tuple[str, ...], float]:
    return {(each.stream, each.subscription): each.age_s for each in reversed(status.stuck_calls)}


def _explicit(status: QueueStatus, _: QueueCounts) -> Mapping[tuple[str, ...], float]:
    return {(each.stream, each.subscription, each.state): each.lag for each in reversed(status.explicit)}


METRICS: Final = (
    _state("served", "rt_streams_queue_owned", "1 if this host serves the queue."),
    _state("failed", "rt_streams_queue_failed", "1 if its agent failed and will be restarted."),
    QueueMetric(
        "rt_streams_queue_paused",
        CONDITION,
        "1 if this host serves the queue, and it was paused by command: its consumers get nothing.",
        lambda status, _: {(): status.is_paused},
    ),
    QueueMetric(
        "rt_streams_consumers",
        "subscriptions",
        "Served from the cache; catching up (`behind`); faulted; without an observer here (`unattended`).",
        _consumers,
        ("state",),
    ),
    _number(
        "slow", "rt_streams_slow_consumers", "consumers", "Consumers in the oldest part of a full cache."
    ),
    _number("failing", "rt_streams_failing_consumers", "consumers", "Consumers whose last delivery failed."),
    _number(
        "stuck",
        "rt_streams_stuck_consumers",
        "consumers",
        "Consumers that have not got past an event for more than `stuck_after_s`: they hang or fail.",
    ),
    QueueMetric(
        "rt_streams_stuck_call_age_seconds",
        "seconds",
        "For how long these consumers have not got past an event: the ten oldest, of all that are stuck.",
        _stuck_calls,
        ("stream", "subscription"),
    ),
    QueueMetric(
        "rt_streams_subscription_lag_events",
        "positions",
        "How far explicit subscriptions are behind the end of the queue: the hundred that lag most. "
        "`state`: `served`, `behind`, `failing`, `stuck`, `faulted` or `unattended`.",
        _explicit,
        ("stream", "subscription", "state"),
    ),
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
    _number(
        "filtered",
        "rt_streams_filtered_total",
        "events",
        "Events that a filter refused, summed over all consumers.",
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
        "misplaced",
        "rt_streams_misplaced_streams_total",
        "streams",
        "Streams with events here that the mapper places on another queue. Explicit subscriptions do not "
        "get these events.",
    ),
    _number(
        "losses",
        "rt_streams_queue_losses_total",
        "losses",
        "Times that this host lost the queue: its lease was not renewed in time, or another host has it.",
    ),
    _number(
        "resets",
        "rt_streams_resets_total",
        "resets",
        "Forced resets of the queue that this host found: positions after them have other events now.",
    ),
    _number(
        "owner_timeouts",
        "rt_streams_owner_timeouts_total",
        "requests",
        "Requests of this host to the host that serves the queue that were not answered in time.",
    ),
    _number(
        "agent_failures",
        "rt_streams_agent_failures_total",
        "failures",
        "Failures of the agent: of the queue, or of the subscription store.",
    ),
)


def metrics_of(
    provider: str, host: str, queues: Collection[tuple[QueueStatus, QueueCounts]]
) -> Iterator[Metric]:
    """All metrics of a provider."""
    for metric in METRICS:
        samples = {
            (provider, host, status.queue, *values): value
            for status, counts in queues
            for values, value in metric.read(status, counts).items()
        }
        labels = ("provider", "host", "queue", *metric.labels)
        yield Metric(metric.name, metric.help, labels, samples, metric.unit)
