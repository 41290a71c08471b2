"""The leader: receives reports, plans, and proposes commands.

Invariant: only a leader that has applied all commands of earlier terms plans. Its plans are dropped as soon
as a command is applied with another result than planned. Only the consensus thread calls it.
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
from sequencer.leader.replication_tracker import ReplicationTracker, SegmentKey, unpack_boundaries
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
"""Maximum number of merge instructions in flight: one is synced while the others are sent."""
LARGE_BYTES: Final = 1 << 20
"""While an instruction is in flight, the next one is proposed only if it has about this size. Small ones
would cost more than they gain, so input that arrives meanwhile is merged together."""
BACKLOG_BYTES_MAX: Final = 1 << 30
"""Nothing is planned unless a majority has merged durably to within this distance of the end, because every
snapshot must contain the later plans."""
BACKLOG_MAX: Final = 1 << 15
"""The same as a number of instructions: half of what a node's merger keeps (`merger.PLANS_MAX`)."""
MINUTE_NS: Final = 60 * 10**9
FRESH_NS: Final = 3 * 10**9
"""How long a clock in a report counts."""

logger = logging.getLogger("sequencer")


class ProposalPort(Protocol):
    """The part of the consensus that the leader needs."""

    def propose(self, command: bytes) -> Future[int]:
        """See `Consensus.propose`."""


class _Node:
    """The reports of one node."""

    def __init__(self, boot: bytes) -> None:
        self.boot = boot
        self.sequence = -1
        self.joins = 0
        """The tracker has everything that was durable there when this number of disks had joined."""
        self.is_asked = False
        """Some of its reports are missing, until it sends a full one."""
        self.merged = pb.MergedReport()
        self.clock_ns = 0
        self.disk = DiskUse(0, 0)
        self.heard_ns = 0


class Leader:
    """One node's leadership in one term. `now_ns` is a monotonic clock, `clock_ns` a wall clock."""

    def __init__(
        self,
        state: SequencerState,
        members: int,
        proposer: ProposalPort,
        ask_again: Callable[[str], None],
        now_ns: Callable[[], int],
        send_fetch: Callable[[FetchRequest], None] = lambda _: None,
        on_divergence: Callable[[Divergence], None] = lambda _: None,
        wanted: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        """`on_divergence` gets nodes that must stop. `wanted` are the replicated settings of this node."""
        self.tracker = ReplicationTracker(members)
        self._state, self._proposer, self._ask_again, self._now_ns = state, proposer, ask_again, now_ns
        self._speculation = Speculation(state)
        self._divergences, self._on_divergence = DivergenceDetector(members), on_divergence
        self._closer = SessionCloser(state, self.tracker)
        self._restoration = DiskRestoration(state, self.tracker)
        self._fetch_planner, self._send_fetch = PeerFetchPlanner(state, self.tracker), send_fetch
        self._retention = RetentionPlanner(state, members, wanted, now_ns())
        self._lease_expiry = LeaseExpiry(state)
        self._idle, self._old = IdleSessions(state, now_ns()), OldSessions(state, now_ns())
        self._in_flight = 0
        self._is_adrift = False
        """A result was not as planned: nothing is planned until nothing is in flight."""
        self._nodes: dict[str, _Node] = {}
        self._proposed_ns: dict[Hashable, int] = {}
        """When each proposal may be repeated."""
        self._asks = False
        """An operator's request was applied and is not decided yet."""
        self._reported: set[int] = set()
        self._roll_again_ns = 0

    def on_report(self, name: str, report: pb.Report) -> None:
        """Handle a node's report. One with a `rt.FormatError` is ignored, and a full report requested."""
        node = self._nodes.get(name)
        if report.is_full:
            if node is not None:
                self.tracker.forget_node(name)
            node = self._nodes[name] = _Node(report.boot)
            self._fetch_planner.on_node(name, self._now_ns())
        elif node is None or node.boot != report.boot or report.sequence != node.sequence + 1:
            self._ask_again(name)
            return
        node.sequence = report.sequence
        node.clock_ns, node.heard_ns = report.clock_ns, self._now_ns()
        node.disk = DiskUse(report.disk_bytes, report.disk_free_bytes)
        if report.connected:
            self._idle.on_heard(report.connected, self._now_ns())
            self._closer.on_heard(report.connected)
        if report.merged.instruction != node.merged.instruction:
            for found in self._divergences.on_reported(name, report.merged.instruction, report.merged.chain):
                self._on_divergence(found)
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
            return  # Its record was deleted, and the node has not applied that yet.
        if session is None:
            self._nodes[name].is_asked = True
            self._ask_again(name)  # It was opened, and will be applied here soon.
            return
        self._idle.on_heard([one.session_id], self._now_ns())  # The bytes may come from a peer.
        self.tracker.on_marks(
            name, SegmentKey(one.session_id, one.run, one.roll), unpack_boundaries(one.marks)
        )
        self._fetch_planner.on_news(one.session_id, name, self._nodes[name].heard_ns)
        if one.HasField("announced"):
            self.tracker.on_announced(_end(one.announced))
        if one.HasField("final"):
            chain = one.final.chain if one.final.HasField("chain") else None
            self.tracker.on_final(name, _end(one.final), chain)
        found = self.tracker.disagreements.get(one.session_id)
        if found is not None and one.session_id not in self._reported:
            self._reported.add(one.session_id)
            logger.error(
                "session_stopped session=%s id=%d at=log.%d.%d offset=%d node=%s got=%s others=%s wanted=%s",
                *(session.name, session.id, found.key.run, found.key.roll, found.offset),
                *(found.node, found.got, ",".join(found.others), found.wanted),
            )

    def on_applied(self, command: Command, outcome: Outcome) -> None:
        """Handle a command that was applied here, whichever leader proposed it."""
        if isinstance(command, MergeInstruction | Roll) and isinstance(outcome, CommandRejected):
            self._is_adrift = True
        elif isinstance(command, MergeInstruction):
            for one in {one.session_id: one for one in command.ranges}.values():
                self.tracker.prune_before(one.session_id, one.run, one.roll, one.end)
        elif isinstance(command, FenceRun | CloseRun):
            self._proposed_ns.pop((command.session_id, command.run, type(command)), None)
        elif isinstance(command, TrimSegments | Configure):
            self._proposed_ns.pop((type(command),), None)
        elif isinstance(command, ExpireLeases):
            self._proposed_ns.pop((ExpireLeases,), None)
        elif isinstance(command, DecideRequest):
            self._proposed_ns.pop((DecideRequest, command.id), None)
        if isinstance(outcome, RangesMerged):
            self._divergences.on_plan(outcome.order)
        elif isinstance(outcome, RequestWaits):
            self._asks = True
        elif isinstance(outcome, DiskJoined):
            self._forget_disk(outcome.node)
        elif isinstance(outcome, Forgotten):
            self._forget(outcome.session_ids)
        self._speculation.on_applied(outcome)
        self._closer.on_applied(outcome)
        self._idle.on_applied(outcome, self._now_ns())
        self._old.on_applied(outcome)
        self._retention.on_applied(outcome, self._now_ns())

    def _forget(self, session_ids: Iterable[int]) -> None:
        """Drop sessions whose records were deleted."""
        self._proposed_ns.pop((Forget,), None)
        for session_id in session_ids:
            self.tracker.forget_session(session_id)
            self._fetch_planner.forget_session(session_id)
            self._reported.discard(session_id)

    def _forget_disk(self, name: str) -> None:
        """Drop the reports of a node's previous disk, and request a full report of the new one."""
        self.tracker.forget_node(name)
        node = self._nodes.get(name)
        if node is not None:
            node.joins, node.is_asked = 0, True
            self._ask_again(name)

    @property
    def has_plans(self) -> bool:
        """Whether `plan` may find something to propose, now or once nothing is in flight."""
        self._take_news()
        return bool(self._speculation.pending or self._closer.due or self._is_adrift or self._asks)

    @property
    def may_plan(self) -> bool:
        """Whether `plan` may find something to propose now."""
        if not self.has_plans:
            return False
        return self._may_merge() or bool(self._closer.due) or (self._is_adrift and not self._in_flight)

    def plan(self) -> None:
        """Propose everything that can be proposed now."""
        self._take_news()
        self._plan_ends()
        self._plan_decisions()
        if self._is_adrift and not self._in_flight:
            self._is_adrift = False
            self._speculation.reset()
        if self._is_adrift or not self._may_merge() or self._is_far_ahead():
            return
        if not self._in_flight:
            self._speculation.reconcile()
        while self._may_merge():
            merge = plan_merge(self._speculation, self.tracker, self._clock_ns())
            if merge is None or not self._propose(merge):
                return
            size = sum(one.end - one.start for one in merge.ranges)
            self.tracker.fresh_bytes = max(0, self.tracker.fresh_bytes - size)

    def tick(self) -> None:
        """Propose what depends on time, then `plan`. Called periodically."""
        self._plan_roll()
        self._plan_retention()
        self._plan_leases()
        self._plan_sessions()
        joins = {name: node.joins for name, node in self._nodes.items()}
        merged = {name: node.merged.instruction for name, node in self._nodes.items()}
        for restore in self._restoration.plan(joins, merged, self._speculation.instruction):
            self._propose_at_times(restore, (restore.disk,))
        for close in self._closer.plan_lost(joins):
            self._propose_at_times(close, (close.session_id, close.run, CloseRun))
        now_ns = self._now_ns()
        heard = [name for name, node in self._nodes.items() if now_ns - node.heard_ns < 2 * FRESH_NS]
        for request in self._fetch_planner.plan(heard, now_ns):
            self._send_fetch(request)
        self.plan()

    def _take_news(self) -> None:
        if self.tracker.news:
            news = self.tracker.take_news()
            self._speculation.pending |= news
            self._closer.on_news(news)

    def _may_merge(self) -> bool:
        """Whether to plan an instruction: at once if none is in flight, otherwise only if it is large."""
        if not self._speculation.pending:
            return False
        if not self._in_flight:
            return True
        return self._in_flight < IN_FLIGHT_MAX and self.tracker.fresh_bytes >= LARGE_BYTES

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
        for command in self._closer.plan():
            self._propose_at_times(command, (command.session_id, command.run, type(command)))

    def _plan_decisions(self) -> None:
        """Propose decisions about operators' requests, which execute them or let them expire."""
        self._asks = False
        if not self._state.asked:
            return
        now_ns = reached_ns([heard.clock_ns for heard in self._heard()], self.tracker.members)
        if now_ns is None:
            return  # Without reports of a majority the time is unknown.
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
        """Propose a command that may have been lost, unless it was proposed a short time ago."""
        now_ns = self._now_ns()
        if now_ns >= self._proposed_ns.get(key, 0):
            self._proposed_ns[key] = now_ns + FRESH_NS
            logger.info(
                "proposal_submitted %s",
                command.brief if isinstance(command, ExpireLeases | Forget) else command,
            )
            self._propose(command)

    def _plan_roll(self) -> None:
        """Seal an old merged segment, so that its data can expire."""
        merged, minutes = self._state.merged, self._state.configuration.roll_minutes
        if not minutes or merged.segment is None or merged.offset <= SEGMENT_HEADER_BYTES or self._is_adrift:
            return
        now_ns, clock_ns = self._now_ns(), self._clock_ns()
        if clock_ns - merged.created_ns >= minutes * MINUTE_NS and now_ns >= self._roll_again_ns:
            self._roll_again_ns = now_ns + FRESH_NS
            if not self._in_flight:
                self._speculation.reconcile()
            self._propose(plan_roll(self._speculation, merged.segment, clock_ns))

    def _plan_retention(self) -> None:
        configure = self._retention.configure()
        if configure is not None:
            self._propose_at_times(configure, (Configure,))
            return  # The configuration decides what is trimmed.
        trim = self._retention.plan(self._heard(), self._now_ns())
        if trim is not None:
            self._propose_at_times(trim, (TrimSegments,))

    def _plan_leases(self) -> None:
        over = self._lease_expiry.due(self._now_ns())
        if over is not None:
            self._propose_at_times(over, (ExpireLeases,))

    def _plan_sessions(self) -> None:
        """Close sessions without a publisher, and delete the records of sessions closed long ago."""
        idle = self._idle.plan(self._now_ns())
        if idle:
            logger.info("closes_idle_sessions count=%d first=%d", len(idle), idle[0])
            self._closer.give_up(idle)
        merged = [node.merged.instruction for node in self._nodes.values()]
        forget = self._old.plan(merged, self.tracker.majority, self._now_ns())
        if forget is not None:
            self._propose_at_times(forget, (Forget,))

    def _heard(self) -> list[NodeUsage]:
        """The latest reports of nodes; each clock is advanced by the time since it was read."""
        now_ns = self._now_ns()
        ages = ((node, now_ns - node.heard_ns) for node in self._nodes.values())
        return [NodeUsage(node.clock_ns + age_ns, node.disk) for node, age_ns in ages if age_ns < FRESH_NS]

    def _clock_ns(self) -> int:
        """The median of the nodes' clocks."""
        clocks = [heard.clock_ns for heard in self._heard()]
        return median_low(clocks) if clocks else 0

    def _is_far_ahead(self) -> bool:
        """Whether the merging of a majority lags so far that no more may be planned."""
        total, last = self._state.merged.total_bytes, self._state.instruction
        near = sum(
            total - node.merged.bytes < BACKLOG_BYTES_MAX and last - node.merged.instruction < BACKLOG_MAX
            for node in self._nodes.values()
        )
        return near < self.tracker.majority


def _end(message: pb.SessionEnd) -> SessionEnd:
    return SessionEnd(message.session_id, message.run, message.roll, message.offset, message.number)
