"""REST through the gRPC port, for clients that reach no other port.

Invariants:
- The certificate identifies the caller; the `Dispatcher` of the REST port authorizes it.
- A rejection is a reply, not a gRPC error.
- Calls per identity are limited. A call counts until its reply is sent, also if the client does not read.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any, Final, cast

from google.protobuf.message import DecodeError

from rt.errors import ProtocolViolation, RtError, Timeout
from rt.net.grpc_auth import Context
from rt.net.grpc_channel import Register, StreamCaps, caller
from rt.net.grpc_errors import Unreachable
from rt.net.identity import ROLES, Identity, Role
from rt.net.rest_client import REST_METHOD, TARGET_BYTES_MAX
from rt.v1 import rest_pb2 as pb
from sequencer.rest.base.errors import BadRequest
from sequencer.rest.base.request import Reply, Request
from sequencer.rest.http.connection import REQUEST_S
from sequencer.rest.http.dispatcher import REQUESTS_PER_IDENTITY_MAX, Dispatcher

# isort: split
import grpc

TUNNEL_ROLES: Final[dict[str, tuple[Role, ...]]] = {REST_METHOD: ROLES}
"""Roles for `rt.net.grpc_channel.serve`: all, because `Dispatcher` checks the role per path."""


class Tunnel:
    """Serves `Rest.Call` with the dispatcher that `answering` returns. `answering` returns None while the
    node starts.
    """

    def __init__(
        self, answering: Callable[[], Dispatcher | None], *, identify: Callable[[], Identity] = caller
    ) -> None:
        self._answering, self._identify = answering, identify
        self.places: Final = StreamCaps(REQUESTS_PER_IDENTITY_MAX)
        """Running calls, and calls whose reply is not sent yet."""

    def register(self, server: grpc.aio.Server) -> None:
        _, service, method = REST_METHOD.split("/")
        handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            method: grpc.unary_unary_rpc_method_handler(self.call)
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))

    async def call(self, data: bytes, context: Context) -> bytes:
        """Answer one request; request and reply are serialized messages."""
        request = _decode(data)
        identity = self._identify()
        answering = self._answering()
        if answering is None:
            raise Unreachable("this node is starting", hint="Try again, or another node.")
        places = contextlib.ExitStack()
        try:
            places.enter_context(self.places.counted(identity))
        except RtError as error:
            return _encode(answering.refuse(error))
        cast("Any", context).add_done_callback(lambda _: places.close())
        return _encode(await _answered(answering, request, identity))


async def _answered(answering: Dispatcher, request: pb.RestRequest, identity: Identity) -> Reply:
    size = len(request.target.encode())
    if size > TARGET_BYTES_MAX:
        limit = f"at most {TARGET_BYTES_MAX} bytes"
        return answering.refuse(
            BadRequest("the target is too long", where="target", got=size, expected=limit)
        )
    asked = Request.of(request.method, request.target, request.body or None)
    try:
        async with asyncio.timeout(REQUEST_S):
            reply = await answering.answer(asked, identity)
    except TimeoutError:
        return answering.refuse(Timeout("the response took too long", expected=f"{REQUEST_S:g} s"))
    if request.method == "HEAD":
        return Reply(reply.status, b"", reply.content_type)
    return reply


def _decode(data: bytes) -> pb.RestRequest:
    try:
        return pb.RestRequest.FromString(data)
    except DecodeError as error:
        raise ProtocolViolation("a peer sent an invalid RestRequest") from error


def _encode(reply: Reply) -> bytes:
    made = pb.RestReply(status=reply.status, content_type=reply.content_type, body=reply.body)
    return made.SerializeToString()


def rest_service(answering: Callable[[], Dispatcher | None]) -> Register:
    """The `Rest` service, for `rt.net.grpc_channel.serve`."""
    return Tunnel(answering).register
