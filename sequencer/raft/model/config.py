"""How a Raft node is set up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rt.names import check_name

CLUSTER_SIZES = (1, 3, 5, 7)


@dataclass(frozen=True, slots=True)
class RaftConfig:
    """One node's settings. The same `members` and times on all nodes.

    Raises `ValueError` or `rt.InvalidName` for a setting that cannot work.
    """

    name: str
    """This member."""
    members: Mapping[str, str]
    """Address "host:port" of each member by name, this one's too; 1, 3, 5 or 7 of them.

    The names are the cluster's from its bootstrap on: a node with others refuses to start. Only a cluster
    of one takes more: it stands still with them until an epoch is forced.
    """
    directory: str
    """Where the log, the snapshots and the identity of this disk are kept; nothing else may be there."""
    stream: str
    """The stream whose cluster this is."""
    bootstrap: bool = False
    """Make a new cluster, if every member is there and blank. May stay set: it never replaces a cluster."""
    heartbeat_ms: int = 75
    """Time between messages of an idle leader."""
    election_ms_min: int = 300
    """A follower that hears no leader for a drawn time between this and ..."""
    election_ms_max: int = 600
    """... this stands for election; a leader that hears no majority for this long steps down.

    The least one is to be ten times as long as the slowest fsync, and four heartbeats.
    """
    snapshot_ms: int = 5000
    """Time between snapshots, while something changes."""
    keep_entries: int = 4096
    """Entries kept behind a snapshot, so that a slow follower needs none."""
    keep_bytes: int = 32 * 2**20
    """Bytes of those entries at most."""
    segment_bytes: int = 8 * 2**20
    """Size at which the log rolls to a new segment. Compaction removes only whole segments."""
    commands_max: int = 8192
    """Commands in flight from this node before `propose` raises `rt.Overloaded`."""
    command_bytes_max: int = 64 * 2**20
    """Bytes of those commands."""
    retry_ms: int = 1000
    """If no command in flight completes for this long, the oldest ones are proposed again.

    When the leader or the connection to it changes, all of them are proposed again at once.
    """

    def __post_init__(self) -> None:
        check_name(self.stream, kind="stream")
        for member in self.members:
            check_name(member, kind="node")
        if self.name not in self.members:
            raise ValueError(f"name {self.name!r} is not in members {sorted(self.members)}")
        if len(self.members) not in CLUSTER_SIZES:
            raise ValueError(f"a cluster needs 1, 3, 5 or 7 members: got {len(self.members)}")
        if not 0 < 3 * self.heartbeat_ms < self.election_ms_min < self.election_ms_max:
            raise ValueError("timeouts must satisfy 0 < 3 * heartbeat_ms < election_ms_min < election_ms_max")
        for field in (
            "snapshot_ms",
            "keep_entries",
            "keep_bytes",
            "segment_bytes",
            "commands_max",
            "retry_ms",
        ):
            if getattr(self, field) <= 0:
                raise ValueError(f"{field} must be above 0")

    @property
    def peers(self) -> list[str]:
        return sorted(set(self.members) - {self.name})
