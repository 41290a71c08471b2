"""The control process: Raft with the sequencer's state machine, the leader's plans, the socket.

Everything but the timer in `run` runs on the consensus thread, so nothing here has locks. This module only
dispatches events; the modules beside it handle them.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import threading
import time
from collections.abc import Callable
from typing import Final

from google.protobuf.message import DecodeError

from rt.cluster_epoch import forced_number
from rt.errors import FormatError, Overloaded
from rt.net.tls import TLS
from rt.v1 import sequencer_pb2 as pb
from sequencer.config.config import NodeConfig
from sequencer.config.startup_phase import DATA_HUNG, NodePhases, Phase
from sequencer.control.cluster_view import ClusterView, data_phase, raft_log_view, summarize
from sequencer.control.leader_loop import LeaderLoop
from sequencer.control.member_changer import MemberChanger
from sequencer.control.peer_messenger import PeerMessenger
from sequencer.control.reporter import Reporter
from sequencer.control.state_machine import SequencerStateMachine
from sequencer.ipc.server import ControlServer
from sequencer.ipc.silence import HUNG_S, SilenceDetector
from sequencer.raft.model.api import Leadership
from sequencer.raft.model.config import RaftConfig
from sequencer.raft.model.epochs import EpochOver
from sequencer.raft.model.members import Members, RaftMember
from sequencer.raft.raft import Raft, end_process
from sequencer.state.apply_result import ClusterReset, Forgotten, Outcome, RangesMerged
from sequencer.state.command_codec import encode_command, reset_of
from sequencer.state.commands import Command, JoinDisk, ResetCluster
from sequencer.state.feature_level import MEMBER_CHANGES
from sequencer.state.state_codec import encode_state

TICK_NS: Final = 50 * 10**6
SUMMARY_NS: Final = 500 * 10**6
TRANSFER_S: Final = 1.0
"""How long a stopping leader waits for another leader."""
JOIN_AGAIN_NS: Final = 10**9
"""A disk's join that was not applied within this time is proposed again: it may have been lost."""

logger = logging.getLogger("sequencer")


class ControlProcess:
    """One node's control process. `run` returns after `stop`."""

    def __init__(
        self,
        config: NodeConfig,
        *,
        on_failure: Callable[[BaseException], None] = end_process,
        on_epoch_over: Callable[[EpochOver], None] = end_process,
        on_alive: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_alive` is called on the consensus thread every `SUMMARY_NS`. It must not block."""
        self._config, self._on_alive = config, on_alive
        self._address = config.members[config.name].data
        self._leadership = Leadership(None, 0, False)
        self._is_attached = False
        self._is_over = False
        """Whether the epoch has ended on this node. If so, the data process gets nothing more of this
        epoch.
        """
        self._disk = b""
        """The data process's disk id, once it has reported it."""
        self._data_silence = SilenceDetector()
        self._summary_due_ns = self._join_due_ns = self._tick_due_ns = 0
        self._phases = NodePhases()
        self._machine = SequencerStateMachine(self._on_applied, self._on_restored, config.raft_directory)
        self._cluster_view = ClusterView(
            config.name, {name: member.data for name, member in config.members.items()}
        )
        self._members: Members = {
            name: RaftMember(member.raft, votes=True) for name, member in config.members.items()
        }
        self._messenger = PeerMessenger(
            config.name,
            config.peers,
            self._send_to_peer,
            self._call_soon,
            on_report=self._on_report,
            on_full_report_requested=self._on_full_report_requested,
            on_fetch=self._on_fetch,
            on_summary=self._on_summary,
            on_diverged=on_failure,
        )
        self._reporter = Reporter(self._messenger, self._tick_by, lambda: self._has_joined)
        self._leader_loop = LeaderLoop(
            config.name,
            self._members,
            lambda: self._consensus.status().members_index,
            self._machine,
            self._messenger,
            self._call_soon,
            config.replicated,
            lambda now_ns: self._cluster_view.member_levels(self._members, now_ns),
        )
        self._member_changer = MemberChanger(self._leader_loop.settle_members)
        self._server = ControlServer(config.control_socket, self._on_data)
        self._stopping = os.eventfd(0, os.EFD_CLOEXEC)
        self._is_made = threading.Event()
        self._raft: Raft | None = None
        self._raft = Raft(
            RaftConfig(
                name=config.name,
                members={name: member.raft for name, member in config.members.items()},
                directory=config.raft_directory,
                stream=config.stream,
                bootstrap=config.bootstrap,
            ),
            self._machine,
            tls=TLS(config.ca, config.cert, config.key),
            listen=(config.listen, config.raft_port),
            on_leadership=self._on_leadership,
            on_app_message=self._messenger.on_message,
            on_members=self._on_members,
            on_failure=on_failure,
            on_epoch_over=on_epoch_over,
        )
        self._is_made.set()

    def run(self) -> None:
        """Serve until `stop`, then transfer leadership, so that the others need no election timeout."""
        try:
            self._call_soon(lambda: self._server.start(self._consensus.watch))
            while not select.select([self._stopping], [], [], TICK_NS / 1e9)[0]:
                self._on_time()
            self._call_soon(self._server.close)
            self._consensus.transfer_leadership(TRANSFER_S)
        finally:
            self._consensus.stop()
            self._server.close()

    def stop(self) -> None:
        """May be called by a signal handler."""
        os.eventfd_write(self._stopping, 1)

    @property
    def _consensus(self) -> Raft:
        assert self._raft is not None, "the constructor has not finished"
        return self._raft

    def _call_soon(self, call: Callable[[], None]) -> None:
        self._consensus.call_soon(call)

    def _send_to_peer(self, peer: str, content: bytes) -> bool:
        return self._consensus.send(peer, content)

    def _on_time(self) -> None:
        now_ns = time.monotonic_ns()
        if now_ns >= self._tick_due_ns:  # Otherwise do not wake the consensus thread.
            self._tick_due_ns = now_ns + TICK_NS
            self._call_soon(self._tick)

    # Everything below runs on the consensus thread. Messages from the data process

    def _on_data(self, content: bytes) -> None:
        """Handle the message when the round runs its calls, not while the network is polled."""
        self._call_soon(lambda: self._on_data_message(content))

    def _on_data_message(self, content: bytes) -> None:
        try:
            message = pb.ToControl.FromString(content)
        except DecodeError:
            logger.error("data_message_rejected bytes=%d", len(content))
            return
        self._data_silence.record_message()
        match message.WhichOneof("kind"):
            case "hello":
                self._on_hello(message.hello)
            case "propose":
                self._propose(message.propose)
            case "report":
                self._on_data_report(message.report)

    def _on_hello(self, hello: pb.DataHello) -> None:
        self._reporter.attach(hello.boot)
        self._disk = hello.disk
        self._machine.prune_plans(hello.instruction)
        self._is_attached = not self._is_over
        self._send_snapshot()
        self._send_cluster_view()

    def _on_data_report(self, report: pb.DataReport) -> None:
        try:
            self._reporter.handle_report(report)
        except FormatError as error:
            logger.error("data_report_rejected error=%r", str(error))
            return
        if report.HasField("merged"):
            self._machine.prune_plans(report.merged.instruction)
        self._reporter.report_news()

    def _propose(self, command: bytes) -> None:
        reset = reset_of(command)
        if reset is not None:
            self._reset(command, reset)
            return
        with contextlib.suppress(Overloaded):  # The data process repeats it.
            self._consensus.propose(command)

    def _reset(self, content: bytes, reset: ResetCluster) -> None:
        """Handle a reset request. One for another epoch than the next is late, and is ignored."""
        epoch = self._consensus.status().epoch
        if not reset.forced_by:
            if reset.epoch == epoch + 1:
                self._consensus.reset(content)
        elif reset.epoch == forced_number(epoch):
            # Do not send commands that are applied meanwhile: they count when the forced epoch is durable.
            was_attached, self._is_attached = self._is_attached, False
            why = self._why_not_forced(content, reset)
            if why:
                self._is_attached = was_attached
                self._send(pb.ToData(reset_refused=pb.ResetRefused(request=reset.request, why=why)))

    def _why_not_forced(self, content: bytes, reset: ResetCluster) -> str:
        """Force an epoch. Return why it was refused, or "" if it has started."""
        if reset.forced_by != self._config.name:
            return f"The request names {reset.forced_by}, not this node."
        if self._leadership.leader:
            return "There is a leader."
        return str(self._consensus.force(content) or "")

    # Events from consensus

    def _on_applied(self, index: int, content: bytes, command: Command, outcome: Outcome) -> None:
        if isinstance(outcome, RangesMerged):
            for end in outcome.plan.consumed:
                self._reporter.holdings.prune_before(end)
        elif isinstance(outcome, Forgotten):
            for session_id in outcome.session_ids:
                self._reporter.holdings.remove_session(session_id)
        if isinstance(outcome, ClusterReset):
            # Files are changed later, when the next epoch is durable: the snapshot of that epoch carries the
            # reset.
            self._send_cluster_view(is_resetting=True)
            self._is_over, self._is_attached = True, False
        if self._is_attached:
            self._send(pb.ToData(applied=pb.Applied(index=index, command=content)))
        if isinstance(command, JoinDisk) and command.node == self._config.name:
            self._send_cluster_view()
            self._reporter.report_all()
        self._leader_loop.on_applied(command, outcome)

    def _on_restored(self) -> None:
        self._leader_loop.on_restored()
        self._send_snapshot()

    def _on_leadership(self, leadership: Leadership) -> None:
        self._is_made.wait()  # The constructor may not have finished yet.
        self._leader_loop.on_leadership(leadership, self._consensus)
        is_new = leadership != self._leadership
        self._leadership, self._messenger.leader = leadership, leadership.leader
        if is_new and leadership.leader is not None:
            self._reporter.report_all()
        self._send_cluster_view()

    def _on_members(self, members: Members) -> None:
        """Handle a newly committed list of members, or the first list that is known. It may be called while
        Raft is opened.
        """
        self._members = members
        self._messenger.peers = sorted(members.keys() - {self._config.name})
        self._leader_loop.on_members(members)
        self._send_cluster_view()

    # Messages from nodes, including this one

    def _on_summary(self, node: str, summary: pb.Summary) -> None:
        self._cluster_view.on_summary(node, summary, time.monotonic_ns(), time.time_ns())
        self._leader_loop.on_merged(node, summary.merged.instruction)

    def _on_report(self, node: str, report: pb.Report) -> None:
        self._leader_loop.on_report(node, report)

    def _on_full_report_requested(self) -> None:
        self._reporter.report_all()

    def _on_fetch(self, fetch: pb.Fetch) -> None:
        self._send(pb.ToData(fetch=fetch))

    # Timers

    def _tick(self) -> None:
        now_ns = time.monotonic_ns()
        if now_ns >= self._reporter.due_ns:
            self._reporter.report()
        if now_ns >= self._summary_due_ns:
            self._summary_due_ns = now_ns + SUMMARY_NS
            self._on_alive()
            self._server.accept_again()
            silent_s = self._data_silence.update(now_ns / 1e9) if self._disk else 0.0
            phase = self._phase(now_ns)
            if silent_s >= HUNG_S:
                phase = Phase(DATA_HUNG)
            summary = summarize(
                self._reporter.holdings.data_status, time.time_ns(), phase, data_silent_s=silent_s
            )
            summary.address, summary.bootstraps = self._address, self._config.bootstrap
            summary.members_wait = self._member_changer.refused or self._leader_loop.waits_for
            self._messenger.send_summary(summary)
            self._send_cluster_view()
        step, request = self._leader_loop.tick(), self._machine.state.member_request
        self._tick_due_ns = min(self._reporter.due_ns, self._summary_due_ns)
        self._member_changer.carry_out(step, request.number if request else 0, self._consensus)
        if request is not None:
            self._tick_due_ns = now_ns + TICK_NS
        if self._disk and not self._has_joined and self._votes:
            self._join(now_ns)
            self._tick_due_ns = now_ns + TICK_NS

    def _phase(self, now_ns: int) -> Phase:
        log = raft_log_view(self._consensus.status(), is_caught_up=self._consensus.is_caught_up)
        return self._phases.update(log, data_phase(self._reporter.holdings.data_status), now_ns)

    def _tick_by(self, due_ns: int) -> None:
        self._tick_due_ns = min(self._tick_due_ns, due_ns)

    @property
    def _votes(self) -> bool:
        """Whether this node is a voter. A learner accepts no sessions, and is in no majority."""
        own = self._members.get(self._config.name)
        return own is not None and own.votes

    @property
    def _has_joined(self) -> bool:
        """Whether this node's disk of session replicas counts."""
        disk = self._machine.state.disks.get(self._config.name)
        return disk is not None and disk.id == self._disk

    def _join(self, now_ns: int) -> None:
        """Propose the join of this disk. Nothing may be stored on it before that: it would be forgotten."""
        is_led = self._consensus.is_caught_up and self._leadership.leader is not None
        if now_ns >= self._join_due_ns and is_led:
            self._join_due_ns = now_ns + JOIN_AGAIN_NS
            has_address = self._machine.state.feature_level >= MEMBER_CHANGES
            address = self._address if has_address else ""
            self._propose(encode_command(JoinDisk(self._config.name, self._disk, address)))

    # Messages to the data process

    def _send_snapshot(self) -> None:
        if self._is_attached:
            state, tail = encode_state(self._machine.state), self._machine.tail
            plans = [plan.content for plan in tail]
            epoch = self._consensus.status().epoch_id
            snapshot = pb.ControlSnapshot(index=self._machine.index, state=state, plans=plans, epoch_id=epoch)
            self._send(pb.ToData(snapshot=snapshot))

    def _send_cluster_view(self, *, is_resetting: bool = False) -> None:
        if self._is_attached:
            accepts_sessions = self._has_joined and self._consensus.is_caught_up
            standing = self._cluster_view.to_proto(
                self._consensus.status(),
                self._leadership,
                time.monotonic_ns(),
                members=self._members,
                accepts_sessions=accepts_sessions,
                joined={name: disk.address for name, disk in self._machine.state.disks.items()},
            )
            standing.is_resetting = is_resetting
            self._send(pb.ToData(standing=standing))

    def _send(self, message: pb.ToData) -> None:
        self._server.send(message.SerializeToString())
