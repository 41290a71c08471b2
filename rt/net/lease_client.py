"""Client of the nodes' services `rt.v1.Leases`, `rt.v1.Tables` and `rt.v1.Groups`, over gRPC.

If a node cannot answer now, the client asks the next one, in rounds, until the time is over. Concurrent calls
have independent rounds, so no call waits for a node that other calls skip.

Invariants:
- A request keeps its id in all attempts, so no lease is acquired twice by one request.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from google.protobuf.message import DecodeError

from rt.endpoints import check_endpoints
from rt.errors import ProtocolViolation, RtError, Timeout
from rt.net.grpc_channel import Channel, open_channel
from rt.net.grpc_errors import Unreachable, asking
from rt.net.tls import TLS
from rt.v1 import groups_pb2
from rt.v1 import leases_pb2 as pb

LEASE_SERVICE: Final = "rt.v1.Leases"
TABLE_SERVICE: Final = "rt.v1.Tables"
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


class TablePart(NamedTuple):
    """A part of a commit to a lease's table: deletes prefixes, then keys, then writes rows."""

    commit: int
    """The number of the commit: the table's number of commits before it, plus one."""
    request: bytes
    """Identifies the attempt: `request_id`. All parts of it have the same one."""
    part: int
    is_last: bool
    clears: Sequence[str] = ()
    deletes: Sequence[str] = ()
    puts: Sequence[tuple[str, bytes]] = ()


class TableContent(NamedTuple):
    """A lease's table as other processes see it. `owner` is the owner of the lease; None if the lease is
    free.
    """

    owner: LeaseRow | None
    commits: int
    rows: Mapping[str, bytes]


class OwnerRequest(NamedTuple):
    """A request to the owner of a lease. It is not carried out after `until_ns`, by the nodes' clocks."""

    id: bytes
    content: bytes
    until_ns: int


class OwnerAnswer(NamedTuple):
    """The state of a request: "waiting", "answered", "unknown", "no-table" or "no-room". `owner` is the
    present owner of the lease; empty if there is none.
    """

    state: str
    content: bytes
    owner: str


class LogEpoch(NamedTuple):
    """Which resets a merged log has seen."""

    number: int
    """The number of the cluster's epoch: see `rt.cluster_epoch`."""
    forced: bytes
    """Identifies the last forced reset; empty if there was none."""
    runs: Mapping[int, int]
    """The first position of each run, by run number, ascending. A hard or forced reset starts a run, with the
    number of the epoch.
    """


_ATTEMPTS: Final = itertools.count(1)


def request_id() -> bytes:
    """A new id for an attempt to change a table. Later ids of this process are greater."""
    return next(_ATTEMPTS).to_bytes(8, "big") + os.urandom(REQUEST_ID_BYTES - 8)


class GroupProgress(NamedTuple):
    """For each name, the position below which everything is handled; and the range of the merged log."""

    positions: Mapping[str, int]
    log_start: int
    log_end: int
    epoch: LogEpoch | None = None
    """Set if positions were only read, and the node reports it."""


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
        self._forced: bytes | None = None
        """The last forced reset when positions of groups were first read; empty if there was none."""

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

    async def write_table(
        self, lease: LeaseRow, part: TablePart, *, timeout_s: float = TIMEOUT_S
    ) -> tuple[str, int]:
        """Send a part of a commit. Returns "written", "not-owner", "out-of-order" or "no-room", and the
        number of commits of the table then. Durable on return. After an error, send the same part again.
        """
        request = pb.TableWrite(
            lease=_rows([lease])[0],
            commit=part.commit,
            request=part.request,
            part=part.part,
            is_last=part.is_last,
            clears=part.clears,
            deletes=part.deletes,
            puts=[pb.TableRow(key=key, value=value) for key, value in part.puts],
        )
        data = await self._ask("Write", request.SerializeToString(), timeout_s, TABLE_SERVICE)
        try:
            reply = pb.TableWriteReply.FromString(data)
        except DecodeError as error:
            raise ProtocolViolation("a node's answer is not about a table") from error
        return reply.answer, reply.commits

    async def read_table(
        self, lease: LeaseRow, page: int = 0, *, timeout_s: float = TIMEOUT_S
    ) -> tuple[int, list[tuple[str, bytes]], int]:
        """The table's number of commits, rows of some pages from `page` on, and the next page; 0 at the end.

        `rt.Fenced`: the lease is not held with its token any more.
        """
        request = pb.TableRead(lease=_rows([lease])[0], page=page)
        data = await self._ask("Read", request.SerializeToString(), timeout_s, TABLE_SERVICE)
        try:
            reply = pb.TableRows.FromString(data)
        except DecodeError as error:
            raise ProtocolViolation("a node's answer is not the rows of a table") from error
        return reply.commits, [(row.key, row.value) for row in reply.rows], reply.next_page

    async def inspect_table(self, lease: str, *, timeout_s: float = TIMEOUT_S) -> TableContent:
        """The table of a lease; this client need not hold the lease. A large table may change while it is
        read: then some rows are of a later commit than others.
        """
        rows, page = dict[str, bytes](), 0
        while True:
            request = pb.TableRead(lease=pb.LeaseRow(name=lease), page=page)
            data = await self._ask("Inspect", request.SerializeToString(), timeout_s, TABLE_SERVICE)
            try:
                reply = pb.TableRows.FromString(data)
            except DecodeError as error:
                raise ProtocolViolation("a node's answer is not the rows of a table") from error
            rows.update((row.key, row.value) for row in reply.rows)
            page, held = reply.next_page, reply.lease
            if not page:
                owner = LeaseRow(held.name, held.owner, held.token) if held.owner else None
                return TableContent(owner, reply.commits, rows)

    async def post_request(
        self, lease: str, request: bytes, content: bytes, wait_s: float, *, timeout_s: float = TIMEOUT_S
    ) -> OwnerAnswer:
        """Leave a durable request for the owner of `lease`. The owner may carry it out within `wait_s`.

        After an error, post it again with the same id: it is carried out once.
        """
        end_s, until_ns = time.monotonic() + wait_s, time.time_ns() + round(wait_s * 10**9)

        def posted() -> bytes:
            """The encoded request. A later attempt leaves less time to carry it out."""
            wait_ms = max(1, round((end_s - time.monotonic()) * 1000))
            return pb.TableRequest(
                lease=lease, id=request, wait_ms=wait_ms, content=content, until_ns=until_ns
            ).SerializeToString()

        return await self._about_request("Post", posted, timeout_s)

    async def find_request(self, lease: str, request: bytes, *, timeout_s: float = TIMEOUT_S) -> OwnerAnswer:
        """The state of a request, as known to the node that answers."""
        asked = pb.TableRequest(lease=lease, id=request).SerializeToString()
        return await self._about_request("Find", lambda: asked, timeout_s)

    async def _about_request(self, method: str, asked: Callable[[], bytes], timeout_s: float) -> OwnerAnswer:
        data = await self._ask(method, asked, timeout_s, TABLE_SERVICE)
        try:
            reply = pb.TableRequestReply.FromString(data)
        except DecodeError as error:
            raise ProtocolViolation("a node's answer is not about a request") from error
        return OwnerAnswer(reply.answer, reply.content, reply.owner)

    async def waiting_requests(
        self, lease: LeaseRow, commits: int, *, timeout_s: float = TIMEOUT_S
    ) -> list[OwnerRequest]:
        """The requests that wait for this owner, the oldest first, without the requests that it answered in
        the first `commits` commits of the table. `rt.Fenced` if it does not hold the lease.
        """
        asked = pb.TableRead(lease=_rows([lease])[0], commits=commits)
        data = await self._ask("Waiting", asked.SerializeToString(), timeout_s, TABLE_SERVICE)
        try:
            reply = pb.TableRequests.FromString(data)
        except DecodeError as error:
            raise ProtocolViolation("a node's answer is not a list of requests") from error
        return [OwnerRequest(one.id, one.content, one.until_ns) for one in reply.requests]

    async def acknowledge(
        self, positions: Mapping[str, int], *, timeout_s: float = TIMEOUT_S
    ) -> GroupProgress:
        """Move positions of groups forward: durable in the cluster on return. At most 256 positions.

        Returns all positions whose names start with the certificate's name and `~`, as known to the node that
        answers. With `{}` it only reads; the answer includes everything that was committed before the call.

        `rt.Fenced` if a reset was forced since this client first read positions. The positions that the
        client has may now be positions of other messages.
        """
        rows = [groups_pb2.GroupPosition(name=name, position=at) for name, at in positions.items()]
        request = groups_pb2.GroupPositions(positions=rows)
        if positions and self._forced is not None:
            request.epoch.CopyFrom(groups_pb2.LogEpoch(forced=self._forced))
        data = await self._ask("Acknowledge", request.SerializeToString(), timeout_s, GROUP_SERVICE)
        try:
            answer = groups_pb2.GroupPositions.FromString(data)
        except DecodeError as error:
            raise ProtocolViolation("a node's answer is not a list of positions") from error
        found = {row.name: row.position for row in answer.positions}
        epoch = None
        if answer.HasField("epoch"):
            runs = {each.run: each.first for each in answer.epoch.runs}
            epoch = LogEpoch(answer.epoch.number, answer.epoch.forced, runs)
            self._forced = epoch.forced if self._forced is None else self._forced
        return GroupProgress(found, answer.log_start, answer.log_end, epoch)

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

    async def _ask(
        self,
        method: str,
        data: bytes | Callable[[], bytes],
        timeout_s: float,
        service: str = LEASE_SERVICE,
    ) -> bytes:
        """The answer of a node. `data` may differ for each attempt. If all nodes reject the request (a name,
        a certificate), the error is raised.

        When the time is over, raises an error that a retry may solve: a node's own error, or else
        `Unreachable` or `rt.Timeout` with the reason why the last call to each node ended. The operation may
        have happened.
        """
        end_s, pause_s, refused = time.monotonic() + timeout_s, PAUSE_S, set[str]()
        failure: RtError | None = None
        lost: dict[str, RtError] = {}
        refusal: RtError | None = None
        first = self._at
        for turn in itertools.count(1):
            if (left_s := end_s - time.monotonic()) <= 0:
                break
            at = (first + turn - 1) % len(self._endpoints)
            endpoint = self._endpoints[at]
            try:
                sent = data if isinstance(data, bytes) else data()
                answer = await self._call(endpoint, f"/{service}/{method}", sent, min(left_s, ATTEMPT_S))
            except RtError as error:
                # A single node may reject the request, for example because of its own certificate.
                if not error.retriable:
                    refused.add(endpoint)
                    refusal = error
                elif isinstance(error, Timeout | Unreachable):
                    lost[endpoint] = error
                else:
                    failure = error
                if refused.issuperset(self._endpoints):
                    raise
            else:
                self._at = at
                return answer
            if turn % len(self._endpoints) == 0:
                drawn_s = random.uniform(pause_s / 2, pause_s)
                await asyncio.sleep(min(drawn_s, max(end_s - time.monotonic(), 0)))
                pause_s = min(2 * pause_s, PAUSE_S_MAX)
        raise failure or self._silence(lost, timeout_s) from refusal

    def _silence(self, lost: Mapping[str, RtError], timeout_s: float) -> RtError:
        kind = Timeout if all(isinstance(one, Timeout) for one in lost.values()) else Unreachable
        hints = (one.hint for one in lost.values() if one.hint)
        return kind(
            "no node answered",
            got="; ".join(f"{each}: {lost[each].reason}" for each in self._endpoints if each in lost) or None,
            expected=f"an answer within {timeout_s:g} s",
            hint=next(hints, "Check the endpoints and the network."),
        )

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
