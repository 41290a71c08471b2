"""Leases that a cluster keeps by consensus, for one owner.

The owner's certificate is the certificate of a subscriber or publisher, and names the group (`rt certs issue
… --lease GROUP`). Names are relative to the group. No other owner gets a lease that this owner counts on: the
owner's time starts before the request, and the cluster's time starts when it grants the lease. There are two
exceptions, in which the fencing token must detect the stale owner: the whole machine and its clock were
paused, as a virtual machine may be; or an operator forced a quorum with a node that had missed entries.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Final, TypeVar

from msgspec.structs import replace

from rt.errors import Overloaded, RtError
from rt.names import check_lease_owner, check_name
from rt.net.lease_client import LEASES_PER_CALL_MAX, LeaseCalls, LeaseRow
from rt.net.tls import TLS
from rt.streams.balancer.lease import LeaseAnswer, LeaseHolder, LeaseResult, OwnedLease, until_s

logger = logging.getLogger("rt.streams")

T = TypeVar("T", str, OwnedLease)

CALL_S: Final = 10.0
_UNKNOWN: Final = LeaseAnswer(LeaseResult.TRANSIENT_FAILURE)


def boot_clock() -> float:
    """The time in seconds. The clock also runs while the machine sleeps, because leases continue to run
    meanwhile.
    """
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class ClusterLeases:
    """One owner's `LeaseProvider`, for one event loop. Close it."""

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
        """`owner` is the certificate's name, optionally with a suffix. Default: a unique suffix.

        A process that uses the owner of an earlier process takes back the leases of that process at once.
        Make sure that the earlier process has ended.
        """
        self._group = check_name(group, kind="group of leases")
        self._owner = check_lease_owner(owner or f"{tls.identity.name}~{os.urandom(6).hex()}")
        self._calls = calls or LeaseCalls(endpoints, tls)
        self._clock = clock

    @property
    def owner(self) -> str:
        return self._owner

    @property
    def calls(self) -> LeaseCalls:
        return self._calls

    def row(self, name: str, token: int) -> LeaseRow:
        """A lease of this owner, with its full name."""
        return LeaseRow(self._full(name), self._owner, token)

    def now_s(self) -> float:
        """See `boot_clock`."""
        return self._clock()

    async def acquire(self, names: Sequence[str], duration_s: float) -> Sequence[LeaseAnswer]:
        async def ask(part: Sequence[str]) -> Sequence[LeaseAnswer]:
            end_s = until_s(self.now_s(), duration_s)
            full = [self._full(name) for name in part]
            tokens = await self._calls.acquire(self._owner, full, duration_s, timeout_s=_call_s(duration_s))
            return [
                LeaseAnswer(LeaseResult.OK, OwnedLease(name, token, duration_s, end_s))
                if token
                else LeaseAnswer(LeaseResult.NOT_AVAILABLE)
                for name, token in zip(part, tokens, strict=True)
            ]

        return await _in_parts(names, ask)

    async def renew(self, leases: Sequence[OwnedLease]) -> Sequence[LeaseAnswer]:
        async def ask(part: Sequence[OwnedLease]) -> Sequence[LeaseAnswer]:
            now_s = self.now_s()
            call_s = _call_s(min(one.duration_s for one in part))
            are_held = await self._calls.renew(self._owner, self._rows(part), timeout_s=call_s)
            return [
                LeaseAnswer(LeaseResult.OK, replace(one, until_s=until_s(now_s, one.duration_s)))
                if is_held
                else LeaseAnswer(LeaseResult.INVALID_TOKEN)
                for one, is_held in zip(part, are_held, strict=True)
            ]

        return await _in_parts(leases, ask)

    async def release(self, leases: Sequence[OwnedLease]) -> Sequence[LeaseResult]:
        try:
            were_held = await self._calls.release(self._owner, self._rows(leases), timeout_s=CALL_S)
        except RtError as error:
            return [_unknown(error).result] * len(leases)
        return [LeaseResult.OK if one else LeaseResult.INVALID_TOKEN for one in were_held]

    async def held(self, prefix: str) -> Mapping[str, LeaseHolder] | None:
        try:
            rows = await self._calls.held(self._full(prefix), timeout_s=CALL_S)
        except RtError as error:
            _unknown(error)
            return None
        skip = len(self._group) + 1
        return {one.name[skip:]: LeaseHolder(one.owner, one.token) for one in rows}

    def reach(self) -> Mapping[str, frozenset[str]]:
        """All queues have one cluster."""
        return {}

    def away(self) -> Collection[str]:
        """Without this cluster `held` returns nothing."""
        return ()

    async def close(self) -> None:
        await self._calls.close()

    def _full(self, name: str) -> str:
        return f"{self._group}/{name}"

    def _rows(self, leases: Sequence[OwnedLease]) -> list[LeaseRow]:
        return [self.row(one.name, one.token) for one in leases]


async def _in_parts(
    whole: Sequence[T], ask: Callable[[Sequence[T]], Awaitable[Sequence[LeaseAnswer]]]
) -> list[LeaseAnswer]:
    """Send the request in parts that fit a call. After a part with an unknown result, the rest is not sent.

    The results of earlier parts are kept.
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
    """A call must end before the lease does, or its result is useless."""
    return min(CALL_S, duration_s / 3)


def _unknown(error: RtError) -> LeaseAnswer:
    """`TRANSIENT_FAILURE`. Raises the error if a retry cannot help."""
    if not error.retriable:
        raise error
    level = logging.WARNING if isinstance(error, Overloaded) else logging.INFO  # May need an operator.
    logger.log(level, "leases_not_known error=%r", str(error))
    return _UNKNOWN
