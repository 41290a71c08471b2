"""The interface between the sequencer and its consensus.

Invariants:
- All nodes apply the same command as number `index`, in order, without gaps, once per run of the node.
- A completed future names a command that a majority has synced.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from sequencer.raft.model.epochs import NoMajority


class StateMachine(Protocol):
    """Applies committed commands. All calls come from the consensus thread, one at a time.

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


@dataclass(frozen=True, slots=True)
class MemberStatus:
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
    """On the leader: up to which index its synced log agrees. None elsewhere."""


@dataclass(frozen=True, slots=True)
class Status:
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
    leader_committed: int = 0
    """Commit index that a leader last sent. It may be above `committed`."""
    received: tuple[int, int] | None = None
    """While a snapshot is received: bytes received, total bytes."""


class Consensus(Protocol):
    """A replicated log of commands. Every method may be called from any thread."""

    def propose(self, command: bytes) -> Future[int]:
        """Commit a command; the future returns its index after this node has applied it.

        The command is forwarded to the leader, retried after a leader failure, and applied exactly once.
        Proposals of one thread are applied in order. A command may still be committed after the caller
        stopped waiting for its future.

        Raises `rt.Overloaded` with too much in flight, `rt.MessageTooLarge` above 1 MiB and `rt.Closed`;
        a future fails with `rt.Closed` when the node stops: the outcome is then unknown.
        """

    def call_soon(self, call: Callable[[], None]) -> None:
        """Run `call` on the consensus thread, between two calls of the machine, in order.

        Pending calls are dropped when the node stops. An exception in `call` stops the node.
        """

    def send(self, peer: str, content: bytes) -> bool:
        """Send a message to another member. It may be lost; delivered messages keep their order.

        On the consensus thread only. Returns False if the peer is not connected. At the peer,
        `on_app_message` gets it.
        """

    def reset(self, command: bytes) -> None:
        """End this epoch of the cluster with `command`, the last one that any node applies in it.

        On the consensus thread only. The request may be lost: repeat it until the command is applied or the
        epoch changes. Every node that applied it ends with `on_epoch_over`; open futures fail. When opened
        again it continues in the next epoch, with its state at that time.
        """

    def force(self, command: bytes) -> NoMajority | None:
        """Without a majority, start an epoch with this node's state and `command`. Returns None if it has
        started.

        On the consensus thread only, and only if an operator says that the other nodes are lost. Entries of
        this node's log that may not be committed are applied, too; commands that this node never received are
        lost. From then on the disks count that belong to this node and to the members that are connected and
        blank. Together they must be a majority; otherwise the reason is returned, and nothing changes. All
        other nodes must be wiped. Ends as `reset` does.
        """

    def transfer_leadership(self, timeout_s: float) -> bool:
        """If this node leads, transfer leadership to the most up-to-date member.

        Returns whether another member leads: at once if this node does not lead, else when another leader is
        known, after `timeout_s` at most. Commands proposed meanwhile wait. If the transfer fails, this node
        remains leader. Must not be called on the consensus thread.
        """

    @property
    def is_leader(self) -> bool:
        """Whether this node believes that it leads, and has applied all entries of earlier terms."""

    @property
    def leader(self) -> str | None:
        """The leader as this node knows it."""

    def status(self) -> Status: ...

    def stop(self) -> None:
        """Stop the node. Closes all connections and threads, except a thread that waits for name resolution.

        Idempotent.
        """
