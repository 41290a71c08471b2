"""Back-pressure: slow or hanging consumers, full caches, catch-up limits and stuck calls."""

import asyncio
import math
from typing import Any

from stream_consumers import Collector, until

from rt.streams.core.metrics import STUCK_CALLS_MAX
from rt.streams.core.stream_id import QueueId, StartPosition, StreamId
from rt.streams.delivery.options import StreamOptions
from rt.streams.provider import StreamProvider
from rt.streams.queue.generator import GeneratorQueues
from rt.streams.queue.memory import MemoryQueues
from rt.streams.simulate import virtual_time

EARLIEST = StartPosition.EARLIEST_AVAILABLE


def one(_: QueueId, number: int) -> tuple[StreamId, Any]:
    return StreamId("n", "one"), number


def agent_of(provider: StreamProvider) -> Any:
    assert provider._manager is not None
    (agent,) = provider._manager.agents()
    return agent


def test_slow_consumer_does_not_slow_99_fast_consumers() -> None:
    """1,000 events a second for 3 s, a cache of 1,000, and a consumer that needs 10 s for a batch of 200."""

    async def main() -> None:
        queues = GeneratorQueues(one, events=3000, rate_per_s=1000)
        options = StreamOptions(cache_events=1000, batch_events_max=200, save_every_s=5)
        async with StreamProvider("p", queues, options=options) as provider:
            stream = provider.stream("n", "one")
            fast = [Collector() for _ in range(99)]
            slow = Collector(slow_s=10)
            for consumer in [*fast, slow]:
                await stream.subscribe(consumer, start=EARLIEST)
            most = 0
            while any(len(consumer.events) < 3000 for consumer in fast):
                agent = agent_of(provider)
                most = max(most, agent.queue.cache.events)
                await asyncio.sleep(0.5)
            assert asyncio.get_running_loop().time() < 5
            assert most <= 1000
            assert provider.status()[0].behind == 1
            assert len(slow.events) <= 200
            await until(lambda: len(slow.events) == 3000, 1e6)
            assert slow.events == list(range(3000))
            assert all(consumer.events == slow.events for consumer in fast)
            assert provider.status()[0].behind == 0

    virtual_time.run(main())


def test_agent_reads_at_consumer_rate_if_all_consumers_are_slow() -> None:
    async def main() -> None:
        queues = GeneratorQueues(one, events=None)
        options = StreamOptions(cache_events=100, batch_events_max=10)
        async with StreamProvider("p", queues, options=options) as provider:
            got = Collector(slow_s=1)
            await provider.stream("n", "one").subscribe(got, start=EARLIEST)
            await asyncio.sleep(100.5)
            assert len(got.events) in range(990, 1011)
            agent = agent_of(provider)
            assert agent.queue.cache.events <= 100
            assert agent.queue.cache.end.sequence_number <= len(got.events) + 100
            (status,) = provider.status()
            assert (status.behind, status.slow) == (0, 1)
            assert status.pressure > 0.8
            assert agent.queue.counts.waits > 0

    virtual_time.run(main())


def test_memory_queue_waits_for_slowest_consumer() -> None:
    async def main() -> None:
        queues = MemoryQueues(1, events_max=10_000)
        options = StreamOptions(cache_events=100, batch_events_max=10)
        async with StreamProvider("p", queues, options=options) as provider:
            stream = provider.stream("n", "one")
            fast, slow = Collector(), Collector(slow_s=1)
            await stream.subscribe(fast)
            await stream.subscribe(slow)
            await stream.publish(list(range(2000)))
            await asyncio.sleep(50.5)
            assert len(slow.events) in range(490, 511)
            assert len(fast.events) <= len(slow.events) + 100
            await until(lambda: len(slow.events) == 2000)
            assert slow.events == fast.events == list(range(2000))
            await until(lambda: provider.status()[0].lag == 0)
            await asyncio.sleep(2)
            await stream.publish(list(range(9_990)))

    virtual_time.run(main())


def test_hanging_consumer_is_counted_in_status_and_does_not_stop_others() -> None:
    async def main() -> None:
        queues = GeneratorQueues(one, events=10_000, rate_per_s=1000)
        options = StreamOptions(cache_events=500, drain_s=5)
        async with StreamProvider("p", queues, options=options) as provider:
            stream = provider.stream("n", "one")
            forever = Collector(slow_s=1e9)
            got = [Collector() for _ in range(3)]
            for consumer in [forever, *got]:
                await stream.subscribe(consumer, start=EARLIEST)
            await until(lambda: all(len(consumer.events) == 10_000 for consumer in got), 20)
            assert provider.status()[0].behind == 1
            before = asyncio.get_running_loop().time()
        assert asyncio.get_running_loop().time() - before <= 6
        assert forever.events == []

    virtual_time.run(main())


def test_concurrent_catch_ups_are_limited_and_all_consumers_finish() -> None:
    opened = 0
    most = 0

    class Counted(GeneratorQueues):
        async def history(self, *arguments: Any) -> Any:
            nonlocal opened, most
            reader = await super().history(*arguments)
            opened += 1
            most = max(most, opened)
            close = reader.close

            async def closed() -> None:
                nonlocal opened
                opened -= 1
                await close()

            reader.close = closed  # type: ignore[method-assign]
            return reader

    async def main() -> None:
        options = StreamOptions(cache_events=50, catch_ups_max=2, catch_up_events=30)
        async with StreamProvider("p", Counted(one, events=1000), options=options) as provider:
            await asyncio.sleep(1)
            got = [Collector(slow_s=0.01 * number) for number in range(10)]
            for consumer in got:
                await provider.stream("n", "one").subscribe(consumer, start=EARLIEST)
            await until(lambda: all(consumer.events == list(range(1000)) for consumer in got))

    virtual_time.run(main())
    assert most == 2
    assert opened == 0


def test_stuck_call_is_reported_with_names_and_age() -> None:
    async def main() -> None:
        options = StreamOptions(drain_s=1, stuck_after_s=30, call_for_s=math.inf)
        async with StreamProvider("p", GeneratorQueues(one), options=options) as provider:
            stream = provider.stream("n", "one")
            await stream.subscribe(Collector(slow_s=100), start=EARLIEST, consumer="slow")
            await stream.subscribe(Collector(), start=EARLIEST)
            await asyncio.sleep(20)
            assert provider.status()[0].stuck == 0
            await asyncio.sleep(20)
            (status,) = provider.status()
            assert status.stuck == 1
            ((age_s, topic, subscription),) = status.stuck_calls
            assert 39 < age_s <= 40
            assert (topic, subscription) == ("n/one", "slow")
            assert 'stream="n/one",subscription="slow"} 4' in provider.metrics()
            await asyncio.sleep(100)
            assert provider.status()[0].stuck == 0
            assert "rt_streams_stuck_call_age_seconds{" not in provider.metrics()

    virtual_time.run(main())


def test_status_lists_oldest_stuck_calls_up_to_maximum() -> None:
    async def main() -> None:
        options = StreamOptions(drain_s=1, stuck_after_s=0.5, call_for_s=math.inf)
        async with StreamProvider("p", GeneratorQueues(one), options=options) as provider:
            stream = provider.stream("n", "one")
            for _ in range(30):
                await stream.subscribe(Collector(slow_s=1e6), start=EARLIEST)
                await asyncio.sleep(1)
            (status,) = provider.status()
            assert status.stuck == 30
            assert len(status.stuck_calls) == STUCK_CALLS_MAX
            ages = [call.age_s for call in status.stuck_calls]
            assert ages == sorted(ages, reverse=True)
            assert ages[0] > 29

    virtual_time.run(main())


def test_call_never_counts_as_stuck_with_infinite_stuck_limit() -> None:
    async def main() -> None:
        options = StreamOptions(drain_s=1, stuck_after_s=math.inf, call_for_s=math.inf)
        async with StreamProvider("p", GeneratorQueues(one), options=options) as provider:
            await provider.stream("n", "one").subscribe(Collector(slow_s=1e6), start=EARLIEST)
            await asyncio.sleep(1e4)
            assert provider.status()[0].stuck == 0

    virtual_time.run(main())
