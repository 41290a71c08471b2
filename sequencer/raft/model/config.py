"""The settings of a Raft node."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from rt.names import check_name

CLUSTER_SIZES = (1, 3, 5, 7)
PATIENCE_ELECTIONS = 10
"""Number of election timeouts. A node gives up if it has no leader, or differs from every leader, for
longer.
"""


class RaftConfig(Struct, frozen=True):
    """The settings of one node. The times must be the same on all nodes.

    Raises `ValueError` or `rt.InvalidName` for invalid settings.
    """

    name: str
    members: Mapping[str, str]
    """Address "host:port" of each member by name, including this one: 1, 3, 5 or 7 with `bootstrap`.

    They are in force until the first change of the members. Until then a member that is configured with other
    names refuses to start. After the first change, the list in the log is in force, independent of the
    configuration. The configuration of a node that is to be added contains the node itself and at least one
    member. A cluster of one member can also be extended by this setting. It then waits until an epoch is
    forced.
    """
    directory: str
    """Directory of the log, the snapshots and the disk's identity. It must contain no other files."""
    stream: str
    bootstrap: bool = False
    """Make a new cluster if every member is connected and blank. It never replaces a cluster."""
    heartbeat_ms: int = 75
    """Time between two messages of an idle leader."""
    election_ms_min: int = 300
    """The election timeout is drawn between this and `election_ms_max`."""
    election_ms_max: int = 600
    """A leader that does not hear from a majority for this long steps down.

    The shortest election timeout should be ten times the slowest fsync and four heartbeats.
    """
    snapshot_ms: int = 5000
    """Time between snapshots while something changes. For a large state, it is the minimum time."""
    keep_entries: int = 4096
    """Entries kept before a snapshot, so that a slow follower needs no snapshot."""
    keep_bytes: int = 32 * 2**20
    """Limit for the bytes of those entries."""
    segment_bytes: int = 8 * 2**20
    """Size at which the log rolls to a new segment. Compaction removes only whole segments."""
    commands_max: int = 8192
    """Commands in flight from this node before `propose` raises `rt.Overloaded`."""
    command_bytes_max: int = 64 * 2**20
    """Limit for the bytes of those commands."""
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
        if self.bootstrap and len(self.members) not in CLUSTER_SIZES:
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
    def patience_s(self) -> float:
        return PATIENCE_ELECTIONS * self.election_ms_max / 1000

    @property
    def peers(self) -> list[str]:
        return sorted(set(self.members) - {self.name})
