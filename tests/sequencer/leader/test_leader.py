"""The leader: whatever becomes of its proposals, all that a majority holds is merged, in order, once."""

from __future__ import annotations

import random
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sequencing import Writing, do_fence, do_join, do_open, do_roll, must, new_state, opening, piece

from rt.errors import Closed, MessageTooLarge, Overloaded
from rt.log.format.segment_table import TrimReason
from rt.v1 import sequencer_pb2 as pb
from sequencer.leader import leader as leader_module
from sequencer.leader.divergence_check import Divergence
from sequencer.leader.leader import IN_FLIGHT_MAX, MINUTE_NS, Leader
from sequencer.leader.lease_expiry import POLL_NS as LEASES_LOOK_NS
from sequencer.leader.node_reports import FRESH_NS
from sequencer.leader.proposals import REPEAT_NS
from sequencer.leader.replication_tracker import BatchBoundary, pack_boundaries
from sequencer.leader.retention_planner import POLL_NS
from sequencer.leader.session_close import AWAY_NS
from sequencer.state.apply import apply
from sequencer.state.apply_result import (
    CommandRejected,
    ConfigurationChanged,
    Outcome,
    RangesMerged,
    RequestLapsed,
    RunOpened,
    SegmentsTrimmed,
)
from sequencer.state.command_codec import decode_command, encode_command
from sequencer.state.commands import (
    Command,
    Configure,
    DecideRequest,
    JoinDisk,
    MergeInstruction,
    RestoreDisk,
    Roll,
    SubmitRequest,
    TrimSegments,
)
from sequencer.state.leases import AcquireLeases, ExpireLeases, HeldLease, IdleLease, RenewLeases
from sequencer.state.session_commands import (
    LATER_MAX,
    SEALED_RUNS_MAX,
    CloseRun,
    CloseSession,
    FenceRun,
    Forget,
    OpenSealedRuns,
    SealedRun,
)
from sequencer.state.state import End, SequencerState
from sequencer.state.state_codec import decode_state, encode_state

SECOND_NS = 10**9
HOUR_NS = 60 * MINUTE_NS
CLOCK_NS = 1_700_000_000 * 10**9


@dataclass(slots=True)
class Bench:
    """A leader in a cluster of three, its proposals in order, and the clocks."""

    state: SequencerState = field(default_factory=new_state)
    proposals: deque[tuple[bytes, Future[int]]] = field(default_factory=deque)
    asked: list[str] = field(default_factory=list)
    differences: list[Divergence] = field(default_factory=list)
    error: Exception | None = None
    configured: dict[str, int] = field(default_factory=dict)
    now_ns: int = 10**12
    outcomes: list[tuple[Command, Outcome]] = field(default_factory=list)
    sequences: dict[str, int] = field(default_factory=dict)
    leader: Leader = field(init=False)

    def __post_init__(self) -> None:
        self.lead()

    def lead(self) -> None:
        """A new term of this node."""
        self.sequences.clear()
        self.leader = Leader(
            self.state,
            3,
            self,
            self.asked.append,
            lambda: self.now_ns,
            on_divergence=self.differences.append,
            configured=self.configured,
        )

    def propose(self, command: bytes) -> Future[int]:
        if self.error is not None:
            raise self.error
        self.proposals.append((command, Future()))
        return self.proposals[-1][1]

    def report(
        self,
        node: str,
        marks: dict[tuple[int, int, int], list[BatchBoundary]] | None = None,
        **fields: object,
    ) -> None:
        """All that the node knows for the first time, then what is new."""
        sequence = self.sequences.get(node, -1) + 1
        self.sequences[node] = sequence
        values = {"boot": b"b", "clock_ns": CLOCK_NS, "sequence": sequence, "is_full": sequence == 0}
        report = pb.Report(**(values | fields))  # type: ignore[arg-type]
        for (session_id, run, roll), one in (marks or {}).items():
            report.segments.add(session_id=session_id, run=run, roll=roll, boundaries=pack_boundaries(one))
        self.leader.on_report(node, report)

    def commit(self, content: bytes, future: Future[int] | None = None) -> Outcome:
        """As the consensus thread does: apply, tell the leader, then whoever waits."""
        command = decode_command(content)
        outcome = apply(self.state, command)
        self.outcomes.append((command, outcome))
        self.leader.on_applied(command, outcome)
        if future is not None:
            future.set_result(len(self.outcomes))
        return outcome

    def reconcile(self) -> None:
        """Commit and plan until nothing is left to do."""
        for _ in range(500):
            self.leader.plan()
            if not self.proposals:
                return
            self.commit(*self.proposals.popleft())
        raise AssertionError("the leader never comes to rest")

    @property
    def pending(self) -> list[Command]:
        return [decode_command(content) for content, _ in self.proposals]

    def merged_numbers(self, session_id: int) -> list[tuple[int, int]]:
        """What was merged of a session: first and end of each range."""
        return [
            (one.first, one.end_number)
            for command, outcome in self.outcomes
            if isinstance(outcome, RangesMerged) and isinstance(command, MergeInstruction)
            for one in command.ranges
            if one.session_id == session_id
        ]

    def assert_merged(self, session_id: int, end: int) -> None:
        """Everything up to number `end`, in order, once."""
        at = 0
        for first, behind in self.merged_numbers(session_id):
            assert first == at
            at = behind
        assert at == end


@pytest.fixture
def bench() -> Bench:
    return Bench()


def writing(batches: int, size: int = 80, salt: int = 1) -> Writing:
    one = Writing(0, 0, salt)
    for _ in range(batches):
        one.append(size, 1)
    return one


def marks_of(one: Writing, session_id: int = 1) -> dict[tuple[int, int, int], list[BatchBoundary]]:
    return {(session_id, one.run, roll): marks for roll, marks in enumerate(one.segments)}


def test_what_one_node_holds_is_not_merged_and_what_two_hold_is(bench):
    do_open(bench.state)
    bench.report("a", marks_of(writing(5)))
    bench.reconcile()
    assert bench.outcomes == []
    bench.report("b", marks_of(writing(3)))
    bench.reconcile()
    bench.assert_merged(1, 3)


def test_only_so_many_instructions_are_on_their_way(bench):
    do_open(bench.state)
    much = marks_of(writing(20, size=16 << 20))
    bench.report("a", much)
    bench.report("b", much)
    bench.leader.plan()
    assert [command.number for command in bench.pending] == [*range(1, IN_FLIGHT_MAX + 1)]
    bench.reconcile()
    bench.assert_merged(1, 20)


def test_a_report_that_does_not_follow_is_asked_for_again(bench):
    do_open(bench.state)
    bench.report("a")
    bench.report("b")
    bench.sequences["a"] += 1
    bench.report("a", marks_of(writing(3)))
    assert bench.asked == ["a"]
    bench.report("b", marks_of(writing(3)), boot=b"c")
    assert bench.asked == ["a", "b"]
    bench.reconcile()
    assert bench.outcomes == []


def test_a_report_that_cannot_be_read_is_asked_for_again_and_harms_nothing(bench):
    do_open(bench.state)
    bench.report("a", marks_of(writing(3)))
    bench.report("b", marks_of(writing(3)))
    bad = pb.Report(boot=b"b", sequence=1)
    bad.segments.add(session_id=1, boundaries=b"short")
    bench.leader.on_report("b", bad)
    assert bench.asked == ["b"]
    bench.reconcile()
    bench.assert_merged(1, 3)


def test_an_instruction_of_another_leader_that_comes_in_between_makes_it_plan_anew(bench):
    do_open(bench.state)
    one = writing(6)
    for node in "ab":
        bench.report(node, {(1, 0, 0): one.segments[0][:3]})
    bench.leader.plan()
    (own, future) = bench.proposals.popleft()
    first, second = one.segments[0][:2]
    other = piece(start=64, end=second.offset, count=1, chains=(first.chain, second.chain))
    bench.commit(encode_command(MergeInstruction(1, 5, (other,))))
    assert isinstance(bench.commit(own, future), CommandRejected)
    for node in "ab":
        bench.report(node, {(1, 0, 0): one.segments[0][3:]})
    bench.reconcile()
    bench.assert_merged(1, 6)


@pytest.mark.parametrize(
    "error",
    [Overloaded("full"), MessageTooLarge("large"), Closed("over")],
    ids=lambda error: type(error).__name__,
)
def test_what_could_not_be_proposed_is_planned_again(bench, error):
    do_open(bench.state)
    for node in "ab":
        bench.report(node, marks_of(writing(4)))
    bench.error = error
    bench.leader.plan()
    bench.leader.plan()
    assert not bench.proposals
    bench.error = None
    bench.reconcile()
    bench.assert_merged(1, 4)


@given(st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_all_is_merged_once_whatever_becomes_of_proposals_and_reports(seed):
    rng = random.Random(seed)
    bench = Bench()
    active_runs = {session_id: Writing(0, 0, session_id) for session_id in (1, 2, 3)}
    for session_id in active_runs:
        do_open(bench.state, f"s{session_id}", incarnation=session_id)
    for _ in range(60):
        one = rng.choice([*active_runs.values()])
        match rng.randrange(7):
            case 0 | 1:
                one.append(8 * rng.randrange(1, 1 << rng.randrange(1, 22)), rng.randrange(1, 5))
            case 2 if rng.random() < 0.3 and len(one.segments[-1]) > 1:
                one.roll()
            case 3:
                bench.sequences.pop(name := rng.choice("abc"), None)
                bench.report(name, _held(rng, active_runs))
            case 4:
                bench.leader.plan()
            case 5 if bench.proposals:
                content, future = bench.proposals.popleft()
                if rng.random() < 0.2:
                    future.set_exception(Closed("nobody knows"))
                    if rng.random() < 0.5:
                        bench.commit(content)
                else:
                    bench.commit(content, future)
            case 6 if rng.random() < 0.3:
                survivors = rng.randrange(len(bench.proposals) + 1)
                while len(bench.proposals) > survivors:
                    bench.proposals.pop()
                bench.lead()  # What the old one had on its way may still come.
                for content, _ in bench.proposals:
                    bench.commit(content)
                bench.proposals.clear()
    for name in "abc":
        bench.sequences.pop(name, None)
        bench.report(name, _all(active_runs))
    bench.reconcile()
    for session_id, one in active_runs.items():
        bench.assert_merged(session_id, one.end.number)


def _all(active_runs: dict[int, Writing]) -> dict[tuple[int, int, int], list[BatchBoundary]]:
    return {
        key: marks
        for session_id, one in active_runs.items()
        for key, marks in marks_of(one, session_id).items()
    }


def _held(
    rng: random.Random, active_runs: dict[int, Writing]
) -> dict[tuple[int, int, int], list[BatchBoundary]]:
    found: dict[tuple[int, int, int], list[BatchBoundary]] = {}
    for session_id, one in active_runs.items():
        for roll, marks in one.up_to(rng.choice(one.ends())):
            found[session_id, 0, roll] = marks
    return found


# Clocks


def test_a_clock_that_is_an_hour_off_moves_no_time(bench):
    do_open(bench.state)
    bench.report("a", marks_of(writing(3)), clock_ns=CLOCK_NS + HOUR_NS)
    bench.report("b", marks_of(writing(3)))
    bench.report("c", clock_ns=CLOCK_NS + 5)
    bench.reconcile()
    assert bench.state.sequenced_ns == CLOCK_NS + 5


@pytest.mark.parametrize("jump_ns", [-HOUR_NS, HOUR_NS])
def test_when_all_clocks_jump_time_still_goes_forward_and_all_is_merged(bench, jump_ns):
    do_open(bench.state)
    one = writing(6)
    for node in "abc":
        bench.report(node, {(1, 0, 0): one.segments[0][:4]})
    bench.reconcile()
    before = bench.state.sequenced_ns
    for node in "abc":
        bench.report(node, {(1, 0, 0): one.segments[0][4:]}, clock_ns=CLOCK_NS + jump_ns)
    bench.reconcile()
    bench.assert_merged(1, 6)
    assert bench.state.sequenced_ns > before


def test_without_any_fresh_clock_time_goes_on_by_the_least_step(bench):
    do_open(bench.state)
    one = writing(6)
    for node in "abc":
        bench.report(node, {(1, 0, 0): one.segments[0][:4]})
    bench.reconcile()
    before = bench.state.sequenced_ns
    for node in "abc":
        bench.report(node, {(1, 0, 0): one.segments[0][4:]})
    bench.now_ns += FRESH_NS
    bench.reconcile()
    bench.assert_merged(1, 6)
    assert bench.state.sequenced_ns == before + 1


# Archiving


def grown_old(bench: Bench) -> None:
    """A sealed segment of positions up to 2, and one that grows."""
    do_open(bench.state)
    one = writing(4)
    for upto in (3, 5):
        for node in "ab":
            bench.report(node, {(1, 0, 0): one.segments[0][upto - 3 : upto]})
        bench.reconcile()
        if upto == 3:
            do_roll(bench.state)
    assert len(bench.state.segments) == 1


def test_what_is_too_old_is_trimmed_once_and_time_is_the_clocks(bench):
    grown_old(bench)
    apply(bench.state, Configure(session_idle_minutes=0))
    week_ns = (bench.state.configuration.retention_minutes + 1) * MINUTE_NS
    bench.leader.tick()
    assert bench.pending == []
    bench.now_ns += week_ns
    for node in "ab":
        bench.report(node, clock_ns=CLOCK_NS + week_ns)
    bench.leader.tick()
    assert bench.pending == [TrimSegments(2, TrimReason.TIME, CLOCK_NS + week_ns)]
    bench.now_ns += POLL_NS
    bench.leader.tick()
    assert len(bench.proposals) == 1  # It is on its way.
    bench.now_ns += REPEAT_NS
    for node in "ab":
        bench.report(node, clock_ns=CLOCK_NS + week_ns)
    bench.leader.tick()
    assert len(bench.proposals) == 2  # Which may be lost.
    assert [type(bench.commit(*bench.proposals.popleft())) for _ in range(2)] == [
        SegmentsTrimmed,
        CommandRejected,
    ]
    bench.now_ns += POLL_NS
    bench.leader.tick()
    assert bench.pending == []


def test_a_leader_whose_node_is_told_otherwise_configures_the_cluster_once(bench):
    bench.configured = {"retention_bytes": 7, "retention_minutes": 5, "roll_minutes": 0}
    bench.lead()
    bench.leader.tick()
    bench.leader.tick()
    assert bench.pending == [Configure(retention_minutes=5, retention_bytes=7)]
    bench.commit(*bench.proposals.popleft())
    bench.leader.tick()
    assert bench.pending == []
    apply(bench.state, Configure(retention_bytes=8, retention_disk_percent=50))
    bench.now_ns += REPEAT_NS
    bench.leader.tick()
    assert bench.pending == [Configure(retention_bytes=7)]


def test_settings_come_before_the_trims_that_they_allow_or_forbid(bench):
    grown_old(bench)
    bench.configured = {"retention_minutes": 0}
    bench.lead()
    week_ns = (bench.state.configuration.retention_minutes + 1) * MINUTE_NS
    for _ in range(3):  # By what is configured now the oldest segment is too old, by what is to be it is not.
        bench.now_ns += POLL_NS
        for node in "ab":
            bench.report(node, clock_ns=CLOCK_NS + week_ns)
        bench.leader.tick()
        assert bench.pending == [Configure(retention_minutes=0)]
    bench.commit(*bench.proposals.popleft())
    bench.now_ns += POLL_NS
    bench.leader.tick()
    assert bench.pending == []
    assert bench.state.log_start == 0


def test_a_trim_that_was_on_its_way_before_a_configuration_is_judged_by_it(bench):
    grown_old(bench)
    week_ns = (bench.state.configuration.retention_minutes + 1) * MINUTE_NS
    for node in "ab":
        bench.report(node, clock_ns=CLOCK_NS + week_ns)
    bench.leader.tick()
    (trim,) = bench.pending
    assert isinstance(trim, TrimSegments)
    bench.commit(encode_command(Configure(retention_minutes=0)))
    assert isinstance(bench.commit(*bench.proposals.popleft()), CommandRejected)
    assert bench.state.log_start == 0


# What operators ask for


ASKED = SubmitRequest(b"q" * 16, CLOCK_NS + 10 * SECOND_NS, Configure(roll_minutes=7))


def ask(bench: Bench) -> None:
    bench.commit(encode_command(ASKED))
    assert bench.leader.has_plans
    bench.leader.plan()


def test_a_request_is_decided_at_once_by_the_time_that_a_majority_of_clocks_has_reached(bench):
    bench.report("a", clock_ns=CLOCK_NS + HOUR_NS)
    ask(bench)
    assert bench.pending == []  # Nobody knows what time it is.
    bench.report("b", clock_ns=CLOCK_NS + SECOND_NS)
    bench.leader.tick()
    assert bench.pending == [DecideRequest(ASKED.id, CLOCK_NS + SECOND_NS)]
    bench.leader.tick()
    assert len(bench.pending) == 1
    assert bench.commit(*bench.proposals.popleft()) == ConfigurationChanged()
    bench.leader.tick()
    assert bench.pending == []
    assert bench.state.configuration.roll_minutes == 7


def test_a_request_that_comes_late_is_decided_against_and_forgotten(bench):
    for node in "ab":
        bench.report(node, clock_ns=ASKED.until_ns + 1)
    ask(bench)
    assert bench.commit(*bench.proposals.popleft()) == RequestLapsed(may_be_done=False)
    assert bench.state.configuration.roll_minutes == 0
    assert not bench.state.asked


def test_a_decision_that_was_lost_is_proposed_again_by_the_next_leader_and_made_once(bench):
    for node in "ab":
        bench.report(node)
    ask(bench)
    lost = bench.proposals.popleft()
    bench.lead()
    for node in "ab":
        bench.report(node, clock_ns=CLOCK_NS + SECOND_NS)
    bench.leader.tick()
    assert bench.commit(*bench.proposals.popleft()) == ConfigurationChanged()
    apply(bench.state, Configure(roll_minutes=8))
    assert isinstance(bench.commit(*lost), CommandRejected)
    assert bench.state.configuration.roll_minutes == 8


def test_what_was_decided_is_forgotten_once_its_time_is_over(bench):
    for node in "ab":
        bench.report(node)
    ask(bench)
    bench.commit(*bench.proposals.popleft())
    assert bench.state.asked
    for node in "ab":
        bench.report(node, clock_ns=ASKED.until_ns + 1)
    bench.leader.tick()
    assert bench.commit(*bench.proposals.popleft()) == RequestLapsed(may_be_done=True)
    assert not bench.state.asked


# How far behind nodes may be


@pytest.mark.parametrize(("limit", "most"), [("BACKLOG_BYTES_MAX", 10_000), ("BACKLOG_MAX", 1)])
def test_while_a_majority_has_merged_too_little_durably_nothing_is_planned(bench, monkeypatch, limit, most):
    monkeypatch.setattr(leader_module, limit, most)
    do_open(bench.state)
    one = writing(40, size=1000)
    for node in "ab":
        bench.report(node, {(1, 0, 0): one.segments[0][:21]})
    bench.reconcile()
    total = bench.state.merged.total_bytes
    for node in "ab":
        bench.report(node, {(1, 0, 0): one.segments[0][21:]})
    bench.reconcile()
    bench.assert_merged(1, 20)
    bench.report("a", merged=pb.MergedReport(instruction=1, bytes=total))
    bench.reconcile()
    bench.assert_merged(1, 20)
    bench.report("c", merged=pb.MergedReport(instruction=1, bytes=total))
    bench.reconcile()
    bench.assert_merged(1, 40)


# Segments of the merged log


def _aged(bench: Bench, minutes: int) -> None:
    do_open(bench.state)
    apply(bench.state, leading_configure(roll_minutes=5))
    for node in "abc":
        bench.report(node, marks_of(writing(2)))
    bench.reconcile()
    for node in "abc":
        bench.report(node, clock_ns=CLOCK_NS + minutes * MINUTE_NS)


def leading_configure(**fields: int) -> Command:
    return decode_command(pb.Command(version=1, configure=pb.Configure(**fields)).SerializeToString())


def test_a_merged_segment_that_is_old_is_rolled_once(bench):
    _aged(bench, 5)
    bench.leader.tick()
    bench.leader.tick()
    clock_ns = CLOCK_NS + 5 * MINUTE_NS
    assert bench.pending == [Roll(2, 0, 0, clock_ns)]
    bench.reconcile()
    assert (bench.state.merged.segment, bench.state.merged.created_ns) == ((0, 1), clock_ns)
    assert bench.state.segments[0].sealed_ns == clock_ns
    bench.now_ns += REPEAT_NS
    bench.leader.tick()
    bench.reconcile()
    assert sum(isinstance(command, Roll) for command, _ in bench.outcomes) == 1


def test_one_clock_that_is_ahead_rolls_nothing(bench):
    _aged(bench, 4)
    bench.report("a", clock_ns=CLOCK_NS + HOUR_NS)
    bench.leader.tick()
    bench.reconcile()
    assert not any(isinstance(command, Roll) for command, _ in bench.outcomes)


# Ends of lives


def test_a_fence_that_was_lost_is_proposed_again_and_one_on_its_way_is_not(bench):
    do_open(bench.state)
    do_open(bench.state, run=1)
    end = pb.SessionEnd(session_id=1, run=0, roll=0, offset=64)
    for node in "ab":
        report = pb.Report(boot=b"b", is_full=True, clock_ns=CLOCK_NS)
        report.segments.add(session_id=1, announced=end)
        bench.leader.on_report(node, report)
    bench.leader.plan()
    bench.leader.plan()
    assert bench.pending == [FenceRun(1, 0)]
    bench.proposals.clear()
    bench.now_ns += REPEAT_NS
    bench.leader.plan()
    assert bench.pending == [FenceRun(1, 0)]


def test_nodes_that_differ_stop_that_session_alone_and_it_is_said_once(bench, caplog):
    do_open(bench.state)
    do_open(bench.state, "b", incarnation=1)
    good, bad = writing(3), writing(3, salt=2)
    bench.report("a", marks_of(good) | marks_of(good, 2))
    bench.report("b", marks_of(bad) | marks_of(good, 2))
    bench.report("c", marks_of(bad))
    bench.reconcile()
    assert bench.merged_numbers(1) == []
    bench.assert_merged(2, 3)
    assert caplog.text.count("session_stopped") == 1


def test_a_run_of_whose_end_nodes_have_other_bytes_is_not_closed_and_both_are_named(bench, caplog):
    do_open(bench.state)
    do_open(bench.state, run=1)
    do_fence(bench.state)
    for node, chain in (("a", 111), ("b", 222)):
        report = pb.Report(boot=b"b", is_full=True, clock_ns=CLOCK_NS)
        end = pb.SessionEnd(session_id=1, run=0, roll=0, offset=128, number=8, chain=chain)
        report.segments.add(session_id=1, final=end)
        bench.leader.on_report(node, report)
    bench.leader.plan()
    assert bench.pending == []
    (said,) = [line for line in caplog.messages if "session_stopped" in line]
    assert "node=b" in said
    assert "others=a" in said


def test_a_node_that_merged_something_else_than_the_others_is_named(bench):
    do_open(bench.state)
    for node in "abc":
        bench.report(node, marks_of(writing(3)))
    bench.reconcile()
    good = pb.MergedReport(instruction=1, chain=bench.state.merged.chain)
    bench.report("a", merged=good)
    bench.report("b", merged=pb.MergedReport(instruction=1, chain=7))
    assert bench.differences == []
    bench.report("c", merged=good)
    assert [one.node for one in bench.differences] == ["b"]


# Clocking itself


def test_while_a_small_instruction_is_on_its_way_what_comes_waits_and_goes_together(bench):
    do_open(bench.state)
    one = writing(30)
    for at in range(2, 31):
        for node in "ab":
            bench.report(node, {(1, 0, 0): one.segments[0][at - 2 : at]})
        bench.leader.plan()
    assert len(bench.proposals) == 1
    assert not bench.leader.may_plan
    bench.reconcile()
    bench.assert_merged(1, 29)
    assert len(bench.outcomes) == 2


def test_while_one_is_on_its_way_another_follows_if_it_is_large(bench):
    do_open(bench.state)
    one = writing(6, size=1 << 19)
    for at in range(2, 8):
        for node in "ab":
            bench.report(node, {(1, 0, 0): one.segments[0][at - 2 : at]})
        bench.leader.plan()
    assert [len(command.ranges) for command in bench.pending] == [1, 1, 1]
    bench.reconcile()
    bench.assert_merged(1, 6)


def test_when_nothing_is_new_nothing_is_planned(bench):
    for n in range(40):
        do_open(bench.state, f"s{n}")
    bench.lead()
    for node in "abc":
        bench.report(node, {(n + 1, 0, 0): writing(2).segments[0] for n in range(20)})
    bench.reconcile()
    assert not bench.leader.has_plans
    for node in "abc":
        bench.report(node)
    assert not bench.leader.has_plans
    bench.report("a", {(30, 0, 0): writing(2).segments[0]})
    assert not bench.leader.has_plans
    bench.report("b", {(30, 0, 0): writing(2).segments[0]})
    assert bench.leader.may_plan


# Disks that were lost


def test_a_disk_is_restored_by_what_reports_say_and_by_nothing_that_may_be_missing_in_them(bench):
    do_join(bench.state, "a", "b", "c")
    do_open(bench.state)
    one = writing(4)
    for node in "ab":
        bench.report(node, {(1, 0, 0): one.segments[0][:2]}, joins=3)
    bench.reconcile()
    bench.report("a", {(1, 0, 0): one.segments[0][2:]}, joins=3)
    do_join(bench.state, "c", disk=1)
    bench.report("a", joins=4)
    bench.report("b", {(9, 0, 0): one.segments[0]}, joins=4)  # Of a session that is not known here yet.
    bench.report("c", joins=4)
    bench.leader.tick()
    assert not bench.pending
    bench.sequences.pop("b")
    bench.report("b", {(1, 0, 0): one.segments[0][1:2]}, joins=4)
    bench.leader.tick()
    assert not bench.pending
    bench.report("c", {(1, 0, 0): one.segments[0]}, joins=4)
    bench.leader.tick()
    assert not any(isinstance(one, RestoreDisk) for one in bench.pending), "it has not merged what was merged"
    bench.report("c", joins=4, merged=pb.MergedReport(instruction=1))
    bench.leader.tick()
    assert RestoreDisk("c", bytes([1]) * 16) in bench.pending
    bench.reconcile()
    bench.assert_merged(1, 4)
    assert bench.state.disks["c"].is_whole


def test_what_a_node_held_on_the_disk_before_does_not_make_its_new_one_whole(bench):
    do_join(bench.state, "a", "b", "c")
    do_open(bench.state)
    held = {(1, 0, 0): writing(4).segments[0]}
    bench.report("a", held, joins=3)
    bench.report("b", held, joins=3)
    bench.report("c", joins=3)
    bench.commit(encode_command(JoinDisk("b", b"D" * 16)))
    assert bench.asked == ["b"]
    bench.report("a", joins=4)
    bench.report("c", joins=4)
    bench.leader.tick()
    assert not bench.pending
    bench.sequences.pop("b")
    bench.report("b", joins=4)
    bench.leader.tick()
    assert not bench.pending
    bench.report("b", held)
    bench.leader.tick()
    assert RestoreDisk("b", b"D" * 16) in bench.pending


def test_a_lease_nobody_renews_expires_by_the_leaders_own_time_whatever_wall_clocks_say(bench):
    bench.commit(encode_command(AcquireLeases(b"Q" * 16, "h1", 10_000, ("g/q1", "g/q2"))))
    bench.leader.tick()
    for node in "abc":
        bench.report(node, clock_ns=CLOCK_NS + HOUR_NS)
    bench.now_ns += 10 * SECOND_NS - 1
    bench.leader.tick()
    assert bench.pending == []
    bench.now_ns += LEASES_LOOK_NS
    bench.leader.tick()
    assert bench.pending == [ExpireLeases((IdleLease("g/q1", 1, 0), IdleLease("g/q2", 2, 0)))]
    bench.commit(encode_command(RenewLeases(b"R" * 16, "h1", (HeldLease("g/q1", 1),))))
    bench.reconcile()
    assert [*bench.state.leases] == ["g/q1"]


def test_an_expiry_that_was_lost_is_proposed_again_but_not_while_it_is_on_its_way(bench):
    bench.commit(encode_command(AcquireLeases(b"Q" * 16, "h1", 1_000, ("g/q1",))))
    bench.leader.tick()
    bench.now_ns += SECOND_NS
    for _ in range(3):
        bench.leader.tick()
        bench.now_ns += LEASES_LOOK_NS
    assert len(bench.pending) == 1
    bench.proposals.clear()
    bench.now_ns += REPEAT_NS
    bench.leader.tick()
    bench.reconcile()
    assert not bench.state.leases


def test_a_leader_that_comes_new_lets_every_lease_last_its_whole_time_again(bench):
    bench.commit(encode_command(AcquireLeases(b"Q" * 16, "h1", 10_000, ("g/q1",))))
    bench.leader.tick()
    bench.now_ns += 9 * SECOND_NS
    bench.lead()
    bench.leader.tick()
    bench.now_ns += 9 * SECOND_NS
    bench.leader.tick()
    assert bench.pending == []
    bench.now_ns += SECOND_NS
    bench.leader.tick()
    assert bench.pending == [ExpireLeases((IdleLease("g/q1", 1, 0),))]


# Sessions that nobody feeds


def closing(bench: Bench) -> list[Command]:
    return [one for one in bench.pending if isinstance(one, FenceRun | CloseRun)]


def end_report(bench: Bench, node: str, session_id: int, offset: int, number: int, *, run: int = 0) -> None:
    """The node says what is final of one of the session's runs."""
    sequence = bench.sequences[node] = bench.sequences[node] + 1
    report = pb.Report(boot=b"b", clock_ns=CLOCK_NS, sequence=sequence)
    final = pb.SessionEnd(session_id=session_id, run=run, roll=0, offset=offset, number=number)
    report.segments.add(session_id=session_id, run=run, roll=0, final=final)
    bench.leader.on_report(node, report)


def test_a_session_that_nobody_feeds_is_fenced_and_closed_and_one_with_a_stream_stays(bench):
    do_join(bench.state, "a", "b", "c")
    do_open(bench.state)
    do_open(bench.state, "fed", incarnation=1)
    apply(bench.state, Configure(session_idle_minutes=1))
    bench.lead()
    for second in range(0, 130, 10):
        for node in "ab":
            bench.report(node, connected=[2] if node == "b" else [])
        bench.leader.tick()
        assert bool(closing(bench)) == (second >= 60), second
        if closing(bench):
            break
        bench.now_ns += 10 * SECOND_NS
    assert closing(bench) == [FenceRun(1, 0)]
    bench.reconcile()
    for node in "ab":
        end_report(bench, node, 1, 64, 0)
    bench.reconcile()
    assert [*bench.state.closed] == [1]
    assert bench.state.sessions[2].active_runs


@pytest.mark.parametrize("runs", [1, 2])
def test_an_operator_closes_a_run_whose_end_is_lost_with_a_disk_also_after_nodes_said_what_they_hold(
    bench, runs: int
):
    """What nodes hold says nothing of the publisher. A second run waits for the first one to end."""
    do_join(bench.state, "a", "b", "c")
    do_open(bench.state)
    if runs == 2:
        do_open(bench.state, run=1)
    bench.lead()
    for node in "abc":
        bench.report(node, joins=3)
    bench.commit(encode_command(CloseSession("a")))
    end_report(bench, "a", 1, 640, 10)
    end_report(bench, "b", 1, 64, 0)
    bench.reconcile()
    active = bench.state.sessions[1].active
    assert active is not None
    assert active.end == (0, 640, 10)
    bench.commit(encode_command(JoinDisk("a", b"D" * 16)))
    bench.sequences.pop("a")
    for node in "abc":
        bench.report(node, joins=4)
    bench.leader.tick()
    assert closing(bench) == [], "its publisher may be connected to a node that has not said so yet"
    bench.now_ns += AWAY_NS
    bench.leader.tick()
    assert CloseRun(1, 0, 0, 64, 0) in bench.pending
    bench.reconcile()
    assert [active.run for active in bench.state.sessions[1].active_runs] == [1][: runs - 1]


def test_an_operator_closes_many_waiting_runs_of_which_no_node_has_a_byte_with_a_few_commands(bench):
    do_join(bench.state, "a", "b", "c")
    do_open(bench.state)
    count = 2 * LATER_MAX
    for begin in range(1, count, SEALED_RUNS_MAX):
        whose = opening("a")
        runs = range(begin, min(begin + SEALED_RUNS_MAX, count))
        sealed = tuple(SealedRun(run, run.to_bytes(8), End(0, 128, 10)) for run in runs)
        opened = OpenSealedRuns(whose.session, whose.incarnation, None, sealed, 1)
        must(RunOpened, apply(bench.state, opened))
    assert len(bench.state.sessions[1].active_runs) == count
    snapshot = encode_state(bench.state)
    bench.lead()
    for node in "abc":
        bench.report(node, joins=3)
    bench.commit(encode_command(CloseSession("a")))
    bench.now_ns += AWAY_NS
    bench.leader.tick()
    bench.reconcile()
    for node in "ab":
        for run in range(count):
            end_report(bench, node, 1, 64, 0, run=run)
    bench.reconcile()
    assert [*bench.state.closed] == [1]
    assert bench.state.sessions[1].done == (count - 1, End(0, 64, 0))
    assert len(bench.outcomes) <= 5
    assert all(len(encode_command(command)) < 1024 for command, _ in bench.outcomes)
    replayed = decode_state(snapshot)
    for command, outcome in bench.outcomes:
        assert apply(replayed, decode_command(encode_command(command))) == outcome
        replayed = decode_state(encode_state(replayed))
    assert replayed == bench.state
    assert encode_state(replayed) == encode_state(bench.state)


def test_of_a_publisher_that_is_connected_an_operator_closes_no_run_but_the_one_that_is_merged(bench):
    do_join(bench.state, "a", "b", "c")
    for run in range(3):
        do_open(bench.state, run=run)
    bench.lead()
    for node in "abc":
        bench.report(node, joins=3, connected=[1] if node == "b" else [])
    bench.commit(encode_command(CloseSession("a")))
    for node in "ab":
        end_report(bench, node, 1, 64, 0)
    bench.reconcile()
    assert [one.is_fenced for one in bench.state.sessions[1].active_runs] == [False, False]
    bench.now_ns += AWAY_NS - 1
    bench.report("b", connected=[1])
    bench.now_ns += AWAY_NS
    bench.leader.tick()
    assert closing(bench) == [], "it is connected still"
    bench.commit(encode_command(CloseSession("a")))
    bench.leader.tick()
    assert closing(bench) == [FenceRun(1, 2)], "it has left"


def test_a_publisher_that_is_connected_may_still_bring_what_a_disk_lost(bench):
    do_join(bench.state, "a", "b", "c")
    do_open(bench.state)
    bench.lead()
    for node in "abc":
        bench.report(node, joins=3)
    bench.commit(encode_command(CloseSession("a")))
    end_report(bench, "a", 1, 640, 10)
    end_report(bench, "b", 1, 64, 0)
    bench.reconcile()
    bench.commit(encode_command(JoinDisk("a", b"D" * 16)))
    bench.sequences.pop("a")
    for node in "abc":
        bench.report(node, joins=4, connected=[1])
    bench.leader.tick()
    assert closing(bench) == []


def test_the_leader_lets_go_of_old_records_and_of_all_it_knows_of_them(bench, monkeypatch):
    monkeypatch.setattr("sequencer.leader.idle_sessions.FORGET_AT_ONCE", 1)
    monkeypatch.setattr("sequencer.leader.idle_sessions.OldSessions.__init__.__kwdefaults__", {"kept": 0})
    do_join(bench.state, "a", "b", "c")
    do_open(bench.state)
    bench.lead()
    for node in "ab":
        bench.report(node, {(1, 0, 0): [BatchBoundary(64, 0, 64), BatchBoundary(128, 10, 128)]})
    bench.reconcile()
    bench.assert_merged(1, 10)
    bench.commit(encode_command(CloseSession("a")))
    for node in "ab":
        end_report(bench, node, 1, 128, 10)
    bench.reconcile()
    assert [*bench.state.closed] == [1]
    bench.leader.tick()
    assert not any(isinstance(one, Forget) for one in bench.pending), "nobody has merged it durably"
    for node in "ab":
        bench.report(node, merged=pb.MergedReport(instruction=1))
    bench.leader.tick()
    assert bench.pending == [Forget((1,))]
    bench.reconcile()
    assert bench.state.sessions == {}
    assert bench.leader.tracker._segments == bench.leader.tracker._finals == {}
    # A node that has not heard of it yet says what it holds: it is not asked for everything again.
    bench.asked.clear()
    end_report(bench, "a", 1, 128, 10)
    assert bench.asked == []
    assert bench.leader.tracker._finals == {}
