"""REST through the gRPC port: the same answers to the same certificates, for whoever reaches no other port.

Laws. Who asks stands in the certificate; whether it may, `Answering` says, which the REST port asks as well.
What it refuses is a reply. An identity has so many calls at a time, each counted until its reply has left:
who asks for much and reads none of it is bounded as well.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any, Final, cast

from google.protobuf.message import DecodeError

from rt.errors import ProtocolViolation, RtError, Timeout
from rt.net.identity import ROLES, Identity, Role
from rt.net.rest import REST_METHOD, TARGET_BYTES_MAX
from rt.net.rpc import Register, StreamCaps, caller
from rt.net.rpc_gate import Context
from rt.v1 import rest_pb2 as pb
from sequencer.rest.answering import REQUESTS_PER_IDENTITY_MAX, Answering
from sequencer.rest.connection import REQUEST_S
from sequencer.rest.errors import BadRequest, NotReady
from sequencer.rest.exchange import Reply, Request

# isort: split
import grpc

TUNNEL_ROLES: Final[dict[str, tuple[Role, ...]]] = {REST_METHOD: ROLES}
"""Who may call it, for `rt.net.rpc.serve`: everybody, as on the REST port, and then as `Answering` says."""


class Tunnel:
    """Answers `Rest.Call` by what `answering` returns; None while the node is only starting."""

    def __init__(
        self,
        answering: Callable[[], Answering | None],
        *,
        identify: Callable[[], Identity] = caller,
    ) -> None:
        self._answering, self._identify = answering, identify
        self.places: Final = StreamCaps(REQUESTS_PER_IDENTITY_MAX)
        """Calls that are being answered, or whose reply has not left."""

    def register(self, server: grpc.aio.Server) -> None:
        """Add the service to a server."""
        _, service, method = REST_METHOD.split("/")
        handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            method: grpc.unary_unary_rpc_method_handler(self.call)
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))

    async def call(self, data: bytes, context: Context) -> bytes:
        """Answer one request; messages come and go as bytes."""
        request = _decode(data)
        identity = self._identify()
        answering = self._answering()
        if answering is None:
            raise NotReady("this node is starting", hint="Try again, or another node.")
        places = contextlib.ExitStack()
        try:
            places.enter_context(self.places.taken(identity))
        except RtError as error:
            return _encode(answering.refuse(error))
        cast("Any", context).add_done_callback(lambda _: places.close())
        return _encode(await _answered(answering, request, identity))


async def _answered(answering: Answering, request: pb.RestRequest, identity: Identity) -> Reply:
    size = len(request.target.encode())
    if size > TARGET_BYTES_MAX:
        wanted = f"{TARGET_BYTES_MAX} bytes at most"
        return answering.refuse(BadRequest("the target is too long", where="target", got=size, wanted=wanted))
    asked = Request.of(request.method, request.target, request.body or None)
    try:
        async with asyncio.timeout(REQUEST_S):
            reply = await answering.answer(asked, identity)
    except TimeoutError:
        return answering.refuse(Timeout("the answer took too long", wanted=f"{REQUEST_S:g} s"))
    if request.method == "HEAD":
        return Reply(reply.status, b"", reply.content_type)
    return reply


def _decode(data: bytes) -> pb.RestRequest:
    try:
        return pb.RestRequest.FromString(data)
    except DecodeError as error:
        raise ProtocolViolation("a peer sent a RestRequest that is not valid") from error


def _encode(reply: Reply) -> bytes:
    made = pb.RestReply(status=reply.status, content_type=reply.content_type, body=reply.body)
    return made.SerializeToString()


def rest_service(answering: Callable[[], Answering | None]) -> Register:
    """The service `Rest`, for `rt.net.rpc.serve`."""
    return Tunnel(answering).register
