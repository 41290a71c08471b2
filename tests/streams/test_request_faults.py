"""Attacks on requests to the owner of a queue: late ones, wrong ones, and tables without room."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from pathlib import Path

import pytest
from lease_nodes import issue_certificates
from request_hosts import ALL, EARLIEST, EVENTS, LEASE, World, in_world, make_log, until
from stream_consumers import Collector

from rt.net.grpc_errors import Unreachable
from rt.net.lease_client import LeaseCalls
from rt.objects import MemoryStore
from rt.streams import (
    Cluster,
    ClusterQueues,
    SequenceToken,
    StreamError,
    StreamId,
    StreamProvider,
)
from rt.streams.balancer.balancer import Fence, FixedBalancer
from rt.streams.core.stream_id import QueueId
from rt.streams.requests.request import Answer, Request, decode_request
from rt.streams.stream import Subscription
from rt.v1 import leases_pb2 as pb


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return issue_certificates(tmp_path_factory.mktemp("pki"))


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_log(tmp_path_factory.mktemp("log"))


def test_every_kind_of_start_reaches_the_owner(pki: Path, log: Path) -> None:
    at_40 = datetime.fromtimestamp(41, UTC)

    async def work(world: World) -> None:
        async with world.host("one") as one:
            await until(lambda: one.is_owner)
            async with world.host("two") as two:
                made = await two.stream.subscribe(Collector(), consumer="c", name="x", start=at_40)
                await until(lambda: one.events == ALL[40:])
                for start, wanted in (
                    ("earliest", ALL),
                    (45, ALL[45:]),
                    (at_40, ALL[40:]),
                    ("latest", []),
                ):
                    before = one.events
                    await made.resume(Collector(), start)
                    await until(lambda before=before, wanted=wanted: one.events == before + wanted)
                assert world.subscriptions()[made.id][1] in (None, SequenceToken(EVENTS))

    in_world(pki, log, work)


def test_a_consumer_that_the_owner_does_not_know_takes_no_subscription_away(pki: Path, log: Path) -> None:
    async def work(world: World) -> None:
        async with world.host("one") as one:
            await until(lambda: one.is_owner)
            async with world.host("two") as two:
                await two.stream.subscribe(Collector(), consumer="c", name="x", start=EARLIEST)
                await until(lambda: one.events == ALL)
                with pytest.raises(StreamError, match="no consumer for the subscription"):
                    await two.stream.subscribe(Collector(), consumer="unknown", name="x")
                assert one.provider.status()[0].consumers == 1
                assert one.provider.status()[0].unattended == 0

    in_world(pki, log, work)


class Recording:
    """Stores through which any host can ask; the requests are recorded."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, Request]] = []

    def __call__(self, _: QueueId, __: Fence) -> MemoryStore:
        return MemoryStore()

    async def ask_owner(self, queue: QueueId, content: bytes, _: float) -> bytes:
        self.asked.append((queue.name, decode_request(content)))
        return Answer("id", "served").encode()


def test_a_subscription_of_an_earlier_placement_is_asked_for_where_it_is(log: Path, tmp_path: Path) -> None:
    async def main() -> None:
        stores, balancer = Recording(), FixedBalancer()
        other = make_log(tmp_path, first_s=1000)
        queues = ClusterQueues(
            {"old": Cluster("s", str(log)), "new": Cluster("s", str(other))}, placement={"n/*": "new"}
        )
        new, old = (next(one for one in queues.mapper.queues if one.name == name) for name in ("new", "old"))
        async with StreamProvider("p", queues, balancer=balancer, stores=stores) as provider:
            balancer.assign({new: Fence(1)})
            await provider.agent_of(StreamId("n", "a"))
            made = Subscription(provider, StreamId("n", "a"), "id", old)
            await made.resume(Collector(), datetime.fromtimestamp(41, UTC))
            await made.unsubscribe()
            assert [(queue, one.action) for queue, one in stores.asked] == [("old", "resume"), ("old", "end")]
            assert stores.asked[0][1].start == SequenceToken(40), "found in the log that it is of"

    asyncio.run(main())


def test_a_request_that_is_sent_again_gets_no_more_time(monkeypatch: pytest.MonkeyPatch) -> None:
    waits, answer = list[int](), pb.TableRequestReply(answer="waiting", owner="h1")

    async def call(_: LeaseCalls, __: str, ___: str, data: bytes, ____: float) -> bytes:
        waits.append(pb.TableRequest.FromString(data).wait_ms)
        await asyncio.sleep(0.01)
        if len(waits) < 4:
            raise Unreachable("the connection was lost")
        return answer.SerializeToString()

    monkeypatch.setattr(LeaseCalls, "_call", call)
    posted = asyncio.run(
        LeaseCalls(["a:1", "b:1"], None).post_request(LEASE, bytes(16), b"{}", 5, timeout_s=60)
    )
    assert posted.state == "waiting"
    assert waits == sorted(set(waits), reverse=True)
    assert waits[0] <= 5000
