"""Simulated clusters under faults: whatever the seed, no promise is broken, and all is well afterwards."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter

import pytest

from sequencer.raft.election import Ballot
from sequencer.testing.settings import FAULTS
from sequencer.testing.simulate import SimulationFailed, simulate

QUICK_SEEDS = 16
SLOW_SEEDS = int(os.environ.get("RT_SIMULATED_SEEDS", "90"))
"""`RT_SIMULATED_SEEDS=1000` runs more; so does `python -m sequencer.testing.simulate`."""
BATCHES = 6


@pytest.mark.parametrize("seed", range(QUICK_SEEDS))
def test_no_promise_is_broken(seed: int) -> None:
    report = simulate(seed)
    assert report.elections
    assert report.commands >= report.acknowledged


@pytest.mark.slow
@pytest.mark.parametrize("batch", range(BATCHES))
def test_no_promise_is_broken_with_more_seeds(batch: int) -> None:
    seen: Counter[str] = Counter()
    for seed in range(1000 + batch, 1000 + SLOW_SEEDS, BATCHES):
        seen += simulate(seed).seen
    assert {"admits_disk", "cut_torn_tail", "installed_snapshot", "leads", "stops", *FAULTS} <= set(seen)


@pytest.mark.slow
@pytest.mark.parametrize("nodes", [1, 3, 5, 7])
def test_a_cluster_of_any_size_survives_every_fault(nodes: int) -> None:
    for seed in range(4):
        simulate(seed, nodes=nodes, faults=dict.fromkeys(FAULTS, 1), fault_every_s=0.2)


def test_a_seed_decides_everything() -> None:
    one, two, other = simulate(1), simulate(1), simulate(2)
    assert one == two
    assert one.digest != other.digest


@pytest.mark.slow
def test_a_seed_means_the_same_in_every_process() -> None:
    command = [sys.executable, "-m", "sequencer.testing.simulate", "--seeds", "2", "--nodes", "5"]
    outputs = {
        subprocess.run(
            command, env={**os.environ, "PYTHONHASHSEED": hash_seed}, capture_output=True, check=True
        ).stdout
        for hash_seed in ("1", "2")
    }
    assert len(outputs) == 1


def test_a_failure_says_how_to_replay_it_and_what_happened_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ballot, "on_vote", lambda self, voter: False)
    with pytest.raises(SimulationFailed) as failure:
        simulate(3, nodes=3, seconds=1.0, settle_s=1.0, faults={"cut_off": 1}, fault_every_s=0.1)
    assert "no leader" in str(failure.value)
    assert "--start 3" in str(failure.value)
    assert "RequestVote" in str(failure.value)
