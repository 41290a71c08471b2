"""Failures of one consumer, token or call do not affect other consumers, in virtual time."""

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from stream_consumers import Collector, until

from rt.objects import CommitUnknown, MemoryStore
from rt.streams.cluster.cluster_events import ReadSizer
from rt.streams.core.errors import ConsumerGone, NoSuchSubscription, SubscriptionFaulted
from rt.streams.core.event_batch import EventBatch
from rt.streams.core.stream_id import (
    QueueId,
    SequenceToken,
    StartPosition,
    StreamId,
    checked_token,
)
from rt.streams.delivery.options import StreamOptions
from rt.streams.observer import StreamGap
from rt.streams.provider import StreamProvider
from rt.streams.queue.adapter import QueueGap, QueueRead
from rt.streams.queue.generator import GeneratorQueues
from rt.streams.queue.memory import MemoryQueues
from rt.streams.simulate import virtual_time
from rt.streams.stores import memory_stores
from rt.streams.stream import Subscription

EARLIEST = StartPosition.EARLIEST_AVAILABLE


def one(_: QueueId, number: int) -> tuple[StreamId, Any]:
    return StreamId("n", "one"), number


def run(program: Callable[[StreamProvider], Awaitable[None]], queues: Any, **chosen: Any) -> None:
    delay_s = chosen.pop("delay_s", 0.0)
    options = StreamOptions(**chosen.pop("options", {}))

    async def main() -> None:
        async with StreamProvider("p", queues, options=options, **chosen) as provider:
            await program(provider)

    virtual_time.run(main(), delay_s=lambda: delay_s)


def broken(provider: StreamProvider) -> int:
    assert provider._manager is not None
    return sum(counts.agent_failures for _, counts in provider._manager.status())


# Tokens


@given(st.lists(st.integers(0, 4), min_size=1, max_size=6), st.integers(0, 7), st.integers(0, 5))
def test_batch_place_of_returns_number_of_tokens_before_start(
    carried: list[int], number: int, index: int
) -> None:
    tokens = [SequenceToken(at, i) for at, count in enumerate(carried) for i in range(count)]
    if not tokens:
        return
    columns = list(zip(*tokens, strict=True))
    batch = EventBatch(StreamId("n", "a"), columns[0], [0] * len(tokens), columns[1])
    start = SequenceToken(number, index)
    assert batch.place_of(start) == sum(token < start for token in tokens)


@pytest.mark.parametrize("start", [-1, 5.5, SequenceToken(-1), SequenceToken(2**63), (3, 0), None])
def test_invalid_start_is_rejected_and_stores_no_subscription(start: Any) -> None:
    async def program(provider: StreamProvider) -> None:
        stream, got = provider.stream("n", "one"), Collector()
        with pytest.raises(ValueError, match="SequenceToken"):
            await stream.subscribe(Collector(), start=start)
        subscription = await stream.subscribe(got, start=EARLIEST)
        if start is not None:
            with pytest.raises(ValueError, match="SequenceToken"):
                await subscription.resume(Collector(), start)
        await until(lambda: len(got.events) == 100)
        assert len(await stream.subscriptions()) == 1
        assert broken(provider) == 0

    run(program, GeneratorQueues(one))


def test_token_of_other_integer_type_is_converted() -> None:
    class Seven:
        def __index__(self) -> int:
            return 7

    assert checked_token(SequenceToken(Seven())) == SequenceToken(7)  # type: ignore[arg-type]


@pytest.mark.parametrize("said", [5, SequenceToken(-1), "here", SequenceToken("x", 0)])  # type: ignore[arg-type]
def test_invalid_token_from_consumer_faults_only_its_subscription(said: Any) -> None:
    async def program(provider: StreamProvider) -> None:
        stream = provider.stream("n", "one")
        good, lost = Collector(), Collector(last=said)

        async def answer(_: EventBatch) -> Any:
            return said

        class Answering(Collector):
            async def on_batch(self, batch: EventBatch) -> Any:
                return said

        answering = Answering()
        for consumer in (lost, answering, good):
            await stream.subscribe(consumer, start=EARLIEST)
        await until(lambda: len(good.events) == 100 and lost.errors and answering.errors)
        assert isinstance(lost.errors[0], SubscriptionFaulted)
        assert broken(provider) == 0

    run(program, GeneratorQueues(one), options={"deliver_for_s": 5})


def test_read_sizer_requests_fewer_messages_if_each_carries_many_events() -> None:
    pace, events_max = ReadSizer(lambda value: [value] * 50), 1000
    asked = []
    for _ in range(12):
        messages = pace.messages(events_max)
        asked.append(messages)
        pace.brought(messages, 50 * messages, events_max)
    assert asked[:6] == [1, 2, 4, 8, 16, 20]
    assert asked[-1] == 20
    pace.brought(1, 10**6, events_max)
    assert pace.messages(events_max) == 1
    assert ReadSizer(None).messages(events_max) == 1000


def test_read_larger_than_cache_is_delivered_completely() -> None:
    class Crowded(GeneratorQueues):
        async def receiver(self, queue: QueueId, start: SequenceToken | None, *more: Any) -> Any:
            receiver = await super().receiver(queue, start, *more)
            receive = receiver.receive
            receiver.receive = lambda events_max, timeout: receive(events_max * 30, timeout)  # type: ignore[method-assign]
            return receiver

    async def program(provider: StreamProvider) -> None:
        got = Collector()
        await provider.stream("n", "one").subscribe(got, start=EARLIEST)
        await until(lambda: len(got.events) == 1000)
        assert got.events == list(range(1000))
        assert broken(provider) == 0

    run(program, Crowded(one, events=1000), options={"cache_events": 20})


# Catching up


class Unreadable(GeneratorQueues):
    """The history of one stream cannot be read while `is_broken`."""

    is_broken = True
    closed = 0

    async def history(self, queue: QueueId, stream: StreamId, start: SequenceToken) -> Any:
        reader = await super().history(queue, stream, start)
        read = reader.read

        async def reading(events_max: int) -> QueueRead:
            if self.is_broken:
                raise OSError("a segment is damaged")
            return await read(events_max)

        async def close() -> None:
            self.closed += 1
            raise OSError("cannot even be closed")

        reader.read, reader.close = reading, close  # type: ignore[method-assign]
        return reader


def test_history_read_error_is_retried_without_agent_failure() -> None:
    queues = Unreadable(one, events=1000)

    async def program(provider: StreamProvider) -> None:
        stream = provider.stream("n", "one")
        await asyncio.sleep(1)
        good, late = Collector(), Collector()
        await stream.subscribe(good)
        await stream.subscribe(late, start=SequenceToken(3))
        await asyncio.sleep(600)
        assert late.events == []
        assert provider.status()[0].failing == 1
        assert broken(provider) == 0
        queues.is_broken = False
        await until(lambda: len(late.events) == 997)
        assert late.errors == []
        assert provider.status()[0].failing == 0

    run(program, queues, options={"cache_events": 20})


@pytest.mark.parametrize("trouble", ["hangs", "raises", "hangs in its gap"])
def test_hanging_or_failing_catch_up_consumers_do_not_block_others(trouble: str) -> None:
    class Gappy(GeneratorQueues):
        open = 0

        async def history(self, queue: QueueId, stream: StreamId, start: SequenceToken) -> Any:
            reader = await super().history(queue, stream, start)
            self.open += 1
            is_open = True
            read = reader.read

            async def close() -> None:
                nonlocal is_open
                self.open -= is_open
                is_open = False

            async def reading(events_max: int) -> QueueRead:
                found = await read(events_max)
                gap = QueueGap(SequenceToken(3), SequenceToken(5), "trimmed")
                return QueueRead(found.batches, found.end, [gap] if start < SequenceToken(5) else ())

            reader.close, reader.read = close, reading  # type: ignore[method-assign]
            return reader

    queues = Gappy(one, events=1000)

    async def act(_: EventBatch) -> None:
        if trouble == "raises":
            raise ValueError("no")
        await asyncio.sleep(1e9)

    class Stuck(Collector):
        async def on_gap(self, gap: StreamGap) -> None:
            if trouble == "hangs in its gap":
                await asyncio.sleep(1e9)

    async def program(provider: StreamProvider) -> None:
        stream = provider.stream("n", "one")
        await asyncio.sleep(1)
        for _ in range(5):
            await stream.subscribe(Stuck(act=act), start=SequenceToken(3))
        good = [Collector() for _ in range(3)]
        for each in good:
            await stream.subscribe(each, start=SequenceToken(4))
        await until(lambda: all(len(each.events) == 996 for each in good), 60)
        assert queues.open <= 2

    options = {"cache_events": 20, "catch_ups_max": 2, "on_poison": "block", "drain_s": 1}
    run(program, queues, options=options)
    assert queues.open == 0


def test_queue_is_acknowledged_only_up_to_durable_position_of_catching_up_consumer() -> None:
    """A commit takes 2 s, while a consumer continues."""
    kept: list[int] = []
    acknowledged: list[int] = []

    class Store(MemoryStore):
        def begin(self, kind: Any) -> Any:
            writer = super().begin(kind)
            commit = writer.commit

            def committed() -> None:
                commit()
                rows = self.content()
                kept.append(min((json.loads(row)[0] for row in _places(rows)), default=10**6))

            writer.commit = committed  # type: ignore[method-assign]
            return writer

    class Told(GeneratorQueues):
        async def receiver(self, queue: QueueId, start: SequenceToken | None, *more: Any) -> Any:
            receiver = await super().receiver(queue, start, *more)

            async def acknowledge(low: SequenceToken) -> None:
                acknowledged.append(low.sequence_number)
                assert low.sequence_number <= kept[-1]

            receiver.acknowledge = acknowledge  # type: ignore[method-assign]
            return receiver

    async def program(provider: StreamProvider) -> None:
        await asyncio.sleep(5)
        slow = Collector(slow_s=0.3)
        await provider.stream("n", "one").subscribe(slow, start=SequenceToken(3))
        await until(lambda: len(slow.events) == 997)
        assert broken(provider) == 0
        assert acknowledged

    options = {"cache_events": 20, "batch_events_max": 10, "catch_up_events": 50}
    run(program, Told(one, events=1000), stores=lambda *_: Store(), options=options, delay_s=2.0)


def test_events_after_rewind_during_commit_are_not_acknowledged() -> None:
    told: list[int] = []
    asked_at: list[int] = []

    class Told(GeneratorQueues):
        async def receiver(self, queue: QueueId, start: SequenceToken | None, *more: Any) -> Any:
            receiver = await super().receiver(queue, start, *more)

            async def acknowledge(low: SequenceToken) -> None:
                told.append(low.sequence_number)

            receiver.acknowledge = acknowledge  # type: ignore[method-assign]
            return receiver

    async def program(provider: StreamProvider) -> None:
        stream = provider.stream("n", "one")
        subscription = await stream.subscribe(Collector(), start=EARLIEST)
        await asyncio.sleep(0.5)
        agent = await provider.agent_of(stream.id)
        await until(lambda: told[-1:] > [10])
        await until(lambda: agent._store._committing is not None and agent._saver._is_saving.locked())
        asked_at.append(len(told))
        await subscription.resume(Collector(slow_s=100), SequenceToken(3))
        await asyncio.sleep(20)
        assert all(each <= 3 for each in told[asked_at[0] :])

    run(program, Told(one, events=None, rate_per_s=10), options={"drain_s": 0}, delay_s=2.0)


def _places(rows: dict[str, dict[str, bytes]]) -> list[bytes]:
    (found,) = [value for name, value in rows.items() if "places" in name and "value" in name] or [{}]
    return list(found.values())


# Ends


class Endless(Collector):
    """Never ends, even if cancelled."""

    async def on_close(self) -> None:
        self.closed += 1
        while True:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(1e6)


def test_hanging_on_close_delays_neither_commits_nor_host_stop(
    caplog: pytest.LogCaptureFixture,
) -> None:
    made: list[Endless] = []

    def make(_: StreamId) -> Endless:
        made.append(Endless())
        return made[-1]

    async def main() -> None:
        queues = MemoryQueues(1)
        provider = StreamProvider("p", queues, options=StreamOptions(inactive_s=20))
        provider.implicit("all", "n/*", make)
        await provider.start()
        got = Collector()
        await provider.stream("m", "x").subscribe(got)
        await provider.stream("n", "a").publish([1])
        await until(lambda: made and made[0].closed)
        await provider.stream("m", "x").publish([2])
        await provider.stream("n", "b").publish([3])
        await until(lambda: got.events == [2])
        await asyncio.sleep(10)
        (queue,) = queues._queues.values()
        assert queue.start == queue.end
        before = asyncio.get_running_loop().time()
        await provider.stop()
        assert asyncio.get_running_loop().time() - before < 10
        assert made[1].closed == 1
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.get_coro().close()  # type: ignore[union-attr]

    virtual_time.run(main())
    assert "consumer_not_closed" in caplog.text


@pytest.mark.parametrize("act", ["unsubscribe", "resume"])
def test_cancelled_unsubscribe_or_resume_still_takes_effect(act: str) -> None:
    async def program(provider: StreamProvider) -> None:
        stream = provider.stream("n", "a")
        slow, after = Collector(slow_s=5), Collector()
        subscription = await stream.subscribe(slow)
        await stream.publish([1])
        await asyncio.sleep(1)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1):
                await (subscription.unsubscribe() if act == "unsubscribe" else subscription.resume(after))
        for number in range(200):
            await stream.publish([number])
            await asyncio.sleep(0.1)
        await until(lambda: provider.status()[0].lag == 0)
        assert slow.closed == 1
        if act == "unsubscribe":
            assert await stream.subscriptions() == []
        else:
            assert after.events[-1] == 199

    run(program, MemoryQueues(1), options={"cache_events": 20})


def test_subscription_unsubscribed_while_cache_is_full_stays_removed() -> None:
    """The agent evicts the subscription while `stop` waits for the subscription's last call."""
    stores = memory_stores()

    async def program(provider: StreamProvider) -> None:
        stream = provider.stream("n", "one")
        slow = Collector(slow_s=8)
        subscription = await stream.subscribe(slow, start=EARLIEST)
        for consumer in (Collector(), Collector(), Collector()):
            await stream.subscribe(consumer, start=EARLIEST)
        await asyncio.sleep(0.15)
        await subscription.unsubscribe()
        await asyncio.sleep(5)
        assert len(await stream.subscriptions()) == 3
        assert provider.status()[0].behind == 0

    options = {"cache_events": 20, "batch_events_max": 10}
    run(program, GeneratorQueues(one, events=None, rate_per_s=50), options=options, stores=stores)


def test_resume_raises_no_such_subscription_if_unsubscribed_meanwhile() -> None:
    async def program(provider: StreamProvider) -> None:
        stream = provider.stream("n", "a")
        slow, after = Collector(slow_s=5), Collector()
        subscription = await stream.subscribe(slow)
        await stream.publish([1])
        await asyncio.sleep(1)
        resuming = asyncio.ensure_future(subscription.resume(after))
        await asyncio.sleep(1)
        await subscription.unsubscribe()
        with pytest.raises(NoSuchSubscription, match="ended while"):
            await resuming
        await stream.publish([2])
        await asyncio.sleep(5)
        assert after.events == []
        assert await stream.subscriptions() == []

    run(program, MemoryQueues(1))


def test_last_of_two_concurrent_resumes_wins_and_only_its_observer_is_called() -> None:
    async def program(provider: StreamProvider) -> None:
        stream = provider.stream("n", "a")
        observers = [Collector(slow_s=5), Collector(), Collector()]
        subscription = await stream.subscribe(observers[0])
        await stream.publish([1])
        await asyncio.sleep(1)
        await asyncio.gather(*(subscription.resume(each) for each in observers[1:]))
        assert observers[0].events == [1]
        await stream.publish([2])
        await until(lambda: observers[2].events)
        assert [each.events for each in observers] == [[1], [], [2]]
        assert [each.closed for each in observers] == [1, 1, 0]

    run(program, MemoryQueues(1))


@pytest.mark.parametrize("then", ["returns", "raises", "is gone"])
def test_replaced_observer_cannot_change_subscription(then: str) -> None:
    stores = memory_stores()

    async def program(provider: StreamProvider) -> None:
        stream = provider.stream("n", "one")
        other = Collector(slow_s=1)
        handles: list[Subscription] = []

        async def act(_: EventBatch) -> None:
            await asyncio.gather(handles[0].resume(other, SequenceToken(5)))
            if then == "raises":
                raise ValueError("no")
            if then == "is gone":
                raise ConsumerGone("enough")

        handles.append(await stream.subscribe(Collector(act=act), start=SequenceToken(40)))
        await until(lambda: len(other.events) >= 20)
        await asyncio.sleep(2)
        ((_, record),) = await stream.subscriptions()
        assert record.fault is None
        agent = await provider.agent_of(stream.id)
        place = agent._store.place(record.id) or agent._store.low
        assert place is not None
        assert place <= other.tokens[-1].next
        await until(lambda: other.events == list(range(5, 100)))

    options = {"batch_events_max": 10, "deliver_for_s": 0, "cache_events": 20}
    run(program, GeneratorQueues(one), stores=stores, options=options)


def test_consumer_can_stop_its_own_host() -> None:
    async def main() -> None:
        provider = StreamProvider("p", MemoryQueues(1))

        async def act(_: EventBatch) -> None:
            await provider.stop()

        got = Collector(act=act)
        await provider.start()
        await provider.stream("n", "a").subscribe(got)
        await provider.stream("n", "a").publish([1])
        before = asyncio.get_running_loop().time()
        await until(lambda: got.closed)
        await provider.stop()
        assert asyncio.get_running_loop().time() - before < 5

    virtual_time.run(main())


def test_waiting_subscribe_fails_immediately_if_host_stops() -> None:
    class Shut(MemoryQueues):
        async def receiver(self, queue: QueueId, start: SequenceToken | None, *more: Any) -> Any:
            raise OSError("no queue")

    async def main() -> None:
        provider = StreamProvider("p", Shut(1))
        await provider.start()
        waiting = asyncio.ensure_future(provider.stream("n", "a").subscribe(Collector()))
        await asyncio.sleep(1)
        await provider.stop()
        await asyncio.wait([waiting], timeout=0.5)
        assert waiting.done()
        assert "closed" in str(waiting.exception())

    virtual_time.run(main())


# Gaps, patterns, stores


@pytest.mark.parametrize("policy", ["fault", "dead-letter"])
def test_gap_is_reported_again_if_on_gap_raises(policy: Any) -> None:
    async def keep(_: Any) -> None:
        return None

    told = 0

    class Deaf(Collector):
        async def on_gap(self, gap: StreamGap) -> None:
            nonlocal told
            told += 1
            if told < 4:
                raise OSError("no room to note a gap")
            await super().on_gap(gap)

    async def program(provider: StreamProvider) -> None:
        stream = provider.stream("n", "a")
        for number in range(100):
            await stream.publish([number])
            await asyncio.sleep(0.01)
        await asyncio.sleep(2)
        got, never = Deaf(last=SequenceToken(3)), Collector(last=SequenceToken(3))
        await stream.subscribe(got)
        await stream.publish(["behind"])
        await until(lambda: got.events)
        assert len(got.gaps) == 1
        assert told == 4

        async def on_gap(_: StreamGap) -> None:
            raise OSError("never")

        never.on_gap = on_gap  # type: ignore[method-assign]
        await stream.subscribe(never)
        await stream.publish(["later"])
        if policy == "fault":
            await until(lambda: never.errors)
            assert never.events == []
        else:
            await until(lambda: "later" in never.events)

    letters = {"dead_letters": keep} if policy == "dead-letter" else {}
    options = {"cache_events": 20, "on_poison": policy, "deliver_for_s": 5}
    run(program, MemoryQueues(1, first=0), options=options, **letters)


def test_subscription_of_removed_pattern_can_be_unsubscribed() -> None:
    stores = memory_stores()
    queues = GeneratorQueues(one, events=2000)

    async def main() -> None:
        options = StreamOptions(cache_events=20, drain_s=0)
        before = StreamProvider("p", queues, stores=stores, options=options)
        before.implicit("slow", "n/*", lambda _: Collector(slow_s=100))
        before.implicit("fast", "n/*", lambda _: Collector())
        before.implicit("fast-too", "n/*", lambda _: Collector())
        async with before:
            await until(lambda: before.status()[0].behind == 1)
            await asyncio.sleep(5)
        after = StreamProvider("p", queues, stores=stores, options=options)
        async with after:
            await until(lambda: after.status()[0].unattended == 1)
            ((handle, record),) = await after.stream("n", "one").subscriptions()
            assert record.pattern == "slow"
            await handle.unsubscribe()
            assert await after.stream("n", "one").subscriptions() == []
            assert after.status()[0].unattended == 0

    virtual_time.run(main())


@pytest.mark.parametrize("before", [None, 10**16])
def test_memory_queue_tokens_exceed_those_of_previous_process(before: int | None) -> None:
    """The store outlives the queues. The clock of the previous process may have been ahead."""
    stores = memory_stores()
    got: list[Collector] = []

    def make(_: StreamId) -> Collector:
        got.append(Collector())
        return got[-1]

    async def main() -> None:
        for first in (before, None):
            provider = StreamProvider("p", MemoryQueues(1, first=first), stores=stores)
            provider.implicit("all", "n/*", make)
            async with provider:
                await provider.stream("n", "a").publish([1, 2, 3])
                await until(lambda: got and got[-1].events == [1, 2, 3])
                await asyncio.sleep(2)
            await asyncio.sleep(1)
        assert len(got) == 2
        assert got[1].tokens[0] > got[0].tokens[-1]

    virtual_time.run(main())


def test_events_published_before_first_read_get_tokens_after_stored_position() -> None:
    async def main() -> None:
        queues = MemoryQueues(1, first=100)
        (queue,) = queues.mapper.queues
        await queues.publish(queue, StreamId("n", "a"), [1, 2])
        start = SequenceToken(500)
        receiver = await queues.receiver(queue, start)
        told = await receiver.receive(10, 1.0)
        read = await receiver.receive(10, 1.0)
        assert told is not None
        assert len(told.gaps) == 1
        assert read is not None
        assert told.gaps[0].wanted == start
        assert [(token > start, event) for token, event in read.batches[0]] == [(True, 1), (True, 2)]
        again = await queues.receiver(queue, read.batches[0].last)
        seen = await again.receive(10, 1.0)
        assert seen is not None
        assert list(seen.batches[0]) == list(read.batches[0])[1:]

    virtual_time.run(main())


def test_subscribe_with_unknown_commit_outcome_raises_and_store_is_reopened() -> None:
    """The commit may have happened. Then a second `subscribe` makes a second subscription, and the first one
    can be ended.
    """
    content: dict[str, Any] = {}
    is_failing = False

    class Store(MemoryStore):
        def __init__(self) -> None:
            super().__init__(content)
            self._is_dead = False

        def begin(self, kind: Any) -> Any:
            if self._is_dead:
                raise OSError("the store failed before")
            writer = super().begin(kind)
            commit = writer.commit

            def committed() -> None:
                commit()
                content.clear()
                content.update(self.content())
                if is_failing:
                    self._is_dead = True
                    raise CommitUnknown("half way")

            writer.commit = committed  # type: ignore[method-assign]
            return writer

    async def program(provider: StreamProvider) -> None:
        nonlocal is_failing
        stream, got = provider.stream("n", "a"), Collector()
        await stream.subscribe(got)
        is_failing = True
        refused = Collector()
        with pytest.raises(CommitUnknown):
            await stream.subscribe(refused)
        is_failing = False
        await until(lambda: broken(provider) == 1)
        await until(lambda: provider.status()[0].state == "served")
        await stream.publish([1])
        await until(lambda: got.events == [1])
        assert refused.events == []
        found = await stream.subscriptions()
        assert len(found) == 2
        assert provider.status()[0].unattended == 1

    run(program, MemoryQueues(1), stores=lambda *_: Store())


def test_idle_stream_evicted_from_memory_returns_without_gaps_or_duplicates() -> None:
    """One consumer lags behind the others, so that positions are stored separately."""
    got: dict[str, list[Collector]] = {}

    def make(stream: StreamId) -> Collector:
        got.setdefault(stream.key, []).append(Collector(slow_s=40 if stream.key == "slow" else 0))
        return got[stream.key][-1]

    async def main() -> None:
        options = StreamOptions(cache_events=20, inactive_s=10, save_every_s=1)
        provider = StreamProvider("p", MemoryQueues(1), options=options)
        provider.implicit("all", "n/*", make)
        async with provider:
            await provider.stream("n", "slow").publish([0])
            await provider.stream("n", "quick").publish([1])
            await asyncio.sleep(39.5)
            for number in range(30):
                await provider.stream("n", f"other-{number % 3}").publish([number])
            await asyncio.sleep(0.7)
            await provider.stream("n", "quick").publish([2])
            await asyncio.sleep(60)
        events = [event for each in got["quick"] for event in each.events]
        assert events == [1, 2]
        assert not any(each.gaps for each in got["quick"])

    virtual_time.run(main())
