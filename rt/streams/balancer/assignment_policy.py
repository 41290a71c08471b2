"""Which host should serve which queue. Pure: no clock and no leases; times are passed in.

Invariants:
- A policy requests only free queues, and gives up only queues that another host should have. Hosts may see
  different things for a while; leases keep that safe.
- The assignment depends on names alone, in any order: hosts that see the same hosts compute the same. With
  `MaturePolicy` it also depends on when this host first saw each host. While hosts differ in that, a queue
  may have no host.
- A host that joins or leaves moves few queues.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping, Sequence
from hashlib import blake2b
from itertools import pairwise
from typing import Final, NamedTuple, Protocol, TypeVar

from msgspec import Struct, field

from rt.streams.core.stream_id import RING_SIZE, QueueId
from rt.streams.queue.mapper import QueueMapper, RingRange, ring_points


class HostView(Struct, frozen=True):
    host: str
    hosts: frozenset[str]
    """The present hosts, this one included."""
    mapper: QueueMapper
    held: Sequence[QueueId]
    """Served here, in the order in which they were won."""
    taken: frozenset[QueueId]
    """Not available now: other hosts have them, this host is giving them up, or their cluster is away."""
    now_s: float
    reach: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """By queue name: the hosts that can serve it, if these are not all hosts that are present."""

    def hosts_of(self, queue: QueueId) -> frozenset[str]:
        """The present hosts that can serve the queue."""
        return self.reach.get(queue.name, self.hosts)


class Assignment(NamedTuple):
    """What a host should do now."""

    give_up: Sequence[QueueId] = ()
    take: Sequence[QueueId] = ()


class AssignmentPolicy(Protocol):
    """Decides for one host."""

    def assign(self, view: HostView) -> Assignment:
        """Compute what to do. Called repeatedly, with times that never go back."""


class RingPolicy:
    """Consistent hashing: a queue belongs to the host whose part of the ring contains it."""

    def __init__(self) -> None:
        self._seen: tuple[str, frozenset[str], QueueMapper, Mapping[str, frozenset[str]]] | None = None
        self._mine: list[QueueId] = []
        """The result for the view in `_seen`. Cached, as consecutive polls usually see the same hosts."""

    def assign(self, view: HostView) -> Assignment:
        """A host that joins takes parts of others. A host that leaves gives its parts to the next hosts on
        the ring. A queue that only some hosts can serve has a ring of these hosts.
        """
        seen = view.host, view.hosts, view.mapper, dict(view.reach)
        if seen != self._seen:
            by_hosts = dict[frozenset[str], list[QueueId]]()
            for queue in view.mapper.queues:
                by_hosts.setdefault(view.hosts_of(queue), []).append(queue)
            self._seen, self._mine = seen, []
            for hosts, queues in by_hosts.items():
                parts = ring_parts(view.host, hosts)
                found = {queue for part in parts for queue in view.mapper.queues_in(part)}
                self._mine += [queue for queue in queues if queue in found]
        return _towards(view, self._mine)


class StaticPolicy:
    """Queues belong to a configured set of hosts, whether these are alive or not.

    If a present host cannot serve one of its queues, the queue belongs to another present host that can.
    """

    def __init__(self, hosts: Collection[str]) -> None:
        self._hosts = frozenset(hosts)

    def assign(self, view: HostView) -> Assignment:
        """Independent of which hosts are present, except for queues that some of them cannot serve."""
        return _towards(view, _named(view, _servable(_ideal(self._hosts, view), view)))


class MaturePolicy:
    """Like `StaticPolicy`, but the others share the queues of a host while it is absent. When it is back it
    gets its own queues at once, and a part of other absent hosts' queues once it is mature.

    A host present at the first poll is mature; any other is mature `maturity_s` after it was first seen. For
    `maturity_s` after its start a host serves only its own queues.
    """

    def __init__(self, hosts: Collection[str], maturity_s: float) -> None:
        self._hosts, self._maturity_s = frozenset(hosts), maturity_s
        self._seen: dict[str, float] | None = None
        """When each present host was first seen; the distant past for those present at the first poll."""
        self._began_s = 0.0

    def assign(self, view: HostView) -> Assignment:
        """Hosts that are not configured are ignored."""
        self._update(view)
        assert self._seen is not None
        ideal = _ideal(self._hosts, view)
        if view.host not in ideal:
            return _towards(view, [])
        if view.now_s - self._began_s < self._maturity_s:
            return _towards(view, _named(view, ideal[view.host]))
        mature = {host for host, at_s in self._seen.items() if view.now_s - at_s >= self._maturity_s}
        withheld = {name for host in self._seen if host not in mature for name in ideal[host]}
        fit = best_fit(self._hosts, _names(view), mature | {view.host})
        return _towards(view, _named(view, [name for name in _servable(fit, view) if name not in withheld]))

    def _update(self, view: HostView) -> None:
        if self._seen is None:
            self._began_s, seen = view.now_s, {}
            first_s = view.now_s - self._maturity_s
        else:
            seen, first_s = self._seen, view.now_s
        self._seen = {host: seen.get(host, first_s) for host in view.hosts if host in self._hosts}


class SharePolicy:
    """Each host has the same number of queues as the others, or one more. It may have any queues that it can
    serve.

    A host with too many queues first gives up the queues that the largest number of other hosts can serve.
    Among these it first gives up the queues that it won first. A queue that only one host can serve always
    belongs to that host.
    """

    def __init__(self, rng: random.Random | None = None) -> None:
        self._rng = rng or random.Random()

    def assign(self, view: HostView) -> Assignment:
        """Takes free queues in an order of its own, so hosts seldom compete for the same ones."""
        surplus = len(view.held) - _share(view)
        if surplus > 0:
            others = [queue for queue in view.held if view.hosts_of(queue) - {view.host}]
            others.sort(key=lambda queue: -len(view.hosts_of(queue)))
            return Assignment(give_up=tuple(others[:surplus]))
        mine = set(view.held)
        free = [queue for queue in view.mapper.queues if queue not in mine and queue not in view.taken]
        free = [queue for queue in free if view.host in view.hosts_of(queue)]
        self._rng.shuffle(free)
        free.sort(key=lambda queue: len(view.hosts_of(queue)))
        alone = sum(len(view.hosts_of(queue)) == 1 for queue in free)
        return Assignment(take=tuple(free[: max(-surplus, alone)]))


def _share(view: HostView) -> int:
    """How many queues this host should have. Among the hosts that can serve a queue, a host with few queues
    has it.
    """
    if not view.reach:
        return share_of(view.host, view.hosts, len(view.mapper.queues))
    counts = dict.fromkeys(sorted(view.hosts), 0)
    for queue in sorted(view.mapper.queues, key=lambda queue: len(view.hosts_of(queue))):
        able = [host for host in counts if host in view.hosts_of(queue)]
        if able:
            counts[min(able, key=counts.__getitem__)] += 1
    return counts.get(view.host, 0)


def _towards(view: HostView, wanted: Collection[QueueId]) -> Assignment:
    mine, target = set(view.held), set(wanted)
    return Assignment(
        tuple(queue for queue in view.held if queue not in target),
        tuple(sorted(target - mine - view.taken)),
    )


def _servable(shares: Mapping[str, Sequence[str]], view: HostView) -> list[str]:
    """The queues of this host by `shares`. Queues that it cannot serve are left out. Some queues that other
    present hosts cannot serve are added. The same host gets such a queue in the view of every host.
    """
    mine: list[str] = []
    for host, names in shares.items():
        for name in names:
            owner, able = host, view.reach.get(name)
            if able is not None and host in view.hosts and host not in able:
                others = [each for each in shares if each in view.hosts and each in able]
                owner = min(others, key=lambda each: _rank(each, name), default=host)
            if owner == view.host and (able is None or owner in able):
                mine.append(name)
    return mine


def _rank(host: str, name: str) -> bytes:
    """Rendezvous hashing: the host with the lowest rank has the queue."""
    return blake2b(f"{host}\n{name}".encode(), digest_size=16).digest()


def _names(view: HostView) -> list[str]:
    return [queue.name for queue in view.mapper.queues]


def _ideal(hosts: Collection[str], view: HostView) -> Mapping[str, Sequence[str]]:
    return ideal_fit(hosts, _names(view))


def _named(view: HostView, names: Collection[str]) -> list[QueueId]:
    found = set(names)
    return [queue for queue in view.mapper.queues if queue.name in found]


VIRTUAL_NODES: Final = 64
"""Points of a host on the ring. Shares then differ by about an eighth."""

R = TypeVar("R", str, int)


def ideal_fit(buckets: Collection[str], resources: Collection[R]) -> dict[str, list[R]]:
    """Contiguous runs of the resources, in the order of the buckets. The first buckets get one more if
    needed.
    """
    ordered, rest = sorted(set(buckets)), sorted(set(resources))
    if not ordered:
        raise ValueError("no buckets")
    lower, more = divmod(len(rest), len(ordered))
    shares: dict[str, list[R]] = {}
    start = 0
    for index, bucket in enumerate(ordered):
        end = start + lower + (index < more)
        shares[bucket], start = rest[start:end], end
    return shares


def best_fit(
    buckets: Collection[str], resources: Collection[R], active: Collection[str] | None = None
) -> dict[str, list[R]]:
    """The resources of each active bucket (default: all): its ideal share, plus a part of the shares of
    inactive buckets. Each of those goes to the bucket with the fewest.

    An active bucket never loses its ideal share. `ValueError` for an unknown active bucket.
    """
    ideal = ideal_fit(buckets, resources)
    present = sorted(ideal if active is None else set(active))
    if strange := [bucket for bucket in present if bucket not in ideal]:
        raise ValueError(f"unknown bucket: {strange[0]}")
    shares = {bucket: list(ideal[bucket]) for bucket in present}
    if not shares:
        return {}
    left = sorted(one for bucket, share in ideal.items() if bucket not in shares for one in share)
    while left:
        by_load = sorted(shares, key=lambda bucket: len(shares[bucket]))
        for bucket, one in zip(by_load, left, strict=False):
            shares[bucket].append(one)
        left = left[len(by_load) :]
    return shares


def share_of(host: str, hosts: Collection[str], count: int) -> int:
    """How many of `count` queues a host should have. The shares add up to `count`. 0 for an unknown host."""
    ordered = sorted(set(hosts))
    if host not in ordered:
        return 0
    lower, more = divmod(count, len(ordered))
    return lower + (ordered.index(host) < more)


def ring_parts(host: str, hosts: Collection[str], *, points: int = VIRTUAL_NODES) -> Sequence[RingRange]:
    """The parts of the ring that belong to the host. A part ends at one of its points and starts after the
    previous point of any host. The parts of all hosts cover the ring exactly once.
    """
    ordered = ring_points(hosts, points)
    if not ordered:
        return ()
    return tuple(
        RingRange((before + 1) % RING_SIZE, place + 1)
        for (before, _), (place, owner) in pairwise([ordered[-1], *ordered])
        if owner == host
    )
