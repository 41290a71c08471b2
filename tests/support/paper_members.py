"""A member of a cluster as the tests of the Raft paper drive it, and its snapshots."""

from __future__ import annotations

import hashlib

from disks import Keep
from raft_bench import (
    CLUSTER,
    Clock,
    Driven,
    ListMachine,
    config_of,
    disk_id,
)

from sequencer.raft.model.cluster_state import encode_state, initial_state
from sequencer.raft.model.messages import (
    InstallSnapshot,
    RaftEntry,
)

NAMES = ["n1", "n2", "n3", "n4", "n5"]
AFTER: list[Keep | None] = [None, "none", "some"]
"""How a run ends: kill -9, a power cut that loses all unsynced data, one that loses some of it."""


def member(clock: Clock, members: int = 3, **settings: object) -> Driven:
    """Return a member of a new cluster, all peers connected. It has not heard from a leader yet."""
    driven = Driven(clock, config_of("n1", NAMES[:members], **settings))
    driven.adopt()
    return driven


def clear_leader(driven: Driven) -> None:
    """Advance the clock until the leader no longer counts as heard."""
    driven.clock.advance(driven.config.election_ms_min / 1000 + 0.001)


def commit_of(driven: Driven, index: int) -> None:
    """As a leader, receive acknowledgements up to `index` from a majority, and commit."""
    for peer in driven.config.peers[: len(driven.config.members) // 2]:
        driven.acknowledge(peer, index)
    driven.step()
    assert driven.status.committed >= index


class Snapshot:
    """The snapshot of a leader that has applied these entries after the first one."""

    def __init__(self, entries: tuple[RaftEntry, ...], disks: dict[str, bytes] | None = None) -> None:
        state, machine = (
            initial_state(CLUSTER, 1, disks or {name: disk_id(name) for name in NAMES[:3]}),
            ListMachine(),
        )
        for entry in entries:
            applied = state.apply(entry)
            if applied is not None and applied.first is not None:
                for index, command in enumerate(applied.pack.commands, applied.first):
                    machine.apply(index, command)
        self.place, self.commands = state.applied, machine.commands
        self.content = encode_state(state) + machine.snapshot()()
        self.digest = hashlib.sha256(self.content).digest()

    def chunk(self, term: int, start: int, end: int) -> InstallSnapshot:
        return InstallSnapshot(
            term, self.place, len(self.content), self.digest, start, self.content[start:end]
        )

    def chunks(self, term: int, size: int = 100) -> list[InstallSnapshot]:
        return [self.chunk(term, at, at + size) for at in range(0, len(self.content), size)]
