"""Leases of a real cluster: over any node, over the death of the leader, and as used by balancers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from balancing_hosts import kill
from faults import Faults

import rt
from rt.net.lease_client import LeaseCalls, LeaseRow
from rt.streams.balancer.balancers import LeaseBalancer, LeaseTimes
from rt.streams.balancer.cluster_leases import ClusterLeases
from rt.streams.balancer.lease_balancer import LeasedBalancer
from rt.streams.queue.mapper import HashRingQueueMapper

pytestmark = pytest.mark.slow

WAIT_S = 180.0
LONG_S = 3600.0


async def until(is_met: Callable[[], object]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not is_met():
            await asyncio.sleep(0.05)


def test_leases_survive_leader_kill_with_rising_tokens_and_expire_unless_renewed(
    faults: Faults,
) -> None:
    nodes = faults.nodes
    leader = nodes.wait_ready()
    tls = nodes.certificate("subscriber", "host", lease_groups=["app"])

    async def main() -> None:
        calls = LeaseCalls(nodes.endpoints, tls)
        (held,) = await calls.acquire("host~a", ["app/held"], LONG_S, timeout_s=WAIT_S)
        (brief,) = await calls.acquire("host~a", ["app/brief"], 1.0, timeout_s=WAIT_S)
        tokens, is_over = [held, brief], asyncio.Event()

        async def acquire_on() -> None:
            while not is_over.is_set():
                name = f"app/{len(tokens)}"
                tokens.extend(await calls.acquire("host~b", [name], LONG_S, timeout_s=WAIT_S))

        acquiring = asyncio.ensure_future(acquire_on())
        await until(lambda: len(tokens) > 5)
        await asyncio.to_thread(nodes.kill, leader)
        count = len(tokens)
        await until(lambda: len(tokens) > count + 5)
        is_over.set()
        await acquiring
        row = LeaseRow("app/held", "host~a", held)
        assert await calls.renew("host~a", [row], timeout_s=WAIT_S) == [True]
        again = 0
        while not again:
            (again,) = await calls.acquire("host~b", ["app/brief"], LONG_S, timeout_s=WAIT_S)
        tokens.append(again)
        assert tokens == sorted(set(tokens)), "each got its lease, once"
        await asyncio.to_thread(nodes.start, leader)
        await asyncio.to_thread(nodes.wait_ready)
        returned = LeaseCalls([nodes.endpoints[nodes.names.index(leader)]], tls)
        rows = await returned.held("app/", timeout_s=WAIT_S)
        assert {one.token for one in rows} == {*tokens} - {brief}
        assert all(await returned.release("host~a", [row], timeout_s=WAIT_S))
        others = [one for one in rows if one.owner == "host~b"]
        assert all(await calls.release("host~b", others, timeout_s=WAIT_S))
        with pytest.raises(rt.CertificateError):
            await calls.acquire("host~a", ["other/x"], LONG_S, timeout_s=WAIT_S)
        await calls.close()
        await returned.close()

    asyncio.run(main())


def test_lease_balancers_share_queues_exclusively_over_leader_kill_and_host_failure(
    faults: Faults,
) -> None:
    nodes = faults.nodes
    leader = nodes.wait_ready()
    times = LeaseTimes(lease_s=8.0, look_s=0.2)

    def balancer(name: str) -> LeasedBalancer:
        tls = nodes.certificate("subscriber", name, lease_groups=["shared"])
        return LeaseBalancer(ClusterLeases(nodes.endpoints, tls, "shared"), host=name, times=times)

    async def main() -> None:
        hosts = {name: balancer(name) for name in ("h1", "h2", "h3")}

        def shares() -> list[int]:
            """Return how many queues each host has. No queue belongs to two hosts."""
            queues = [queue for host in hosts.values() for queue in host.my_queues()]
            assert len(queues) == len(set(queues))
            return [len(host.my_queues()) for host in hosts.values()]

        for host in hosts.values():
            await host.start(HashRingQueueMapper(6, "q"))
        await until(lambda: shares() == [2, 2, 2])
        await asyncio.to_thread(nodes.kill, leader)
        await hosts["h1"].stop()
        await until(lambda: shares() == [0, 3, 3])
        kill(hosts["h2"])
        await until(lambda: shares() == [0, 0, 6])
        await hosts["h2"].stop()
        await hosts["h3"].stop()
        await asyncio.to_thread(nodes.start, leader)

    asyncio.run(main())
