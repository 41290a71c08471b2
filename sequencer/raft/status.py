"""The status of a node's consensus."""

from __future__ import annotations

from collections.abc import Collection

from rt.cluster_epoch import number_of
from sequencer.raft.core.core import SyncObj
from sequencer.raft.core.local_member import LocalMembership
from sequencer.raft.model.api import MemberStatus, Status
from sequencer.raft.model.config import RaftConfig
from sequencer.raft.model.members import RaftMember
from sequencer.raft.model.messages import NO_ID
from sequencer.raft.storage.log import DurableLog
from sequencer.raft.storage.snapshots import SnapshotMeta, SnapshotReceiver


def status_of(
    config: RaftConfig,
    own: LocalMembership,
    raft: SyncObj,
    log: DurableLog,
    *,
    role: str,
    leader: str | None,
    connected: Collection[str],
    newest: SnapshotMeta | None,
    incoming: SnapshotReceiver | None,
    in_flight: int,
) -> Status:
    """The status of a node. Any thread may call this. The parts may be from slightly different times.
    `incoming`: a transfer in progress.
    """
    identity, state = own.identity, own.state
    return Status(
        name=config.name,
        role=role,
        leader=leader,
        term=raft.term,
        cluster="" if identity.is_blank else identity.cluster.hex(),
        leader_gap_s=raft.follower_role.leader_gap_s if role == "follower" else 0.0,
        epoch=number_of(identity.epoch),
        epoch_id=identity.epoch,
        index=state.index,
        log_start=log.base.index + 1,
        log_end=log.last.index + 1,
        committed=raft.committed,
        applied=state.applied.index,
        chain=state.chain,
        snapshot=newest.place.index if newest is not None else 0,
        in_flight=in_flight,
        members=tuple(
            _member(config, own, raft, name, member, is_connected=name in connected, own_end=log.synced.index)
            for name, member in sorted(raft.voter_disks.members.items())
        ),
        members_index=state.members_index,
        leader_committed=raft.follower_role.leader_committed,
        received=None if incoming is None else (incoming.received, incoming.meta.length),
    )


def _member(
    config: RaftConfig,
    own: LocalMembership,
    raft: SyncObj,
    name: str,
    member: RaftMember,
    *,
    is_connected: bool,
    own_end: int,
) -> MemberStatus:
    is_self = name == config.name
    claim = own.state.disks.get(name)
    return MemberStatus(
        name=name,
        address=member.address,
        is_self=is_self,
        is_connected=is_self or is_connected,
        disk=claim.disk.hex() if claim is not None and claim.disk != NO_ID else "",
        is_counted=raft.is_counted_here if is_self else raft.peer_disks.is_counted(name),
        match_index=raft.leader_role.match_index(name) if not is_self else own_end if raft.leads else None,
        votes=member.votes,
    )
