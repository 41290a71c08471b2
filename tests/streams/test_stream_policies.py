"""Consumers that hang or fail: the time limit of a call, and the effect of each poison policy."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from stream_consumers import Collector, until

from rt.errors import InvalidOption, MessageTooLarge
from rt.streams import (
    DeadLetter,
    GeneratorQueues,
    MemoryQueues,
    QueueId,
    SequenceToken,
    StartPosition,
    StreamGap,
    StreamId,
    StreamOptions,
    StreamProvider,
    SubscriptionFaulted,
    memory_stores,
)
from rt.streams.core.delivery import PoisonPolicy
from rt.streams.core.event_batch import EventBatch
from rt.streams.dead_letters import decode_letter, stream_of_letters
from rt.streams.queue.adapter import HistoryReader, QueueGap, QueueRead
from rt.streams.simulate import virtual_time

EARLIEST = StartPosition.EARLIEST_AVAILABLE


def one(_: QueueId, number: int) -> tuple[StreamId, int]:
    return StreamId("n", "one"), number


def run(program: Callable[[StreamProvider], Awaitable[None]], queues: Any = None, **options: Any) -> None:
    async def main() -> None:
        settings = StreamOptions(drain_s=1, **options)
        async with StreamProvider("p", queues or MemoryQueues(1), options=settings) as provider:
            await program(provider)

    virtual_time.run(main())


def hanging_at(*events: Any) -> Callable[[EventBatch], Awaitable[None]]:
    async def act(batch: EventBatch) -> None:
        if not set(events).isdisjoint(batch.events):
            await asyncio.sleep(math.inf)

    return act


async def fail(_: EventBatch) -> None:
    raise OSError("down")


def test_hanging_call_is_ended_at_time_limit_and_handled_by_poison_policy() -> None:
    async def program(provider: StreamProvider) -> None:
        faulted, blocked = Collector(act=hanging_at(13)), Collector(act=hanging_at(13))
        stream = provider.stream("n", "one")
        await stream.subscribe(faulted, start=EARLIEST)
        await stream.subscribe(blocked, start=EARLIEST, name="blocked", on_poison="block")
        await until(lambda: faulted.errors)
        assert isinstance(faulted.errors[0], SubscriptionFaulted)
        assert faulted.events == list(range(13))
        await asyncio.sleep(3600)
        assert blocked.events == list(range(13))
        ((age_s, topic, name),) = provider.status()[0].stuck_calls
        assert (topic, name) == ("n/one", "blocked")
        assert age_s > 3600
        blocked.act = None
        await until(lambda: len(blocked.events) == 100)
        assert provider.status()[0].stuck == 0

    run(program, GeneratorQueues(one), call_for_s=20)


def test_slow_call_completes_with_infinite_time_limit() -> None:
    async def program(provider: StreamProvider) -> None:
        got = Collector(slow_s=3000)
        await provider.stream("n", "one").subscribe(got, start=EARLIEST)
        await until(lambda: len(got.events) == 100, 6000)
        assert got.errors == []
        assert got.batches == [100]

    run(program, GeneratorQueues(one), call_for_s=math.inf)


def test_consumer_slow_to_cancel_receives_each_event_once() -> None:
    async def stubborn(batch: EventBatch) -> None:
        if 0 in batch.events:
            try:
                await asyncio.sleep(math.inf)
            except asyncio.CancelledError:
                await asyncio.sleep(5)

    async def program(provider: StreamProvider) -> None:
        got, after = Collector(act=stubborn), Collector()
        await provider.stream("n", "one").subscribe(got, start=EARLIEST)
        await provider.stream("n", "one").subscribe(after, start=EARLIEST)
        await until(lambda: len(got.events) == 100)
        assert got.events == after.events == list(range(100))

    run(program, GeneratorQueues(one), call_for_s=20)


@pytest.mark.parametrize("hung", [1, 2, 5])
def test_hanging_consumers_do_not_starve_another_consumer(hung: int) -> None:
    async def program(provider: StreamProvider) -> None:
        stream = provider.stream("n", "one")
        stuck = [Collector(act=hanging_at(0)) for _ in range(hung)]
        free = Collector()
        for each in [*stuck, free]:
            await stream.subscribe(each, start=EARLIEST)
        await until(lambda: len(free.events) == 5000, 3600)
        assert free.events == list(range(5000))
        assert not any(each.events for each in stuck)

    run(program, GeneratorQueues(one, events=5000), cache_events=50, call_for_s=math.inf)


def test_new_stream_is_served_while_all_other_consumers_hang() -> None:
    def two(_: QueueId, number: int) -> tuple[StreamId, int]:
        return StreamId("n", "two" if number >= 4000 else "one"), number

    async def program(provider: StreamProvider) -> None:
        got = Collector()
        provider.implicit("all", "n/*", lambda of: got if of.key == "two" else Collector(act=hanging_at(0)))
        await until(lambda: len(got.events) == 1000, 1e5)

    run(program, GeneratorQueues(two, events=5000), cache_events=50, call_for_s=math.inf)


def test_implicit_subscription_survives_consumer_outage_and_explicit_one_faults() -> None:
    async def program(provider: StreamProvider) -> None:
        implicit = Collector(act=fail)
        explicit = Collector(act=fail)
        provider.implicit("all", "n/*", lambda _: implicit)
        await provider.stream("n", "a").subscribe(explicit)
        await provider.stream("n", "a").publish([1, 2, 3])
        await asyncio.sleep(2 * 3600)
        (status,) = provider.status()
        assert (status.failing, status.faulted) == (1, 1)
        assert [call.subscription for call in status.stuck_calls] == ["all"]
        implicit.act = None
        await until(lambda: implicit.events == [1, 2, 3])
        assert provider.status()[0].failing == 0

    run(program)


@pytest.mark.parametrize("by_factory", [False, True])
def test_subscription_poison_policy_overrides_provider_default(by_factory: bool) -> None:
    policies: tuple[PoisonPolicy, ...] = ("fault", "block", "dead-letter")
    letters: list[DeadLetter] = []

    async def keep(letter: DeadLetter) -> None:
        letters.append(letter)

    async def main() -> None:
        got = {policy: Collector(act=fail) for policy in policies}
        settings = StreamOptions(deliver_for_s=5, on_poison="block")
        provider = StreamProvider("p", MemoryQueues(1), options=settings, dead_letters=keep)
        for policy in policies:
            if by_factory:
                provider.implicit(policy, "n/*", lambda _, name=policy: got[name], on_poison=policy)
        async with provider:
            stream = provider.stream("n", "a")
            for policy in policies:
                if not by_factory:
                    await stream.subscribe(got[policy], name=policy, on_poison=policy)
            await stream.publish([b"x"])
            await asyncio.sleep(600)
            (status,) = provider.status()
            assert (status.faulted, status.failing) == (1, 1)
            assert got["fault"].closed
            assert [(one.subscription, one.event) for one in letters] == [("dead-letter", b"x")]

    virtual_time.run(main())


def test_event_too_large_for_dead_letter_is_truncated_and_subscription_continues() -> None:
    class Small(MemoryQueues):
        async def publish(self, queue: QueueId, stream: StreamId, events: Any) -> None:
            if stream.namespace == "dead-letters" and len(events[0]) > 200_000:
                raise MessageTooLarge("too large", got=len(events[0]))
            await super().publish(queue, stream, events)

    async def program(provider: StreamProvider) -> None:
        async def refuse(batch: EventBatch) -> None:
            if batch.events != [b"good"]:
                raise ValueError("bad")

        letters, names = Collector(), Collector(act=refuse)
        provider.implicit("letters", "dead-letters/*", lambda _: letters)
        await provider.stream("n", "a").subscribe(names, on_poison="dead-letter")
        large = bytes(range(256)) * 1000
        await provider.stream("n", "a").publish([large, {"text": "x" * 300_000}, b"small", b"good"])
        await until(lambda: names.events == [b"good"])
        first, second, third = map(decode_letter, letters.events)
        assert (first.event, first.cut) == (large[:65_536], len(large) - 65_536)
        assert (second.token.sequence_number, len(second.event), second.cut > 200_000) == (1, 65_536, True)
        assert (third.event, third.cut) == (b"small", 0)

    run(program, Small(1, first=0), deliver_for_s=1)


def test_dead_letter_stream_key_is_dash_if_namespace_is_empty_or_too_long() -> None:
    assert stream_of_letters(StreamId("n" * 1010, "a")).key == "n" * 1010
    assert stream_of_letters(StreamId("n" * 1020, "a")).key == stream_of_letters(StreamId("", "a")).key == "-"


def test_dead_letter_stream_records_subscription_event_position_and_reason() -> None:
    async def program(provider: StreamProvider) -> None:
        letters, names = Collector(), Collector(act=fail)
        provider.implicit("letters", "dead-letters/*", lambda _: letters)
        await provider.stream("n", "a").subscribe(names, name="billing", on_poison="dead-letter")
        await provider.stream("n", "a").publish([b"x", {"y": 1}])
        await until(lambda: len(letters.events) == 2)
        first, second = map(decode_letter, letters.events)
        assert (first.subscription, first.stream, first.event) == ("billing", StreamId("n", "a"), b"x")
        assert second.event == "{'y': 1}"
        assert second.token > first.token > SequenceToken(0)
        assert "OSError: down" in first.reason

    run(program, deliver_for_s=5)
    endless = b'{"subscription": "s", "namespace": "n", "key": "k", "position": 1e999, "index": 0}'
    for other in (b"{}", endless, b"[" * 100_000):
        with pytest.raises(ValueError, match="not a dead letter"):
            decode_letter(other)


def test_rejected_dead_letter_creates_no_further_dead_letter() -> None:
    async def program(provider: StreamProvider) -> None:
        rejecting, calls = Collector(act=fail), Collector(act=fail)
        provider.implicit("all", "*", lambda of: calls if of.namespace == "dead-letters" else rejecting)
        await provider.stream("n", "a").publish([b"x"])
        await asyncio.sleep(3600)
        (_, counts) = provider._manager.status()[0]  # type: ignore[union-attr]
        assert counts.dead_letters == 1
        assert provider.status()[0].failing == 1

    run(program, deliver_for_s=5, on_poison="dead-letter")


def test_dead_letter_policy_without_dead_letter_destination_raises_invalid_option() -> None:
    async def main() -> None:
        options = StreamOptions(on_poison="dead-letter")
        with pytest.raises(InvalidOption, match="no place for dead letters"):
            async with StreamProvider("p", GeneratorQueues(one), options=options):
                raise AssertionError
        provider = StreamProvider("p", GeneratorQueues(one))
        async with provider:
            with pytest.raises(InvalidOption, match="no place for dead letters"):
                await provider.stream("n", "one").subscribe(Collector(), on_poison="dead-letter")
            got = Collector()
            await provider.stream("n", "one").subscribe(got, start=EARLIEST)
            await until(lambda: len(got.events) == 100)

    virtual_time.run(main())


def test_failed_deliveries_are_logged_as_warnings_at_limited_rate(caplog: pytest.LogCaptureFixture) -> None:
    async def program(provider: StreamProvider) -> None:
        for number in range(50):
            provider.implicit(f"i{number}", "n/*", lambda _: Collector(act=fail))
        await provider.stream("n", "a").publish([1])
        await asyncio.sleep(100)
        (_, counts) = provider._manager.status()[0]  # type: ignore[union-attr]
        assert counts.failures > 500

    with caplog.at_level(logging.WARNING, "rt.streams"):
        run(program)
    found = [each for each in caplog.records if "delivery_failed" in each.getMessage()]
    assert 0 < len(found) <= 110
    assert {each.levelno for each in found} == {logging.WARNING}
    assert "OSError('down')" in found[0].getMessage()


class TrimmedHistory:
    """A history that starts at `kept`. Earlier events are reported as a gap."""

    def __init__(self, reader: HistoryReader, start: SequenceToken, kept: SequenceToken) -> None:
        self._reader = reader
        self._gap = QueueGap(start, kept, "trimmed") if start < kept else None

    async def read(self, events_max: int) -> QueueRead:
        read = await self._reader.read(events_max)
        gap, self._gap = self._gap, None
        return QueueRead(read.batches, read.end, [] if gap is None else [gap])

    async def close(self) -> None:
        await self._reader.close()


class TrimmedQueues(GeneratorQueues):
    """The history has no events before 100."""

    async def history(self, queue: QueueId, stream: StreamId, start: SequenceToken) -> Any:
        kept = SequenceToken(100)
        return TrimmedHistory(await super().history(queue, stream, max(start, kept)), start, kept)


@pytest.mark.parametrize("is_told_slowly", [False, True])
def test_gap_is_reported_once_to_each_failing_consumer_with_limited_catch_ups(
    is_told_slowly: bool,
) -> None:
    class Told(Collector):
        async def on_gap(self, gap: StreamGap) -> None:
            await super().on_gap(gap)
            await asyncio.sleep(3 if is_told_slowly else 0)

    async def program(provider: StreamProvider) -> None:
        first, failing = Collector(), [Told(act=fail) for _ in range(3)]
        provider.implicit("first", "n/*", lambda _: first)
        await until(lambda: len(first.events) == 300)
        for number, each in enumerate(failing):
            await provider.stream("n", "one").subscribe(each, start=SequenceToken(5), name=f"{number}")
        await until(lambda: all(each.errors for each in failing), 600)
        for each in failing:
            assert [(gap.wanted, gap.resumed) for gap in each.gaps] == [
                (SequenceToken(5), SequenceToken(100))
            ]

    run(program, TrimmedQueues(one, events=300), cache_events=20, catch_ups_max=1, deliver_for_s=5)


def test_pattern_registered_late_takes_over_its_unattended_subscription() -> None:
    async def main() -> None:
        stores, fast, again = memory_stores(), Collector(), Collector()
        options = StreamOptions(cache_events=20, drain_s=0)

        def provider() -> StreamProvider:
            return StreamProvider("p", GeneratorQueues(one, events=500), stores=stores, options=options)

        async with provider() as before:
            before.implicit("slow", "n/*", lambda _: Collector(act=hanging_at(0)))
            for name in ("fast", "other"):
                before.implicit(name, "n/*", lambda _: fast)
            await until(lambda: len(fast.events) == 1000, 3600)
        async with provider() as after:
            await until(lambda: after.status() and after.status()[0].unattended)
            after.implicit("slow", "n/*", lambda _: again)
            await until(lambda: len(again.events) == 500)
            assert after.status()[0].unattended == 0
        assert again.events == list(range(500))
        assert again.gaps == []

    virtual_time.run(main())
