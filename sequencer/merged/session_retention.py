"""How long a node keeps session bytes that the cluster has merged.

Pure. Invariants:
- A node keeps the input of an instruction until its own merged log and those of a majority hold it durably.
- The low watermark only moves forward. The condition for it stays true when nodes fail.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping


def low_watermark(merged: Iterable[int], voters: int) -> int:
    """The last instruction that a majority of `voters` nodes has merged durably.

    `merged`: the last durably merged instruction of each voter that reported. Other voters count as having
    merged nothing.
    """
    known = sorted(merged, reverse=True)
    majority = voters // 2 + 1
    return known[majority - 1] if len(known) >= majority else 0


class SessionRetention:
    """Tracks the instruction up to which this node need not keep the input. `voters`: the initial voters."""

    def __init__(self, node: str, voters: Iterable[str]) -> None:
        self._node, self._voters = node, frozenset(voters)
        self._merged: dict[str, int] = {}
        self._low = 0

    def on_voters(self, voters: Iterable[str]) -> None:
        self._voters = frozenset(voters)

    def on_merged(self, merged: Mapping[str, int]) -> None:
        """Record, by node, the last instruction that it reported as merged durably."""
        for node, instruction in merged.items():
            self._merged[node] = max(instruction, self._merged.get(node, 0))

    def released(self, own: int) -> int:
        """The last instruction whose input may be trimmed, now that this node has merged `own` durably."""
        self._merged[self._node] = max(own, self._merged.get(self._node, 0))
        merged = [self._merged[node] for node in self._voters if node in self._merged]
        self._low = max(self._low, low_watermark(merged, len(self._voters)))
        return min(own, self._low)
