"""The settings of a provider."""

from __future__ import annotations

import math

from msgspec import Struct

from rt.option_checks import check_count, check_range
from rt.streams.core.delivery import PoisonPolicy, check_policy
from rt.streams.queue.queue_cache import BUCKETS
from rt.streams.subscriptions.start_place import Start, check_start


class StreamOptions(Struct, frozen=True):
    """Times are in seconds. `rt.InvalidOption` for invalid values."""

    cache_events: int = 65_536
    """The cache size of a queue, in events."""
    cache_bytes: int = 64 * 2**20
    """The cache size of a queue, in bytes. One read may exceed it."""
    batch_events_max: int = 1000
    """The maximum number of events in one delivery."""
    call_for_s: float = 60.0
    """A call of a consumer that lasts longer is cancelled, and counts as a failed try. `math.inf`: never."""
    deliver_for_s: float = 60.0
    """How long an event is retried before `on_poison` applies."""
    stuck_after_s: float = 60.0
    """A consumer that does not get past an event for longer is shown as stuck. `math.inf`: never."""
    retry_min_s: float = 0.1
    """The first wait between two tries. It grows up to twofold each time."""
    retry_max_s: float = 10.0
    """The longest wait between two tries."""
    on_poison: PoisonPolicy | None = None
    """See `PoisonPolicy`. None: `block` for implicit subscriptions, `fault` for others. A subscription may
    have another one.
    """
    start: Start | None = None
    """Where an implicit subscription starts if the queue's subscription store does not know it yet. None: at
    the oldest event if the store is new, and otherwise at the position where the queue is read. See `Start`.
    """
    save_every_s: float = 1.0
    """How often the consumers' positions are made durable and acknowledged to the queue."""
    drain_s: float = 10.0
    """How long deliveries under way may last when a queue is given up."""
    inactive_s: float = 1800.0
    """After this time without events the implicit subscriptions of a stream are removed from memory."""
    catch_ups_max: int = 16
    """How many consumers of a queue may catch up at a time."""
    catch_up_events: int = 4096
    """The maximum number of events that a catch-up reads at a time."""
    receive_s: float = 1.0
    """How long one read of a queue waits for events."""

    def __post_init__(self) -> None:
        for name in ("cache_bytes", "batch_events_max", "catch_ups_max", "catch_up_events"):
            check_count(getattr(self, name), name=name, least=1)
        check_count(self.cache_events, name="cache_events", least=BUCKETS)
        for name in ("deliver_for_s", "stuck_after_s", "drain_s"):
            check_range(getattr(self, name), 0, math.inf, name=name)
        for name in ("call_for_s", "retry_min_s", "save_every_s", "inactive_s", "receive_s"):
            check_range(getattr(self, name), 0.001, math.inf, name=name)
        check_range(self.retry_max_s, self.retry_min_s, math.inf, name="retry_max_s")
        check_policy(self.on_poison)
        if self.start is not None:
            check_start(self.start)
