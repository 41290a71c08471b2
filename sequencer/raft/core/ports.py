"""What the protocol (`hardened`) asks of the node around it.

The network as a Raft node sees it: queue, flush, wait. `transport` is the real one.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from sequencer.raft.model.messages import Admit, Forward, Hello, InstallSnapshot, Message, RaftEntry
from sequencer.raft.storage.snapshots import SnapshotReader


class NodeCallbacks(Protocol):
    """The node around the protocol. Called by the loop only."""

    def submit(self) -> None:
        """Called once in each round, behind applying: submit what waits to be proposed.

        That is done through `SyncObj.submit`, and not while `is_handing_over`.
        """

    def on_commit(self, entry: RaftEntry) -> None:
        """Apply the next committed entry. It is synced here, and on a majority."""

    def is_over(self) -> bool:
        """Whether this epoch has ended here: nothing more is applied in it, or taken into its log."""

    def on_chunk(self, peer: str, chunk: InstallSnapshot) -> None:
        """A piece of a snapshot that covers more than is committed here; `SyncObj.send` the reply."""

    def on_adopt(self, peer: str, adopt: Admit) -> None:
        """The first snapshot of a new cluster."""

    def on_forward(self, peer: str, forward: Forward) -> bool:
        """Whether what the peer wants to have appended is well-formed."""

    def open_snapshot(self) -> SnapshotReader:
        """The newest snapshot, for a follower."""

    def housekeeping(self) -> None:
        """Called once in each round of the loop."""

    def due(self) -> float:
        """When `housekeeping` is to be called next, on PySyncObj's clock."""


class MessageReceiver(Protocol):
    """Who gets what arrives. Called only from inside `Network.poll`, on its thread; may call `send`."""

    def on_up(self, peer: str, hello: Hello) -> None:
        """A connection with the member `peer` stands, and this is how it introduced itself.

        An older connection with it, if any, was reported down before.
        """

    def on_message(self, peer: str, message: Message) -> None:
        """A message of `peer`, in the order it was sent on this connection."""

    def on_down(self, peer: str) -> None:
        """The connection with `peer` ended; messages that were queued or under way may be lost."""


class Network(Protocol):
    """Connections with the other members, one each. One thread uses it, but for `wake`."""

    @property
    def connected(self) -> Collection[str]:
        """Peers whose connection stands, both hellos exchanged."""

    def start(self, receiver: MessageReceiver, hello: Hello) -> None:
        """Listen and dial; `hello` introduces us on every connection from now on."""

    def introduce(self, hello: Hello) -> None:
        """Introduce us by another hello from now on: every connection is closed and made again."""

    def send(self, peer: str, message: Message) -> bool:
        """Queue a message; nothing leaves before `flush`. False if `peer` is not connected: it is dropped."""

    def flush(self) -> None:
        """Let everything queued leave: called when all that the messages depend on is synced."""

    def poll(self, timeout_s: float) -> None:
        """Wait until something arrives, `wake` is called or the time is over; give it to the receiver."""

    def wake(self) -> None:
        """End a `poll`, the present or the next one. Any thread may call this, a signal handler too."""

    def close(self) -> None:
        """Close all connections. Closing twice is allowed."""
