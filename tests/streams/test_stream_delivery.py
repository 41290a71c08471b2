"""What consumers receive after publish, subscribe and resume, in virtual time."""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import pytest
from stream_consumers import Collector, until

from rt.errors import Closed, InvalidOption, Overloaded
from rt.streams.core.delivery import PoisonPolicy
from rt.streams.core.errors import (
    ConsumerGone,
    DeliveryFailed,
    NoSuchSubscription,
    NotRewindable,
    NotWritable,
    StreamError,
    SubscriptionFaulted,
)
from rt.streams.core.event_batch import EventBatch
from rt.streams.core.stream_id import QueueId, SequenceToken, StartPosition, StreamId
from rt.streams.delivery.options import StreamOptions
from rt.streams.observer import DeadLetter
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


def in_memory(program: Callable[[StreamProvider], Awaitable[None]], **settings: Any) -> StreamProvider:
    """Run `program` with a provider of two queues in memory."""
    options = StreamOptions(**settings.pop("options", {}))
    provider = StreamProvider("p", MemoryQueues(2), options=options, **settings)

    async def main() -> None:
        async with provider:
            await program(provider)

    virtual_time.run(main())
    return provider


def generated(
    program: Callable[[StreamProvider], Awaitable[None]], queues: GeneratorQueues, **settings: Any
) -> None:
    options = StreamOptions(**settings.pop("options", {}))

    async def main() -> None:
        async with StreamProvider("p", queues, options=options, **settings) as provider:
            await program(provider)

    virtual_time.run(main())


def test_events_after_subscribe_are_delivered_in_order() -> None:
    async def program(provider: StreamProvider) -> None:
        stream, other = provider.stream("n", "a"), provider.stream("n", "b")
        await stream.publish(["before"])
        got, also = Collector(), Collector()
        await stream.subscribe(got)
        await stream.publish([1, 2])
        await other.publish(["b"])
        await other.subscribe(also)
        await stream.publish([3])
        await until(lambda: 3 in got.events)
        assert got.events[-3:] == [1, 2, 3]
        assert also.events in (["b"], [])

    in_memory(program)


def test_earliest_start_delivers_from_oldest_retained_event() -> None:
    async def program(provider: StreamProvider) -> None:
        stream, got = provider.stream("n", "a"), Collector()
        await stream.publish([1, 2])
        await asyncio.sleep(5)
        await stream.subscribe(got, start=EARLIEST)
        await stream.publish([3])
        await until(lambda: 3 in got.events)
        assert got.events == [1, 2, 3]

    in_memory(program)


def test_subscription_from_past_token_includes_its_event() -> None:
    async def program(provider: StreamProvider) -> None:
        got = Collector()
        await asyncio.sleep(1)
        await provider.stream("n", "one").subscribe(got, start=SequenceToken(40))
        await until(lambda: len(got.events) == 60)
        assert got.events == list(range(40, 100))
        assert got.tokens[0] == SequenceToken(40)

    generated(program, GeneratorQueues(one), options={"cache_events": 20})


def test_subscribe_at_deleted_position_raises_not_rewindable_if_queue_cannot_reread() -> None:
    async def program(provider: StreamProvider) -> None:
        stream = provider.stream("n", "a")
        for number in range(100):
            await stream.publish([number])
            await asyncio.sleep(0.01)
        await asyncio.sleep(2)
        with pytest.raises(NotRewindable, match="cannot be read again"):
            await stream.subscribe(Collector(), start=SequenceToken(3))
        got = Collector()
        await stream.subscribe(got, start=EARLIEST)
        await until(lambda: got.events)
        assert got.events[-1] == 99
        assert got.gaps == []

    in_memory(program, options={"cache_events": 20})


def test_unsubscribe_ends_subscription_and_is_idempotent() -> None:
    async def program(provider: StreamProvider) -> None:
        stream, got = provider.stream("n", "a"), Collector()
        subscription = await stream.subscribe(got)
        await stream.publish([1])
        await until(lambda: got.events == [1])
        await subscription.unsubscribe()
        await subscription.unsubscribe()
        await stream.publish([2])
        await asyncio.sleep(2)
        assert got.events == [1]
        assert got.closed == 1
        assert await stream.subscriptions() == []
        with pytest.raises(NoSuchSubscription):
            await subscription.resume(got)

    in_memory(program)


def test_observer_can_unsubscribe_itself_during_call() -> None:
    async def program(provider: StreamProvider) -> None:
        stream = provider.stream("n", "a")
        handles: list[Subscription] = []

        async def leave(_: EventBatch) -> None:
            await handles[0].unsubscribe()

        got = Collector(act=leave)
        handles.append(await stream.subscribe(got))
        before = asyncio.get_running_loop().time()
        await stream.publish([1])
        await until(lambda: got.closed)
        assert asyncio.get_running_loop().time() - before < 2
        await stream.publish([2])
        await asyncio.sleep(3)
        assert got.events == [1]
        assert sum(status.lag for status in provider.status()) == 0
        assert await stream.subscriptions() == []

    in_memory(program)


def test_error_in_on_close_is_logged_without_delaying_other_consumers(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Stubborn(Collector):
        async def on_close(self) -> None:
            raise LookupError("no such file")

    async def program(provider: StreamProvider) -> None:
        stream, got = provider.stream("n", "a"), Collector()
        subscription = await stream.subscribe(Stubborn())
        await stream.subscribe(got)
        await subscription.unsubscribe()
        await stream.publish([1])
        await until(lambda: got.events == [1])

    in_memory(program)
    assert "consumer_close_failed" in caplog.text
    assert "no such file" in caplog.text


def test_unsubscribe_of_implicit_subscription_raises_stream_error() -> None:
    async def program(provider: StreamProvider) -> None:
        provider.implicit("all", "n/*", lambda _: Collector())
        stream = provider.stream("n", "a")
        await stream.publish([1])
        await asyncio.sleep(1)
        ((handle, record),) = await stream.subscriptions()
        assert record.pattern == "all"
        with pytest.raises(StreamError, match="while its pattern is registered"):
            await handle.unsubscribe()

    in_memory(program)


def test_resume_with_new_observer_continues_where_previous_observer_stopped() -> None:
    async def program(provider: StreamProvider) -> None:
        stream, first, second = provider.stream("n", "a"), Collector(slow_s=1), Collector()
        subscription = await stream.subscribe(first)
        await stream.publish([1, 2])
        await asyncio.sleep(0.5)
        await stream.publish([3])
        await subscription.resume(second)
        assert first.events == [1, 2]
        await stream.publish([4])
        await until(lambda: 4 in second.events)
        assert second.events == [3, 4]
        assert [handle for handle, _ in await stream.subscriptions()] == [subscription]

    in_memory(program)


def test_resume_with_token_rewinds_subscription() -> None:
    async def program(provider: StreamProvider) -> None:
        first, second = Collector(), Collector()
        subscription = await provider.stream("n", "one").subscribe(first, start=EARLIEST)
        await until(lambda: len(first.events) == 100)
        await subscription.resume(second, SequenceToken(7))
        await until(lambda: len(second.events) == 93)
        assert second.events == list(range(7, 100))

    generated(program, GeneratorQueues(one), options={"cache_events": 20})


def test_consumer_with_stored_token_receives_only_later_events() -> None:
    async def program(provider: StreamProvider) -> None:
        behind, ahead = Collector(last=SequenceToken(10)), Collector(last=SequenceToken(90))
        stream = provider.stream("n", "one")
        await asyncio.sleep(1)
        await stream.subscribe(behind)
        await stream.subscribe(ahead, start=EARLIEST)
        await until(lambda: len(behind.events) == 89 and len(ahead.events) == 9)
        assert behind.events == list(range(11, 100))
        assert ahead.events == list(range(91, 100))

    generated(program, GeneratorQueues(one), options={"cache_events": 20})


def test_consumer_can_return_token_to_change_its_position() -> None:
    """The consumer goes back once, then skips forward."""
    answers = {SequenceToken(50): SequenceToken(9), SequenceToken(60): SequenceToken(79)}

    async def act(batch: EventBatch) -> SequenceToken | None:
        return answers.pop(batch.first, None)

    async def program(provider: StreamProvider) -> None:
        got = Collector(act=act)
        await provider.stream("n", "one").subscribe(got, start=EARLIEST)
        await until(lambda: 99 in got.events)
        assert got.events == [*range(50), *range(10, 60), *range(80, 100)]

    generated(program, GeneratorQueues(one), options={"batch_events_max": 10})


def test_consumer_returning_token_before_its_events_is_faulted() -> None:
    async def back(batch: EventBatch) -> SequenceToken | None:
        number = batch.first.sequence_number
        return SequenceToken(number - 1) if number == 5 and not got.errors else None

    got = Collector(act=back)

    async def program(provider: StreamProvider) -> None:
        await provider.stream("n", "one").subscribe(got, start=EARLIEST)
        await until(lambda: got.errors)
        assert isinstance(got.errors[0], SubscriptionFaulted)

    generated(program, GeneratorQueues(one), options={"batch_events_max": 1, "deliver_for_s": 3})


def refusing(bad: set[Any]) -> Callable[[EventBatch], Awaitable[None]]:
    async def act(batch: EventBatch) -> None:
        if found := bad.intersection(batch.events):
            raise ValueError(f"cannot take {found}")

    return act


def test_dead_letters_receive_only_poison_events() -> None:
    letters: list[DeadLetter] = []

    async def keep(letter: DeadLetter) -> None:
        letters.append(letter)
        if len(letters) == 1:
            raise OSError("no room for dead letters yet")

    async def program(provider: StreamProvider) -> None:
        got = Collector(act=refusing({13, 57}))
        await provider.stream("n", "one").subscribe(got, start=EARLIEST)
        await until(lambda: 99 in got.events)
        assert got.events == [number for number in range(100) if number not in {13, 57}]
        assert [letter.event for letter in letters] == [13, 13, 57]
        assert letters[0].token == SequenceToken(13)
        assert [type(error) for error in got.errors] == [DeliveryFailed, DeliveryFailed]
        assert isinstance(letters[0].error.__cause__, ValueError)
        (counts,) = [counts for _, counts in provider._manager.status()]  # type: ignore[union-attr]
        assert counts.dead_letters == 2

    options = {"deliver_for_s": 20, "on_poison": "dead-letter"}
    generated(program, GeneratorQueues(one), options=options, dead_letters=keep)


def test_faulted_subscription_keeps_position_without_delaying_others() -> None:
    async def program(provider: StreamProvider) -> None:
        stream = provider.stream("n", "one")
        bad, good = Collector(act=refusing({13})), Collector()
        subscription = await stream.subscribe(bad, start=EARLIEST)
        await stream.subscribe(good, start=EARLIEST)
        await until(lambda: len(good.events) == 100)
        await until(lambda: bad.errors)
        assert bad.events == list(range(13))
        assert isinstance(bad.errors[0], SubscriptionFaulted)
        assert bad.closed == 1
        records = dict(await stream.subscriptions())
        assert "cannot take {13}" in (records[subscription].fault or "")
        assert provider.status()[0].faulted == 1
        again = Collector()
        await subscription.resume(again)
        await until(lambda: len(again.events) == 87)
        assert again.events == list(range(13, 100))
        assert provider.status()[0].faulted == 0

    generated(program, GeneratorQueues(one), options={"cache_events": 20, "deliver_for_s": 5})


def test_consumer_is_retried_after_cancelled_error() -> None:
    cancels = 3

    async def act(_: EventBatch) -> None:
        nonlocal cancels
        if cancels:
            cancels -= 1
            raise asyncio.CancelledError

    async def program(provider: StreamProvider) -> None:
        got = Collector(act=act)
        await provider.stream("n", "one").subscribe(got, start=EARLIEST)
        await until(lambda: got.events == list(range(100)))

    generated(program, GeneratorQueues(one))


def test_block_policy_retries_event_until_accepted() -> None:
    bad = {13}

    async def program(provider: StreamProvider) -> None:
        got = Collector(act=refusing(bad))
        await provider.stream("n", "one").subscribe(got, start=EARLIEST)
        await asyncio.sleep(3600)
        assert got.events == list(range(13))
        assert provider.status()[0].failing == 1
        bad.clear()
        await until(lambda: len(got.events) == 100)
        assert got.errors == []
        assert provider.status()[0].failing == 0

    generated(program, GeneratorQueues(one), options={"on_poison": "block", "deliver_for_s": 1})


def test_consumer_can_end_its_subscription_by_raising_and_pins_no_events() -> None:
    async def leave(_: EventBatch) -> None:
        raise ConsumerGone("enough")

    async def program(provider: StreamProvider) -> None:
        stream, got = provider.stream("n", "a"), Collector(act=leave)
        await stream.subscribe(got)
        for number in range(100):
            await stream.publish([number])
        await until(lambda: got.closed == 1)
        await until(lambda: sum(status.lag for status in provider.status()) == 0)
        assert await stream.subscriptions() == []

    in_memory(program, options={"cache_events": 20})


def test_implicit_subscriptions_receive_all_events_of_matching_streams() -> None:
    found: dict[StreamId, Collector] = {}

    def make(stream: StreamId) -> Collector:
        return found.setdefault(stream, Collector())

    async def program(provider: StreamProvider) -> None:
        for key in ("a", "b"):
            await provider.stream("trades", key).publish([f"{key}1", f"{key}2"])
            await provider.stream("quotes", key).publish(["no"])
        await until(lambda: sum(len(got.events) for got in found.values()) == 4)
        assert {str(stream): got.events for stream, got in found.items()} == {
            "trades/a": ["a1", "a2"],
            "trades/b": ["b1", "b2"],
        }

    provider = StreamProvider("p", MemoryQueues(2))
    provider.implicit("all-trades", "trades/*", make)

    async def main() -> None:
        async with provider:
            await program(provider)

    virtual_time.run(main())


def test_stream_delivers_to_both_explicit_and_implicit_subscriptions() -> None:
    implicit, explicit = Collector(), Collector()

    async def program(provider: StreamProvider) -> None:
        provider.implicit("all", "n/*", lambda _: implicit)
        await provider.stream("n", "a").subscribe(explicit)
        await provider.stream("n", "a").publish([1])
        await until(lambda: implicit.events == explicit.events == [1])

    in_memory(program)


def test_pattern_registered_late_receives_only_later_events() -> None:
    got = Collector()

    async def program(provider: StreamProvider) -> None:
        stream = provider.stream("n", "a")
        await stream.publish([1])
        await asyncio.sleep(1)
        provider.implicit("late", "n/*", lambda _: got)
        await stream.publish([2])
        await until(lambda: got.events)
        assert got.events == [2]

    in_memory(program)


@pytest.mark.parametrize("on_poison", [None, "fault"])
def test_failing_factory_is_called_again_without_delaying_other_streams(
    on_poison: PoisonPolicy | None,
) -> None:
    got, late = Collector(), Collector()
    is_down = True

    def make(stream: StreamId) -> Collector:
        if stream.key == "good":
            return got
        if is_down:
            raise ValueError("no such consumer")
        return late

    async def program(provider: StreamProvider) -> None:
        nonlocal is_down
        provider.implicit("some", "n/*", make, on_poison=on_poison)
        await provider.stream("n", "bad").publish([1])
        await provider.stream("n", "good").publish([2])
        await until(lambda: got.events == [2])
        if on_poison == "fault":
            await until(lambda: sum(status.faulted for status in provider.status()) == 1)
            return
        await asyncio.sleep(3600)
        assert sum(status.failing for status in provider.status()) == 1
        is_down = False
        await until(lambda: late.events == [1])
        assert sum(status.failing + status.faulted for status in provider.status()) == 0

    in_memory(program)


def test_consumer_of_idle_stream_is_evicted_and_returns_at_its_position() -> None:
    made: list[Collector] = []

    def make(_: StreamId) -> Collector:
        made.append(Collector())
        return made[-1]

    async def program(provider: StreamProvider) -> None:
        provider.implicit("all", "n/*", make)
        stream = provider.stream("n", "a")
        await stream.publish([1])
        await asyncio.sleep(100)
        assert made[0].closed == 1
        assert sum(status.consumers for status in provider.status()) == 0
        await stream.publish([2])
        await until(lambda: len(made) == 2 and made[1].events == [2])

    in_memory(program, options={"inactive_s": 50})


def test_full_memory_queue_raises_overloaded_and_stores_no_event_of_call() -> None:
    async def program() -> None:
        queues = MemoryQueues(1, events_max=10)
        (queue,) = queues.mapper.queues
        await queues.publish(queue, StreamId("n", "a"), list(range(8)))
        with pytest.raises(Overloaded, match="is full"):
            await queues.publish(queue, StreamId("n", "a"), [8, 9, 10])
        await queues.publish(queue, StreamId("n", "a"), [8, 9])

    virtual_time.run(program())


def test_gap_is_reported_before_events_after_it() -> None:
    class Gappy(GeneratorQueues):
        async def receiver(self, queue: QueueId, start: SequenceToken | None, *more: Any) -> Any:
            return _Gappy(await super().receiver(queue, start, *more))

    class _Gappy:
        def __init__(self, receiver: Any) -> None:
            self._receiver = receiver

        def __getattr__(self, name: str) -> Any:
            return getattr(self._receiver, name)

        async def receive(self, events_max: int, timeout: float) -> QueueRead | None:
            read = await self._receiver.receive(min(events_max, 10), timeout)
            if read is None or read.batches[0].first != SequenceToken(30):
                return read  # type: ignore[no-any-return]
            gap = QueueGap(SequenceToken(30), SequenceToken(35), "trimmed")
            return QueueRead([read.batches[0].slice(5)], read.end, [gap])

    async def program(provider: StreamProvider) -> None:
        seen: list[Any] = []

        class Order(Collector):
            async def on_gap(self, gap: Any) -> None:
                seen.extend([*self.events[len(seen) :], gap])

        got = Order()
        await provider.stream("n", "one").subscribe(got, start=EARLIEST)
        await until(lambda: 99 in got.events)
        assert seen[:-1] == list(range(30))
        assert (seen[-1].wanted, seen[-1].resumed) == (SequenceToken(30), SequenceToken(35))
        assert got.events == [*range(30), *range(35, 100)]

    generated(program, Gappy(one))


def test_invalid_options_and_calls_are_rejected() -> None:
    with pytest.raises(InvalidOption, match="unknown policy"):
        StreamProvider("p", MemoryQueues()).implicit(
            "all",
            "*",
            lambda _: Collector(),
            on_poison="skip",  # type: ignore[arg-type]
        )
    with pytest.raises(InvalidOption, match="unknown policy"):
        StreamOptions(on_poison="skip")  # type: ignore[arg-type]
    for bad in (
        {"cache_events": 9},
        {"save_every_s": 0},
        {"retry_max_s": 0.01},
        {"drain_s": float("nan")},
        {"receive_s": "1"},
        {"batch_events_max": 1.5},
        {"catch_ups_max": float("inf")},
        {"cache_bytes": "64"},
    ):
        with pytest.raises(InvalidOption, match=next(iter(bad))):
            StreamOptions(**bad)  # type: ignore[arg-type]

    async def program(provider: StreamProvider) -> None:
        with pytest.raises(NotWritable):
            await provider.stream("n", "one").publish([1])
        with pytest.raises(Closed, match="already started"):
            provider.consumer("late", lambda _: Collector())

    async def misused() -> None:
        provider = StreamProvider("p", MemoryQueues(1))
        with pytest.raises(Closed, match=r"the provider is not started .*`async with`"):
            await provider.stream("n", "a").publish([1])
        async with provider:
            with pytest.raises(Closed, match="cannot call start: the provider was already started"):
                await provider.start()
            with pytest.raises(Closed, match="cannot call start: the provider was already started"):
                await provider.__aenter__()
            # The failed starts did not close the running provider.
            await provider.stream("n", "a").publish([1])
        with pytest.raises(Closed, match="the provider is closed"):
            await provider.stream("n", "a").publish([1])
        with pytest.raises(Closed, match="cannot call consumer: the provider is closed"):
            provider.consumer("late", lambda _: Collector())

    virtual_time.run(misused())
    generated(program, GeneratorQueues(one))
    with pytest.raises(ValueError, match="already registered"):
        provider = StreamProvider("p", MemoryQueues())
        provider.consumer("c", lambda _: Collector())
        provider.consumer("c", lambda _: Collector())
    assert memory_stores()


@pytest.mark.parametrize("events", [b"12.50", "12.51", {"price": 12.5}, None, 5])
def test_publish_of_single_event_instead_of_series_is_rejected(events: Any) -> None:
    async def program(provider: StreamProvider) -> None:
        got = Collector()
        await provider.stream("n", "a").subscribe(got)
        with pytest.raises(InvalidOption, match="not a series of events"):
            await provider.stream("n", "a").publish(events)
        await provider.stream("n", "a").publish(event for event in ["a", "b"])
        await until(lambda: got.events == ["a", "b"])

    in_memory(program)


def test_invalid_factory_pattern_observer_or_time_is_rejected() -> None:
    provider = StreamProvider("p", MemoryQueues(1))
    for register in (partial(provider.implicit, "a", "n/*"), partial(provider.consumer, "a")):
        with pytest.raises(InvalidOption, match="not a factory of observers"):
            register(Collector())
    with pytest.raises(InvalidOption, match="not a pattern of topics"):
        provider.implicit("a", 5, lambda _: Collector())  # type: ignore[arg-type]

    async def program(provider: StreamProvider) -> None:
        stream = provider.stream("n", "a")
        for wrong in (None, Collector):
            with pytest.raises(InvalidOption, match="not an observer"):
                await stream.subscribe(wrong)  # type: ignore[arg-type]
        assert await stream.subscriptions() == []
        with pytest.raises(InvalidOption, match="not a time: got 5"):
            await stream.token_at(5)  # type: ignore[arg-type]

    in_memory(program)
