"""The simulation of many clusters: its seed determines its report, and it finds planted faults."""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
from collections.abc import Sequence

import pytest
from memory_leases import LeaseTable, MemoryLeases
from msgspec.structs import replace

from rt.errors import InvalidOption
from rt.streams.balancer.lease import LeaseAnswer, LeaseProvider, LeaseResult
from rt.streams.balancer.queue_leases import QueueLeases
from rt.streams.queue.mapper import HashRingQueueMapper
from rt.streams.simulate import placement
from rt.streams.simulate.clusters import Clusters, HostLeases
from rt.streams.simulate.options import BALANCERS, SimulationOptions
from rt.streams.simulate.placement import expected_share, measure
from rt.streams.simulate.run import simulate
from rt.streams.simulate.virtual_time import run
from rt.streams.simulate.watch import ServiceWatch

SMALL = SimulationOptions(clusters=30, hosts=8, streams=2_000, seed=7, failures=4, joins=1, clusters_away=2)
QUIET = replace(SMALL, failures=0, joins=0, clusters_away=0, rolling_restart=False, cluster_change=False)
UNKNOWN = LeaseAnswer(LeaseResult.TRANSIENT_FAILURE)
ARGUMENTS = (
    "--clusters",
    "12",
    "--hosts",
    "4",
    "--streams",
    "500",
    "--failures",
    "3",
    "--clusters-away",
    "2",
)


def command(*arguments: str, hash_seed: str = "0") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "rt.streams.simulate", *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
    )


@pytest.mark.slow
def test_report_depends_on_seed_and_not_on_process() -> None:
    first = command(*ARGUMENTS, "--seed", "5", "--json", hash_seed="1")
    second = command(*ARGUMENTS, "--seed", "5", "--json", hash_seed="2")
    assert (first.returncode, second.returncode) == (0, 0), first.stderr
    assert first.stdout == second.stdout
    assert json.loads(first.stdout)["is_good"]
    assert first.stdout != command(*ARGUMENTS, "--seed", "6", "--json", hash_seed="1").stdout


@pytest.mark.parametrize("balancer", BALANCERS)
def test_balancers_keep_invariants_through_all_phases(balancer: str) -> None:
    report = simulate(replace(SMALL, balancer=balancer))
    assert report.is_good, report
    assert len(report.phases) == 8
    assert report.queues_per_host.mean * (SMALL.hosts + SMALL.joins) == SMALL.clusters


@pytest.mark.parametrize("balancer", BALANCERS)
def test_queues_do_not_move_without_failures(balancer: str) -> None:
    start, calm = simulate(replace(QUIET, balancer=balancer)).phases
    assert start.served_again >= QUIET.clusters
    assert (calm.queues_moved, calm.served_again, calm.requests_per_s["acquire"]) == (0, 0, 0)


@pytest.mark.parametrize("clusters", [2, 9, 60])
def test_added_cluster_receives_its_equal_share_of_streams(clusters: int) -> None:
    placed = measure(clusters, 5_000, 3, print)
    share, bound = expected_share(clusters, 5_000)
    assert share == 1 / (clusters + 1)
    assert abs(placed.moved / 5_000 - share) <= bound < share
    assert placed.moved_elsewhere == 0
    assert sum(placed.streams_of.values()) == sum(placed.streams_of_more.values()) == 5_000


def test_exception_in_check_fails_simulation(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise LookupError("no such host")

    monkeypatch.setattr(ServiceWatch, "check", fail)
    with pytest.raises(LookupError, match="no such host"):
        simulate(QUIET)


def test_simulation_reports_excessive_stream_moves_with_hash_ring_mapper(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(placement, "PartitionedQueueMapper", HashRingQueueMapper.of_names)
    report = simulate(QUIET)
    assert report.share_moved > 0.4
    assert not report.is_good


@pytest.mark.slow
@pytest.mark.parametrize(("factor", "found"), [(0.3, "served by"), (10.0, "not served for more than 39.5 s")])
def test_simulation_reports_leases_expiring_too_early_or_too_late(
    monkeypatch: pytest.MonkeyPatch, factor: float, found: str
) -> None:
    monkeypatch.setattr(Clusters, "duration_of", lambda _, duration_s: factor * duration_s)
    report = simulate(replace(SMALL, joins=0, clusters_away=0, rolling_restart=False, cluster_change=False))
    assert not report.is_good
    assert any(found in violation for violation in report.violations), report.violations


def test_simulated_host_leases_match_real_queue_leases() -> None:
    async def seen_by(first: LeaseProvider, second: LeaseProvider, set_away: object) -> list[object]:
        seen: list[object] = []

        async def look() -> None:
            await asyncio.sleep(1)
            for leases in (first, second):
                rows = await leases.held("")
                shown = rows and sorted((name, row.owner) for name, row in rows.items())
                seen.append((shown, sorted(leases.away())))

        assert callable(set_away)
        await look()
        owned = []
        for leases, name in (
            (first, "host/a"),
            (second, "host/b"),
            (first, "queue/c1"),
            (first, "queue/c1"),
            (second, "queue/c1"),
            (second, "queue/c2"),
        ):
            answers = await leases.acquire([name], 90.0)
            seen.append([answer.result for answer in answers])
            owned += [(leases, answer.lease) for answer in answers if answer.lease is not None]
        await look()
        set_away({"c1"})
        await look()
        seen.extend([answer.result for answer in await first.acquire(["queue/c1"], 90.0)])
        for leases, lease in owned:
            seen.append((lease.name, [answer.result for answer in await leases.renew([lease])]))
        set_away(())
        await look()
        del seen[-2:]  # `QueueLeases` may still wait for an earlier poll of that cluster.
        await look()
        for leases, lease in owned:
            seen.append(await leases.release([lease]))
        await look()
        await first.close()
        await second.close()
        return seen

    async def main() -> None:
        names, now_s = ["c1", "c2", "c3"], asyncio.get_running_loop().time
        clusters = Clusters(names, random.Random(1), now_s)
        simulated = await seen_by(HostLeases(clusters, "a"), HostLeases(clusters, "b"), clusters.set_away)
        tables, away = {name: LeaseTable() for name in names}, set[str]()

        class Reached(MemoryLeases):
            def __init__(self, name: str, owner: str) -> None:
                super().__init__(tables[name], owner)
                self.name = name

            async def _unreached(self) -> bool:
                if self.name in away:
                    await asyncio.sleep(3)
                return self.name in away

            async def acquire(self, names: Sequence[str], duration_s: float):
                unknown = [UNKNOWN] * len(names)
                return unknown if await self._unreached() else await super().acquire(names, duration_s)

            async def renew(self, leases):
                return [UNKNOWN] * len(leases) if await self._unreached() else await super().renew(leases)

            async def held(self, prefix: str):
                return None if await self._unreached() else await super().held(prefix)

        def set_away(now_away) -> None:
            away.clear()
            away.update(now_away)

        hosts = [QueueLeases({name: Reached(name, owner) for name in names}) for owner in "ab"]
        assert simulated == await seen_by(*hosts, set_away)

    run(main())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--hosts", "1"], "invalid --hosts: got 1, expected 2 to 1,000"),
        (["--streams", "many"], "argument --streams: invalid int value: 'many'"),
        (["--clusters", "5", "--clusters-away", "5"], "invalid --clusters-away"),
        (["--balancer", "odd"], "unknown balancer"),
        (["--lease-s", "0"], "the times of a balancer do not fit together"),
        (["--lease-s", "nan"], "the times of a balancer do not fit together"),
        (["--odd"], "unrecognized arguments: --odd"),
    ],
)
def test_invalid_command_option_prints_one_line_and_exits_with_2(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from rt.streams.simulate.__main__ import main

    try:
        status = main(arguments)
    except SystemExit as end:
        status = end.code
    printed = capsys.readouterr()
    assert (status, printed.out) == (2, "")
    assert said in printed.err
    assert printed.err.count("\n") == 1


def test_simulation_option_out_of_range_raises_invalid_option() -> None:
    with pytest.raises(InvalidOption, match="--streams"):
        SimulationOptions(streams=10**9)
