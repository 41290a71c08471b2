"""The leader: receives reports, plans, and proposes commands.

Only the consensus thread calls it. Reports of learners are ignored: the caller reports to
`Leader.member_steps` how far a learner has merged.

Invariants:
- A `Leader` is made only when this node has applied all commands of earlier terms (`Leadership.is_here`), so
  it plans from the current state.
- Plans run ahead of the applied state (`Speculation`). If a command is lost, or is applied with another
  result than planned, no more merges are planned until nothing is in flight. Then planning starts again from
  the applied state. So a wrong plan costs time and never bytes: `apply` checks each command.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Final

from archiver.policy import reached_ns
from rt.errors import FormatError
from rt.log.format.segment import SEGMENT_HEADER_BYTES
from rt.v1 import sequencer_pb2 as pb
from sequencer.leader.divergence_check import Divergence, DivergenceDetector
from sequencer.leader.idle_sessions import IdleSessions, OldSessions
from sequencer.leader.lease_expiry import LeaseExpiry
from sequencer.leader.member_steps import CommittedMembers, MemberStep, MemberSteps
from sequencer.leader.merge_planner import Speculation, plan_merge, plan_roll
from sequencer.leader.node_reports import FRESH_NS, NodeReports
from sequencer.leader.peer_fetch_planner import FetchRequest, PeerFetchPlanner
from sequencer.leader.proposals import REPEAT_NS, LeaderProposals
from sequencer.leader.replication_tracker import ReplicationTracker, SegmentKey, unpack_boundaries
from sequencer.leader.retention_planner import RetentionPlanner
from sequencer.leader.session_close import DiskRestoration, SessionCloser
from sequencer.raft.model.members import voters_of
from sequencer.state.apply_result import (
    CommandRejected,
    DiskJoined,
    Forgotten,
    Outcome,
    RangesMerged,
    RequestWaits,
)
from sequencer.state.command_codec import raised_level
from sequencer.state.commands import REFUSED_MAX, Command, DecideRequest, MergeInstruction
from sequencer.state.feature_level import FeatureLevelRefused, MemberLevel, check_raise
from sequencer.state.operations.membership import SettleMembers
from sequencer.state.operations.operator_requests import to_decide
from sequencer.state.state import SequencerState
from sequencer.state.write_plan import SessionEnd

IN_FLIGHT_MAX: Final = 4
"""Maximum number of merge instructions in flight: one is synced while the others are sent."""
LARGE_BYTES: Final = 1 << 20
"""While an instruction is in flight, the next one is proposed only if it has about this size. Small ones
would cost more than they gain, so input that arrives meanwhile is merged together."""
BACKLOG_BYTES_MAX: Final = 1 << 30
"""Nothing is planned unless the durable merged ends of a majority are within this distance of the end. Every
snapshot must contain the plans after them.
"""
BACKLOG_MAX: Final = 1 << 15
"""The same limit as a number of instructions: half of `write_plan.PLANS_MAX`, which a merger keeps."""
MINUTE_NS: Final = 60 * 10**9
logger = logging.getLogger("sequencer")


class Leader:
    """One node's leadership in one term and with one list of members.

    It learns what happened from `on_report` and `on_applied`. It acts in `plan` and `tick`, which propose
    commands and never wait. `now_ns` is a monotonic clock.
    """

    def __init__(
        self,
        state: SequencerState,
        committed: CommittedMembers,
        proposals: LeaderProposals,
        ask_again: Callable[[str], None],
        now_ns: Callable[[], int],
        send_fetch: Callable[[FetchRequest], None] = lambda _: None,
        on_divergence: Callable[[Divergence], None] = lambda _: None,
        configured: Mapping[str, int] = MappingProxyType({}),
        member_levels: Callable[[int], Sequence[MemberLevel]] = lambda _: (),
    ) -> None:
        """`proposals`: the proposals of the term; some may be in flight since an earlier list of members.

        `ask_again` requests a full report of a node. `send_fetch` requests that a node copies session bytes
        from another one. `on_divergence` gets nodes that must stop. `configured`: this node's replicated
        settings. `member_levels` returns what each member reported about its program, at a time of `now_ns`.
        """
        voters = len(voters_of(committed.members))
        self.tracker = ReplicationTracker(voters)
        self.member_steps = MemberSteps(state, committed, self.tracker)
        self._state, self._now_ns, self._member_levels = state, now_ns, member_levels
        self._proposals = proposals
        proposals.must_replan = proposals.in_flight > 0
        self._nodes = NodeReports(ask_again, now_ns)
        self._speculation = Speculation(state)
        self._divergences, self._on_divergence = DivergenceDetector(voters), on_divergence
        self._closer = SessionCloser(state, self.tracker, now_ns())
        self._restoration = DiskRestoration(state, self.tracker)
        self._fetch_planner, self._send_fetch = PeerFetchPlanner(state, self.tracker), send_fetch
        self._retention = RetentionPlanner(state, voters, configured, now_ns())
        self._lease_expiry = LeaseExpiry(state)
        self._idle, self._old = IdleSessions(state, now_ns()), OldSessions(state, now_ns())
        self._has_request = False
        """Whether an operator's request was applied and is not decided yet."""
        self._logged: set[int] = set()
        """Session ids whose disagreement between nodes was logged."""
        self._roll_again_ns = 0
        """No other roll is proposed before this time."""

    def on_report(self, name: str, report: pb.Report) -> None:
        """Record a node's report. It does not plan: the caller does, if `may_plan`.

        If a segment in it cannot be decoded, the rest is ignored and a full report is requested.
        """
        if name not in self.member_steps.voters:
            return
        if report.is_full:
            if name in self._nodes:
                self.tracker.forget_node(name)
            self._fetch_planner.on_node(name, self._now_ns())
        node = self._nodes.accept(name, report)
        if node is None:
            return
        if report.connected:
            self._idle.on_heard(report.connected, self._now_ns())
            self._closer.on_heard(report.connected, self._now_ns())
        if report.merged.instruction != node.merged.instruction:
            for found in self._divergences.on_reported(name, report.merged.instruction, report.merged.chain):
                self._on_divergence(found)
        node.merged = report.merged
        self.member_steps.on_merged(name, report.merged.instruction)
        try:
            for one in report.segments:
                self._on_segment(name, node.heard_ns, one)
        except FormatError as error:
            logger.error("report_rejected node=%s error=%r", name, str(error))
            self._nodes.request_full(name)
            return
        if not node.is_asked:
            node.joins = max(node.joins, report.joins)
            self.member_steps.on_reported(name, report.merged.instruction, report.members_version)

    def _on_segment(self, name: str, now_ns: int, one: pb.SegmentReport) -> None:
        session = self._state.sessions.get(one.session_id)
        if session is None and one.session_id < self._state.next_session_id:
            return  # Its record was deleted, and the node has not applied that yet.
        if session is None:
            self._nodes.request_full(name)  # The session was opened. That will be applied here soon.
            return
        self._idle.on_heard([one.session_id], now_ns)  # The bytes may come from a peer.
        self.tracker.on_boundaries(
            name, SegmentKey(one.session_id, one.run, one.roll), unpack_boundaries(one.boundaries)
        )
        self._fetch_planner.on_news(one.session_id, name, now_ns)
        if one.HasField("announced"):
            self.tracker.on_announced(_end(one.announced))
        if one.HasField("final"):
            chain = one.final.chain if one.final.HasField("chain") else None
            self.tracker.on_final(name, _end(one.final), chain)
        found = self.tracker.disagreements.get(one.session_id)
        if found is not None and one.session_id not in self._logged:
            self._logged.add(one.session_id)
            logger.error(
                "session_stopped session=%s id=%d at=log.%d.%d offset=%d node=%s "
                "got=%s others=%s expected=%s",
                *(session.name, session.id, found.key.run, found.key.roll, found.offset),
                *(found.node, found.got, ",".join(found.others), found.wanted),
            )

    def on_applied(self, command: Command, outcome: Outcome) -> None:
        """Handle a command that was applied here. Any leader may have proposed it."""
        self._proposals.on_applied(command, outcome)
        if isinstance(command, MergeInstruction) and not isinstance(outcome, CommandRejected):
            for one in {one.session_id: one for one in command.ranges}.values():
                self.tracker.prune_before(one.session_id, one.run, one.roll, one.end)
        if isinstance(outcome, RangesMerged):
            self._divergences.on_plan(outcome.plan)
        elif isinstance(outcome, RequestWaits):
            self._has_request = True
        elif isinstance(outcome, DiskJoined):
            self.tracker.forget_node(outcome.node)  # Its reports were of the previous disk.
            self._nodes.forget_disk(outcome.node)
        elif isinstance(outcome, Forgotten):
            self._forget(outcome.session_ids)
        self._speculation.on_applied(outcome)
        self._closer.on_applied(outcome)
        self._idle.on_applied(outcome, self._now_ns())
        self._old.on_applied(outcome)
        self._retention.on_applied(outcome, self._now_ns())

    def _forget(self, session_ids: Iterable[int]) -> None:
        """Drop sessions whose records were deleted."""
        for session_id in session_ids:
            self.tracker.forget_session(session_id)
            self._fetch_planner.forget_session(session_id)
            self._logged.discard(session_id)

    @property
    def has_plans(self) -> bool:
        """Whether `plan` may find something to propose, now or once nothing is in flight."""
        self._take_news()
        return bool(
            self._speculation.pending or self._closer.due or self._proposals.must_replan or self._has_request
        )

    @property
    def may_plan(self) -> bool:
        """Whether `plan` may find something to propose now."""
        if not self.has_plans:
            return False
        return self._may_merge() or bool(self._closer.due) or self._proposals.may_replan

    def plan(self) -> None:
        """Propose what follows from reports and applied commands: ends of runs, decisions, merges."""
        self._take_news()
        self._plan_ends()
        self._plan_decisions()
        if self._proposals.may_replan:
            self._proposals.must_replan = False
            self._speculation.reset()
        if self._proposals.must_replan or not self._may_merge() or self._is_far_ahead():
            return
        if not self._proposals.in_flight:
            self._speculation.reconcile()
        while self._may_merge():
            merge = plan_merge(self._speculation, self.tracker, self._nodes.clock_ns())
            if merge is None or not self._proposals.propose(merge):
                return
            size = sum(one.end - one.start for one in merge.ranges)
            self.tracker.fresh_bytes = max(0, self.tracker.fresh_bytes - size)

    def tick(self) -> None:
        """Propose what depends on time, then `plan`. Called twice a second or more often."""
        self._plan_roll()
        now_ns, joins = self._now_ns(), self._nodes.joins
        # The configuration decides what is trimmed, so it comes first.
        retention = self._retention.configure() or self._retention.plan(self._nodes.usage(), now_ns)
        self._give_up_idle(now_ns)
        for command in (
            retention,
            self._lease_expiry.due(now_ns),
            self._old.plan(self._nodes.merged.values(), self.tracker.majority, now_ns),
            *self._restoration.plan(joins, self._nodes.merged, self._speculation.instruction),
            *self._closer.plan_lost(joins),
        ):
            if command is not None:
                self._proposals.repeat(command)
        for request in self._fetch_planner.plan(self._nodes.heard_since(now_ns - 2 * FRESH_NS), now_ns):
            self._send_fetch(request)
        self.plan()

    def next_member_step(self) -> MemberStep | None:
        """What to do next for a change of the members. The caller does it, and asks again after a tick."""
        if self._proposals.must_replan:
            return None  # Commands in flight may have been planned with another member list.
        return self.member_steps.next_step(self._nodes.joins, self._now_ns(), self._speculation.instruction)

    def settle_members(self, step: SettleMembers) -> None:
        self._proposals.repeat(step)

    def _take_news(self) -> None:
        if self.tracker.news:
            news = self.tracker.take_news()
            self._speculation.pending |= news
            self._closer.on_news(news)

    def _may_merge(self) -> bool:
        """Whether to plan an instruction: at once if none is in flight, otherwise only if it is large."""
        if not self._speculation.pending:
            return False
        if not self._proposals.in_flight:
            return True
        return self._proposals.in_flight < IN_FLIGHT_MAX and self.tracker.fresh_bytes >= LARGE_BYTES

    def _plan_ends(self) -> None:
        for command in self._closer.plan():
            self._proposals.repeat(command)

    def _plan_decisions(self) -> None:
        """Propose decisions about operators' requests. A decision executes a request or lets it expire.

        The time in a decision is a time that a majority of the nodes' clocks has reached.
        """
        self._has_request = False
        if not self._state.asked:
            return
        now_ns = reached_ns([heard.clock_ns for heard in self._nodes.usage()], self.tracker.members)
        if now_ns is None:
            return  # Without reports of a majority the time is unknown.
        now_ns = max(now_ns, self._state.decided_ns, 1)
        for request in to_decide(self._state, now_ns):
            self._proposals.repeat(DecideRequest(request, now_ns, self._refusal(request)))

    def _refusal(self, request: bytes) -> str:
        """Why this waiting or decided request must not be executed; empty if it may."""
        level = raised_level(self._state.asked[request].command)
        if level is None:
            return ""
        try:
            check_raise(level, self._state.feature_level, self._member_levels(self._now_ns()))
        except FeatureLevelRefused as error:
            return str(error)[:REFUSED_MAX]
        return ""

    def _plan_roll(self) -> None:
        """Seal an old merged segment, so that its data can expire."""
        merged, minutes = self._state.merged, self._state.configuration.roll_minutes
        if (
            not minutes
            or merged.segment is None
            or merged.offset <= SEGMENT_HEADER_BYTES
            or self._proposals.must_replan
        ):
            return
        now_ns, clock_ns = self._now_ns(), self._nodes.clock_ns()
        if clock_ns - merged.created_ns >= minutes * MINUTE_NS and now_ns >= self._roll_again_ns:
            self._roll_again_ns = now_ns + REPEAT_NS
            if not self._proposals.in_flight:
                self._speculation.reconcile()
            self._proposals.propose(plan_roll(self._speculation, merged.segment, clock_ns))

    def _give_up_idle(self, now_ns: int) -> None:
        """Give up sessions if their publisher is no longer waited for. `plan` then proposes the ends of the
        sessions.
        """
        idle = self._idle.plan(now_ns)
        if idle:
            logger.info("idle_sessions_given_up count=%d first=%d", len(idle), idle[0])
            self._closer.give_up(idle)
        self._closer.give_up_closed(now_ns)

    def _is_far_ahead(self) -> bool:
        """Whether the merging of a majority lags so far that no more may be planned."""
        last, total_bytes = self._state.instruction, self._state.merged.total_bytes
        near = self._nodes.count_near(last - BACKLOG_MAX, total_bytes - BACKLOG_BYTES_MAX)
        return near < self.tracker.majority


def _end(message: pb.SessionEnd) -> SessionEnd:
    return SessionEnd(message.session_id, message.run, message.roll, message.offset, message.number)
