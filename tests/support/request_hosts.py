"""Stream hosts on nodes whose consensus is a function call, and requests to the owner of their queue."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

from lease_nodes import Cluster as Nodes
from lease_nodes import Node, calling, run, served
from receiving_node import tls_of
from stream_consumers import Collector

import rt
from rt.log.scan.directory import merged_directory
from rt.net.lease_client import LeaseCalls
from rt.objects import MemoryStore
from rt.streams import (
    Cluster,
    ClusterQueues,
    LeaseBalancer,
    QueueLeases,
    SequenceToken,
    StartPosition,
    StreamOptions,
    StreamProvider,
    cluster_stores,
)
from rt.streams.balancer.balancer import Fence
from rt.streams.balancer.balancers import LeaseTimes
from rt.streams.balancer.cluster_leases import ClusterLeases
from rt.streams.core.stream_id import QueueId
from rt.streams.requests.owner_calls import ask_owner
from rt.streams.requests.request import QueueAnswer, QueueRequest, decode_answer
from rt.streams.subscriptions.subscription_store import SubscriptionStore
from rt.testing.merged import MergedLogBuilder
from sequencer.state.apply import apply
from sequencer.state.leases.leases import ExpireLeases, IdleLease

EARLIEST = StartPosition.EARLIEST_AVAILABLE
EVENTS = 50
LEASE = "app/queue/q"
ALL = [b"%d" % number for number in range(EVENTS)]
SUBSCRIBE = QueueRequest("subscribe", topic="n/a", consumer="c", start=EARLIEST)


def make_log(root: Path, *, first_s: int = 1) -> Path:
    """Make a log of `ALL`, with the seconds from `first_s` on as timestamps."""
    publisher = rt.Publisher(root, "s", publisher_id="feed")
    publisher.publish_many(ALL, topic="n/a", timestamps_ns=[(at + first_s) * 10**9 for at in range(EVENTS)])
    publisher.flush()
    merged = MergedLogBuilder(merged_directory(str(root), "s"), cluster_id=bytes(16), stream="s")
    merged.merge_all([publisher.directory])
    merged.sync()
    merged.close()
    publisher.close()
    return root


async def until(condition: Callable[[], object]) -> None:
    while not condition():
        await asyncio.sleep(0.02)


class World:
    def __init__(self, nodes: Nodes, endpoints: list[str], calls: LeaseCalls, pki: Path, log: Path) -> None:
        self.nodes, self.endpoints, self.calls, self.pki, self.log = nodes, endpoints, calls, pki, log

    @contextlib.asynccontextmanager
    async def host(self, name: str, act: Any = None) -> AsyncIterator[Host]:
        host = Host(self, name, act)
        async with host.provider:
            yield host

    def revoke(self) -> None:
        """Expire the lease, as after a pause of its owner."""
        held = self.nodes.state.leases.get(LEASE)
        if held is not None:
            apply(self.nodes.state, ExpireLeases((IdleLease(LEASE, held.token, held.renewals),)))

    async def ask(self, request: QueueRequest, timeout_s: float = 60.0) -> QueueAnswer:
        return decode_answer(await ask_owner(self.calls, LEASE, request.encode(), timeout_s)).check()

    def subscriptions(self) -> dict[str, tuple[str | None, SequenceToken | None]]:
        """Return the fault and the sequence token of each subscription in the table, by id."""
        table = self.nodes.state.tables.get(LEASE)
        assert table is not None
        content: dict[str, dict[str, bytes]] = {}
        for row, value in table.rows:
            category, _, key = row.partition("\0")
            content.setdefault(category, {})[key] = value
        store = SubscriptionStore(MemoryStore(content), QueueId(0, "q"), Fence(2**62))
        return {each.id: (each.fault, store.place(each.id)) for each in store.records()}


class Host:
    def __init__(self, world: World, name: str, act: Any) -> None:
        tls = tls_of(world.pki, "h1")
        leases = ClusterLeases(world.endpoints, tls, "app", owner=f"h1~{name}")
        self.leases = QueueLeases({"q": leases})
        self.made: list[Collector] = []
        self.provider = StreamProvider(
            "p",
            ClusterQueues({"q": Cluster("s", str(world.log))}),
            balancer=LeaseBalancer(self.leases, times=LeaseTimes(lease_s=6.0, look_s=0.05)),
            stores=cluster_stores(self.leases),
            options=StreamOptions(
                save_every_s=0.05, receive_s=0.05, retry_min_s=0.01, retry_max_s=0.05, deliver_for_s=0
            ),
            host=name,
        )
        self.provider.consumer("c", lambda _: self.make(act))

    def make(self, act: Any) -> Collector:
        self.made.append(Collector(act=act))
        return self.made[-1]

    @property
    def stream(self) -> Any:
        return self.provider.stream("n", "a")

    @property
    def is_owner(self) -> bool:
        return [one.state for one in self.provider.status()] == ["served"]

    @property
    def events(self) -> list[Any]:
        return [event for each in self.made for event in each.events]


def in_world(pki: Path, log: Path, work: Callable[[World], Coroutine[Any, Any, None]]) -> None:
    async def whole() -> None:
        nodes = Nodes()
        async with (
            served(pki, Node(nodes), Node(nodes)) as endpoints,
            calling(endpoints, pki, "op") as calls,
        ):
            await work(World(nodes, endpoints, calls, pki, log))

    run(whole)
