"""Named subscriptions, streams placed in other queues, and subscriptions right after the start."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from merged_logs import Feeds
from range_nodes import range_nodes
from stream_consumers import Collector

import rt
from rt.cli.streams.hosts import as_table, overview
from rt.errors import InvalidName, InvalidOption
from rt.log.scan.directory import merged_directory
from rt.streams import (
    MemoryQueues,
    SequenceToken,
    StartPosition,
    StreamMisplaced,
    StreamOptions,
    StreamProvider,
    directory_stores,
    memory_stores,
)
from rt.streams.cluster.cluster import Cluster
from rt.streams.cluster.cluster_queues import ClusterQueues
from rt.streams.core.event_batch import EventBatch
from rt.testing.merged import MergedLogBuilder

EARLIEST = StartPosition.EARLIEST_AVAILABLE
FAST = StreamOptions(save_every_s=0.05, receive_s=0.05, retry_min_s=0.01, retry_max_s=0.05)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(600):
        while not condition():
            await asyncio.sleep(0.01)


class Logs:
    """Two clusters without nodes."""

    def __init__(self, root: Path) -> None:
        self.clusters = {name: Cluster(name, str(root / name)) for name in ("east", "west")}
        self._publishers = {
            name: rt.Publisher(root / name, name, publisher_id="feed") for name in self.clusters
        }
        self._merged = {
            name: MergedLogBuilder(
                merged_directory(str(root / name), name), cluster_id=bytes(16), stream=name
            )
            for name in self.clusters
        }

    def publish(self, name: str, topic: str, values: list[bytes]) -> None:
        publisher = self._publishers[name]
        publisher.publish_many(values, topic=topic)
        publisher.flush()
        self._merged[name].merge_all([publisher.directory])
        self._merged[name].sync()

    def close(self) -> None:
        for each in [*self._merged.values(), *self._publishers.values()]:
            each.close()


@pytest.fixture
def logs(tmp_path: Path) -> Iterator[Logs]:
    made = Logs(tmp_path)
    yield made
    made.close()


def other(logs: Logs, topic: str) -> str:
    """Return the cluster other than the one to which the hash assigns the topic."""
    mapper = ClusterQueues(logs.clusters).mapper
    namespace, key = topic.split("/")
    placed = mapper.queue_for(rt.streams.StreamId(namespace, key)).name
    return "west" if placed == "east" else "east"


def test_subscription_to_stream_placed_in_another_queue_raises_stream_misplaced(logs: Logs) -> None:
    async def main() -> None:
        place = other(logs, "n/a")
        logs.publish(place, "n/a", [b"0"])
        provider = StreamProvider("p", ClusterQueues(logs.clusters), options=FAST)
        implicit = Collector()
        provider.implicit("all", "n/*", lambda _: implicit)
        async with provider:
            await until(lambda: implicit.events)
            with pytest.raises(StreamMisplaced, match=place):
                await provider.stream("n", "a").subscribe(Collector(), start=EARLIEST)
            metrics = provider.metrics()
        sample = (
            f'rt_streams_misplaced_streams_total{{provider="p",host="{provider.host}",queue="{place}"}} 1'
        )
        assert sample in metrics

    asyncio.run(main())


def test_subscription_from_earlier_placement_is_listed_and_can_be_unsubscribed(
    logs: Logs, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "stores").mkdir()
    stores = directory_stores(tmp_path / "stores")
    place = other(logs, "n/a")

    def provider(placement: dict[str, str]) -> StreamProvider:
        queues = ClusterQueues(logs.clusters, placement=placement)
        return StreamProvider("p", queues, stores=stores, options=FAST)

    async def main() -> None:
        for name in logs.clusters:
            logs.publish(name, "n/a" if name == place else "n/else", [b"0"])
        before = Collector(), Collector()
        async with provider({"n/*": place}) as host:
            stream = host.stream("n", "a")
            named = await stream.subscribe(before[0], start=EARLIEST, name="billing")
            await stream.subscribe(before[1], start=EARLIEST)
            await until(lambda: all(got.events for got in before))
        async with provider({}) as host:
            stream = host.stream("n", "a")
            await until(lambda: all(status.state == "served" for status in host.status()))
            new = await stream.subscribe(Collector(), start=EARLIEST, name="billing")
            found = await stream.subscriptions()
            assert {(handle.id, str(handle.queue)) for handle, _ in found} >= {(named.id, place)}
            assert [handle for handle, _ in found if handle.queue is None] == [new]
            assert len(found) == 3
            got = Collector()
            resumed = next(handle for handle, record in found if record.name is None)
            await resumed.resume(got, SequenceToken(0))
            await until(lambda: got.events)
            for handle, _ in found:
                if handle.queue is not None:
                    await handle.unsubscribe()
            assert [handle for handle, _ in await stream.subscriptions()] == [new]
            await new.unsubscribe()
            assert await stream.subscriptions() == []

    asyncio.run(main())
    assert "subscription_misplaced subscription=billing stream=n/a" in caplog.text


def test_placement_selects_queue_of_stream_and_rejects_unknown_queue(logs: Logs) -> None:
    async def main() -> None:
        place = other(logs, "n/a")
        logs.publish(place, "n/a", [b"0"])
        got = Collector()
        queues = ClusterQueues(logs.clusters, placement={"n/*": place})
        async with StreamProvider("p", queues, options=FAST) as provider:
            await provider.stream("n", "a").subscribe(got, start=EARLIEST)
            await until(lambda: got.events)
        assert got.events == [b"0"]

    asyncio.run(main())
    with pytest.raises(InvalidOption, match="does not exist"):
        ClusterQueues(logs.clusters, placement={"n/*": "north"})


def test_subscription_from_earlier_placement_does_not_block_stream_in_its_new_queue(
    logs: Logs,
) -> None:
    async def main() -> None:
        place, stores = other(logs, "n/a"), memory_stores()

        def provider(placement: dict[str, str]) -> StreamProvider:
            queues = ClusterQueues(logs.clusters, placement=placement)
            made = StreamProvider("p", queues, stores=stores, options=FAST)
            made.consumer("c", lambda _: Collector())
            return made

        async with provider({}) as before:
            await before.stream("n", "a").subscribe(Collector(), name="one", consumer="c")
        logs.publish(place, "n/a", [b"0"])
        got = Collector()
        async with provider({"n/*": place}) as after:
            await until(lambda: sum(each.consumers for each in after.status()) == 1)
            await after.stream("n", "a").subscribe(got, start=EARLIEST, name="one", consumer="c")
            await until(lambda: got.events)
        assert got.events == [b"0"]

    asyncio.run(main())


def test_events_of_subscribed_stream_in_another_queue_are_logged_as_error(
    logs: Logs, caplog: pytest.LogCaptureFixture
) -> None:
    def errors() -> list[str]:
        return [each.getMessage() for each in caplog.records if "stream_misplaced" in each.getMessage()]

    async def main() -> None:
        for name in logs.clusters:
            logs.publish(name, "n/else", [b"0"])
        async with StreamProvider("p", ClusterQueues(logs.clusters), options=FAST) as provider:
            await provider.stream("n", "a").subscribe(Collector(), start=EARLIEST)
            logs.publish(other(logs, "n/a"), "n/a", [b"1"])
            await until(errors)

    with caplog.at_level(logging.ERROR, "rt.streams"):
        asyncio.run(main())
    assert "stream=n/a" in errors()[0]


@pytest.mark.parametrize("has_nodes", [False, True])
def test_subscription_right_after_start_receives_only_new_events(tmp_path: Path, has_nodes: bool) -> None:
    feeds = Feeds(tmp_path, ["a"])
    feeds.publish("a", [b"old"] * 5000, "n/a", range(5000))
    feeds.merge()
    with range_nodes(tmp_path) as nodes:

        async def main() -> None:
            got = Collector()
            cluster = Cluster("s", feeds.path)
            if has_nodes:
                cluster = Cluster("s", str(tmp_path / "copy"), nodes.endpoints, rt.TLS(**nodes.files))
            async with StreamProvider("p", ClusterQueues({"q": cluster}), options=FAST) as provider:
                await provider.stream("n", "a").subscribe(got)
                feeds.publish("a", [b"new"], "n/a", [1])
                feeds.merge()
                await until(lambda: got.events)
            assert got.events == [b"new"]
            assert got.gaps == []

        asyncio.run(main())
    feeds.close()


def test_subscribing_by_name_at_each_start_keeps_one_subscription(logs: Logs, tmp_path: Path) -> None:
    (tmp_path / "stores").mkdir()
    place = ClusterQueues(logs.clusters).mapper.queue_for(rt.streams.StreamId("n", "a")).name
    logs.publish(place, "n/a", [b"%d" % number for number in range(5)])

    async def once(got: Collector, wanted: bytes, *, consumer: str | None = None) -> str:
        stores = directory_stores(tmp_path / "stores")
        async with StreamProvider("p", ClusterQueues(logs.clusters), stores=stores, options=FAST) as provider:
            stream = provider.stream("n", "a")
            made = await stream.subscribe(got, start=EARLIEST, consumer=consumer, name="billing")
            await until(lambda: wanted in got.events)
            ((handle, record),) = await stream.subscriptions()
            assert handle == made
            assert (record.name, record.consumer, record.fault) == ("billing", consumer, None)
            return made.id

    async def main() -> None:
        first, second, third = Collector(), Collector(), Collector()
        made = await once(first, b"4")
        logs.publish(place, "n/a", [b"5"])
        assert await once(second, b"5") == made
        logs.publish(place, "n/a", [b"6"])
        assert await once(third, b"6", consumer="factory") == made
        assert (first.events[-1], second.events, third.events) == (b"4", [b"5"], [b"6"])

    asyncio.run(main())


def test_subscribe_with_same_name_returns_same_subscription_until_unsubscribed() -> None:
    async def fail(_: EventBatch) -> Any:
        raise ValueError("poison")

    async def main() -> None:
        bad, good, fresh = Collector(act=fail), Collector(), Collector()
        options = StreamOptions(deliver_for_s=0, on_poison="fault", save_every_s=0.05)
        async with StreamProvider("p", MemoryQueues(1), options=options) as provider:
            stream = provider.stream("n", "a")
            made = await stream.subscribe(bad, name="one")
            await stream.publish([b"0"])
            await until(lambda: bad.closed)
            again, same = await asyncio.gather(
                stream.subscribe(Collector(), name="one"), stream.subscribe(good, name="one")
            )
            assert made == again == same
            assert len(await stream.subscriptions()) == 1
            assert await stream.subscribe(Collector(), name="two") != made
            assert await provider.stream("n", "b").subscribe(Collector(), name="one") != made
            await made.unsubscribe()
            await stream.publish([b"1"])
            await stream.subscribe(fresh, name="one")
            await stream.publish([b"2"])
            await until(lambda: fresh.events)
            assert fresh.events == [b"2"]
            with pytest.raises(InvalidName):
                await stream.subscribe(Collector(), name="a b")

    asyncio.run(main())


def test_explicit_subscriptions_are_listed_with_name_state_and_lag() -> None:
    async def main() -> None:
        stores = memory_stores()
        queues = MemoryQueues(1)
        got = Collector()
        async with StreamProvider("p", queues, stores=stores, options=FAST) as provider:
            stream = provider.stream("n", "a")
            await stream.subscribe(got, name="billing")
            await stream.subscribe(Collector(), name="audit", consumer="writer")
            await stream.publish([b"0"])
            await until(lambda: got.events)
            await until(lambda: all(not one.lag for one in provider.status()[0].explicit))
            (row,) = overview([provider.metrics()])
            assert [(one.subscription, one.state, one.lag) for one in sorted(row.subscriptions)] == [
                ("audit", "served", 0),
                ("billing", "served", 0),
            ]
            assert "billing" in as_table([row])
        async with StreamProvider("p", queues, stores=stores, options=FAST) as provider:
            await until(lambda: provider.status()[0].unattended == 2)
            await provider.stream("n", "a").publish([b"1"])
            await until(lambda: [one.lag for one in provider.status()[0].explicit] == [1, 1])
            assert {one.state for one in provider.status()[0].explicit} == {"unattended"}

    asyncio.run(main())
