"""What the leader does: takes reports, plans, proposes.

The law: only a node that leads, and has applied all that earlier terms committed, plans; what it plans ahead
is dropped as soon as something is applied otherwise than planned. The consensus thread alone uses it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterable, Mapping
from concurrent.futures import Future
from statistics import median_low
from types import MappingProxyType
from typing import Final, Protocol

from archiver.policy import DiskUse, reached_ns
from rt.errors import FormatError, Overloaded, RtError
from rt.log.format.segment import SEGMENT_HEADER_BYTES
from rt.v1 import sequencer_pb2 as pb
from sequencer.leader.divergence_check import Divergence, DivergenceDetector
from sequencer.leader.idle_sessions import IdleSessions, OldSessions
from sequencer.leader.lease_expiry import LeaseExpiry
from sequencer.leader.merge_planner import Speculation, plan_merge, plan_roll
from sequencer.leader.peer_fetch_planner import FetchRequest, PeerFetchPlanner
from sequencer.leader.replication_tracker import ReplicationTracker, SegmentKey, unpack_marks
from sequencer.leader.retention_planner import NodeUsage, RetentionPlanner
from sequencer.leader.session_close import DiskRestoration, SessionCloser
from sequencer.state.apply_result import (
    CommandRejected,
    DiskJoined,
    Forgotten,
    Outcome,
    RangesMerged,
    RequestWaits,
)
from sequencer.state.command_codec import encode_command
from sequencer.state.commands import (
    CloseRun,
    Command,
    Configure,
    DecideRequest,
    FenceRun,
    Forget,
    MergeInstruction,
    RestoreDisk,
    Roll,
    TrimSegments,
)
from sequencer.state.lease_commands import ExpireLeases
from sequencer.state.operator_requests import to_decide
from sequencer.state.state import SequencerState
from sequencer.state.write_plan import SessionEnd

IN_FLIGHT_MAX: Final = 4
"""Merge instructions on their way at once: one is synced while the others travel."""
LARGE_BYTES: Final = 1 << 20
"""While one is on its way another follows only if it is about so large: small ones would cost more than they
gain, so what comes meanwhile goes together."""
BACKLOG_BYTES_MAX: Final = 1 << 30
"""While fewer than a majority have merged durably to within so much of the end, nothing is planned: the
orders behind it must fit into every snapshot."""
BACKLOG_MAX: Final = 1 << 15
"""The same in instructions: half of what a node's merger remembers (`merger.PLANS_MAX`)."""
MINUTE_NS: Final = 60 * 10**9
FRESH_NS: Final = 3 * 10**9
"""A clock in a report counts for so long."""

logger = logging.getLogger("sequencer")


class ProposalPort(Protocol):
    """Consensus, as far as the leader needs it."""

    def propose(self, command: bytes) -> Future[int]:
        """See `Consensus.propose`."""


class _Node:
    """What is known of one node's reports."""

    def __init__(self, boot: bytes) -> None:
        self.boot = boot
        self.sequence = -1
        self.joins = 0
        """All that was durable there when so many disks had joined is on the board."""
        self.is_asked = False
        """Something of its reports is not on the board before the next full one."""
        self.merged = pb.MergedReport()
        self.clock_ns = 0
        self.disk = DiskUse(0, 0)
        self.heard_ns = 0


class Leader:
    """One node's leadership in one term. `now_ns` is a clock that never goes back, `clock_ns` the wall's."""

    def __init__(
        self,
        state: SequencerState,
        members: int,
        proposer: ProposalPort,
        ask_again: Callable[[str], None],
        now_ns: Callable[[], int],
        tell_lack: Callable[[FetchRequest], None] = lambda _: None,
        on_difference: Callable[[Divergence], None] = lambda _: None,
        wanted: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        """`on_difference` hears of nodes that must stop. `wanted` is what the configuration is to be."""
        self.board = ReplicationTracker(members)
        self._state, self._proposer, self._ask_again, self._now_ns = state, proposer, ask_again, now_ns
        self._speculation = Speculation(state)
        self._chains, self._on_difference = DivergenceDetector(members), on_difference
        self._endings = SessionCloser(state, self.board)
        self._restoring = DiskRestoration(state, self.board)
        self._supplying, self._tell_lack = PeerFetchPlanner(state, self.board), tell_lack
        self._archiving = RetentionPlanner(state, members, wanted, now_ns())
        self._lease_clock = LeaseExpiry(state)
        self._idle, self._old = IdleSessions(state, now_ns()), OldSessions(state, now_ns())
        self._in_flight = 0
        self._is_adrift = False
        """Something was applied otherwise than planned: nothing is planned until nothing is in flight."""
        self._nodes: dict[str, _Node] = {}
        self._proposed_ns: dict[Hashable, int] = {}
        """When what was proposed is proposed again."""
        self._asks = False
        """An operator asked for something just now."""
        self._told: set[int] = set()
        self._roll_again_ns = 0

    # Reports

    def on_report(self, name: str, report: pb.Report) -> None:
        """A node says what it holds. `rt.FormatError`: it is ignored."""
        node = self._nodes.get(name)
        if report.is_full:
            if node is not None:
                self.board.forget_node(name)
            node = self._nodes[name] = _Node(report.boot)
            self._supplying.on_node(name, self._now_ns())
        elif node is None or node.boot != report.boot or report.sequence != node.sequence + 1:
            self._ask_again(name)
            return
        node.sequence = report.sequence
        node.clock_ns, node.heard_ns = report.clock_ns, self._now_ns()
        node.disk = DiskUse(report.disk_bytes, report.disk_free_bytes)
        if report.connected:
            self._idle.on_heard(report.connected, self._now_ns())
            self._endings.on_heard(report.connected)
        if report.merged.instruction != node.merged.instruction:
            for found in self._chains.on_reported(name, report.merged.instruction, report.merged.chain):
                self._on_difference(found)
        node.merged = report.merged
        try:
            for one in report.segments:
                self._on_segment(name, one)
        except FormatError as error:
            logger.error("report_rejected node=%s error=%r", name, str(error))
            node.is_asked = True
            self._ask_again(name)
            return
        if not node.is_asked:
            node.joins = max(node.joins, report.joins)

    def _on_segment(self, name: str, one: pb.SegmentReport) -> None:
        session = self._state.sessions.get(one.session_id)
        if session is None and one.session_id < self._state.next_session_id:
            return  # Its record is gone, and the node has not heard of that yet.
        if session is None:
            self._nodes[name].is_asked = True
            self._ask_again(name)  # It was opened, and is about to be applied here.
            return
        self._idle.on_heard([one.session_id], self._now_ns())  # What a node holds, a peer may have brought.
        self.board.on_marks(name, SegmentKey(one.session_id, one.run, one.roll), unpack_marks(one.marks))
        self._supplying.on_news(one.session_id, name, self._nodes[name].heard_ns)
        if one.HasField("announced"):
            self.board.on_announced(_end(one.announced))
        if one.HasField("final"):
            chain = one.final.chain if one.final.HasField("chain") else None
            self.board.on_final(name, _end(one.final), chain)
        found = self.board.disagreements.get(one.session_id)
        if found is not None and one.session_id not in self._told:
            self._told.add(one.session_id)
            logger.error(
                "session_stopped session=%s id=%d at=log.%d.%d offset=%d node=%s got=%s others=%s wanted=%s",
                *(session.name, session.id, found.key.run, found.key.roll, found.offset),
                *(found.node, found.got, ",".join(found.others), found.wanted),
            )

    # What is applied

    def on_applied(self, command: Command, outcome: Outcome) -> None:
        """A command was applied here, this leader's own or another's."""
        if isinstance(command, MergeInstruction | Roll) and isinstance(outcome, CommandRejected):
            self._is_adrift = True
        elif isinstance(command, MergeInstruction):
            for one in {one.session_id: one for one in command.ranges}.values():
                self.board.forget_below(one.session_id, one.run, one.roll, one.end)
        elif isinstance(command, FenceRun | CloseRun):
            self._proposed_ns.pop((command.session_id, command.run, type(command)), None)
        elif isinstance(command, TrimSegments | Configure):
            self._proposed_ns.pop((type(command),), None)
        elif isinstance(command, ExpireLeases):
            self._proposed_ns.pop((ExpireLeases,), None)
        elif isinstance(command, DecideRequest):
            self._proposed_ns.pop((DecideRequest, command.id), None)
        if isinstance(outcome, RangesMerged):
            self._chains.on_order(outcome.order)
        elif isinstance(outcome, RequestWaits):
            self._asks = True
        elif isinstance(outcome, DiskJoined):
            self._forget_disk(outcome.node)
        elif isinstance(outcome, Forgotten):
            self._forget(outcome.session_ids)
        self._speculation.on_applied(outcome)
        self._endings.on_applied(outcome)
        self._idle.on_applied(outcome, self._now_ns())
        self._old.on_applied(outcome)
        self._archiving.on_applied(outcome, self._now_ns())

    def _forget(self, session_ids: Iterable[int]) -> None:
        """The records of these sessions are gone."""
        self._proposed_ns.pop((Forget,), None)
        for session_id in session_ids:
            self.board.forget_session(session_id)
            self._supplying.forget_session(session_id)
            self._told.discard(session_id)

    def _forget_disk(self, name: str) -> None:
        """What a node said that it holds was on the disk before: it must say anew what is on this one."""
        self.board.forget_node(name)
        node = self._nodes.get(name)
        if node is not None:
            node.joins, node.is_asked = 0, True
            self._ask_again(name)

    # Planning

    @property
    def has_plans(self) -> bool:
        """Whether `plan` may find something to propose, now or once nothing is in flight."""
        self._take_news()
        return bool(self._speculation.pending or self._endings.due or self._is_adrift or self._asks)

    @property
    def may_plan(self) -> bool:
        """Whether it may find something now."""
        if not self.has_plans:
            return False
        return self._may_merge() or bool(self._endings.due) or (self._is_adrift and not self._in_flight)

    def plan(self) -> None:
        """Propose what can be proposed now."""
        self._take_news()
        self._plan_ends()
        self._plan_decisions()
        if self._is_adrift and not self._in_flight:
            self._is_adrift = False
            self._speculation.reset()
        if self._is_adrift or not self._may_merge() or self._is_far_ahead():
            return
        if not self._in_flight:
            self._speculation.settle()
        while self._may_merge():
            merge = plan_merge(self._speculation, self.board, self._clock_ns())
            if merge is None or not self._propose(merge):
                return
            size = sum(one.end - one.start for one in merge.ranges)
            self.board.fresh_bytes = max(0, self.board.fresh_bytes - size)

    def tick(self) -> None:
        """Now and then: propose what only time brings."""
        self._plan_roll()
        self._plan_archiving()
        self._plan_leases()
        self._plan_sessions()
        told = {name: node.joins for name, node in self._nodes.items()}
        merged = {name: node.merged.instruction for name, node in self._nodes.items()}
        for restore in self._restoring.plan(told, merged, self._speculation.instruction):
            self._propose_at_times(restore, (restore.disk,))
        for close in self._endings.plan_lost(told):
            self._propose_at_times(close, (close.session_id, close.run, CloseRun))
        now_ns = self._now_ns()
        heard = [name for name, node in self._nodes.items() if now_ns - node.heard_ns < 2 * FRESH_NS]
        for lack in self._supplying.plan(heard, now_ns):
            self._tell_lack(lack)
        self.plan()

    def _take_news(self) -> None:
        if self.board.news:
            news = self.board.take_news()
            self._speculation.pending |= news
            self._endings.on_news(news)

    def _may_merge(self) -> bool:
        """Whether an instruction is wanted: alone at once, behind others only if there is much for it."""
        if not self._speculation.pending:
            return False
        if not self._in_flight:
            return True
        return self._in_flight < IN_FLIGHT_MAX and self.board.fresh_bytes >= LARGE_BYTES

    def _propose(self, command: Command) -> bool:
        try:
            future = self._proposer.propose(encode_command(command))
        except Overloaded:
            self._is_adrift = True
            return False
        except RtError as error:
            logger.error("proposal_failed error=%r", str(error))
            self._is_adrift = True
            return False
        if isinstance(command, MergeInstruction | Roll):
            self._in_flight += 1
            future.add_done_callback(self._on_done)
        return True

    def _on_done(self, future: Future[int]) -> None:
        self._in_flight -= 1
        if future.cancelled() or future.exception() is not None:
            self._is_adrift = True

    def _plan_ends(self) -> None:
        for command in self._endings.plan():
            self._propose_at_times(command, (command.session_id, command.run, type(command)))

    def _plan_decisions(self) -> None:
        """Have what operators asked for carried out, or forgotten when it is too late."""
        self._asks = False
        if not self._state.asked:
            return
        now_ns = reached_ns([heard.clock_ns for heard in self._heard()], self.board.members)
        if now_ns is None:
            return  # No majority was heard of, so nobody knows what time it is.
        now_ns = max(now_ns, self._state.decided_ns, 1)
        for request in to_decide(self._state, now_ns):
            self._propose_at_times(DecideRequest(request, now_ns), (DecideRequest, request))

    def _propose_at_times(
        self,
        command: FenceRun
        | CloseRun
        | RestoreDisk
        | TrimSegments
        | Configure
        | DecideRequest
        | ExpireLeases
        | Forget,
        key: Hashable,
    ) -> None:
        """Propose what may have been lost, but not again and again what is on its way."""
        now_ns = self._now_ns()
        if now_ns >= self._proposed_ns.get(key, 0):
            self._proposed_ns[key] = now_ns + FRESH_NS
            logger.info(
                "proposal_submitted %s",
                command.brief if isinstance(command, ExpireLeases | Forget) else command,
            )
            self._propose(command)

    def _plan_roll(self) -> None:
        """A merged segment that is old is followed by another one, so that its data can expire."""
        merged, minutes = self._state.merged, self._state.configuration.roll_minutes
        if not minutes or merged.segment is None or merged.offset <= SEGMENT_HEADER_BYTES or self._is_adrift:
            return
        now_ns, clock_ns = self._now_ns(), self._clock_ns()
        if clock_ns - merged.created_ns >= minutes * MINUTE_NS and now_ns >= self._roll_again_ns:
            self._roll_again_ns = now_ns + FRESH_NS
            if not self._in_flight:
                self._speculation.settle()
            self._propose(plan_roll(self._speculation, merged.segment, clock_ns))

    def _plan_archiving(self) -> None:
        configure = self._archiving.configure()
        if configure is not None:
            self._propose_at_times(configure, (Configure,))
            return  # What is to be trimmed is another question then.
        trim = self._archiving.plan(self._heard(), self._now_ns())
        if trim is not None:
            self._propose_at_times(trim, (TrimSegments,))

    def _plan_leases(self) -> None:
        over = self._lease_clock.due(self._now_ns())
        if over is not None:
            self._propose_at_times(over, (ExpireLeases,))

    def _plan_sessions(self) -> None:
        """Close what no publisher came for; let go of the records of what was closed long ago."""
        idle = self._idle.plan(self._now_ns())
        if idle:
            logger.info("closes_idle_sessions count=%d first=%d", len(idle), idle[0])
            self._endings.give_up(idle)
        merged = [node.merged.instruction for node in self._nodes.values()]
        forget = self._old.plan(merged, self.board.majority, self._now_ns())
        if forget is not None:
            self._propose_at_times(forget, (Forget,))

    def _heard(self) -> list[NodeUsage]:
        """What fresh reports say; each clock moved on by the time since it was read."""
        now_ns = self._now_ns()
        ages = ((node, now_ns - node.heard_ns) for node in self._nodes.values())
        return [NodeUsage(node.clock_ns + age_ns, node.disk) for node, age_ns in ages if age_ns < FRESH_NS]

    def _clock_ns(self) -> int:
        """The median of the clocks."""
        clocks = [heard.clock_ns for heard in self._heard()]
        return median_low(clocks) if clocks else 0

    def _is_far_ahead(self) -> bool:
        """Whether a majority is so far behind in merging that no more may be planned."""
        total, last = self._state.merged.total_bytes, self._state.instruction
        near = sum(
            total - node.merged.bytes < BACKLOG_BYTES_MAX and last - node.merged.instruction < BACKLOG_MAX
            for node in self._nodes.values()
        )
        return near < self.board.majority


def _end(message: pb.SessionEnd) -> SessionEnd:
    return SessionEnd(message.session_id, message.run, message.roll, message.offset, message.number)
