"""Forced resets of the cluster: subscriptions beyond the reset are moved back and receive a gap."""

from __future__ import annotations

import asyncio
import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from stream_consumers import Collector, until

import rt
from rt.net.lease_client import LogEpoch
from rt.net.rest_client import ask
from rt.streams import (
    Cluster,
    ClusterQueues,
    LeaseBalancer,
    QueueLeases,
    SequenceToken,
    StartPosition,
    StreamId,
    StreamOptions,
    StreamProvider,
    cluster_stores,
    directory_stores,
)
from rt.streams.balancer.lease import LeaseTimes
from rt.streams.cluster.local_copy import CopiedRun, replaced_from
from rt.streams.observer import StreamGap
from rt.streams.queue.queue_epoch import QueueEpoch, StoredEpoch
from sequencer.localcluster.nodes import LocalCluster
from sequencer.localcluster.processes import nothing_left

FORCED = 1 << 16
FAST = StreamOptions(
    cache_events=1000, batch_events_max=100, save_every_s=0.05, drain_s=1, retry_min_s=0.05, receive_s=0.1
)


def epoch(number: int, forced: str = "", end: int = 100, **runs: int) -> QueueEpoch:
    """Return an epoch. `runs` maps the name `r<number>` of each run to its first position."""
    return QueueEpoch(
        LogEpoch(number, bytes.fromhex(forced), {int(run[1:]): first for run, first in runs.items()}), end
    )


def test_positions_are_invalidated_by_forced_reset_but_not_by_soft_or_hard_reset() -> None:
    soft, hard = epoch(1, r0=0), epoch(3, r0=0, r3=70)
    for now in (soft, hard):
        for stored in (None, StoredEpoch(0, ""), StoredEpoch(1, "")):
            assert now.changed_from(stored, 90) is None
    forced = epoch(FORCED + 1, "aa", r0=0, r3=70, r65536=80)
    assert forced.changed_from(StoredEpoch(3, ""), 90) == 80
    assert forced.changed_from(StoredEpoch(FORCED, "aa"), 90) is None
    assert forced.changed_from(None, 90) == 80, "the queue never said in which epoch they were right"


def test_positions_move_back_to_first_forced_reset_unknown_to_stored_epoch() -> None:
    twice = epoch(2 * FORCED, "bb", r0=0, r65536=80, r131072=95)
    assert twice.changed_from(StoredEpoch(7, ""), 200) == 80
    assert twice.changed_from(StoredEpoch(FORCED, "aa"), 200) == 95
    rival = epoch(FORCED, "cc", r0=0, r65536=85)
    assert rival.changed_from(StoredEpoch(FORCED, "aa"), 90) == 85, "two were forced apart"
    assert rival.changed_from(StoredEpoch(2 * FORCED, "bb"), 90) == 85


def test_log_ending_below_read_position_is_read_again_from_last_forced_reset() -> None:
    assert epoch(0, end=50, r0=0).changed_from(StoredEpoch(0, ""), 51) == 0
    assert epoch(0, end=50, r0=0).changed_from(None, 51) == 0
    assert epoch(FORCED, "aa", end=50, r0=0, r65536=40).changed_from(None, 51) == 40
    assert epoch(FORCED, "aa", end=50, r65536=40).changed_from(StoredEpoch(FORCED, "aa"), 50) is None


@pytest.mark.parametrize(
    ("copied", "wanted"),
    [
        ([], None),
        ([(0, 80)], None),
        ([(0, 81)], 80),
        ([(0, 50), (3, 90), (FORCED, 95)], 80),
        ([(0, 50), (3, 80), (FORCED, 120)], 100),
        ([(0, 80), (FORCED, 101)], 100),
        ([(0, 80), (FORCED, 100), (2 * FORCED, 200)], None),
    ],
)
def test_copy_reports_first_position_replaced_by_forced_reset(
    copied: list[tuple[int, int]], wanted: int | None
) -> None:
    log = epoch(2 * FORCED, "bb", r0=0, r3=70, r65536=80, r131072=100).log
    assert replaced_from([CopiedRun(*each) for each in copied], log) == wanted


@pytest.fixture
def nodes() -> Iterator[LocalCluster]:
    root = Path(tempfile.mkdtemp(prefix="rt", dir="/tmp"))  # Unix sockets need a short path.
    try:
        with nothing_left(), LocalCluster(root / "c", 3) as cluster:
            cluster.start()
            cluster.wait_ready()
            yield cluster
    finally:
        shutil.rmtree(root, ignore_errors=True)


def publish(nodes: LocalCluster, name: str, count: int) -> list[bytes]:
    tls = nodes.certificate("publisher", name)
    values = [b"%s-%d" % (name.encode(), number) for number in range(count)]
    with rt.Publisher(
        nodes.root / f"feed-{name}", "s", publisher_id=name, endpoints=nodes.endpoints, tls=tls
    ) as publisher:
        numbers = publisher.publish_many(values, topic="n/a")
        publisher.flush()
        publisher.wait(numbers[-1], level="merged", timeout=600)
    return values


async def force(nodes: LocalCluster, name: str) -> None:
    """Force a reset that continues with the data of node `name`."""
    tls, at = nodes.certificate("operator", "op"), [f"127.0.0.1:{nodes.data_ports[name]}"]

    async def get(target: str, data: bytes | None = None) -> dict[str, object]:
        try:
            answer = await ask(at, tls, "GET" if data is None else "POST", target, data)
        except rt.RtError:
            return {}
        return json.loads(answer.body) if answer.status in {200, 202} else {}

    async with asyncio.timeout(600):
        while (await get("/status")).get("epoch") != FORCED:
            await get("/soft-reset", json.dumps({"force": True}).encode())
            await asyncio.sleep(0.5)


def gaps(consumer: Collector) -> list[StreamGap]:
    return [gap for gap in consumer.gaps if gap.is_reset]


@pytest.mark.slow
@pytest.mark.parametrize("topics", [None, ["n/*"]])
def test_consumers_receive_one_gap_and_all_later_events_after_forced_reset(
    nodes: LocalCluster, topics: list[str] | None
) -> None:
    tls = nodes.certificate("subscriber", "hosts")
    (stores := nodes.root / "stores").mkdir()

    def provider(copy: str, keeper: Collector) -> StreamProvider:
        queues = ClusterQueues(
            {"q": Cluster("s", str(nodes.root / copy), nodes.endpoints, tls, name="hosts")}, topics=topics
        )
        made = StreamProvider("p", queues, stores=directory_stores(stores), options=FAST)
        made.implicit("keeper", "n/*", lambda _: keeper)
        return made

    async def before() -> None:
        reader, keeper = Collector(), Collector()
        async with provider("copy", keeper) as host:
            stream = host.stream("n", "a")
            await stream.subscribe(reader, name="reader", start=StartPosition.EARLIEST_AVAILABLE)
            await until(lambda: len(reader.events) == len(keeper.events) == 500)
        assert gaps(reader) == gaps(keeper) == []

    async def after() -> None:
        reader, keeper = Collector(), Collector(last=SequenceToken(499))
        late = publish(nodes, "late", 400)
        misled = Collector()
        async with provider("copy", misled) as host:
            await until(lambda: [each.state for each in host.status()] == ["failed"])
            for metric in ("gaps", "resets"):
                (count,) = (
                    line for line in host.metrics().splitlines() if f"rt_streams_{metric}_total{{" in line
                )
                assert not count.endswith(" 0")
        assert misled.events == [], "the copy has what the reset replaced"
        async with provider("copy2", keeper) as host:
            await host.stream("n", "a").subscribe(reader, name="reader")
            await until(lambda: late[-1] in reader.events and late[-1] in keeper.events)
            later = await asyncio.to_thread(publish, nodes, "later", 300)
            await until(lambda: later[-1] in reader.events and later[-1] in keeper.events)
            for consumer in (reader, keeper):
                assert consumer.events == late + later, "nothing is missing, and nothing comes twice"
                assert consumer.tokens == [SequenceToken(at) for at in range(200, 900)]
                assert [(gap.wanted, gap.resumed, gap.stream) for gap in gaps(consumer)] == [
                    (SequenceToken(200), SequenceToken(200), StreamId("n", "a"))
                ]
        again = Collector()
        async with provider("copy2", Collector(last=SequenceToken(899))) as host:
            await host.stream("n", "a").subscribe(again, name="reader")
            last = await asyncio.to_thread(publish, nodes, "last", 10)
            await until(lambda: last[-1] in again.events)
        assert (again.events, again.gaps) == (last, []), "it is told once"

    left = "n3"
    publish(nodes, "one", 200)
    nodes.wait_merged(200, left)
    nodes.kill(left)
    publish(nodes, "two", 300)
    asyncio.run(before())
    nodes.kill("n1", "n2")
    for name in ("n1", "n2"):
        nodes.wipe(name)
    nodes.start()
    asyncio.run(force(nodes, left))
    nodes.wait_ready()
    asyncio.run(after())


@pytest.mark.slow
def test_running_host_fails_on_forced_reset_and_resumes_with_new_copy(
    nodes: LocalCluster,
) -> None:
    """The subscriptions are stored in the cluster, so the reset takes them back too."""
    tls = nodes.certificate("subscriber", "hosts", lease_groups=["g"])
    times = LeaseTimes(lease_s=6.0, look_s=0.2, give_up_s=10.0)

    def provider(reader: Collector, keeper: Collector) -> StreamProvider:
        clusters = {"q": Cluster("s", str(nodes.root / "copy"), nodes.endpoints, tls, name="hosts")}
        leases = QueueLeases.of_clusters(clusters, "g")
        made = StreamProvider(
            "p",
            ClusterQueues(clusters),
            balancer=LeaseBalancer(leases, times=times),
            stores=cluster_stores(leases),
            options=FAST,
        )
        made.implicit("keeper", "n/*", lambda _: keeper)
        made.consumer("c", lambda _: reader)
        return made

    async def main() -> None:
        reader, keeper = Collector(), Collector()
        async with provider(reader, keeper) as host:
            await until(lambda: [each.state for each in host.status()] == ["served"])
            await host.stream("n", "a").subscribe(reader, consumer="c", name="reader", start="earliest")
            await asyncio.to_thread(publish, nodes, "one", 200)
            await until(lambda: len(reader.events) == len(keeper.events) == 200)
            await asyncio.to_thread(nodes.wait_merged, 200, "n3")
            nodes.kill("n3")
            await asyncio.to_thread(publish, nodes, "two", 300)
            await until(lambda: len(reader.events) == len(keeper.events) == 500)
            nodes.kill("n1", "n2")
            for name in ("n1", "n2"):
                nodes.wipe(name)
            await asyncio.to_thread(nodes.start)
            await force(nodes, "n3")
            await asyncio.to_thread(nodes.wait_ready)
            late = await asyncio.to_thread(publish, nodes, "late", 400)
            await until(lambda: [each.state for each in host.status()] == ["failed"])
        assert len(reader.events) == len(keeper.events) == 500, "its copy is of before the reset"
        shutil.move(nodes.root / "copy", nodes.root / "moved")
        reader, keeper = Collector(), Collector(last=SequenceToken(499))
        async with provider(reader, keeper):
            await until(lambda: late[-1] in reader.events and late[-1] in keeper.events)
        for consumer in (reader, keeper):
            assert consumer.events[-400:] == late
        assert (keeper.events, gaps(keeper)[0].resumed) == (late, SequenceToken(200))

    asyncio.run(main())
