"""Epochs of a cluster: how an epoch ends, which state the next epoch starts with, and when a node follows to
a later epoch. Pure.

An epoch is one Raft log, with its own elections. Invariants:
- A committed reset is the last entry that any node applies in its epoch. So all nodes of the next epoch
  started it with the same state, and a node in the next epoch proves that the reset was committed.
- A disk that was never in a later epoch has neither voted nor acknowledged anything in that epoch. It may
  start in that epoch with any state that the epoch had.

If no majority is left, an operator can force one node to start an epoch from its own state (rule 6 of
docs/raft.md). Nothing proves that this state is complete, so such an epoch belongs to another line:
`rt.cluster_epoch` defines how epochs are named.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from typing import Final

from crc32c import crc32c
from msgspec import Struct, field
from msgspec.structs import replace

from rt.cluster_epoch import (
    LINE_BITS,
    epoch_of,
    forced_number,
    generation_of,
    is_later,
    is_succeeded,
    line_of,
    may_be_reset,
    name_of,
    number_of,
)
from rt.errors import RtError
from sequencer.raft.model.cluster_state import ClusterState
from sequencer.raft.model.members import is_majority
from sequencer.raft.model.messages import NO_ID, DiskClaim, LogIndex

LEAVE_DELAY_S: Final = 1.0
"""A leader that has applied a reset stays this long, for members that have not received it yet."""

_INDEX_SHIFT: Final = 54
"""The log of a generation starts at an index that no log of an earlier generation reaches. So of two states
of one disk the later one always has the higher index.
"""


class EpochOver(Exception):
    """The state of a later epoch is durable here. The node continues in that epoch when it is
    opened again.
    """

    def __init__(self, epoch: int) -> None:
        super().__init__(f"this node continues in epoch {name_of(epoch)} when it is opened again")
        self.epoch = epoch


class NoMajority(RtError):
    """There are not enough members to continue."""

    grpc_status = "UNAVAILABLE"
    retriable = True


def next_epoch(state: ClusterState, digest: bytes) -> ClusterState:
    """The state that the next epoch starts with. `digest`: of the state machine's state, equal on every node.

    The log's indices continue, so that of two states of one disk the later one has the higher index.
    """
    assert may_be_reset(state.epoch), state.epoch
    index, term = state.applied
    chain = crc32c(digest, state.chain)
    return replace(state, epoch=state.epoch + 1, applied=LogIndex(index + 1, term), chain=chain)


def forced_epoch(state: ClusterState, digest: bytes, disks: Mapping[str, bytes], lot: bytes) -> ClusterState:
    """The state that a forced epoch starts with. `disks`: the disks of the members that take part.

    The other members have no disk that counts. They join like members with wiped disks. `lot`: at least 8
    random bytes, which name the line.
    """
    number = forced_number(number_of(state.epoch))
    epoch = epoch_of(number, 1 + int.from_bytes(lot[:8]) % ((1 << LINE_BITS) - 1))
    place = LogIndex(max(state.applied.index + 1, generation_of(epoch) << _INDEX_SHIFT), state.applied.term)
    claims = {name: DiskClaim(disks.get(name, NO_ID), place) for name in state.disks}
    return replace(state, epoch=epoch, applied=place, chain=crc32c(digest, state.chain), disks=claims)


class EpochLeft(Struct):
    """Decides whether a node leaves its epoch for an epoch that its peers are in."""

    voters: Collection[str]
    """The voters of the list in force, with this node if it is one. Only they count for a majority."""
    patience_s: float
    """If a node has no leader for this time, it gives up its own epoch."""
    elsewhere: dict[str, int] = field(default_factory=dict)
    """Connected peers in other epochs of this cluster that are not earlier, and the epoch of each peer."""

    def ahead(self, own: int) -> dict[str, int]:
        """The peers in epochs later than `own`. An epoch of a rival line is not later."""
        return {peer: epoch for peer, epoch in self.elsewhere.items() if is_later(own, epoch)}

    def forced_without(self, own: int) -> dict[str, int]:
        """The members in a line that was forced without this node, if they are a majority. A single member
        may be wrong.
        """
        epochs = [epoch for peer, epoch in self.elsewhere.items() if peer in self.voters]
        lines = Counter(line_of(epoch) for epoch in epochs if not is_succeeded(own, epoch))
        for line, count in lines.items():
            if is_majority(count, len(self.voters)):
                return {peer: epoch for peer, epoch in self.elsewhere.items() if line_of(epoch) == line}
        return {}

    def peers_to_ask(self, own: int, leaderless_s: float, *, is_bound: bool) -> list[str]:
        """The peers from which to fetch the state of a later epoch now, best first. Empty if the node stays
        in its epoch.

        The node stays while its epoch has a leader, because the leader will send the reset. `is_bound`: this
        disk counts in the epoch. A disk that does not count may follow to any later epoch.
        """
        ahead = self.ahead(own)
        voters = sum(peer in self.voters for peer in ahead)
        is_over = is_majority(voters, len(self.voters)) or leaderless_s > self.patience_s
        successors = [peer for peer, epoch in ahead.items() if not is_bound or is_succeeded(own, epoch)]
        return sorted(successors, key=lambda peer: (-ahead[peer], peer)) if is_over else []
