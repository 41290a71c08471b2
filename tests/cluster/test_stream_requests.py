"""Other hosts and operators send requests to the host that owns a queue, on a real cluster."""

from __future__ import annotations

import asyncio
import itertools
import json
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from stream_consumers import Collector

import rt
from rt.cli.streams.command import streams as command
from rt.cli.streams.rows import read_queue
from rt.net.lease_client import LeaseCalls
from rt.streams import (
    Cluster,
    ClusterQueues,
    EventBatch,
    LeaseBalancer,
    NoSuchSubscription,
    QueueElsewhere,
    QueueLeases,
    StartPosition,
    StreamError,
    StreamOptions,
    StreamProvider,
    cluster_stores,
)
from rt.streams.balancer.balancers import LeaseTimes
from rt.streams.requests.owner_calls import ask_owner
from rt.streams.requests.request import QueueAnswer, QueueRequest, decode_answer
from sequencer.localcluster.loopback import free_ports
from sequencer.localcluster.nodes import LocalCluster
from sequencer.localcluster.processes import nothing_left

pytestmark = pytest.mark.slow

EXAMPLE = Path(__file__).parents[2] / "examples" / "streams_subscription.py"
EVENTS = 200
PROGRAM = Path(__file__).parents[1] / "support" / "stream_host.py"
WAIT_S = 180
TIMES = LeaseTimes(lease_s=6.0, look_s=0.2, give_up_s=10.0)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():
            await asyncio.sleep(0.05)


@pytest.fixture
def root() -> Iterator[Path]:
    made = Path(tempfile.mkdtemp(prefix="rt", dir="/tmp"))  # Unix sockets need a short path.
    try:
        with nothing_left():
            yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)


@pytest.fixture(params=[3])
def nodes(root: Path, request: pytest.FixtureRequest) -> Iterator[LocalCluster]:
    with LocalCluster(root / "c", request.param) as cluster:
        cluster.start()
        cluster.wait_ready()
        publish(root, cluster, range(EVENTS))
        yield cluster


def publish(root: Path, nodes: LocalCluster, numbers: range) -> None:
    tls = nodes.certificate("publisher", "feed")
    feed = rt.Publisher(root / "feeds", "s", publisher_id="feed", endpoints=nodes.endpoints, tls=tls)
    with feed:
        sent = feed.publish_many(
            [b"%d" % number for number in numbers],
            topic="n/a",
            timestamps_ns=[(number + 1) * 10**9 for number in numbers],
        )
        feed.flush()
        feed.wait(sent[-1], level="merged", timeout=WAIT_S)


class Host:
    """A host of streams, with the consumers that it creates."""

    def __init__(self, root: Path, nodes: LocalCluster, name: str, act: Any = None) -> None:
        tls = nodes.certificate("subscriber", "hosts", lease_groups=["g"])
        clusters = {"q": Cluster("s", str(root / name), nodes.endpoints, tls, name="hosts")}
        self.leases = QueueLeases.of_clusters(clusters, "g", owner=f"hosts~{name}")
        self.made: list[Collector] = []
        self.provider = StreamProvider(
            "p",
            ClusterQueues(clusters),
            balancer=LeaseBalancer(self.leases, times=TIMES),
            stores=cluster_stores(self.leases),
            options=StreamOptions(
                save_every_s=0.1, receive_s=0.1, drain_s=2, deliver_for_s=0, retry_min_s=0.05
            ),
            host=name,
        )

        def make(_: object) -> Collector:
            self.made.append(Collector(act=act))
            return self.made[-1]

        self.provider.consumer("c", make)

    @property
    def stream(self) -> Any:
        return self.provider.stream("n", "a")

    @property
    def is_owner(self) -> bool:
        return [one.state for one in self.provider.status()] == ["served"]

    @property
    def events(self) -> list[Any]:
        return [event for each in self.made for event in each.events]


class Operator:
    """An operator that calls `rt streams …`."""

    def __init__(self, nodes: LocalCluster, role: Any = "operator") -> None:
        tls = nodes.certificate(role, "op")
        self.options = ["--endpoints", ",".join(nodes.endpoints)]
        for name in ("ca", "cert", "key"):
            self.options += [f"--{name}", str(getattr(tls, name))]

    async def run(self, *words: str) -> tuple[int, str]:
        done = await asyncio.to_thread(CliRunner().invoke, command, [*words, *self.options])
        if done.exception is not None and not isinstance(done.exception, SystemExit):
            return 1, f"{done.output}{done.exception}"
        return done.exit_code, done.output

    async def listed(self) -> dict[str, Any]:
        status, output = await self.run("subscriptions", "list", "--json")
        assert status == 0, output
        found: dict[str, Any] = json.loads(output)
        return found


def wanted(start: int = 0) -> list[bytes]:
    return [b"%d" % number for number in range(start, EVENTS)]


def test_host_subscribes_resumes_and_unsubscribes_on_queue_owned_by_another(
    root: Path, nodes: LocalCluster
) -> None:
    async def main() -> None:
        owner, other = Host(root, nodes, "one"), Host(root, nodes, "two")
        operator = Operator(nodes)
        async with owner.provider:
            await until(lambda: owner.is_owner)
            async with other.provider:
                with pytest.raises(QueueElsewhere, match="Name a consumer"):
                    await other.stream.subscribe(Collector())
                with pytest.raises(StreamError, match="no consumer for the subscription"):
                    await other.stream.subscribe(Collector(), consumer="unknown")
                mine = Collector()
                start = StartPosition.EARLIEST_AVAILABLE
                made = await other.stream.subscribe(mine, consumer="c", name="one", start=start)
                await until(lambda: owner.events == wanted())
                again = await other.stream.subscribe(Collector(), consumer="c", name="one", start=start)
                assert again == made
                assert mine.events == other.events == []
                (row,) = (await operator.listed())["subscriptions"]
                assert (row["id"], row["subscription"], row["stream"]) == (made.id, "one", "n/a")
                await made.resume(Collector(), rt.streams.SequenceToken(150))
                await until(lambda: owner.events == [*wanted(), *wanted(150)])
                await made.unsubscribe()
                await made.unsubscribe()
                assert (await operator.listed())["subscriptions"] == []
                with pytest.raises(NoSuchSubscription):
                    await made.resume(Collector())

    asyncio.run(main())


def test_operator_lists_resets_resumes_and_ends_subscriptions(root: Path, nodes: LocalCluster) -> None:
    is_good = asyncio.Event()

    async def act(batch: EventBatch) -> None:
        if not is_good.is_set() and batch.last.sequence_number >= 100:
            raise ValueError("poison")

    async def main() -> None:
        operator = Operator(nodes)
        host = Host(root, nodes, "one", act)
        async with host.provider:
            await until(lambda: host.is_owner)
            start = StartPosition.EARLIEST_AVAILABLE
            made = await host.stream.subscribe(Collector(act=act), consumer="c", name="one", start=start)
            while (row := (await operator.listed())["subscriptions"][0])["state"] != "faulted":
                await asyncio.sleep(0.1)
            assert (row["position"], row["lag"], row["consumer"]) == (100, EVENTS - 100, "c")
            assert "poison" in row["fault"]
            assert row["age_s"] is not None
            is_good.set()
        host = Host(root, nodes, "two")
        async with host.provider:
            await until(lambda: host.is_owner)
            assert (await operator.run("subscriptions", "resume", "one"))[1] == "one of n/a: it is served.\n"
            await until(lambda: host.events == wanted(100))
            moved = await operator.run("subscriptions", "reset", made.id[:8], "--to", "earliest", "--json")
            assert json.loads(moved[1])["to"] == 0
            await until(lambda: host.events == [*wanted(100), *wanted()])
            time = "1970-01-01T00:03:00Z"
            status, output = await operator.run("subscriptions", "reset", "one", "--to", time)
            assert (status, "to 179. It is served." in output) == (0, True), output
            await until(lambda: host.events == [*wanted(100), *wanted(), *wanted(179)])
            status, output = await operator.run("subscriptions", "reset", "one", "--to", "7777")
            assert (status, "no such position" in output) == (1, True)
            status, output = await operator.run("subscriptions", "end", "nobody")
            assert (status, "no such subscription" in output) == (1, True)
        # No host runs any more.
        listed = await operator.listed()
        assert [each["state"] for each in listed["subscriptions"]] == ["waiting"]
        assert (listed["owner"], listed["lease"]) == ("", "g/queue/q")
        status, output = await operator.run("subscriptions", "end", "one", "--timeout", "1")
        assert status == 1
        assert "no owner" in output
        assert "the request waits for one" in output
        waiting = asyncio.create_task(operator.run("subscriptions", "end", "one", "--timeout", "120"))
        host = Host(root, nodes, "three")
        async with host.provider:
            status, output = await waiting
            assert (status, output.splitlines()[-1]) == (0, "one of n/a: it is ended.")
            assert (await operator.listed())["subscriptions"] == []

    asyncio.run(main())


@pytest.mark.parametrize("nodes", [1], indirect=True)
def test_paused_queue_delivers_no_events_on_its_next_owner_until_resumed(
    root: Path, nodes: LocalCluster
) -> None:
    async def main() -> None:
        operator = Operator(nodes)
        first = Host(root, nodes, "one")
        async with first.provider:
            await until(lambda: first.is_owner)
            start = StartPosition.EARLIEST_AVAILABLE
            await first.stream.subscribe(Collector(), consumer="c", name="one", start=start)
            while (await operator.listed())["subscriptions"][0]["lag"]:
                await asyncio.sleep(0.1)
            assert await operator.run("queues", "pause", "q") == (0, "Queue q is paused.\n")
            assert 'rt_streams_queue_paused{provider="p",host="one",queue="q"} 1' in first.provider.metrics()
        second = Host(root, nodes, "two")
        async with second.provider:
            await until(lambda: second.is_owner)
            await asyncio.to_thread(publish, root, nodes, range(EVENTS, EVENTS + 5))
            while (row := (await operator.listed())["subscriptions"][0])["lag"] != 5:
                await asyncio.sleep(0.1)
            assert (row["state"], second.events) == ("paused", [])
            assert await operator.run("queues", "resume", "q") == (0, "Queue q is resumed.\n")
            await until(lambda: len(second.events) == 5)
            assert (await operator.listed())["paused_s"] is None

    asyncio.run(main())


class HostProcesses:
    """Hosts as separate processes (`stream_host.py`), one at a time."""

    def __init__(self, root: Path, nodes: LocalCluster) -> None:
        self._root, self.out = root, root / "out"
        self.out.mkdir()
        tls = nodes.certificate("subscriber", "hosts", lease_groups=["streams"])
        self._clusters = {"s": {"endpoints": nodes.endpoints, "tls": [tls.ca, tls.cert, tls.key]}}
        self._ports, self._names = iter(free_ports(8)), itertools.count()
        self._running: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        name = f"h{next(self._names)}"
        config = {"host": name, "out": self.out, "copies": self._root / "copies", "port": next(self._ports)}
        path = self._root / f"{name}.json"
        path.write_text(json.dumps({**config, "clusters": self._clusters}, default=str))
        with (self._root / f"{name}.log").open("wb") as log:
            self._running = subprocess.Popen([sys.executable, PROGRAM, path], stdout=log, stderr=log)

    def pause(self) -> None:
        assert self._running is not None
        self._running.send_signal(signal.SIGSTOP)

    def kill(self) -> None:
        if self._running is not None:
            self._running.kill()
            self._running.wait()

    def events(self) -> Counter[bytes]:
        """What the consumers of explicit subscriptions accepted."""
        lines = [line for path in self.out.glob("asked.*") for line in path.read_bytes().splitlines()]
        return Counter(line.split()[1] for line in lines if b" " in line)


@pytest.mark.parametrize(
    "moment", ["before it takes them", "while it takes them", "when it has answered one"]
)
def test_requests_are_served_exactly_once_if_host_is_killed(
    root: Path, nodes: LocalCluster, moment: str
) -> None:
    subscribe = QueueRequest(
        "subscribe", topic="n/a", consumer="asked", start=StartPosition.EARLIEST_AVAILABLE
    )
    lease = "streams/queue/s"

    async def main(hosts: HostProcesses, calls: LeaseCalls) -> None:
        async def ask(request: QueueRequest) -> QueueAnswer:
            return decode_answer(await ask_owner(calls, lease, request.encode(), WAIT_S)).check()

        hosts.start()
        first = [await ask(subscribe) for _ in range(2)]
        if moment == "before it takes them":
            hosts.pause()
        asked = [subscribe] * 3 + [QueueRequest("end", each.subscription) for each in first]
        asking = [asyncio.create_task(ask(request)) for request in asked]
        if moment == "when it has answered one":
            await asyncio.wait(asking, return_when=asyncio.FIRST_COMPLETED)
        else:  # This gives the tasks time to post their requests.
            found = await calls.post_request(
                lease, b"last" * 4, QueueRequest("end", "nobody").encode(), WAIT_S
            )
            assert found.state == "waiting"
        hosts.kill()
        hosts.start()
        answers = await asyncio.gather(*asking)
        assert [each.state for each in answers] == ["served"] * 3 + ["ended"] * 2
        made = {each.subscription for each in answers[:3]}
        assert len(made) == 3
        content = await calls.inspect_table(lease)
        rows = read_queue(lease, "s", "", content.rows, EVENTS, 0.0).subscriptions
        assert {each.id for each in rows} == made
        await until(lambda: all(hosts.events()[each] >= 3 for each in wanted()))

    async def whole() -> None:
        hosts = HostProcesses(root, nodes)
        calls = LeaseCalls(nodes.endpoints, nodes.certificate("operator", "op"))
        try:
            await main(hosts, calls)
        finally:
            hosts.kill()
            await calls.close()

    asyncio.run(whole())


@pytest.mark.parametrize("nodes", [1], indirect=True)
def test_publishers_and_subscribers_outside_lease_group_are_refused_queue_requests(
    root: Path, nodes: LocalCluster
) -> None:
    async def main() -> None:
        host = Host(root, nodes, "one")
        async with host.provider:
            await until(lambda: host.is_owner)
            await host.stream.subscribe(Collector(), consumer="c", name="one")
        for role, groups in (("publisher", ["g"]), ("subscriber", []), ("subscriber", ["h"])):
            tls = nodes.certificate(role, f"{role}-{len(groups)}", lease_groups=groups)
            calls = LeaseCalls(nodes.endpoints, tls)
            with pytest.raises(rt.CertificateError):
                await calls.inspect_table("g/queue/q")
            with pytest.raises(rt.CertificateError):
                await calls.post_request("g/queue/q", bytes(16), b"{}", 10)
            await calls.close()

    asyncio.run(main())


def test_example_subscription_continues_on_second_host_after_first_is_killed(
    root: Path, nodes: LocalCluster
) -> None:
    tls = nodes.certificate("subscriber", "hosts", lease_groups=["prices"])

    def start(name: str) -> subprocess.Popen[str]:
        command = [sys.executable, EXAMPLE, "--stream", "n/a", "--log", "s", "--host", name]
        command += ["--path", str(root / name), "--endpoints", ",".join(nodes.endpoints)]
        command += ["--ca", tls.ca, "--cert", tls.cert, "--key", tls.key]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    def read_to(host: subprocess.Popen[str], number: int) -> list[str]:
        lines: list[str] = []
        assert host.stdout is not None
        while not lines or lines[-1] != f"n/a {number} b'{number}'\n":
            lines.append(host.stdout.readline())
            assert lines[-1], "it has ended"
        return lines

    one = start("one")
    try:
        assert read_to(one, EVENTS - 1) == [f"n/a {number} b'{number}'\n" for number in range(EVENTS)]
        two = start("two")
        try:
            one.kill()
            publish(root, nodes, range(EVENTS, EVENTS + 10))
            lines = read_to(two, EVENTS + 9)
            first = int(lines[0].split()[1])
            assert lines == [f"n/a {number} b'{number}'\n" for number in range(first, EVENTS + 10)]
        finally:
            two.kill()
            two.communicate()
    finally:
        one.kill()
        one.communicate()
