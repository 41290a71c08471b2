"""A lease balancer survives failures of leases, listeners and policy, and can be stopped."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from memory_leases import LeaseTable, MemoryLeases

from rt.errors import CertificateError
from rt.streams.balancer.balancer import Fence
from rt.streams.balancer.balancers import LeaseBalancer, LeaseTimes
from rt.streams.balancer.lease import LeaseAnswer, LeaseHolder, LeaseResult, OwnedLease
from rt.streams.core.stream_id import QueueId
from rt.streams.queue.mapper import HashRingQueueMapper
from rt.streams.simulate.virtual_time import run

TIMES = LeaseTimes(lease_s=12.0, look_s=2.0, give_up_s=8.0)
LONG_S = 1e6


class Counted(MemoryLeases):
    """Leases with calls that take a moment. `raises`: the error that a call raises once, by the call's
    name.
    """

    def __init__(self, table: LeaseTable, owner: str = "h1") -> None:
        super().__init__(table, owner)
        self.releases = self.at_once = self.at_once_most = 0
        self.raises = dict[str, Exception]()
        self.release_s = 0.1
        self.renewed = list[str]()

    def _may_raise(self, call: str) -> None:
        if error := self.raises.pop(call, None):
            raise error

    async def release(self, leases: Sequence[OwnedLease]) -> Sequence[LeaseResult]:
        self.releases += 1
        self.at_once += 1
        self.at_once_most = max(self.at_once_most, self.at_once)
        try:
            await asyncio.sleep(self.release_s)
            self._may_raise("release")
            return await super().release(leases)
        finally:
            self.at_once -= 1

    async def renew(self, leases: Sequence[OwnedLease]) -> Sequence[LeaseAnswer]:
        self._may_raise("renew")
        self.renewed += [one.name for one in leases]
        return await super().renew(leases)

    async def held(self, prefix: str) -> Mapping[str, LeaseHolder] | None:
        self._may_raise("held")
        return await super().held(prefix)


class Host:
    """Stops each queue in `drain_s`, or calls `stops` instead."""

    def __init__(self, balancer: LeaseBalancer, drain_s: float = 1.0) -> None:
        self.balancer, self.drain_s = balancer, drain_s
        self.serving = dict[QueueId, Fence]()
        self.asked = list[QueueId]()
        balancer.subscribe(self)

    def queues_changed(self) -> None:
        owned = self.balancer.my_queues()
        self.serving = {queue: fence for queue, fence in self.serving.items() if queue in owned}
        self.serving |= {queue: fence for queue, fence in owned.items() if queue not in self.asked}

    async def release(self, queue: QueueId) -> None:
        self.asked.append(queue)
        await self.stops(queue)
        self.serving.pop(queue, None)

    async def revoke(self, queue: QueueId) -> None:
        await self.release(queue)

    async def stops(self, queue: QueueId) -> None:
        await asyncio.sleep(self.drain_s)


async def serving(count: int, leases: MemoryLeases, **kwargs: Any) -> tuple[LeaseBalancer, Host]:
    balancer = LeaseBalancer(leases, times=TIMES)
    host = Host(balancer, **kwargs)
    await balancer.start(HashRingQueueMapper(count, "q"))
    await asyncio.sleep(TIMES.look_s)
    assert len(host.serving) == count
    return balancer, host


def test_stop_releases_leases_of_many_queues_in_few_calls() -> None:
    async def main() -> None:
        table = LeaseTable()
        leases = Counted(table)
        balancer, host = await serving(300, leases)
        await balancer.stop()
        assert not table.held("")
        assert not host.serving
        assert leases.at_once_most == 1
        assert leases.releases <= 4

    run(main())


def test_failed_lease_release_does_not_block_other_queues() -> None:
    async def main() -> None:
        table = LeaseTable()
        leases = Counted(table)
        balancer, host = await serving(2, leases)
        leases.raises["release"] = CertificateError("it has expired")
        first, second = host.serving

        async def stops(queue: QueueId) -> None:
            await asyncio.sleep(1.0 if queue == first else 7.0)

        host.stops = stops  # type: ignore[method-assign]
        await balancer.stop()
        assert not host.serving, "it was drained before the balancer ended"
        assert [*table.held("")] == [f"queue/{first.name}"], "it lapses"
        assert second in host.asked

    run(main())


def test_lease_is_not_renewed_during_its_release() -> None:
    async def main() -> None:
        leases = Counted(LeaseTable())
        balancer, _ = await serving(1, leases)
        leases.release_s = 2.5 * TIMES.renew_s
        stopping = asyncio.ensure_future(balancer.stop())
        await asyncio.sleep(1.5)
        leases.renewed.clear()
        await asyncio.sleep(2 * TIMES.renew_s)
        assert set(leases.renewed) == {"host/h1"}
        await stopping

    run(main())


@pytest.mark.parametrize("call", ["held", "renew"])
def test_lease_call_is_retried_after_unexpected_error(call: str) -> None:
    async def main() -> None:
        leases = Counted(LeaseTable())
        balancer, host = await serving(3, leases)
        fences = dict(host.serving)
        for _ in range(2):
            leases.raises[call] = RuntimeError("a bug")
            await asyncio.sleep(2 * TIMES.lease_s)
            assert not leases.raises
        assert balancer.my_queues() == host.serving == fences, "they were kept all the time"
        await balancer.stop()

    run(main())


def test_policy_is_called_again_after_error() -> None:
    async def main() -> None:
        balancer = LeaseBalancer(MemoryLeases(LeaseTable(), "h1"), times=TIMES)
        assign, failures = balancer._policy.assign, [IndexError("a bug")]

        def fails_once(view: Any) -> Any:
            if failures:
                raise failures.pop()
            return assign(view)

        balancer._policy.assign = fails_once  # type: ignore[method-assign]
        await balancer.start(HashRingQueueMapper(3, "q"))
        await asyncio.sleep(2 * TIMES.look_s)
        assert len(balancer.my_queues()) == 3
        await balancer.stop()

    run(main())


async def cancelled(_: QueueId) -> None:
    raise asyncio.CancelledError


async def for_ever(_: QueueId) -> None:
    """Ignores the first cancellation."""
    try:
        await asyncio.sleep(LONG_S)
    except asyncio.CancelledError:
        await asyncio.sleep(LONG_S)


@pytest.mark.parametrize("stops", [cancelled, for_ever])
def test_queue_not_stopped_in_time_moves_after_its_lease_expires(stops: Any) -> None:
    async def main() -> None:
        table = LeaseTable()
        balancer, host = await serving(1, MemoryLeases(table, "h1"))
        host.stops = stops  # type: ignore[method-assign]
        (fence,) = host.serving.values()
        other = LeaseBalancer(MemoryLeases(table, "h2"), host="h2", times=TIMES)
        await other.start(HashRingQueueMapper(1, "q"))
        async with asyncio.timeout(3 * TIMES.give_up_s):
            await balancer.stop()
        assert table.held("queue/")["queue/q-0"].token == fence, "it was not let go of"
        await asyncio.sleep(TIMES.lease_s + 2 * TIMES.look_s)
        (taken,) = other.my_queues().values()
        assert taken > fence
        await other.stop()

    run(main())


def test_cancelled_stop_notifies_listeners_of_lost_queues() -> None:
    async def main() -> None:
        balancer, host = await serving(3, MemoryLeases(LeaseTable(), "h1"), drain_s=LONG_S)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1.0):
                await balancer.stop()
        assert not balancer.my_queues()
        assert not host.serving
        await balancer.stop()

    run(main())


def test_queue_under_release_is_held_until_late_listener_stops_it() -> None:
    async def main() -> None:
        table = LeaseTable()
        balancer, host = await serving(1, MemoryLeases(table, "h1"), drain_s=3.0)
        stopping = asyncio.ensure_future(balancer.stop())
        await asyncio.sleep(1.0)
        late = Host(balancer, drain_s=4.0)
        late.queues_changed()
        assert late.serving
        await asyncio.sleep(3.0)
        assert not host.serving
        assert table.held("queue/"), "it is served here yet"
        await stopping
        assert late.asked
        assert not late.serving

    run(main())
