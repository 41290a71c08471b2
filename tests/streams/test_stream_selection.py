"""Delivery options: filters, single events, batch size and delay, serializers, and topics of a host."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from merged_logs import Feeds
from stream_consumers import Collector, until

import rt
from rt.errors import InvalidOption
from rt.streams import (
    ConsumerGone,
    DeadLetter,
    EventObserver,
    GeneratorQueues,
    MemoryQueues,
    QueueId,
    SequenceToken,
    StreamError,
    StreamId,
    StreamOptions,
    StreamProvider,
    SubscriptionFaulted,
    memory_stores,
)
from rt.streams.cluster.cluster import Cluster
from rt.streams.cluster.cluster_queues import ClusterQueues
from rt.streams.core.delivery import PoisonPolicy
from rt.streams.core.event_batch import EventBatch
from rt.streams.core.event_selection import EventSelection
from rt.streams.simulate import virtual_time

ONE = StreamId("n", "one")


def one(_: QueueId, number: int) -> tuple[StreamId, int]:
    return ONE, number


def run(
    program: Callable[[StreamProvider], Awaitable[None]],
    queues: Any = None,
    *,
    letters: list[DeadLetter] | None = None,
    serializers: Any = None,
    **options: Any,
) -> None:
    async def keep(letter: DeadLetter) -> None:
        assert letters is not None
        letters.append(letter)

    async def main() -> None:
        provider = StreamProvider(
            "p",
            queues or MemoryQueues(1),
            options=StreamOptions(drain_s=1, **options),
            serializers=serializers,
            dead_letters=None if letters is None else keep,
        )
        async with provider:
            await program(provider)

    virtual_time.run(main())


class Single(EventObserver):
    """Stores its events. `act` may raise, wait or return a token."""

    def __init__(self, act: Callable[[Any], Awaitable[Any]] | None = None) -> None:
        self.got: list[tuple[Any, SequenceToken]] = []
        self.tried: list[Any] = []
        self.errors: list[StreamError] = []
        self.act = act

    async def on_event(self, event: Any, token: SequenceToken) -> SequenceToken | None:
        self.tried.append(event)
        answer = None if self.act is None else await self.act(event)
        if answer is None:
            self.got.append((event, token))
        return answer

    async def on_error(self, error: StreamError) -> None:
        self.errors.append(error)

    @property
    def events(self) -> list[Any]:
        return [event for event, _ in self.got]


# Filters


@pytest.mark.parametrize("cache_events", [20, 65_536])
def test_filter_passes_matching_events_and_position_moves_past_others(cache_events: int) -> None:
    async def program(provider: StreamProvider) -> None:
        stream = provider.stream("n", "one")
        some, none, every = Collector(), Collector(), Collector()
        await stream.subscribe(some, start="earliest", where=lambda number: number % 100 == 3)
        await stream.subscribe(none, start="earliest", where=lambda _: False)
        await stream.subscribe(every, start="earliest")
        await until(lambda: len(some.events) == 50)
        await until(lambda: len(every.events) == 5000)
        assert some.events == list(range(3, 5000, 100))
        assert some.tokens == [SequenceToken(number) for number in some.events]
        await until(lambda: provider.status()[0].lag == 0)
        assert not none.events
        assert every.events == list(range(5000))
        assert "rt_streams_filtered_total" in provider.metrics()
        assert provider._manager is not None
        ((_, counts),) = provider._manager.status()
        assert counts.filtered == 2 * 5000 - 50

    run(program, GeneratorQueues(one, events=5000), cache_events=cache_events)


def test_filtered_events_are_not_filtered_again_by_next_owner() -> None:
    async def main() -> None:
        stores, asked = memory_stores(), list[int]()

        def refuse(number: int) -> bool:
            asked.append(number)
            return False

        for _ in range(2):
            queues = GeneratorQueues(one, events=50)
            provider = StreamProvider("p", queues, stores=stores, options=StreamOptions(save_every_s=0.1))
            provider.implicit("all", "*", lambda _: Collector(), where=refuse)
            async with provider:
                await asyncio.sleep(5)
        assert asked == list(range(50))

    virtual_time.run(main())


@pytest.mark.parametrize("policy", ["dead-letter", "fault", "block"])
def test_filter_error_counts_as_failed_delivery_of_that_event(policy: PoisonPolicy) -> None:
    letters: list[DeadLetter] = []
    is_repaired = False

    def where(number: int) -> bool:
        if number == 13 and not is_repaired:
            raise LookupError("no 13")
        return number % 2 == 1

    async def program(provider: StreamProvider) -> None:
        nonlocal is_repaired
        got = Collector()
        subscription = await provider.stream("n", "one").subscribe(
            got, start="earliest", where=where, on_poison=policy, name="odd"
        )
        await asyncio.sleep(300)
        before = [1, 3, 5, 7, 9, 11]
        if policy == "dead-letter":
            assert got.events == [number for number in range(1, 40, 2) if number != 13]
            ((subscription_name, event, at),) = [
                (each.subscription, each.event, each.token.sequence_number) for each in letters
            ]
            assert (subscription_name, event, at) == ("odd", 13, 13)
            assert "LookupError: no 13" in str(letters[0].error)
            return
        assert got.events == before
        is_repaired = True
        if policy == "fault":
            assert isinstance(got.errors[0], SubscriptionFaulted)
            await subscription.resume(got)
        await until(lambda: got.events == list(range(1, 40, 2)))

    run(program, GeneratorQueues(one, events=40), letters=letters, deliver_for_s=10)


def test_filter_is_retried_after_base_exception_and_may_end_subscription() -> None:
    class Panic(BaseException):
        pass

    calls = 0

    def where(number: int) -> bool:
        nonlocal calls
        if number == 5:
            calls += 1
            if calls < 3:
                raise Panic
            raise ConsumerGone("that was the last one")
        return True

    async def program(provider: StreamProvider) -> None:
        got = Collector()
        stream = provider.stream("n", "one")
        await stream.subscribe(got, start="earliest", where=where)
        await until(lambda: got.closed)
        assert got.events == [0, 1, 2, 3, 4]
        assert await stream.subscriptions() == []

    run(program, GeneratorQueues(one))


# Single events


@pytest.mark.parametrize("cache_events", [20, 65_536])
def test_single_events_arrive_in_order_with_time_limit_per_event(cache_events: int) -> None:
    async def act(_: int) -> None:
        await asyncio.sleep(5)

    async def program(provider: StreamProvider) -> None:
        got, filtered = Single(act), Single()
        stream = provider.stream("n", "one")
        await stream.subscribe(got, start="earliest")
        await stream.subscribe(filtered, start="earliest", where=lambda number: number > 90)
        await until(lambda: len(got.got) == 100, 1000)
        assert got.got == [(number, SequenceToken(number)) for number in range(100)]
        assert got.tried == list(range(100))
        assert filtered.events == list(range(91, 100))

    run(program, GeneratorQueues(one), cache_events=cache_events, call_for_s=8)


def test_events_before_rejected_event_are_not_redelivered() -> None:
    async def reject(number: int) -> None:
        if number == 7:
            raise OSError("down")

    async def program(provider: StreamProvider) -> None:
        got = Single(reject)
        await provider.stream("n", "one").subscribe(got, start="earliest")
        await until(lambda: len(got.tried) > 11)
        assert got.tried[:12] == [*range(7), 7, 7, 7, 7, 7]
        got.act = None
        await until(lambda: got.events == list(range(100)))

    run(program, GeneratorQueues(one))


def test_factory_is_retried_after_errors_until_it_makes_single_event_observer() -> None:
    made: list[Single] = []

    def factory(_: StreamId) -> Single:
        made.append(Single())
        if len(made) < 3:
            raise OSError("not yet")
        return made[-1]

    async def program(provider: StreamProvider) -> None:
        provider.implicit("all", "n/*", factory)
        await until(lambda: made and made[-1].events == list(range(100)))
        assert provider._manager is not None
        (agent,) = provider._manager.agents()
        (consumer,) = agent._table.served.values()
        assert consumer.policy.batch_events == 1

    run(program, GeneratorQueues(one))


def test_single_event_observer_skips_events_by_returning_token() -> None:
    async def skip(number: int) -> SequenceToken | None:
        return SequenceToken(49) if number == 10 else None

    async def program(provider: StreamProvider) -> None:
        got = Single(skip)
        await provider.stream("n", "one").subscribe(got, start="earliest")
        await until(lambda: len(got.got) == 60)
        assert got.events == [*range(10), *range(50, 100)]

    run(program, GeneratorQueues(one))


# Batches


def test_batch_is_delivered_when_full_or_after_time_limit() -> None:
    async def program(provider: StreamProvider) -> None:
        got, times = Collector(), list[float]()

        async def act(_: EventBatch) -> None:
            times.append(asyncio.get_running_loop().time() - begun)

        got.act = act
        stream = provider.stream("n", "one")
        await stream.subscribe(got, batch_size=4, batch_within_s=10)
        begun = asyncio.get_running_loop().time()
        for number in range(6):
            await stream.publish([number])
            await asyncio.sleep(1)
        await asyncio.sleep(20)
        assert got.batches == [4, 2]
        assert times == [pytest.approx(3), pytest.approx(14)]
        await stream.publish(list(range(6, 15)))
        await asyncio.sleep(0.5)
        assert got.batches == [4, 2, 4, 4]
        await asyncio.sleep(10)
        assert got.batches == [4, 2, 4, 4, 1]
        assert got.events == list(range(15))

    run(program)


def test_partial_batch_is_delivered_early_if_cache_is_full() -> None:
    def two(_: QueueId, number: int) -> tuple[StreamId, int]:
        return StreamId("n", "rare" if number < 3 else "often"), number

    async def program(provider: StreamProvider) -> None:
        rare, often = Collector(), Collector()
        await provider.stream("n", "rare").subscribe(
            rare, start="earliest", batch_size=100, batch_within_s=10_000
        )
        await provider.stream("n", "often").subscribe(often, start="earliest")
        await until(lambda: len(often.events) == 997, 100)
        assert rare.events == [0, 1, 2]
        (status,) = provider.status()
        assert (status.behind, status.stuck) == (0, 0)

    run(program, GeneratorQueues(two, events=1000), cache_events=50)


def test_events_of_undelivered_partial_batch_are_delivered_by_next_owner() -> None:
    async def main() -> None:
        stores, got = memory_stores(), Collector()
        for within_s in (1000, 5):
            provider = StreamProvider("p", GeneratorQueues(one, events=5), stores=stores)
            provider.implicit("all", "*", lambda _: got, batch_size=10, batch_within_s=within_s)
            async with provider:
                await asyncio.sleep(20)
            if within_s == 1000:
                assert got.events == []
        assert (got.events, got.batches) == ([0, 1, 2, 3, 4], [5])

    virtual_time.run(main())


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**32))
def test_random_delivery_options_deliver_each_matching_event_once_in_order(seed: int) -> None:
    draw = random.Random(seed)
    modulus, size = draw.choice([1, 1, 2, 3, 50]), draw.choice([None, 1, 2, 5, 30])
    within_s = draw.choice([None, 0.5, 3.0])
    total, faults = 100, draw.choice([0.0, 0.1])
    refused: list[int] = []

    async def act(batch: EventBatch) -> SequenceToken | None:
        if draw.random() < 0.3:
            await asyncio.sleep(draw.random())
        if draw.random() < faults:
            raise OSError
        if len(batch) > 1 and draw.random() < 0.1:
            got.events += batch.events[:1]
            return batch.first
        return None

    def where(number: int) -> bool:
        if draw.random() < faults / 10:
            raise LookupError
        if number % modulus:
            refused.append(number)
        return number % modulus == 0

    got = Collector(act=act)

    async def program(provider: StreamProvider) -> None:
        await provider.stream("n", "one").subscribe(
            got,
            start="earliest",
            where=where if modulus > 1 else None,
            batch_size=size,
            batch_within_s=within_s,
            on_poison="block",
        )
        await until(lambda: len(got.events) == len(range(0, total, modulus)), 20_000)
        await asyncio.sleep(5)
        assert provider.status()[0].lag == 0

    rate = draw.choice([None, 5.0, 50.0])
    cache = draw.choice([20, 1000])
    queues = GeneratorQueues(one, events=total, rate_per_s=rate)
    run(program, queues, cache_events=cache, batch_events_max=20, retry_max_s=0.2)
    assert got.events == list(range(0, total, modulus))
    assert all(count <= (size or 20) for count in got.batches)


# Serializers


class Trade(msgspec.Struct):
    price: float
    size: int = 1


JSON = {"trades": rt.JsonSerializer(Trade)}


def test_events_are_encoded_and_decoded_by_serializer_of_their_namespace() -> None:
    async def program(provider: StreamProvider) -> None:
        trades, raw = Collector(), Collector()
        await provider.stream("trades", "AAPL").subscribe(trades, where=lambda trade: trade.size > 1)
        await provider.stream("other", "x").subscribe(raw)
        await provider.stream("trades", "AAPL").publish([Trade(1.5), Trade(2.5, 3)])
        await provider.stream("other", "x").publish([b"\x00"])
        await until(lambda: trades.events and raw.events)
        assert trades.events == [Trade(2.5, 3)]
        assert raw.events == [b"\x00"]
        with pytest.raises(TypeError):
            await provider.stream("trades", "AAPL").publish([Trade(1), object()])
        await asyncio.sleep(5)
        assert len(trades.events) == 1

    run(program, serializers=JSON)


@pytest.mark.parametrize("policy", ["dead-letter", "fault", "block"])
def test_undecodable_event_is_handled_by_poison_policy_without_retry(
    policy: PoisonPolicy,
) -> None:
    letters: list[DeadLetter] = []
    queues = MemoryQueues(1, first=0)

    async def program(provider: StreamProvider) -> None:
        got = Collector()
        stream = provider.stream("trades", "AAPL")
        await stream.subscribe(got, on_poison=policy, name="billing")
        (queue,) = queues.mapper.queues
        await queues.publish(queue, stream.id, [b'{"price":1.0}', b'{"price":"x"}', 7, b'{"price":2.0}'])
        await asyncio.sleep(20)  # Less than `deliver_for_s`. A retry could not succeed.
        (status,) = provider.status()
        if policy == "dead-letter":
            assert got.events == [Trade(1.0), Trade(2.0)]
            assert [(each.event, each.token.sequence_number) for each in letters] == [
                (b'{"price":"x"}', 1),
                (7, 2),
            ]
            assert "ValidationError" in str(letters[0].error)
            assert "no bytes" in str(letters[1].error)
        else:
            assert got.events == [Trade(1.0)]
            assert (status.faulted, status.failing) == ((1, 0) if policy == "fault" else (0, 1))

    run(program, queues, serializers=JSON, letters=letters)


def test_dead_letter_of_rejected_event_has_encoded_bytes_as_published() -> None:
    letters: list[DeadLetter] = []

    async def reject(_: EventBatch) -> None:
        raise OSError("down")

    async def program(provider: StreamProvider) -> None:
        stream = provider.stream("trades", "AAPL")
        await stream.subscribe(Collector(act=reject), on_poison="dead-letter")
        await stream.publish([Trade(1.5)])
        await until(lambda: letters)
        assert letters[0].event == b'{"price":1.5,"size":1}'

    run(program, serializers=JSON, letters=letters, deliver_for_s=1)


def test_serializer_for_dead_letters_raises_invalid_option() -> None:
    with pytest.raises(InvalidOption, match=r"format of their own.*Remove the serializer"):
        StreamProvider("p", MemoryQueues(1), serializers={"dead-letters": rt.JsonSerializer()})


# Options


async def _asynchronous(_: Any) -> bool:
    return True


@pytest.mark.parametrize(
    "options",
    [
        {"where": 3},
        {"where": _asynchronous},
        {"batch_size": 0},
        {"batch_size": 1.5},
        {"batch_within_s": 0},
        {"batch_within_s": float("nan")},
        {"on_poison": "ignore"},
    ],
)
def test_invalid_delivery_option_is_rejected_at_registration(options: dict[str, Any]) -> None:
    provider = StreamProvider("p", MemoryQueues(1))
    with pytest.raises(InvalidOption):
        provider.implicit("all", "*", lambda _: Collector(), **options)
    with pytest.raises(InvalidOption):
        provider.consumer("all", lambda _: Collector(), **options)


def test_named_subscription_uses_options_of_latest_subscribe_call() -> None:
    async def program(provider: StreamProvider) -> None:
        first, then = Collector(), Collector()
        stream = provider.stream("n", "one")
        await stream.subscribe(first, name="a", where=lambda number: number > 1)
        await stream.publish([1, 2])
        await until(lambda: first.events == [2])
        await stream.subscribe(then, name="a")
        await stream.publish([1, 3])
        await until(lambda: then.events == [1, 3])

    run(program)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=30), st.integers(1, 8), st.integers(0, 30))
def test_selection_in_two_parts_equals_selection_of_whole_batch(
    numbers: list[int], most: int, cut: int
) -> None:
    batch = EventBatch(ONE, range(len(numbers)), numbers, None, 64 * len(numbers))
    selection = EventSelection(lambda number: number / (number - 9) < -0.3, None)
    whole = selection.select(batch, most)
    parts = selection.select(batch.slice(0, max(1, cut)), most)
    rest = batch.from_token(parts.end)
    if rest is not None and parts.error is None and len(parts) < most:
        parts = parts.and_then(selection.select(rest, most - len(parts)))
    assert (parts.first, parts.examined) == (whole.first, whole.examined)
    assert batch.place_of(parts.end) == batch.place_of(whole.end) == whole.examined
    assert list(parts.originals) == list(whole.originals)
    assert (parts.batch is None) == (whole.batch is None)
    if parts.batch is not None and whole.batch is not None:
        assert list(parts.batch) == list(whole.batch)


# Topics


def test_host_reads_only_its_topics_and_position_moves_past_others(tmp_path: Path) -> None:
    feeds = Feeds(tmp_path, ["a"])
    for number in range(300):
        topic = ("trades/a", "quotes/a", "other")[number % 3]
        feeds.publish("a", [b"%d" % number], topic, [number])
    feeds.publish("a", [b"last"], "other", [300])
    feeds.merge()

    async def main() -> None:
        got, seen = Collector(), list[StreamId]()
        queues = ClusterQueues({"q": Cluster("s", feeds.path)}, topics=["trades/*", "dead-letters/*"])
        options = StreamOptions(receive_s=0.05, save_every_s=0.05)
        provider = StreamProvider("p", queues, options=options)
        provider.implicit("all", "*", lambda stream: seen.append(stream) or got)
        async with provider, asyncio.timeout(60):
            with pytest.raises(InvalidOption, match="not read"):
                await provider.stream("quotes", "a").subscribe(Collector())
            while len(got.events) < 100 or provider.status()[0].lag or provider.status()[0].low < 301:
                await asyncio.sleep(0.01)
        assert got.events == [b"%d" % number for number in range(0, 300, 3)]
        assert seen == [StreamId("trades", "a")]
        assert got.gaps == []

    asyncio.run(main())
    feeds.close()


@pytest.mark.parametrize("topics", ["trades/*", []])
def test_topics_that_are_string_or_empty_raise_invalid_option(topics: Any) -> None:
    with pytest.raises(InvalidOption, match="not patterns"):
        ClusterQueues({"q": Cluster("s", "path")}, topics=topics)
