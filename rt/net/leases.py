"""Asking nodes for leases through the gRPC port: the other end of `rt.v1.Leases`.

Laws. A request keeps its id wherever it is asked again, so what it got it has, and no lease is acquired twice
by one. What a node cannot answer now is asked of the next one, round and round, until the time is over; calls
that run at the same time go their rounds each for itself, so none waits for a node that others pass over.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import time
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from google.protobuf.message import DecodeError

from rt.errors import ProtocolViolation, RtError, Timeout
from rt.net.rpc import Channel, open_channel
from rt.net.rpc_errors import asking
from rt.net.tls import TLS
from rt.v1 import leases_pb2 as pb

LEASE_SERVICE: Final = "rt.v1.Leases"
REQUEST_ID_BYTES: Final = 16
LEASES_PER_CALL_MAX: Final = 256
TIMEOUT_S: Final = 10.0
ATTEMPT_S: Final = 4.0
"""So long one node has: longer than a change of leader takes."""
PAUSE_S: Final = 0.1
"""At most, behind the first round; behind each further one twice as much, ..."""
PAUSE_S_MAX: Final = 2.0
"""... up to this."""


class LeaseRow(NamedTuple):
    """A lease that is held. `token` is greater than every one that was given before, of whatever lease."""

    name: str
    owner: str
    token: int


class LeaseCalls:
    """Calls to the nodes at `endpoints`, "host:port"; one loop's. Close it."""

    def __init__(self, endpoints: Sequence[str], tls: TLS | None) -> None:
        """Without `tls` the endpoints must be of loopback (`ValueError`)."""
        if not endpoints:
            raise ValueError("no endpoints: name at least one node, host:port")
        self._endpoints, self._tls = list(endpoints), tls
        self._channels: dict[str, Channel] = {}
        self._at = random.randrange(len(endpoints))
        """The node that is asked first: the one that answered last."""

    async def acquire(
        self, owner: str, names: Sequence[str], duration_s: float, *, timeout_s: float = TIMEOUT_S
    ) -> list[int]:
        """The token of each lease; 0: somebody else holds it. See `_ask` for what is raised."""
        rows = [pb.LeaseRow(name=name) for name in names]
        return await self._change("Acquire", owner, rows, round(duration_s * 1000), timeout_s)

    async def renew(
        self, owner: str, leases: Sequence[LeaseRow], *, timeout_s: float = TIMEOUT_S
    ) -> list[bool]:
        """Whether each is still held by its token, and lasts anew."""
        return [bool(one) for one in await self._change("Renew", owner, _rows(leases), 0, timeout_s)]

    async def release(
        self, owner: str, leases: Sequence[LeaseRow], *, timeout_s: float = TIMEOUT_S
    ) -> list[bool]:
        """Whether each was held by its token until now. None is any more."""
        return [bool(one) for one in await self._change("Release", owner, _rows(leases), 0, timeout_s)]

    async def held(self, prefix: str, *, timeout_s: float = TIMEOUT_S) -> list[LeaseRow]:
        """The leases that are held whose names begin so, by name, as the node that answers knows them."""
        data = await self._ask("List", pb.LeaseListRequest(prefix=prefix).SerializeToString(), timeout_s)
        try:
            return [LeaseRow(one.name, one.owner, one.token) for one in pb.LeaseList.FromString(data).leases]
        except DecodeError as error:
            raise ProtocolViolation("a node answers what is no list of leases") from error

    async def close(self) -> None:
        """End what is under way."""
        channels, self._channels = list(self._channels.values()), {}
        for channel in channels:
            await channel.close()

    async def _change(
        self, method: str, owner: str, rows: Sequence[pb.LeaseRow], duration_ms: int, timeout_s: float
    ) -> list[int]:
        tokens: list[int] = []
        for start in range(0, len(rows), LEASES_PER_CALL_MAX):
            part = rows[start : start + LEASES_PER_CALL_MAX]
            request = pb.LeaseRequest(
                request=os.urandom(REQUEST_ID_BYTES), owner=owner, duration_ms=duration_ms, leases=part
            )
            data = await self._ask(method, request.SerializeToString(), timeout_s)
            try:
                got = list(pb.LeaseReply.FromString(data).tokens)
            except DecodeError as error:
                raise ProtocolViolation("a node answers what is no reply about leases") from error
            if len(got) != len(part):
                raise ProtocolViolation(
                    "a node answers about other leases", got=len(got), wanted=f"{len(part)} tokens"
                )
            tokens += got
        return tokens

    async def _ask(self, method: str, data: bytes, timeout_s: float) -> bytes:
        """The answer of a node; what all of them refuse is raised: a name, a certificate.

        `rt.Timeout` or `Unreachable` when the time is over; what was asked for may have happened.
        """
        end_s, pause_s, refused = time.monotonic() + timeout_s, PAUSE_S, set[str]()
        failure: RtError = Timeout("no node answered", wanted=f"{timeout_s:g} s")
        first = self._at
        for turn in itertools.count(1):
            if (left_s := end_s - time.monotonic()) <= 0:
                break
            at = (first + turn - 1) % len(self._endpoints)
            endpoint = self._endpoints[at]
            try:
                answer = await self._call(endpoint, method, data, min(left_s, ATTEMPT_S))
            except RtError as error:
                # One node may refuse alone: for its own certificate, say.
                if not error.retriable:
                    refused.add(endpoint)
                if refused.issuperset(self._endpoints):
                    raise
                failure = error
            else:
                self._at = at
                return answer
            if turn % len(self._endpoints) == 0:
                drawn_s = random.uniform(pause_s / 2, pause_s)
                await asyncio.sleep(min(drawn_s, max(end_s - time.monotonic(), 0)))
                pause_s = min(2 * pause_s, PAUSE_S_MAX)
        raise failure

    async def _call(self, endpoint: str, method: str, data: bytes, timeout_s: float) -> bytes:
        channel = self._channels.get(endpoint)
        if channel is None:
            channel = self._channels[endpoint] = open_channel(endpoint, self._tls, insecure=self._tls is None)
        call: Any = channel.get().unary_unary(f"/{LEASE_SERVICE}/{method}")
        with asking(endpoint):
            answer: bytes = await call(data, timeout=timeout_s)
        return answer


def _rows(leases: Sequence[LeaseRow]) -> list[pb.LeaseRow]:
    return [pb.LeaseRow(name=one.name, owner=one.owner, token=one.token) for one in leases]
