"""Random faults on the whole stack lose and repeat no message; chaos.run --stack runs longer."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from chaos.stack import StackChaos
from chaos.stack_cast import LogCheck
from chaos.stack_publisher import value_of

import rt
from sequencer.localcluster.processes import nothing_left

pytestmark = pytest.mark.slow

LIVE_S = 120.0
"""Long enough for a loaded machine. If an event has not happened by then, it never happens."""


@pytest.fixture
def root() -> Iterator[Path]:
    made = Path(tempfile.mkdtemp(prefix="rt", dir="/tmp"))  # Unix sockets need a short path.
    with nothing_left():
        yield made
    shutil.rmtree(made)


def test_stack_merges_every_published_message_despite_each_kind_of_fault(root: Path) -> None:
    """In a short deck, each kind of fault happens, most kinds once."""
    chaos = StackChaos(root, decks=1, seed=5, live_s=LIVE_S, is_short=True)
    outcome = chaos.run()
    assert outcome.problems == [], str(outcome)
    assert outcome.merged == outcome.published > 0
    assert outcome.faults.keys() == set(chaos.kinds), str(outcome)
    assert outcome.lost_files > 0


def test_chaos_run_reports_problem_if_node_never_reaches_committed_end(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StackChaos, "_behind", lambda *_: {"n1": 1})
    outcome = StackChaos(root, decks=1, seed=5, live_s=1.0).run()
    assert any("after a heal: waited for" in problem for problem in outcome.problems), str(outcome)


@pytest.mark.parametrize(
    ("numbers", "is_right"), [([0, 1, 2], True), ([0, 2], False), ([0, 1, 1], False), ([1, 0], False)]
)
def test_log_check_reports_missing_repeated_or_reordered_messages(numbers: list[int], is_right: bool) -> None:
    check = LogCheck("n1")
    check.take(
        rt.Message(position, 0, "feed", 0, number, "", value_of(number))
        for position, number in enumerate(numbers)
    )
    assert (check.problems == []) is is_right
