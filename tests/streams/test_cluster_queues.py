"""Queues on cluster logs: read from local files, published to, read again, and trimmed."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from stream_consumers import Collector

import rt
from rt.errors import StorageFailed
from rt.log.disk import REAL
from rt.log.scan.catalog import read_catalog
from rt.log.scan.directory import merged_directory
from rt.streams import (
    NotWritable,
    SequenceToken,
    StartPosition,
    StreamId,
    StreamOptions,
    StreamProvider,
    directory_stores,
)
from rt.streams.cluster.cluster import Cluster
from rt.streams.cluster.cluster_events import UnreadableMessage, events_of
from rt.streams.cluster.cluster_queues import ClusterQueues
from rt.streams.core.stream_id import stream_of
from rt.testing.merged import MergedLogBuilder

EARLIEST = StartPosition.EARLIEST_AVAILABLE


class Log:
    """A cluster without nodes. Published messages are merged when the test calls for it."""

    def __init__(self, root: Path, stream: str = "s") -> None:
        self.root = root
        self.stream = stream
        self.publisher = rt.Publisher(root, stream, publisher_id="feed")
        directory = merged_directory(str(root), stream)
        self.merged = MergedLogBuilder(directory, cluster_id=bytes(16), stream=stream)

    def publish(self, *events: tuple[str, bytes]) -> None:
        for topic, value in events:
            self.publisher.publish(value, topic=topic)
        self.merge()

    def merge(self) -> None:
        self.publisher.flush()
        self.merged.merge_all([self.publisher.directory])
        self.merged.sync()

    def cluster(self, **settings: object) -> Cluster:
        return Cluster(self.stream, str(self.root), **settings)  # type: ignore[arg-type]

    def close(self) -> None:
        self.merged.close()
        self.publisher.close()


@pytest.fixture
def log(tmp_path: Path) -> object:
    made = Log(tmp_path / "log")
    yield made
    made.close()


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(120):
        while not condition():
            await asyncio.sleep(0.01)


def test_cluster_queue_maps_topics_to_streams_and_positions_to_tokens(log: Log, tmp_path: Path) -> None:
    async def main() -> None:
        log.publish(("n/a", b"0"), ("n/b", b"1"), ("n/a", b"2"), ("plain", b"3"))
        queues = ClusterQueues({"q": log.cluster(name="host")})
        a, b, late = Collector(), Collector(), Collector()
        (tmp_path / "stores").mkdir()
        async with StreamProvider("p", queues, stores=directory_stores(tmp_path / "stores")) as provider:
            await provider.stream("n", "a").subscribe(a, start=EARLIEST)
            provider.implicit("b", "n/b", lambda _: b)
            log.publish(("n/b", b"4"), ("n/a", b"5"))
            await until(lambda: len(a.events) == 3 and b.events[-1:] == [b"4"])
            assert a.events == [b"0", b"2", b"5"]
            assert a.tokens == [SequenceToken(0), SequenceToken(2), SequenceToken(5)]
            await provider.stream("n", "a").subscribe(late, start=SequenceToken(1))
            await until(lambda: len(late.events) == 2)
            assert late.events == [b"2", b"5"]
            with pytest.raises(NotWritable, match=r"read-only.*Give each Cluster a writer"):
                await provider.stream("n", "a").publish([b"x"])
        async with StreamProvider("p", queues, stores=directory_stores(tmp_path / "stores")) as provider:
            again = Collector()
            handles = await provider.stream("n", "a").subscriptions()
            log.publish(("n/a", b"6"))
            await handles[0][0].resume(again)
            await until(lambda: again.events)
            assert again.events == [b"6"]

    asyncio.run(main())


def test_trim_is_reported_as_gap_and_remaining_events_are_read_again(log: Log) -> None:
    log.publish(*[("n/a", b"%d" % number) for number in range(10)])
    log.merged.roll()
    log.publish(*[("n/a", b"%d" % number) for number in range(10, 20)])
    log.merged.trim(read_catalog(REAL, merged_directory(str(log.root), "s")).kept[-1].id)

    async def main() -> None:
        history, earliest = Collector(), Collector()
        async with StreamProvider("p", ClusterQueues({"q": log.cluster()})) as provider:
            stream = provider.stream("n", "a")
            await stream.subscribe(earliest, start=EARLIEST)
            await until(lambda: len(earliest.events) == 10)
            await stream.subscribe(history, start=SequenceToken(3))
            await until(lambda: len(history.events) == 10)
        assert history.events == earliest.events == [b"%d" % number for number in range(10, 20)]
        assert [(gap.wanted, gap.resumed) for gap in history.gaps] == [(SequenceToken(3), SequenceToken(10))]

    asyncio.run(main())


def test_concurrent_publish_calls_share_publisher_and_write_events_in_order(tmp_path: Path) -> None:
    made: list[rt.Publisher] = []

    def writer() -> rt.Publisher:
        made.append(rt.Publisher(tmp_path, "s", publisher_id="host"))
        return made[-1]

    async def main() -> None:
        queues = ClusterQueues({"q": Cluster("s", str(tmp_path), writer=writer)})
        (queue,) = queues.mapper.queues
        stream = StreamId("n", "a")
        await asyncio.gather(*(queues.publish(queue, stream, [b"%d" % number]) for number in range(20)))
        with pytest.raises(TypeError):
            await queues.publish(queue, stream, ["no bytes"])
        await queues.publish(queue, stream_of("plain"), [b"x", b"y"])
        await queues.close()

    asyncio.run(main())
    assert len(made) == 1
    with rt.LogReader(made[0].directory) as reader:
        messages = list(reader)
    assert [message.value for message in messages] == [b"%d" % number for number in range(20)] + [b"x", b"y"]
    assert {message.topic for message in messages} == {"n/a", "plain"}


def test_publish_calls_all_raise_storage_failed_if_publisher_cannot_be_opened(tmp_path: Path) -> None:
    def writer() -> rt.Publisher:
        raise StorageFailed("no disk")

    async def main() -> None:
        queues = ClusterQueues({"q": Cluster("s", str(tmp_path), writer=writer)})
        for _ in range(2):
            with pytest.raises(StorageFailed, match="no disk"):
                await queues.publish(queues.mapper.queues[0], StreamId("n", "a"), [b"x"])
        await queues.close()

    asyncio.run(main())


def test_publish_succeeds_again_after_thread_could_not_be_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def writer() -> rt.Publisher:
        return rt.Publisher(tmp_path, "s", publisher_id="host")

    async def refuse(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    async def main() -> None:
        queues = ClusterQueues({"q": Cluster("s", str(tmp_path), writer=writer)})
        (queue,), stream = queues.mapper.queues, StreamId("n", "a")
        with monkeypatch.context() as patch:
            patch.setattr(asyncio, "to_thread", refuse)
            async with asyncio.timeout(10):
                with pytest.raises(RuntimeError, match="new thread"):
                    await queues.publish(queue, stream, [b"x"])
        async with asyncio.timeout(10):
            await queues.publish(queue, stream, [b"y"])
        await queues.close()

    asyncio.run(main())


def test_message_is_split_into_events_and_undecodable_message_is_delivered_unreadable(log: Log) -> None:
    log.publish(("n/a", b"[1, 2]"), ("n/b", b"[3]"), ("n/a", b"no"), ("n/a", b"[]"))
    with rt.LogReader(merged_directory(str(log.root), "s")) as reader:
        read = [each for batch in reader.batches() for each in events_of(batch, {}, json.loads)]
    events = [(str(each.stream), token, event) for each in read for token, event in each]
    a = [(token, event) for stream, token, event in events if stream == "n/a"]
    assert a[:2] == [(SequenceToken(0), 1), (SequenceToken(0, 1), 2)]
    assert [type(event) for _, event in a[2:]] == [UnreadableMessage, UnreadableMessage]
    assert [token for token, _ in a[2:]] == [SequenceToken(2), SequenceToken(3)]

    async def main() -> None:
        got = Collector()
        async with StreamProvider("p", ClusterQueues({"q": log.cluster()}, split=json.loads)) as provider:
            await provider.stream("n", "a").subscribe(got, start=SequenceToken(0, 1))
            await until(lambda: len(got.events) == 3)
        assert got.events[0] == 2

    asyncio.run(main())


def test_batches_are_split_by_topic_in_order(log: Log) -> None:
    topics = ["n/a", "n/b", "", "n/a", "n/c", "n/b"]
    log.publisher.publish_many([b"first"] * 3, topic="n/a")
    for number in range(600):
        log.publisher.publish(b"%d" % number, topic=topics[number % 6])
    log.merge()
    wanted: dict[str, list[tuple[int, bytes]]] = {}
    found: dict[str, list[tuple[int, bytes]]] = {}
    with rt.LogReader(merged_directory(str(log.root), "s")) as reader:
        for batch in reader.batches():
            for message in batch.messages():
                wanted.setdefault(message.topic, []).append((message.position, message.value))
            for part in events_of(batch, {}, None):
                found.setdefault(part.stream.topic, []).extend(
                    (token.sequence_number, event) for token, event in part
                )
                assert part.size_bytes == sum(map(len, part.events)) + 64 * len(part)
    assert found == wanted


def test_unusual_topics_and_messages_with_more_events_than_cache_are_delivered(log: Log) -> None:
    names = ["/a/b", "//", "/", "", "n/\n", "a//b"]
    for name in names:
        log.publisher.publish(json.dumps([name] * 50).encode(), topic=name)
    log.publish(*[("n/a", b"[1]")] * 30)

    async def main() -> None:
        found: dict[StreamId, Collector] = {}
        options = StreamOptions(cache_events=20)
        provider = StreamProvider("p", ClusterQueues({"q": log.cluster()}, split=json.loads), options=options)
        provider.implicit("all", "*", lambda stream: found.setdefault(stream, Collector()))
        async with provider:
            await until(lambda: sum(len(each.events) for each in found.values()) >= 50 * len(names) + 30)
            (status,) = provider.status()
            assert status.state == "served"
        for name in names:
            assert found[stream_of(name)].events == [name] * 50
            assert len(set(found[stream_of(name)].tokens)) == 50
        assert found[StreamId("n", "a")].events == [1] * 30

    asyncio.run(main())
