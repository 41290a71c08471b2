"""The gRPC service `Tables`: the owner of a lease reads and changes the lease's table. Other clients read the
table and post requests to the owner.

Invariants:
- A client changes only tables of leases that it holds and that belong to the groups in its certificate.
- Only operators, and subscribers with that group, read a table without holding the lease, and post requests.
  Publishers do not.
- A read has everything that earlier owners committed: a node answers only when it has applied the command
  that granted the lease.
- The number of calls in progress is bounded for each identity.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final, TypeVar

from google.protobuf.message import DecodeError, Message

from rt.errors import Fenced, InvalidName, ProtocolViolation, Timeout
from rt.names import check_lease_name
from rt.net.grpc_auth import Context
from rt.net.grpc_channel import StreamCaps, caller
from rt.net.grpc_errors import Unreachable
from rt.net.identity import LEASE_ROLES, Identity, Role
from rt.net.lease_client import TABLE_SERVICE
from rt.v1 import leases_pb2 as pb
from sequencer.data.lease_manager import LeaseManager
from sequencer.data.lease_service import check_groups, check_owner
from sequencer.state.apply_result import PostAnswer
from sequencer.state.leases.requests import LATE_NS, TIME_NS_MAX, PostRequest, look_up, waiting
from sequencer.state.leases.table_rows import MAILBOX, PAGES, TableRow, row_bytes
from sequencer.state.leases.tables import TablePartId, WriteTable
from sequencer.state.state import SequencerState

# isort: split
import grpc

CALLS_PER_IDENTITY_MAX: Final = 32
"""Half of the calls that a node handles at a time. The owners of a group may share a certificate. Each owner
makes one call at a time for each lease.
"""
REQUEST_BYTES_MAX: Final = 2**18
"""Enough for a part of a commit. A decoded request takes far more memory."""
ANSWER_BYTES: Final = 1 << 20
"""Pages are added to an answer until their rows have this size. One page may be larger."""
ASKING_PER_IDENTITY_MAX: Final = 16
"""Maximum number of calls in progress for each identity, for clients that are not the owner."""
_ANOTHER_NODE: Final = "Try again, or another node."
ASKING_ROLES: Final[tuple[Role, ...]] = ("subscriber", "operator")
TABLE_METHOD_ROLES: Final[dict[str, tuple[Role, ...]]] = {
    **{f"/{TABLE_SERVICE}/{method}": LEASE_ROLES for method in ("Write", "Read", "Waiting")},
    **{f"/{TABLE_SERVICE}/{method}": ASKING_ROLES for method in ("Inspect", "Post", "Find")},
}
"""Roles that may call each method, for `rt.net.grpc_channel.serve`. Certificates other than operators' also
need the group of the lease."""

T = TypeVar("T", bound=Message)


class TableService:
    def __init__(
        self,
        leases: LeaseManager,
        *,
        identify: Callable[[], Identity] = caller,
        clock_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self._leases, self._identify, self._clock_ns = leases, identify, clock_ns
        self._caps = StreamCaps(CALLS_PER_IDENTITY_MAX)
        self._asking_caps = StreamCaps(ASKING_PER_IDENTITY_MAX)

    def register(self, server: grpc.aio.Server) -> None:
        handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            "Write": grpc.unary_unary_rpc_method_handler(self.write),
            "Read": grpc.unary_unary_rpc_method_handler(self.read),
            "Inspect": grpc.unary_unary_rpc_method_handler(self.inspect),
            "Post": grpc.unary_unary_rpc_method_handler(self.post),
            "Find": grpc.unary_unary_rpc_method_handler(self.find),
            "Waiting": grpc.unary_unary_rpc_method_handler(self.waiting),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(TABLE_SERVICE, handlers),))

    async def write(self, data: bytes, _: Context | None = None) -> bytes:
        """All methods take and return serialized messages."""
        asked, identity = _decode(pb.TableWrite, data), self._identify()
        lease = asked.lease
        check_owner(identity, lease.owner, [lease.name])
        try:
            part = TablePartId(
                lease.name, lease.owner, lease.token, asked.commit, asked.request, asked.part, asked.is_last
            )
            puts = tuple(TableRow(row.key, row.value) for row in asked.puts)
            command = WriteTable(part, tuple(asked.clears), tuple(asked.deletes), puts)
        except InvalidName:
            raise
        except ValueError as error:
            raise ProtocolViolation(f"the request for a lease's table is not valid: {error}") from error
        with self._caps.counted(identity):
            written = await self._leases.write(command)
        return pb.TableWriteReply(answer=written.answer.value, commits=written.commits).SerializeToString()

    async def read(self, data: bytes, _: Context | None = None) -> bytes:
        asked, identity = _decode(pb.TableRead, data), self._identify()
        check_owner(identity, asked.lease.owner, [asked.lease.name])
        with self._caps.counted(identity):
            state = self._leases.state()
            _require_holder(state, asked.lease)
            return _rows_from(state, asked).SerializeToString()

    async def inspect(self, data: bytes, _: Context | None = None) -> bytes:
        """Like `read`, without the lease, as far as this node has applied commits."""
        asked, identity = _decode(pb.TableRead, data), self._identify()
        _check_asking(identity, asked.lease.name)
        with self._asking_caps.counted(identity):
            return _rows_from(self._leases.state(), asked).SerializeToString()

    async def post(self, data: bytes, _: Context | None = None) -> bytes:
        asked, identity = _decode(pb.TableRequest, data), self._identify()
        _check_asking(identity, asked.lease)
        at_ns = self._clock_ns()
        if (late_ns := at_ns - asked.until_ns) > LATE_NS:
            raise Timeout(
                "the request comes after its time",
                got=f"{late_ns / 10**9:,.0f} s too late",
                hint="If it was sent just now, the clocks of its host and of this node differ.",
            )
        try:
            until_ns = min(at_ns + min(asked.wait_ms * 10**6, TIME_NS_MAX), asked.until_ns + LATE_NS)
            command = PostRequest(asked.lease, asked.id, at_ns, until_ns, asked.content)
        except InvalidName:
            raise
        except ValueError as error:
            raise ProtocolViolation(f"the request to a lease's owner is not valid: {error}") from error
        with self._asking_caps.counted(identity):
            posted = await self._leases.post(command)
            return self._reply(asked, posted.answer)

    async def find(self, data: bytes, _: Context | None = None) -> bytes:
        asked, identity = _decode(pb.TableRequest, data), self._identify()
        _check_asking(identity, asked.lease)
        with self._asking_caps.counted(identity):
            return self._reply(asked, PostAnswer.UNKNOWN)

    def _reply(self, asked: pb.TableRequest, answer: PostAnswer) -> bytes:
        """What this node knows about the request; `answer` if it knows nothing."""
        state = self._leases.state()
        table, lease = state.tables.get(asked.lease), state.leases.get(asked.lease)
        found, content = (PostAnswer.UNKNOWN, b"") if table is None else look_up(table, asked.id)
        known = answer if found is PostAnswer.UNKNOWN else found
        owner = "" if lease is None else lease.owner
        return pb.TableRequestReply(answer=known.value, content=content, owner=owner).SerializeToString()

    async def waiting(self, data: bytes, _: Context | None = None) -> bytes:
        """The requests that wait for the owner, which is the caller.

        A node that has not applied a commit of the owner would return requests that the owner has answered.
        """
        asked, identity = _decode(pb.TableRead, data), self._identify()
        check_owner(identity, asked.lease.owner, [asked.lease.name])
        with self._caps.counted(identity):
            state = self._leases.state()
            _require_holder(state, asked.lease)
            table, reply, size = state.tables.get(asked.lease.name), pb.TableRequests(), 0
            if asked.commits > (0 if table is None else table.commits):
                raise Unreachable("this node does not know the last commit yet", hint=_ANOTHER_NODE)
            for one in () if table is None else waiting(table):
                if size >= ANSWER_BYTES // 2:
                    break  # The owner asks again when it has answered these.
                reply.requests.add(id=one.id, content=one.content, until_ns=one.until_ns)
                size += len(one.content)
        return reply.SerializeToString()


def _rows_from(state: SequencerState, asked: pb.TableRead) -> pb.TableRows:
    """The rows of some pages, starting with the requested page, without requests and answers."""
    name, at, size = asked.lease.name, asked.page, 0
    table, lease = state.tables.get(name), state.leases.get(name)
    reply = pb.TableRows(commits=0 if table is None else table.commits)
    reply.lease.name = name
    if lease is not None:
        reply.lease.owner, reply.lease.token = lease.owner, lease.token
    while table is not None and at < PAGES and size < ANSWER_BYTES:
        for key, value in table.rows.page(at):
            if not key.startswith(MAILBOX):
                reply.rows.add(key=key, value=value)
                size += row_bytes(key, value)
        at += 1
    reply.next_page = at if table is not None and at < PAGES else 0
    return reply


def _check_asking(identity: Identity, lease: str) -> None:
    """Check that the certificate may see this lease's table. Operators may see all."""
    check_lease_name(lease)
    if identity.role != "operator":
        check_groups(identity, [lease])


def _require_holder(state: SequencerState, asked: pb.LeaseRow) -> None:
    """`Fenced` if the lease was lost, `Unreachable` if this node has not applied the command that granted the
    lease.
    """
    lease = state.leases.get(asked.name)
    if lease is not None and (lease.owner, lease.token) == (asked.owner, asked.token):
        return
    if asked.token > state.lease_token:
        raise Unreachable("this node does not know that lease yet", hint=_ANOTHER_NODE)
    raise Fenced(
        "the lease is not held with that token any more",
        where=asked.name,
        got=asked.token,
        expected="none" if lease is None else f"{lease.token}, of {lease.owner}",
        hint="Another owner may have it: acquire it again.",
    )


def _decode(kind: type[T], data: bytes) -> T:
    if len(data) > REQUEST_BYTES_MAX:
        raise ProtocolViolation(
            f"a peer sent a {kind.__name__} that is too large", got=len(data), expected=REQUEST_BYTES_MAX
        )
    try:
        return kind.FromString(data)
    except DecodeError as error:
        raise ProtocolViolation(f"a peer sent a {kind.__name__} that is not valid") from error
