"""The members that this node talks to, how it sends the list of members to its peers, and how it learns of
its removal.

For the loop's thread. Invariants:
- The network knows the members of the list in force, of the committed list, and of a newer list that a peer
  sent. A removed member stays for `PARTING_S`, so that it receives its removal. If this node has no leader
  for a long time, the network also knows the configured members, because all members that this node knew may
  have been removed while it was away.
- A list that a peer sent gives names and addresses only. It never decides which votes count.
- A node ends if it has applied its own removal, or if a peer sent it a newer committed list without it. It
  does not end while it hears a leader that sends later entries, because it may have been added again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from rt.cluster_epoch import is_later
from rt.errors import FormatError
from sequencer.raft.core.pysyncobj_adapter import now
from sequencer.raft.lifecycle.peers import Peers
from sequencer.raft.lifecycle.services import NodeServices
from sequencer.raft.model.entry_codec import decode_members, encode_members
from sequencer.raft.model.epochs import EpochLeft
from sequencer.raft.model.members import Members, rejoined_error, removed_error
from sequencer.raft.model.messages import NO_ID, NOWHERE, Hello, LogIndex, MemberList, RaftEntry

PARTING_S: Final = 5.0
"""A removed node stays connected this long after its removal was applied here."""

logger = logging.getLogger("sequencer.raft")


class Membership:
    """The list of members on this node. Created after the node's parts. `on_members` receives each committed
    list.
    """

    def __init__(
        self,
        services: NodeServices,
        peers: Peers,
        epoch_left: EpochLeft,
        on_members: Callable[[Members], None],
    ) -> None:
        config = services.config
        self._config, self._own, self._raft = config, services.own, services.raft
        self._network, self._peers, self._epoch_left = services.network, peers, epoch_left
        self._on_members = on_members
        self._disks = services.raft.voter_disks
        self._reported: Members | None = None
        self._parting: dict[str, tuple[str, float]] = {}
        """For each removed member, its address and the time until which it stays."""
        self._told: dict[bool, tuple[int, Members]] = {True: (0, {}), False: (0, {})}
        """The newest committed list that a peer sent, and the newest list that was not committed. The latter
        may be truncated.
        """
        self._announced: tuple[int, bool] = (0, False)
        self._is_out = False
        """A list without this node was applied."""
        self._joined = services.own.claim.joined
        self._is_dialling_all = False
        self._raft.on_members = self.refresh
        self.refresh()

    @property
    def members(self) -> Members:
        """The list in force."""
        return self._disks.members

    @property
    def applied(self) -> Members:
        return self._disks.applied_members

    # What this node does when the list changes

    def refresh(self) -> None:
        """Called when the list in force may have changed, and after a peer sent a new list or a list was
        applied.
        """
        disks = self._disks
        self._epoch_left.voters = disks.voters
        names = {
            name: member
            for index, members in self._told.values()
            if index > disks.members_index
            for name, member in members.items()
        }
        parting = {name: address for name, (address, _) in self._parting.items()}
        seeds = self._config.members if self._is_dialling_all else {}
        sources = seeds, parting, _addresses(names), _addresses(self.applied), _addresses(disks.members)
        self._network.set_members(_united(sources), self._notice())
        if self._announced != self._newest():
            self._announced = self._newest()
            for peer, hello in self._peers.hellos.items():
                self._announce(peer, hello)

    def report(self) -> None:
        """The committed list may have changed. Also called once at the start."""
        members, before = self.applied, self._reported
        if members == before:
            return
        self._reported = members
        for name, member in (before or {}).items():
            if name not in members:
                self._parting[name] = member.address, now() + PARTING_S
        for name in members:
            self._parting.pop(name, None)
        self.refresh()
        self._on_members(members)

    def on_entry(self, entry: RaftEntry) -> None:
        """An entry without commands was applied."""
        if decode_members(entry.content) is None:
            self.on_joined()
        else:
            self._on_applied(entry.place)

    def _on_applied(self, place: LogIndex) -> None:
        state, name = self._own.state, self._config.name
        assert state.members is not None, state.applied
        logger.warning("members_changed index=%d members=%s", place.index, describe(state.members))
        self._is_out = name not in state.members and self._own.claim.joined != NOWHERE
        self._raft.member_changes.on_applied(place)
        self.report()

    def on_joined(self) -> None:
        """A join was applied, or a state was restored. Raises `MemberRemoved` after a second join of this
        disk.

        In that case the cluster has forgotten which commands of this run it applied.
        """
        before, self._joined = self._joined, self._own.claim.joined
        if before not in {NOWHERE, self._joined} and self._own.state.members is not None:
            raise rejoined_error(self._config.name, self._config.directory)

    def on_restored(self) -> None:
        self._raft.member_changes.on_restored()
        self.report()
        self.on_joined()

    # Lists that are sent to peers and received from peers

    def is_accepted(self, peer: str, hello: Hello) -> bool:
        """Send the list to the peer, then return `Peers.is_accepted`. A peer of another epoch needs the list,
        too.
        """
        self._announce(peer, hello)
        return self._peers.is_accepted(peer, hello)

    def _announce(self, peer: str, hello: Hello) -> None:
        """Send the newest list to a connected peer. The peer may not know a new member, or its own
        removal.
        """
        disks, own = self._disks, self._own.identity
        if disks.has_list and hello.cluster in {own.cluster, NO_ID}:
            message = MemberList(*self._newest(), encode_members(disks.members))
            self._network.send(peer, message)

    def on_member_list(self, peer: str, hello: Hello, message: MemberList) -> None:
        own = self._own.identity
        is_here = hello.cluster == own.cluster and (
            hello.epoch == own.epoch or is_later(own.epoch, hello.epoch)
        )
        if not (is_here or own.is_blank) or message.index <= self._told[message.is_committed][0]:
            return
        try:
            members = decode_members(message.content)
        except FormatError as error:
            logger.error("member_list_rejected peer=%s error=%r", peer, str(error))
            return
        if members is None:
            logger.error("member_list_rejected peer=%s error='no list'", peer)
            return
        self._told[message.is_committed] = message.index, members
        if message.is_committed and self._config.name not in members:
            logger.warning(
                "not_a_member peer=%s members=%s: add this node to the cluster", peer, describe(members)
            )
        self.refresh()

    def _newest(self) -> tuple[int, bool]:
        return self._disks.members_index, not self._disks.is_change_pending

    def _notice(self) -> MemberList | None:
        """The message for nodes that are not members. None before the first change of the members."""
        state = self._own.state
        if state.members is None:
            return None
        return MemberList(state.members_index, True, encode_members(state.members))

    # Checks in each round

    def check(self) -> None:
        """Called in each round. Raises `MemberRemoved` if this node was removed."""
        if self._reported is None:
            self.report()
        began = self._raft.round_began
        if self._parting and any(until <= began for _, until in self._parting.values()):
            self._parting = {name: one for name, one in self._parting.items() if one[1] > began}
            self.refresh()
        if self._own.is_blank:
            return
        leaderless_s = self._raft.follower_role.leaderless_s
        self._dial_all(is_wanted=leaderless_s > self._config.patience_s / 2)
        if self._is_removed(leaderless_s):
            raise removed_error(self._config.name, self._config.directory)

    def _dial_all(self, *, is_wanted: bool) -> None:
        if is_wanted != self._is_dialling_all:
            self._is_dialling_all = is_wanted
            self._network.dial_all(is_wanted=is_wanted)
            self.refresh()

    def _is_removed(self, leaderless_s: float) -> bool:
        name, disks, applied = self._config.name, self._disks, self._own.state.applied
        index, told = self._told[True]
        is_newer = index > disks.members_index
        if self._own.claim.joined == NOWHERE or (is_newer and name in told):
            return False  # It waits to be added, or was added again.
        is_told = index >= disks.members_index and index > 0 and name not in told
        if is_told and leaderless_s > 2 * self._config.election_ms_max / 1000:
            return is_newer or name not in disks.members
        if name in self.applied or name in disks.members:
            return False
        is_reached = applied.index >= self._raft.follower_role.leader_committed
        return (self._is_out and is_reached) or leaderless_s > self._config.patience_s / 2


def describe(members: Members) -> str:
    return ",".join(f"{name}{'' if members[name].votes else ':learner'}" for name in sorted(members))


def _united(sources: Iterable[Mapping[str, str]]) -> dict[str, str]:
    """The newest address of each name. The sources are in order, the newest last. An unknown address does not
    replace a known one.
    """
    addresses: dict[str, str] = {}
    for source in sources:
        addresses |= {name: address or addresses.get(name, "") for name, address in source.items()}
    return addresses


def _addresses(members: Members) -> dict[str, str]:
    return {name: member.address for name, member in members.items()}
