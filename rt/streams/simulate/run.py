"""A simulation: its phases, one after the other, in virtual time."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, Final

from rt.streams.queue.mapper import PartitionedQueueMapper
from rt.streams.simulate import placement, virtual_time
from rt.streams.simulate.clusters import KINDS, Clusters
from rt.streams.simulate.host import Host
from rt.streams.simulate.options import CALM_S, RESTART_S, SimulationOptions
from rt.streams.simulate.placement import Placement, cluster_names
from rt.streams.simulate.report import SimulatedPhase, SimulationReport, Spread, percentile
from rt.streams.simulate.watch import PhaseFigures, ServiceWatch

CHECK_S: Final = 1.0
FAILURES_S: Final = 60.0
"""The window in which hosts fail, at random times."""
CUT_OFF_LEASES: Final = 2
"""How long a host is cut off, as a multiple of the time of a lease."""
STABLE_ROUNDS: Final = 3
"""Rounds without a move after which a phase ends."""
STABLE_LEASES_MAX: Final = 10
"""The longest wait for these rounds, as a multiple of the time of a lease."""
BATCHES: Final = 10
"""A rolling restart stops a tenth of the hosts at once."""


def simulate(
    options: SimulationOptions, progress: Callable[[str], None] = lambda _: None
) -> SimulationReport:
    """Run the simulation. The result depends on the options alone."""
    placed = placement.measure(options.clusters, options.streams, options.seed, progress)

    async def main() -> SimulationReport:
        return await Simulation(options, placed, progress).run()

    return virtual_time.run(main())


class Simulation:
    """A simulation in an event loop of virtual time."""

    def __init__(
        self, options: SimulationOptions, placed: Placement, progress: Callable[[str], None]
    ) -> None:
        self._options, self._placed, self._progress = options, placed, progress
        self._rng = random.Random(options.seed)
        self._now_s = asyncio.get_running_loop().time
        names = cluster_names(options.clusters)
        self._mapper = PartitionedQueueMapper(names)
        self.clusters = Clusters(names, random.Random(f"{options.seed} delays"), self._now_s)
        self.watch = ServiceWatch(self._now_s, options.serve_again_s, placed.streams_of_more, names)
        self._configured = [f"host-{index:04}" for index in range(options.hosts + options.joins)]
        self._hosts: dict[str, Host] = {}
        self._runs = Counter[str]()
        self._phases: list[SimulatedPhase] = []

    async def run(self) -> SimulationReport:
        options = self._options
        checks = asyncio.create_task(self._check())
        async with self._phase("start of all hosts"):
            await self._start_all(self._configured[: options.hosts])
        async with self._phase("no failures", settles=False):
            await asyncio.sleep(CALM_S)
        if options.failures:
            async with self._phase(f"{options.failures} hosts fail"):
                await self._fail_hosts()
        if options.joins:
            async with self._phase(f"{options.joins} hosts join"):
                await self._start_all(self._configured[options.hosts :])
        if options.clusters_away:
            async with self._phase(f"{options.clusters_away} clusters away"):
                await self._fail_clusters()
        if options.rolling_restart:
            async with self._phase("rolling restart"):
                await self._restart_all()
        if options.cluster_change:
            async with self._phase("a cluster is added"):
                await self._change_clusters(options.clusters + 1)
            async with self._phase("it is removed"):
                await self._change_clusters(options.clusters)
        checks.cancel()
        await asyncio.wait([checks])
        if not checks.cancelled():
            checks.result()  # The checks failed: raise their error.
        report = self._report()
        await _all(host.stop() for host in self._hosts.values())
        return report

    async def _check(self) -> None:
        while True:
            await asyncio.sleep(CHECK_S)
            self.watch.check(self._hosts.values())

    # Phases

    @asynccontextmanager
    async def _phase(self, name: str, *, settles: bool = True) -> AsyncIterator[None]:
        self.watch.figures = figures = PhaseFigures()
        self.clusters.requests.clear()
        began_s = self._now_s()
        yield
        if settles:
            await self._settle()
        lasted_s = self._now_s() - began_s
        gaps = sorted(figures.gaps_s)
        requests = self.clusters.requests
        self._phases.append(
            SimulatedPhase(
                name=name,
                lasted_s=round(lasted_s, 3),
                queues_moved=figures.moves,
                streams_moved=figures.streams_moved,
                served_again=len(gaps),
                served_again_p50_s=percentile(gaps, 0.5),
                served_again_p99_s=percentile(gaps, 0.99),
                served_again_max_s=percentile(gaps, 1.0),
                requests_per_s={kind: round(requests[kind] / lasted_s, 1) for kind in KINDS},
            )
        )
        self._progress(f"{name}: {lasted_s:.0f} virtual seconds, {figures.moves} queues moved")

    async def _settle(self) -> None:
        """Wait until every queue is served, and nothing has moved for some rounds."""
        deadline_s = self._now_s() + STABLE_LEASES_MAX * self._options.times.lease_s
        while self._now_s() < deadline_s:
            moves = self.watch.figures.moves, len(self.watch.figures.gaps_s)
            await asyncio.sleep(STABLE_ROUNDS * self._options.round_s)
            if not self.watch.unserved and moves == (
                self.watch.figures.moves,
                len(self.watch.figures.gaps_s),
            ):
                return

    async def _start(self, name: str, after_s: float = 0.0) -> None:
        await asyncio.sleep(after_s)
        self._runs[name] += 1
        host = Host(name, self._runs[name], self.clusters, self.watch, self._options, self._configured)
        self._hosts[name] = host
        await host.start(self._mapper)

    async def _start_all(self, names: list[str]) -> None:
        look_s = self._options.times.look_s
        await _all(self._start(name, self._rng.uniform(0, look_s)) for name in names)

    async def _fail_hosts(self) -> None:
        """Crash hosts or cut them off for a while, at random times. A crashed host starts again."""
        times_s = sorted(self._rng.uniform(0, FAILURES_S) for _ in range(self._options.failures))
        began_s = self._now_s()
        ends: list[asyncio.Task[None]] = []
        for index, at_s in enumerate(times_s):
            await asyncio.sleep(max(0.0, began_s + at_s - self._now_s()))
            working = [name for name in sorted(self._hosts) if self._hosts[name].is_working]
            if len(working) > 1:
                host = self._hosts[self._rng.choice(working)]
                failing = self._cut_off(host) if index % 2 else self._crash(host)
                ends.append(asyncio.create_task(failing))
        await _all(ends)

    async def _crash(self, host: Host) -> None:
        self.watch.fault(host)
        await host.crash()
        await self._start(host.name, RESTART_S)

    async def _cut_off(self, host: Host) -> None:
        host.leases.is_cut_off = True
        self.watch.fault(host)
        await asyncio.sleep(CUT_OFF_LEASES * self._options.times.lease_s)
        host.leases.is_cut_off = False

    async def _fail_clusters(self) -> None:
        """Take clusters away until their leases have expired for their hosts, and let them come back."""
        away = self._rng.sample(sorted(self.clusters.names), self._options.clusters_away)
        self.clusters.set_away(away)
        self.watch.excuse(away)
        await asyncio.sleep(CUT_OFF_LEASES * self._options.times.lease_s)
        self.clusters.set_away(())
        self.watch.expect(away)

    async def _restart_all(self) -> None:
        names = sorted(self._hosts)
        size = -(-len(names) // BATCHES)
        for start in range(0, len(names), size):
            batch = names[start : start + size]
            await _all(self._hosts[name].stop() for name in batch)
            await _all(self._start(name, RESTART_S) for name in batch)
            await asyncio.sleep(self._options.round_s)

    async def _change_clusters(self, count: int) -> None:
        """Restart all hosts with that number of clusters."""
        names = cluster_names(count)
        added, removed = set(names) - self.clusters.names, self.clusters.names - set(names)
        self._mapper = PartitionedQueueMapper(names)
        self.clusters.names |= added
        self.watch.excuse(removed)
        await self._restart_all()
        self.watch.expect(added)  # From now on all hosts know the added cluster.
        self.clusters.names -= removed

    # The report

    def _report(self) -> SimulationReport:
        served = {host.name: [queue.name for queue in host.serving()] for host in self._hosts.values()}
        streams_of = self._placed.streams_of
        names = cluster_names(self._options.clusters)
        expected, bound = placement.expected_share(self._options.clusters, self._options.streams)
        return SimulationReport(
            options=self._options,
            phases=tuple(self._phases),
            streams_per_cluster=Spread.of([streams_of[name] for name in names]),
            queues_per_host=Spread.of([len(queues) for queues in served.values()]),
            streams_per_host=Spread.of([sum(streams_of[name] for name in each) for each in served.values()]),
            share_moved=self._placed.moved / self._options.streams,
            share_expected=expected,
            share_bound=bound,
            moved_elsewhere=self._placed.moved_elsewhere,
            virtual_s=round(self._now_s(), 3),
            violations=tuple(self.watch.violations),
            violation_count=self.watch.violation_count,
        )


async def _all(works: Any) -> None:
    """Wait for all `works`, and raise the first error."""
    async with asyncio.TaskGroup() as group:
        for work in works:
            group.create_task(_awaited(work))


async def _awaited(work: Coroutine[Any, Any, None] | asyncio.Task[None]) -> None:
    await work
