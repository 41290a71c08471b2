"""How a new cluster is made, and how a new disk joins one. (Rule 6 of docs/raft.md.)

For the loop's thread. Invariants:
- A cluster is made once, by members that are all connected and all blank.
- A blank disk becomes a member only with a state that names it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from rt.errors import ClusterMismatch, FormatError, UnknownVersion
from sequencer.raft.core.pysyncobj_adapter import now
from sequencer.raft.lifecycle.install_snapshot import SnapshotInstaller, decode_peer_state
from sequencer.raft.lifecycle.peers import Peers
from sequencer.raft.lifecycle.services import NodeServices
from sequencer.raft.lifecycle.state_transfer import StateFetcher
from sequencer.raft.model.cluster_state import ClusterState, decode_state, encode_state, initial_state
from sequencer.raft.model.messages import CHUNK_BYTES_MAX, NO_ID, Admit, Hello
from sequencer.raft.storage.open_directory import check_members

logger = logging.getLogger("sequencer.raft")


class Bootstrap:
    """Makes the cluster, accepts its first state, and offers it to blank members."""

    def __init__(
        self,
        services: NodeServices,
        peers: Peers,
        installer: SnapshotInstaller,
        state_fetcher: StateFetcher,
        adopt_state: Callable[[ClusterState, bytes], None],
    ) -> None:
        self._config, self._own, self._raft = services.config, services.own, services.raft
        self._network, self._snapshots, self._space = services.network, services.snapshots, services.space
        self._new_id, self._machine = services.new_id, services.machine
        self._peers, self._installer, self._state_fetcher = peers, installer, state_fetcher
        self._adopt_state = adopt_state
        self._admit_again_at: dict[str, float] = {}

    def try_bootstrap(self) -> None:
        """Make the cluster if all members are connected and blank. The member with the lowest name among
        those with `bootstrap` makes it.
        """
        if not (self._config.bootstrap and self._own.is_blank) or self._installer.is_installing:
            return  # A state is being fetched, so a member is not blank.
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
        self._adopt_first_state(state, encode_state(state))

    def offer_admission(self, peer: str, hello: Hello) -> None:
        """Send a snapshot to a blank disk that the cluster counts. Without a state this disk may not vote.

        Any snapshot is sufficient, because such a disk has never voted or acknowledged. Only a leader sends a
        large snapshot, in chunks.
        """
        newest = self._snapshots.newest
        is_small = newest is not None and newest.length <= CHUNK_BYTES_MAX
        if is_small and self._peers.is_counted_on(peer, hello, newest):
            self._raft.send(peer, Admit(self._snapshots.read()))

    def on_admit(self, peer: str, hello: Hello, adopt: Admit) -> None:
        """Become a member of the cluster, if the snapshot names this disk."""
        if not self._own.is_blank or self._installer.is_installing or self._state_fetcher.is_installing:
            return
        try:
            state, _ = decode_peer_state(self._machine, adopt.content)
            check_members(self._config, self._own.identity.disk, state)
        except UnknownVersion:
            raise
        except (FormatError, ClusterMismatch) as error:
            logger.error("admission_rejected peer=%s error=%r", peer, str(error))
            return
        known = state.disks.get(self._config.name)
        is_peers = (state.cluster, state.epoch) == (hello.cluster, hello.epoch)
        if known is None or known.disk != self._own.identity.disk or not is_peers:
            logger.error("admission_rejected peer=%s cluster=%s", peer, state.cluster.hex())
            return
        logger.info("disk_adopted cluster=%s peer=%s", state.cluster.hex(), peer)
        self._adopt_first_state(state, adopt.content)

    def admit_disks(self) -> None:
        """As leader, propose the join of each connected disk that does not count for its member."""
        for join in self._raft.peer_disks.to_admit():
            # At most one join for each member in an election timeout, because copies of a disk may connect in
            # turns.
            if now() >= self._admit_again_at.get(join.name, 0.0):
                self._admit_again_at[join.name] = now() + self._config.election_ms_max / 1000
                logger.warning("disk_admitted member=%s disk=%s", join.name, join.disk.hex())
                self._raft.leader_role.admit(join)

    def _adopt_first_state(self, state: ClusterState, content: bytes) -> None:
        """Each step is durable before the next step starts. After a crash, these steps continue when the
        directory is opened.
        """
        self._space.once(lambda: self._snapshots.write(state.cluster, state.epoch, state.applied, content))
        self._adopt_state(state, decode_state(content)[1])
