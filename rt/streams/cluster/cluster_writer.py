"""Publishes events to a cluster from an event loop. Concurrent calls share a sync.

Invariant: `publish` returns when the events are as durable as requested. The loop never waits for a disk.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from msgspec import Struct, field

from rt.client.publisher import Publisher
from rt.errors import Closed
from rt.log.format.headers import Headers


class _Order(Struct):
    """One call of `publish`."""

    topic: str
    values: Sequence[Any]
    headers: Headers
    done: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class ClusterWriter:
    """A publisher, opened with the first events."""

    def __init__(self, make: Callable[[], Publisher], level: Any, level_s: float) -> None:
        self._make = make
        self._level = level
        self._level_s = level_s
        self._publisher: Publisher | None = None
        self._orders: list[_Order] = []
        self._working: asyncio.Task[None] | None = None
        self._is_closed = False

    async def publish(self, topic: str, values: Sequence[Any], headers: Headers = ()) -> None:
        """Publish `values` under `topic`, in order, after those of earlier calls. All have these headers."""
        if self._is_closed:
            raise Closed("the provider is closed")
        order = _Order(topic, values, headers)
        self._orders.append(order)
        if self._working is None:
            self._working = asyncio.create_task(self._work())
        await asyncio.shield(order.done)

    async def close(self) -> None:
        """Publish what is queued, then close."""
        self._is_closed = True
        if self._working is not None:
            await self._working
        if self._publisher is not None:
            await asyncio.to_thread(self._publisher.close)

    async def _work(self) -> None:
        while self._orders:
            orders, self._orders = self._orders, []
            try:
                failed = await asyncio.to_thread(self._carry_out, orders)
            except Exception as refused:  # noqa: BLE001 - for example, the system starts no more threads
                failed = [refused] * len(orders)
            for order, error in zip(orders, failed, strict=True):
                if error is None:
                    order.done.set_result(None)
                else:
                    order.done.set_exception(error)
                    order.done.exception()  # The caller may no longer wait.
        self._working = None

    def _carry_out(self, orders: Sequence[_Order]) -> list[Exception | None]:
        """Runs in a thread. Returns the error of each order, or None. One failure does not affect the
        others.
        """
        failed: list[Exception | None] = [None] * len(orders)
        last: int | None = None
        for at, order in enumerate(orders):
            try:
                if self._publisher is None:
                    self._publisher = self._make()
                numbers = self._publisher.publish_many(order.values, order.topic, headers=order.headers)
                last = numbers[-1] if numbers else last
            except Exception as error:  # noqa: BLE001 - raised to the caller
                failed[at] = error
        try:
            if self._publisher is not None and last is not None:
                self._publisher.flush()
                if self._level is not None:
                    self._publisher.wait(last, level=self._level, timeout=self._level_s)
        except Exception as error:  # noqa: BLE001 - raised to the caller
            failed = [error if each is None else each for each in failed]
        return failed
