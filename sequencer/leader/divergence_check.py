"""Compares the running checksums of merged bytes that nodes report, to find nodes that merged other bytes.

Pure. Invariant: a node counts as diverged only if a majority agrees without it. Each node computes its
checksum from the bytes that it wrote. The leader compares it with the committed checksum of the same
instruction. A checksum covers all bytes before. So after a checksum of a node has differed once, all later
ones differ, and it does not matter which instructions are compared.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from msgspec import Struct

from sequencer.state.write_plan import WritePlan

CHAINS_MAX: Final = 1 << 16
"""Instructions whose checksum is kept. Nodes that are further back are compared when they have caught up."""
NOT_KNOWN: Final = 0
"""The checksum that a node reports if it started in the middle of the log."""


class Divergence(Struct, frozen=True):
    """A node merged other bytes up to an instruction than the others."""

    node: str | None
    """None: the leader's own state differs."""
    instruction: int
    got: int
    wanted: int


class DivergenceDetector:
    """The running checksums that nodes reported to one leader."""

    def __init__(self, members: int) -> None:
        self._majority = members // 2 + 1
        self._chains: OrderedDict[int, int] = OrderedDict()
        self._found: dict[str, Divergence | None] = {}
        """By node: the result of its last report that could be compared; None if it agrees."""

    def on_plan(self, plan: WritePlan) -> None:
        self._chains[plan.instruction] = plan.chain
        if len(self._chains) > CHAINS_MAX:
            self._chains.popitem(last=False)

    def on_reported(self, node: str, instruction: int, chain: int) -> list[Divergence]:
        """Record that a node merged up to `instruction` with this checksum. Return the nodes that must
        stop.
        """
        wanted = self._chains.get(instruction)
        if wanted is None or chain == NOT_KNOWN:
            return []
        differs = Divergence(node, instruction, chain, wanted) if chain != wanted else None
        is_new = self._found.get(node, differs) != differs or node not in self._found
        self._found[node] = differs
        return self._verdict() if is_new else []

    def _verdict(self) -> list[Divergence]:
        differing = [one for one in self._found.values() if one is not None]
        if len(differing) >= self._majority:
            one = differing[0]
            return [Divergence(None, one.instruction, one.wanted, one.got)]
        if len(self._found) - len(differing) >= self._majority:
            return differing
        return []
