"""Authorize the calls of a gRPC server, and limit how many run at once.

Invariants:
- A peer is identified by its certificate, while that is valid.
- A method without an allowed role rejects all calls.
- An `RtError` of a handler reaches the peer as it is, any other as a bare INTERNAL, never with a stack trace.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Mapping
from contextvars import ContextVar
from typing import Any, TypeAlias

from rt.errors import CertificateError, Overloaded, ProtocolViolation, RtError
from rt.net.cert_validity import check_valid, end_of, while_valid
from rt.net.grpc_errors import answering
from rt.net.identity import STREAM_HINT, Identity, Role, identity_from_uris
from rt.net.open_calls import OpenCall, OpenCalls, WatchedContext
from rt.net.tls import TLS

# isort: split
import grpc
import grpc.aio

Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]
Roles: TypeAlias = Mapping[str, Collection[Role]]

STREAMS_PER_IDENTITY_MAX = 256

REQUEST_S = 30.0
"""Maximum time from the start of a call with one request to the end of that request."""

_LOG_PAUSE_S = 1.0  # between log lines about rejected calls, so that peers cannot fill the disk

logger = logging.getLogger("rt.net")

_caller: ContextVar[Identity] = ContextVar("caller")


def peer_identity(context: Context) -> Identity:
    """The identity in the peer's certificate. Raises `rt.CertificateError` unless there is exactly one."""
    where = f"peer {context.peer()}"
    auth = context.auth_context()
    if list(auth.get("transport_security_type", ())) != [b"ssl"]:
        raise CertificateError("the peer showed no certificate", where=where)
    return identity_from_uris((uri.decode(errors="replace") for uri in auth.get("peer_uri", ())), where=where)


def caller() -> Identity:
    """The identity of the caller, for the current handler (or its task), on a server of `serve`."""
    return _caller.get()


class StreamCaps:
    """Limits concurrent calls per identity, over all its connections. For one event loop."""

    def __init__(self, per_identity_max: int = STREAMS_PER_IDENTITY_MAX) -> None:
        self.per_identity_max = per_identity_max
        self.counts: Counter[str] = Counter()
        """Current calls by the identity's URI; no entry for zero."""

    @contextlib.contextmanager
    def counted(self, identity: Identity) -> Iterator[None]:
        """Count a call of the identity. Raises `rt.Overloaded` at the limit of this identity."""
        if self.counts[identity.uri] >= self.per_identity_max:
            raise Overloaded(
                "too many calls at once", where=identity.uri, expected=f"at most {self.per_identity_max}"
            )
        self.counts[identity.uri] += 1
        try:
            yield
        finally:
            self.counts[identity.uri] -= 1
            if not self.counts[identity.uri]:
                del self.counts[identity.uri]


class GrpcAuthenticator(grpc.aio.ServerInterceptor):
    """Authorizes calls by identity, stream, role and caps, and converts handler errors to statuses."""

    def __init__(
        self, roles: Roles, tls: TLS | None, insecure_as: Callable[[], Identity] | None, caps: StreamCaps
    ) -> None:
        self.caps = caps
        self.refused: Counter[str] = Counter()
        self.calls = OpenCalls(refused=self.refused)
        self._roles = {method: frozenset(allowed) for method, allowed in roles.items()}
        self._tls = tls
        self._insecure_as = insecure_as
        self._logged_at = -_LOG_PAUSE_S
        self._unlogged = 0

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        handler = await continuation(handler_call_details)
        return handler and self._guarded(handler, handler_call_details.method)  # none: no such method

    def _guarded(self, handler: Any, method: str) -> grpc.RpcMethodHandler[Any, Any]:
        behaviour = (
            handler.stream_stream or handler.stream_unary or handler.unary_stream or handler.unary_unary
        )

        async def serve(requests: Any, context: Context) -> None:
            async with self._entered(method, context) as call:
                request = requests
                if not handler.request_streaming:
                    request = await _only_request(call, context)
                watched: Any = WatchedContext(context, call)
                if not handler.response_streaming:
                    await context.write(await behaviour(request, watched))
                elif not inspect.isasyncgenfunction(behaviour):
                    await behaviour(request, watched)
                else:
                    async with contextlib.aclosing(behaviour(request, watched)) as replies:
                        async for reply in replies:
                            await context.write(reply)

        # On the wire, a single message and a stream look the same, so every method is served as a stream. For
        # other kinds of handlers gRPC would read the request first: any number of requests would be in memory
        # before their calls are counted.
        guarded: grpc.RpcMethodHandler[Any, Any] = grpc.stream_stream_rpc_method_handler(
            serve, handler.request_deserializer, handler.response_serializer
        )
        return guarded

    @contextlib.asynccontextmanager
    async def _entered(self, method: str, context: Context) -> AsyncIterator[OpenCall]:
        async with answering(context, method), contextlib.AsyncExitStack() as places:
            try:
                identity = self._admitted(method, context)
                end_s = math.inf if self._insecure_as else end_of(context)
                check_valid(end_s, identity.uri)
                places.enter_context(self.caps.counted(identity))
                call = await places.enter_async_context(self.calls.entered(identity))
            except RtError as error:
                self._log_rejection(method, context, error)
                raise
            token = _caller.set(identity)
            try:
                async with while_valid(end_s, identity.uri):
                    yield call
            finally:
                _caller.reset(token)

    def _admitted(self, method: str, context: Context) -> Identity:
        identity = self._insecure_as() if self._insecure_as else peer_identity(context)
        if self._tls and identity.stream != self._tls.identity.stream:
            raise CertificateError(
                "a certificate of another stream",
                got=identity.uri,
                expected=self._tls.identity.stream,
                hint=STREAM_HINT,
            )
        allowed = self._roles.get(method, frozenset())
        if identity.role not in allowed:
            raise CertificateError(
                "this role may not call this method",
                where=method,
                got=identity.uri,
                expected=f"role {' or '.join(sorted(allowed)) or 'of none'}",
            )
        return identity

    def _log_rejection(self, method: str, context: Context, error: RtError) -> None:
        self.refused[type(error).__name__] += 1
        now = time.monotonic()
        if now < self._logged_at + _LOG_PAUSE_S:
            self._unlogged += 1
            return
        logger.warning(
            "call_refused method=%s peer=%s unlogged=%d error=%r",
            method,
            context.peer(),
            self._unlogged,
            str(error),
        )
        self._logged_at, self._unlogged = now, 0


async def _only_request(call: OpenCall, context: Context) -> Any:
    try:
        async with asyncio.timeout(REQUEST_S):
            request = await call.read(context)
    except TimeoutError:
        request = grpc.aio.EOF
    if request is grpc.aio.EOF:
        raise ProtocolViolation("no request came", expected=f"one within {REQUEST_S:g} s")
    return request
