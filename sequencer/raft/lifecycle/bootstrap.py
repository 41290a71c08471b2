"""How a new cluster is made, and how a new disk gets into one. (Rule 6 of docs/raft.md.)

For the loop's thread. The laws: a cluster is made once, by members that are all here and all blank; a blank
disk becomes a member only by a state that names it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from rt.errors import ClusterMismatch, FormatError
from sequencer.raft.core.core import SyncObj
from sequencer.raft.core.local_member import LocalMembership
from sequencer.raft.core.ports import Network
from sequencer.raft.core.pysyncobj_adapter import now
from sequencer.raft.lifecycle.install_snapshot import SnapshotInstaller
from sequencer.raft.lifecycle.peers import Peers
from sequencer.raft.lifecycle.state_fetch import StateFetcher
from sequencer.raft.model.cluster_state import ClusterState, decode_state, encode_state, initial_state
from sequencer.raft.model.config import RaftConfig
from sequencer.raft.model.messages import CHUNK_BYTES_MAX, NO_ID, Admit, Hello
from sequencer.raft.storage.disk_full import DiskSpace
from sequencer.raft.storage.open_directory import check_members
from sequencer.raft.storage.snapshots import SnapshotStore

logger = logging.getLogger("sequencer.raft")


class Bootstrap:
    """Makes the cluster, takes its first state, gives it to others. `become` takes a state over."""

    def __init__(
        self,
        config: RaftConfig,
        own: LocalMembership,
        raft: SyncObj,
        peers: Peers,
        network: Network,
        snapshots: SnapshotStore,
        space: DiskSpace,
        installing: SnapshotInstaller,
        fetching: StateFetcher,
        new_id: Callable[[], bytes],
        become: Callable[[ClusterState, bytes], None],
    ) -> None:
        self._config, self._own, self._raft, self._peers = config, own, raft, peers
        self._network, self._snapshots, self._space = network, snapshots, space
        self._installing, self._fetching = installing, fetching
        self._new_id, self._become = new_id, become
        self._admit_again_at: dict[str, float] = {}

    def try_bootstrap(self) -> None:
        """Make the cluster if all members are here and blank, and nobody with a lower name wants to."""
        if not (self._config.bootstrap and self._own.is_blank) or self._installing.is_installing:
            return  # Where a state is being fetched somebody is not blank.
        hellos = {peer: self._peers.hellos.get(peer) for peer in self._config.peers}
        for peer, hello in hellos.items():
            if hello is None or hello.cluster != NO_ID or peer not in self._network.connected:
                return
            if hello.wants_bootstrap and peer < self._config.name:
                return
        disks = {peer: hello.claim.disk for peer, hello in hellos.items() if hello is not None}
        state = initial_state(self._new_id(), 1, disks | {self._config.name: self._own.identity.disk})
        logger.info(
            "bootstrap_started cluster=%s members=%s", state.cluster.hex(), ",".join(sorted(state.disks))
        )
        self._become_member(state, encode_state(state))

    def offer_adoption(self, peer: str, hello: Hello) -> None:
        """A blank disk that the cluster counts on gets a snapshot: without one it may not vote.

        It has never voted or acknowledged, so any will do. A large one only a leader sends, in pieces.
        """
        newest = self._snapshots.newest
        is_small = newest is not None and newest.length <= CHUNK_BYTES_MAX
        if is_small and self._peers.is_counted_on(peer, hello, newest):
            self._raft.send(peer, Admit(self._snapshots.read()))

    def on_adopt(self, peer: str, hello: Hello, adopt: Admit) -> None:
        """Become a member of the cluster, if it names this disk."""
        if not self._own.is_blank or self._installing.is_installing or self._fetching.is_installing:
            return
        try:
            state, _ = decode_state(adopt.content)
            check_members(self._config, state)
        except (FormatError, ClusterMismatch) as error:
            logger.error("admission_rejected peer=%s error=%r", peer, str(error))
            return
        known = state.disks.get(self._config.name)
        is_peers = (state.cluster, state.epoch) == (hello.cluster, hello.epoch)
        if known is None or known.disk != self._own.identity.disk or not is_peers:
            logger.error("admission_rejected peer=%s cluster=%s", peer, state.cluster.hex())
            return
        logger.info("disk_adopted cluster=%s peer=%s", state.cluster.hex(), peer)
        self._become_member(state, adopt.content)

    def admit_disks(self) -> None:
        """As leader: have each disk committed that speaks for a member and is not the one that counts."""
        for join in self._raft.unknown_disks():
            # One for each member in an election timeout: copies of a disk that take turns cost no more.
            if now() >= self._admit_again_at.get(join.name, 0.0):
                self._admit_again_at[join.name] = now() + self._config.election_ms_max / 1000
                logger.warning("disk_admitted member=%s disk=%s", join.name, join.disk.hex())
                self._raft.admit(join)

    def _become_member(self, state: ClusterState, content: bytes) -> None:
        """Each step is durable before the next, and opening the directory goes on from any of them."""
        self._space.once(lambda: self._snapshots.write(state.cluster, state.epoch, state.applied, content))
        self._become(state, decode_state(content)[1])
