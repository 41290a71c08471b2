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
from sequencer.raft.model.entry_codec import (
    JoinEntry,
    decode_join,
)

NAMES = ["n1", "n2", "n3", "n4", "n5"]
HOST = "127.0.0.1"


def member(clock: Clock, members: int = 3, **settings: Any) -> Driven:
    """A member of a new cluster, all peers connected, that has heard of nobody yet."""
    driven = Driven(clock, config_of("n1", NAMES[:members], **settings))
    driven.adopt()
    return driven


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
