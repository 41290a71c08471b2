"""How much of a session is safe, counted over the nodes to which it is pushed. Pure.

Invariants:
- A number is replicated when a majority of the cluster's members has synced it. A member counts once, by its
  name. A member that never reported has nothing. Once the members are known by name, other nodes do not
  count.
- A number is merged when any member reports that, because a member reports only committed data. Merged
  implies replicated: only replicated bytes are merged.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from replicator.protocol.handshake import NOWHERE, PushProgress
from replicator.protocol.known_nodes import NO_NODES, KnownNodes
from replicator.protocol.messages import LogOffset
from rt.sidecar.progress_file import NO_LEVEL, Level

NEAR_SEGMENTS: Final = 8
"""A publisher keeps segments for a node that is up to this number of segments behind the merge: 1 GiB."""


def majority_level(levels: Iterable[Level], members: int) -> Level:
    """The furthest level that a majority of `members` has reached."""
    reached = sorted(levels, reverse=True)
    majority = members // 2 + 1
    return reached[majority - 1] if 0 < majority <= len(reached) else NO_LEVEL


class QuorumProgress:
    """What each node reported last."""

    def __init__(self) -> None:
        self.merged = NO_LEVEL
        self.merged_offset = NOWHERE  # Up to where the session is merged, as far as a node reported.
        self.known: KnownNodes = NO_NODES
        """The members by name, once they have changed. Replicated numbers stay replicated
        (`ProgressFile`).
        """
        self._progress: dict[str, PushProgress] = {}
        self._members: dict[str, int] = {}
        self._connected: set[str] = set()

    @property
    def members(self) -> int:
        """Number of nodes of the cluster. If nodes report different numbers and do not name the members, the
        largest number counts.
        """
        return len(self.known.nodes) or max(self._members.values(), default=0)

    @property
    def majority(self) -> int:
        """1 before any node reported."""
        return self.members // 2 + 1

    @property
    def replicated(self) -> Level:
        """What a majority has synced, as far as it is known now."""
        counted = (said for node, said in self._progress.items() if self.known.has_member(node))
        levels = (Level(said.durable.run, said.durable_number) for said in counted)
        return max(majority_level(levels, self.members), self.merged)

    @property
    def lacking(self) -> int:
        """How many numbers below `merged` a connected node that is not far behind still needs.

        The node gets them from this client sooner than from its peers. A disconnected node gets them as
        merged data when it is back.
        """
        connected = filter(self.known.has_member, self._connected)
        told = (self._progress[node] for node in connected if node in self._progress)
        near = (said for said in told if said.durable.run == self.merged.run)
        return max(
            (
                self.merged.number - said.durable_number
                for said in near
                if said.durable_number < self.merged.number
                and self.merged_offset.roll - said.durable.roll <= NEAR_SEGMENTS
            ),
            default=0,
        )

    def durable(self, node: str) -> LogOffset:
        said = self._progress.get(node)
        return NOWHERE if said is None else said.durable

    def safe(self, node: str) -> LogOffset:
        """The offset up to which a node needs nothing more: it has synced the bytes, or they are merged and
        it gets them from other nodes.
        """
        return max(self.durable(node), self.merged_offset)

    def start(self, node: str, members: int, place: LogOffset | None) -> None:
        """A stream to a node begins at `place`. A node that lost bytes is counted from there."""
        self._members[node] = members
        self._connected.add(node)
        if (place or NOWHERE) < self.durable(node):
            del self._progress[node]

    def remove(self, node: str) -> None:
        """Record that the stream to a node has ended. Its progress is known again when it reports.

        It may have another disk then. Replicated numbers stay replicated (`ProgressFile`).
        """
        self._connected.discard(node)
        self._progress.pop(node, None)

    def report(self, node: str, said: PushProgress) -> None:
        self._progress[node] = said
        self.merged = max(self.merged, Level(said.merged_run, said.merged_number))
        self.merged_offset = max(self.merged_offset, said.merged)
