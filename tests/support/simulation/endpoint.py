"""One end of the simulated network: what a node sends and what arrives, as the node has it.

Law: nothing leaves before `flush`, and nothing that arrives is seen before `deliver`.
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
    """What connects the endpoints: see `network.Wires`."""

    def carry(self, sender: Endpoint, queued: list[tuple[str, Message]]) -> None:
        """Take what an endpoint has flushed, to peers whose connection it holds."""

    def sever(self, connection: Connection) -> None:
        """Break a connection."""

    def dial_all(self, endpoint: Endpoint) -> None:
        """Connect an endpoint with all others, in a while."""


@dataclass(eq=False, slots=True)
class Connection:
    """One connection. An end that has noticed that it is over is not in `ends` any more."""

    ends: dict[str, Endpoint]
    arrived_at: dict[str, float] = field(default_factory=dict)
    """By receiver: nothing arrives before what was sent before it."""
    lost_from: dict[str, float] = field(default_factory=dict)
    """By sender: what leaves from then on is lost, as the connection is broken or its process gone."""


class Endpoint:
    """One run's network, as the node has it (`sequencer.raft.core.ports.Network`).

    `deliver` is the waiting half of `poll`, for the simulation to call when something has arrived.
    """

    def __init__(self, name: str, wires: Carrier, watch: Watch) -> None:
        self.name = name
        self.departs_after = 0.0
        """How long the present round takes until what it flushes has left, in seconds."""
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
        """What others get as the last message; None: they get nothing."""

    @property
    def hello(self) -> Hello | None:
        """How it introduces itself; None before it listens."""
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
        """See `Network`. Here everybody dials everybody."""

    def send(self, peer: str, message: Message) -> bool:
        """See `Network`."""
        if peer not in self.up:
            return False
        self._outbox.append((peer, message))
        return True

    def flush(self) -> None:
        """See `Network`. By peer, as PySyncObj keeps peers in sets, whose order differs from run to run."""
        queued, self._outbox = self._outbox, []
        queued = sorted(
            ((peer, message) for peer, message in queued if peer in self.up), key=lambda item: item[0]
        )
        if queued:
            self._watch(queued)
            self._wires.carry(self, queued)

    def poll(self, timeout_s: float) -> None:
        """See `Network`. The simulation waits in its stead."""

    def deliver(self) -> bool:
        """Give the receiver what has arrived; whether anything has."""
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
        """Notice that a connection is over; the receiver hears of it before it hears of another one."""
        for peer in [peer for peer, held in self.up.items() if held is connection]:
            del self.up[peer]
            self._outbox = [queued for queued in self._outbox if queued[0] != peer]
            self._downs.add(peer)
            self.inbox.append(partial(self._report_down, peer))
            self.on_arrival()

    def rise(self, connection: Connection, peer: str, hello: Hello) -> None:
        """A connection stands. An older one with this peer is over."""

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
        """Messages came out of the wire."""

        def hand_over(receiver: MessageReceiver) -> None:
            for message in messages:
                if self.up.get(peer) is connection:
                    receiver.on_message(peer, message)

        self.inbox.append(hand_over)
        self.on_arrival()
