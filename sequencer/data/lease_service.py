"""The gRPC service `Leases`: checks who may hold which leases, and turns requests into commands.

Invariants:
- A client holds and sees only leases of the groups in its certificate, in its own name.
- A request is checked completely before anything is proposed.
- The number of calls in progress is bounded for each identity.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final, TypeVar

from google.protobuf.message import DecodeError, Message

from rt.errors import CertificateError, InvalidName, ProtocolViolation
from rt.names import check_lease_owner, lease_group, session_owner
from rt.net.grpc_auth import Context
from rt.net.grpc_channel import StreamCaps, caller
from rt.net.identity import LEASE_ROLES, Identity, Role
from rt.net.lease_client import LEASE_SERVICE
from rt.v1 import leases_pb2 as pb
from sequencer.data.lease_manager import LeaseCommand, LeaseManager
from sequencer.state.leases.leases import AcquireLeases, HeldLease, ReleaseLeases, RenewLeases

# isort: split
import grpc

CALLS_PER_IDENTITY_MAX: Final = 4
"""An owner makes one call at a time, and few owners share a certificate."""
REQUEST_BYTES_MAX: Final = 2**17
"""Enough for a command with the longest names. A decoded request takes far more memory."""
LEASE_METHOD_ROLES: Final[dict[str, tuple[Role, ...]]] = {
    f"/{LEASE_SERVICE}/{method}": LEASE_ROLES for method in ("Acquire", "Renew", "Release", "List")
}
"""Roles that may call each method, for `rt.net.grpc_channel.serve`. Their certificates also need a group of
leases."""

T = TypeVar("T", bound=Message)


class LeaseService:
    def __init__(self, leases: LeaseManager, *, identify: Callable[[], Identity] = caller) -> None:
        self._leases, self._identify = leases, identify
        self._caps = StreamCaps(CALLS_PER_IDENTITY_MAX)

    def register(self, server: grpc.aio.Server) -> None:
        handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            "Acquire": grpc.unary_unary_rpc_method_handler(self.acquire),
            "Renew": grpc.unary_unary_rpc_method_handler(self.renew),
            "Release": grpc.unary_unary_rpc_method_handler(self.release),
            "List": grpc.unary_unary_rpc_method_handler(self.list),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(LEASE_SERVICE, handlers),))

    async def acquire(self, data: bytes, _: Context | None = None) -> bytes:
        """All methods take and return serialized messages."""
        asked = _decode(pb.LeaseRequest, data)
        names = tuple(one.name for one in asked.leases)
        return await self._run(
            asked, lambda: AcquireLeases(asked.request, asked.owner, asked.duration_ms, names)
        )

    async def renew(self, data: bytes, _: Context | None = None) -> bytes:
        asked = _decode(pb.LeaseRequest, data)
        return await self._run(asked, lambda: RenewLeases(asked.request, asked.owner, _held(asked)))

    async def release(self, data: bytes, _: Context | None = None) -> bytes:
        asked = _decode(pb.LeaseRequest, data)
        return await self._run(asked, lambda: ReleaseLeases(asked.request, asked.owner, _held(asked)))

    async def list(self, data: bytes, _: Context | None = None) -> bytes:
        """The leases that are held, as far as this node has applied commands."""
        prefix = _decode(pb.LeaseListRequest, data).prefix
        if "/" not in prefix:
            raise ProtocolViolation(
                "leases are listed by a prefix", got=repr(prefix)[:200], expected="<group>/…"
            )
        identity = self._identify()
        check_groups(identity, [prefix])
        with self._caps.counted(identity):
            leases = self._leases.state().leases
            found = sorted(name for name in leases if name.startswith(prefix))
        rows = (pb.LeaseRow(name=one, owner=leases[one].owner, token=leases[one].token) for one in found)
        return pb.LeaseList(leases=rows).SerializeToString()

    async def _run(self, asked: pb.LeaseRequest, make: Callable[[], LeaseCommand]) -> bytes:
        identity = self._identify()
        check_owner(identity, asked.owner, [one.name for one in asked.leases])
        try:
            command = make()
        except InvalidName:
            raise
        except ValueError as error:
            raise ProtocolViolation(f"the request for leases is not valid: {error}") from error
        with self._caps.counted(identity):
            leased = await self._leases.run(command)
        return pb.LeaseReply(tokens=leased.tokens).SerializeToString()


def check_owner(identity: Identity, owner: str, names: Iterable[str]) -> None:
    """Check that the certificate is for these leases and this owner."""
    check_groups(identity, names)
    check_lease_owner(owner)
    if session_owner(owner) != identity.name:
        raise CertificateError(
            "a lease's owner is the name in its certificate, or that with a suffix",
            got=owner,
            expected=f"{identity.name} or {identity.name}~suffix",
        )


def check_groups(identity: Identity, names: Iterable[str]) -> None:
    """Check that the certificate is for the groups of these leases."""
    strange = sorted({lease_group(name) for name in names} - identity.lease_groups)
    if strange:
        raise CertificateError(
            "the certificate is not for leases of that group",
            where=identity.uri,
            got=repr(strange[0])[:200],
            expected=" or ".join(sorted(identity.lease_groups)) or "none",
            hint=f"`rt certs issue … --lease GROUP` makes one that carries rt://{identity.stream}/lease/GROUP.",
        )


def _held(asked: pb.LeaseRequest) -> tuple[HeldLease, ...]:
    return tuple(HeldLease(one.name, one.token) for one in asked.leases)


def _decode(kind: type[T], data: bytes) -> T:
    if len(data) > REQUEST_BYTES_MAX:
        raise ProtocolViolation(
            f"a peer sent a {kind.__name__} that is too large", got=len(data), expected=REQUEST_BYTES_MAX
        )
    try:
        return kind.FromString(data)
    except DecodeError as error:
        raise ProtocolViolation(f"a peer sent a {kind.__name__} that is not valid") from error
