"""HTTP by aiohttp: who asks, what for, and the answer's bytes. No policy but that of `endpoints`.

Laws. Nobody gets past a certificate of another stream, or of a role that the path is not for. A request has
no body. So many are answered at a time, in all and for each identity; more are told to come again. What goes
wrong is told as JSON by its class and sentence; what is broken here goes to the log alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Executor
from typing import Final

from aiohttp import web
from aiohttp.http import HttpProcessingError

from rt.errors import CertificateError, Overloaded, RtError
from rt.net.identity import Identity
from sequencer.rest.connection import HEADERS_S, Connection
from sequencer.rest.endpoints import HTML, JSON, Endpoint
from sequencer.rest.errors import BadRequest, MethodNotAllowed, NoSuchPath, error_body, http_status
from sequencer.rest.node_view import NodeView
from sequencer.rest.query import parse_query
from sequencer.rest.views import Asked

REQUESTS_MAX: Final = 32
REQUESTS_PER_IDENTITY_MAX: Final = 8

_HEADERS: Final = {
    "Server": "rt",
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
}
_PAGE_POLICY: Final = (
    "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'; form-action 'none'"
)

logger = logging.getLogger("sequencer")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class App:
    """The answers of one port. With `stream`, callers show certificates, of that stream."""

    def __init__(
        self,
        endpoints: Sequence[Endpoint],
        look: Callable[[], NodeView],
        pool: Executor,
        *,
        stream: str | None,
    ) -> None:
        self.statuses: Final = Counter[int]()
        """Answers by HTTP status."""
        self.refused: Final = Counter[str]()
        """Errors that were told, by class."""
        self._endpoints, self._look, self._pool, self._stream = endpoints, look, pool, stream
        self.busy: Final = Counter[str]()
        """Requests that are being answered, by the identity's URI ("" without certificates)."""
        self.application = web.Application(middlewares=[self._guard])
        for endpoint in endpoints:
            self.application.router.add_get(endpoint.path, self._handler(endpoint))

    def runner(self) -> web.AppRunner:
        """What speaks HTTP for it; to be set up, and cleaned up."""
        return web.AppRunner(
            self.application,
            handle_signals=False,
            access_log=None,
            logger=self._http_logger(),
            keepalive_timeout=HEADERS_S,
            lingering_time=1.0,
            shutdown_timeout=0.5,
            auto_decompress=False,
            read_bufsize=2**14,
            max_line_size=4096,
            max_field_size=4096,
            max_headers=64,
        )

    def _http_logger(self) -> logging.Logger:
        """Where aiohttp logs: what is no HTTP is counted instead, for anybody can send it."""

        def is_ours(record: logging.LogRecord) -> bool:
            error = record.exc_info[1] if record.exc_info else None
            if isinstance(error, HttpProcessingError):
                self.refused[type(error).__name__] += 1
                return False
            return logger.isEnabledFor(record.levelno)

        made = logging.Logger("sequencer.http", logging.DEBUG)
        made.parent = logger
        made.addFilter(is_ours)
        return made

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Around every request: who asks, bounds, and what errors become."""
        connection = _connection(request)
        connection.begin_request()
        try:
            try:
                response = await self._answer(request, connection, handler)
            except RtError as error:
                self.refused[type(error).__name__] += 1
                response = _error_response(error)
            except Exception as error:
                logger.critical("rest_broken path=%r", request.path[:200], exc_info=error)
                response = _error_response(
                    RtError("the answer could not be made", hint="See the node's log.")
                )
            self.statuses[response.status] += 1
            if connection.is_old or request.body_exists:
                response.force_close()
            response.headers.update(_HEADERS)
            with contextlib.suppress(ConnectionError):  # The peer is gone, and aiohttp sees that too.
                await response.prepare(request)
                await response.write_eof()
            return response
        finally:
            connection.end_request()

    async def _answer(
        self, request: web.Request, connection: Connection, handler: Handler
    ) -> web.StreamResponse:
        identity = self._admitted(connection)
        if request.body_exists:
            raise BadRequest("a request has no body here", where=request.path, wanted="none")
        who = "" if identity is None else identity.uri
        most = REQUESTS_MAX if identity is None else REQUESTS_PER_IDENTITY_MAX
        if self.busy.total() >= REQUESTS_MAX or self.busy[who] >= most:
            raise Overloaded("too many requests at once", where=who or None, hint="Try again in a second.")
        self.busy[who] += 1
        try:
            return await handler(request)
        except web.HTTPMethodNotAllowed as error:
            allowed = ", ".join(sorted(error.allowed_methods))
            raise MethodNotAllowed(
                "the path is there for another method",
                where=request.path,
                got=request.method,
                wanted=allowed,
            ) from None
        except web.HTTPNotFound:
            paths = ", ".join(one.path for one in self._endpoints)
            raise NoSuchPath("nothing is there", where=repr(request.path)[:200], wanted=paths) from None
        finally:
            self.busy[who] -= 1
            if not self.busy[who]:
                del self.busy[who]

    def _admitted(self, connection: Connection) -> Identity | None:
        """Who asks; `rt.CertificateError` unless of this stream."""
        if self._stream is None:
            return None
        identity = connection.identity
        if identity is None:
            raise CertificateError("the peer showed no certificate")
        if identity.stream != self._stream:
            raise CertificateError("a certificate of another stream", got=identity.uri, wanted=self._stream)
        return identity

    def _handler(self, endpoint: Endpoint) -> Handler:
        async def handle(request: web.Request) -> web.StreamResponse:
            identity = _connection(request).identity
            check_role(endpoint, identity)
            query = parse_query(request.query.items(), endpoint.parameters)
            asked = Asked(self._look(), identity, query)
            if endpoint.may_be_large:
                loop = asyncio.get_running_loop()
                content, status = await loop.run_in_executor(self._pool, _content, endpoint, asked)
            else:
                content, status = _content(endpoint, asked)
            headers = {"Content-Type": endpoint.content_type}
            if endpoint.content_type == HTML:
                headers["Content-Security-Policy"] = _PAGE_POLICY
            return web.Response(body=content, status=status, headers=headers)

        return handle


def check_role(endpoint: Endpoint, identity: Identity | None) -> None:
    """`rt.CertificateError` unless the path is for that role; for None (no certificates) it is public."""
    if identity is None:
        assert endpoint.is_public, endpoint.path
    elif identity.role not in endpoint.roles:
        raise CertificateError(
            "this role may not read that",
            where=endpoint.path,
            got=identity.uri,
            wanted=f"role {' or '.join(sorted(endpoint.roles))}",
        )


def _content(endpoint: Endpoint, asked: Asked) -> tuple[bytes, int]:
    """The bytes of an answer, and its status; in any thread."""
    answer = endpoint.view(asked)
    if isinstance(answer.body, str):
        return answer.body.encode(), answer.status
    return _json(answer.body), answer.status


def _json(body: object) -> bytes:
    return json.dumps(body, separators=(",", ":")).encode() + b"\n"


def _error_response(error: RtError) -> web.Response:
    status = http_status(error)
    headers = {"Content-Type": JSON}
    if status == 405:
        headers["Allow"] = str(error.wanted)
    if status == 503:
        headers["Retry-After"] = "1"
    return web.Response(body=_json(error_body(error)), status=status, headers=headers)


def _connection(request: web.Request) -> Connection:
    """The connection that the request came by. `ConnectionError` if it is gone."""
    transport = request.transport
    if transport is None:
        raise ConnectionResetError("the peer is gone")
    connection = transport.get_protocol()
    assert isinstance(connection, Connection), connection
    return connection
