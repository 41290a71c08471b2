"""What the consumers of a queue share while an agent serves it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from rt.streams.agent.consumer_tasks import ConsumerTasks
from rt.streams.agent.options import StreamOptions
from rt.streams.agent.queue_cache import QueueCache
from rt.streams.agent.read_slots import ReadSlots
from rt.streams.core.metrics import QueueCounts
from rt.streams.core.stream_id import QueueId
from rt.streams.observer import DeadLetters
from rt.streams.queue.adapter import QueueAdapter, QueueGap


@dataclass(slots=True, eq=False)
class ServedQueue:
    """One queue: its adapter, its cache, its counters, and the options of its provider."""

    id: QueueId
    adapter: QueueAdapter
    options: StreamOptions
    counts: QueueCounts
    dead_letters: DeadLetters | None
    draw: random.Random
    on_failure: Callable[[BaseException], None]
    cache: QueueCache = field(init=False)
    """Set when the agent starts."""
    read_slots: ReadSlots = field(init=False)
    """The slots for catching up."""
    tasks: ConsumerTasks = field(default_factory=ConsumerTasks)
    """Run the consumers."""
    gaps: list[QueueGap] = field(default_factory=list)
    """The gaps between the oldest event of the cache and its end."""
    progressed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a consumer has advanced."""
    is_open: bool = False
    """Whether events are read and subscriptions can be changed."""
    has_failed: bool = False

    def __post_init__(self) -> None:
        self.read_slots = ReadSlots(self.options.catch_ups_max)

    @property
    def is_rewindable(self) -> bool:
        """Whether events that left the cache can be read again."""
        return self.adapter.is_rewindable

    def backoff(self, attempt: int) -> float:
        """Seconds to wait after failed try `attempt`, counted from 1. Doubles; half of it is random."""
        most: float = min(self.options.retry_max_s, self.options.retry_min_s * 2.0 ** min(attempt - 1, 30))
        return most * self.draw.uniform(0.5, 1.0)

    def now(self) -> float:
        """The loop's time, in seconds."""
        return asyncio.get_running_loop().time()

    def add_gap(self, gap: QueueGap) -> None:
        self.counts.gaps += 1
        self.gaps = [known for known in self.gaps if known.resumed > self.cache.start]
        self.gaps.append(gap)

    def fail(self, error: BaseException) -> None:
        """Report a failure outside a consumer, once. It ends the agent."""
        if not self.has_failed:
            self.has_failed = True
            self.on_failure(error)
