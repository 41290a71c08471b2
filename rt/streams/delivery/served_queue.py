"""The state that the consumers of a queue share while an agent serves it."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field  # noqa: TID251
from typing import Any, Final

from rt.log_limit import LogLimit
from rt.serializers import Serializer
from rt.streams.core.metrics import QueueCounts
from rt.streams.core.stream_id import QueueId, SequenceToken, StreamId
from rt.streams.delivery.consumer_tasks import ConsumerTasks
from rt.streams.delivery.observer_calls import CallDeadlines
from rt.streams.delivery.options import StreamOptions
from rt.streams.delivery.read_slots import ReadSlots
from rt.streams.event_tracing import StreamTracing
from rt.streams.observer import DeadLetters
from rt.streams.queue.adapter import QueueAdapter, QueueGap
from rt.streams.queue.queue_cache import QueueCache

logger = logging.getLogger("rt.streams")

_WARNINGS_MAX: Final = 10
_WARNINGS_S: Final = 10.0
"""At most `_WARNINGS_MAX` warnings are logged in this many seconds."""


def _warning_limit() -> LogLimit:
    return LogLimit(_WARNINGS_S, at_most=_WARNINGS_MAX)


@dataclass(slots=True, eq=False)
class ServedQueue:
    """One queue: its adapter, its cache, its counters, and the options of its provider."""

    id: QueueId
    adapter: QueueAdapter
    options: StreamOptions
    counts: QueueCounts
    dead_letters: DeadLetters
    draw: random.Random
    on_failure: Callable[[BaseException], None]
    serializers: Mapping[str, Serializer[Any]] = field(default_factory=dict)
    """By namespace."""
    tracing: StreamTracing | None = None
    cache: QueueCache = field(init=False)
    """Set when the agent starts."""
    deadlines: CallDeadlines = field(init=False)
    read_slots: ReadSlots = field(init=False)
    """The slots for catching up."""
    tasks: ConsumerTasks = field(default_factory=ConsumerTasks)
    """The tasks that run the consumers."""
    warnings: LogLimit = field(default_factory=_warning_limit)
    """The limit for warnings about failed tries."""
    gaps: list[QueueGap] = field(default_factory=list)
    """The gaps between the oldest event of the cache and its end."""
    resets: Sequence[QueueGap] = ()
    """The forced resets from which subscriptions were moved back, by position."""
    recent_reset: QueueGap | None = None
    """The first reset in `resets` that not all subscriptions had passed when the agent started."""
    log_end: SequenceToken | None = None
    """The end of the queue when its agent started, if it is known for certain."""
    progressed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a consumer has advanced."""
    on_new_stream: Callable[[StreamId], None] = lambda _: None
    """Called with a stream when an event makes the stream known."""
    on_taken_over: Callable[[StreamId, str], None] = lambda *_: None
    """Called with the stream and the label of each stored explicit subscription, when the agent starts."""
    is_owned: Callable[[], bool] = lambda: True
    """Whether this host may call consumers now. Once it is False, the queue is lost: its agent is stopped."""
    is_open: bool = False
    """Whether events are read and subscriptions can be changed."""
    has_failed: bool = False
    is_paused: bool = False
    """Whether the queue is paused by command: nothing is read or delivered. Positions stay."""
    continued: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the queue is not paused any more."""

    def __post_init__(self) -> None:
        self.deadlines = CallDeadlines(self.options.call_for_s)
        self.read_slots = ReadSlots(self.options.catch_ups_max)

    @property
    def is_halted(self) -> bool:
        """Whether no consumer may be called: the queue is paused or lost."""
        return self.is_paused or not self.is_owned()

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

    def pause(self, *, is_paused: bool) -> bool:
        """Pause or continue the queue. Returns False if it was in this state before."""
        if is_paused == self.is_paused:
            return False
        self.is_paused = is_paused
        logger.warning("queue_%s queue=%s", "paused" if is_paused else "continued", self.id)
        if is_paused:
            self.continued.clear()
        else:
            self.continued.set()
        return True

    def add_gap(self, gap: QueueGap, *, is_counted: bool = True) -> None:
        self.counts.gaps += is_counted
        self.gaps = [known for known in self.gaps if known.resumed > self.cache.start]
        self.gaps.append(gap)

    def disbelief(self, token: SequenceToken, stored: SequenceToken) -> QueueGap | None:
        """If a consumer cannot have everything before `token`: the position where it continues, and the
        reason. None if it can.

        `stored`: the position of the consumer in the subscription store.
        """
        if token <= stored:
            return None
        for reset in self.resets:
            if token > reset.resumed and (reset is self.recent_reset or stored <= reset.resumed):
                at = max(stored, reset.resumed)
                return QueueGap(at, at, reset.reason, is_reset=True)
        if self.log_end is not None and token > max(self.log_end, self.cache.end):
            why = f"the consumer named a token beyond the end of the queue, {self.log_end}"
            return QueueGap(stored, stored, why, is_reset=True)
        return None

    def fail(self, error: BaseException) -> None:
        """Report a failure outside a consumer, once. It ends the agent."""
        if not self.has_failed:
            self.has_failed = True
            self.on_failure(error)
