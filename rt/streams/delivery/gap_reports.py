"""The gaps that one consumer was not told of yet."""

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


class GapReports:
    """True if there are gaps. `failed` waits for the next try, and returns whether there is none."""

    __slots__ = ("_calls", "_failed", "_gaps", "_policy", "_stream")

    def __init__(
        self,
        stream: StreamId,
        calls: ObserverCalls,
        policy: PoisonPolicy,
        failed: Callable[[Exception], Awaitable[bool]],
    ) -> None:
        self._stream = stream
        self._calls = calls
        self._policy = policy
        self._failed = failed
        self._gaps: deque[StreamGap] = deque()

    def __bool__(self) -> bool:
        return bool(self._gaps)

    @property
    def first(self) -> StreamGap:
        return self._gaps[0]

    def add(self, gap: QueueGap) -> bool:
        """Returns False if it is there already."""
        added = StreamGap(self._stream, gap.wanted, gap.resumed, gap.reason, gap.is_reset)
        if any(map(added.is_same, self._gaps)):
            return False
        self._gaps.append(added)
        return True

    async def report(self) -> bool:
        """Report the first gap. Returns False if the consumer raised: it is reported again, like events."""
        gap = self._gaps[0]
        try:
            await self._calls.run(self._calls.observer.on_gap(gap))
        except ConsumerGone:
            raise
        except Exception as error:  # noqa: BLE001 - whatever a consumer raises
            is_over = await self._failed(error)
            if not is_over or self._policy.on_poison != "dead-letter":
                return False
            logger.warning("gap_handler_failed stream=%s error=%r", gap.stream, error)
        else:
            self._policy.succeeded()
        self._gaps.popleft()
        return True
