"""A leader in a cluster of three, its proposals, and the clocks."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field

from sequencer_core import Writing, new_state

from rt.v1 import sequencer_pb2 as pb
from sequencer.leader.divergence_check import Divergence
from sequencer.leader.leader import MINUTE_NS, Leader
from sequencer.leader.member_steps import CommittedMembers
from sequencer.leader.proposals import LeaderProposals
from sequencer.leader.replication_tracker import BatchBoundary, pack_boundaries
from sequencer.raft.model.members import Members, RaftMember
from sequencer.state.apply import apply
from sequencer.state.apply_result import Outcome, RangesMerged
from sequencer.state.command_codec import decode_command
from sequencer.state.commands import Command, MergeInstruction
from sequencer.state.state import SequencerState

SECOND_NS = 10**9
HOUR_NS = 60 * MINUTE_NS
CLOCK_NS = 1_700_000_000 * 10**9


def voters(*names: str) -> Members:
    return {name: RaftMember(f"{name}:1", votes=True) for name in names}


@dataclass(slots=True)
class Bench:
    """A leader in a cluster of three, its proposals in order, and the clocks."""

    state: SequencerState = field(default_factory=new_state)
    proposals: deque[tuple[bytes, Future[int]]] = field(default_factory=deque)
    asked: list[str] = field(default_factory=list)
    differences: list[Divergence] = field(default_factory=list)
    error: Exception | None = None
    configured: dict[str, int] = field(default_factory=dict)
    members: Members = field(default_factory=lambda: voters("a", "b", "c"))
    now_ns: int = 10**12
    outcomes: list[tuple[Command, Outcome]] = field(default_factory=list)
    sequences: dict[str, int] = field(default_factory=dict)
    leader: Leader = field(init=False)

    def __post_init__(self) -> None:
        self.lead()

    def lead(self) -> None:
        """Start a new term of this node."""
        self.sequences.clear()
        self.leader = Leader(
            self.state,
            CommittedMembers("a", self.members),
            LeaderProposals(self, lambda: self.now_ns),
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
        """Send a report of a node. Its first report in a term is full; later reports contain changes."""
        sequence = self.sequences.get(node, -1) + 1
        self.sequences[node] = sequence
        values = {"boot": b"b", "clock_ns": CLOCK_NS, "sequence": sequence, "is_full": sequence == 0}
        report = pb.Report(**(values | fields))  # type: ignore[arg-type]
        for (session_id, run, roll), one in (marks or {}).items():
            report.segments.add(session_id=session_id, run=run, roll=roll, boundaries=pack_boundaries(one))
        self.leader.on_report(node, report)

    def commit(self, content: bytes, future: Future[int] | None = None) -> Outcome:
        """Act as the consensus thread: apply, notify the leader, then complete the future."""
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
        """Return the merged ranges of a session: first number and end of each."""
        return [
            (one.first, one.end_number)
            for command, outcome in self.outcomes
            if isinstance(outcome, RangesMerged) and isinstance(command, MergeInstruction)
            for one in command.ranges
            if one.session_id == session_id
        ]

    def assert_merged(self, session_id: int, end: int) -> None:
        """Assert that everything up to number `end` was merged once, in order."""
        at = 0
        for first, behind in self.merged_numbers(session_id):
            assert first == at
            at = behind
        assert at == end


def writing(batches: int, size: int = 80, salt: int = 1) -> Writing:
    one = Writing(0, 0, salt)
    for _ in range(batches):
        one.append(size, 1)
    return one


def marks_of(one: Writing, session_id: int = 1) -> dict[tuple[int, int, int], list[BatchBoundary]]:
    return {(session_id, one.run, roll): marks for roll, marks in enumerate(one.segments)}
