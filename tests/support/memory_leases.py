"""Leases in memory, for hosts of one process. Behaves like `ClusterLeases`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from rt.names import check_lease_name, check_lease_owner
from rt.streams.balancer.lease import LeaseAnswer, LeaseHolder, LeaseResult, OwnedLease, until_s

_NOT_AVAILABLE: Final = LeaseAnswer(LeaseResult.NOT_AVAILABLE)
_INVALID_TOKEN: Final = LeaseAnswer(LeaseResult.INVALID_TOKEN)


@dataclass(slots=True)
class _Row:
    owner: str
    token: int
    end_s: float


class LeaseTable:
    """The leases that are shared by the owners in a process.

    `clock` counts seconds and never goes back. The default is the clock of the event loop.
    """

    def __init__(self, clock: Callable[[], float] | None = None) -> None:
        self._clock = clock
        self._rows: dict[str, _Row] = {}
        self._token = 0

    def now_s(self) -> float:
        """The time on which the expiry of leases is based."""
        return asyncio.get_running_loop().time() if self._clock is None else self._clock()

    def acquire(self, name: str, owner: str, duration_s: float) -> int:
        """Acquire a lease. Return its token, or 0 if the lease is held."""
        check_lease_name(f"g/{name}")
        if self._held(name) is not None:
            return 0
        self._token += 1
        self._rows[name] = _Row(owner, self._token, self.now_s() + duration_s)
        return self._token

    def renew(self, name: str, owner: str, token: int, duration_s: float) -> bool:
        """Extend the lease if it is held with this token. Return whether it was."""
        row = self._held(name)
        if row is None or (row.owner, row.token) != (owner, token):
            return False
        row.end_s = self.now_s() + duration_s
        return True

    def release(self, name: str, owner: str, token: int) -> bool:
        """Free the lease if it is held with this token. Return whether it was."""
        row = self._held(name)
        if row is None or (row.owner, row.token) != (owner, token):
            return False
        del self._rows[name]
        return True

    def held(self, prefix: str) -> dict[str, LeaseHolder]:
        """The holders, by name."""
        names = sorted(name for name in self._rows if name.startswith(prefix))
        return {
            name: LeaseHolder(row.owner, row.token) for name in names if (row := self._held(name)) is not None
        }

    def _held(self, name: str) -> _Row | None:
        row = self._rows.get(name)
        if row is not None and row.end_s <= self.now_s():
            del self._rows[name]
            return None
        return row


class MemoryLeases:
    """One owner's `LeaseProvider` on a table."""

    def __init__(self, table: LeaseTable, owner: str) -> None:
        self._table, self._owner = table, check_lease_owner(owner)

    @property
    def owner(self) -> str:
        return self._owner

    def now_s(self) -> float:
        return self._table.now_s()

    async def acquire(self, names: Sequence[str], duration_s: float) -> Sequence[LeaseAnswer]:
        """See `LeaseProvider.acquire`."""
        answers = []
        for name in names:
            end_s = until_s(self.now_s(), duration_s)
            token = self._table.acquire(name, self._owner, duration_s)
            lease = OwnedLease(name, token, duration_s, end_s)
            answers.append(LeaseAnswer(LeaseResult.OK, lease) if token else _NOT_AVAILABLE)
        return answers

    async def renew(self, leases: Sequence[OwnedLease]) -> Sequence[LeaseAnswer]:
        """See `LeaseProvider.renew`."""
        answers = []
        for one in leases:
            end_s = until_s(self.now_s(), one.duration_s)
            lease = OwnedLease(one.name, one.token, one.duration_s, end_s)
            is_held = self._table.renew(one.name, self._owner, one.token, one.duration_s)
            answers.append(LeaseAnswer(LeaseResult.OK, lease) if is_held else _INVALID_TOKEN)
        return answers

    async def release(self, leases: Sequence[OwnedLease]) -> Sequence[LeaseResult]:
        """See `LeaseProvider.release`."""
        was_held = [self._table.release(one.name, self._owner, one.token) for one in leases]
        return [LeaseResult.OK if one else LeaseResult.INVALID_TOKEN for one in was_held]

    async def held(self, prefix: str) -> Mapping[str, LeaseHolder] | None:
        """See `LeaseProvider.held`."""
        return self._table.held(prefix)

    def reach(self) -> Mapping[str, frozenset[str]]:
        """See `LeaseProvider.reach`."""
        return {}

    def away(self) -> Collection[str]:
        """See `LeaseProvider.away`."""
        return ()

    async def close(self) -> None:
        """Nothing to close."""
