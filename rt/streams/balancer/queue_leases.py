"""Leases of queues, each on the queue's own cluster: the loss of a cluster stops its own queue only.

    queue/<queue>   on the cluster of that queue
    host/<host>     on every cluster: a host is present as long as one cluster that answers has its lease

A cluster that does not answer in time is left out of the result of `held`. Its calls continue meanwhile, one
at a time, and their result counts as soon as it is available. When the cluster answers again, its leases of
other hosts count only after the duration of a lease: some may be of hosts that are no longer present.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Final, Protocol, TypeVar

from rt.errors import InvalidOption, RtError
from rt.net.tls import TLS
from rt.streams.balancer.cluster_leases import ClusterLeases
from rt.streams.balancer.lease import (
    QUEUES,
    LeaseAnswer,
    LeaseHolder,
    LeaseProvider,
    LeaseResult,
    OwnedLease,
)
from rt.streams.core.stream_id import QueueId

logger = logging.getLogger("rt.streams")

T = TypeVar("T")
R = TypeVar("R")

LOOK_S: Final = 1.0
"""How long `held` waits for a cluster, in seconds."""
_UNKNOWN: Final = LeaseAnswer(LeaseResult.TRANSIENT_FAILURE)


class ClusterAddress(Protocol):
    """The part of a `rt.streams.Cluster` that is needed."""

    @property
    def endpoints(self) -> Sequence[str]: ...

    @property
    def tls(self) -> TLS | None: ...


class QueueLeases:
    """A `LeaseProvider` for the queues of several clusters. For one event loop. Close it."""

    def __init__(self, leases: Mapping[str, LeaseProvider]) -> None:
        """`leases`: the leases of each queue's cluster, by the name of the queue, all of one owner.

        They are closed together with this object.
        """
        owners = {each.owner for each in leases.values()}
        if len(owners) != 1:
            raise InvalidOption(
                "leases of queues need one owner", got=", ".join(sorted(owners)) or "no cluster"
            )
        (self._owner,) = owners
        self._leases = dict(leases)
        self._places: dict[str, OwnedLease] = {}
        """By cluster: the lease of this host there."""
        self._place: OwnedLease | None = None
        """The lease in `_places` that was returned last. It represents the leases of this host on all
        clusters.
        """
        self._strange: dict[str, OwnedLease] = {}
        """By cluster: a lease of this host there that was acquired without notice."""
        self._looking: dict[str, asyncio.Task[Mapping[str, LeaseHolder] | None]] = {}
        self._renewing: dict[str, asyncio.Task[tuple[dict[OwnedLease, LeaseAnswer], LeaseAnswer]]] = {}
        self._reach: dict[str, frozenset[str]] = {}
        self._since_s: dict[str, float] = {}
        """By cluster: the time since which it answers. The hosts need some time to acquire their leases there
        again.
        """
        self._away: set[str] = set()
        """Clusters that did not answer the last poll. Until they answer, their leases are only renewed."""

    @classmethod
    def of_clusters(
        cls, clusters: Mapping[str, ClusterAddress], group: str, *, owner: str | None = None
    ) -> QueueLeases:
        """The leases of `group` in each of these clusters, which are the clusters of `ClusterQueues`.

        Their certificates have one common name and name the group (`rt certs issue … --lease GROUP`). `owner`
        is that name, optionally with a suffix. Default: a unique suffix.
        """
        names = set[str]()
        for name, cluster in clusters.items():
            if cluster.tls is None:
                raise InvalidOption("leases need TLS: a certificate says who owns them", where=name)
            names.add(cluster.tls.identity.name)
        if len(names) != 1:
            raise InvalidOption(
                "the certificates for the clusters have different names",
                got=", ".join(sorted(names)) or "no cluster",
                expected="one name, which is the owner of the leases",
            )
        owner = owner or f"{names.pop()}~{os.urandom(6).hex()}"
        return cls(
            {
                name: ClusterLeases(cluster.endpoints, cluster.tls, group, owner=owner)
                for name, cluster in clusters.items()
                if cluster.tls is not None
            }
        )

    @property
    def owner(self) -> str:
        return self._owner

    def now_s(self) -> float:
        """The clock of all leases."""
        return next(iter(self._leases.values())).now_s()

    def of(self, queue: QueueId) -> LeaseProvider:
        """The leases of the cluster of this queue."""
        return self._leases[queue.name]

    async def acquire(self, names: Sequence[str], duration_s: float) -> Sequence[LeaseAnswer]:
        async def ask(cluster: str, part: Sequence[str]) -> Sequence[LeaseAnswer]:
            return await self._leases[cluster].acquire(part, duration_s)

        of_queues = [name for name in names if name.startswith(QUEUES)]
        answers = await self._ask_each(of_queues, self._cluster_of, ask, _UNKNOWN)
        for name in names:
            if name not in answers:
                answers[name] = await self._acquire_place(name, duration_s)
        return [answers[name] for name in names]

    async def renew(self, leases: Sequence[OwnedLease]) -> Sequence[LeaseAnswer]:
        """A cluster that does not answer in time delays only its own leases. Its call goes on: a result that
        comes later counts at the next call.
        """
        of_cluster: dict[str, list[OwnedLease]] = {cluster: [] for cluster in self._leases}
        places = {one.name: one for one in leases if not one.name.startswith(QUEUES)}
        for one in leases:
            if one.name not in places:
                of_cluster[self._cluster_of(one.name)].append(one)
        for cluster, part in of_cluster.items():
            if cluster not in self._renewing and (part or places):
                work = self._renew_at(cluster, part, next(iter(places.values()), None))
                self._renewing[cluster] = asyncio.create_task(work)
        done, _ = await asyncio.wait(self._renewing.values(), timeout=LOOK_S)
        answers = dict[OwnedLease, LeaseAnswer]()
        of_place = dict.fromkeys(self._leases, _UNKNOWN)
        for cluster, renewing in list(self._renewing.items()):
            if renewing in done:
                del self._renewing[cluster]
                of_queues, of_place[cluster] = renewing.result()
                answers.update(of_queues)
        for place in places.values():
            answers[place] = self._one_place(of_place)
        return [answers.get(one, _UNKNOWN) for one in leases]

    async def _renew_at(
        self, cluster: str, part: Sequence[OwnedLease], place: OwnedLease | None
    ) -> tuple[dict[OwnedLease, LeaseAnswer], LeaseAnswer]:
        """Renew the leases of a cluster's queues, and the lease of this host on the cluster. If the host's
        lease is missing, acquire it.
        """
        leases, held = self._leases[cluster], self._places.get(cluster)
        both = [*part, *([held] if held is not None else [])]
        try:
            answers = dict(zip(both, await leases.renew(both), strict=True)) if both else {}
            if held is not None:
                return answers, answers.pop(held)
            if place is None:
                return answers, _UNKNOWN
            (answer,) = await leases.acquire([place.name], place.duration_s)
        except RtError as error:
            logger.error("leases_refused cluster=%s error=%r", cluster, str(error))
            return {}, _UNKNOWN
        return answers, answer

    async def release(self, leases: Sequence[OwnedLease]) -> Sequence[LeaseResult]:
        async def ask(cluster: str, part: Sequence[OwnedLease]) -> Sequence[LeaseResult]:
            return await self._leases[cluster].release(part)

        of_queues = [one for one in leases if one.name.startswith(QUEUES)]
        unknown = LeaseResult.TRANSIENT_FAILURE
        results = await self._ask_each(of_queues, lambda one: self._cluster_of(one.name), ask, unknown)
        for one in leases:
            if one not in results:
                results[one] = await self._release_place()
        return [results[one] for one in leases]

    async def held(self, prefix: str) -> Mapping[str, LeaseHolder] | None:
        """The holders of leases on the clusters that answer. None if no cluster answers."""
        for cluster in self._leases:
            if cluster not in self._looking:
                self._looking[cluster] = asyncio.create_task(self._held_at(cluster, prefix))
        done, _ = await asyncio.wait(self._looking.values(), timeout=LOOK_S)
        rows, away = dict[str, LeaseHolder](), set[str]()
        self._reach = {}
        for cluster, looking in list(self._looking.items()):
            found: Mapping[str, LeaseHolder] | None = None
            if looking in done:
                del self._looking[cluster]
                found = looking.result()
            if found is None:
                away.add(cluster)
                self._since_s.pop(cluster, None)
                continue
            self._since_s.setdefault(cluster, self.now_s())
            is_settled = self._is_settled(cluster)
            if is_settled:
                self._reach[cluster] = frozenset(name for name in found if not name.startswith(QUEUES))
            for name, holder in found.items():
                if name.startswith(QUEUES):
                    if name == f"{QUEUES}{cluster}":
                        rows[name] = holder
                elif holder.owner == self._owner:
                    rows[name] = self._own_place(cluster, name, holder)
                elif is_settled or not self._was_away(cluster):
                    rows.setdefault(name, holder)
        self._note_away(away)
        return None if len(away) == len(self._leases) else rows

    def _is_settled(self, cluster: str) -> bool:
        """Whether the cluster has answered for so long that it has the leases of all present hosts again, and
        no leases of hosts that are no longer present.
        """
        place = self._place
        return place is not None and self.now_s() - self._since_s[cluster] > place.duration_s

    def _was_away(self, cluster: str) -> bool:
        """Whether other clusters have answered for longer. Then this cluster may have leases of hosts that
        are no longer present.
        """
        return self._since_s[cluster] - min(self._since_s.values()) > 2 * LOOK_S

    async def _held_at(self, cluster: str, prefix: str) -> Mapping[str, LeaseHolder] | None:
        try:
            return await self._leases[cluster].held(prefix)
        except RtError as error:
            if len(self._leases) == 1:
                raise
            logger.error("leases_refused cluster=%s error=%r", cluster, str(error))
            return None

    def reach(self) -> Mapping[str, frozenset[str]]:
        return self._reach

    def away(self) -> Collection[str]:
        return self._away

    async def close(self) -> None:
        tasks = [*self._looking.values(), *self._renewing.values()]
        self._looking, self._renewing = {}, {}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        for leases in self._leases.values():
            await leases.close()

    def _note_away(self, away: set[str]) -> None:
        for cluster in sorted(away - self._away):
            logger.warning("leases_away cluster=%s", cluster)
        for cluster in sorted(self._away - away):
            logger.info("leases_back cluster=%s", cluster)
        self._away = away

    def _cluster_of(self, name: str) -> str:
        return name.removeprefix(QUEUES)

    async def _ask_each(
        self,
        asked: Sequence[T],
        cluster_of: Callable[[T], str],
        ask: Callable[[str, Sequence[T]], Awaitable[Sequence[R]]],
        unknown: R,
    ) -> dict[T, R]:
        """Ask each cluster that is not away, for its own part of `asked`. If there are several clusters, the
        error of one is logged.
        """
        parts = dict[str, list[T]]()
        for one in asked:
            if (cluster := cluster_of(one)) not in self._away:
                parts.setdefault(cluster, []).append(one)
        results = await asyncio.gather(
            *(ask(cluster, part) for cluster, part in parts.items()), return_exceptions=True
        )
        found = dict.fromkeys(asked, unknown)
        for (cluster, part), result in zip(parts.items(), results, strict=True):
            if not isinstance(result, BaseException):
                found.update(zip(part, result, strict=True))
            elif isinstance(result, RtError) and len(self._leases) > 1:
                logger.error("leases_refused cluster=%s error=%r", cluster, str(result))
            else:
                raise result
        return found

    # The host's own lease, on every cluster

    async def _acquire_place(self, name: str, duration_s: float) -> LeaseAnswer:
        async def ask(cluster: str, _: Sequence[str]) -> Sequence[LeaseAnswer]:
            return await self._leases[cluster].acquire([name], duration_s)

        answers = await self._ask_each([*self._leases], str, ask, _UNKNOWN)
        return self._one_place(answers)

    async def _release_place(self) -> LeaseResult:
        async def ask(cluster: str, _: Sequence[str]) -> Sequence[LeaseResult]:
            if (renewing := self._renewing.pop(cluster, None)) is not None:
                # The renewal may acquire the lease again.
                await asyncio.wait([renewing])
                if (renewed := renewing.result()[1].lease) is not None:
                    self._places[cluster] = renewed
            held = self._places.pop(cluster, None) or self._strange.pop(cluster, None)
            return (
                [LeaseResult.INVALID_TOKEN] if held is None else await self._leases[cluster].release([held])
            )

        unknown = LeaseResult.TRANSIENT_FAILURE
        results = {*(await self._ask_each([*self._leases], str, ask, unknown)).values()}
        self._place = None
        if unknown in results:
            return unknown
        return LeaseResult.OK if LeaseResult.OK in results else LeaseResult.INVALID_TOKEN

    def _own_place(self, cluster: str, name: str, holder: LeaseHolder) -> LeaseHolder:
        """All leases of this host are shown as one. Another host of this owner is shown as it is."""
        if self._place is not None and name != self._place.name:
            return holder
        known = self._places.get(cluster)
        if known is None or known.token != holder.token:
            self._strange[cluster] = OwnedLease(name, holder.token, 0.0, 0.0)
        return holder if self._place is None else LeaseHolder(holder.owner, self._place.token)

    def _one_place(self, answers: Mapping[str, LeaseAnswer]) -> LeaseAnswer:
        """The lease of the host, from its leases on the clusters: it lasts as long as the longest of
        these.
        """
        for cluster, answer in answers.items():
            if answer.lease is not None:
                self._places[cluster] = answer.lease
            elif answer.result is not LeaseResult.TRANSIENT_FAILURE:
                self._places.pop(cluster, None)
        results = {answer.result for answer in answers.values()}
        if LeaseResult.OK in results:
            self._place = max(self._places.values(), key=lambda one: one.until_s)
            return LeaseAnswer(LeaseResult.OK, self._place)
        if LeaseResult.TRANSIENT_FAILURE in results:
            return _UNKNOWN
        self._place = None
        return next(iter(answers.values()))
