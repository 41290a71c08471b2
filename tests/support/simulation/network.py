"""The network between simulated nodes: connections that open, break and return, and messages in transit.

Law: a message arrives only on the connection on which it was sent, while both ends have that connection, and
not before it was sent. Messages of one direction keep their order, unless `Weather` says otherwise. Then
messages may also be lost or duplicated, which never happens with TCP.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from sequencer.raft.model.messages import Hello, Message
from simulation.endpoint import Connection, Endpoint
from simulation.timeline import Timeline


@dataclass(slots=True)
class Weather:
    """The present conditions for messages, in seconds and probabilities."""

    delay: float = 0.0005
    delay_spread: float = 0.0005
    late: float = 0.0
    """The probability of an extra delay."""
    late_delay: float = 0.1
    """The maximum extra delay. Later messages on the connection wait too."""
    lost: float = 0.0
    doubled: float = 0.0
    overtaken: float = 0.0
    dial_delay: float = 0.02


class Wires:
    """All connections. `blocked` holds the directions (sender, receiver) in which nothing passes."""

    def __init__(self, timeline: Timeline, rng: random.Random, weather: Weather) -> None:
        self.weather = weather
        self.blocked: set[tuple[str, str]] = set()
        self.endpoints: dict[str, Endpoint] = {}
        self._timeline, self._rng = timeline, rng
        self._pairs: dict[tuple[str, str], Connection] = {}
        self._dialling: set[tuple[str, str]] = set()
        self._held: dict[tuple[str, str], list[Callable[[], None]]] = {}

    def attach(self, endpoint: Endpoint) -> None:
        """Add the endpoint of a started process."""
        self.endpoints[endpoint.name] = endpoint

    def detach(self, endpoint: Endpoint, *, notice_after: float) -> None:
        """Remove the endpoint of an ended process. Its peers notice that later, or when it dials again."""
        if self.endpoints.get(endpoint.name) is not endpoint:
            return
        del self.endpoints[endpoint.name]
        for connection in list(self._pairs.values()):
            if connection.ends.get(endpoint.name) is endpoint:
                self.sever(connection, ended=endpoint.name, notice_after=notice_after)

    def connections(self) -> list[Connection]:
        """Return the established connections."""
        return list(self._pairs.values())

    def sever(self, connection: Connection, *, ended: str | None = None, notice_after: float = 0.002) -> None:
        """Break a connection. Each end notices it at its own time. Most messages in transit are lost."""
        now = self._timeline.now
        for sender in connection.ends:
            # Messages that an ended process sent in time still arrive.
            lost_from = now if ended == sender or self._rng.random() < 0.3 else 0.0
            connection.lost_from.setdefault(sender, lost_from)
        for name, endpoint in list(connection.ends.items()):
            if name == ended:
                del connection.ends[name]
            else:
                noticed = now + self._rng.uniform(0.0, 2 * notice_after)
                self._timeline.at(noticed, partial(self._notice, connection, endpoint))
        for pair in [pair for pair, known in self._pairs.items() if known is connection]:
            del self._pairs[pair]
            self._dial_later(pair)

    def unblock(self, directions: set[tuple[str, str]]) -> None:
        """Let messages pass again. Waiting messages come first, as TCP resends them until it gives up."""
        self.blocked -= directions
        for direction in sorted(directions):
            for arrive in self._held.pop(direction, []):
                arrive()

    def dial_all(self, endpoint: Endpoint) -> None:
        """Connect an endpoint with all others, after a while."""
        for other in sorted(self.endpoints):
            if other != endpoint.name:
                self._dial_later((min(other, endpoint.name), max(other, endpoint.name)))

    def carry(self, sender: Endpoint, queued: list[tuple[str, Message]]) -> None:
        """Carry the flushed messages of a node."""
        by_peer: dict[str, list[Message]] = {}
        for peer, message in queued:
            by_peer.setdefault(peer, []).append(message)
        departs = self._timeline.now + sender.departs_after
        for peer, messages in by_peer.items():
            if self.weather.lost or self.weather.doubled or self.weather.overtaken:
                self._carry_badly(sender, peer, messages, departs)
            else:
                self._carry_in_order(sender, peer, messages, departs)

    def _carry_in_order(self, sender: Endpoint, peer: str, messages: list[Message], departs: float) -> None:
        connection = sender.up[peer]
        arrives = max(departs + self._delay(), connection.arrived_at.get(peer, 0.0))
        connection.arrived_at[peer] = arrives
        self._timeline.at(arrives, partial(self._arrive, connection, sender.name, peer, messages, departs))

    def _carry_badly(self, sender: Endpoint, peer: str, messages: list[Message], departs: float) -> None:
        connection, weather, rng = sender.up[peer], self.weather, self._rng
        for message in messages:
            for _ in range(1 + (rng.random() < weather.doubled)):
                if rng.random() < weather.lost:
                    continue
                if rng.random() < weather.overtaken:
                    arrives = departs + self._delay() + rng.uniform(0.0, weather.late_delay)
                    self._timeline.at(
                        arrives, partial(self._arrive, connection, sender.name, peer, [message], departs)
                    )
                else:
                    self._carry_in_order(sender, peer, [message], departs)

    def _delay(self) -> float:
        weather = self.weather
        delay = weather.delay + self._rng.expovariate(1.0) * weather.delay_spread
        if weather.late and self._rng.random() < weather.late:
            delay += self._rng.uniform(0.0, weather.late_delay)
        return delay

    def _arrive(
        self, connection: Connection, sender: str, peer: str, messages: list[Message], departs: float
    ) -> None:
        end = connection.ends.get(peer)
        if end is None or departs >= connection.lost_from.get(sender, float("inf")):
            return
        if (sender, peer) in self.blocked:
            held = partial(self._arrive, connection, sender, peer, messages, departs)
            self._held.setdefault((sender, peer), []).append(held)
            return
        end.arrive(connection, sender, messages)

    def _notice(self, connection: Connection, endpoint: Endpoint) -> None:
        if connection.ends.get(endpoint.name) is endpoint:
            del connection.ends[endpoint.name]
            endpoint.drop(connection)

    def _refuse(self, one: Endpoint, by: Endpoint) -> None:
        """Send `one` the hello and the notice of `by`, if `by` does not list it as a member."""
        hello, notice = by.hello, by.notice
        if one.name in by.listed or by.name not in one.listed or one.hello is None:
            return
        if hello is None or notice is None or {(one.name, by.name), (by.name, one.name)} & self.blocked:
            return
        connection, rises = Connection({one.name: one}), self._timeline.now + self._delay()
        self._timeline.at(rises, partial(one.rise, connection, by.name, hello))
        self._timeline.at(rises + self._delay(), partial(one.arrive, connection, by.name, [notice]))
        self._timeline.at(rises + 0.2, partial(self._notice, connection, one))

    def _dial_later(self, pair: tuple[str, str], *, seldom: float = 1.0) -> None:
        if pair not in self._dialling:
            self._dialling.add(pair)
            delay = seldom * self.weather.dial_delay * self._rng.uniform(0.2, 2.0)
            self._timeline.after(delay, partial(self._dial, pair))

    def _dial(self, pair: tuple[str, str]) -> None:
        self._dialling.discard(pair)
        one, two = (self.endpoints.get(name) for name in pair)
        if one is None or two is None or pair in self._pairs:
            return
        if one.name not in two.listed or two.name not in one.listed:
            self._refuse(one, two)
            self._refuse(two, one)
            self._dial_later(pair, seldom=20)
            return
        if one.hello is None or two.hello is None or {pair, pair[::-1]} & self.blocked:
            self._dial_later(pair)
            return
        connection = self._pairs[pair] = Connection({one.name: one, two.name: two})
        for end, other in ((one, two), (two, one)):
            rises = connection.arrived_at[end.name] = self._timeline.now + self._delay()
            assert other.hello is not None
            self._timeline.at(rises, partial(self._on_established, connection, end, other.name, other.hello))

    def _on_established(self, connection: Connection, end: Endpoint, peer: str, hello: Hello) -> None:
        stands = self._pairs.get((min(end.name, peer), max(end.name, peer))) is connection
        if stands and connection.ends.get(end.name) is end:
            end.rise(connection, peer, hello)
