"""Which nodes merged something else than the others: the chains of merged bytes that nodes report, compared.

Pure. The law: a node is found to differ only where a majority agrees without it. Each node computes its chain
from what it wrote; the leader compares it with what it has agreed on itself for the same instruction. Chains
run over everything before, so one that differs once differs ever after, and it does not matter which
instructions are compared.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

from sequencer.state.write_plan import WritePlan

CHAINS_MAX: Final = 1 << 16
"""Instructions whose chain is kept; those of nodes further behind are compared when they have caught up."""
NOT_KNOWN: Final = 0
"""Reported as chain by a node that began in the middle."""


@dataclass(frozen=True, slots=True)
class Divergence:
    """What a node merged up to an instruction is not what the others have there."""

    node: str | None
    """None: the leader's own state is what differs."""
    instruction: int
    got: int
    wanted: int


class DivergenceDetector:
    """The chains of one leadership."""

    def __init__(self, members: int) -> None:
        self._majority = members // 2 + 1
        self._chains: OrderedDict[int, int] = OrderedDict()
        self._found: dict[str, Divergence | None] = {}
        """By node, of its last report that could be compared: None if it agrees."""

    def on_order(self, order: WritePlan) -> None:
        """An instruction was applied here."""
        self._chains[order.instruction] = order.chain
        if len(self._chains) > CHAINS_MAX:
            self._chains.popitem(last=False)

    def on_reported(self, node: str, instruction: int, chain: int) -> list[Divergence]:
        """A node has merged up to `instruction`, with that chain; the nodes that must stop."""
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
