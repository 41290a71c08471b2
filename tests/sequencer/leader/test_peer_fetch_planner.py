"""The leader plans which session bytes an idle node fetches from another node."""

from __future__ import annotations

from concurrent.futures import Future

import pytest
from sequencer_core import Writing, do_fence, do_merge, do_open, must, new_state, opening, piece

from rt.v1 import sequencer_pb2 as pb
from sequencer.leader.leader import Leader
from sequencer.leader.member_steps import CommittedMembers
from sequencer.leader.peer_fetch_planner import QUIET_NS, FetchRequest, PeerFetchPlanner
from sequencer.leader.proposals import LeaderProposals
from sequencer.leader.replication_tracker import (
    BatchBoundary,
    ReplicationTracker,
    SegmentKey,
    pack_boundaries,
)
from sequencer.raft.model.members import RaftMember
from sequencer.state.apply import apply
from sequencer.state.apply_result import RunOpened
from sequencer.state.session_commands import OpenSealedRuns, SealedRun
from sequencer.state.state import End, SequencerState

NODES = ("n1", "n2", "n3")


class Stage:
    """A session of two segments of which nodes report what they hold."""

    def __init__(self) -> None:
        self.state: SequencerState = new_state()
        self.session_id = do_open(self.state)
        self.tracker = ReplicationTracker(len(NODES))
        self.supplying = PeerFetchPlanner(self.state, self.tracker)
        self.written = Writing(0, 0, 0)
        for _ in range(4):
            self.written.append(104, 5)
        self.written.roll()
        self.written.append(104, 5)
        self.now_ns = 0

    def report(self, node: str, roll: int, batches: int) -> None:
        marks = self.written.segments[roll][: batches + 1]
        self.tracker.on_boundaries(node, SegmentKey(self.session_id, 0, roll), marks)
        self.supplying.on_news(self.session_id, node, self.now_ns)

    def plan(self, after_ns: int = QUIET_NS) -> list[FetchRequest]:
        self.now_ns += after_ns
        return self.supplying.plan(NODES, self.now_ns)

    def lack(self, node: str, holder: str, roll: int, batches: int) -> FetchRequest:
        return FetchRequest(
            node, holder, self.session_id, 0, roll, self.written.segments[roll][batches].offset
        )


@pytest.fixture
def stage() -> Stage:
    return Stage()


def test_fetch_request_names_node_with_most_bytes_and_its_end(stage: Stage) -> None:
    stage.report("n1", 0, 4)
    stage.report("n2", 0, 2)
    assert stage.plan() == [stage.lack("n2", "n1", 0, 4), stage.lack("n3", "n1", 0, 4)]


def test_fetch_request_prefers_holder_of_later_segment(stage: Stage) -> None:
    stage.report("n1", 0, 4)
    stage.report("n2", 0, 4)
    stage.report("n2", 1, 1)
    assert stage.plan() == [stage.lack("n1", "n2", 1, 1), stage.lack("n3", "n2", 1, 1)]


def test_node_that_still_receives_bytes_gets_no_fetch_requests(stage: Stage) -> None:
    for batches in (1, 2, 3):
        stage.report("n1", 0, batches + 1)
        for node in ("n2", "n3"):
            stage.report(node, 0, batches)
        assert stage.plan(QUIET_NS - 1) == []


def test_node_without_publisher_gets_fetch_request_while_others_advance(stage: Stage) -> None:
    stage.report("n1", 0, 1)
    told = []
    for batches in (2, 3, 4):
        stage.report("n1", 0, batches)
        stage.report("n2", 0, batches)
        told += stage.plan(QUIET_NS // 2 + 1)
    assert told == [stage.lack("n3", "n1", 0, 3)]


def test_fetch_request_includes_merged_bytes_while_session_advances(stage: Stage) -> None:
    for node in ("n1", "n2"):
        stage.report(node, 0, 1)
    first, second = stage.written.segments[0][:2]
    chains = first.chain, second.chain
    do_merge(stage.state, piece(stage.session_id, 64, second.offset, first=0, count=5, chains=chains))
    stage.now_ns += QUIET_NS
    stage.supplying.on_news(stage.session_id, "n1", stage.now_ns)
    assert stage.plan(0) == [stage.lack("n3", "n1", 0, 1)]


def test_fetch_request_repeats_while_node_is_missing_bytes(stage: Stage) -> None:
    stage.report("n1", 0, 1)
    assert len(stage.plan()) == 2
    assert stage.plan(QUIET_NS - 1) == []
    assert len(stage.plan(1_000_000_001)) == 2
    for node in ("n2", "n3"):
        stage.report(node, 0, 1)
    assert stage.plan() == []
    assert stage.plan() == []


def test_restarted_node_without_reports_gets_fetch_request(stage: Stage) -> None:
    for node in NODES:
        stage.report(node, 0, 1)
    assert stage.plan() == []
    stage.tracker.forget_node("n2")
    stage.supplying.on_node("n2", stage.now_ns)
    assert stage.plan() == [stage.lack("n2", "n1", 0, 1)]


def test_idle_session_with_all_bytes_merged_gets_no_fetch_requests(stage: Stage) -> None:
    stage.report("n1", 0, 1)
    stage.report("n2", 0, 1)
    first, second = stage.written.segments[0][:2]
    chains = first.chain, second.chain
    do_merge(stage.state, piece(stage.session_id, 64, second.offset, first=0, count=5, chains=chains))
    assert stage.plan() == []


def test_closing_run_gets_no_fetch_requests(stage: Stage) -> None:
    stage.report("n1", 0, 1)
    do_open(stage.state, run=1)
    do_fence(stage.state)
    assert stage.plan() == []


def test_session_with_differing_checksums_gets_no_fetch_requests(stage: Stage) -> None:
    stage.report("n1", 0, 1)
    mark = stage.written.segments[0][1]._replace(chain=7)
    stage.tracker.on_boundaries("n2", SegmentKey(stage.session_id, 0, 0), [mark])
    assert stage.plan() == []


class Nowhere:
    """A consensus that must receive no proposal."""

    def propose(self, command: bytes) -> Future[int]:
        raise AssertionError(command)


def test_leader_sends_fetch_requests_to_idle_nodes_after_quiet_time(stage: Stage) -> None:
    told: list[FetchRequest] = []
    members = CommittedMembers("n1", {node: RaftMember(f"{node}:1") for node in NODES})
    proposals = LeaderProposals(Nowhere(), lambda: stage.now_ns)
    leader = Leader(stage.state, members, proposals, lambda _: None, lambda: stage.now_ns, told.append)
    for node in NODES:
        report = pb.Report(boot=b"boot", is_full=True)
        if node == "n3":
            marks = pack_boundaries(stage.written.segments[0][:3])
            report.segments.add(session_id=stage.session_id, run=0, roll=0, boundaries=marks)
        leader.on_report(node, report)
    leader.tick()
    assert told == []
    stage.now_ns += QUIET_NS
    leader.tick()
    assert told == [stage.lack("n1", "n3", 0, 2), stage.lack("n2", "n3", 0, 2)]


def test_run_after_merged_run_gets_fetch_requests_despite_quiet_session() -> None:
    state = new_state()
    whose = opening("a")
    runs = tuple(SealedRun(x, opening("a", x).run_id, End(0, 128, 10)) for x in (0, 1))
    must(RunOpened, apply(state, OpenSealedRuns(whose.session, whose.incarnation, None, runs)))
    tracker = ReplicationTracker(len(NODES))
    supplying = PeerFetchPlanner(state, tracker)
    marks = [BatchBoundary(64, 0, 64), BatchBoundary(128, 10, 128)]
    for node, xs in (("n1", (0, 1)), ("n2", (0,)), ("n3", (0,))):
        for x in xs:
            tracker.on_boundaries(node, SegmentKey(1, x, 0), marks)
            supplying.on_news(1, node, 0)
    assert supplying.plan(NODES, QUIET_NS) == []
    do_merge(state, piece())
    found = supplying.plan(NODES, 2 * QUIET_NS)
    assert found == [FetchRequest(node, "n1", 1, 1, 0, 128) for node in ("n2", "n3")]
