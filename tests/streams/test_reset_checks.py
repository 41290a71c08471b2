"""Forced resets: consumers get a reset gap and all new events, also if the epoch is known late."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from stream_consumers import Collector, until

import rt
from rt.net.lease_client import LogEpoch
from rt.streams import (
    GeneratorQueues,
    QueueId,
    SequenceToken,
    StreamId,
    StreamOptions,
    StreamProvider,
    memory_stores,
)
from rt.streams.queue.queue_epoch import QueueEpoch
from rt.streams.simulate import virtual_time

AT = 200
"""The position to which the forced reset takes the log back."""
BEFORE, AFTER = 500, 900
"""The end of the log before the reset and after it."""
BEGUN = QueueEpoch(LogEpoch(0, b"", {0: 0}), BEFORE)
FORCED = QueueEpoch(LogEpoch(1 << 16, b"aa", {0: 0, 1 << 16: AT}), AFTER)


class Log(GeneratorQueues):
    """A log whose cluster reports its epoch, or does not answer (None)."""

    def __init__(self, *, is_reset: bool, epoch: QueueEpoch | None, late: int = 0) -> None:
        super().__init__(self._event, events=AFTER if is_reset else BEFORE)
        self.is_reset, self.known, self.late = is_reset, epoch, late

    def _event(self, _: QueueId, number: int) -> tuple[StreamId, Any]:
        what = "new" if self.is_reset and number >= AT else "old"
        is_late = number < self.late if what == "new" else number % 2
        return StreamId("n", "a" if is_late else "b"), f"{what} {number}"

    async def epoch(self, _: QueueId) -> QueueEpoch | None:
        if self.known is None:
            raise rt.Overloaded("no majority")
        return self.known


def provider(log: Log, stores: Any) -> StreamProvider:
    options = StreamOptions(cache_events=100, batch_events_max=10, save_every_s=0.5)
    return StreamProvider("p", log, stores=stores, options=options)


def new(start: int = AT) -> list[str]:
    return [f"new {number}" for number in range(start, AFTER)]


def test_reset_is_reported_once_queue_reports_its_epoch() -> None:
    async def main() -> None:
        stores, got = memory_stores(), Collector()
        log = Log(is_reset=False, epoch=None)
        before = provider(log, stores)
        before.implicit("all", "n/a", lambda _: got)
        async with before:
            await until(lambda: len(got.events) == BEFORE // 2)
            await asyncio.sleep(5)
        after, late = Log(is_reset=True, epoch=None, late=AFTER), Collector()
        again = provider(after, stores)
        again.implicit("all", "n/a", lambda _: late)
        async with again:
            await until(lambda: late.events == new(BEFORE))
            after.known = FORCED
            await until(lambda: late.events[-1] == new()[-1] and len(late.events) > len(new()))
        assert late.events == new(BEFORE) + new()
        assert [(gap.resumed, gap.is_reset) for gap in late.gaps] == [(SequenceToken(AT), True)]

    virtual_time.run(main())


@pytest.mark.parametrize("knows_epoch", [False, True])
def test_new_events_are_all_delivered_if_reset_occurs_while_host_reads(knows_epoch: bool) -> None:
    async def main() -> None:
        stores, got = memory_stores(), Collector()
        log = Log(is_reset=False, epoch=BEGUN if knows_epoch else None)
        async with provider(log, stores) as host:
            await host.stream("n", "a").subscribe(got, name="x", start="earliest")
            await until(lambda: len(got.events) == BEFORE // 2)
            log.is_reset, log.known, log.late, log._events = True, FORCED, AFTER, AFTER
            await asyncio.sleep(60)
        later = Log(is_reset=True, epoch=FORCED, late=AFTER)
        async with provider(later, stores) as host:
            again = Collector()
            await host.stream("n", "a").subscribe(again, name="x")
            await asyncio.sleep(60)
        events = [each for each in got.events + again.events if each.startswith("new")]
        assert {*events} == {*new()}

    virtual_time.run(main())


def test_consumer_resuming_long_after_reset_receives_all_new_events_and_reset_gap() -> None:
    """All other consumers have passed the reset by then, but the stored position of this one has not."""

    async def main() -> None:
        stores, others = memory_stores(), Collector()

        def hosted(log: Log) -> StreamProvider:
            made = provider(log, stores)
            made.implicit("all", "n/*", lambda _: others)
            return made

        async with hosted(Log(is_reset=False, epoch=BEGUN)) as host:
            made = await host.stream("n", "a").subscribe(Collector(), start=150)
            await until(lambda: len(others.events) == BEFORE)
        async with hosted(Log(is_reset=True, epoch=FORCED, late=AFTER)) as host:
            await until(lambda: others.events[-1] == new()[-1])
            await asyncio.sleep(5)
        async with hosted(Log(is_reset=True, epoch=FORCED, late=AFTER)) as host:
            got = Collector(last=SequenceToken(BEFORE - 1))
            (handle,) = [
                each for each, record in await host.stream("n", "a").subscriptions() if each.id == made.id
            ]
            await handle.resume(got)
            await until(lambda: new()[-1] in got.events)
        assert got.events == new()
        assert [(gap.resumed, gap.is_reset) for gap in got.gaps] == [(SequenceToken(AT), True)]

    virtual_time.run(main())


def test_stream_returning_later_after_reset_receives_reset_gap() -> None:
    async def main() -> None:
        stores, got = memory_stores(), dict[str, Collector]()

        def hosted(log: Log) -> StreamProvider:
            made = provider(log, stores)
            got.clear()
            made.implicit("all", "n/*", lambda stream: got.setdefault(stream.key, Collector()))
            return made

        async with hosted(Log(is_reset=False, epoch=BEGUN)):
            await until(lambda: sum(len(each.events) for each in got.values()) == BEFORE)
        async with hosted(Log(is_reset=True, epoch=FORCED, late=AFTER - 50)):
            await until(lambda: "b" in got and new()[-1] in got["b"].events)
        assert got["b"].events == new(AFTER - 50)
        for each in got.values():
            assert [(gap.resumed, gap.is_reset) for gap in each.gaps] == [(SequenceToken(AT), True)]

    virtual_time.run(main())
