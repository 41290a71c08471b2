"""What a host does about queues, by what it sees of the others. No clock, no leases: times come in.

Law: a policy asks only for what nobody has, and gives up only what another host is to have; that two hosts
see different things for a while is for leases to make safe.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from rt.streams.ids import QueueId
from rt.streams.mapping import QueueMapper
from rt.streams.placing import best_fit, ideal_fit, ring_parts, share_of


@dataclass(frozen=True, slots=True)
class View:
    """What a host sees."""

    host: str
    hosts: frozenset[str]
    """Those that are there, this one too once it has joined."""
    mapper: QueueMapper
    held: Sequence[QueueId]
    """Served here, the one that was won first before the others."""
    taken: frozenset[QueueId]
    """Not to be had now: others have them, or they are about to go from here."""
    now_s: float


class Wishes(NamedTuple):
    """What a host is to do now."""

    give_up: Sequence[QueueId] = ()
    take: Sequence[QueueId] = ()


class Policy(Protocol):
    """Decides for one host."""

    def wishes(self, view: View) -> Wishes:
        """What is to be done; asked again and again, with times that never go back."""


class RingPolicy:
    """Queues belong to the host whose part of the ring they lie in."""

    def __init__(self) -> None:
        self._seen: tuple[str, frozenset[str], QueueMapper] | None = None
        self._mine: list[QueueId] = []
        """What that view came to: most looks see the same hosts."""

    def wishes(self, view: View) -> Wishes:
        """Who joins takes parts of others; who leaves leaves its own to the hosts behind it."""
        seen = view.host, view.hosts, view.mapper
        if seen != self._seen:
            parts = ring_parts(view.host, view.hosts)
            self._seen, self._mine = seen, [queue for part in parts for queue in view.mapper.queues_in(part)]
        return _towards(view, self._mine)


class StaticPolicy:
    """Queues belong to hosts that are known beforehand, dead or alive."""

    def __init__(self, hosts: Collection[str]) -> None:
        self._hosts = frozenset(hosts)

    def wishes(self, view: View) -> Wishes:
        """The same whoever is there."""
        return _towards(view, _named(view, _ideal(self._hosts, view).get(view.host, ())))


class MaturePolicy:
    """As `StaticPolicy`, but what is a missing host's the others share; not yet what is one's that just came.

    A host that was there at the first look is mature, another one `maturity_s` after it was first seen. For
    so long after its own beginning a host serves just its own.
    """

    def __init__(self, hosts: Collection[str], maturity_s: float) -> None:
        self._hosts, self._maturity_s = frozenset(hosts), maturity_s
        self._seen: dict[str, float] | None = None
        """When each host that is there was first seen; long ago, if it was there at the first look."""
        self._began_s = 0.0

    def wishes(self, view: View) -> Wishes:
        """Hosts that are not among those known beforehand count for nothing."""
        self._look(view)
        assert self._seen is not None
        ideal = _ideal(self._hosts, view)
        if view.host not in ideal:
            return _towards(view, [])
        if view.now_s - self._began_s < self._maturity_s:
            return _towards(view, _named(view, ideal[view.host]))
        mature = {host for host, at_s in self._seen.items() if view.now_s - at_s >= self._maturity_s}
        withheld = {name for host in self._seen if host not in mature for name in ideal[host]}
        fit = best_fit(self._hosts, _names(view), mature | {view.host})
        return _towards(view, _named(view, [name for name in fit[view.host] if name not in withheld]))

    def _look(self, view: View) -> None:
        if self._seen is None:
            self._began_s, seen = view.now_s, {}
            first_s = view.now_s - self._maturity_s
        else:
            seen, first_s = self._seen, view.now_s
        self._seen = {host: seen.get(host, first_s) for host in view.hosts if host in self._hosts}


class SharePolicy:
    """Each host has as many as the others, or one more; which ones, falls as it may.

    Who has too many gives up those that it won first.
    """

    def __init__(self, rng: random.Random | None = None) -> None:
        self._rng = rng or random.Random()

    def wishes(self, view: View) -> Wishes:
        """It takes what it lacks of what is free, in an order of its own: hosts seldom want the same then."""
        share = share_of(view.host, view.hosts, len(view.mapper.queues))
        surplus = len(view.held) - share
        if surplus > 0:
            return Wishes(give_up=tuple(view.held[:surplus]))
        mine = set(view.held)
        free = [queue for queue in view.mapper.queues if queue not in mine and queue not in view.taken]
        self._rng.shuffle(free)
        return Wishes(take=tuple(free[:-surplus]) if surplus else ())


def _towards(view: View, wanted: Collection[QueueId]) -> Wishes:
    mine, target = set(view.held), set(wanted)
    return Wishes(
        tuple(queue for queue in view.held if queue not in target),
        tuple(sorted(target - mine - view.taken)),
    )


def _names(view: View) -> list[str]:
    return [queue.name for queue in view.mapper.queues]


def _ideal(hosts: Collection[str], view: View) -> Mapping[str, Sequence[str]]:
    return ideal_fit(hosts, _names(view))


def _named(view: View, names: Collection[str]) -> list[QueueId]:
    found = set(names)
    return [queue for queue in view.mapper.queues if queue.name in found]
