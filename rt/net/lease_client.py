"""Client of the nodes' services `rt.v1.Leases` and `rt.v1.Groups`, over gRPC.

If a node cannot answer now, the next one is asked, in rounds, until the time is over. Concurrent calls do
their rounds independently, so none waits for a node that others skip.

Invariants:
- A request keeps its id in all attempts, so no lease is acquired twice by one request.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from google.protobuf.message import DecodeError

from rt.endpoints import check_endpoints
from rt.errors import ProtocolViolation, RtError, Timeout
from rt.net.grpc_channel import Channel, open_channel
from rt.net.grpc_errors import asking
from rt.net.tls import TLS
from rt.v1 import groups_pb2
from rt.v1 import leases_pb2 as pb

LEASE_SERVICE: Final = "rt.v1.Leases"
GROUP_SERVICE: Final = "rt.v1.Groups"
POSITIONS_PER_CALL_MAX: Final = 256
REQUEST_ID_BYTES: Final = 16
LEASES_PER_CALL_MAX: Final = 256
TIMEOUT_S: Final = 10.0
ATTEMPT_S: Final = 4.0
"""Timeout of one attempt: longer than a change of leader takes."""
PAUSE_S: Final = 0.1
"""Maximum pause after the first round; doubles after each further one."""
PAUSE_S_MAX: Final = 2.0
"""Upper limit of that pause."""


class LeaseRow(NamedTuple):
    """A lease that is held. `token` is greater than all tokens granted before, for any lease."""

    name: str
    owner: str
    token: int


class GroupProgress(NamedTuple):
    """By name: the position below which everything is handled. And the range of the merged log."""

    positions: Mapping[str, int]
    log_start: int
    log_end: int


class LeaseCalls:
    """Calls to the nodes at `endpoints` ("host:port"). For one event loop. Must be closed."""

    def __init__(self, endpoints: Sequence[str], tls: TLS | None) -> None:
        """Without `tls` the endpoints must be loopback addresses (`ValueError`).

        Raises `rt.InvalidOption` for a malformed endpoint.
        """
        self._endpoints, self._tls = check_endpoints(endpoints, is_required=True), tls
        self._channels: dict[str, Channel] = {}
        self._at = random.randrange(len(endpoints))
        """The first node to ask: the one that answered last."""

    async def acquire(
        self, owner: str, names: Sequence[str], duration_s: float, *, timeout_s: float = TIMEOUT_S
    ) -> list[int]:
        """The token of each lease; 0 if another owner holds it. Errors as in `_ask`."""
        rows = [pb.LeaseRow(name=name) for name in names]
        return await self._change("Acquire", owner, rows, round(duration_s * 1000), timeout_s)

    async def renew(
        self, owner: str, leases: Sequence[LeaseRow], *, timeout_s: float = TIMEOUT_S
    ) -> list[bool]:
        """Renew the leases. Returns whether each is still held with its token."""
        return [bool(one) for one in await self._change("Renew", owner, _rows(leases), 0, timeout_s)]

    async def release(
        self, owner: str, leases: Sequence[LeaseRow], *, timeout_s: float = TIMEOUT_S
    ) -> list[bool]:
        """Release the leases. Returns whether each was held with its token until now."""
        return [bool(one) for one in await self._change("Release", owner, _rows(leases), 0, timeout_s)]

    async def held(self, prefix: str, *, timeout_s: float = TIMEOUT_S) -> list[LeaseRow]:
        """The held leases whose names start with `prefix`, by name, as known to the node that answers."""
        data = await self._ask("List", pb.LeaseListRequest(prefix=prefix).SerializeToString(), timeout_s)
        try:
            return [LeaseRow(one.name, one.owner, one.token) for one in pb.LeaseList.FromString(data).leases]
        except DecodeError as error:
            raise ProtocolViolation("a node's answer is not a list of leases") from error

    async def acknowledge(
        self, positions: Mapping[str, int], *, timeout_s: float = TIMEOUT_S
    ) -> GroupProgress:
        """Move positions of groups forward: durable in the cluster on return. At most 256.

        Returns all positions whose names start with the certificate's name and `~`, as the node that answers
        knows them. `{}` only reads: everything that was committed before the call.
        """
        rows = [groups_pb2.GroupPosition(name=name, position=at) for name, at in positions.items()]
        request = groups_pb2.GroupPositions(positions=rows).SerializeToString()
        data = await self._ask("Acknowledge", request, timeout_s, GROUP_SERVICE)
        try:
            answer = groups_pb2.GroupPositions.FromString(data)
        except DecodeError as error:
            raise ProtocolViolation("a node's answer is not a list of positions") from error
        found = {row.name: row.position for row in answer.positions}
        return GroupProgress(found, answer.log_start, answer.log_end)

    async def close(self) -> None:
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
                raise ProtocolViolation("a node's answer is not a lease reply") from error
            if len(got) != len(part):
                raise ProtocolViolation(
                    "a node's answer is about other leases", got=len(got), expected=f"{len(part)} tokens"
                )
            tokens += got
        return tokens

    async def _ask(self, method: str, data: bytes, timeout_s: float, service: str = LEASE_SERVICE) -> bytes:
        """The answer of a node. An error that all nodes give (a name, a certificate) is raised.

        Raises `rt.Timeout` or `Unreachable` when the time is over; the operation may have happened.
        """
        end_s, pause_s, refused = time.monotonic() + timeout_s, PAUSE_S, set[str]()
        failure: RtError = Timeout("no node answered", expected=f"{timeout_s:g} s")
        first = self._at
        for turn in itertools.count(1):
            if (left_s := end_s - time.monotonic()) <= 0:
                break
            at = (first + turn - 1) % len(self._endpoints)
            endpoint = self._endpoints[at]
            try:
                answer = await self._call(endpoint, f"/{service}/{method}", data, min(left_s, ATTEMPT_S))
            except RtError as error:
                # One node may reject alone, for example because of its own certificate.
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
        call: Any = channel.get().unary_unary(method)
        with asking(endpoint):
            answer: bytes = await call(data, timeout=timeout_s)
        return answer


def _rows(leases: Sequence[LeaseRow]) -> list[pb.LeaseRow]:
    return [pb.LeaseRow(name=one.name, owner=one.owner, token=one.token) for one in leases]
