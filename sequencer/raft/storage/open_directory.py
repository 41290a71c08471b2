"""Opening a node's directory: identity, snapshot, state and log.

Invariant (rules 3, 6 and 7 of docs/raft.md): a disk that may have voted or acknowledged, and has lost any of
it, does not start. It must be wiped, and rejoins as a new disk.

An epoch starts here. The rename of its first snapshot is the only decisive step: before it the disk is in the
old epoch with everything of its own; after it every opening continues from any point.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace

from rt.cluster_epoch import is_later
from rt.errors import ClusterMismatch, Corrupt, DiskFull, LogNotFound
from rt.log.disk import Disk, Lock, storage_errors
from sequencer.raft.model.cluster_state import ClusterState, decode_state
from sequencer.raft.model.config import RaftConfig
from sequencer.raft.model.messages import NO_ID, NOWHERE, DiskClaim
from sequencer.raft.storage.identity import DiskIdentity, open_identity, store_identity
from sequencer.raft.storage.log import DurableLog
from sequencer.raft.storage.snapshots import SnapshotStore

LOCK_FILE = "lock"
_WIPE = "Stop the node, empty the directory, start the node: it rejoins if the other nodes are a majority."


@dataclass(slots=True)
class RaftDirectory:
    """An open, locked directory of a node."""

    lock: Lock
    identity: DiskIdentity
    snapshots: SnapshotStore
    log: DurableLog
    state: ClusterState
    machine_bytes: bytes
    """The state machine's part of the snapshot."""

    def close(self) -> None:
        self.log.close()
        self.snapshots.close()
        self.lock.close()


def open_directory(
    config: RaftConfig, disk: Disk, new_id: Callable[[], bytes], *, fill_segments: bool = False
) -> RaftDirectory:
    """Open a node's directory and start a new run; creates a blank directory if there is none.

    `fill_segments`: fill the log's files in advance, which makes its syncs faster: see `DurableLog`. Raises
    `rt.DirectoryLocked`, `rt.Corrupt`, `rt.ClusterMismatch`, `rt.StorageError`.
    """
    directory = config.directory
    with ExitStack() as undo:
        with storage_errors(directory, "locking a Raft directory"):
            disk.make_directory(directory)
            lock = disk.lock(os.path.join(directory, LOCK_FILE))
        undo.callback(lock.close)
        identity = open_identity(directory, stream=config.stream, name=config.name, disk=disk, new_id=new_id)
        snapshots = SnapshotStore.open(directory, disk=disk)
        undo.callback(snapshots.close)
        identity = _adopted(config, disk, identity, snapshots)
        later = _later_epoch(identity, snapshots)
        identity = replace(identity, epoch=identity.epoch if later is None else later)
        state, machine_bytes = _state_of(config, identity, snapshots)
        log = _open_log(config, disk, identity, new_id, config.segment_bytes if fill_segments else 0)
        undo.callback(log.close)
        if later is None:
            _connect(log, state, directory)
        else:
            _start_epoch(config, disk, identity, log, state)
        identity = joined_identity(config, disk, identity, state)
        undo.pop_all()
        return RaftDirectory(lock, identity, snapshots, log, state, machine_bytes)


def joined_identity(
    config: RaftConfig, disk: Disk, identity: DiskIdentity, state: ClusterState
) -> DiskIdentity:
    """Store the place where `state` admitted this disk. Durable on return."""
    claim = state.disks.get(config.name)
    if claim is None or claim.disk != identity.disk or claim.joined == identity.joined:
        return identity
    identity = replace(identity, joined=claim.joined)
    store_identity(config.directory, identity, disk=disk)
    return identity


def adopt_cluster(
    config: RaftConfig, disk: Disk, identity: DiskIdentity, cluster: bytes, epoch: int
) -> DiskIdentity:
    """Store the cluster and epoch, of which a snapshot is durable. Durable on return."""
    assert identity.cluster in {NO_ID, cluster}, identity
    identity = replace(identity, cluster=cluster, epoch=epoch)
    store_identity(config.directory, identity, disk=disk)
    return identity


def _adopted(
    config: RaftConfig, disk: Disk, identity: DiskIdentity, snapshots: SnapshotStore
) -> DiskIdentity:
    """After a crash between the first snapshot and the identity, complete the identity."""
    if snapshots.newest is None or not identity.is_blank:
        return identity
    return adopt_cluster(config, disk, identity, snapshots.newest.cluster, snapshots.newest.epoch)


def _later_epoch(identity: DiskIdentity, snapshots: SnapshotStore) -> int | None:
    """The epoch that this disk must continue in: the newest snapshot is of it, the rest is not yet."""
    newest = snapshots.newest
    if newest is None or newest.cluster != identity.cluster or not is_later(identity.epoch, newest.epoch):
        return None
    return newest.epoch


def _start_epoch(
    config: RaftConfig, disk: Disk, identity: DiskIdentity, log: DurableLog, state: ClusterState
) -> None:
    """Continue in the epoch of the newest snapshot, with an empty log.

    Everything in the log belongs to the previous epoch, whatever its indices. The identity is written last:
    if it names the epoch, the log belongs to it, too.
    """
    place = state.applied
    if place.term > log.term:
        log.set_term(place.term, None)
    log.reset(place)
    log.sync()
    with suppress(DiskFull):  # Then the files of the old epoch are removed later.
        log.roll()
        log.compact(place.index + 1)
    store_identity(config.directory, identity, disk=disk)


def _state_of(
    config: RaftConfig, identity: DiskIdentity, snapshots: SnapshotStore
) -> tuple[ClusterState, bytes]:
    newest = snapshots.newest
    if newest is None:
        if identity.is_blank:
            return ClusterState(NO_ID, 0, {}, applied=NOWHERE), b""
        raise Corrupt(
            "the snapshot is missing in the directory of a member",
            path=config.directory,
            offset=0,
            hint=_WIPE,
        )
    if (newest.cluster, newest.epoch) != (identity.cluster, identity.epoch):
        raise ClusterMismatch(
            "the snapshot belongs to another cluster or epoch",
            where=config.directory,
            got=f"cluster {newest.cluster.hex()}, epoch {newest.epoch}",
            expected=f"cluster {identity.cluster.hex()}, epoch {identity.epoch}",
            hint=_WIPE,
        )
    state, machine_bytes = decode_state(snapshots.read())
    if (state.cluster, state.epoch, state.applied) != (newest.cluster, newest.epoch, newest.place):
        raise Corrupt(
            "the state in the snapshot does not match its header", path=config.directory, offset=0, hint=_WIPE
        )
    state = grown(config, state)
    check_members(config, state)
    return state, machine_bytes


def grown(config: RaftConfig, state: ClusterState) -> ClusterState:
    """Add the other configured members to the state of a single-node cluster; else return it unchanged.

    The disks of the new members do not count yet, and this node alone is no majority. No leader is elected
    until an operator forces an epoch here. That epoch starts with all existing data.
    """
    if set(state.disks) != {config.name}:
        return state
    others = {name: DiskClaim(NO_ID, NOWHERE) for name in config.members if name != config.name}
    return replace(state, disks={**state.disks, **others})


def check_members(config: RaftConfig, state: ClusterState) -> None:
    """Raises `rt.ClusterMismatch` unless the configuration names exactly the members of the cluster.

    Nodes with different member lists could commit different commands.
    """
    if set(state.disks) != set(config.members):
        raise ClusterMismatch(
            "the configured members are not the members of the cluster",
            where=config.directory,
            got=", ".join(sorted(state.disks)),
            expected=", ".join(sorted(config.members)),
            hint="Start the node with the cluster's members. Only a cluster of one node can be extended.",
        )


def _open_log(
    config: RaftConfig, disk: Disk, identity: DiskIdentity, new_id: Callable[[], bytes], fill_bytes: int
) -> DurableLog:
    try:
        return DurableLog.open(
            config.directory,
            disk=disk,
            create_at=NOWHERE if identity.is_blank else None,
            segment_bytes=config.segment_bytes,
            fill_bytes=fill_bytes,
            new_id=new_id,
        )
    except LogNotFound as error:
        raise Corrupt(
            "the Raft log is missing in the directory of a member, so its vote is lost",
            path=config.directory,
            offset=0,
            hint=_WIPE,
        ) from error


def _connect(log: DurableLog, state: ClusterState, directory: str) -> None:
    """Restart the log after the snapshot if it ends before it or has another term there."""
    place = state.applied
    if log.base.index > place.index:
        raise Corrupt(
            "the Raft log starts after the snapshot",
            path=directory,
            offset=0,
            got=f"entry {log.base.index + 1}",
            expected=f"entry {place.index + 1} or earlier",
            hint=_WIPE,
        )
    if log.term_at(place.index) != place.term:
        if place.term > log.term:
            log.set_term(place.term, None)
        log.reset(place)
        log.sync()
