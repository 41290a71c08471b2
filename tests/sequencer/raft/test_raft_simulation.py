"""Simulated Raft clusters under faults: all invariants hold for every seed, and runs are reproducible."""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import sys
from collections import Counter
from typing import Any

import pytest
from simulation.cluster import Cluster
from simulation.settings import FAULTS, Fault, Settings, in_force
from simulation.simulate import SimulationFailed, await_well, simulate

from sequencer.raft.core.election import Ballot
from sequencer.raft.model.messages import NOWHERE

SLOW_SEEDS = int(os.environ.get("RT_SIMULATED_SEEDS", "15"))
"""`RT_SIMULATED_SEEDS=1000` runs more; so does `python -m simulation.simulate`."""
BATCHES = 3
CALM: dict[str, Any] = {"propose_every_s": 0.1, "burst": 0.0, "large": 0.0, "lost": 0.0}


@pytest.mark.parametrize("seed", range(8))
def test_three_nodes_keep_all_invariants_under_faults(seed: int) -> None:
    report = simulate(seed, nodes=3, seconds=4.0)
    assert report.acknowledged


@pytest.mark.parametrize("seed", range(2))
def test_five_nodes_keep_all_invariants_under_faults(seed: int) -> None:
    assert simulate(seed, nodes=5, seconds=3.0).acknowledged


@pytest.mark.parametrize("seed", [0, 2])
def test_three_nodes_keep_all_invariants_while_members_change(seed: int) -> None:
    report = simulate(seed, nodes=3, seconds=4.0, spares=3)
    assert report.acknowledged
    assert report.seen["changed"]


@pytest.mark.slow
@pytest.mark.parametrize("batch", range(BATCHES))
def test_cluster_keeps_all_invariants_while_members_change_with_many_seeds(batch: int) -> None:
    for seed in range(70_000 + batch, 70_000 + SLOW_SEEDS, BATCHES):
        simulate(seed, spares=3)


@pytest.mark.slow
@pytest.mark.parametrize("batch", range(BATCHES))
def test_cluster_keeps_all_invariants_under_faults_with_many_seeds(batch: int) -> None:
    for seed in range(1000 + batch, 1000 + SLOW_SEEDS, BATCHES):
        simulate(seed)


@pytest.mark.slow
@pytest.mark.parametrize("nodes", [1, 3, 5, 7])
def test_clusters_of_1_to_7_nodes_survive_every_fault(nodes: int) -> None:
    seen: Counter[str] = Counter()
    for seed in range(3):
        seen += simulate(seed, nodes=nodes, faults=dict.fromkeys(FAULTS, 1), fault_every_s=0.15).seen
    assert set(FAULTS) <= set(seen)


@pytest.mark.parametrize(
    ("faults", "seeds", "what"),
    [
        (
            ["wipe", "old_disk"],
            1,
            ["replaces_disk", "disk_admitted", "snapshot_send_started", "snapshot_installed"],
        ),
        (["kill_in_change"], 3, ["torn_tail_cut"]),
        (["failed_sync"], 1, ["stops"]),
        (["full"], 1, ["disk_full", "disk_has_space"]),
        (["reset", "kill", "cut_off"], 4, ["epoch_ending", "epoch_over", "state_requested", "state_fetched"]),
        (["force", "kill"], 4, ["epoch_forced", "epoch_over", "left_out"]),
    ],
)
def test_faults_cause_their_expected_events(faults: list[Fault], seeds: int, what: list[str]) -> None:
    seen: Counter[str] = Counter()
    for seed in range(seeds):
        seen += simulate(seed, nodes=3, faults=dict.fromkeys(faults, 1), fault_every_s=0.2, **CALM).seen
    assert set(what) <= set(seen)


def test_cluster_recovers_from_lost_disk_with_member_killed_before_joining() -> None:
    settings = Settings(nodes=3, seconds=5.0, snapshot_ms=50)
    cluster = Cluster(settings, random.Random(1))
    timeline = cluster.timeline
    with cluster.clocks.installed(), in_force(settings), contextlib.closing(cluster):
        for name in cluster.members:
            cluster.start(name)
        while not (joined := [run.name for run in cluster.runs() if run.node.claim.joined != NOWHERE]):
            timeline.run(timeline.now + 0.00002)
        late, other = (name for name in cluster.members if name not in joined)
        cluster.kill(late)
        while (leader := cluster.leader()) is None:
            timeline.run(timeline.now + 0.01)
        for _ in range(20):
            leader.propose(10)
            timeline.run(timeline.now + 0.05)
        assert cluster.may_wipe()
        cluster.replace_disk(joined[0])
        cluster.kill(other)  # No node can become leader now without the late node's vote.
        await_well(cluster, lambda: list(cluster.members))


def test_equal_seeds_give_equal_reports() -> None:
    one, two, other = (simulate(seed, nodes=3, seconds=2.0) for seed in (1, 1, 2))
    assert one == two
    assert one.digest != other.digest


@pytest.mark.slow
def test_seed_gives_same_output_in_every_process() -> None:
    command = [
        sys.executable,
        "-m",
        "simulation.simulate",
        "--seeds",
        "2",
        "--nodes",
        "5",
        "--seconds",
        "3",
    ]
    outputs = {
        subprocess.run(
            command, env={**os.environ, "PYTHONHASHSEED": hash_seed}, capture_output=True, check=True
        ).stdout
        for hash_seed in ("1", "2")
    }
    assert len(outputs) == 1


def test_failure_message_has_replay_options_and_last_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ballot, "on_vote", lambda self, voter: False)
    with pytest.raises(SimulationFailed) as failure:
        simulate(3, nodes=3, seconds=1.0, settle_s=1.0, faults={"cut_off": 1}, fault_every_s=0.1)
    assert "no leader" in str(failure.value)
    assert "--start 3" in str(failure.value)
    assert "--spares" not in str(failure.value)
    assert "RequestVote" in str(failure.value)


def test_failure_message_has_spares_option_if_spares_were_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ballot, "on_vote", lambda self, voter: False)
    with pytest.raises(SimulationFailed, match="--spares 2"):
        simulate(3, nodes=3, seconds=1.0, settle_s=1.0, spares=2)
