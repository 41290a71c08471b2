"""Taking the snapshot that a leader sends to a node whose log ends before its own begins.

For the loop's thread; the whole of it is checked and made durable aside. The law: a snapshot takes effect
once it is durable, and only if it is above all that is committed here by then.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from rt.errors import ClusterMismatch, DiskFull, FormatError
from sequencer.raft.core.core import SyncObj
from sequencer.raft.core.local_member import LocalMembership
from sequencer.raft.lifecycle.state_fetch import StateFetcher
from sequencer.raft.model.cluster_state import ClusterState, decode_state
from sequencer.raft.model.config import RaftConfig
from sequencer.raft.model.messages import NO_ID, Hello, InstallSnapshot, InstallSnapshotReply
from sequencer.raft.storage.open_directory import check_members
from sequencer.raft.storage.snapshots import SnapshotMeta, SnapshotReceiver, SnapshotStore
from sequencer.raft.storage.worker import BackgroundWorker

logger = logging.getLogger("sequencer.raft")


def installable(config: RaftConfig, meta: SnapshotMeta, content: bytes) -> tuple[ClusterState, bytes]:
    """The state in a peer's snapshot; `rt.FormatError` or `rt.ClusterMismatch` if it is another."""
    state, machine_bytes = decode_state(content)
    if (state.cluster, state.epoch, state.applied) != (meta.cluster, meta.epoch, meta.place):
        raise FormatError("a snapshot holds another state than its leader said", got=state.applied)
    check_members(config, state)
    return state, machine_bytes


class SnapshotInstaller:
    """What has come of a leader's snapshot. `become` takes the state over."""

    def __init__(
        self,
        config: RaftConfig,
        own: LocalMembership,
        raft: SyncObj,
        snapshots: SnapshotStore,
        aside: BackgroundWorker,
        fetching: StateFetcher,
        become: Callable[[ClusterState, bytes], None],
    ) -> None:
        self._config, self._own, self._raft = config, own, raft
        self._snapshots, self._aside, self._fetching = snapshots, aside, fetching
        self._become = become
        self.incoming: SnapshotReceiver | None = None
        """None: no snapshot is on its way."""
        self.is_installing = False
        """The whole of it is here, and being made durable."""

    def on_chunk(self, peer: str, hello: Hello, chunk: InstallSnapshot) -> None:
        """Take a piece from a leader that introduced itself so."""
        meta = SnapshotMeta(hello.cluster, hello.epoch, chunk.snapshot, chunk.length, chunk.digest)
        if hello.cluster == NO_ID or self._fetching.is_installing:
            return  # A blank peer leads nobody.
        self._fetching.give_up()
        reached = chunk.offset + len(chunk.data)
        if self.is_installing:
            if self.incoming is not None and self.incoming.meta == meta:
                self._acknowledge(peer, chunk.term, meta, reached, self.incoming.received)
            return
        try:
            if self.incoming is None or self.incoming.meta != meta:
                self.incoming = self._snapshots.receive(meta)
            incoming = self.incoming
            received = incoming.write(chunk.offset, chunk.data)
        except (FormatError, DiskFull) as error:
            self._on_failed(error)
            return
        self._acknowledge(peer, chunk.term, meta, reached, received)
        if received == meta.length:
            self._install(peer, chunk.term, meta, incoming)

    def give_up(self) -> None:
        """What came of one is of no use any more; one that is being made durable goes on."""
        if self.incoming is not None and not self.is_installing:
            self.incoming.abandon()
            self.incoming = None

    def give_up_overtaken(self) -> None:
        """The same, if as much was applied meanwhile."""
        if self.incoming is not None and self.incoming.meta.place.index <= self._own.state.applied.index:
            self.give_up()

    def _install(self, peer: str, term: int, meta: SnapshotMeta, incoming: SnapshotReceiver) -> None:
        self.is_installing = True
        found: list[tuple[ClusterState, bytes]] = []
        self._aside.run(
            lambda: incoming.finish(lambda content: found.append(installable(self._config, meta, content))),
            lambda _: self._on_installed(peer, term, meta, *found[0]),
            self._on_failed,
        )

    def _on_installed(
        self, peer: str, term: int, meta: SnapshotMeta, state: ClusterState, machine_bytes: bytes
    ) -> None:
        self.incoming, self.is_installing = None, False
        if meta.place.index <= self._raft.committed:
            return  # The log was quicker.
        logger.info("snapshot_installed index=%d bytes=%d", meta.place.index, meta.length)
        self._become(state, machine_bytes)
        self._acknowledge(peer, term, meta, meta.length, meta.length, is_all=True)

    def _on_failed(self, error: BaseException) -> None:
        """The leader sends it again; a failed disk ends the node."""
        incoming, self.incoming, self.is_installing = self.incoming, None, False
        if not isinstance(error, FormatError | ClusterMismatch | DiskFull):
            raise error
        logger.error("install_failed error=%r", str(error))
        if incoming is not None:
            incoming.abandon()

    def _acknowledge(
        self, peer: str, term: int, meta: SnapshotMeta, reached: int, received: int, *, is_all: bool = False
    ) -> None:
        self._raft.send(
            peer, InstallSnapshotReply(term, meta.place, reached, received, is_all, self._own.claim)
        )
