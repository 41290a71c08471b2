"""Run simulations: each seed is the whole run of one cluster, first with faults, then with time to recover.

After the faults there must be a leader, every command in flight must be done, and all nodes must have applied
the same commands.
"""

from __future__ import annotations

import contextlib
import logging
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import click

from sequencer.raft.model.cluster_state import encode_state
from sequencer.raft.node import RaftNode
from simulation.cluster import Cluster, Member
from simulation.faults import Nemesis
from simulation.history import Violation
from simulation.settings import Settings, draw_settings, in_force

LARGE_BYTES = 100 * 1024
BURST_COMMANDS = 1000


class SimulationFailed(AssertionError):
    """A promise was broken. The message contains the seed and the last events."""


@dataclass(frozen=True, slots=True)
class Report:
    """The result of a simulation."""

    settings: Settings
    digest: int
    """A digest of all events."""
    commands: int
    acknowledged: int
    elections: int
    epochs: int
    runs: int
    virtual_s: float
    seen: Counter[str]
    """Number of events by kind."""
    leases: Counter[str]
    """Lease outcomes: granted, renewed, released, expired."""
    requests: Counter[str]
    """Outcomes of requests to the owners of leases, and of the owners' commits."""


def simulate(
    seed: int,
    *,
    nodes: int | None = None,
    seconds: float = 6.0,
    node_class: type[RaftNode] = RaftNode,
    **changes: Any,
) -> Report:
    """Run one seed; `changes` override its drawn settings. Raises `SimulationFailed`."""
    rng = random.Random(seed)
    settings = replace(draw_settings(rng, nodes=nodes, seconds=seconds), **changes)
    cluster = Cluster(settings, rng, node_class)
    try:
        with cluster.clocks.installed(), in_force(settings), _logged(cluster):
            _run(cluster)
    except Exception as error:
        recent = "\n".join(" ".join(map(str, event)) for event in cluster.recent)
        raise SimulationFailed(
            f"{error!r}\nseed {seed}, {settings}\nlast events:\n{recent}\n"
            f"replay: python -m simulation.simulate --start {seed} --seeds 1"
            f" --seconds {seconds}{f' --nodes {nodes}' if nodes else ''}"
            f"{f' --spares {settings.spares}' if settings.spares else ''}\n{error!r}"
        ) from error
    finally:
        cluster.close()
    return Report(
        settings=settings,
        digest=cluster.digest,
        commands=len(cluster.history.commands),
        acknowledged=cluster.history.acknowledged,
        elections=sum(checks.elections for checks in cluster.epochs.values()),
        epochs=len(cluster.epochs),
        runs=cluster.runs_started,
        virtual_s=cluster.timeline.now,
        seen=cluster.seen,
        leases=cluster.holders.seen,
        requests=cluster.requests.seen,
    )


@contextlib.contextmanager
def _logged(cluster: Cluster) -> Iterator[None]:
    """Send the nodes' log records to the trace only."""
    logger, handler = logging.getLogger("sequencer.raft"), _Handler(cluster)
    before, logger.propagate, level = logger.propagate, False, logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.propagate = before
        logger.setLevel(level)


class _Handler(logging.Handler):
    def __init__(self, cluster: Cluster) -> None:
        super().__init__()
        self._cluster = cluster

    def emit(self, record: logging.LogRecord) -> None:
        self._cluster.trace("logs", self._cluster.running, record.getMessage())


def _run(cluster: Cluster) -> None:
    timeline, settings, nemesis = cluster.timeline, cluster.settings, Nemesis(cluster)
    clients = [_Client(cluster, member) for member in cluster.members.values()]
    for name in cluster.members:
        timeline.after(0.1 * cluster.rng.random(), lambda name=name: cluster.start(name))  # type: ignore[misc]
    for client in clients:
        client.begin()
    cluster.holders.begin()
    cluster.requests.begin()
    cluster.member_requests.begin()
    if cluster.rng.random() < 0.8:
        timeline.run(min(2.0, settings.seconds / 3))  # Otherwise the cluster is created under faults.
    nemesis.begin()
    timeline.run(settings.seconds)
    nemesis.heal()
    timeline.run(timeline.now + 0.5)
    for client in clients:
        client.is_over = True
    cluster.holders.is_over = cluster.requests.is_over = cluster.member_requests.is_over = True
    _settle(cluster)


def _settle(cluster: Cluster) -> None:
    """Wait until the members are well: first without a minority, then with all."""
    down = _minority(cluster)
    await_well(cluster, lambda: [name for name in cluster.names_in_force() if name not in down])
    await_well(cluster, cluster.names_in_force)


def _minority(cluster: Cluster) -> list[str]:
    """Stop a minority of the members, or none. Disks that do not count are chosen first."""
    is_wanted = cluster.rng.random() < 0.5
    cluster.may_wipe()
    lists = list(cluster.member_requests.voters())
    names = [name for name in cluster.members if name in lists[0]]
    most = (len(names) - 1) // 2
    cluster.rng.shuffle(names)
    names.sort(key=lambda name: not cluster.members[name].is_wiped)
    wiped = sum(cluster.members[name].is_wiped for name in names)
    if len(set(lists)) > 1:
        return []
    if not is_wanted or not cluster.is_made or wiped > most or cluster.is_forking:
        return []
    down = names[:most]
    for name in down:
        cluster.kill(name)
    return down


def await_well(cluster: Cluster, names: Callable[[], list[str]]) -> None:
    """Run until these members are well. Raises `Violation` if they are not well within `settle_s`."""
    timeline = cluster.timeline
    end = timeline.now + cluster.settings.settle_s
    while why := _unsettled(cluster, names()):
        if timeline.now > end:
            raise Violation(f"{names()} not well {cluster.settings.settle_s} s after the last fault: {why}")
        for name in names():
            cluster.empty_if_left_out(name)
            cluster.start(name)
        timeline.run(timeline.now + 0.1)


def _unsettled(cluster: Cluster, names: list[str]) -> str:
    """Return why these members are not well yet, or an empty text."""
    runs = [run for run in cluster.runs() if run.name in names]
    if len(runs) < len(names):
        return "not all run"
    if cluster.leader() is None:
        return "no leader"
    if waiting := [(run.name, len(run.in_flight)) for run in runs if run.in_flight]:
        return f"commands in flight: {waiting}"
    states = {run.name: (run.node.state.applied.index, run.node._raft.committed) for run in runs}
    if len({place for pair in states.values() for place in pair}) > 1:
        return f"not all have applied and committed the same: {states}"
    if len({encode_state(run.node.state) for run in runs}) > 1:
        raise Violation("states differ")
    if behind := [run.name for run in runs if run.machine.index < len(cluster.history.commands)]:
        raise Violation(f"nobody has all that was applied: {behind}")
    if unaware := cluster.member_requests.unaware():
        return f"removed, and do not know: {unaware}"
    if stale := [run.name for run in runs if not run.node._raft.is_counted_here]:
        return f"disks that do not count: {stale}"
    return ""


class _Client:
    """Proposes commands on a member while the member runs."""

    def __init__(self, cluster: Cluster, member: Member) -> None:
        self.is_over = False
        self._cluster, self._member = cluster, member

    def begin(self) -> None:
        """Schedule the next proposal, which schedules its successor."""
        settings = self._cluster.settings
        every_s = settings.propose_every_s * max(1.0, settings.nodes / 3)
        self._cluster.timeline.after(self._cluster.rng.expovariate(1 / every_s), self._propose)

    def _propose(self) -> None:
        if self.is_over:
            return
        run, settings, drawn = self._member.run, self._cluster.settings, self._cluster.rng.random()
        if run is not None and run.view is not None:
            is_burst = drawn < settings.burst
            is_large = not is_burst and drawn < settings.burst + settings.large
            burst = min(BURST_COMMANDS, 20 * settings.packs_max * settings.pack_commands_max)
            for _ in range(burst if is_burst else 1):
                if not run.propose(LARGE_BYTES if is_large else int(drawn * 100)):
                    break
        self.begin()


@click.command()
@click.option("--seeds", default=100, help="How many seeds to run.")
@click.option("--start", default=0, help="The first of them.")
@click.option(
    "--nodes", type=click.Choice(["1", "3", "5", "7"]), help="Members; by default the seed decides."
)
@click.option("--seconds", default=6.0, help="Virtual seconds of faults.")
@click.option("--holders", default=0, help="How many ask for leases.")
@click.option("--askers", default=0, help="How many post requests to the owners of leases.")
@click.option("--spares", default=0, help="Blank nodes; with them members are added and removed.")
@click.option("--go-on", is_flag=True, help="Run the other seeds too when one failed.")
def main(
    seeds: int,
    start: int,
    nodes: str | None,
    seconds: float,
    holders: int,
    askers: int,
    spares: int,
    *,
    go_on: bool,
) -> None:
    """Simulate Raft clusters under faults. For a failed seed, print its last events."""
    began, virtual_s, commands, failed, digest = time.monotonic(), 0.0, 0, 0, 0
    for seed in range(start, start + seeds):
        try:
            report = simulate(
                seed,
                nodes=int(nodes) if nodes else None,
                seconds=seconds,
                holders=holders,
                askers=askers,
                spares=spares,
            )
        except SimulationFailed as error:
            failed += 1
            click.echo(error)
            if not go_on:
                raise SystemExit(1) from None
        else:
            virtual_s += report.virtual_s
            commands += report.commands
            digest ^= report.digest
    took_s = time.monotonic() - began
    click.echo(f"seeds={seeds} failed={failed} commands={commands} digest={digest:08x}")
    click.echo(f"{virtual_s:.0f} s of virtual time in {took_s:.1f} s", err=True)
    raise SystemExit(1 if failed else 0)


if __name__ == "__main__":
    main()
