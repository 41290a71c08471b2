"""What nodes tell each other beside consensus: reports, how they stand, and what a leader wants of one.

The consensus thread alone uses it. Laws. Only whoever leads, as far as this node knows, has it do something;
anybody may report, or say how it stands. A leader tells its own node by the same calls, without the network.
Whatever is told may be lost, and is told again by whom it matters to.
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
    """Node `name` and its `peers`. `send` is false if a peer is not connected; `call_soon` is consensus's."""

    def __init__(
        self,
        name: str,
        peers: Sequence[str],
        send: Callable[[str, bytes], bool],
        call_soon: Callable[[Callable[[], None]], None],
        *,
        on_report: Callable[[str, pb.Report], None],
        on_again: Callable[[], None],
        on_fetch: Callable[[pb.Fetch], None],
        on_summary: Callable[[str, pb.Summary], None],
        on_diverged: Callable[[Diverged], None],
    ) -> None:
        """`on_again`: the leader wants a full report. `on_diverged`: this node must end."""
        self._name, self._peers, self._send, self._call_soon = name, peers, send, call_soon
        self._on_report, self._on_again, self._on_fetch = on_report, on_again, on_fetch
        self._on_summary, self._on_diverged = on_summary, on_diverged
        self.leader: str | None = None
        """Who leads, as far as this node knows."""

    # To the leader, and to all

    def report(self, report: pb.Report) -> bool:
        """Tell the leader, of which there must be one; false if it cannot be reached."""
        assert self.leader is not None, "a report to nobody"
        if self.leader != self._name:
            return self._tell(self.leader, pb.Told(report=report))
        self._on_report(self._name, report)
        return True

    def summary(self, summary: pb.Summary) -> None:
        """Tell every node, this one too."""
        self._on_summary(self._name, summary)
        for peer in self._peers:
            self._tell(peer, pb.Told(summary=summary))

    # From a leader that is here

    def ask_again(self, node: str) -> None:
        """Something of its reports is lacking: it must say all."""
        if node == self._name:
            self._call_soon(self._on_again)  # The leader is in the midst of a report.
        else:
            self._tell(node, pb.Told(again=pb.ReportAgain()))

    def lack(self, lack: FetchRequest) -> None:
        """It lacks what another node has, and nobody sends it."""
        fetch = pb.Fetch(
            session_id=lack.session_id, x=lack.x, y=lack.y, offset=lack.offset, holder=lack.holder
        )
        if lack.node == self._name:
            self._on_fetch(fetch)
        else:
            self._tell(lack.node, pb.Told(fetch=fetch))

    def difference(self, found: Divergence) -> None:
        """It merged something else than the others, and must end."""
        logger.critical(
            "merged_logs_differ node=%s instruction=%d got=%#010x wanted=%#010x",
            *(found.node or "this one", found.instruction, found.got, found.wanted),
        )
        differs = pb.Differs(instruction=found.instruction, got=found.got, wanted=found.wanted)
        if found.node is None or found.node == self._name:
            self._on_diverged(_diverged(differs))
        else:
            self._tell(found.node, pb.Told(differs=differs))

    # From the others

    def on_told(self, peer: str, content: bytes) -> None:
        """A peer told this node something."""
        try:
            told = pb.Told.FromString(content)
        except DecodeError:
            logger.error("message_rejected peer=%s bytes=%d", peer, len(content))
            return
        kind = told.WhichOneof("kind")
        if kind == "report":
            self._on_report(peer, told.report)
        elif kind == "summary":
            self._on_summary(peer, told.summary)
        elif peer == self.leader:
            self._obey(told)

    def _obey(self, told: pb.Told) -> None:
        match told.WhichOneof("kind"):
            case "again":
                self._on_again()
            case "differs":
                self._on_diverged(_diverged(told.differs))
            case "fetch":
                self._on_fetch(told.fetch)

    def _tell(self, peer: str, told: pb.Told) -> bool:
        return self._send(peer, told.SerializeToString())


def _diverged(differs: pb.Differs) -> Diverged:
    return Diverged(
        "this node merged something else than a majority of the nodes",
        where=f"instruction {differs.instruction}",
        got=f"chain {differs.got:#010x}",
        expected=f"chain {differs.wanted:#010x}",
        hint="Keep the files for analysis, then empty the node's directory: it copies it from peers.",
    )
