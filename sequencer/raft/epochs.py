"""Epochs of a cluster: how one ends, what the next begins with, and when a node that is left behind follows.

Pure. An epoch is one Raft log, with its own elections. Laws. A committed reset is the last entry that anybody
applies in its epoch, so all who are in the next one began it with the same state; whoever is in it proves by
that alone that the reset was committed. A disk that was in no later epoch has neither voted nor acknowledged
anything there: it may begin there with any state that the epoch had.

Where no majority is left, an operator may have one node begin an epoch from what that node has (rule 6 of
DESIGN.md, section 6.1). Nothing proves that this is all there was, so such an epoch is of another
*generation*: its number is above any that resets of the other nodes could have come to meanwhile.

    epoch, 32 bits:   generation, 16 bits | resets of that generation, 16 bits
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from crc32c import crc32c

from rt.errors import RtError
from sequencer.raft.messages import NO_ID, Claim, Place
from sequencer.raft.state import ClusterState

STAY_S: Final = 1.0
"""So long a leader that has applied a reset stays, for those that have not heard of it yet."""

_RESETS_END: Final = 1 << 16


class EpochOver(Exception):
    """The state of a later epoch is durable here: start the node again, which goes on in that epoch."""

    def __init__(self, epoch: int) -> None:
        super().__init__(f"this node goes on in epoch {epoch} when it is started again")
        self.epoch = epoch


class NoMajority(RtError):
    """There are not enough members to go on with."""

    grpc_status = "UNAVAILABLE"
    retriable = True


def next_epoch(state: ClusterState, digest: bytes) -> ClusterState:
    """What the next epoch begins with. `digest` is of the state machine's state: the same on every node.

    The log's indexes go on, so that of two states of one disk the later one is behind the other.
    """
    index, term = state.applied
    chain = crc32c(digest, state.chain)
    return replace(state, epoch=state.epoch + 1, applied=Place(index + 1, term), chain=chain)


def forced_epoch(state: ClusterState, digest: bytes, disks: Mapping[str, bytes]) -> ClusterState:
    """What an epoch begins with that is made of one node's state, by the disks of these members.

    A member that is not among them has no disk that counts: it joins as one that was wiped.
    """
    begun = next_epoch(state, digest)
    epoch = forced_number(state.epoch)
    claims = {name: Claim(disks.get(name, NO_ID), begun.applied) for name in state.disks}
    return replace(begun, epoch=epoch, disks=claims)


def forced_number(epoch: int) -> int:
    """The epoch that comes of another one by force."""
    return (epoch // _RESETS_END + 1) * _RESETS_END


def is_succeeded(own: int, other: int) -> bool:
    """Whether epoch `other` came of `own` by resets alone."""
    return other > own and other // _RESETS_END == own // _RESETS_END


@dataclass(slots=True)
class LeftBehind:
    """Whether a node leaves its epoch for one that peers are in. A cluster of `members`."""

    members: int
    patience_s: float
    """Without a leader for so long nothing is to be hoped for from the own epoch."""
    ahead: dict[str, int]
    """Connected peers in later epochs of this cluster, and which."""

    def is_majority_ahead(self) -> bool:
        """One alone may be wrong."""
        return 2 * len(self.ahead) > self.members

    def whom_to_ask(self, own: int, leaderless_s: float, *, is_bound: bool) -> str | None:
        """The peer from which to take a state of the later epoch now; None: stay, and wait.

        The own epoch goes on as long as it can: with a leader it comes to its reset by itself. `is_bound`:
        this disk counts in it. One that does not has no say in what becomes of the cluster, and follows.
        """
        successors = [peer for peer, epoch in self.ahead.items() if not is_bound or is_succeeded(own, epoch)]
        if not successors or not (self.is_majority_ahead() or leaderless_s > self.patience_s):
            return None
        return max(successors, key=lambda peer: (self.ahead[peer], peer))
