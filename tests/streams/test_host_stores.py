"""Hosts with their own subscription stores on a real cluster: each store has its own hold on the log."""

from __future__ import annotations

import asyncio
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from stream_consumers import Collector

import rt
from rt.cli.commands.holds import holds as holds_command
from rt.net.rest_client import ask
from rt.streams import (
    Cluster,
    ClusterQueues,
    SequenceToken,
    StartPosition,
    StreamOptions,
    StreamProvider,
    directory_stores,
)
from rt.streams.cluster import store_hold
from rt.streams.core.event_batch import EventBatch
from sequencer.localcluster.nodes import LocalCluster
from sequencer.localcluster.processes import nothing_left

pytestmark = pytest.mark.slow

EVENTS = 2000
FAST = StreamOptions(
    cache_events=100, batch_events_max=10, save_every_s=0.05, drain_s=1, retry_min_s=0.05, receive_s=0.1
)


@pytest.fixture
def root() -> Iterator[Path]:
    made = Path(tempfile.mkdtemp(prefix="rt", dir="/tmp"))  # Unix sockets need a short path.
    try:
        with nothing_left():
            yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)


@pytest.fixture
def nodes(root: Path) -> Iterator[LocalCluster]:
    with LocalCluster(root / "c", 1) as cluster:
        cluster.start()
        cluster.wait_ready()
        publisher = rt.Publisher(
            root / "feeds",
            "s",
            publisher_id="feed",
            endpoints=cluster.endpoints,
            tls=cluster.certificate("publisher", "feed"),
        )
        with publisher:
            numbers = publisher.publish_many([b"%d" % number for number in range(EVENTS)], topic="n/a")
            publisher.flush()
            publisher.wait(numbers[-1], level="merged", timeout=600)
        yield cluster


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(600):
        while not condition():
            await asyncio.sleep(0.02)


class Machine:
    """A host with a subscription store and a copy of its own."""

    def __init__(self, root: Path, name: str, nodes: LocalCluster) -> None:
        self.root, self.name, self.nodes = root / name, name, nodes
        (self.root / "stores").mkdir(parents=True, exist_ok=True)

    def copy_from(self, position: int) -> None:
        """Make a copy that starts at `position`, as after an earlier period of serving the queue."""
        tls = self.nodes.certificate("subscriber", "hosts")
        with rt.Subscriber(
            self.root / "copy",
            "s",
            endpoints=self.nodes.endpoints,
            tls=tls,
            position=position,
            connect_timeout=None,
        ) as reader:
            assert reader.poll(1, timeout=600)[0].position == position

    def provider(self, *, is_durable: bool = True, shared: Path | None = None) -> StreamProvider:
        tls = self.nodes.certificate("subscriber", "hosts")
        cluster = Cluster("s", str(self.root / "copy"), self.nodes.endpoints, tls, name="hosts")
        stores = directory_stores(shared or self.root / "stores") if is_durable else None
        return StreamProvider("p", ClusterQueues({"q": cluster}), stores=stores, options=FAST, host=self.name)


async def holds(nodes: LocalCluster) -> dict[str, int]:
    tls = nodes.certificate("operator", "op")
    answer = await ask(nodes.endpoints, tls, "GET", "/holds", None)
    return {one["name"]: one["position"] for one in json.loads(answer.body)}


async def until_held(nodes: LocalCluster, position: int) -> None:
    async with asyncio.timeout(600):
        while position not in (await holds(nodes)).values():
            await asyncio.sleep(0.05)


@pytest.mark.parametrize("is_durable", [True, False])
def test_subscription_stores_have_separate_holds_at_their_own_positions(
    root: Path, nodes: LocalCluster, is_durable: bool
) -> None:
    first, second = Machine(root, "first", nodes), Machine(root, "second", nodes)

    async def hang(batch: EventBatch) -> Any:
        if batch.last >= SequenceToken(100):
            await asyncio.sleep(3600)

    async def main() -> None:
        slow, fast = Collector(act=hang), Collector()
        held = first.provider(is_durable=is_durable)
        held.implicit("all", "n/*", lambda _: slow)
        async with held:
            await until(lambda: len(slow.events) == 100)
            await until_held(nodes, 100)
        quick = second.provider(is_durable=is_durable)
        quick.implicit("all", "n/*", lambda _: fast)
        async with quick:
            await until(lambda: len(fast.events) == EVENTS)
            await until_held(nodes, EVENTS)
        found = await holds(nodes)
        assert sorted(found.values()) == [100, EVENTS], found
        assert {name.partition("~")[0] for name in found} == {"hosts"}

        rest = Collector()
        again = first.provider(is_durable=is_durable)
        again.implicit("all", "n/*", lambda _: rest)
        async with again:
            await until(lambda: rest.events and rest.events[-1] == b"%d" % (EVENTS - 1))
        assert rest.events == [b"%d" % number for number in range(100, EVENTS)]
        assert (await holds(nodes)).keys() == found.keys(), "the store has the same hold as before"

    asyncio.run(main())


def test_subscription_continues_on_another_host_with_less_of_log(root: Path, nodes: LocalCluster) -> None:
    first, second = Machine(root, "first", nodes), Machine(root, "second", nodes)
    second.copy_from(1500)

    async def hang(batch: EventBatch) -> Any:
        if batch.last >= SequenceToken(100):
            await asyncio.sleep(3600)

    async def main() -> None:
        before, after, earliest = Collector(act=hang), Collector(), Collector()
        shared = first.root / "stores"
        async with first.provider(shared=shared) as provider:
            await provider.stream("n", "a").subscribe(before, start=SequenceToken(0), name="one")
            await until(lambda: len(before.events) == 100)
        async with second.provider(shared=shared) as provider:
            await provider.stream("n", "a").subscribe(after, name="one")
            await until(lambda: len(after.events) == EVENTS - 100)
            await provider.stream("n", "a").subscribe(earliest, start=StartPosition.EARLIEST_AVAILABLE)
            await until(lambda: len(earliest.events) == EVENTS)
        assert before.events + after.events == earliest.events
        assert [*after.gaps, *earliest.gaps] == []

    asyncio.run(main())


def test_released_hold_of_running_subscription_store_is_created_again(
    root: Path, nodes: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_hold, "AGAIN_S", 0.2)

    async def run(*arguments: str) -> str:
        tls = nodes.certificate("operator", "op")
        files = [f"--ca={tls.ca}", f"--cert={tls.cert}", f"--key={tls.key}"]
        line = [*arguments, f"--endpoints={','.join(nodes.endpoints)}", *files]
        result = await asyncio.to_thread(CliRunner().invoke, holds_command, line)
        assert result.exit_code == 0, result.output
        return result.stdout

    async def main() -> None:
        got = Collector()
        machine = Machine(root, "first", nodes)
        live = machine.provider()
        live.implicit("all", "n/*", lambda _: got)
        async with live:
            await until(lambda: len(got.events) == EVENTS)
            await until_held(nodes, EVENTS)
            (name,) = await holds(nodes)
            header, row = (await run("list")).splitlines()
            assert header.split() == ["hold", "position", "lag", "kept", "moved"]
            assert row.split()[0] == name
            assert row.rstrip().endswith("ago")
            assert json.loads(await run("list", "--json"))["name"] == name
            assert name in await run("release", name)
            while name not in await holds(nodes):
                await asyncio.sleep(0.05)
        while await holds(nodes):  # The host's last call may come after the first release.
            await run("release", name)

    asyncio.run(main())
