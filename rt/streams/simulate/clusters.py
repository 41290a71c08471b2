"""The leases of many clusters in memory, and the view of a host on them.

`HostLeases` gives the answers that `QueueLeases` gives if a cluster is away for all hosts or for none. Then
the leases of hosts are the same on all clusters that answer, and one row represents them. `HostLeases` counts
the requests that `QueueLeases` makes for these answers.

Invariants:
- A lease ends after its duration without a renewal, or if it is released.
- A cluster that comes back measures the time of its leases from then on, as a new leader does.
"""

from __future__ import annotations

import asyncio
import heapq
import random
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from rt.streams.balancer.lease import (
    QUEUES,
    LeaseAnswer,
    LeaseHolder,
    LeaseResult,
    OwnedLease,
    until_s,
)
from rt.streams.balancer.queue_leases import LOOK_S
from rt.streams.simulate.options import LATENCY_S

KINDS: Final = ("look", "renew", "acquire", "release")
"""The kinds of requests."""
_UNKNOWN: Final = LeaseAnswer(LeaseResult.TRANSIENT_FAILURE)


class _Row(Struct):
    holder: LeaseHolder
    duration_s: float
    end_s: float


class Clusters:
    """The leases that all clusters hold. `requests` counts the requests to clusters, by kind."""

    def __init__(self, names: Iterable[str], rng: random.Random, now_s: Callable[[], float]) -> None:
        self.names = set(names)
        self.away = frozenset[str]()
        self.requests = Counter[str]()
        self.now_s = now_s
        self.rng = rng
        self._rows: dict[str, _Row] = {}
        self._ends: list[tuple[float, str, int]] = []
        """A heap with an entry for each row. The end in an entry is as of the grant or of a later check."""
        self._token = 0
        self._shown: Mapping[str, LeaseHolder] | None = None

    def duration_of(self, duration_s: float) -> float:
        """How long a lease lasts here without a renewal."""
        return duration_s

    def set_away(self, away: Collection[str]) -> None:
        self._expire()
        for name in self.away - frozenset(away):
            if (row := self._rows.get(f"{QUEUES}{name}")) is not None:
                row.end_s = self.now_s() + row.duration_s
        self.away, self._shown = frozenset(away), None

    def cluster_of(self, lease: str) -> str | None:
        """The cluster of a queue's lease; None for the lease of a host."""
        return lease.removeprefix(QUEUES) if lease.startswith(QUEUES) else None

    def answers(self, lease: str) -> bool:
        cluster = self.cluster_of(lease)
        return cluster not in self.away if cluster is not None else len(self.away) < len(self.names)

    def acquire(self, name: str, owner: str, duration_s: float) -> int:
        """Acquire a lease. Return its token; 0 if the lease is held."""
        self._expire()
        if name in self._rows:
            return 0
        self._token += 1
        lasts_s = self.duration_of(duration_s)
        self._rows[name] = _Row(LeaseHolder(owner, self._token), lasts_s, self.now_s() + lasts_s)
        heapq.heappush(self._ends, (self._rows[name].end_s, name, self._token))
        self._shown = None
        return self._token

    def renew(self, lease: OwnedLease, owner: str) -> bool:
        """Extend the lease if it is held with this token. Return whether it was held."""
        self._expire()
        row = self._rows.get(lease.name)
        if row is None or row.holder != (owner, lease.token):
            return False
        row.end_s = self.now_s() + row.duration_s
        return True

    def release(self, lease: OwnedLease, owner: str) -> bool:
        """Free the lease if it is held with this token. Return whether it was held."""
        self._expire()
        row = self._rows.get(lease.name)
        if row is None or row.holder != (owner, lease.token):
            return False
        del self._rows[lease.name]
        self._shown = None
        return True

    def held(self) -> Mapping[str, LeaseHolder]:
        """The leases on the clusters that answer. The caller must not change the result."""
        self._expire()
        if self._shown is None:
            self._shown = {name: row.holder for name, row in self._rows.items() if self.answers(name)}
        return self._shown

    def _expire(self) -> None:
        now_s = self.now_s()
        while self._ends and self._ends[0][0] <= now_s:
            _, name, token = heapq.heappop(self._ends)
            row = self._rows.get(name)
            if row is None or row.holder.token != token:
                continue
            if not self.answers(name):  # A cluster that is away does not measure the time of leases.
                row.end_s = max(row.end_s, now_s + row.duration_s)
            if row.end_s > now_s:
                heapq.heappush(self._ends, (row.end_s, name, token))
            else:
                del self._rows[name]
                self._shown = None


class HostLeases:
    """The `LeaseProvider` of one host."""

    def __init__(self, clusters: Clusters, owner: str) -> None:
        self.is_cut_off = False
        self.is_dead = False
        self._clusters, self._owner = clusters, owner
        self._away = frozenset[str]()

    @property
    def owner(self) -> str:
        return self._owner

    def now_s(self) -> float:
        return self._clusters.now_s()

    async def acquire(self, names: Sequence[str], duration_s: float) -> Sequence[LeaseAnswer]:
        end_s = until_s(self.now_s(), duration_s)
        if not await self._reaches("acquire", names):
            return [_UNKNOWN] * len(names)
        tokens = [
            self._clusters.acquire(name, self._owner, duration_s) if self._clusters.answers(name) else None
            for name in names
        ]
        await self._delay()
        return [
            _UNKNOWN
            if token is None
            else LeaseAnswer(LeaseResult.OK, OwnedLease(name, token, duration_s, end_s))
            if token
            else LeaseAnswer(LeaseResult.NOT_AVAILABLE)
            for name, token in zip(names, tokens, strict=True)
        ]

    async def renew(self, leases: Sequence[OwnedLease]) -> Sequence[LeaseAnswer]:
        now_s = self.now_s()
        if not await self._reaches("renew", [one.name for one in leases]):
            return [_UNKNOWN] * len(leases)
        are_held = [
            self._clusters.renew(one, self._owner) if self._clusters.answers(one.name) else None
            for one in leases
        ]
        await self._delay()
        return [
            _UNKNOWN
            if is_held is None
            else LeaseAnswer(LeaseResult.OK, replace(one, until_s=until_s(now_s, one.duration_s)))
            if is_held
            else LeaseAnswer(LeaseResult.INVALID_TOKEN)
            for one, is_held in zip(leases, are_held, strict=True)
        ]

    async def release(self, leases: Sequence[OwnedLease]) -> Sequence[LeaseResult]:
        if not await self._reaches("release", [one.name for one in leases]):
            return [LeaseResult.TRANSIENT_FAILURE] * len(leases)
        results = []
        for one in leases:
            if not self._clusters.answers(one.name):
                results.append(LeaseResult.TRANSIENT_FAILURE)
            elif self._clusters.release(one, self._owner):
                results.append(LeaseResult.OK)
            else:
                results.append(LeaseResult.INVALID_TOKEN)
        await self._delay()
        return results

    async def held(self, prefix: str) -> Mapping[str, LeaseHolder] | None:
        """`prefix` is empty in the calls of balancers."""
        assert not prefix, prefix
        if not await self._reaches("look", None):
            return None
        rows, self._away = self._clusters.held(), self._clusters.away
        await self._delay()
        return None if len(self._away) == len(self._clusters.names) else rows

    def reach(self) -> Mapping[str, frozenset[str]]:
        """Either all hosts reach a cluster, or no host reaches it."""
        return {}

    def away(self) -> Collection[str]:
        return self._away

    async def close(self) -> None:
        """Nothing to close."""

    async def _reaches(self, kind: str, names: Sequence[str] | None) -> bool:
        """Wait while a request is on its way. Return whether it arrives at clusters. It does not if this host
        is cut off.
        """
        if self.is_dead:
            await asyncio.get_running_loop().create_future()
        if self.is_cut_off:
            await asyncio.sleep(LOOK_S)
            return False
        self._clusters.requests[kind] += self._count(names)
        is_slow = bool(self._clusters.away) and (kind in {"look", "renew"})
        await (asyncio.sleep(LOOK_S) if is_slow else self._delay())
        return not self.is_cut_off

    def _count(self, names: Sequence[str] | None) -> int:
        """The number of clusters that a request goes to: all clusters for a look and for the lease of a
        host.
        """
        if names is None:
            return len(self._clusters.names)
        of_queues = {self._clusters.cluster_of(name) for name in names}
        return len(self._clusters.names) if None in of_queues else len(of_queues)

    async def _delay(self) -> None:
        await asyncio.sleep(self._clusters.rng.uniform(*LATENCY_S))
