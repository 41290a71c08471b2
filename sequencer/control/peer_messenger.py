"""Messages between nodes beside consensus: reports, summaries, and requests of the leader.

Used by the consensus thread only. Invariants:
- A node carries out requests only from the node that it knows as the leader. It accepts reports and summaries
  from every node.
- The leader uses the same calls for its own node. They do not use the network.
- A message may be lost. The sender repeats it if it matters.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from google.protobuf.message import DecodeError

from rt.errors import Diverged
from rt.v1 import sequencer_pb2 as pb
from sequencer.leader.divergence_check import Divergence
from sequencer.leader.peer_fetch_planner import FetchRequest

logger = logging.getLogger("sequencer")


class PeerMessenger:
    """`send` returns False if a peer is not connected."""

    def __init__(
        self,
        name: str,
        peers: Sequence[str],
        send: Callable[[str, bytes], bool],
        call_soon: Callable[[Callable[[], None]], None],
        *,
        on_report: Callable[[str, pb.Report], None],
        on_full_report_requested: Callable[[], None],
        on_fetch: Callable[[pb.Fetch], None],
        on_summary: Callable[[str, pb.Summary], None],
        on_diverged: Callable[[Diverged], None],
    ) -> None:
        """`on_full_report_requested`: the leader needs a full report. `on_diverged`: this node must stop."""
        self._name, self._send, self._call_soon = name, send, call_soon
        self.peers = peers
        """The other members, learners too."""
        self._on_report, self._on_full_report_requested = on_report, on_full_report_requested
        self._on_fetch, self._on_summary, self._on_diverged = on_fetch, on_summary, on_diverged
        self.leader: str | None = None
        """The leader as this node knows it."""

    # Messages to the leader, and to all nodes

    def send_report(self, report: pb.Report) -> bool:
        """Send to the leader; one must be known. False if it is not connected."""
        assert self.leader is not None, "no leader is known"
        if self.leader != self._name:
            return self._send_message(self.leader, pb.Told(report=report))
        self._on_report(self._name, report)
        return True

    def send_summary(self, summary: pb.Summary) -> None:
        """Send to every node, also to this one."""
        self._on_summary(self._name, summary)
        for peer in self.peers:
            self._send_message(peer, pb.Told(summary=summary))

    # Messages of the leader, if this node leads

    def request_full_report(self, node: str) -> None:
        """Request a full report, because the node's reports are incomplete for the leader."""
        if node == self._name:
            self._call_soon(self._on_full_report_requested)  # The leader is handling a report now.
        else:
            self._send_message(node, pb.Told(again=pb.ReportAgain()))

    def request_fetch(self, request: FetchRequest) -> None:
        """Request that a node fetches bytes that another node holds."""
        fetch = pb.Fetch(
            session_id=request.session_id,
            run=request.run,
            roll=request.roll,
            offset=request.offset,
            holder=request.holder,
        )
        if request.node == self._name:
            self._on_fetch(fetch)
        else:
            self._send_message(request.node, pb.Told(fetch=fetch))

    def report_divergence(self, found: Divergence) -> None:
        """Report that a node merged something else than the other nodes. That node must stop."""
        logger.critical(
            "merged_logs_differ node=%s instruction=%d got=%#010x expected=%#010x",
            *(found.node or "this one", found.instruction, found.got, found.wanted),
        )
        differs = pb.Differs(instruction=found.instruction, got=found.got, wanted=found.wanted)
        if found.node is None or found.node == self._name:
            self._on_diverged(_diverged(differs))
        else:
            self._send_message(found.node, pb.Told(differs=differs))

    # Messages from other nodes

    def on_message(self, peer: str, content: bytes) -> None:
        try:
            message = pb.Told.FromString(content)
        except DecodeError:
            logger.error("message_rejected peer=%s bytes=%d", peer, len(content))
            return
        kind = message.WhichOneof("kind")
        if kind == "report":
            self._on_report(peer, message.report)
        elif kind == "summary":
            self._on_summary(peer, message.summary)
        elif peer == self.leader:
            self._on_leader_message(message)

    def _on_leader_message(self, message: pb.Told) -> None:
        match message.WhichOneof("kind"):
            case "again":
                self._on_full_report_requested()
            case "differs":
                self._on_diverged(_diverged(message.differs))
            case "fetch":
                self._on_fetch(message.fetch)

    def _send_message(self, peer: str, message: pb.Told) -> bool:
        return self._send(peer, message.SerializeToString())


def _diverged(differs: pb.Differs) -> Diverged:
    return Diverged(
        "this node merged something else than a majority of the nodes",
        where=f"instruction {differs.instruction}",
        got=f"chain {differs.got:#010x}",
        expected=f"chain {differs.wanted:#010x}",
        hint="Keep the files for analysis. If only this node says this, empty its directory: it copies it "
        "from its peers. If more than one node says this, empty none.",
    )
