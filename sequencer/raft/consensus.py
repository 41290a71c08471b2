"""What the sequencer asks of its consensus, and what consensus asks of the sequencer.

Nothing outside `sequencer.raft` needs more than this module. The law: a command that one node hands to its
machine as number `index`, every node hands to its machine as number `index`, once in each life of the node,
in this order, without gaps; and a future that is done names a command that a majority has synced.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from sequencer.raft.epochs import NoMajority


class StateMachine(Protocol):
    """What the committed commands do. All calls come from the consensus thread, one at a time.

    An exception from any of them stops the node: `apply` must be total and the same on every node.
    """

    def apply(self, index: int, command: bytes) -> None:
        """Carry out command number `index`; the one before had `index - 1`, the first ever has 1.

        After a restart the commands behind the last snapshot come again, to a machine restored from it.
        """

    def snapshot(self) -> Callable[[], bytes]:
        """Freeze the state as it is now, quickly, and return what encodes it.

        What is returned is called once, on another thread, while `apply` goes on.
        """

    def digest(self) -> bytes:
        """A hash of the state as it is: the same on every node that has applied the same.

        What a node keeps beside the state for itself, and has in its snapshots, is left out.
        """

    def restore(self, index: int, state: bytes, cluster: bytes) -> None:
        """Become the state that `snapshot` encoded behind command `index`; index 0, b"": the first state.

        `cluster` is the id of the cluster, 16 zeros for as long as this node belongs to none.
        """


class Leadership(NamedTuple):
    """Who leads, as far as a node knows: two may think so at once, in different terms."""

    leader: str | None
    term: int
    is_here: bool
    """This node leads, and has applied all that was committed in earlier terms: it may plan on its state."""


@dataclass(frozen=True, slots=True)
class MemberStatus:
    """One member as this node sees it."""

    name: str
    address: str
    is_self: bool
    is_connected: bool
    """Whether a connection with it stands (always for this node)."""
    disk: str
    """Hex id of the disk that counts for it, "" if none has joined."""
    is_counted: bool | None
    """Whether the disk it runs on now is that one and has applied its join; None: not heard of."""
    match_index: int | None
    """On the leader: how far its synced log is known to agree; None elsewhere."""


@dataclass(frozen=True, slots=True)
class Status:
    """A node's consensus at one moment."""

    name: str
    role: str
    """leader, follower, candidate, joining (blank, or not admitted yet), stalled (disk full) or stopped."""
    leader: str | None
    term: int
    cluster: str
    """Hex id of the cluster, "" while blank."""
    epoch: int
    """Its number; `epoch_id`, of which it is a part, no other epoch has: see `epochs`."""
    epoch_id: int
    index: int
    """Number of the last command applied."""
    log_start: int
    """Raft index of the first entry kept."""
    log_end: int
    """Raft index behind the last entry."""
    committed: int
    """Raft index of the last entry known to be committed."""
    applied: int
    """Raft index of the last entry applied."""
    chain: int
    """Running checksum of all entries applied: equal on all nodes at equal `applied`."""
    snapshot: int
    """Raft index that the newest snapshot covers."""
    in_flight: int
    """Commands proposed here whose outcome is open."""
    members: tuple[MemberStatus, ...]
    leader_committed: int = 0
    """Raft index up to which all is committed, as a leader said last; here it need not be yet."""
    received: tuple[int, int] | None = None
    """Of a snapshot that a peer sends: the bytes that are here, and all of it. None: none is on its way."""


class Consensus(Protocol):
    """A replicated log of commands. Every method may be called from any thread."""

    def propose(self, command: bytes) -> Future[int]:
        """Have a command committed; the future gives its index once this node has applied it.

        It goes through whoever leads, is asked for again when a leader fails, and is still applied once.
        Proposals of one thread are applied in their order. A future can be waited for with a timeout; a
        command whose future was given up may still be committed.

        Raises `rt.Overloaded` with too much in flight, `rt.MessageTooLarge` above 1 MiB and `rt.Closed`;
        a future fails with `rt.Closed` when the node stops: the outcome is then unknown.
        """

    def call_soon(self, call: Callable[[], None]) -> None:
        """Have `call` made on the consensus thread, between two calls of the machine, in order.

        Calls that were not made yet when the node stops are dropped. What one raises stops the node.
        """

    def tell(self, peer: str, content: bytes) -> bool:
        """Send another member something that is no command: it may be lost, but keeps its order if it is not.

        On the consensus thread only. False if the peer is not connected. The other side's `on_told` gets it.
        """

    def reset(self, command: bytes) -> None:
        """Have `command` end this epoch of the cluster: the last one that any node applies in it.

        On the consensus thread only. It may be lost: ask again until it is seen applied, or the epoch is
        another one. Every node that applied it ends with `on_epoch_over`, and goes on in the next epoch,
        with the state as it is then, when it is opened again; futures that are open then fail.
        """

    def force(self, command: bytes) -> NoMajority | None:
        """Without a majority: begin an epoch with what this node has, and `command`; None: it is under way.

        On the consensus thread only, and only because an operator says that the others are lost. Entries of
        this node's log that may not be committed are applied, too; what others committed and this node never
        heard of is lost. The disks that count from then on are this one and those of the members that are
        connected and blank, who must be a majority together: else it says so, and nothing is done. All
        others have to be wiped. Ends as `reset` does.
        """

    def hand_over(self, timeout_s: float) -> bool:
        """If this node leads, have the most up-to-date member lead in its stead; whether another one leads.

        Returns as soon as another is known to lead, at once if this node leads nobody, after `timeout_s`
        seconds at most. Commands that are proposed meanwhile, here or elsewhere, wait. If it fails this node
        goes on leading. On any thread but the consensus thread.
        """

    @property
    def is_leader(self) -> bool:
        """Whether this node leads, as far as it knows, and has applied all committed in earlier terms."""

    @property
    def leader(self) -> str | None:
        """The member that leads, as far as this node knows."""

    def status(self) -> Status:
        """How things stand."""

    def stop(self) -> None:
        """End it: no connection is left when this returns, and no thread but one that waits for a resolver.

        Stopping twice is allowed.
        """
