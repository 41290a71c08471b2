"""Requests to the owner of a queue, through nodes with fake consensus: kills, late answers, limits."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import pytest
from lease_nodes import calling, issue_certificates
from request_hosts import ALL, LEASE, SUBSCRIBE, World, in_world, make_log, until
from stream_consumers import Collector

from rt.errors import CertificateError, InvalidOption, Overloaded
from rt.streams import (
    Cluster,
    ClusterQueues,
    EventBatch,
    NoSuchSubscription,
    OwnerTimeout,
    QueueElsewhere,
    SequenceToken,
    StreamError,
    StreamProvider,
)
from rt.streams.agent.agent import PullingAgent
from rt.streams.balancer.balancer import FixedBalancer
from rt.streams.core.stream_id import QueueId
from rt.streams.requests import owner_calls
from rt.streams.requests.desk import RequestDesk
from rt.streams.requests.owner_calls import ask_owner
from rt.streams.requests.request import (
    PostedRequest,
    QueueAnswer,
    QueueRequest,
    decode_answer,
    decode_request,
    rejection,
)
from sequencer.localcluster.loopback import free_port
from sequencer.state.commands import Command
from sequencer.state.leases import requests
from sequencer.state.leases.tables import WriteTable


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return issue_certificates(tmp_path_factory.mktemp("pki"))


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_log(tmp_path_factory.mktemp("log"))


@pytest.mark.slow
def test_requests_are_executed_once_while_queue_changes_owner(pki: Path, log: Path) -> None:
    async def work(world: World) -> None:
        draw = random.Random(7)
        answered = set[str]()
        async with world.host("one") as one, world.host("two") as two:
            await until(lambda: one.is_owner or two.is_owner)

            async def ask_some() -> None:
                for _ in range(3):
                    answered.add((await world.ask(SUBSCRIBE)).subscription)

            asking = [asyncio.create_task(ask_some()) for _ in range(4)]
            for _ in range(3):
                token = world.nodes.state.lease_token
                await asyncio.sleep(draw.uniform(0.1, 0.6))
                world.revoke()
                await until(lambda token=token: world.nodes.state.lease_token > token)
            await asyncio.gather(*asking)
            assert len(answered) == 12
            assert {*world.subscriptions()} == answered
            ending = [world.ask(QueueRequest("end", each)) for each in sorted(answered)[:6]]
            world.revoke()
            assert {each.state for each in await asyncio.gather(*ending)} == {"ended"}
            assert {*world.subscriptions()} == {*sorted(answered)[6:]}

    in_world(pki, log, work)


def test_request_is_executed_by_next_owner_if_commit_of_first_owner_is_lost(pki: Path, log: Path) -> None:
    async def work(world: World) -> None:
        async with world.host("one") as one:
            await until(lambda: one.is_owner)
            made = (await world.ask(SUBSCRIBE)).subscription
            await until(lambda: one.events == ALL)
            held_back = list[Command]()
            world.nodes.held_back = held_back
            asking = asyncio.create_task(world.ask(QueueRequest("end", made)))
            while not one.made[0].closed:  # Decide all commands except the owner's commits.
                for command in held_back:
                    if not isinstance(command, WriteTable):
                        world.nodes.commit(command)
                held_back.clear()
                await asyncio.sleep(0.02)
            assert made in world.subscriptions(), "but that is not durable"
            assert not asking.done()
            world.revoke()
            world.nodes.held_back = None
        async with world.host("two"):
            assert (await asking).state == "ended"
            assert world.subscriptions() == {}

    in_world(pki, log, work)


def test_expired_request_is_not_executed(pki: Path, log: Path) -> None:
    async def work(world: World) -> None:
        async with world.host("one") as one:
            await until(lambda: one.is_owner)
            made = (await world.ask(SUBSCRIBE)).subscription
        late = await world.calls.post_request(LEASE, b"l" * 16, QueueRequest("end", made).encode(), 0.05)
        assert (late.state, late.owner) == ("waiting", "")
        over_ns = time.time_ns() + 50 * 10**6
        await until(lambda: time.time_ns() > over_ns)
        async with world.host("two"):
            while (found := await world.calls.find_request(LEASE, b"l" * 16)).state != "answered":
                await asyncio.sleep(0.02)
            with pytest.raises(OwnerTimeout, match="time of the request is over"):
                decode_answer(found.content).check()
            assert made in world.subscriptions()

    in_world(pki, log, work)


def test_request_in_progress_is_not_executed_again_if_clock_jumps() -> None:
    class Fake:
        """A store with one request, which takes several polls to execute."""

        id, until_ns, content = b"r" * 16, 60 * 10**9, SUBSCRIBE.encode()
        now_ns = looks = begun = 0
        answers: ClassVar[list[QueueAnswer]] = []

        async def requests(self) -> list[PostedRequest]:
            self.looks += 1
            return [] if self.answers else [self]

        async def carry_out(
            self, _: QueueRequest, posted: PostedRequest, answer: Callable[[QueueAnswer], None]
        ) -> None:
            self.begun += 1
            await until(lambda: self.looks >= 4)
            answer(QueueAnswer())

        def answer(self, _: PostedRequest, given: QueueAnswer) -> None:
            self.answers.append(given)

        async def commit(self) -> None:
            """Store nothing."""

    async def work(fake: Fake) -> None:
        desk = RequestDesk("q", fake, fake, fake.carry_out, clock_ns=lambda: fake.now_ns)
        running = asyncio.create_task(desk.run())
        await until(lambda: fake.begun)
        fake.now_ns = 3600 * 10**9
        await until(lambda: fake.answers)
        running.cancel()
        await asyncio.wait([running])
        assert (fake.begun, fake.answers) == (1, [QueueAnswer()])

    asyncio.run(work(Fake()))


def test_owner_timeout_names_owner_or_reports_missing_owner(
    pki: Path, log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner_calls, "GRACE_S", 0.2)

    async def work(world: World) -> None:
        asked = list[str]()
        with pytest.raises(OwnerTimeout, match=r"app/queue/q.*no owner.*check its name"):
            await world.ask(SUBSCRIBE, 0.3)
        async with world.host("one") as one:
            await until(lambda: one.is_owner)
            await world.ask(SUBSCRIBE)
        with pytest.raises(OwnerTimeout, match=r"no owner.*carries it out no more, unless"):
            await ask_owner(world.calls, LEASE, b"{}", 0.3, on_no_owner=lambda: asked.append("none"))
        assert asked == ["none"]
        await world.calls.close()
        async with calling(world.endpoints, world.pki, "h1") as owner:
            await owner.acquire("h1~idle", [LEASE], 30)
            with pytest.raises(OwnerTimeout, match="owner h1~idle"):
                await world.ask(SUBSCRIBE, 0.3)

    in_world(pki, log, work)


def test_owner_timeout_without_reachable_node_does_not_report_missing_owner(
    pki: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner_calls, "GRACE_S", 0.2)

    async def ask() -> None:
        async with calling([f"localhost:{free_port()}"], pki, "h1") as calls:
            with pytest.raises(OwnerTimeout, match="no node said in time") as raised:
                await ask_owner(calls, LEASE, b"{}", 0.3)
            assert "no owner" not in str(raised.value)

    asyncio.run(ask())


def test_reset_moves_faulted_subscription_and_resume_continues_there(pki: Path, log: Path) -> None:
    async def fail(batch: EventBatch) -> None:
        if batch.last >= SequenceToken(20):
            raise ValueError("poison")

    async def work(world: World) -> None:
        async with world.host("one", fail) as bad:
            await until(lambda: bad.is_owner)
            made = (await world.ask(SUBSCRIBE)).subscription
            await until(lambda: world.subscriptions()[made][0] is not None)
            assert (await world.ask(QueueRequest("reset", made, start=SequenceToken(3)))).state == "faulted"
            assert world.subscriptions()[made][1] == SequenceToken(3)
        async with world.host("two") as good:
            assert (await world.ask(QueueRequest("resume", made))).state == "served"
            await until(lambda: good.events == ALL[3:])
            assert (await world.ask(QueueRequest("resume", made))).state == "served", "nothing to do"
            assert (await world.ask(QueueRequest("reset", made, start=SequenceToken(40)))).state == "served"
            await until(lambda: good.events == [*ALL[3:], *ALL[40:]])
            with pytest.raises(NoSuchSubscription):
                await world.ask(QueueRequest("end", "nobody"))

    in_world(pki, log, work)


def test_subscription_without_consumer_can_be_reset_but_not_resumed_if_consumer_is_needed(
    pki: Path, log: Path
) -> None:
    async def work(world: World) -> None:
        async with world.host("one") as one:
            await until(lambda: one.is_owner)
            made = await one.stream.subscribe(Collector(), name="mine")
        async with world.host("two") as two:
            await until(lambda: two.is_owner)
            assert (
                await world.ask(QueueRequest("reset", made.id, start=SequenceToken(7)))
            ).state == "unattended"
            assert world.subscriptions()[made.id] == (None, SequenceToken(7))
            with pytest.raises(StreamError, match="no consumer for the subscription"):
                await world.ask(QueueRequest("resume", made.id, needs_consumer=True))
            got = Collector()
            await two.stream.subscribe(got, name="mine")
            await until(lambda: got.events == ALL[7:])

    in_world(pki, log, work)


def test_paused_queue_delivers_nothing_on_old_and_new_owner_until_continued(pki: Path, log: Path) -> None:
    async def work(world: World) -> None:
        async with world.host("one") as one:
            await until(lambda: one.is_owner)
            assert (await world.ask(QueueRequest("pause"))).state == "paused"
            made = (await world.ask(SUBSCRIBE)).subscription
            assert 'rt_streams_queue_paused{provider="p",host="one",queue="q"} 1' in one.provider.metrics()
        async with world.host("two") as two:
            await until(lambda: two.is_owner)
            assert (await world.ask(QueueRequest("reset", made, start=SequenceToken(10)))).state == "served"
            assert (one.events, two.events) == ([], [])
            assert (await world.ask(QueueRequest("continue"))).state == "continued"
            await until(lambda: two.events == ALL[10:])
            assert not two.provider.status()[0].is_paused

    in_world(pki, log, work)


def test_table_calls_without_permission_raise_certificate_error(pki: Path, log: Path) -> None:
    async def work(world: World) -> None:
        async with world.host("one") as one:
            await until(lambda: one.is_owner)
            await one.stream.subscribe(Collector(), consumer="c")
            content = await world.calls.inspect_table(LEASE)
            assert content.owner is not None
            assert content.owner.owner == "h1~one"
            assert not any(key.startswith(("requests", "answers")) for key in content.rows)
            async with calling(world.endpoints, world.pki, "none") as stranger:
                for call in (
                    stranger.inspect_table(LEASE),
                    stranger.post_request(LEASE, bytes(16), b"{}", 1),
                    stranger.find_request(LEASE, bytes(16)),
                    stranger.waiting_requests(content.owner, 0),
                ):
                    with pytest.raises(CertificateError):
                        await call
            with pytest.raises(CertificateError):
                await world.calls.waiting_requests(content.owner, 0)

    in_world(pki, log, work)


def test_too_many_requests_raise_overloaded(pki: Path, log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "POSTED_MAX", 1)
    monkeypatch.setattr(owner_calls, "GRACE_S", 0.2)

    async def work(world: World) -> None:
        async with world.host("one") as one:
            await until(lambda: one.is_owner)
            await one.stream.subscribe(Collector(), consumer="c")
        assert (await world.calls.post_request(LEASE, b"1" * 16, b"{}", 60)).state == "waiting"
        with pytest.raises(Overloaded, match="too many requests"):
            await world.ask(QueueRequest("pause"), 0.3)

    in_world(pki, log, work)


def test_queue_elsewhere_error_names_cluster_stores_if_stores_are_not_on_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        queues = ClusterQueues({"q": Cluster("s", str(tmp_path / "s"))})
        balancer = FixedBalancer()
        monkeypatch.setattr(balancer, "my_queues", dict)
        async with StreamProvider("p", queues, balancer=balancer) as provider:
            with pytest.raises(QueueElsewhere, match="Only cluster_stores"):
                await provider.stream("n", "a").subscribe(Collector(), consumer="c")

    asyncio.run(main())


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b"{}",
        b'{"action": "explode"}',
        b'{"action": "end", "subscription": 7}',
        b'{"action": "end", "more": 1}',
        b'{"action": "reset", "subscription": "a", "start": null}',
        b'{"action": "reset", "subscription": "a", "start": [-1, 0]}',
        b'{"action": "reset", "subscription": "a", "start": 7}',
        b'{"action": "reset", "subscription": "a", "start": "yesterday"}',
        b'{"action": "subscribe", "topic": "n/a", "consumer": "a b"}',
        b"[" * 100_000,
        b"\xff\xfe",
        b'{"action": ["end"]}',
        b'{"action": "end", "subscription": "\\ud800"}',
        b'{"action": "reset", "subscription": "a", "start": [1e400, 0]}',
        b'{"action": "reset", "subscription": "a", "start": [%s, 0]}' % (b"9" * 5000),
    ],
)
def test_decoding_invalid_request_raises_invalid_option(content: bytes) -> None:
    with pytest.raises(InvalidOption):
        decode_request(content)


def test_requests_and_answers_survive_encoding_and_decoding() -> None:
    for request in (
        SUBSCRIBE,
        QueueRequest("reset", "id", start=SequenceToken(7, 2)),
        QueueRequest("subscribe", topic="n/ä", consumer="c", name="x", needs_consumer=True),
    ):
        assert decode_request(request.encode()) == request
    assert decode_answer(QueueAnswer("id", "served").encode()).check() == QueueAnswer("id", "served")
    for error in (NoSuchSubscription("gone"), StreamError("no"), ValueError("x")):
        kind = type(error) if isinstance(error, StreamError) else StreamError
        with pytest.raises(kind, match=str(error)):
            decode_answer(rejection(error).encode()).check()
    for content in (b"", b"7", b'{"more": 1}'):
        with pytest.raises(StreamError, match="not valid"):
            decode_answer(content)


def test_host_losing_queue_during_subscribe_asks_next_owner(pki: Path, log: Path) -> None:
    async def work(world: World) -> None:
        async with world.host("one") as one:
            await until(lambda: one.is_owner)
            agent = await one.provider.agent_or_elsewhere(one.stream.id)
            assert isinstance(agent, PullingAgent)
            adapter = agent.queue.adapter
            latest = adapter.latest

            async def lost(queue: QueueId) -> SequenceToken | None:
                adapter.latest = latest  # type: ignore[method-assign]
                world.revoke()
                await until(lambda: not agent.queue.is_open)
                return await latest(queue)

            adapter.latest = lost  # type: ignore[method-assign]
            made = await one.stream.subscribe(Collector(), consumer="c", name="kept")
            assert adapter.latest == latest, "the queue was lost in the first call"
            assert [*world.subscriptions()] == [made.id]

    in_world(pki, log, work)
