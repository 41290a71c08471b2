"""Interfaces that the protocol needs from the node around it and from the network."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, Protocol, TypeAlias

from sequencer.raft.model.messages import Forward, Hello, InstallSnapshot, Message, RaftEntry
from sequencer.raft.storage.snapshots import SnapshotReader

Handlers: TypeAlias = dict[type, Callable[[str, Any], None]]
"""For each class of message, the function that receives the sender and the message."""


class NodeCallbacks(Protocol):
    """The node around the protocol. Only the loop calls these methods."""

    def submit(self) -> None:
        """Called once in each round, after applying. Must submit the waiting commands with `SyncObj.submit`.

        Must not do so while `LeaderRole.is_transferring`.
        """

    def on_commit(self, entry: RaftEntry) -> None:
        """Apply the next committed entry. It is synced here and on a majority."""

    def is_over(self) -> bool:
        """Whether this epoch has ended here: nothing more is applied in it or appended to its log."""

    def on_install_snapshot(self, peer: str, chunk: InstallSnapshot) -> None:
        """Handle a chunk of a snapshot above the commit index. Answer with `SyncObj.send`."""

    def on_forward(self, peer: str, forward: Forward) -> bool:
        """Whether this entry of the peer may be appended."""

    def open_snapshot(self) -> SnapshotReader:
        """The newest snapshot, for a follower."""

    def housekeeping(self) -> None:
        """Called once in each round of the loop."""

    def due(self) -> float:
        """When the loop must run next, on PySyncObj's clock."""


class TermState(Protocol):
    """The interface of `core.SyncObj` for the parts of the protocol: the state of this node in its current
    term.
    """

    @property
    def term(self) -> int: ...

    @property
    def role(self) -> str:
        """leader, follower or candidate."""

    @property
    def leads(self) -> bool: ...

    @property
    def leader(self) -> str | None: ...

    @property
    def committed(self) -> int: ...

    @property
    def round_began(self) -> float: ...

    def adopt_term(self, term: int) -> None:
        """Become a follower in a later term."""

    def send(self, peer: str, message: Message) -> None:
        """Queue a message; it is sent after the next sync."""


class MessageReceiver(Protocol):
    """Receives the events of the network. Called only from inside `Network.poll`, on its thread. It may call
    `send`.
    """

    def on_awake(self) -> None:
        """`poll` no longer waits. Until the next call of `poll`, `wake` is not needed."""

    def on_up(self, peer: str, hello: Hello) -> None:
        """The connection with `peer` is established, and `hello` was received on it.

        For an older connection with this peer, `on_down` was called before.
        """

    def on_message(self, peer: str, message: Message) -> None:
        """Messages of one connection arrive in the order in which they were sent."""

    def on_down(self, peer: str) -> None:
        """The connection with `peer` ended. Queued messages may be lost."""


class Network(Protocol):
    """One connection with each other member. Used by one thread, except `wake`."""

    @property
    def connected(self) -> Collection[str]:
        """Peers with an established connection, after both hellos."""

    def start(self, receiver: MessageReceiver, hello: Hello) -> None:
        """Listen and dial. Every connection sends `hello` first."""

    def introduce(self, hello: Hello) -> None:
        """Use another hello from now on. Every connection is closed and established again."""

    def set_members(self, members: Mapping[str, str], notice: Message | None) -> None:
        """Talk only to these members from now on. `members`: the address of each member by name, "" if it is
        unknown.

        Connections of other nodes are closed. A node of the stream that is not in `members` is refused. If
        there is a `notice`, the refused node receives it after the hello, as the last frame. No message from
        the refused node is delivered.
        """

    def dial_all(self, *, is_wanted: bool) -> None:
        """Set whether to dial also the members that dial this node, while they are not connected.

        A removed node needs this, because the other nodes no longer dial it.
        """

    def send(self, peer: str, message: Message) -> bool:
        """Queue a message until `flush`. Returns False if `peer` is not connected."""

    def flush(self) -> None:
        """Send everything queued. Called after the sync of all data that the messages depend on."""

    def poll(self, timeout_s: float) -> None:
        """Wait until a message arrives, `wake` is called or the timeout ends. Calls the receiver."""

    def wake(self) -> None:
        """End the current or the next `poll`. Any thread or signal handler may call this."""

    def close(self) -> None:
        """Idempotent."""
