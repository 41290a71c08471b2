"""Hosts that share queues by leases, in virtual time: without faults no event is delivered twice."""

import asyncio
from typing import Any

from memory_leases import LeaseTable, MemoryLeases
from stream_consumers import Collector, until

from rt.streams import (
    GeneratorQueues,
    LeaseBalancer,
    QueueId,
    StreamId,
    StreamOptions,
    StreamProvider,
    memory_stores,
)
from rt.streams.balancer.balancers import LeaseTimes
from rt.streams.simulate import virtual_time

EVENTS = 400
TIMES = LeaseTimes(lease_s=6.0, look_s=0.5, give_up_s=5.0)


def two_streams(queue: QueueId, number: int) -> tuple[StreamId, Any]:
    return StreamId("n", f"{queue}.{number % 2}"), number


def test_each_event_is_delivered_once_while_hosts_join_and_leave() -> None:
    queues = GeneratorQueues(two_streams, 4, events=EVENTS, rate_per_s=10)
    stores, table = memory_stores(), LeaseTable()
    got: list[tuple[StreamId, Collector]] = []

    def make(stream: StreamId) -> Collector:
        got.append((stream, Collector(slow_s=0.2)))
        return got[-1][1]

    def host(name: str) -> StreamProvider:
        balancer = LeaseBalancer(MemoryLeases(table, name), times=TIMES)
        options = StreamOptions(cache_events=50, drain_s=3)
        provider = StreamProvider("p", queues, balancer=balancer, stores=stores, options=options, host=name)
        provider.implicit("all", "n/*", make)
        return provider

    def served(provider: StreamProvider) -> int:
        return sum(status.state == "served" for status in provider.status())

    def events() -> dict[StreamId, list[int]]:
        seen: dict[StreamId, list[int]] = {}
        for stream, consumer in got:
            seen.setdefault(stream, []).extend(consumer.events)
        return seen

    async def main() -> None:
        first, second, third = map(host, ("h1", "h2", "h3"))
        await first.start()
        await until(lambda: served(first) == 4)
        await asyncio.sleep(3)
        await second.start()
        await until(lambda: served(first) == served(second) == 2)
        await first.stop()
        await third.start()
        await until(lambda: served(second) == served(third) == 2)
        await until(lambda: sum(map(len, events().values())) >= 4 * EVENTS)
        await asyncio.sleep(5)
        for each in (second, third):
            await each.stop()

    virtual_time.run(main())
    for stream, numbers in events().items():
        assert numbers == list(range(int(stream.key[-1]), EVENTS, 2)), stream
    assert len(events()) == 8
