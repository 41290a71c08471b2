"""Where explicit and implicit subscriptions start: the earliest or latest event, a position or a time."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from merged_logs import Feeds
from range_nodes import range_nodes
from stream_consumers import Collector

import rt
from rt.errors import Closed, InvalidOption
from rt.objects import MemoryStore
from rt.streams import (
    GeneratorQueues,
    MemoryQueues,
    NotRewindable,
    QueueId,
    SequenceToken,
    StreamId,
    StreamOptions,
    StreamProvider,
    memory_stores,
)
from rt.streams.cluster.cluster import Cluster
from rt.streams.cluster.cluster_queues import ClusterQueues
from rt.streams.core.event_batch import EventBatch
from rt.streams.queue.adapter import QueueGap
from rt.streams.simulate import virtual_time
from rt.streams.subscriptions.subscription_store import Stores, SubscriptionStore

KEYS = 4
EVENTS = 400
BEGUN = datetime(2026, 3, 1, 12, tzinfo=UTC)
BEGUN_NS = int(BEGUN.timestamp()) * 10**9


def spread(_: QueueId, number: int) -> tuple[StreamId, int]:
    return StreamId("n", str(number % KEYS)), number


def early_and_late(_: QueueId, number: int) -> tuple[StreamId, int]:
    """Streams of the first half have no events in the second."""
    return StreamId("early" if number < EVENTS // 2 else "late", str(number % KEYS)), number


async def until(condition: Callable[[], object], seconds: float = 600) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.1)


def made(
    queues: Any, stores: Stores, got: Collector, start: Any = None, *, name: str = "all", default: Any = None
) -> StreamProvider:
    settings = StreamOptions(cache_events=50, batch_events_max=7, save_every_s=0.5, start=default)
    provider = StreamProvider("p", queues, stores=stores, options=settings)
    provider.implicit(name, "*", lambda _: got, start=start)
    return provider


def once(events: range) -> dict[int, int]:
    return dict.fromkeys(events, 1)


@pytest.mark.parametrize("by_default", [False, True])
@pytest.mark.parametrize(
    ("start", "first"),
    [(None, 0), ("earliest", 0), ("latest", EVENTS), (150, 150), (SequenceToken(151), 151)],
)
def test_implicit_subscription_of_new_group_begins_at_configured_start(
    start: Any, first: int, by_default: bool
) -> None:
    async def main() -> None:
        stores, got = memory_stores(), Collector()
        own, default = (None, start) if by_default else (start, "latest" if start else None)
        first_time = GeneratorQueues(spread, events=EVENTS)
        async with made(first_time, stores, got, own, default=default):
            await asyncio.sleep(60)
        assert Counter(got.events) == once(range(first, EVENTS))
        assert got.gaps == []
        # A restart ignores the configured start: the subscription continues at its position.
        async with made(GeneratorQueues(spread, events=2 * EVENTS), stores, got, "earliest"):
            await asyncio.sleep(60)
        assert Counter(got.events) == once(range(first, 2 * EVENTS))

    virtual_time.run(main())


@pytest.mark.parametrize(
    ("start", "first"),
    [("earliest", 0), (90, 90), ("latest", EVENTS + 100), (None, EVENTS), (EVENTS + 9, EVENTS + 9)],
)
def test_new_implicit_subscription_of_known_group_begins_at_configured_start(start: Any, first: int) -> None:
    async def main() -> None:
        stores, old, new = memory_stores(), Collector(), Collector()
        async with made(GeneratorQueues(early_and_late, events=EVENTS), stores, old, name="old"):
            await until(lambda: len(old.events) == EVENTS)
        queues = GeneratorQueues(early_and_late, events=EVENTS + 100)
        provider = made(queues, stores, old, name="old")
        provider.implicit("new", "*", lambda _: new, start=start)
        async with provider:
            await asyncio.sleep(600)
            (status,) = provider.status()
            assert (status.behind, status.lag) == (0, 0)
        assert Counter(old.events) == once(range(EVENTS + 100))
        assert Counter(new.events) == once(range(first, EVENTS + 100))
        assert old.gaps == new.gaps == []

    virtual_time.run(main())


@pytest.mark.parametrize("at", range(1, 40, 3))
def test_revoked_queue_loses_no_events_while_new_subscription_reads_history(at: int) -> None:
    async def main() -> None:
        stores, old, new, explicit = memory_stores(), Collector(), Collector(), Collector()

        async def hang(batch: EventBatch) -> None:
            if 302 in range(batch.events[0], batch.events[-1] + 1):
                await asyncio.sleep(math.inf)

        lagging = Collector(act=hang)
        queues = GeneratorQueues(early_and_late, events=EVENTS)
        async with made(queues, stores, old, name="old") as provider:
            await provider.stream("late", "1").subscribe(explicit, start="earliest", consumer="one")
            await provider.stream("late", "2").subscribe(lagging, start="earliest", consumer="two")
            await until(lambda: len(old.events) == EVENTS and len(explicit.events) == 50)
            await until(lambda: lagging.events)
        assert len(lagging.events) < 50
        lagging.act = None

        def host(rate_per_s: float | None) -> StreamProvider:
            queues = GeneratorQueues(early_and_late, events=EVENTS + 40, rate_per_s=rate_per_s)
            again = made(queues, stores, old, name="old")
            again.implicit("new", "*", lambda _: new, start="earliest")
            again.consumer("one", lambda _: explicit)
            again.consumer("two", lambda _: lagging)
            return again

        async with host(20) as provider:
            await asyncio.sleep(at / 2)
            assert provider._manager is not None
            await provider._manager.revoke(provider._factory.mapper.queues[0])  # As after a lost lease.
        async with host(None):
            await until(lambda: set(new.events) == set(range(EVENTS + 40)))
            await until(lambda: set(old.events) == set(range(EVENTS + 40)))
            await until(lambda: len(set(explicit.events)) == len(set(lagging.events)) == 60)
        for key in range(KEYS):
            for half in (range(EVENTS // 2), range(EVENTS // 2, EVENTS + 40)):
                mine = [event for event in dict.fromkeys(new.events) if event in half and event % KEYS == key]
                assert mine == sorted(mine)

    virtual_time.run(main())


def test_memory_queue_starts_subscriptions_at_earliest_or_next_event_but_not_at_time() -> None:
    async def main() -> None:
        queues, everything, later = MemoryQueues(1), Collector(), Collector()
        await queues.publish(queues.mapper.queues[0], StreamId("n", "a"), [1, 2])
        provider = made(queues, memory_stores(), everything, "earliest")
        provider.implicit("later", "*", lambda _: later, start="latest")
        async with provider:
            await until(lambda: everything.events == [1, 2])
            await provider.stream("n", "a").publish([3])
            await until(lambda: everything.events == [1, 2, 3] and later.events == [3])
            assert everything.gaps == later.gaps == []
            with pytest.raises(NotRewindable):
                await provider.stream("n", "a").subscribe(Collector(), start=BEGUN)
            with pytest.raises(Closed, match=r"call implicit\(start=\.\.\.\): .*Register consumers before"):
                provider.implicit("more", "*", lambda _: later, start="latest")

    virtual_time.run(main())


@pytest.mark.parametrize("start", ["oldest", True, 1.5, datetime(2026, 1, 1), -1])  # noqa: DTZ001
def test_invalid_start_raises_invalid_option_at_call(start: Any) -> None:
    with pytest.raises(InvalidOption):
        StreamOptions(start=start)
    provider = StreamProvider("p", MemoryQueues(1))
    with pytest.raises(InvalidOption):
        provider.implicit("all", "*", lambda _: Collector(), start=start)


@pytest.mark.parametrize(("place", "after"), [(40, 40), (100, 50), (None, None)])
def test_forced_reset_moves_start_of_implicit_subscription_back(place: int | None, after: int | None) -> None:
    async def main() -> None:
        space = MemoryStore()
        store = SubscriptionStore(space, QueueId(0, "q"), 1)
        store.put_pattern("all", None if place is None else SequenceToken(place))
        assert store.furthest() == (None if place is None else SequenceToken(place))
        at = SequenceToken(50)
        store.go_back(QueueGap(at, at, "reset", is_reset=True))
        await store.commit()
        stored = SubscriptionStore(MemoryStore(space.content()), QueueId(0, "q"), 1)
        assert stored.knows_pattern("all")
        assert stored.pattern_place("all") == (None if after is None else SequenceToken(after))

    asyncio.run(main())


# Times


@pytest.fixture
def feeds(tmp_path: Path) -> Iterator[Feeds]:
    """300 events of n/a, one a second, in three segments."""
    feeds = Feeds(tmp_path, ["a"])
    for start in (0, 100, 200):
        if start:
            feeds.roll()
        numbers = range(start, start + 100)
        stamps = [BEGUN_NS + number * 10**9 for number in numbers]
        feeds.publish("a", [b"%d" % number for number in numbers], "n/a", stamps)
        feeds.merge()
    yield feeds
    feeds.close()


def values(first: int) -> list[bytes]:
    return [b"%d" % number for number in range(first, 300)]


@pytest.mark.parametrize("has_nodes", [False, True])
def test_subscription_starts_at_time_and_resumes_from_earlier_time(
    feeds: Feeds, tmp_path: Path, has_nodes: bool
) -> None:
    async def program(cluster: Cluster) -> None:
        got, implicit = Collector(), Collector()
        options = StreamOptions(receive_s=0.05, save_every_s=0.05)
        provider = StreamProvider("p", ClusterQueues({"q": cluster}), options=options)
        provider.implicit("since", "n/*", lambda _: implicit, start=BEGUN + timedelta(seconds=249.5))
        async with provider:
            stream = provider.stream("n", "a")
            subscription = await stream.subscribe(got, start=BEGUN + timedelta(seconds=120))
            await until(lambda: got.events == values(120) and implicit.events == values(250))
            again = Collector()
            await subscription.resume(again, BEGUN + timedelta(seconds=30))
            await until(lambda: again.events == values(30))
            assert await stream.token_at(BEGUN + timedelta(seconds=10)) == SequenceToken(10)
            assert await stream.token_at(BEGUN - timedelta(days=1)) == SequenceToken(0)
            assert await stream.token_at(BEGUN + timedelta(days=1)) == SequenceToken(300)
            late = Collector()
            await stream.subscribe(late, start=BEGUN + timedelta(days=1))
            feeds.publish("a", [b"new"], "n/a", [BEGUN_NS])
            feeds.merge()
            await until(lambda: late.events == [b"new"])
            assert got.gaps == implicit.gaps == again.gaps == late.gaps == []

    if not has_nodes:
        asyncio.run(program(Cluster("s", feeds.path)))
        return
    with range_nodes(tmp_path) as nodes:
        asyncio.run(program(Cluster("s", str(tmp_path / "copy"), nodes.endpoints, rt.TLS(**nodes.files))))
