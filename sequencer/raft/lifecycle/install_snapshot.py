"""Installs the snapshot that a leader sends when this node needs entries that the leader compacted.

For the loop's thread. The worker checks the snapshot and makes it durable. Invariant: a snapshot takes effect
only after it is durable, and only if it is then above the commit index. A snapshot that a newer program made
stops the node before anything is replaced.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

from rt.errors import ClusterMismatch, DiskFull, FormatError, UnknownVersion
from sequencer.raft.lifecycle.services import NodeServices
from sequencer.raft.lifecycle.state_transfer import StateFetcher
from sequencer.raft.model.api import StateMachine
from sequencer.raft.model.cluster_state import ClusterState, decode_state
from sequencer.raft.model.config import RaftConfig
from sequencer.raft.model.messages import NO_ID, Hello, InstallSnapshot, InstallSnapshotReply
from sequencer.raft.storage.open_directory import check_members
from sequencer.raft.storage.snapshots import SnapshotMeta, SnapshotReceiver

logger = logging.getLogger("sequencer.raft")


def decode_snapshot(
    config: RaftConfig, disk: bytes, machine: StateMachine, meta: SnapshotMeta, content: bytes
) -> tuple[ClusterState, bytes]:
    """The state in a peer's snapshot. Raises `rt.FormatError` or `rt.ClusterMismatch` if it does not match
    `meta`, `rt.UnknownVersion` if a newer program made it.
    """
    state, machine_bytes = decode_peer_state(machine, content)
    if (state.cluster, state.epoch, state.applied) != (meta.cluster, meta.epoch, meta.place):
        raise FormatError("the state in a snapshot does not match its header", got=state.applied)
    check_members(config, disk, state)
    return state, machine_bytes


def decode_peer_state(machine: StateMachine, content: bytes) -> tuple[ClusterState, bytes]:
    """Decode a peer's snapshot. Raises `rt.FormatError`, or `rt.UnknownVersion` if a newer program made
    it.
    """
    try:
        state, machine_bytes = decode_state(content)
        machine.check(machine_bytes)
    except UnknownVersion as error:
        error.where = "a snapshot that a peer sent; the files of this node are unchanged"
        raise
    return state, machine_bytes


class SnapshotInstaller:
    def __init__(
        self,
        services: NodeServices,
        state_fetcher: StateFetcher,
        adopt_state: Callable[[ClusterState, bytes], None],
    ) -> None:
        self._own, self._raft = services.own, services.raft
        self._decode = partial(decode_snapshot, services.config, services.own.identity.disk, services.machine)
        self._snapshots, self._worker = services.snapshots, services.worker
        self._state_fetcher, self._adopt_state = state_fetcher, adopt_state
        self.incoming: SnapshotReceiver | None = None
        """The transfer in progress."""
        self.is_installing = False
        """All chunks are received, and the snapshot is being made durable."""

    def on_install_snapshot(self, peer: str, hello: Hello, chunk: InstallSnapshot) -> None:
        meta = SnapshotMeta(hello.cluster, hello.epoch, chunk.snapshot, chunk.length, chunk.digest)
        if hello.cluster == NO_ID or self._state_fetcher.is_installing:
            return  # A blank peer cannot lead.
        self._state_fetcher.give_up()
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
        """Drop the transfer, unless the snapshot is being made durable."""
        if self.incoming is not None and not self.is_installing:
            self.incoming.abandon()
            self.incoming = None

    def abandon_overtaken(self) -> None:
        """Drop the transfer if this node has already applied the log up to the snapshot's index."""
        if self.incoming is not None and self.incoming.meta.place.index <= self._own.state.applied.index:
            self.give_up()

    def _install(self, peer: str, term: int, meta: SnapshotMeta, incoming: SnapshotReceiver) -> None:
        self.is_installing = True
        self._worker.run(
            lambda: incoming.finish(partial(self._decode, meta)),
            lambda found: self._on_installed(peer, term, meta, *found),
            self._on_failed,
        )

    def _on_installed(
        self, peer: str, term: int, meta: SnapshotMeta, state: ClusterState, machine_bytes: bytes
    ) -> None:
        self.incoming, self.is_installing = None, False
        if meta.place.index <= self._raft.committed:
            return  # The log has advanced further in the meantime.
        logger.info("snapshot_installed index=%d bytes=%d", meta.place.index, meta.length)
        self._adopt_state(state, machine_bytes)
        self._acknowledge(peer, term, meta, meta.length, meta.length, is_all=True)

    def _on_failed(self, error: BaseException) -> None:
        incoming, self.incoming, self.is_installing = self.incoming, None, False
        is_handled = isinstance(error, FormatError | ClusterMismatch | DiskFull)
        if isinstance(error, UnknownVersion) or not is_handled:
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
