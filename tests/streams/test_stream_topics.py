"""Hosts that read only some topics: nodes send them no others, and omitted topics are not gaps."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from merged_logs import Feeds
from range_nodes import RangeNodes, range_nodes
from stream_consumers import Collector

import rt
from rt.errors import InvalidOption
from rt.streams import SequenceToken, StartPosition, StreamId, StreamOptions, StreamProvider, memory_stores
from rt.streams.cluster.cluster import Cluster
from rt.streams.cluster.cluster_queues import ClusterQueues
from rt.streams.subscriptions.subscription_store import Stores

EVENTS = 2000
FAST = StreamOptions(cache_events=200, save_every_s=0.05, retry_min_s=0.01, retry_max_s=0.05, receive_s=0.05)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(600):
        while not condition():
            await asyncio.sleep(0.01)


def publish(feeds: Feeds, numbers: range) -> None:
    """Publish `numbers` in groups of ten, one topic after the other: n/0 to n/9, then n/0 again."""
    for start in numbers[::10]:
        values = [b"%d" % number + bytes(200) for number in range(start, start + 10)]
        feeds.publish("a", values, f"n/{start // 10 % 10}", range(10))
    feeds.merge()


def of_topic(digits: str, start: int = 0, end: int = EVENTS) -> list[bytes]:
    return [b"%d" % n + bytes(200) for n in range(start, end) if str(n // 10 % 10) in digits]


@pytest.fixture
def feeds(tmp_path: Path) -> Iterator[Feeds]:
    """A log of ten segments."""
    made = Feeds(tmp_path, ["a"])
    for start in range(0, EVENTS, 200):
        if start:
            made.roll()
        publish(made, range(start, start + 200))
    yield made
    made.close()


@pytest.fixture
def nodes(tmp_path: Path, feeds: Feeds) -> Iterator[RangeNodes]:
    with range_nodes(tmp_path) as running:
        yield running


class Hosts:
    """Hosts of one machine, which share one root directory. Each has its own topics."""

    def __init__(self, root: Path, nodes: RangeNodes) -> None:
        self.root = root
        self.cluster = Cluster("s", str(root), nodes.endpoints, rt.TLS(**nodes.files))

    def provider(self, *topics: str, stores: Stores | None = None) -> StreamProvider:
        queues = ClusterQueues({"q": self.cluster}, topics=topics)
        return StreamProvider("p", queues, stores=stores or memory_stores(), options=FAST)

    def copied_bytes(self, *topics: str) -> int:
        return sum(self._sizes(topics))

    def trimmed_segments(self, *topics: str) -> int:
        return self._sizes(topics).count(0)

    def _sizes(self, topics: Sequence[str]) -> list[int]:
        copy = Path(self.cluster.directory(tuple(sorted(topics))))
        return [path.stat().st_size for path in copy.glob("log.*")]


@pytest.fixture
def hosts(tmp_path: Path, nodes: RangeNodes) -> Hosts:
    return Hosts(tmp_path / "hosts", nodes)


def test_host_of_one_topic_copies_only_its_bytes_and_reports_no_gaps(hosts: Hosts, feeds: Feeds) -> None:
    async def main() -> None:
        got, none = Collector(), Collector()
        async with hosts.provider("n/[3]") as one, hosts.provider("none/*") as other:
            one.implicit("all", "*", lambda _: got)
            other.implicit("all", "*", lambda _: none)
            with pytest.raises(InvalidOption, match="not read"):
                await one.stream("n", "4").subscribe(Collector())
            await until(lambda: len(got.events) >= EVENTS // 10)
            for provider in (one, other):
                await until(lambda provider=provider: provider.status()[0].low == EVENTS)
                assert provider.status()[0].lag == 0
            publish(feeds, range(EVENTS, EVENTS + 20))  # These events have other topics.
            for provider in (one, other):
                await until(lambda provider=provider: provider.status()[0].low == EVENTS + 20)
            assert (one.status()[0].lag, other.status()[0].lag) == (0, 0)
            publish(feeds, range(EVENTS + 20, EVENTS + 100))
            await until(lambda: len(got.events) >= EVENTS // 10 + 10)
        assert got.events == of_topic("3", end=EVENTS + 100)
        assert got.tokens[0] == SequenceToken(30)
        assert (none.events, got.gaps, none.gaps) == ([], [], [])

    asyncio.run(main())
    whole = sum(path.stat().st_size for path in Path(feeds.path).glob("log.*"))
    assert 0 < hosts.copied_bytes("n/[3]") < 0.12 * whole
    assert hosts.copied_bytes("none/*") < 0.01 * whole
    assert hosts.copied_bytes() == 0, "nobody has made a whole copy"


@pytest.mark.parametrize("trimmed", [0, 5])
def test_stream_is_read_again_from_topic_copy_and_trim_is_reported_as_gap(
    hosts: Hosts, feeds: Feeds, trimmed: int
) -> None:
    first = 200 * trimmed

    async def main() -> None:
        stores, before, got, again = memory_stores(), Collector(), Collector(), Collector()
        async with hosts.provider("n/[37]", stores=stores) as provider:
            handle = await provider.stream("n", "3").subscribe(before, start=SequenceToken(1900))
            await until(lambda: before.events == of_topic("3", 1900))
            await until(lambda: provider.status()[0].low == EVENTS)
            assert handle
            if trimmed:
                feeds.trim(trimmed)
                # The copy follows the nodes.
                await until(lambda: hosts.trimmed_segments("n/[37]") == trimmed)
            await provider.stream("n", "7").subscribe(got, start=SequenceToken(95))
            await provider.stream("n", "3").subscribe(again, start=StartPosition.EARLIEST_AVAILABLE)
            await until(lambda: got.events == of_topic("7", max(first, 95)))
            await until(lambda: again.events == of_topic("3", first))
        gap = [(SequenceToken(95), SequenceToken(first))] if trimmed else []
        assert [(each.wanted, each.resumed) for each in got.gaps] == gap
        assert before.gaps == []

    asyncio.run(main())


def test_history_of_topic_with_pattern_characters_matches_name_literally(
    tmp_path: Path, feeds: Feeds
) -> None:
    feeds.publish("a", [b"one"], "odd/[x]*", [1])
    feeds.publish("a", [b"two"], "odd/xy", [2])
    feeds.merge()

    async def main() -> None:
        with range_nodes(tmp_path) as nodes:
            queues = ClusterQueues({"q": Hosts(tmp_path / "hosts", nodes).cluster})
            (queue,) = queues.mapper.queues
            history = await queues.history(queue, StreamId("odd", "[x]*"), SequenceToken(EVENTS - 10))
            read = await history.read(100)
            assert [event for batch in read.batches for event in batch.events] == [b"one"]
            await history.close()
            await queues.close()

    asyncio.run(main())
