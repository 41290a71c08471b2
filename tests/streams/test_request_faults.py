"""Faulty requests to the owner of a queue: late or wrong requests, and tables without room."""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from lease_nodes import issue_certificates
from request_hosts import ALL, EARLIEST, EVENTS, LEASE, SUBSCRIBE, World, in_world, make_log, until
from stream_consumers import Collector

from rt.errors import Overloaded, Timeout
from rt.net.grpc_errors import Unreachable
from rt.net.lease_client import TABLE_SERVICE, LeaseCalls, OwnerRequest
from rt.objects import MemoryStore
from rt.streams import (
    Cluster,
    ClusterQueues,
    NoSuchSubscription,
    SequenceToken,
    StreamError,
    StreamId,
    StreamProvider,
)
from rt.streams.balancer.balancer import Fence, FixedBalancer
from rt.streams.core.stream_id import QueueId
from rt.streams.requests.request import QueueAnswer, QueueRequest, decode_request
from rt.streams.stream import Subscription
from rt.streams.subscriptions.subscription_store import SubscriptionRecord, SubscriptionStore
from rt.v1 import leases_pb2 as pb
from sequencer.state.leases import tables
from sequencer.state.leases.requests import LATE_NS, waiting


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return issue_certificates(tmp_path_factory.mktemp("pki"))


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_log(tmp_path_factory.mktemp("log"))


def test_start_given_as_name_position_or_time_reaches_owner(pki: Path, log: Path) -> None:
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


def test_subscribe_with_unknown_consumer_keeps_existing_subscription(pki: Path, log: Path) -> None:
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
    """Stores through which any host can send requests. The requests are recorded."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, QueueRequest]] = []

    def __call__(self, _: QueueId, __: Fence) -> MemoryStore:
        return MemoryStore()

    async def ask_owner(self, queue: QueueId, content: bytes, _: float) -> bytes:
        self.asked.append((queue.name, decode_request(content)))
        return QueueAnswer("id", "served").encode()


def test_requests_for_subscription_of_earlier_placement_are_sent_to_its_queue(
    log: Path, tmp_path: Path
) -> None:
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


def test_subscribe_without_room_raises_overloaded_and_other_commits_succeed(
    pki: Path, log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work(world: World) -> None:
        async with world.host("one") as one:
            await until(lambda: one.is_owner)
            made = (await world.ask(SUBSCRIBE)).subscription
            await until(lambda: one.events == ALL and world.subscriptions()[made][1] is None)
            monkeypatch.setattr(tables, "GROUP_BYTES_MAX", world.nodes.state.tables.size_bytes)
            for _ in range(3):
                with pytest.raises(Overloaded, match="no room"):
                    await world.ask(SUBSCRIBE)
            with pytest.raises(NoSuchSubscription):
                await world.ask(QueueRequest("end", "x" * 1000))
            assert (await world.ask(QueueRequest("end", made))).state == "ended"
            assert world.subscriptions() == {}
            failures = next(
                line for line in one.provider.metrics().splitlines() if "agent_failures_total{" in line
            )
            assert failures.endswith(" 0"), "no commit of others failed"

    in_world(pki, log, work)


class Full(MemoryStore):
    """A store whose first commit fails. Answers are stored as rows."""

    def __init__(self) -> None:
        super().__init__()
        self.commits = 0

    def begin(self, kind: Any) -> Any:
        writer = super().begin(kind)
        commit = writer.commit

        def committed() -> None:
            self.commits += 1
            if self.commits == 1:
                writer.rollback()
                raise Overloaded("no room")
            commit()

        def answer(request: bytes, _: int, content: bytes) -> None:
            writer.put("answers", request.hex(), content)

        writer.commit, writer.answer = committed, answer  # type: ignore[method-assign,attr-defined]
        return writer


def test_undone_subscription_is_not_in_concurrent_commit() -> None:
    """Otherwise the owner would report that it made a subscription, and then lose it."""

    async def main() -> None:
        space = Full()
        store = SubscriptionStore(space, QueueId(0, "q"), Fence(1))
        record = SubscriptionRecord("new", StreamId("n", "a"))
        posted = OwnerRequest(b"1" * 16, b"", 10**18)

        def undo() -> None:
            store.remove(record.id)
            store.take_back(posted)

        async def subscribe() -> None:
            store.put(record, SequenceToken(7))
            store.answer(posted, QueueAnswer(record.id, "served"))
            await store.commit(undo)

        async def save() -> None:
            while space.commits == 0 or store._committing is not None:
                await asyncio.sleep(0)
            store.pause(7)
            await store.commit()

        subscribing, saving = asyncio.create_task(subscribe()), asyncio.create_task(save())
        with pytest.raises(Overloaded):
            await subscribing
        await saving
        assert space.commits == 2
        kept = SubscriptionStore(MemoryStore(space.content()), QueueId(0, "q"), Fence(1))
        assert (kept.record("new"), kept.paused_s, space.content().get("answers")) == (None, 7, None)

    asyncio.run(main())


def test_resent_request_has_only_remaining_time(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_node_rejects_late_request_and_limits_wait_to_its_deadline(pki: Path, log: Path) -> None:
    """The node may have forgotten the answer by then, and the request would be executed again."""

    async def work(world: World) -> None:
        async with world.host("one") as one:
            await until(lambda: one.is_owner)
            await one.stream.subscribe(Collector(), consumer="c")

        async def post(until_ns: int) -> pb.TableRequestReply:
            asked = pb.TableRequest(lease=LEASE, id=b"1" * 16, wait_ms=10**6, content=b"x", until_ns=until_ns)
            method = f"/{TABLE_SERVICE}/Post"
            data = await world.calls._call(world.endpoints[0], method, asked.SerializeToString(), 60)
            return pb.TableRequestReply.FromString(data)

        with pytest.raises(Timeout, match=r"comes after its time.*clocks"):
            await post(time.time_ns() - LATE_NS - 10**9)
        assert (await post(until_ns := time.time_ns() + 10**9)).answer == "waiting"
        table = world.nodes.state.tables.get(LEASE)
        assert table is not None
        (row,) = waiting(table)
        assert row.until_ns == until_ns + LATE_NS, "not as long as the message says"

    in_world(pki, log, work)
