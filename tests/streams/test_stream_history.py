"""A host with a partial copy of the merged log reads the rest from the nodes; only a trim is a gap."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from merged_logs import Feeds
from range_nodes import RangeNodes, range_nodes
from stream_consumers import Collector

import rt
from rt.cluster_epoch import epoch_of, forced_number
from rt.errors import Overloaded
from rt.log.read.projection import EVERYTHING
from rt.net.grpc_errors import Unreachable
from rt.sidecar.pull_process import LOCK_FILE
from rt.streams import SequenceToken, StartPosition, StreamId, StreamOptions, StreamProvider, memory_stores
from rt.streams.agent.agent import REWIND
from rt.streams.cluster.cluster import Cluster
from rt.streams.cluster.cluster_queues import ClusterQueues
from rt.streams.cluster.log_gaps import LogGaps
from rt.streams.cluster.node_ranges import NodeLogs
from rt.streams.core.errors import QueueReset
from rt.streams.core.event_batch import EventBatch
from rt.streams.subscriptions.subscription_store import Stores

pytestmark = pytest.mark.slow  # Real nodes.

EVENTS = 3000
EARLIEST = StartPosition.EARLIEST_AVAILABLE
FAST = StreamOptions(
    cache_events=200,
    batch_events_max=50,
    save_every_s=0.05,
    retry_min_s=0.01,
    retry_max_s=0.05,
    receive_s=0.05,
)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(600):
        while not condition():
            await asyncio.sleep(0.01)


@pytest.fixture
def feeds(tmp_path: Path) -> Iterator[Feeds]:
    """Thirty segments of 100 events: ten of n/a, ten of n/b, and so on."""
    made = Feeds(tmp_path, ["a"])
    for start in range(0, EVENTS, 100):
        if start:
            made.roll()
        append(made, range(start, start + 100))
    yield made
    made.close()


@pytest.fixture
def nodes(tmp_path: Path, feeds: Feeds) -> Iterator[RangeNodes]:
    with range_nodes(tmp_path) as running:
        yield running


def append(feeds: Feeds, numbers: range) -> None:
    for start in numbers[::10]:
        values = [b"%d" % number for number in range(start, start + 10)]
        feeds.publish("a", values, "n/b" if start // 10 % 2 else "n/a", range(10))
    feeds.merge()


class Hosts:
    """Hosts that each have a copy. They share `stores`, like the file of one store."""

    def __init__(self, root: Path, nodes: RangeNodes) -> None:
        self._root = root
        self._nodes = nodes
        self.stores: Stores = memory_stores()
        self.tls = rt.TLS(**nodes.files)

    def cluster(self, host: str) -> Cluster:
        return Cluster("s", str(self._root / host), self._nodes.endpoints, self.tls)

    def provider(self, host: str, *, stores: Stores | None = None) -> StreamProvider:
        queues = ClusterQueues({"q": self.cluster(host)})
        return StreamProvider("p", queues, stores=stores or self.stores, options=FAST, host=host)

    def copy_from(self, host: str, position: int) -> None:
        """Give the host a copy that starts at `position`, as after an earlier period of serving the queue."""
        with rt.Subscriber(
            self._root / host,
            "s",
            endpoints=self._nodes.endpoints,
            tls=self.tls,
            position=position,
            connect_timeout=None,
        ) as reader:
            messages = reader.poll(1, timeout=600)
        assert messages[0].position == position


@pytest.fixture
def hosts(tmp_path: Path, nodes: RangeNodes) -> Hosts:
    return Hosts(tmp_path / "hosts", nodes)


def numbers(key: str, start: int, end: int = EVENTS) -> list[bytes]:
    rest = "ab".index(key)
    return [b"%d" % number for number in range(start, end) if number // 10 % 2 == rest]


def test_subscription_moved_to_host_with_later_copy_start_misses_no_events(hosts: Hosts) -> None:
    hosts.copy_from("second", 2500)

    async def refuse_later(batch: EventBatch) -> None:
        if batch.last >= SequenceToken(300):
            raise Overloaded("busy")

    async def main() -> None:
        before, after, other = Collector(act=refuse_later), Collector(), Collector()
        async with hosts.provider("first") as provider:
            handle = await provider.stream("n", "a").subscribe(before, start=SequenceToken(200))
            await until(lambda: before.events)
        async with hosts.provider("second") as provider:
            provider.implicit("other", "n/b", lambda _: other)
            again = (await provider.stream("n", "a").subscriptions())[0][0]
            assert again.id == handle.id
            await again.resume(after)
            await until(lambda: before.events + after.events == numbers("a", 200))
        assert after.gaps == []
        assert other.gaps == []

    asyncio.run(main())


def test_new_agent_reads_events_before_start_of_local_copy_from_nodes(hosts: Hosts) -> None:
    hosts.copy_from("second", 2500)

    async def main() -> None:
        everything = Collector()
        provider = hosts.provider("second")
        provider.implicit("all", "n/a", lambda _: everything)
        async with provider:
            await until(lambda: len(everything.events) >= EVENTS // 2)
        assert everything.events == numbers("a", 0)
        assert everything.gaps == []

    asyncio.run(main())


@pytest.mark.parametrize("start", [EARLIEST, SequenceToken(0), SequenceToken(1001)])
def test_subscription_starting_before_local_copy_receives_all_events(
    hosts: Hosts, start: StartPosition | SequenceToken
) -> None:
    hosts.copy_from("second", 2500)

    async def main() -> None:
        got = Collector()
        async with _at_end(hosts, "second") as provider:
            await provider.stream("n", "a").subscribe(got, start=start)
            first = start.sequence_number if isinstance(start, SequenceToken) else 0
            await until(lambda: len(got.events) >= len(numbers("a", first)))
        assert got.events == numbers("a", first)
        assert got.gaps == []

    asyncio.run(main())


def test_gap_is_reported_only_for_events_trimmed_on_nodes(hosts: Hosts, feeds: Feeds) -> None:
    hosts.copy_from("second", 2500)
    feeds.trim(10)

    async def main() -> None:
        got, first = Collector(), Collector()
        async with _at_end(hosts, "second") as provider:
            await provider.stream("n", "a").subscribe(got, start=SequenceToken(200))
            await provider.stream("n", "a").subscribe(first, start=EARLIEST)
            for each in (got, first):
                await until(lambda each=each: len(each.events) >= len(numbers("a", 1000)))
        assert got.events == first.events == numbers("a", 1000)
        assert [(gap.wanted, gap.resumed) for gap in got.gaps] == [(SequenceToken(200), SequenceToken(1000))]
        assert first.gaps == []  # It requested only events that are available.

    asyncio.run(main())


def test_history_read_waits_while_two_nodes_are_down_and_completes_with_one_down(
    hosts: Hosts, nodes: RangeNodes
) -> None:
    hosts.copy_from("second", 2500)

    async def main() -> None:
        got = Collector()
        async with _at_end(hosts, "second") as provider:
            nodes.stop(0)
            nodes.stop(1)
            await provider.stream("n", "a").subscribe(got, start=SequenceToken(0))
            await until(lambda: provider.status()[0].failing)
            assert not got.events
            nodes.start(1)
            await until(lambda: len(got.events) >= EVENTS // 2)
        assert got.events == numbers("a", 0)
        assert got.gaps == []

    asyncio.run(main())


@contextlib.asynccontextmanager
async def _at_end(hosts: Hosts, host: str) -> object:
    """Yield a provider whose agent has read all events."""
    stores = memory_stores()
    last = Collector()
    async with hosts.provider(host, stores=stores) as provider:
        await provider.stream("n", "b").subscribe(last, start=SequenceToken(EVENTS - 1))
        await until(lambda: last.events)
        await until(lambda: provider.status()[0].low >= EVENTS)
        yield provider


def test_history_of_stream_without_events_is_read_to_its_end(hosts: Hosts) -> None:
    async def main() -> None:
        queues = ClusterQueues({"q": hosts.cluster("third")})
        (queue,) = queues.mapper.queues
        history = await queues.history(queue, StreamId("n", "none"), SequenceToken(0))
        end = SequenceToken(0)
        while end < SequenceToken(EVENTS):
            read = await history.read(100)
            assert not read.batches
            assert not read.gaps
            assert read.end > end
            end = read.end
        await history.close()
        await queues.close()

    asyncio.run(main())


def value_of(metrics: str, name: str) -> int:
    (line,) = (line for line in metrics.splitlines() if line.startswith(f"{name}{{"))
    return int(line.split()[-1])


@contextlib.contextmanager
def copy_that_does_not_grow(directory: Path) -> Iterator[None]:
    """Hold the lock of the copy's pull client, so that nothing is pulled."""
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / LOCK_FILE).open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


async def _served_to_the_end(hosts: Hosts) -> None:
    """Run a host until it has delivered all events and stored its positions."""
    got = Collector()
    provider = hosts.provider("first")
    provider.implicit("plain", "n/*", lambda _: got)
    async with provider:
        await until(lambda: len(got.events) == EVENTS)


def test_new_owner_delivers_events_missing_from_its_local_copy(
    hosts: Hosts, feeds: Feeds, tmp_path: Path
) -> None:
    async def main() -> None:
        await _served_to_the_end(hosts)
        append(feeds, range(EVENTS, EVENTS + 20))
        got = Collector()
        provider = hosts.provider("second")
        provider.implicit("plain", "n/*", lambda _: got)
        with copy_that_does_not_grow(tmp_path / "hosts" / "second" / "s" / "merged"):
            async with provider:
                await until(lambda: len(got.events) == 20)
                append(feeds, range(EVENTS + 20, EVENTS + 40))
                await until(lambda: len(got.events) == 40)
        assert got.events == [b"%d" % number for number in range(EVENTS, EVENTS + 40)]
        assert got.gaps == []

    asyncio.run(main())


def test_subscription_with_old_position_does_not_delay_others_on_new_owner(
    hosts: Hosts, feeds: Feeds, tmp_path: Path
) -> None:
    async def refuse(_: EventBatch) -> None:
        raise Overloaded("busy")

    async def main() -> None:
        slow, again, before, got = Collector(act=refuse), Collector(), Collector(), Collector()
        provider = hosts.provider("first")
        provider.implicit("plain", "n/*", lambda _: before)
        async with provider:
            handle = await provider.stream("n", "a").subscribe(slow, start=SequenceToken(0))
            await until(lambda: len(before.events) == EVENTS)
        append(feeds, range(EVENTS, EVENTS + 20))
        provider = hosts.provider("second")
        provider.implicit("plain", "n/*", lambda _: got)
        with copy_that_does_not_grow(tmp_path / "hosts" / "second" / "s" / "merged"):
            async with provider:
                await until(lambda: len(got.events) == 20)
                assert value_of(provider.metrics(), "rt_streams_events_total") == REWIND + 20
                known = await provider.stream("n", "a").subscriptions()
                (found,) = (one for one, _ in known if one.id == handle.id)
                await found.resume(again)
                await until(lambda: len(again.events) == len(numbers("a", 0, EVENTS + 20)))
        assert again.events == numbers("a", 0, EVENTS + 20)
        assert again.gaps == []

    asyncio.run(main())


def test_history_missing_from_local_copy_is_read_from_nodes(
    hosts: Hosts, feeds: Feeds, tmp_path: Path
) -> None:
    hosts.copy_from("second", 2500)

    async def main() -> None:
        end = EVENTS + 1000
        append(feeds, range(EVENTS, end))
        got = list[bytes]()
        queues = ClusterQueues({"q": hosts.cluster("second")})
        (queue,) = queues.mapper.queues
        history = await queues.history(queue, StreamId("n", "a"), SequenceToken(2600))
        with copy_that_does_not_grow(tmp_path / "hosts" / "second" / "s" / "merged"):
            while len(got) < len(numbers("a", 2600, end)):
                got += [event for batch in (await history.read(100)).batches for event in batch.events]
        assert got == numbers("a", 2600, end)
        await history.close()
        await queues.close()

    asyncio.run(main())


def test_trim_before_stored_position_is_gap_only_for_consumer_with_earlier_last_token(
    hosts: Hosts, feeds: Feeds
) -> None:
    async def main() -> None:
        await _served_to_the_end(hosts)
        feeds.trim(28)
        append(feeds, range(EVENTS, EVENTS + 20))
        tokens = {"plain": None, "near": SequenceToken(2989), "far": SequenceToken(EVENTS - REWIND + 5)}
        got = {name: Collector(last=token) for name, token in tokens.items()}
        provider = hosts.provider("second")
        for name, collector in got.items():
            provider.implicit(name, "n/a", lambda _, collector=collector: collector)
        end = EVENTS + 20
        async with provider:
            await until(lambda: all(each.events[-1:] == numbers("a", 0, end)[-1:] for each in got.values()))
            metrics = provider.metrics()
        assert got["plain"].events == numbers("a", EVENTS, end)
        assert got["near"].events == numbers("a", 2990, end)
        assert got["far"].events == numbers("a", 2800, end)
        assert got["plain"].gaps == got["near"].gaps == []
        (gap,) = got["far"].gaps
        assert (gap.wanted, gap.resumed) == (SequenceToken(EVENTS - REWIND + 6), SequenceToken(2800))
        assert value_of(metrics, "rt_streams_gaps_total") == 0

    asyncio.run(main())


@pytest.mark.parametrize("closed", ["feed", "logs"])
def test_closed_feed_ends_its_threads_and_logs_no_failure(
    nodes: RangeNodes, caplog: pytest.LogCaptureFixture, logged: Callable[[str], list[str]], closed: str
) -> None:
    caplog.set_level(logging.INFO, "rt.streams")
    logs = NodeLogs(nodes.endpoints, "s", rt.TLS(**nodes.files))
    before = set(threading.enumerate())

    async def main() -> None:
        feed = logs.feed(EVENTS - 1, EVERYTHING, LogGaps("s"), None)
        await feed.read(10)
        nodes.close()
        if closed == "logs":
            logs.close()
            with pytest.raises(rt.Closed):
                await feed.read(10)
        feed.close()
        logs.close()

    asyncio.run(main())
    for thread in set(threading.enumerate()) - before:
        if thread.name in ("rt-streams-feed", "rt-nodes-log"):
            thread.join()
    assert not any("queue_feed_failed" in message for message in logged("rt.streams"))


def test_log_gaps_merge_if_they_touch_and_stay_separate_otherwise() -> None:
    gaps = LogGaps("s")
    for wanted, resumed, why in [(1200, 1500, "b"), (0, 1000, "a"), (1000, 1100, "a"), (1400, 1600, "c")]:
        gaps.add(wanted, resumed, why)
    found = [(gap.wanted.sequence_number, gap.resumed.sequence_number, gap.reason) for gap in gaps.take()]
    assert found == [(0, 1100, "a"), (1200, 1600, "b; c")]
    assert gaps.take() == []


FIRST, FORCED = epoch_of(1, 0), epoch_of(forced_number(1), 7)


def test_reading_position_from_before_forced_reset_raises_queue_reset(nodes: RangeNodes) -> None:
    logs, others = (NodeLogs(nodes.endpoints, "s", rt.TLS(**nodes.files)) for _ in range(2))

    async def main() -> None:
        gaps = LogGaps("s")
        with nodes.in_epochs(FIRST, FIRST):
            reader = logs.reader(0, EVERYTHING, gaps, 0)
            assert (await reader.read(10, 10)).end == 10
            assert await logs.end() == EVENTS
        with nodes.in_epochs(FORCED, FORCED):
            assert await logs.end() == EVENTS, "it needs no position"
            with pytest.raises(QueueReset):
                await reader.read(20, 10)
            feed = logs.feed(10, EVERYTHING, gaps, 0)
            with pytest.raises(QueueReset):
                await feed.read(10)
            feed.close()
            assert (await logs.reader(10, EVERYTHING, gaps, 1).read(20, 10)).end == 20
        logs.close()
        with nodes.in_epochs(FIRST, FIRST), pytest.raises(Unreachable):
            await others.reader(10, EVERYTHING, gaps, 1).read(20, 10)
        others.close()

    asyncio.run(main())
