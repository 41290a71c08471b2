"""A host: the product's balancer, and a listener that drains queues in a random time.

The process of a host stops in order, or crashes. A host that is cut off continues to run, but no cluster
answers it.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Collection, Mapping
from typing import Protocol

from rt.streams.balancer.balancer import Fence
from rt.streams.balancer.balancers import DeploymentBalancer, LeaseBalancer, RingBalancer
from rt.streams.balancer.lease_balancer import LeasedBalancer
from rt.streams.core.stream_id import QueueId
from rt.streams.queue.mapper import QueueMapper
from rt.streams.simulate.clusters import Clusters, HostLeases
from rt.streams.simulate.options import DRAIN_S, SimulationOptions


class Watcher(Protocol):
    def queues_changed(self, host: Host) -> None: ...


class Host:
    """One process of a host. Each process is a separate owner of leases, as in `QueueLeases.of_clusters`."""

    def __init__(
        self,
        name: str,
        run: int,
        clusters: Clusters,
        watcher: Watcher,
        options: SimulationOptions,
        configured: Collection[str],
    ) -> None:
        self.name, self.run = name, run
        self.leases = HostLeases(clusters, f"{name}~{run}")
        self.rng = random.Random(f"{options.seed} {name} {run}")
        self._watcher = watcher
        self.balancer = self._balancer(options, configured)
        self.balancer.subscribe(self)

    def _balancer(self, options: SimulationOptions, configured: Collection[str]) -> LeasedBalancer:
        if options.balancer == "lease":
            return LeaseBalancer(self.leases, times=options.times, rng=self.rng)
        if options.balancer == "ring":
            return RingBalancer(self.leases, times=options.times)
        return DeploymentBalancer(self.leases, configured, host=self.name, times=options.times)

    @property
    def is_working(self) -> bool:
        return not (self.leases.is_dead or self.leases.is_cut_off)

    def serving(self) -> Mapping[QueueId, Fence]:
        """The queues that this process serves now, by its own clock. Empty after a crash."""
        return {} if self.leases.is_dead else self.balancer.my_queues()

    async def start(self, mapper: QueueMapper) -> None:
        await self.balancer.start(mapper)

    async def stop(self) -> None:
        await self.balancer.stop()
        self.leases.is_dead = True

    async def crash(self) -> None:
        """End between two steps of the process. Nothing that it does afterwards reaches a cluster."""
        self.leases.is_dead = True
        self._watcher.queues_changed(self)
        ending = asyncio.create_task(self.balancer.stop())
        await asyncio.sleep(0)
        ending.cancel()
        await asyncio.wait([ending])

    # QueueListener

    def queues_changed(self) -> None:
        self._watcher.queues_changed(self)

    async def release(self, _: QueueId) -> None:
        await asyncio.sleep(self.rng.uniform(0, DRAIN_S))

    async def revoke(self, _: QueueId) -> None:
        """Stops at once."""
