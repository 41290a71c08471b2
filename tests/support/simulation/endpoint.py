"""One end of the simulated network: the messages that a node sends and receives.

Law: nothing is sent before `flush`, and nothing that arrives is visible before `deliver`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, TypeAlias

from sequencer.raft.core.ports import MessageReceiver
from sequencer.raft.model.messages import Hello, Message

Watch: TypeAlias = Callable[[list[tuple[str, Message]]], None]


class Carrier(Protocol):
    """Connects the endpoints: see `network.Wires`."""

    def carry(self, sender: Endpoint, queued: list[tuple[str, Message]]) -> None:
        """Carry the flushed messages of an endpoint to its connected peers."""

    def sever(self, connection: Connection) -> None:
        """Break a connection."""

    def dial_all(self, endpoint: Endpoint) -> None:
        """Connect an endpoint with all others, after a while."""


@dataclass(eq=False, slots=True)
class Connection:
    """One connection. If an end has noticed that the connection is over, `ends` does not contain it."""

    ends: dict[str, Endpoint]
    arrived_at: dict[str, float] = field(default_factory=dict)
    """By receiver: the time before which no later message arrives."""
    lost_from: dict[str, float] = field(default_factory=dict)
    """By sender: messages from this time on are lost. The connection is broken, or the process has ended."""


class Endpoint:
    """The network of one run, as the node sees it (`sequencer.raft.core.ports.Network`).

    `deliver` is the waiting half of `poll`. The simulation calls it when something has arrived.
    """

    def __init__(self, name: str, wires: Carrier, watch: Watch) -> None:
        self.name = name
        self.departs_after = 0.0
        """The time in seconds until the messages flushed in the present round have left."""
        self.inbox: list[Callable[[MessageReceiver], None]] = []
        self.on_arrival: Callable[[], None] = lambda: None
        self.up: dict[str, Connection] = {}
        self._wires = wires
        self._watch = watch
        self._outbox: list[tuple[str, Message]] = []
        self._downs: set[str] = set()
        self._receiver: MessageReceiver | None = None
        self._hello: Hello | None = None
        self.listed: dict[str, str] = {}
        """The members, as the node knows them."""
        self.notice: Message | None = None
        """The message for nodes that are not in the list. None: they get no message."""

    @property
    def hello(self) -> Hello | None:
        """The hello of the node; None before it listens."""
        return self._hello

    @property
    def connected(self) -> Collection[str]:
        """See `Network`."""
        return self.up.keys()

    def start(self, receiver: MessageReceiver, hello: Hello) -> None:
        """See `Network`."""
        self._receiver, self._hello = receiver, hello
        self._wires.dial_all(self)

    def introduce(self, hello: Hello) -> None:
        """See `Network`."""
        self._hello = hello
        for connection in list(self.up.values()):
            self._wires.sever(connection)
            self.drop(connection)
        self._wires.dial_all(self)

    def set_members(self, members: Mapping[str, str], notice: Message | None) -> None:
        """See `Network`."""
        self.listed, self.notice = dict(members), notice
        for peer, connection in list(self.up.items()):
            if peer not in members:
                self._wires.sever(connection)
                self.drop(connection)

    def dial_all(self, *, is_wanted: bool) -> None:
        """See `Network`. Here every node dials every other node."""

    def send(self, peer: str, message: Message) -> bool:
        """See `Network`."""
        if peer not in self.up:
            return False
        self._outbox.append((peer, message))
        return True

    def flush(self) -> None:
        """See `Network`. Sorted by peer: PySyncObj keeps peers in sets, whose order differs between runs."""
        queued, self._outbox = self._outbox, []
        queued = sorted(
            ((peer, message) for peer, message in queued if peer in self.up), key=lambda item: item[0]
        )
        if queued:
            self._watch(queued)
            self._wires.carry(self, queued)

    def poll(self, timeout_s: float) -> None:
        """See `Network`. The simulation waits instead."""

    def deliver(self) -> bool:
        """Pass everything that has arrived to the receiver. Return whether there was anything."""
        assert self._receiver is not None
        arrived, self.inbox = self.inbox, []
        for hand_over in arrived:
            hand_over(self._receiver)
        return bool(arrived)

    def wake(self) -> None:
        """See `Network`."""
        self.on_arrival()

    def close(self) -> None:
        """See `Network`."""

    def drop(self, connection: Connection) -> None:
        """Notice the end of a connection. The receiver hears of it before it hears of a new connection."""
        for peer in [peer for peer, held in self.up.items() if held is connection]:
            del self.up[peer]
            self._outbox = [queued for queued in self._outbox if queued[0] != peer]
            self._downs.add(peer)
            self.inbox.append(partial(self._report_down, peer))
            self.on_arrival()

    def rise(self, connection: Connection, peer: str, hello: Hello) -> None:
        """Report an established connection. An older connection with this peer is over."""

        def report(receiver: MessageReceiver) -> None:
            if connection.ends.get(self.name) is self:
                if peer in self.up:
                    self.drop(self.up[peer])
                self._report_down(peer, receiver)
                self.up[peer] = connection
                receiver.on_up(peer, hello)

        self.inbox.append(report)
        self.on_arrival()

    def _report_down(self, peer: str, receiver: MessageReceiver) -> None:
        if peer in self._downs:
            self._downs.remove(peer)
            receiver.on_down(peer)

    def arrive(self, connection: Connection, peer: str, messages: list[Message]) -> None:
        """Queue messages that arrived on a connection."""

        def hand_over(receiver: MessageReceiver) -> None:
            for message in messages:
                if self.up.get(peer) is connection:
                    receiver.on_message(peer, message)

        self.inbox.append(hand_over)
        self.on_arrival()
