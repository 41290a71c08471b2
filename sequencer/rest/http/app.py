"""HTTP with aiohttp: passes each request to a `Dispatcher`, which holds the access policy.

Invariants:
- A body is read only when the dispatcher asks for it, and never above its limit.
- A connection is closed after the response to a request with a body, and when it is old.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeAlias

from aiohttp import web
from aiohttp.http import HttpProcessingError

from rt.errors import CertificateError, RtError
from sequencer.rest.base.errors import BadRequest
from sequencer.rest.base.fields import BODY_BYTES_MAX
from sequencer.rest.base.request import Reply, Request, error_reply, too_large
from sequencer.rest.http.connection import HEADERS_S, HttpConnection
from sequencer.rest.http.dispatcher import Dispatcher

_HEADERS: Final = {"Server": "rt", "Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}

logger = logging.getLogger("sequencer")

_Handle: TypeAlias = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


class App:
    def __init__(self, answering: Dispatcher) -> None:
        self._answering = answering

    def runner(self) -> web.ServerRunner:
        """The aiohttp runner. The caller must set it up and clean it up."""
        server = _Server(
            self._handle,
            access_log=None,
            logger=self._http_logger(),
            keepalive_timeout=HEADERS_S,
            lingering_time=1.0,
            auto_decompress=False,
            read_bufsize=2**14,
            max_line_size=4096,
            max_field_size=4096,
            max_headers=64,
        )
        return web.ServerRunner(server, shutdown_timeout=0.5)

    def _http_logger(self) -> logging.Logger:
        """The logger for aiohttp. Malformed HTTP is counted, not logged: any client can send it."""

        def is_ours(record: logging.LogRecord) -> bool:
            error = record.exc_info[1] if record.exc_info else None
            if isinstance(error, HttpProcessingError):
                self._answering.refused[type(error).__name__] += 1
                return False
            if isinstance(error, ConnectionError):
                return False  # The peer disconnected early. Logging this would let it fill the log.
            return logger.isEnabledFor(record.levelno)

        made = logging.Logger("sequencer.http", logging.DEBUG)
        made.parent = logger
        made.addFilter(is_ours)
        return made

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        connection = _connection(request)
        connection.begin_request()
        try:
            reply = await self._reply(request, connection)
            response = _response(reply)
            if connection.is_old or request.body_exists:
                response.force_close()
            with contextlib.suppress(ConnectionError):  # The peer disconnected; aiohttp notices too.
                await response.prepare(request)
                await response.write_eof()
            return response
        finally:
            connection.end_request()

    async def _reply(self, request: web.BaseRequest, connection: HttpConnection) -> Reply:
        try:
            identity = connection.identity
        except CertificateError as error:
            return self._answering.refuse(error)
        asked = Request(
            request.method,
            str(request.rel_url),
            request.headers.get("Content-Type", ""),
            _reading(request) if request.body_exists else None,
        )
        return await self._answering.answer(asked, identity)


class _Server(web.Server):
    def __init__(self, handler: _Handle, **options: Any) -> None:
        super().__init__(handler, **options)
        self._options = options

    def __call__(self) -> web.RequestHandler:
        return _Handler(self, loop=asyncio.get_running_loop(), **self._options)


class _Handler(web.RequestHandler):
    """Reports errors of aiohttp in the JSON form of all errors."""

    __slots__ = ()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Log or count it as aiohttp does, respond in JSON, close the connection."""
        super().handle_error(request, status, exc, message)
        if status == 400:
            reply = error_reply(BadRequest("malformed HTTP request, or above a limit", got=message))
        else:
            reply = error_reply(RtError("internal error", hint="Check the node's log."))
        response = _response(reply)
        response.force_close()
        return response


def _response(reply: Reply) -> web.Response:
    response = web.Response(body=reply.body, status=reply.status)
    response.headers.update({"Content-Type": reply.content_type, **_HEADERS, **reply.headers})
    return response


def _reading(request: web.BaseRequest) -> Callable[[], Awaitable[bytes]]:
    async def read() -> bytes:
        if (request.content_length or 0) > BODY_BYTES_MAX:
            raise too_large()
        if request.headers.get("Expect", "").lower() == "100-continue" and request.transport is not None:
            request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        content = bytearray()
        try:
            while piece := await request.content.readany():
                content += piece
                if len(content) > BODY_BYTES_MAX:
                    raise too_large()
        except ConnectionError as error:
            raise BadRequest("the client disconnected before the end of the request", where="body") from error
        return bytes(content)

    return read


def _connection(request: web.BaseRequest) -> HttpConnection:
    transport = request.transport
    if transport is None:
        raise ConnectionResetError("the peer disconnected")
    connection = transport.get_protocol()
    assert isinstance(connection, HttpConnection), connection
    return connection
