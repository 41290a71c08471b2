"""Leases on their way back, many at a time: one call carries all that were let go of since the last began.

So a host that gives up hundreds of queues at once asks as often as one that gives up two. For one event loop.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from rt.streams.leasing import Lease, LeaseProvider, LeaseResult


@dataclass(slots=True, eq=False)
class _Return:
    lease: Lease
    result: LeaseResult | Exception | None = None
    """None: nobody has asked yet."""


class Returning:
    """Of one owner."""

    def __init__(self, leases: LeaseProvider) -> None:
        self._leases = leases
        self._waiting: list[_Return] = []
        self._turn = asyncio.Lock()

    async def release(self, lease: Lease) -> LeaseResult:
        """Let go of it. Raises what `LeaseProvider.release` raises, for all that went together."""
        one = _Return(lease)
        self._waiting.append(one)
        await asyncio.sleep(0)  # What ends in the same moment goes together.
        async with self._turn:
            if one.result is None:
                await self._release_all()
        assert one.result is not None
        if isinstance(one.result, Exception):
            raise one.result
        return one.result

    async def _release_all(self) -> None:
        together, self._waiting = self._waiting, []
        for one in together:
            one.result = LeaseResult.TRANSIENT_FAILURE  # So it is if this is cancelled.
        try:
            results = await self._leases.release([one.lease for one in together])
        except Exception as error:  # noqa: BLE001 - raised to whoever waits
            for one in together:
                one.result = error
            return
        for one, result in zip(together, results, strict=True):
            one.result = result
