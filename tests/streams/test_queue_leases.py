"""Queue leases on several clusters: an unreachable cluster stops only its own queue."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from balancing_hosts import kill
from memory_leases import LeaseTable, MemoryLeases

from rt.errors import CertificateError, InvalidOption
from rt.streams.balancer.balancer import Fence
from rt.streams.balancer.balancers import LeaseBalancer, LeaseTimes
from rt.streams.balancer.lease import LeaseAnswer, LeaseHolder, LeaseResult, OwnedLease
from rt.streams.balancer.queue_leases import QueueLeases
from rt.streams.core.stream_id import QueueId
from rt.streams.queue.mapper import PartitionedQueueMapper
from rt.streams.simulate.virtual_time import run

TIMES = LeaseTimes(lease_s=9.0, look_s=0.5, give_up_s=5.0)
NAMES = ["c1", "c2", "c3", "c4"]
UNKNOWN = LeaseAnswer(LeaseResult.TRANSIENT_FAILURE)


class ClusterOf:
    """A cluster that can be away, for all or some owners. Calls then end after `call_s` without a result."""

    def __init__(self) -> None:
        self.table = LeaseTable()
        self.is_away = False
        self.away_for = set[str]()
        self.call_s = 10.0
        self.slow_s = 0.0
        """Delay in seconds before a call changes leases."""


class Leases(MemoryLeases):
    """Leases whose calls take effect even if the caller is cancelled, as if a node had received the call."""

    def __init__(self, cluster: ClusterOf, owner: str) -> None:
        super().__init__(cluster.table, owner)
        self._cluster = cluster

    async def _is_away(self, limit_s: float) -> bool:
        cluster = self._cluster
        if cluster.is_away or self.owner in cluster.away_for:
            await asyncio.sleep(min(cluster.call_s, limit_s))
        return cluster.is_away or self.owner in cluster.away_for

    async def acquire(self, names: Sequence[str], duration_s: float) -> Sequence[LeaseAnswer]:
        if await self._is_away(duration_s / 3):
            return [UNKNOWN] * len(names)

        async def acquired() -> Sequence[LeaseAnswer]:
            await asyncio.sleep(self._cluster.slow_s)
            return await super(Leases, self).acquire(names, duration_s)

        return await asyncio.shield(asyncio.ensure_future(acquired()))

    async def renew(self, leases: Sequence[OwnedLease]) -> Sequence[LeaseAnswer]:
        if await self._is_away(3.0):
            return [UNKNOWN] * len(leases)
        await asyncio.sleep(self._cluster.slow_s)
        return await super().renew(leases)

    async def release(self, leases: Sequence[OwnedLease]) -> Sequence[LeaseResult]:
        if await self._is_away(10.0):
            return [LeaseResult.TRANSIENT_FAILURE] * len(leases)
        await asyncio.sleep(self._cluster.slow_s)
        return await super().release(leases)

    async def held(self, prefix: str) -> Mapping[str, LeaseHolder] | None:
        return None if await self._is_away(10.0) else await super().held(prefix)


class Host:
    """Serves the queues of a balancer, and records when one was not served."""

    def __init__(
        self, clusters: Mapping[str, ClusterOf], name: str, rng: random.Random | None = None
    ) -> None:
        self.leases = QueueLeases({each: Leases(cluster, name) for each, cluster in clusters.items()})
        self.balancer = LeaseBalancer(self.leases, times=TIMES, rng=rng)
        self.balancer.subscribe(self)
        self.serving: Mapping[QueueId, Fence] = {}
        self.lost = list[str]()

    def queues_changed(self) -> None:
        self.serving = dict(self.balancer.my_queues())

    async def release(self, queue: QueueId) -> None:
        await asyncio.sleep(0.1)

    async def revoke(self, queue: QueueId) -> None:
        self.lost.append(queue.name)

    @property
    def names(self) -> set[str]:
        return {queue.name for queue in self.serving}


async def started(clusters: Mapping[str, ClusterOf], *names: str) -> list[Host]:
    hosts = [Host(clusters, name) for name in names]
    for host in hosts:
        await host.balancer.start(PartitionedQueueMapper(NAMES))
    await asyncio.sleep(10)
    return hosts


def four() -> dict[str, ClusterOf]:
    return {name: ClusterOf() for name in NAMES}


def test_hosts_share_queues_evenly_and_each_queue_lease_is_on_its_own_cluster() -> None:
    async def main() -> None:
        clusters = four()
        one, two = await started(clusters, "h1", "h2")
        assert sorted([*one.names, *two.names]) == NAMES
        assert len(one.serving) == len(two.serving) == 2
        for name, cluster in clusters.items():
            assert {*cluster.table.held("")} == {f"queue/{name}", "host/h1", "host/h2"}
        assert one.balancer.hosts == {"h1", "h2"}
        await one.balancer.stop()
        await asyncio.sleep(5)
        assert two.names == {*NAMES}
        await two.balancer.stop()
        assert not any(cluster.table.held("") for cluster in clusters.values())

    run(main())


@pytest.mark.parametrize("tenths", range(0, 30, 2))
def test_host_stopping_during_renewal_leaves_no_lease(tenths: int) -> None:
    """Otherwise its host lease would keep its share of the queues from the other hosts until it expires."""

    async def main() -> None:
        clusters = four()
        one, two = await started(clusters, "h1", "h2")
        for cluster in clusters.values():
            cluster.slow_s = 0.9
        await asyncio.sleep(6 + tenths / 10)
        await one.balancer.stop()
        await asyncio.sleep(2)
        assert not any("host/h1" in cluster.table.held("") for cluster in clusters.values())
        await asyncio.sleep(TIMES.lease_s)
        assert two.names == {*NAMES}
        await two.balancer.stop()

    run(main())


@pytest.mark.parametrize("away_s", [6, 40])
def test_unreachable_cluster_stops_only_its_own_queue(away_s: int) -> None:
    async def main() -> None:
        clusters = four()
        one, two = await started(clusters, "h1", "h2")
        before = {host: host.names - {"c3"} for host in (one, two)}
        tokens = {queue: fence for host in (one, two) for queue, fence in host.serving.items()}
        clusters["c3"].is_away = True
        for _ in range(away_s * 10):
            await asyncio.sleep(0.1)
            assert all(before[host] <= host.names for host in (one, two))
        clusters["c3"].is_away = False
        await asyncio.sleep(15)
        assert sorted([*one.names, *two.names]) == NAMES
        assert {*one.lost, *two.lost} <= {"c3"}
        now = {queue: fence for host in (one, two) for queue, fence in host.serving.items()}
        assert {queue.name for queue in now if now[queue] != tokens[queue]} <= {"c3"}
        await one.balancer.stop()
        await two.balancer.stop()

    run(main())


def test_host_dying_while_cluster_is_unreachable_is_replaced_on_other_clusters() -> None:
    async def main() -> None:
        clusters = four()
        one, two = await started(clusters, "h1", "h2")
        clusters["c1"].is_away = True
        await asyncio.sleep(12)
        one.balancer._keeper.end()  # As after a kill: no lease is released.
        assert one.balancer._poll_task is not None
        one.balancer._poll_task.cancel()
        await asyncio.sleep(15)
        assert {"c2", "c3", "c4"} <= two.names
        clusters["c1"].is_away = False
        await asyncio.sleep(15)
        assert two.names == {*NAMES}
        await two.balancer.stop()

    run(main())


class LastFirst(random.Random):
    """Puts the last queue first: the worst order if that queue cannot be acquired."""

    def shuffle(self, queues: Any) -> None:
        queues.sort(reverse=True)


@pytest.mark.parametrize("is_killed", [False, True])
def test_queue_of_reachable_cluster_is_taken_over_while_another_cluster_is_unreachable(
    *, is_killed: bool
) -> None:
    async def main() -> None:
        clusters = {name: ClusterOf() for name in ("c1", "c2")}
        hosts = [Host(clusters, name, LastFirst()) for name in ("h1", "h2", "h3")]
        for host in hosts:
            await host.balancer.start(PartitionedQueueMapper([*clusters]))
        await asyncio.sleep(30)
        clusters["c2"].is_away = True
        await asyncio.sleep(12)
        (owner,) = (host for host in hosts if host.names == {"c1"})
        others = [host for host in hosts if host is not owner]
        if is_killed:
            kill(owner.balancer)
        else:
            await owner.balancer.stop()
        await asyncio.sleep(15)
        assert [host.names for host in others if host.names] == [{"c1"}]
        for host in others:
            await host.balancer.stop()

    run(main())


def test_stale_host_leases_of_returning_cluster_move_no_queue_of_another_cluster() -> None:
    """When the cluster returns, its leases last for their whole duration again, even those of stopped
    hosts.
    """

    async def main() -> None:
        clusters = {name: ClusterOf() for name in ("c1", "c2")}
        clusters["c2"].call_s = 0.5
        hosts = [Host(clusters, name) for name in ("h1", "h2", "h9")]
        for host in hosts:
            await host.balancer.start(PartitionedQueueMapper([*clusters]))
        await asyncio.sleep(30)
        clusters["c2"].is_away = True
        await asyncio.sleep(2)
        (owner,) = (host for host in hosts if host.names == {"c1"})
        await owner.balancer.stop()
        await asyncio.sleep(30)
        (heir,) = (host for host in hosts if host.names == {"c1"})
        before = dict(heir.serving)
        clusters["c2"].is_away = False
        for row in clusters["c2"].table._rows.values():
            row.end_s = clusters["c2"].table.now_s() + TIMES.lease_s
        for _ in range(300):
            await asyncio.sleep(0.1)
            assert before.items() <= heir.serving.items()
        assert sorted(name for host in hosts for name in host.names) == ["c1", "c2"]
        for host in hosts:
            await host.balancer.stop()

    run(main())


@pytest.mark.parametrize("alone", NAMES)
def test_host_reaching_only_one_cluster_leaves_queues_of_others_to_another_host(alone: str) -> None:
    async def main() -> None:
        clusters = four()
        one, two = await started(clusters, "h1", "h2")
        for name, cluster in clusters.items():
            if name != alone:
                cluster.away_for.add("h1")
        await asyncio.sleep(60)
        assert (one.names, two.names) == ({alone}, {*NAMES} - {alone})
        for cluster in clusters.values():
            cluster.away_for.clear()
        await asyncio.sleep(30)
        assert sorted([*one.names, *two.names]) == NAMES
        assert len(one.names) == len(two.names) == 2
        await one.balancer.stop()
        await two.balancer.stop()

    run(main())


def test_host_serves_all_queues_again_after_all_clusters_were_unreachable() -> None:
    async def main() -> None:
        clusters = four()
        (host,) = await started(clusters, "h1")
        assert host.names == {*NAMES}
        for cluster in clusters.values():
            cluster.is_away = True
        assert await host.leases.held("") is None
        await asyncio.sleep(30)
        assert host.names == set()
        for cluster in clusters.values():
            cluster.is_away = False
        await asyncio.sleep(15)
        assert host.names == {*NAMES}
        await host.balancer.stop()

    run(main())


def test_leases_granted_in_lost_answers_do_not_block_their_queues() -> None:
    async def main() -> None:
        clusters = four()
        for name, cluster in clusters.items():
            for lease in (f"queue/{name}", "host/h1"):
                assert cluster.table.acquire(lease, "h1", 3600)
        (host,) = await started(clusters, "h1")
        assert host.names == {*NAMES}
        await host.balancer.stop()
        assert not any(cluster.table.held("") for cluster in clusters.values())

    run(main())


def test_cluster_rejecting_certificate_does_not_stop_leases_on_other_clusters() -> None:
    class Refused(Leases):
        async def acquire(self, names: Sequence[str], duration_s: float) -> Sequence[LeaseAnswer]:
            raise CertificateError("the certificate is not for leases of that group")

        async def held(self, prefix: str) -> Mapping[str, LeaseHolder] | None:
            raise CertificateError("the certificate is not for leases of that group")

    async def main() -> None:
        clusters = four()
        clusters["c1"].table.acquire("queue/c1", "h2", 3600)
        leases = QueueLeases(
            {name: (Refused if name == "c2" else Leases)(each, "h1") for name, each in clusters.items()}
        )
        answers = await leases.acquire(["host/h1", *(f"queue/{name}" for name in NAMES)], 9.0)
        results = ["ok", "not available", "transient failure", "ok", "ok"]
        assert [answer.result.value for answer in answers] == results
        for _ in range(2):
            found = await leases.held("")
            assert found is not None
            assert {name: row.owner for name, row in found.items()} == {
                "host/h1": "h1",
                "queue/c1": "h2",
                "queue/c3": "h1",
                "queue/c4": "h1",
            }

    run(main())


def test_leases_of_different_owners_raise_invalid_option() -> None:
    clusters = four()
    with pytest.raises(InvalidOption, match="one owner"):
        QueueLeases({"c1": Leases(clusters["c1"], "h1"), "c2": Leases(clusters["c2"], "h2")})
    with pytest.raises(InvalidOption, match="one owner"):
        QueueLeases({})
