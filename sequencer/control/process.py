"""The control process: Raft with the sequencer's state machine, the leader's plans, the link to data.

Everything but the link's own loop happens on the consensus thread, so nothing here has locks.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from typing import Final

from google.protobuf.message import DecodeError

from rt.errors import Diverged, FormatError, Overloaded
from rt.net.tls import TLS
from rt.v1 import sequencer_pb2 as pb
from sequencer.apply import Merged, Outcome
from sequencer.commands import Command, Join, encode_command
from sequencer.comparing import Difference
from sequencer.config import NodeConfig
from sequencer.control.holdings import Holdings
from sequencer.control.leading import Leader
from sequencer.control.link import Link
from sequencer.control.machine import Machine
from sequencer.raft.config import RaftConfig
from sequencer.raft.consensus import Leadership
from sequencer.raft.raft import Raft, end_process
from sequencer.state_encoding import encode_state
from sequencer.supplying import Lack

TICK_NS: Final = 50 * 10**6
REPORT_NS: Final = 200 * 10**6
"""So soon behind a report with news another one follows at the latest: the leader finds out what was lost."""
IDLE_REPORT_NS: Final = 10**9
"""And so soon behind one without: the leader needs the clock."""
SUMMARY_NS: Final = 500 * 10**6
HAND_OVER_S: Final = 1.0
"""So long the end waits for another leader."""
JOIN_AGAIN_NS: Final = 10**9
"""A disk whose joining was not seen applied after so long joins again: it may have been lost."""

logger = logging.getLogger("sequencer")


class Control:
    """One node's control process. `run` returns after `stop`."""

    def __init__(
        self, config: NodeConfig, *, on_failure: Callable[[BaseException], None] = end_process
    ) -> None:
        self._config, self._on_failure = config, on_failure
        self._holdings = Holdings(b"")
        self._leader: Leader | None = None
        self._leadership = Leadership(None, 0, False)
        self._summaries: dict[str, pb.Summary] = {}
        self._is_attached = False
        self._is_plan_due = False
        self._disk = b""
        """The data process's, once it has said so."""
        self._report_due_ns = self._summary_due_ns = self._join_due_ns = self._tick_due_ns = 0
        self._raft: Raft | None = None
        self._is_made = threading.Event()
        self._machine = Machine(self._on_applied, self._on_restored)
        self._link = Link(config.control_socket, self._on_data, self._on_tick, TICK_NS / 1e9)
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
            on_told=self._on_told,
            on_failure=on_failure,
        )
        self._is_made.set()

    def run(self) -> None:
        """Serve until `stop`; then have another node lead, so that the others need not find out."""
        assert self._raft is not None
        try:
            self._link.run()
            self._raft.hand_over(HAND_OVER_S)
        finally:
            self._raft.stop()

    def stop(self) -> None:
        """End it; a signal handler may call this."""
        self._link.stop()

    # From the link's thread

    def _on_data(self, content: bytes) -> None:
        assert self._raft is not None
        self._raft.call_soon(lambda: self._on_data_message(content))

    def _on_tick(self) -> None:
        assert self._raft is not None
        now_ns = time.monotonic_ns()
        if now_ns >= self._tick_due_ns:  # Else the consensus thread need not be woken.
            self._tick_due_ns = now_ns + TICK_NS
            self._raft.call_soon(self._tick)

    # On the consensus thread, as all below

    def _on_data_message(self, content: bytes) -> None:
        try:
            message = pb.ToControl.FromString(content)
        except DecodeError:
            logger.error("refused_message_of_data bytes=%d", len(content))
            return
        match message.WhichOneof("kind"):
            case "hello":
                self._on_hello(message.hello)
            case "propose":
                assert self._raft is not None
                with contextlib.suppress(Overloaded):  # It asks again.
                    self._raft.propose(message.propose)
            case "report":
                self._on_data_report(message.report)

    def _on_hello(self, hello: pb.DataHello) -> None:
        self._holdings = Holdings(hello.boot)
        self._disk = hello.disk
        self._machine.forget_orders(hello.instruction)
        self._is_attached = True
        self._send_snapshot()
        self._send_standing()

    def _on_data_report(self, report: pb.DataReport) -> None:
        try:
            self._holdings.take(report)
        except FormatError as error:
            logger.error("refused_report_of_data error=%r", str(error))
            return
        if report.HasField("merged"):
            self._machine.forget_orders(report.merged.instruction)
        if self._holdings.has_news:  # The rest goes with what does, or in a while.
            self._report()

    def _on_applied(self, index: int, content: bytes, command: Command, outcome: Outcome) -> None:
        if isinstance(outcome, Merged):
            for end in outcome.order.consumed:
                self._holdings.forget_below(end)
        if self._is_attached:
            self._link.send(pb.ToData(applied=pb.Applied(index=index, command=content)).SerializeToString())
        if isinstance(command, Join) and command.node == self._config.name:
            self._send_standing()
        if self._leader is not None:
            self._leader.on_applied(command, outcome)
            if self._leader.has_plans:
                self._plan_soon()

    def _on_restored(self) -> None:
        self._leader = None
        if self._is_attached:
            self._send_snapshot()

    def _on_leadership(self, leadership: Leadership) -> None:
        self._is_made.wait()  # The consensus thread may be quicker than the one that makes this object.
        if leadership.is_here and (self._leader is None or leadership.term != self._leadership.term):
            self._leader = self._new_leader()
        elif not leadership.is_here:
            self._leader = None
        is_new = leadership[:2] != self._leadership[:2] or leadership.is_here != self._leadership.is_here
        self._leadership = leadership
        if is_new and leadership.leader is not None:
            self._holdings.begin()
            self._report()
        self._send_standing()

    def _new_leader(self) -> Leader:
        raft = self._raft
        assert raft is not None, "leadership before the node is made"
        members = len(self._config.members)
        return Leader(
            self._machine.state,
            members,
            raft,
            self._ask_again,
            time.monotonic_ns,
            self._tell_lack,
            self._on_difference,
        )

    def _on_told(self, peer: str, content: bytes) -> None:
        try:
            told = pb.Told.FromString(content)
        except DecodeError:
            logger.error("refused_message peer=%s bytes=%d", peer, len(content))
            return
        match told.WhichOneof("kind"):
            case "report":
                if self._leader is not None:
                    self._take_report(peer, told.report)
            case "again":
                if peer == self._leadership.leader:
                    self._holdings.begin()
                    self._report()
            case "differs":
                if peer == self._leadership.leader:
                    self._on_failure(_diverged(told.differs))
            case "summary":
                self._summaries[peer] = told.summary
            case "fetch":
                if peer == self._leadership.leader:
                    self._link.send(pb.ToData(fetch=told.fetch).SerializeToString())

    def _on_difference(self, found: Difference) -> None:
        logger.critical(
            "merged_logs_differ node=%s instruction=%d got=%#010x wanted=%#010x",
            *(found.node or "this one", found.instruction, found.got, found.wanted),
        )
        differs = pb.Differs(instruction=found.instruction, got=found.got, wanted=found.wanted)
        if found.node in {None, self._config.name}:
            self._on_failure(_diverged(differs))
        else:
            assert found.node is not None
            self._tell(found.node, pb.Told(differs=differs))

    def _ask_again(self, node: str) -> None:
        if node == self._config.name:
            assert self._raft is not None
            self._raft.call_soon(self._begin_reports)
        else:
            self._tell(node, pb.Told(again=pb.ReportAgain()))

    def _tell_lack(self, lack: Lack) -> None:
        fetch = pb.Fetch(
            session_id=lack.session_id, x=lack.x, y=lack.y, offset=lack.offset, holder=lack.holder
        )
        if lack.node == self._config.name:
            self._link.send(pb.ToData(fetch=fetch).SerializeToString())
        else:
            self._tell(lack.node, pb.Told(fetch=fetch))

    def _begin_reports(self) -> None:
        self._holdings.begin()
        self._report()

    def _report(self) -> None:
        """Tell the leader what it does not know yet."""
        self._report_due_ns = time.monotonic_ns() + (REPORT_NS if self._holdings.has_news else IDLE_REPORT_NS)
        self._tick_due_ns = min(self._tick_due_ns, self._report_due_ns)
        leader = self._leadership.leader
        if leader is None or not self._holdings.boot:
            return
        while True:
            report = self._holdings.report(time.time_ns())
            if leader != self._config.name:
                if not self._tell(leader, pb.Told(report=report)):
                    self._holdings.begin()
                    return
            elif self._leader is not None:
                self._take_report(leader, report)
            if not self._holdings.has_news:
                return

    def _take_report(self, node: str, report: pb.Report) -> None:
        assert self._leader is not None
        self._leader.on_report(node, report)
        if self._leader.may_plan:
            self._leader.plan()

    def _plan_soon(self) -> None:
        if not self._is_plan_due:
            self._is_plan_due = True
            assert self._raft is not None
            self._raft.call_soon(self._plan)

    def _plan(self) -> None:
        self._is_plan_due = False
        if self._leader is not None:
            self._leader.plan()

    def _tick(self) -> None:
        now_ns = time.monotonic_ns()
        if now_ns >= self._report_due_ns:
            self._report()
        if now_ns >= self._summary_due_ns:
            self._summary_due_ns = now_ns + SUMMARY_NS
            summary = self._summary()
            self._summaries[self._config.name] = summary
            for peer in self._config.peers:
                self._tell(peer, pb.Told(summary=summary))
            self._send_standing()
        if self._leader is not None:
            self._leader.tick()
        self._tick_due_ns = min(self._report_due_ns, self._summary_due_ns)
        if self._disk and not self._has_joined:
            self._join(now_ns)
            self._tick_due_ns = now_ns + TICK_NS

    @property
    def _has_joined(self) -> bool:
        """Whether this node's disk of session copies is the one that counts."""
        disk = self._machine.state.disks.get(self._config.name)
        return disk is not None and disk.id == self._disk

    def _join(self, now_ns: int) -> None:
        """Have the disk count. Nothing is stored on it before, for it might be forgotten with the disk."""
        assert self._raft is not None
        if now_ns >= self._join_due_ns and self._raft.is_caught_up and self._leadership.leader is not None:
            self._join_due_ns = now_ns + JOIN_AGAIN_NS
            with contextlib.suppress(Overloaded):
                self._raft.propose(encode_command(Join(self._config.name, self._disk)))

    def _tell(self, peer: str, told: pb.Told) -> bool:
        assert self._raft is not None
        return self._raft.tell(peer, told.SerializeToString())

    def _summary(self) -> pb.Summary:
        standings = self._holdings.standings
        return pb.Summary(
            clock_ns=time.time_ns(),
            merged=standings.merged,
            disk_bytes=standings.disk_bytes,
            disk_free_bytes=standings.disk_free_bytes,
        )

    def _send_snapshot(self) -> None:
        machine = self._machine
        self._link.send(
            pb.ToData(
                snapshot=pb.ControlSnapshot(
                    index=machine.index,
                    state=encode_state(machine.state),
                    orders=[order.content for order in machine.tail],
                )
            ).SerializeToString()
        )

    def _send_standing(self) -> None:
        raft = self._raft
        if not self._is_attached or raft is None:
            return
        status = raft.status()
        standing = pb.Standing(
            node=self._config.name,
            leader=self._leadership.leader or "",
            term=status.term,
            role=status.role,
            epoch=status.epoch,
            is_caught_up=(
                self._has_joined and raft.is_caught_up and bool(status.cluster) and status.leader is not None
            ),
        )
        for member in status.members:
            one = standing.nodes.add(
                name=member.name,
                address=self._config.members[member.name].data,
                is_connected=member.is_connected,
                is_counted=bool(member.is_counted),
            )
            summary = self._summaries.get(member.name)
            if summary is not None:
                one.summary.CopyFrom(summary)
        self._link.send(pb.ToData(standing=standing).SerializeToString())


def _diverged(differs: pb.Differs) -> Diverged:
    return Diverged(
        "this node merged something else than a majority of the nodes",
        where=f"instruction {differs.instruction}",
        got=f"chain {differs.got:#010x}",
        wanted=f"chain {differs.wanted:#010x}",
        hint="The files are kept for a look. Empty the node's directory to have it built anew.",
    )
