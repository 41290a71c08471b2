"""The control process: Raft with the sequencer's state machine, the leader's plans, the link to data.

Everything but the link's own loop happens on the consensus thread, so nothing here has locks. Here is who
hears of what; what is done about it is in the modules beside this one.
"""

from __future__ import annotations

import contextlib
import logging
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
from sequencer.config.startup_phase import NodePhases, Phase
from sequencer.control.cluster_view import ClusterView, data_step, log_of, summary_of
from sequencer.control.leader_loop import LeaderLoop
from sequencer.control.peer_messenger import PeerMessenger
from sequencer.control.reporter import Reporter
from sequencer.control.state_machine import SequencerStateMachine
from sequencer.ipc.server import ControlServer
from sequencer.raft.model.api import Leadership
from sequencer.raft.model.config import RaftConfig
from sequencer.raft.model.epochs import EpochOver
from sequencer.raft.raft import Raft, end_process
from sequencer.state.apply_result import ClusterReset, Forgotten, Outcome, RangesMerged
from sequencer.state.command_codec import encode_command, reset_of
from sequencer.state.commands import Command, JoinDisk, ResetCluster
from sequencer.state.state_codec import encode_state

TICK_NS: Final = 50 * 10**6
SUMMARY_NS: Final = 500 * 10**6
HAND_OVER_S: Final = 1.0
"""So long the end waits for another leader."""
JOIN_AGAIN_NS: Final = 10**9
"""A disk whose joining was not seen applied after so long joins again: it may have been lost."""

logger = logging.getLogger("sequencer")


class ControlProcess:
    """One node's control process. `run` returns after `stop`."""

    def __init__(
        self,
        config: NodeConfig,
        *,
        on_failure: Callable[[BaseException], None] = end_process,
        on_epoch_over: Callable[[EpochOver], None] = end_process,
    ) -> None:
        self._config = config
        self._leadership = Leadership(None, 0, False)
        self._is_attached = False
        self._is_over = False
        """The epoch has ended here: the data process hears nothing more of it."""
        self._disk = b""
        """The data process's, once it has said so."""
        self._summary_due_ns = self._join_due_ns = self._tick_due_ns = 0
        self._steps = NodePhases()
        self._machine = SequencerStateMachine(self._on_applied, self._on_restored)
        self._nodes = ClusterView(config.name, {name: member.data for name, member in config.members.items()})
        self._telling = PeerMessenger(
            config.name,
            config.peers,
            self._tell,
            self._call_soon,
            on_report=self._on_report,
            on_again=self._on_again,
            on_fetch=self._on_fetch,
            on_summary=lambda node, said: self._nodes.on_summary(node, said, time.monotonic_ns()),
            on_diverged=on_failure,
        )
        self._reporting = Reporter(self._telling, self._tick_by, lambda: self._has_joined)
        self._planning = LeaderLoop(
            len(config.members), self._machine, self._telling, self._call_soon, config.replicated
        )
        self._link = ControlServer(config.control_socket, self._on_data, self._on_tick, TICK_NS / 1e9)
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
            on_told=self._telling.on_told,
            on_failure=on_failure,
            on_epoch_over=on_epoch_over,
        )
        self._is_made.set()

    def run(self) -> None:
        """Serve until `stop`; then have another node lead, so that the others need not find out."""
        try:
            self._link.run()
            self._consensus.hand_over(HAND_OVER_S)
        finally:
            self._consensus.stop()

    def stop(self) -> None:
        """End it; a signal handler may call this."""
        self._link.stop()

    @property
    def _consensus(self) -> Raft:
        assert self._raft is not None, "it is being made"
        return self._raft

    def _call_soon(self, call: Callable[[], None]) -> None:
        self._consensus.call_soon(call)

    def _tell(self, peer: str, content: bytes) -> bool:
        return self._consensus.tell(peer, content)

    # From the link's thread

    def _on_data(self, content: bytes) -> None:
        self._call_soon(lambda: self._on_data_message(content))

    def _on_tick(self) -> None:
        now_ns = time.monotonic_ns()
        if now_ns >= self._tick_due_ns:  # Else the consensus thread need not be woken.
            self._tick_due_ns = now_ns + TICK_NS
            self._call_soon(self._tick)

    # On the consensus thread, as all below: from the data process

    def _on_data_message(self, content: bytes) -> None:
        try:
            message = pb.ToControl.FromString(content)
        except DecodeError:
            logger.error("data_message_rejected bytes=%d", len(content))
            return
        match message.WhichOneof("kind"):
            case "hello":
                self._on_hello(message.hello)
            case "propose":
                self._propose(message.propose)
            case "report":
                self._on_data_report(message.report)

    def _on_hello(self, hello: pb.DataHello) -> None:
        self._reporting.attach(hello.boot)
        self._disk = hello.disk
        self._machine.forget_orders(hello.instruction)
        self._is_attached = not self._is_over
        self._send_snapshot()
        self._send_standing()

    def _on_data_report(self, report: pb.DataReport) -> None:
        try:
            self._reporting.take(report)
        except FormatError as error:
            logger.error("data_report_rejected error=%r", str(error))
            return
        if report.HasField("merged"):
            self._machine.forget_orders(report.merged.instruction)
        self._reporting.report_news()

    def _propose(self, command: bytes) -> None:
        reset = reset_of(command)
        if reset is not None:
            self._reset(command, reset)
            return
        with contextlib.suppress(Overloaded):  # Who proposes that asks again.
            self._consensus.propose(command)

    def _reset(self, content: bytes, reset: ResetCluster) -> None:
        """One for another epoch than follows this one is late: it was applied, or another came first."""
        epoch = self._consensus.status().epoch
        if not reset.forced_by:
            if reset.epoch == epoch + 1:
                self._consensus.reset(content)
        elif reset.epoch == forced_number(epoch):
            # What is applied on the way is not told: it counts once the forced epoch is durable.
            was_attached, self._is_attached = self._is_attached, False
            why = self._why_not_forced(content, reset)
            if why:
                self._is_attached = was_attached
                self._send(pb.ToData(reset_refused=pb.ResetRefused(request=reset.request, why=why)))

    def _why_not_forced(self, content: bytes, reset: ResetCluster) -> str:
        """Have consensus forced; why not, empty if it is under way."""
        if reset.forced_by != self._config.name:
            return f"It asks {reset.forced_by} to go on by itself."
        if self._leadership.leader:
            return "There is a leader."
        return str(self._consensus.force(content) or "")

    # From consensus

    def _on_applied(self, index: int, content: bytes, command: Command, outcome: Outcome) -> None:
        if isinstance(outcome, RangesMerged):
            for end in outcome.order.consumed:
                self._reporting.forget_below(end)
        elif isinstance(outcome, Forgotten):
            for session_id in outcome.session_ids:
                self._reporting.forget_session(session_id)
        if isinstance(outcome, ClusterReset):
            # What it does to files is done when the next epoch is durable: its snapshot tells of it.
            self._is_over, self._is_attached = True, False
        if self._is_attached:
            self._send(pb.ToData(applied=pb.Applied(index=index, command=content)))
        if isinstance(command, JoinDisk) and command.node == self._config.name:
            self._send_standing()
            self._reporting.begin()
        self._planning.on_applied(command, outcome)

    def _on_restored(self) -> None:
        self._planning.on_restored()
        self._send_snapshot()

    def _on_leadership(self, leadership: Leadership) -> None:
        self._is_made.wait()  # The consensus thread may be quicker than the one that makes this object.
        self._planning.on_leadership(leadership, self._consensus)
        is_new = leadership != self._leadership
        self._leadership, self._telling.leader = leadership, leadership.leader
        if is_new and leadership.leader is not None:
            self._reporting.begin()
        self._send_standing()

    # From nodes, this one too

    def _on_report(self, node: str, report: pb.Report) -> None:
        self._planning.on_report(node, report)

    def _on_again(self) -> None:
        self._reporting.begin()

    def _on_fetch(self, fetch: pb.Fetch) -> None:
        self._send(pb.ToData(fetch=fetch))

    # With time

    def _tick(self) -> None:
        now_ns = time.monotonic_ns()
        if now_ns >= self._reporting.due_ns:
            self._reporting.report()
        if now_ns >= self._summary_due_ns:
            self._summary_due_ns = now_ns + SUMMARY_NS
            self._telling.summary(summary_of(self._reporting.standings, time.time_ns(), self._step(now_ns)))
            self._send_standing()
        self._planning.tick()
        self._tick_due_ns = min(self._reporting.due_ns, self._summary_due_ns)
        if self._disk and not self._has_joined:
            self._join(now_ns)
            self._tick_due_ns = now_ns + TICK_NS

    def _step(self, now_ns: int) -> Phase:
        """Where this node is on its way to keeping up with the others."""
        log = log_of(self._consensus.status(), is_caught_up=self._consensus.is_caught_up)
        return self._steps.look(log, data_step(self._reporting.standings), now_ns)

    def _tick_by(self, due_ns: int) -> None:
        self._tick_due_ns = min(self._tick_due_ns, due_ns)

    @property
    def _has_joined(self) -> bool:
        """Whether this node's disk of session copies is the one that counts."""
        disk = self._machine.state.disks.get(self._config.name)
        return disk is not None and disk.id == self._disk

    def _join(self, now_ns: int) -> None:
        """Have the disk count. Nothing is stored on it before, for it might be forgotten with the disk."""
        is_led = self._consensus.is_caught_up and self._leadership.leader is not None
        if now_ns >= self._join_due_ns and is_led:
            self._join_due_ns = now_ns + JOIN_AGAIN_NS
            self._propose(encode_command(JoinDisk(self._config.name, self._disk)))

    # To the data process

    def _send_snapshot(self) -> None:
        if self._is_attached:
            state, tail = encode_state(self._machine.state), self._machine.tail
            orders = [order.content for order in tail]
            epoch = self._consensus.status().epoch_id
            snapshot = pb.ControlSnapshot(
                index=self._machine.index, state=state, orders=orders, epoch_id=epoch
            )
            self._send(pb.ToData(snapshot=snapshot))

    def _send_standing(self) -> None:
        if self._is_attached:
            may_take = self._has_joined and self._consensus.is_caught_up
            standing = self._nodes.standing(
                self._consensus.status(), self._leadership, time.monotonic_ns(), may_take=may_take
            )
            self._send(pb.ToData(standing=standing))

    def _send(self, message: pb.ToData) -> None:
        self._link.send(message.SerializeToString())
