"""Epochs of a cluster: how one ends, what the next begins with, and when a node that is left behind follows.

Pure. An epoch is one Raft log, with its own elections. Laws. A committed reset is the last entry that anybody
applies in its epoch, so all who are in the next one began it with the same state; whoever is in it proves by
that alone that the reset was committed. A disk that was in no later epoch has neither voted nor acknowledged
anything there: it may begin there with any state that the epoch had.

Where no majority is left, an operator may have one node begin an epoch from what that node has (rule 6 of
docs/raft.md). Nothing proves that this is all there was, so such an epoch is of another line:
`rt.cluster_epoch` says how epochs are named.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from crc32c import crc32c

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
from sequencer.raft.model.messages import NO_ID, DiskClaim, LogIndex

STAY_S: Final = 1.0
"""So long a leader that has applied a reset stays, for those that have not heard of it yet."""

_INDEX_SHIFT: Final = 54
"""The log of a generation begins at an index that no log of an earlier one comes to, so that of two states of
one disk the later one is behind the other, however far the disk went on in the earlier epoch."""


class EpochOver(Exception):
    """The state of a later epoch is durable here: start the node again, which goes on in that epoch."""

    def __init__(self, epoch: int) -> None:
        super().__init__(f"this node goes on in epoch {name_of(epoch)} when it is started again")
        self.epoch = epoch


class NoMajority(RtError):
    """There are not enough members to go on with."""

    grpc_status = "UNAVAILABLE"
    retriable = True


def next_epoch(state: ClusterState, digest: bytes) -> ClusterState:
    """What the next epoch begins with. `digest` is of the state machine's state: the same on every node.

    The log's indexes go on, so that of two states of one disk the later one is behind the other.
    """
    assert may_be_reset(state.epoch), state.epoch
    index, term = state.applied
    chain = crc32c(digest, state.chain)
    return replace(state, epoch=state.epoch + 1, applied=LogIndex(index + 1, term), chain=chain)


def forced_epoch(state: ClusterState, digest: bytes, disks: Mapping[str, bytes], lot: bytes) -> ClusterState:
    """What an epoch begins with that is made of one node's state, by the disks of these members.

    A member that is not among them has no disk that counts: it joins as one that was wiped. `lot` is random,
    8 bytes or more, and names the line.
    """
    number = forced_number(number_of(state.epoch))
    epoch = epoch_of(number, 1 + int.from_bytes(lot[:8]) % ((1 << LINE_BITS) - 1))
    place = LogIndex(max(state.applied.index + 1, generation_of(epoch) << _INDEX_SHIFT), state.applied.term)
    claims = {name: DiskClaim(disks.get(name, NO_ID), place) for name in state.disks}
    return replace(state, epoch=epoch, applied=place, chain=crc32c(digest, state.chain), disks=claims)


@dataclass(slots=True)
class EpochLeft:
    """Whether a node leaves its epoch for one that peers are in. A cluster of `members`."""

    members: int
    patience_s: float
    """Without a leader for so long nothing is to be hoped for from the own epoch."""
    elsewhere: dict[str, int] = field(default_factory=dict)
    """Connected peers in other epochs of this cluster that are not earlier ones, and which."""

    def ahead(self, own: int) -> dict[str, int]:
        """The peers in epochs later than `own`; in a rival's nobody is."""
        return {peer: epoch for peer, epoch in self.elsewhere.items() if is_later(own, epoch)}

    def forced_without(self, own: int) -> dict[str, int]:
        """The members that are in one line which was forced without this one, if they are a majority.

        One alone may be wrong.
        """
        lines = Counter(line_of(epoch) for epoch in self.elsewhere.values() if not is_succeeded(own, epoch))
        for line, count in lines.items():
            if 2 * count > self.members:
                return {peer: epoch for peer, epoch in self.elsewhere.items() if line_of(epoch) == line}
        return {}

    def whom_to_ask(self, own: int, leaderless_s: float, *, is_bound: bool) -> list[str]:
        """The peers from which to take a state of the later epoch now, best first; none: stay, and wait.

        The own epoch goes on as long as it can: with a leader it comes to its reset by itself. `is_bound`:
        this disk counts in it. One that does not has no say in what becomes of the cluster, and follows.
        """
        ahead = self.ahead(own)
        is_over = 2 * len(ahead) > self.members or leaderless_s > self.patience_s
        successors = [peer for peer, epoch in ahead.items() if not is_bound or is_succeeded(own, epoch)]
        return sorted(successors, key=lambda peer: (-ahead[peer], peer)) if is_over else []
