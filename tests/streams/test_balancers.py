"""Balancers over leases, in virtual time: one host per queue, few moves, all queues served in the end."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from balancing_hosts import kill
from hypothesis import given, settings
from hypothesis import strategies as st
from memory_leases import LeaseTable, MemoryLeases

from rt.errors import Closed, InvalidOption
from rt.streams.balancer.balancer import Fence
from rt.streams.balancer.balancers import DeploymentBalancer, LeaseBalancer, LeaseTimes, RingBalancer
from rt.streams.balancer.lease import LeaseAnswer, LeaseHolder, LeaseResult, OwnedLease
from rt.streams.balancer.lease_balancer import LeasedBalancer
from rt.streams.core.stream_id import QueueId
from rt.streams.queue.mapper import HashRingQueueMapper
from rt.streams.simulate.virtual_time import run

TIMES = LeaseTimes(lease_s=12.0, look_s=2.0, give_up_s=8.0)
SETTLED_S = 60.0
MATURITY_S = 20.0
NAMES = ("h1", "h2", "h3", "h4")
UNKNOWN = LeaseResult.TRANSIENT_FAILURE


class Faulty(MemoryLeases):
    """Leases that lose requests or answers."""

    fault = ""

    def lost(self, answers: Sequence[LeaseAnswer]) -> Sequence[LeaseAnswer]:
        return [LeaseAnswer(UNKNOWN)] * len(answers) if self.fault else answers

    async def acquire(self, names: Sequence[str], duration_s: float) -> Sequence[LeaseAnswer]:
        await asyncio.sleep(0.05)
        if self.fault == "asked":
            return [LeaseAnswer(UNKNOWN)] * len(names)
        return self.lost(await super().acquire(names, duration_s))

    async def renew(self, leases: Sequence[OwnedLease]) -> Sequence[LeaseAnswer]:
        await asyncio.sleep(0.05)
        if self.fault == "asked":
            return [LeaseAnswer(UNKNOWN)] * len(leases)
        return self.lost(await super().renew(leases))

    async def release(self, leases: Sequence[OwnedLease]) -> Sequence[LeaseResult]:
        if self.fault == "asked":
            return [UNKNOWN] * len(leases)
        results = await super().release(leases)
        return [UNKNOWN] * len(leases) if self.fault else results

    async def held(self, prefix: str) -> Mapping[str, LeaseHolder] | None:
        return None if self.fault else await super().held(prefix)


class World:
    """The hosts of one lease table. Fails if a host starts to serve a queue that another host serves."""

    def __init__(self, kind: str, count: int = 7, names: Sequence[str] = NAMES) -> None:
        self.kind, self.names = kind, names
        self.mapper = HashRingQueueMapper(count, "q")
        self.table = LeaseTable()
        self.hosts: dict[str, Host] = {}
        self.serving: dict[QueueId, tuple[str, Fence]] = {}
        self.fences: dict[QueueId, Fence] = {}
        self.moves = 0
        self.started = 0

    def balancer(self, leases: MemoryLeases, host: str) -> LeasedBalancer:
        match self.kind:
            case "ring":
                return RingBalancer(leases, host=host, times=TIMES)
            case "deployment":
                return DeploymentBalancer(leases, self.names, host=host, maturity_s=MATURITY_S, times=TIMES)
            case "static":
                return DeploymentBalancer(leases, self.names, host=host, static=True, times=TIMES)
            case _:
                return LeaseBalancer(leases, host=host, times=TIMES, rng=random.Random(host))

    async def join(self, *names: str) -> None:
        for name in names:
            if name not in self.hosts:
                self.hosts[name] = Host(self, name)
                await self.hosts[name].balancer.start(self.mapper)

    async def leave(self, name: str) -> None:
        if host := self.hosts.pop(name, None):
            await host.balancer.stop()
            assert not host.mine
            assert not host.balancer.my_queues()

    def kill(self, name: str) -> None:
        """Stop everything of the host without notice to the others."""
        if host := self.hosts.pop(name, None):
            host.is_dead = True
            kill(host.balancer)
            for queue in [*host.mine]:
                host.end(queue)

    def shares(self) -> dict[str, int]:
        return {name: len(host.mine) for name, host in self.hosts.items()}

    def owners(self) -> dict[QueueId, str]:
        return {queue: name for queue, (name, _) in self.serving.items()}


class Host:
    """Serves its queues as a manager does: drains a released queue, stops a revoked one at once."""

    def __init__(self, world: World, name: str) -> None:
        self.world, self.name = world, name
        world.started += 1
        self.leases = Faulty(world.table, f"{name}~{world.started}")
        self.balancer = world.balancer(self.leases, name)
        self.mine: dict[QueueId, Fence] = {}
        self.released: dict[QueueId, Fence] = {}
        self.drain_s = 3.0
        self.is_dead = False
        self.balancer.subscribe(self)

    def queues_changed(self) -> None:
        queues = self.balancer.my_queues()
        for queue in [queue for queue in self.mine if queue not in queues]:
            self.end(queue)
        for queue in [queue for queue, fence in self.released.items() if queues.get(queue) != fence]:
            del self.released[queue]
        for queue, fence in queues.items():
            if queue not in self.mine and queue not in self.released:
                self.begin(queue, fence)

    async def release(self, queue: QueueId) -> None:
        assert queue in self.balancer.my_queues()
        await asyncio.sleep(self.drain_s)
        if queue in self.mine and not self.is_dead:
            self.released[queue] = self.mine[queue]
            assert queue in self.balancer.my_queues(), "it was served without a right"
            self.end(queue)

    async def revoke(self, queue: QueueId) -> None:
        assert queue not in self.balancer.my_queues()
        if queue in self.mine:
            self.end(queue)

    def begin(self, queue: QueueId, fence: Fence) -> None:
        assert queue not in self.world.serving, (queue, self.world.serving[queue], self.name)
        for other in self.world.hosts.values():
            assert other is self or queue not in other.balancer.my_queues()
        assert fence > self.world.fences.get(queue, 0), "a fence rises with every owner"
        self.world.fences[queue] = fence
        self.world.serving[queue] = (self.name, fence)
        self.world.moves += 1
        self.mine[queue] = fence

    def end(self, queue: QueueId) -> None:
        del self.world.serving[queue]
        del self.mine[queue]


KINDS = ["ring", "deployment", "lease"]


@pytest.mark.parametrize("kind", KINDS)
def test_hosts_share_all_queues_and_join_or_leave_moves_few(kind: str) -> None:
    async def main() -> None:
        world = World(kind, count=24)
        await world.join("h1", "h2", "h3")
        await asyncio.sleep(SETTLED_S)
        assert len(world.serving) == 24
        if kind != "ring":
            assert max(world.shares().values()) - min(world.shares().values()) <= 1
        before, moves = world.owners(), world.moves
        await world.join("h4")
        await asyncio.sleep(SETTLED_S)
        after = world.owners()
        assert len(after) == 24
        moved = {queue for queue in after if after[queue] != before[queue]}
        assert {after[queue] for queue in moved} == {"h4"}
        assert 0 < len(moved) <= 10
        assert world.moves - moves == len(moved)
        await world.leave("h4")
        await asyncio.sleep(SETTLED_S)
        assert len(world.serving) == 24
        assert world.moves - moves <= 2 * len(moved), "nothing of the others' moved"
        for name in ("h1", "h2", "h3"):
            await world.leave(name)
        assert not world.table.held("")

    run(main())


@pytest.mark.parametrize("kind", KINDS)
def test_queues_of_dead_host_are_served_again_after_its_leases_expire(kind: str) -> None:
    async def main() -> None:
        world = World(kind)
        await world.join("h1", "h2")
        await asyncio.sleep(SETTLED_S)
        before = len(world.hosts["h2"].mine)
        assert before
        world.kill("h2")
        assert len(world.serving) == 7 - before
        await asyncio.sleep(TIMES.lease_s - TIMES.renew_s - 0.5)
        assert len(world.serving) == 7 - before, "it may live"
        await asyncio.sleep(TIMES.renew_s + 2 * TIMES.look_s + 1)
        assert len(world.serving) == 7

    run(main())


def test_static_balancer_does_not_move_queues_of_dead_host() -> None:
    async def main() -> None:
        world = World("static", names=("h1", "h2"))
        await world.join("h1", "h2")
        await asyncio.sleep(SETTLED_S)
        assert world.shares() == {"h1": 4, "h2": 3}
        world.kill("h2")
        await asyncio.sleep(SETTLED_S)
        assert len(world.serving) == 4
        await world.join("h2")
        await asyncio.sleep(SETTLED_S)
        assert world.shares() == {"h1": 4, "h2": 3}

    run(main())


def test_host_unable_to_renew_leases_stops_before_another_host_starts() -> None:
    async def main() -> None:
        world = World("lease")
        await world.join("h1", "h2")
        await asyncio.sleep(SETTLED_S)
        cut = world.hosts["h2"]
        for fault in ("asked", "answers"):
            cut.leases.fault = fault
            if fault == "asked":
                await asyncio.sleep(TIMES.lease_s - TIMES.margin_s)
                assert not cut.mine
                await asyncio.sleep(SETTLED_S)
                assert world.shares() == {"h1": 7, "h2": 0}
            else:
                await asyncio.sleep(SETTLED_S)
                assert not cut.mine
            cut.leases.fault = ""
            await asyncio.sleep(SETTLED_S)
            assert sorted(world.shares().values()) == [3, 4]

    run(main())


def test_queue_moves_only_after_lease_expiry_if_listener_never_stops_it() -> None:
    async def main() -> None:
        world = World("lease", count=2)
        await world.join("h1")
        await asyncio.sleep(SETTLED_S)
        stuck = world.hosts["h1"]
        stuck.drain_s = 1e6
        stopped_s = list[float]()

        async def never(_: QueueId) -> None:
            stopped_s.append(asyncio.get_running_loop().time())
            await asyncio.sleep(1e6)

        stuck.revoke = never  # type: ignore[method-assign]
        await world.join("h2")
        while not world.hosts["h2"].mine:
            held = world.table.held("queue/")
            assert len(held) == 2 or asyncio.get_running_loop().time() > stopped_s[0] + TIMES.give_up_s / 2
            await asyncio.sleep(0.1)
        assert len(stopped_s) == 1
        assert world.shares() == {"h1": 1, "h2": 1}

    run(main())


def test_queues_are_owned_only_while_lease_is_valid_by_clock() -> None:
    async def main() -> None:
        now = [0.0]
        table = LeaseTable(lambda: now[0])
        balancer = LeaseBalancer(MemoryLeases(table, "h1"), times=TIMES)
        await balancer.start(HashRingQueueMapper(3, "q"))
        await asyncio.sleep(1)
        assert len(balancer.my_queues()) == 3
        now[0] = TIMES.lease_s - TIMES.margin_s  # The machine slept, and the loop's timers did not run.
        assert not balancer.my_queues()
        await balancer.stop()

    run(main())


def test_lease_granted_in_lost_answer_does_not_block_its_queue() -> None:
    async def main() -> None:
        world = World("lease")
        await world.join("h1")
        host = world.hosts["h1"]
        host.leases.fault = "answers"
        for name in ("queue/q-0", "host/h1"):
            world.table.acquire(name, host.leases.owner, 1e6)
        await asyncio.sleep(SETTLED_S)
        assert not world.serving
        host.leases.fault = ""
        await asyncio.sleep(3 * TIMES.look_s)
        assert world.shares() == {"h1": 7}

    run(main())


def test_lost_queue_is_not_acquired_again_before_its_work_stops() -> None:
    async def main() -> None:
        world = World("lease", count=1)
        await world.join("h1")
        await asyncio.sleep(SETTLED_S)
        host, stopped = world.hosts["h1"], asyncio.Event()
        (queue,) = host.mine

        async def slowly(one: QueueId) -> None:
            await asyncio.sleep(7.0)
            host.end(one)
            stopped.set()

        host.revoke = slowly  # type: ignore[method-assign]
        world.table.release("queue/q-0", host.leases.owner, host.mine[queue])
        while not stopped.is_set():
            assert host.balancer.my_queues().get(queue, Fence(1)) <= host.mine[queue]
            await asyncio.sleep(0.1)
        await asyncio.sleep(2 * TIMES.look_s)
        assert host.mine[queue] == world.fences[queue] > 1

    run(main())


def test_second_host_with_same_name_serves_only_after_first_leaves() -> None:
    async def main() -> None:
        world = World("lease")
        await world.join("h1")
        await asyncio.sleep(SETTLED_S)
        second = Host(world, "h1")
        await second.balancer.start(world.mapper)
        await asyncio.sleep(SETTLED_S)
        assert (len(world.hosts["h1"].mine), len(second.mine)) == (7, 0)
        await world.leave("h1")
        await asyncio.sleep(SETTLED_S)
        assert len(second.mine) == 7

    run(main())


def test_stopped_balancer_cannot_restart_and_calls_no_listener() -> None:
    async def main() -> None:
        world = World("lease")
        await world.join("h1")
        host = world.hosts["h1"]
        assert not host.balancer.subscribe(host)
        await asyncio.sleep(SETTLED_S)
        await asyncio.gather(host.balancer.stop(), host.balancer.stop())
        assert not world.table.held("")
        host.is_dead = True
        calls: list[Any] = []
        host.queues_changed = lambda: calls.append(1)  # type: ignore[method-assign]
        with pytest.raises(Closed):
            await host.balancer.start(world.mapper)
        await asyncio.sleep(SETTLED_S)
        assert not calls
        assert not host.balancer.unsubscribe(host)
        unstarted = LeaseBalancer(MemoryLeases(world.table, "h9"))
        await unstarted.stop()
        assert not unstarted.my_queues()

    run(main())


def test_failing_listener_does_not_stop_balancer() -> None:
    async def main() -> None:
        world = World("lease")
        await world.join("h1")
        bad = Bad()
        world.hosts["h1"].balancer.subscribe(bad)
        await asyncio.sleep(SETTLED_S)
        assert len(world.serving) == 7
        assert bad.calls

    run(main())


class Bad:
    calls = 0

    def queues_changed(self) -> None:
        self.calls += 1
        raise RuntimeError

    async def release(self, queue: QueueId) -> None:
        raise RuntimeError

    async def revoke(self, queue: QueueId) -> None:
        raise RuntimeError


@pytest.mark.parametrize(
    "wrong",
    [
        lambda leases: LeaseTimes(lease_s=0.5),
        lambda leases: LeaseTimes(look_s=0),
        lambda leases: LeaseTimes(lease_s=5.0, look_s=6.0),
        lambda leases: LeaseTimes(lease_s=4000.0),
        lambda leases: LeaseTimes(give_up_s=0),
        lambda leases: LeaseTimes(give_up_s=float("nan")),
        lambda leases: LeaseTimes(give_up_s=float("inf")),
        lambda leases: DeploymentBalancer(leases, ["h2"]),
        lambda leases: DeploymentBalancer(leases, []),
        lambda leases: DeploymentBalancer(leases, ["h1"], maturity_s=-1),
        lambda leases: DeploymentBalancer(leases, ["h1"], maturity_s=float("nan")),
    ],
    ids=range(11),
)
def test_invalid_settings_raise_invalid_option(wrong: Any) -> None:
    with pytest.raises(InvalidOption):
        wrong(MemoryLeases(LeaseTable(), "h1"))


HOST = st.sampled_from(NAMES)
STEP = st.one_of(
    st.tuples(st.sampled_from(["join", "join", "leave", "kill", "asked", "answers", "heal"]), HOST),
    st.tuples(st.just("pass"), st.sampled_from([0.03, 0.7, 2.5, 9.0, 21.0])),
)


@pytest.mark.parametrize("kind", KINDS)
@given(steps=st.lists(STEP, min_size=10, max_size=30))
@settings(max_examples=12, deadline=None)
def test_queues_have_one_host_during_faults_and_are_all_served_after_faults(
    kind: str, steps: list[tuple[str, Any]]
) -> None:
    async def main() -> None:
        world = World(kind)
        leaving: list[asyncio.Task[None]] = []
        await world.join("h1")
        for what, arg in steps:
            match what:
                case "pass":
                    await asyncio.sleep(arg)
                case "join":
                    await world.join(arg)
                case "leave":
                    leaving.append(asyncio.ensure_future(world.leave(arg)))
                case "kill":
                    world.kill(arg)
                case fault if arg in world.hosts:
                    world.hosts[arg].leases.fault = "" if fault == "heal" else fault
            await asyncio.sleep(0.01)
        await asyncio.gather(*leaving)
        await world.join("h2")
        for host in world.hosts.values():
            host.leases.fault = ""
        await asyncio.sleep(2 * SETTLED_S)
        assert len(world.serving) == 7
        if kind == "lease":
            assert max(world.shares().values()) - min(world.shares().values()) <= 1

    run(main())


def test_second_host_of_same_owner_acquires_queues_only_after_first_host_dies(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def main() -> None:
        table, mapper = LeaseTable(), HashRingQueueMapper(3, "q")
        first = LeaseBalancer(MemoryLeases(table, "h"), host="one", times=TIMES)
        second = LeaseBalancer(MemoryLeases(table, "h"), host="two", times=TIMES)
        await first.start(mapper)
        await asyncio.sleep(SETTLED_S)
        served = first.my_queues()
        assert len(served) == 3
        await second.start(mapper)
        await asyncio.sleep(SETTLED_S)
        assert (first.my_queues(), second.my_queues()) == (served, {})
        assert "owner_is_shared owner=h host=two other=one" in caplog.text
        kill(first)
        await asyncio.sleep(SETTLED_S)
        assert second.my_queues().keys() == served.keys()
        await second.stop()

    run(main())
