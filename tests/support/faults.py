"""A trial with its own publishers, on a cluster in which a test causes faults."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from chaos.wired_nodes import WiredNodes
from senders import Sender
from verdict import Trial

import rt

WAIT_S = 180.0


class Faults(Trial):
    """A trial that starts its own senders."""

    def __init__(self, nodes: WiredNodes, root: Path) -> None:
        super().__init__(nodes)
        self.nodes: WiredNodes = nodes
        self._root = root

    def sender(self, session: str, *, host: str = "") -> Sender:
        """Start a publisher. It uses the directory of `host`, by default that of the session."""
        tls = self.nodes.certificate("publisher", session)
        sender = Sender(self._root / (host or session), session, self.nodes.endpoints, tls)
        self.senders.append(sender)
        return sender

    @property
    def restored(self) -> int:
        """How often a node has submitted `RestoreDisk` because its disk is whole again."""
        logs = [(self.nodes.root / f"{name}.log").read_text() for name in self.nodes.names]
        return sum(log.count("proposal_submitted RestoreDisk(") for log in logs)

    def wait_flow(self, *senders: Sender) -> None:
        """Wait until each sender has new messages merged, beyond those flushed before this call."""
        before = [sender.notes.flushed for sender in senders]
        self.wait(
            lambda: all(
                sender.notes.merged > max(flushed, sender.notes.first)
                for sender, flushed in zip(senders, before, strict=True)
            ),
            "what is published to be merged",
        )

    def wait(self, is_met: Callable[[], object], what: str, *, poll_s: float = 0.02) -> None:
        """Wait until the condition holds. No node may end meanwhile."""
        try:
            self.nodes.wait(is_met, what, timeout_s=WAIT_S, poll_s=poll_s)
        except rt.Timeout as error:
            words = [f"{sender.session}: {sender.notes} {sender.last_words()}" for sender in self.senders]
            raise AssertionError("\n".join([str(error), *words])) from error
