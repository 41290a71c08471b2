"""The gRPC service `Leases`: who may hold which, and what is asked for as a command.

Laws. Who asks stands in the certificate: it holds and sees leases of the groups in it alone, in its own name.
What is asked for is checked whole before anything is proposed. An identity has so many calls at a time.
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
from sequencer.state.lease_commands import AcquireLeases, HeldLease, ReleaseLeases, RenewLeases

# isort: split
import grpc

CALLS_PER_IDENTITY_MAX: Final = 4
"""An owner asks for one thing at a time; several of one certificate do so seldom."""
REQUEST_BYTES_MAX: Final = 2**17
"""As many of the longest names as a command may have, and room to spare. Each row of a request takes far more
memory once it is decoded."""
LEASE_METHOD_ROLES: Final[dict[str, tuple[Role, ...]]] = {
    f"/{LEASE_SERVICE}/{method}": LEASE_ROLES for method in ("Acquire", "Renew", "Release", "List")
}
"""Who may call it, for `rt.net.grpc_channel.serve`; of these only who has a group of leases in its
certificate."""

T = TypeVar("T", bound=Message)


class LeaseService:
    """Answers by `leasing`."""

    def __init__(self, leasing: LeaseManager, *, identify: Callable[[], Identity] = caller) -> None:
        self._leasing, self._identify = leasing, identify
        self._caps = StreamCaps(CALLS_PER_IDENTITY_MAX)

    def register(self, server: grpc.aio.Server) -> None:
        """Add the service to a server."""
        handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            "Acquire": grpc.unary_unary_rpc_method_handler(self.acquire),
            "Renew": grpc.unary_unary_rpc_method_handler(self.renew),
            "Release": grpc.unary_unary_rpc_method_handler(self.release),
            "List": grpc.unary_unary_rpc_method_handler(self.list),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(LEASE_SERVICE, handlers),))

    async def acquire(self, data: bytes, _: Context | None = None) -> bytes:
        """Messages come and go as bytes, as in all of these."""
        asked = _decode(pb.LeaseRequest, data)
        names = tuple(one.name for one in asked.leases)
        return await self._run(
            asked, lambda: AcquireLeases(asked.request, asked.owner, asked.duration_ms, names)
        )

    async def renew(self, data: bytes, _: Context | None = None) -> bytes:
        """See `RenewLeases`."""
        asked = _decode(pb.LeaseRequest, data)
        return await self._run(asked, lambda: RenewLeases(asked.request, asked.owner, _held(asked)))

    async def release(self, data: bytes, _: Context | None = None) -> bytes:
        """See `ReleaseLeases`."""
        asked = _decode(pb.LeaseRequest, data)
        return await self._run(asked, lambda: ReleaseLeases(asked.request, asked.owner, _held(asked)))

    async def list(self, data: bytes, _: Context | None = None) -> bytes:
        """What is held, as this node has applied it."""
        prefix = _decode(pb.LeaseListRequest, data).prefix
        if "/" not in prefix:
            raise ProtocolViolation(
                "leases are listed by a prefix", got=repr(prefix)[:200], expected="<group>/…"
            )
        identity = self._identify()
        _check_groups(identity, [prefix])
        with self._caps.counted(identity):
            leases = self._leasing.state().leases
            found = sorted(name for name in leases if name.startswith(prefix))
        rows = (pb.LeaseRow(name=one, owner=leases[one].owner, token=leases[one].token) for one in found)
        return pb.LeaseList(leases=rows).SerializeToString()

    async def _run(self, asked: pb.LeaseRequest, make: Callable[[], LeaseCommand]) -> bytes:
        identity = self._identify()
        _check_groups(identity, [one.name for one in asked.leases])
        check_lease_owner(asked.owner)
        if session_owner(asked.owner) != identity.name:
            raise CertificateError(
                "a lease's owner is the name in its certificate, or that with a suffix",
                got=asked.owner,
                expected=f"{identity.name} or {identity.name}~suffix",
            )
        try:
            command = make()
        except InvalidName:
            raise
        except ValueError as error:
            raise ProtocolViolation(f"leases are asked for as nobody may: {error}") from error
        with self._caps.counted(identity):
            leased = await self._leasing.run(command)
        return pb.LeaseReply(tokens=leased.tokens).SerializeToString()


def _check_groups(identity: Identity, names: Iterable[str]) -> None:
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
