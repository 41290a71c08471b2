"""Consumers for tests of streams, and a helper that waits for their events."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from rt.streams.core.errors import StreamError
from rt.streams.core.event_batch import EventBatch
from rt.streams.core.stream_id import SequenceToken
from rt.streams.observer import StreamGap, StreamObserver


class Collector(StreamObserver):
    """Stores received events. `slow_s`: the duration of a batch. `act` may raise, wait or return a token."""

    def __init__(
        self,
        *,
        slow_s: float = 0.0,
        last: SequenceToken | None = None,
        act: Callable[[EventBatch], Awaitable[Any]] | None = None,
    ) -> None:
        self.events: list[Any] = []
        self.tokens: list[SequenceToken] = []
        self.batches: list[int] = []
        self.gaps: list[StreamGap] = []
        self.errors: list[StreamError] = []
        self.closed = 0
        self.slow_s = slow_s
        self.last = last
        self.act = act

    async def on_batch(self, batch: EventBatch) -> SequenceToken | None:
        if self.slow_s:
            await asyncio.sleep(self.slow_s)
        answer = None if self.act is None else await self.act(batch)
        if answer is not None:
            assert isinstance(answer, SequenceToken)
            return answer
        self.batches.append(len(batch))
        for token, event in batch:
            self.tokens.append(token)
            self.events.append(event)
        return None

    async def last_token(self) -> SequenceToken | None:
        return self.last

    async def on_gap(self, gap: StreamGap) -> None:
        self.gaps.append(gap)

    async def on_error(self, error: StreamError) -> None:
        self.errors.append(error)

    async def on_close(self) -> None:
        self.closed += 1


async def until(condition: Callable[[], object], seconds: float = 600.0) -> None:
    """Wait, in the loop's time, until the condition is true."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.1)
