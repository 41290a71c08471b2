"""HTTP by aiohttp: what `answering` says to each request. No policy of its own.

Laws. A body is read for whoever may send one, up to its bound, and never beyond. A connection that brought
one, or that is old, is closed behind the answer.
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
from sequencer.rest.answering import Answering
from sequencer.rest.body import BODY_BYTES_MAX
from sequencer.rest.connection import HEADERS_S, Connection
from sequencer.rest.errors import BadRequest
from sequencer.rest.exchange import Reply, Request, error_reply, too_large

_HEADERS: Final = {
    "Server": "rt",
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
}

logger = logging.getLogger("sequencer")

_Handle: TypeAlias = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


class App:
    """One port's answers over HTTP."""

    def __init__(self, answering: Answering) -> None:
        self._answering = answering

    def runner(self) -> web.ServerRunner:
        """What speaks HTTP for it; to be set up, and cleaned up."""
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
        """Where aiohttp logs: what is no HTTP is counted instead, for anybody can send it."""

        def is_ours(record: logging.LogRecord) -> bool:
            error = record.exc_info[1] if record.exc_info else None
            if isinstance(error, HttpProcessingError):
                self._answering.refused[type(error).__name__] += 1
                return False
            if isinstance(error, ConnectionError):
                return False  # The peer hung up before it was answered: whoever likes could fill the log.
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
            with contextlib.suppress(ConnectionError):  # The peer is gone, and aiohttp sees that too.
                await response.prepare(request)
                await response.write_eof()
            return response
        finally:
            connection.end_request()

    async def _reply(self, request: web.BaseRequest, connection: Connection) -> Reply:
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
    """Makes a `_Handler` of each connection."""

    def __init__(self, handler: _Handle, **options: Any) -> None:
        super().__init__(handler, **options)
        self._options = options

    def __call__(self) -> web.RequestHandler:
        return _Handler(self, loop=asyncio.get_running_loop(), **self._options)


class _Handler(web.RequestHandler):
    """aiohttp's; what it has against a request is told as everything else is."""

    __slots__ = ()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Log or count it as aiohttp does, and tell it in JSON; the connection is closed behind that."""
        super().handle_error(request, status, exc, message)
        if status == 400:
            reply = error_reply(BadRequest("this is no request, or one beyond the bounds", got=message))
        else:
            reply = error_reply(RtError("the answer could not be made", hint="See the node's log."))
        response = _response(reply)
        response.force_close()
        return response


def _response(reply: Reply) -> web.Response:
    response = web.Response(body=reply.body, status=reply.status)
    response.headers.update({"Content-Type": reply.content_type, **_HEADERS, **reply.headers})
    return response


def _reading(request: web.BaseRequest) -> Callable[[], Awaitable[bytes]]:
    """What reads the body."""

    async def read() -> bytes:
        if (request.content_length or 0) > BODY_BYTES_MAX:
            raise too_large()
        if request.headers.get("Expect", "").lower() == "100-continue" and request.transport is not None:
            request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        content = bytearray()
        while piece := await request.content.readany():
            content += piece
            if len(content) > BODY_BYTES_MAX:
                raise too_large()
        return bytes(content)

    return read


def _connection(request: web.BaseRequest) -> Connection:
    """The connection that the request came by. `ConnectionError` if it is gone."""
    transport = request.transport
    if transport is None:
        raise ConnectionResetError("the peer is gone")
    connection = transport.get_protocol()
    assert isinstance(connection, Connection), connection
    return connection
