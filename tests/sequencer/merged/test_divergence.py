"""Detection of nodes whose merged log differs from the majority's."""

from __future__ import annotations

import random

import pytest
from sequencer_core import do_merge, do_open, new_state, piece

from sequencer.leader import divergence_check
from sequencer.leader.divergence_check import Divergence, DivergenceDetector
from sequencer.state.write_plan import WritePlan


def merged(count: int) -> list[WritePlan]:
    state = new_state()
    do_open(state)
    return [
        do_merge(state, piece(start=64 * n, end=64 * n + 64, first=10 * n - 10)) for n in range(1, count + 1)
    ]


def leading(members: int, plans: list[WritePlan]) -> DivergenceDetector:
    chains = DivergenceDetector(members)
    for plan in plans:
        chains.on_plan(plan)
    return chains


def test_diverged_node_is_reported_once_majority_agrees_at_any_instruction() -> None:
    plans = merged(5)
    chains = leading(3, plans)
    assert chains.on_reported("b", 2, 99) == []
    assert chains.on_reported("a", 4, plans[3].chain) == []
    found = Divergence("b", 2, 99, plans[1].chain)
    assert chains.on_reported("c", 5, plans[4].chain) == [found]
    assert chains.on_reported("a", 5, plans[4].chain) == []  # The divergence was already reported.
    assert chains.on_reported("b", 3, 98) == [Divergence("b", 3, 98, plans[2].chain)]


def test_leader_is_reported_as_diverged_if_majority_differs_from_it() -> None:
    plans = merged(3)
    chains = leading(3, plans)
    assert chains.on_reported("a", 1, plans[0].chain) == []
    assert chains.on_reported("b", 2, 98) == []
    assert chains.on_reported("c", 3, 99) == [Divergence(None, 2, plans[1].chain, 98)]


def test_unknown_instruction_or_checksum_reports_no_divergence() -> None:
    plans = merged(3)
    chains = leading(1, plans[1:])
    assert chains.on_reported("a", 1, 5) == []
    assert chains.on_reported("a", 2, divergence_check.NOT_KNOWN) == []
    assert chains.on_reported("a", 4, 5) == []
    assert chains.on_reported("a", 3, 5) == [Divergence(None, 3, plans[2].chain, 5)]


def test_only_latest_checksums_up_to_chains_max_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(divergence_check, "CHAINS_MAX", 3)
    plans = merged(10)
    chains = leading(1, plans)
    assert chains.on_reported("a", 7, 5) == []
    assert len(chains.on_reported("a", 8, 5)) == 1


@pytest.mark.parametrize("members", [1, 3, 5, 7])
@pytest.mark.parametrize("seed", range(20))
def test_only_nodes_diverged_from_majority_are_reported(members: int, seed: int) -> None:
    rng = random.Random(seed)
    plans = merged(20)
    chains = leading(members, plans)
    wrong = set(rng.sample(range(members), rng.randint(0, members)))
    is_leader_wrong = len(wrong) > members // 2
    stopped: set[str | None] = set()
    for node in rng.sample(range(members), members) * 2:
        plan = rng.choice(plans)
        chain = plan.chain ^ (1 if node in wrong else 0)
        stopped |= {one.node for one in chains.on_reported(f"n{node}", plan.instruction, chain)}
    assert stopped == ({None} if is_leader_wrong else {f"n{node}" for node in wrong})
