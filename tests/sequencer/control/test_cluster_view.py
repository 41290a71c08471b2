"""The standing of the nodes, as a data process receives it."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

import rt
from rt.v1 import sequencer_pb2 as pb
from sequencer.config.startup_phase import Phase
from sequencer.control.cluster_view import OFFSETS, UNREACHABLE_NS, ClusterView, summarize
from sequencer.control.reporter import DataStatus
from sequencer.raft.model.api import Leadership, MemberStatus, Status
from sequencer.raft.model.members import RaftMember
from sequencer.state.feature_level import LATEST, MemberLevel

MEMBERS = (
    MemberStatus("n1", "a:7000", True, True, "d1", True, 7),
    MemberStatus("n2", "b:7000", False, False, "", None, None),
)
COMMITTED = {"n1": RaftMember("a:7000"), "n2": RaftMember("b:7000"), "n3": RaftMember("c:7000", votes=False)}
VOTERS = {name: member for name, member in COMMITTED.items() if member.votes}
JOINED = {"n3": "c:5002"}
STATUS = Status(
    name="n1",
    role="leader",
    leader="n1",
    term=4,
    cluster="ab" * 16,
    leader_gap_s=0.25,
    epoch=1,
    epoch_id=1,
    index=9,
    log_start=1,
    log_end=10,
    committed=9,
    applied=9,
    chain=5,
    snapshot=0,
    in_flight=0,
    members=MEMBERS,
)


@pytest.fixture
def nodes() -> ClusterView:
    return ClusterView("n1", {"n1": "a:5002", "n2": "b:5002"})


def standing(
    nodes: ClusterView, now_ns: int = 0, *, accepts_sessions: bool = True, **changes: object
) -> pb.Standing:
    status = replace(STATUS, **changes)
    leadership = Leadership("n1", 4, True)
    return nodes.to_proto(
        status, leadership, now_ns, members=COMMITTED, accepts_sessions=accepts_sessions, joined=JOINED
    )


def test_standing_lists_each_node_with_data_address_and_latest_summary(nodes):
    for clock_ns in (1, 2):
        nodes.on_summary("n2", pb.Summary(clock_ns=clock_ns), 0, 0)
    one, other, learner = standing(nodes, members_index=7).nodes
    assert (learner.name, learner.address, learner.raft_address) == ("n3", "c:5002", "c:7000")
    assert (learner.is_learner, learner.is_connected, one.is_learner) == (True, False, False)
    assert (one.name, one.address, one.is_connected, one.is_counted) == ("n1", "a:5002", True, True)
    assert (other.name, other.address, other.is_connected, other.is_counted) == ("n2", "b:5002", False, False)
    assert not one.HasField("summary")
    assert other.summary.clock_ns == 2


def test_node_is_caught_up_only_in_cluster_with_leader_that_accepts_sessions(nodes):
    assert standing(nodes).is_caught_up
    assert not standing(nodes, accepts_sessions=False).is_caught_up
    assert not standing(nodes, cluster="").is_caught_up
    assert not standing(nodes, leader=None).is_caught_up


def test_summary_contains_clock_merge_progress_disk_usage_and_phase():
    data_status = DataStatus(pb.MergedReport(instruction=3), 100, 40)
    told = summarize(data_status, 7, Phase("merging", 5, 6))
    assert (told.clock_ns, told.merged.instruction, told.disk_bytes, told.disk_free_bytes) == (7, 3, 100, 40)
    assert (told.step, told.step_done, told.step_total) == ("merging", 5, 6)


def test_disconnected_or_silent_node_is_unreachable_and_keeps_last_summary(nodes):
    connected = tuple(replace(one, is_connected=True) for one in MEMBERS)
    said = pb.Summary(clock_ns=7, step="merging", step_done=5, step_total=6)

    def step_of(now_ns: int, members: tuple[MemberStatus, ...]) -> tuple[str, int, int, int]:
        summary = standing(nodes, now_ns, members=members).nodes[1].summary
        return summary.step, summary.step_done, summary.step_total, summary.clock_ns

    nodes.on_summary("n2", said, 10, 0)
    assert step_of(10, connected) == ("merging", 5, 6, 7)
    assert step_of(9 + UNREACHABLE_NS, connected) == ("merging", 5, 6, 7)
    assert step_of(10 + UNREACHABLE_NS, connected) == ("unreachable", 0, 0, 7)
    assert step_of(11, MEMBERS) == ("unreachable", 0, 0, 7)
    nodes.on_summary("n2", said, 10 + UNREACHABLE_NS, 0)
    assert step_of(10 + UNREACHABLE_NS, connected) == ("merging", 5, 6, 7)


def test_standing_reports_summary_age_and_data_process_silence(nodes):
    nodes.on_summary("n2", summarize(DataStatus(), 7, Phase("data-hung"), data_silent_s=6.5), 10**9, 7)
    other = standing(nodes, 3 * 10**9).nodes[1]
    assert (other.summary_age_s, other.summary.data_silent_s) == (2.0, 6.5)


def test_clock_offset_is_taken_from_fastest_recent_summary(nodes):
    def offset_after(*arrivals: tuple[int, int]) -> float:
        """Return the clock offset after these summaries. Each pair has the summary's clock and the local
        arrival time, in seconds.
        """
        for said_s, here_s in arrivals:
            nodes.on_summary("n2", pb.Summary(clock_ns=said_s * 10**9), 0, here_s * 10**9)
        return standing(nodes).nodes[1].clock_offset_s

    assert offset_after((100, 130), (101, 111), (102, 102)) == 0
    assert offset_after(*[(203 + n, 103 + n) for n in range(OFFSETS)]) == 100
    assert offset_after(*[(50 + n, 113 + n) for n in range(OFFSETS)]) == -63


def test_member_level_expires_with_its_summary_and_is_1_if_unreported(nodes):
    assert nodes.member_levels(VOTERS, 7) == [
        MemberLevel("n1", 1, "", False),
        MemberLevel("n2", 1, "", False),
    ]
    nodes.on_summary("n1", summarize(DataStatus(), 5, Phase("ready")), 0, 0)
    nodes.on_summary("n2", pb.Summary(clock_ns=1), 0, 0)
    own = MemberLevel("n1", LATEST, rt.__version__, True)
    assert nodes.member_levels(VOTERS, UNREACHABLE_NS - 1) == [own, MemberLevel("n2", 1, "", True)]
    assert not any(one.is_current for one in nodes.member_levels(VOTERS, UNREACHABLE_NS))
