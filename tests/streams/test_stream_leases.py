"""Requirements on every lease provider, in memory and of a cluster, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import pytest
from memory_leases import LeaseTable, MemoryLeases

from rt.errors import CertificateError, InvalidName, Overloaded
from rt.names import NAME_BYTES_MAX, SESSION_NAME_BYTES_MAX
from rt.net.identity import Identity
from rt.net.lease_client import LeaseCalls
from rt.streams.balancer.balancers import LeaseBalancer, LeaseTimes
from rt.streams.balancer.cluster_leases import ClusterLeases
from rt.streams.balancer.lease import LeaseHolder, LeaseProvider, LeaseResult, OwnedLease
from rt.streams.queue.mapper import HashRingQueueMapper, PartitionedQueueMapper
from rt.streams.simulate.virtual_time import run as run_virtual
from sequencer.data.lease_manager import LeaseManager
from sequencer.data.lease_service import LeaseService
from sequencer.leader.lease_expiry import POLL_NS, LeaseExpiry
from sequencer.state.apply import apply
from sequencer.state.commands import Command
from sequencer.state.state import LEASES_PER_GROUP_MAX, SequencerState

OK, INVALID = LeaseResult.OK, LeaseResult.INVALID_TOKEN


class Memory:
    def __init__(self) -> None:
        self.table = LeaseTable()

    def provider(self, name: str) -> LeaseProvider:
        return MemoryLeases(self.table, name)


class Cluster:
    """The sequencer's own code without a network, from the lease service to the leader's clock."""

    def __init__(self) -> None:
        self.group = "app"
        self.state = SequencerState(bytes(range(16)))
        self.clock = LeaseExpiry(self.state)
        self.services: list[LeaseManager] = []

    def provider(self, name: str) -> LeaseProvider:
        replica: Any = SimpleNamespace(
            state=self.state,
            joined_state=self.state,
            standing=SimpleNamespace(leader="n1"),
            is_caught_up=True,
        )
        leasing = LeaseManager(replica, self.commit, lambda: True)
        self.services.append(leasing)
        identity = Identity("s", "subscriber", name.partition("~")[0], frozenset(), frozenset({self.group}))
        calls = Calls(self, LeaseService(leasing, identify=lambda: identity))
        tls: Any = SimpleNamespace(identity=identity)
        loop = asyncio.get_running_loop()
        return ClusterLeases(["n1"], tls, self.group, owner=name, calls=calls, clock=loop.time)

    def commit(self, command: Command) -> None:
        outcome = apply(self.state, command)
        for leasing in self.services:
            leasing.on_applied(command, outcome)

    def tick(self) -> None:
        """Run one expiry check of the leader. The time of a lease starts at the first check after its
        renewal.
        """
        over = self.clock.due(int(asyncio.get_running_loop().time() * 1e9))
        if over is not None:
            self.commit(over)


class Calls(LeaseCalls):
    def __init__(self, cluster: Cluster, service: LeaseService) -> None:
        super().__init__(["n1:5002"], None)
        self.cluster, self.service = cluster, service
        self.fails = False

    async def _ask(self, method: str, data: bytes, timeout_s: float) -> bytes:
        if self.fails:
            raise Overloaded("not now")
        answer: bytes = await getattr(self.service, method.lower())(data)
        return answer


World = Memory | Cluster


async def passes(world: World, seconds: float) -> None:
    """Let time pass, with the leader's expiry checks."""
    end_s = asyncio.get_running_loop().time() + seconds
    while (left_s := end_s - asyncio.get_running_loop().time()) > 1e-9:
        if isinstance(world, Cluster):
            world.tick()
        await asyncio.sleep(min(POLL_NS / 1e9, left_s))
    if isinstance(world, Cluster):
        world.tick()


@pytest.fixture(params=[Memory, Cluster], ids=["memory", "cluster"])
def run(request: pytest.FixtureRequest) -> Callable[[Callable[[World], Coroutine[Any, Any, None]]], None]:
    def run_one(test: Callable[[World], Coroutine[Any, Any, None]]) -> None:
        async def main() -> None:
            await test(request.param())

        run_virtual(main())

    return run_one


async def got(provider: LeaseProvider, *names: str, duration_s: float = 30.0) -> list[OwnedLease]:
    """Acquire the leases, and return those that were free."""
    return [one.lease for one in await provider.acquire(names, duration_s) if one.lease is not None]


def test_lease_gets_greater_token_with_each_new_owner(run: Any) -> None:
    async def test(world: World) -> None:
        one, other = world.provider("h1"), world.provider("h2~a")
        first, second = await got(one, "queue/q1", "queue/q2")
        assert (first.name, second.name) == ("queue/q1", "queue/q2")
        answers = await other.acquire(["queue/q2", "queue/q3"], 30.0)
        assert [answer.result for answer in answers] == [LeaseResult.NOT_AVAILABLE, OK]
        assert (await one.acquire(["queue/q1"], 30.0))[0].result is LeaseResult.NOT_AVAILABLE
        assert await one.release([first]) == [OK]
        assert await one.release([first]) == [INVALID]
        (third,) = await got(other, "queue/q1")
        assert third.token > max(first.token, second.token)
        assert [answer.result for answer in await one.renew([first, second])] == [INVALID, OK]
        held = await other.held("queue/")
        assert held is not None
        assert {name: one.owner for name, one in held.items()} == {
            "queue/q1": "h2~a",
            "queue/q2": "h1",
            "queue/q3": "h2~a",
        }
        assert await other.held("host/") == {}

    run(test)


def test_lease_is_exclusive_until_its_deadline_and_available_one_second_later(run: Any) -> None:
    async def test(world: World) -> None:
        one, other = world.provider("h1"), world.provider("h2")
        (lease,) = await got(one, "q", duration_s=10.0)
        assert 9.0 <= lease.until_s - one.now_s() <= 10.0
        await passes(world, lease.until_s - one.now_s())
        assert not await got(other, "q")
        await passes(world, 1.0)
        (taken,) = await got(other, "q")
        assert taken.token > lease.token
        assert (await one.renew([lease]))[0].result is INVALID
        assert await one.release([lease]) == [INVALID]
        assert await other.held("") == {"q": LeaseHolder("h2", taken.token)}

    run(test)


def test_lease_is_renewed_only_with_its_owner_and_token(run: Any) -> None:
    async def test(world: World) -> None:
        one, other = world.provider("h1"), world.provider("h2")
        (lease,) = await got(one, "q", duration_s=10.0)
        for _ in range(5):
            await passes(world, 6.0)
            (answer,) = await one.renew([lease])
            assert answer.lease is not None
            assert answer.lease.token == lease.token
            assert answer.lease.until_s > one.now_s() + 9.0
            lease = answer.lease
            assert (await other.renew([lease]))[0].result is INVALID
            assert await other.release([lease]) == [INVALID]
            stale = OwnedLease("q", lease.token + 1, 10.0, 0.0)
            assert (await one.renew([stale]))[0].result is INVALID
            assert await one.release([stale]) == [INVALID]

    run(test)


def test_empty_lease_request_returns_no_answers_and_invalid_name_raises_invalid_name(run: Any) -> None:
    async def test(world: World) -> None:
        one = world.provider("h1")
        assert list(await one.acquire([], 30.0)) == []
        assert list(await one.renew([])) == []
        assert list(await one.release([])) == []
        with pytest.raises(InvalidName):
            await one.acquire(["../q"], 30.0)
        await one.close()

    run(test)


def test_retriable_cluster_errors_are_transient_failures_and_others_are_raised() -> None:
    async def main() -> None:
        world = Cluster()
        one: Any = world.provider("h1")
        (lease,) = await got(one, "q")
        one._calls.fails = True
        for answers in (await one.acquire(["q"], 30.0), await one.renew([lease])):
            assert [answer.result for answer in answers] == [LeaseResult.TRANSIENT_FAILURE]
        assert await one.release([lease]) == [LeaseResult.TRANSIENT_FAILURE]
        assert await one.held("") is None
        one._calls.fails = False
        one._group = "other"
        with pytest.raises(CertificateError):
            await one.acquire(["q"], 30.0)

    run_virtual(main())


def test_leases_granted_before_group_limit_is_reached_are_kept() -> None:
    async def main() -> None:
        one = Cluster().provider("h1")
        names = [f"queue/q{number}" for number in range(LEASES_PER_GROUP_MAX + 100)]
        answers = await one.acquire(names, 30.0)
        results = [answer.result for answer in answers]
        assert results == [OK] * LEASES_PER_GROUP_MAX + [LeaseResult.TRANSIENT_FAILURE] * 100
        leases = [answer.lease for answer in answers if answer.lease is not None]
        assert all(answer.lease for answer in await one.renew(leases))
        assert await one.release(leases) == [OK] * LEASES_PER_GROUP_MAX

    run_virtual(main())


def test_balancer_serves_more_than_half_of_lease_limit_if_queues_exceed_it() -> None:
    async def main() -> None:
        cluster = Cluster()
        balancer = LeaseBalancer(cluster.provider("h1"), times=LeaseTimes(lease_s=300.0))
        await balancer.start(HashRingQueueMapper(2 * LEASES_PER_GROUP_MAX, "q"))
        await asyncio.sleep(10)
        assert len(balancer.my_queues()) > LEASES_PER_GROUP_MAX / 2
        await balancer.stop()
        assert not cluster.state.leases

    run_virtual(main())


def test_lease_names_of_longest_valid_group_owner_and_queue_are_accepted() -> None:
    async def main() -> None:
        cluster = Cluster()
        cluster.group = "g" * NAME_BYTES_MAX
        owner = "h" * NAME_BYTES_MAX + "~" + "x" * (SESSION_NAME_BYTES_MAX - NAME_BYTES_MAX - 1)
        balancer = LeaseBalancer(cluster.provider(owner))
        await balancer.start(PartitionedQueueMapper(["q" * NAME_BYTES_MAX]))
        await asyncio.sleep(1)
        assert len(balancer.my_queues()) == 1
        await balancer.stop()

    run_virtual(main())


def test_default_lease_owner_is_unique() -> None:
    async def main() -> None:
        tls: Any = SimpleNamespace(
            identity=Identity("s", "subscriber", "h1", frozenset(), frozenset({"app"}))
        )
        calls: Any = None
        owners = {ClusterLeases(["localhost:1"], tls, "app", calls=Calls(calls, calls)).owner for _ in "ab"}
        assert len(owners) == 2
        assert all(owner.startswith("h1~") for owner in owners)
        with pytest.raises(InvalidName):
            ClusterLeases(["localhost:1"], tls, "app", owner="h1/x")

    run_virtual(main())
