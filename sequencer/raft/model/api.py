"""The interface between the sequencer and its consensus.

Invariants:
- All nodes apply the same command as number `index`, in order, without gaps, once per run of the node.
- When a future returns an index, a majority has synced the command with this index.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from msgspec import Struct


class StateMachine(Protocol):
    """Applies committed commands. All calls but `check` come from the consensus thread, one at a time.

    An exception stops the node. `apply` must be total and deterministic.
    """

    def apply(self, index: int, command: bytes) -> None:
        """Apply command number `index`. Indices start at 1 and have no gaps.

        After a restart the machine is restored from the last snapshot, and later commands are applied again.
        """

    def snapshot(self) -> Callable[[], bytes]:
        """Freeze the current state, quickly, and return a function that encodes it.

        The function is called once, on another thread, concurrently with `apply`.
        """

    def digest(self) -> bytes:
        """A hash of the state: equal on all nodes that have applied the same commands.

        Must exclude local data that a node stores in its snapshots in addition to the state.
        """

    def check(self, state: bytes) -> None:
        """Check the state in a peer's snapshot. Any thread may call this. Should read only the beginning of
        the state.

        Raises `rt.UnknownVersion` if a newer program encoded the state, so that the node stops before it
        replaces anything.
        """

    def restore(self, index: int, state: bytes, cluster: bytes) -> None:
        """Load the state that `snapshot` encoded after command `index`. Index 0, b"": the initial state.

        `cluster` is the cluster id; 16 zero bytes while this node belongs to no cluster.
        """


class Leadership(NamedTuple):
    """The leader as a node knows it. Two nodes may believe they lead, in different terms."""

    leader: str | None
    term: int
    is_here: bool
    """This node leads and has applied all entries committed in earlier terms, so its state is current."""


class MemberStatus(Struct, frozen=True):
    name: str
    address: str
    is_self: bool
    is_connected: bool
    """Always true for this node."""
    disk: str
    """Hex id of the member's disk that counts, "" if none has joined."""
    is_counted: bool | None
    """Whether its current disk counts and has applied its join. None: it was never connected."""
    match_index: int | None
    """On the leader: index up to which the member's synced log agrees. None on other nodes."""
    votes: bool = True
    """False for a learner."""


class Status(Struct, frozen=True):
    name: str
    role: str
    """leader, follower, candidate, joining (blank, or not admitted yet), stalled (disk full) or stopped."""
    leader: str | None
    term: int
    cluster: str
    """Hex id of the cluster, "" while blank."""
    leader_gap_s: float
    """On a follower: longest time between two messages of its leader, in this term. 0 elsewhere."""
    epoch: int
    """Number of the epoch. Only `epoch_id`, which contains it, is unique: see `epochs`."""
    epoch_id: int
    index: int
    """Number of the last command applied."""
    log_start: int
    """Raft index of the first entry kept."""
    log_end: int
    """Raft index after the last entry."""
    committed: int
    """Raft index of the last entry known to be committed."""
    applied: int
    """Raft index of the last entry applied."""
    chain: int
    """Running checksum of all entries applied: equal on all nodes at equal `applied`."""
    snapshot: int
    """Raft index that the newest snapshot covers."""
    in_flight: int
    """Commands proposed here that are not applied yet."""
    members: tuple[MemberStatus, ...]
    """The newest list that this node has, committed or not."""
    members_index: int = 0
    """Raft index of the last list of members applied; 0: they never changed."""
    leader_committed: int = 0
    """Commit index that a leader last sent. It may be above `committed`."""
    received: tuple[int, int] | None = None
    """While a snapshot is received: bytes received, total bytes."""
