"""Members of a Raft cluster under test, and what is in their logs."""

from __future__ import annotations

from typing import Any

from raft_bench import (
    CLUSTER,
    Clock,
    Driven,
    Lockstep,
    Member,
    config_of,
    disk_id,
)

from sequencer.raft.model.cluster_state import encode_state, initial_state
from sequencer.raft.model.entry_codec import JoinEntry, decode_join
from sequencer.raft.model.messages import NOWHERE
from sequencer.raft.proposals import Proposals
from sequencer.raft.storage.identity import DiskIdentity

NAMES = ["n1", "n2", "n3", "n4", "n5"]
HOST = "127.0.0.1"


def member(clock: Clock, members: int = 3, **settings: Any) -> Driven:
    """Return a member of a new cluster, all peers connected. It has not heard from a leader yet."""
    driven = Driven(clock, config_of("n1", NAMES[:members], **settings))
    driven.adopt()
    return driven


def proposals_of(name: str, **limits: int) -> Proposals:
    """Return the in-flight commands of run 1 on the member's disk."""
    identity = DiskIdentity("stream", name, disk_id(name), CLUSTER, 1, NOWHERE, run=0)
    return Proposals(config_of(name, [name], **limits), identity, (1).to_bytes(4))


def first_state(members: list[str], **generations: int) -> bytes:
    disks = {name: disk_id(name, generations.get(name, 0)) for name in members}
    return encode_state(initial_state(CLUSTER, 1, disks))


def other_than(cluster: Lockstep, *names: str) -> str:
    return next(name for name in cluster.names if name not in names)


def joins_in(driven: Member) -> list[JoinEntry]:
    return [join for entry in driven.log[1:] if (join := decode_join(entry.content))]


def reconnect(driven: Driven, peer: str, **hello: Any) -> None:
    driven.wire.drop(peer)
    driven.step()
    driven.up(peer, **hello)
    driven.step()
