"""Opening a node's directory: identity, snapshot, state and log.

Invariant (rules 3, 6 and 7 of docs/raft.md): a disk that may have voted or acknowledged, and has lost any of
it, does not start. It must be wiped, and rejoins as a new disk.

An epoch starts here. The rename of its first snapshot is the only decisive step. Before the rename the disk
is in the old epoch, with all its data. After the rename every opening continues from any point.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from contextlib import ExitStack, suppress

from msgspec import Struct
from msgspec.structs import replace

from rt.cluster_epoch import is_later, name_of
from rt.errors import ClusterMismatch, DiskFull, LogNotFound, naming_file
from rt.log.disk import Disk, Lock, storage_errors
from sequencer.raft.model.cluster_state import NO_DISK, ClusterState, decode_state
from sequencer.raft.model.config import RaftConfig
from sequencer.raft.model.entry_codec import decode_members
from sequencer.raft.model.messages import NO_ID, NOWHERE, DiskClaim
from sequencer.raft.storage.identity import DiskIdentity, open_identity, store_identity
from sequencer.raft.storage.log import DurableLog
from sequencer.raft.storage.sealed_head import WIPE_HINT, damaged
from sequencer.raft.storage.snapshot_format import snapshot_name
from sequencer.raft.storage.snapshots import SnapshotStore

LOCK_FILE = "lock"

logger = logging.getLogger("sequencer.raft")


class RaftDirectory(Struct):
    """An open, locked directory of a node."""

    lock: Lock
    identity: DiskIdentity
    snapshots: SnapshotStore
    log: DurableLog
    state: ClusterState
    machine_bytes: bytes
    """The state machine's part of the snapshot."""

    def log_opening(self) -> None:
        own, cut, applied = self.identity, self.log.cut, self.state.applied
        logger.info(
            "opened name=%s disk=%s run=%d cluster=%s epoch=%s snapshot=%d log_end=%d term=%d",
            *(own.name, own.disk.hex(), own.run, own.cluster.hex(), name_of(own.epoch)),
            *(applied.index, self.log.last.index + 1, self.log.term),
        )
        if cut is not None:
            logger.warning("torn_tail_cut path=%r offset=%d bytes=%d", *cut)
        missing = sorted(name for name, claim in self.state.disks.items() if claim.disk == NO_ID)
        if missing and not own.is_blank:
            logger.warning("members_without_disk names=%s", ",".join(missing))

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
        newest = snapshots.newest
        if newest is not None and identity.is_blank:  # It crashed between its first snapshot and this.
            identity = replace(identity, cluster=newest.cluster, epoch=newest.epoch)
            store_identity(directory, identity, disk=disk)
        later = _later_epoch(identity, snapshots)
        identity = replace(identity, epoch=identity.epoch if later is None else later)
        state, machine_bytes = _state_of(config, identity, snapshots)
        log = _open_log(config, disk, identity, new_id, config.segment_bytes if fill_segments else 0)
        undo.callback(log.close)
        if not identity.is_blank and not _has_list(state, log):
            state = grown(config, state)
            check_members(config, identity.disk, state)
        if later is None:
            _connect(log, state, directory)
        else:
            _start_epoch(config, disk, identity, log, state)
        joined = joined_identity(identity, state)
        if joined != identity:
            store_identity(directory, joined, disk=disk)
        undo.pop_all()
        return RaftDirectory(lock, joined, snapshots, log, state, machine_bytes)


def joined_identity(identity: DiskIdentity, state: ClusterState) -> DiskIdentity:
    """Return `identity` with the position at which `state` admitted this disk, if it did.

    A disk that was removed and joined again keeps its second join: an older snapshot has the first join.
    """
    claim = state.disks.get(identity.name)
    if claim is None or claim.disk != identity.disk or claim.joined.index < identity.joined.index:
        return identity
    return replace(identity, joined=claim.joined)


def _later_epoch(identity: DiskIdentity, snapshots: SnapshotStore) -> int | None:
    """The later epoch in which this disk must continue: the newest snapshot is of this epoch, the other files
    are not yet.
    """
    newest = snapshots.newest
    if newest is None or newest.cluster != identity.cluster or not is_later(identity.epoch, newest.epoch):
        return None
    return newest.epoch


def _start_epoch(
    config: RaftConfig, disk: Disk, identity: DiskIdentity, log: DurableLog, state: ClusterState
) -> None:
    """Continue in the epoch of the newest snapshot, with an empty log.

    Everything in the log belongs to the previous epoch, whatever the indices are. The identity is written
    last: if the identity names the new epoch, the log belongs to that epoch, too.
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
        raise damaged("the snapshot is missing in the directory of a member", config.directory)
    if (newest.cluster, newest.epoch) != (identity.cluster, identity.epoch):
        raise ClusterMismatch(
            "the snapshot belongs to another cluster or epoch",
            where=config.directory,
            got=f"cluster {newest.cluster.hex()}, epoch {newest.epoch}",
            expected=f"cluster {identity.cluster.hex()}, epoch {identity.epoch}",
            hint=WIPE_HINT,
        )
    with naming_file(os.path.join(config.directory, snapshot_name(newest.place.index))):
        state, machine_bytes = decode_state(snapshots.read())
    if (state.cluster, state.epoch, state.applied) != (newest.cluster, newest.epoch, newest.place):
        raise damaged("the state in the snapshot does not match its header", config.directory)
    return state, machine_bytes


def _has_list(state: ClusterState, log: DurableLog) -> bool:
    """Whether the members were changed. If so, their list is in the log or in the snapshot."""
    if state.members is not None:
        return True
    return any(decode_members(entry.content) is not None for entry in log.entries(log.base.index + 1))


def grown(config: RaftConfig, state: ClusterState) -> ClusterState:
    """Add the other configured members to the state of a single-node cluster; else return it unchanged.

    The disks of the new members do not count yet, and this node alone is no majority. No leader is elected
    until an operator forces an epoch here. That epoch starts with all existing data.
    """
    if set(state.disks) != {config.name}:
        return state
    others = {name: DiskClaim(NO_ID, NOWHERE) for name in config.members if name != config.name}
    return replace(state, disks={**state.disks, **others})


def check_members(config: RaftConfig, disk: bytes, state: ClusterState) -> None:
    """Raises `rt.ClusterMismatch` if the configuration and a state without a list name different members.

    A list in the state replaces the configured one. A disk that does not count in the state may be configured
    with the members of a later list, which it has not received yet.
    """
    is_bound = state.members is None and state.disks.get(config.name, NO_DISK).disk == disk
    if is_bound and set(state.disks) != set(config.members):
        raise ClusterMismatch(
            "the configured members are not the members of the cluster",
            where=config.directory,
            got=", ".join(sorted(state.disks)),
            expected=", ".join(sorted(config.members)),
            hint="Start the node with the cluster's members. Only a cluster of one node can be extended here;"
            " members of a running cluster are added one at a time.",
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
        what = "the Raft log is missing in the directory of a member, so its vote is lost"
        raise damaged(what, config.directory) from error


def _connect(log: DurableLog, state: ClusterState, directory: str) -> None:
    """Restart the log after the snapshot if the log ends before the snapshot's last entry or has another term
    there.
    """
    place = state.applied
    if log.base.index > place.index:
        got, expected = f"entry {log.base.index + 1}", f"entry {place.index + 1} or earlier"
        raise damaged("the Raft log starts after the snapshot", directory, got, expected)
    if log.term_at(place.index) != place.term:
        if place.term > log.term:
            log.set_term(place.term, None)
        log.reset(place)
        log.sync()
