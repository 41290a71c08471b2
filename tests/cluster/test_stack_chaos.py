"""The whole stack under drawn faults. `python -m chaos.run --stack` runs for longer."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from chaos.stack import StackChaos

from sequencer.localcluster.leftovers import nothing_left

pytestmark = pytest.mark.slow

LIVE_S = 120.0
"""A machine that does much else is slow; what never comes does not come by then either."""


@pytest.fixture
def root() -> Iterator[Path]:
    made = Path(tempfile.mkdtemp(prefix="rt", dir="/tmp"))  # Unix sockets want a short path.
    with nothing_left():
        yield made
    shutil.rmtree(made)


def test_whatever_is_cut_killed_and_lost_all_is_merged_everywhere_after_each_heal(root: Path) -> None:
    outcome = StackChaos(root, strikes=10, seed=5, live_s=LIVE_S).run()
    assert outcome.problems == [], str(outcome)
    assert outcome.merged == outcome.published > 0
    assert outcome.faults.total() >= 10


def test_a_run_that_never_comes_to_the_committed_end_says_so(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StackChaos, "_behind", lambda *_: {"n1": 1})
    outcome = StackChaos(root, strikes=1, seed=5, live_s=1.0).run()
    assert any("after a heal: waited for" in problem for problem in outcome.problems), str(outcome)
