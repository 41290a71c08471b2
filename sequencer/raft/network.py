"""The network as a Raft node sees it: queue, flush, wait. `transport` is the real one."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from sequencer.raft.messages import Hello, Message


class Receiver(Protocol):
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

    def start(self, receiver: Receiver, hello: Hello) -> None:
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
