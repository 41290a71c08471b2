"""The gaps that were not reported to one consumer yet."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Awaitable, Callable

from rt.streams.core.errors import ConsumerGone
from rt.streams.core.stream_id import StreamId
from rt.streams.delivery.observer_calls import ObserverCalls
from rt.streams.delivery.poison_policy import PoisonPolicy
from rt.streams.observer import StreamGap
from rt.streams.queue.adapter import QueueGap

logger = logging.getLogger("rt.streams")


class GapReports(deque[StreamGap]):
    """The gaps that were not reported yet.

    Each delivery checks twice for gaps, and hosts have many consumers. So this class is itself a deque, and
    the garbage collector has few objects to follow.
    """

    __slots__ = ("_calls", "_policy", "_stream")

    def __init__(self, stream: StreamId, calls: ObserverCalls, policy: PoisonPolicy) -> None:
        super().__init__()
        self._stream = stream
        self._calls = calls
        self._policy = policy

    @property
    def first(self) -> StreamGap:
        return self[0]

    def add(self, gap: QueueGap) -> bool:
        """Add a gap. Returns False if the same gap is present already."""
        added = StreamGap(self._stream, gap.wanted, gap.resumed, gap.reason, gap.is_reset)
        if any(map(added.is_same, self)):
            return False
        self.append(added)
        return True

    async def report(self, failed: Callable[[None, Exception], Awaitable[bool]]) -> bool:
        """Report the first gap. Returns False if the consumer raised: the gap is reported again, as events
        are delivered again.

        `failed` waits for the next try, and returns True if there is no next try.
        """
        gap = self[0]
        try:
            await self._calls.run(self._calls.observer.on_gap(gap))
        except ConsumerGone:
            raise
        except Exception as error:  # noqa: BLE001 - whatever a consumer raises
            is_over = await failed(None, error)
            if not is_over or self._policy.on_poison != "dead-letter":
                return False
            logger.warning("gap_handler_failed stream=%s error=%r", gap.stream, error)
        else:
            self._policy.succeeded()
        self.popleft()
        return True
