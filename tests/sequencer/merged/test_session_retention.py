"""Session bytes are kept until the merged logs of the node and of a majority contain them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sequencer.merged.session_retention import SessionRetention, low_watermark

MEMBERS = st.sampled_from([1, 3, 5, 7])


@given(st.data(), MEMBERS)
def test_low_watermark_is_highest_instruction_merged_by_majority(data, members: int) -> None:
    merged = data.draw(st.lists(st.integers(0, 9), max_size=members))
    have = [at for at in range(10) if sum(one >= at for one in merged) > members // 2]
    assert low_watermark(merged, members) == max(have, default=0)


@given(st.data(), MEMBERS)
def test_retention_releases_only_instructions_merged_by_node_and_majority(data, members: int) -> None:
    names = [f"n{at}" for at in range(members)]
    retention, truth, released = SessionRetention("n0", names), dict.fromkeys(names, 0), 0
    for _ in range(data.draw(st.integers(1, 30))):
        name = data.draw(st.sampled_from(names))
        truth[name] += data.draw(st.integers(0, 3))
        heard = data.draw(st.lists(st.sampled_from(names)))
        retention.on_merged({one: truth[one] for one in heard})
        before, released = released, retention.released(truth["n0"])
        assert before <= released <= truth["n0"]
        assert sum(one >= released for one in truth.values()) > members // 2


@pytest.mark.parametrize(("members", "released"), [(1, 7), (3, 0), (5, 0)])
def test_retention_without_reports_of_others_releases_nothing_unless_node_is_alone(members, released) -> None:
    assert SessionRetention("n0", [f"n{at}" for at in range(members)]).released(7) == released


def test_retention_keeps_highest_report_of_each_node() -> None:
    retention = SessionRetention("n0", ("n0", "n1", "n2"))
    retention.on_merged({"n1": 5})
    assert retention.released(6) == 5
    retention.on_merged({"n1": 0, "n2": 0})
    assert retention.released(6) == 5


def test_retention_counts_only_current_voters() -> None:
    retention = SessionRetention("n0", ("n0", "n1", "n2"))
    retention.on_merged({"n1": 5, "n3": 6})
    assert retention.released(6) == 5, "n3 is a learner"
    retention.on_voters(("n0", "n1", "n2", "n3", "n4"))
    retention.on_merged({"n1": 6})
    assert retention.released(7) == 6, "three of five"
    retention.on_voters(("n0", "n2", "n4"))
    retention.on_merged({"n1": 9})
    assert retention.released(9) == 6, "n1 was removed"


def test_retention_on_learner_releases_instructions_merged_by_majority_of_voters() -> None:
    retention = SessionRetention("n3", ("n0", "n1", "n2"))
    retention.on_merged({"n0": 4})
    assert retention.released(9) == 0
    retention.on_merged({"n1": 5})
    assert retention.released(9) == 4
