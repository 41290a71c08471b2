"""This node's disk identity and cluster state.

For the loop's thread. Invariant: a claim of a node about its disk is durable before the node makes it.
"""

from __future__ import annotations

from msgspec.structs import replace

from rt.log.disk import Disk
from sequencer.raft.model.cluster_state import ClusterState
from sequencer.raft.model.config import RaftConfig
from sequencer.raft.model.messages import DiskClaim, Hello
from sequencer.raft.storage.disk_full import DiskSpace
from sequencer.raft.storage.identity import DiskIdentity, store_identity
from sequencer.raft.storage.open_directory import joined_identity


class LocalMembership:
    """Implements `voter_disks.LocalVoter` with attributes, because every message reads them."""

    def __init__(
        self, config: RaftConfig, disk: Disk, space: DiskSpace, identity: DiskIdentity, state: ClusterState
    ) -> None:
        self._config, self._disk, self._space = config, disk, space
        self.state = state
        """The replicated state as of the last entry applied."""
        self._identify(identity)

    def _identify(self, identity: DiskIdentity) -> None:
        self.identity = identity
        self.claim: DiskClaim = identity.claim

    @property
    def is_blank(self) -> bool:
        """Whether this disk belongs to no cluster yet."""
        return self.identity.is_blank

    def hello(self) -> Hello:
        own = self.identity
        return Hello(own.cluster, own.epoch, own.claim, self._config.bootstrap and own.is_blank)

    def adopt(self, cluster: bytes, epoch: int) -> None:
        """Join that cluster, of which a snapshot is durable here."""
        assert self.is_blank, self.identity
        self._store(replace(self.identity, cluster=cluster, epoch=epoch))

    def record_join(self, state: ClusterState) -> None:
        """Store the place in the log where this disk was admitted, if the state contains it."""
        joined = joined_identity(self.identity, state)
        if joined != self.identity:
            self._store(joined)

    def _store(self, identity: DiskIdentity) -> None:
        self._space.once(lambda: store_identity(self._config.directory, identity, disk=self._disk))
        self._identify(identity)
