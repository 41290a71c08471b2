"""The gRPC service `Groups`: checks which positions a client may move.

Invariants:
- A client moves and sees only positions that start with the name in its certificate and `~`.
- The number of calls in progress is bounded for each identity.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from google.protobuf.message import DecodeError

from rt.errors import CertificateError, Fenced, ProtocolViolation
from rt.names import check_hold_name, session_owner
from rt.net.grpc_auth import Context
from rt.net.grpc_channel import StreamCaps, caller
from rt.net.identity import Identity, Role
from rt.net.lease_client import GROUP_SERVICE, POSITIONS_PER_CALL_MAX
from rt.v1 import groups_pb2 as pb
from sequencer.data.group_positions import GroupPositions

# isort: split
import grpc

CALLS_PER_IDENTITY_MAX: Final = 64
"""The members of a group share a certificate, and each makes one call at a time."""
REQUEST_BYTES_MAX: Final = 2**17
_POSITION_END: Final = 1 << 63
GROUP_METHOD_ROLES: Final[dict[str, tuple[Role, ...]]] = {f"/{GROUP_SERVICE}/Acknowledge": ("subscriber",)}
"""Roles that may call each method, for `rt.net.grpc_channel.serve`."""


class GroupService:
    def __init__(self, positions: GroupPositions, *, identify: Callable[[], Identity] = caller) -> None:
        self._positions, self._identify = positions, identify
        self._caps = StreamCaps(CALLS_PER_IDENTITY_MAX)

    def register(self, server: grpc.aio.Server) -> None:
        handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            "Acknowledge": grpc.unary_unary_rpc_method_handler(self.acknowledge)
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(GROUP_SERVICE, handlers),))

    async def acknowledge(self, data: bytes, _: Context | None = None) -> bytes:
        identity = self._identify()
        asked = _decode(data)
        requested = {row.name: row.position for row in asked.positions}
        for name, position in requested.items():
            check_hold_name(name)
            if not name.startswith(f"{identity.name}~"):
                raise CertificateError(
                    "the name of a group's position starts with the name in the certificate",
                    where=identity.uri,
                    got=name,
                    expected=f"{identity.name}~… instead of {session_owner(name)}",
                )
            if position >= _POSITION_END:
                raise ProtocolViolation("not a position", where=name, got=position)
        with self._caps.counted(identity):
            if requested:
                if asked.HasField("epoch"):
                    _check_epoch(asked.epoch.forced, self._positions.resets[1])
                await self._positions.acknowledge(requested)
            else:
                await self._positions.catch_up()
            found = self._positions.positions(f"{identity.name}~")
            start, end = self._positions.log_range
        rows = (pb.GroupPosition(name=name, position=at) for name, at in sorted(found.items()))
        reply = pb.GroupPositions(positions=rows, log_start=start, log_end=end)
        if not requested:
            epoch, forced, runs = self._positions.resets
            begun = (pb.LogRun(run=run, first=first) for run, first in runs.items())
            reply.epoch.CopyFrom(pb.LogEpoch(number=epoch, forced=forced, runs=begun))
        return reply.SerializeToString()


def _check_epoch(forced: bytes, known: bytes) -> None:
    """Check that the positions are of this log, because a forced reset may have taken the log back.
    `rt.Fenced` if they are not.
    """
    if forced != known:
        raise Fenced(
            "a reset of the cluster was forced since the positions were read",
            got=forced.hex() or "none forced",
            expected=known.hex() or "none forced",
            hint="They may stand for other messages now: start again, from the positions of the cluster.",
        )


def _decode(data: bytes) -> pb.GroupPositions:
    if len(data) > REQUEST_BYTES_MAX:
        raise ProtocolViolation(
            "a peer sent positions that are too large", got=len(data), expected=REQUEST_BYTES_MAX
        )
    try:
        asked = pb.GroupPositions.FromString(data)
    except DecodeError as error:
        raise ProtocolViolation("a peer sent positions that are not valid") from error
    if (count := len(asked.positions)) > POSITIONS_PER_CALL_MAX:
        raise ProtocolViolation("a peer sent too many positions", got=count, expected=POSITIONS_PER_CALL_MAX)
    return asked
