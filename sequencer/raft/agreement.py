"""Whether what this node applied is what its leaders applied. Pure.

Law: a node that differs from a leader does not follow it. If the leader is the one that differs from all,
they choose another; if no leader agrees with a node for long, it is the node that differs, and it stops.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from rt.errors import Diverged
from sequencer.raft.messages import Append
from sequencer.raft.state import ClusterState


class _Word(NamedTuple):
    """What a leader says of itself."""

    leader: str
    applied: int
    chain: int


@dataclass(slots=True)
class Agreement:
    """Compares running checksums where both sides have applied equally much."""

    patience_s: float
    awaited: _Word | None = None
    """To be compared when this node has applied as much."""
    refused: _Word | None = None
    """What the present leader, or the one before, said and was not so here."""
    refused_at: float = 0.0

    def check(self, leader: str, message: Append, state: ClusterState, now: float) -> bool:
        """Whether to follow the leader; `rt.Diverged` when none has agreed for `patience_s`."""
        word = _Word(leader, message.applied, message.chain)
        if word.applied == state.applied.index:
            self._compare(word, state, now)
        elif word.applied > state.applied.index and self.awaited is None:
            self.awaited = word
        if self.refused is None or self.refused.leader != leader:
            return True
        if now - self.refused_at <= self.patience_s:
            return False
        raise Diverged(
            "what this node applied differs from what its leaders applied",
            where=f"Raft index {self.refused.applied}",
            got=f"checksum {state.chain:08x} at {state.applied.index}",
            wanted=f"{self.refused.chain:08x} at {self.refused.applied}, as {leader} says",
            hint="Keep this node's directory for a look; empty it to have the node join again.",
        )

    def on_applied(self, state: ClusterState, now: float) -> None:
        """An entry was applied."""
        word = self.awaited
        if word is not None and word.applied <= state.applied.index:
            self.awaited = None
            if word.applied == state.applied.index:
                self._compare(word, state, now)

    def _compare(self, word: _Word, state: ClusterState, now: float) -> None:
        if not word.applied or word.chain == state.chain:
            self.refused = None
            return
        if self.refused is None:
            self.refused_at = now
        self.refused = word
