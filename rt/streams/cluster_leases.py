"""Leases that the nodes of a cluster keep by consensus, for one owner.

The owner's certificate is a subscriber's or publisher's that names the group (`rt certs issue … --lease
GROUP`); names are those within the group. Nobody else is given a lease that this owner counts on: its time
begins before it is asked for, the cluster's when it is granted. Only where a machine and its clock stood
still as a whole, as a virtual one may, or the cluster was forced to go on with a node that had not heard of
all, may an owner not know that its time is over: there the token tells.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Final, TypeVar

from rt.errors import Overloaded, RtError
from rt.names import check_lease_owner, check_name
from rt.net.leases import LEASES_PER_CALL_MAX, LeaseCalls, LeaseRow
from rt.net.tls import TLS
from rt.streams.leasing import Holder, Lease, LeaseAnswer, LeaseResult, until_s

logger = logging.getLogger("rt.streams")

T = TypeVar("T", str, Lease)

CALL_S: Final = 10.0
_UNKNOWN: Final = LeaseAnswer(LeaseResult.TRANSIENT_FAILURE)
_NOT_AVAILABLE: Final = LeaseAnswer(LeaseResult.NOT_AVAILABLE)
_INVALID_TOKEN: Final = LeaseAnswer(LeaseResult.INVALID_TOKEN)


def boot_clock() -> float:
    """Seconds that go on while the machine sleeps, as the leases do meanwhile."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class ClusterLeases:
    """One owner's `LeaseProvider`; one loop's. Close it."""

    def __init__(
        self,
        endpoints: Sequence[str],
        tls: TLS,
        group: str,
        *,
        owner: str | None = None,
        calls: LeaseCalls | None = None,
        clock: Callable[[], float] = boot_clock,
    ) -> None:
        """`owner` is the certificate's name, or that with a suffix; default: with one that nobody else has.

        A process that takes the owner of one before it also takes back at once what that one left; see to
        it that that one has ended.
        """
        self._group = check_name(group, kind="group of leases")
        self._owner = check_lease_owner(owner or f"{tls.identity.name}~{os.urandom(6).hex()}")
        self._calls = calls or LeaseCalls(endpoints, tls)
        self._clock = clock

    @property
    def owner(self) -> str:
        """Who holds what it gets."""
        return self._owner

    def now_s(self) -> float:
        """See `boot_clock`."""
        return self._clock()

    async def acquire(self, names: Sequence[str], duration_s: float) -> Sequence[LeaseAnswer]:
        """See `LeaseProvider.acquire`."""

        async def ask(part: Sequence[str]) -> Sequence[LeaseAnswer]:
            end_s = until_s(self.now_s(), duration_s)
            full = [self._full(name) for name in part]
            tokens = await self._calls.acquire(self._owner, full, duration_s, timeout_s=_call_s(duration_s))
            return [
                LeaseAnswer(LeaseResult.OK, Lease(name, token, duration_s, end_s))
                if token
                else _NOT_AVAILABLE
                for name, token in zip(part, tokens, strict=True)
            ]

        return await _in_parts(names, ask)

    async def renew(self, leases: Sequence[Lease]) -> Sequence[LeaseAnswer]:
        """See `LeaseProvider.renew`."""

        async def ask(part: Sequence[Lease]) -> Sequence[LeaseAnswer]:
            now_s = self.now_s()
            call_s = _call_s(min(one.duration_s for one in part))
            are_held = await self._calls.renew(self._owner, self._rows(part), timeout_s=call_s)
            return [
                LeaseAnswer(LeaseResult.OK, replace(one, until_s=until_s(now_s, one.duration_s)))
                if is_held
                else _INVALID_TOKEN
                for one, is_held in zip(part, are_held, strict=True)
            ]

        return await _in_parts(leases, ask)

    async def release(self, leases: Sequence[Lease]) -> Sequence[LeaseResult]:
        """See `LeaseProvider.release`."""
        try:
            were_held = await self._calls.release(self._owner, self._rows(leases), timeout_s=CALL_S)
        except RtError as error:
            return [_unknown(error).result] * len(leases)
        return [LeaseResult.OK if one else LeaseResult.INVALID_TOKEN for one in were_held]

    async def held(self, prefix: str) -> Mapping[str, Holder] | None:
        """See `LeaseProvider.held`."""
        try:
            rows = await self._calls.held(self._full(prefix), timeout_s=CALL_S)
        except RtError as error:
            _unknown(error)
            return None
        skip = len(self._group) + 1
        return {one.name[skip:]: Holder(one.owner, one.token) for one in rows}

    async def close(self) -> None:
        """End the connections."""
        await self._calls.close()

    def _full(self, name: str) -> str:
        return f"{self._group}/{name}"

    def _rows(self, leases: Sequence[Lease]) -> list[LeaseRow]:
        return [LeaseRow(self._full(one.name), self._owner, one.token) for one in leases]


async def _in_parts(
    whole: Sequence[T], ask: Callable[[Sequence[T]], Awaitable[Sequence[LeaseAnswer]]]
) -> list[LeaseAnswer]:
    """What comes of all, asked for in parts that a call holds: behind one of which nothing is known, nothing.

    What came of the parts before it is known: what was got is not lost for what there was no room for.
    """
    answers = list[LeaseAnswer]()
    for start in range(0, len(whole), LEASES_PER_CALL_MAX):
        try:
            answers += await ask(whole[start : start + LEASES_PER_CALL_MAX])
        except RtError as error:
            answers += [_unknown(error)] * (len(whole) - start)
            break
    return answers


def _call_s(duration_s: float) -> float:
    """A call that takes as long as a lease lasts has nothing left to count on."""
    return min(CALL_S, duration_s / 3)


def _unknown(error: RtError) -> LeaseAnswer:
    """What is raised where asking again does not help, and `TRANSIENT_FAILURE` else."""
    if not error.retriable:
        raise error
    level = logging.WARNING if isinstance(error, Overloaded) else logging.INFO  # It may not pass by itself.
    logger.log(level, "leases_not_known error=%r", str(error))
    return _UNKNOWN
