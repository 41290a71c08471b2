"""Checks that this node applied the same entries as its leaders. Pure.

Invariants:
- A node does not follow a leader whose state differs. If the leader is wrong, the others elect another one.
- A node that agrees with no leader for `patience_s` stops.
"""

from __future__ import annotations

from typing import NamedTuple

from msgspec import Struct

from rt.errors import Diverged
from sequencer.raft.model.cluster_state import ClusterState
from sequencer.raft.model.messages import AppendEntries


class _PeerReport(NamedTuple):
    leader: str
    applied: int
    chain: int


class DivergenceGuard(Struct):
    """Compares running checksums at equal applied indices."""

    patience_s: float
    awaited: _PeerReport | None = None
    """The report that is compared when this node reaches the report's applied index."""
    refused: _PeerReport | None = None
    """The last report that differed from this node."""
    refused_at: float = 0.0

    def check(self, leader: str, message: AppendEntries, state: ClusterState, now: float) -> bool:
        """Whether to follow the leader. Raises `rt.Diverged` if no leader has agreed for `patience_s`."""
        word = _PeerReport(leader, message.applied, message.chain)
        if word.applied == state.applied.index:
            self._compare(word, state, now)
        elif word.applied > state.applied.index and self.awaited is None:
            self.awaited = word
        if self.refused is None or self.refused.leader != leader:
            return True
        if now - self.refused_at <= self.patience_s:
            return False
        raise Diverged(
            "this node's applied state differs from its leaders' state",
            where=f"Raft index {self.refused.applied}",
            got=f"checksum {state.chain:08x} at {state.applied.index}",
            expected=f"{self.refused.chain:08x} at {self.refused.applied}, reported by {leader}",
            hint="Keep a copy of this node's directory for analysis. If only this node says this, empty it: "
            "the node rejoins. If more than one node says this, empty none.",
        )

    def on_applied(self, state: ClusterState, now: float) -> None:
        word = self.awaited
        if word is not None and word.applied <= state.applied.index:
            self.awaited = None
            if word.applied == state.applied.index:
                self._compare(word, state, now)

    def _compare(self, word: _PeerReport, state: ClusterState, now: float) -> None:
        if not word.applied or word.chain == state.chain:
            self.refused = None
            return
        if self.refused is None:
            self.refused_at = now
        self.refused = word
