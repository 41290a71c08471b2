"""One HTTP connection: wraps the aiohttp protocol with timeouts.

Invariants:
- A peer that is silent, slow, or does not read its responses is disconnected.
- A connection lasts about ten minutes at most, so that certificates are checked again.
- The peer's identity is fixed by the handshake.
"""

from __future__ import annotations

import asyncio
import math
from typing import Final, Protocol, cast

from rt.errors import CertificateError
from rt.net.cert_validity import clock_s
from rt.net.identity import Identity, peer_of

HEADERS_S: Final = 10.0
"""From the end of a request (or the handshake) to the last header of the next."""
REQUEST_S: Final = 30.0
"""From the last header of a request to the end of its response."""
AGE_S: Final = 600.0


class ConnectionOwner(Protocol):
    """Counts connections."""

    def admit(self, connection: HttpConnection) -> bool:
        """Register it; False if there are too many."""

    def release(self, connection: HttpConnection) -> None:
        """Unregister a closed connection."""


class HttpConnection(asyncio.Protocol):
    """Forwards events to `inner`; aborts the connection at a timeout."""

    def __init__(
        self, inner: asyncio.Protocol, owner: ConnectionOwner, *, headers_s: float, request_s: float
    ) -> None:
        self._inner, self._owner = inner, owner
        self._headers_s, self._request_s = headers_s, request_s
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._made_s = self._loop.time()
        self._identity: Identity | CertificateError | None = None
        self._end_s = math.inf
        """When the peer's certificate expires, seconds since 1970."""
        self.is_busy = False
        """Whether a request is being answered."""

    @property
    def identity(self) -> Identity | None:
        """None without TLS. Raises `rt.CertificateError` if the certificate is invalid or has expired."""
        if isinstance(self._identity, CertificateError):
            raise self._identity
        if clock_s() > self._end_s:
            raise CertificateError(
                "the client certificate of this connection has expired",
                hint="Reconnect with a new certificate.",
            )
        return self._identity

    @property
    def is_old(self) -> bool:
        """Whether to close it after the current response."""
        return self._loop.time() - self._made_s > AGE_S

    def begin_request(self) -> None:
        """Called when all headers of a request are received."""
        self.is_busy = True
        self._arm(self._request_s)

    def end_request(self) -> None:
        """Called when the response is written to the transport."""
        self.is_busy = False
        self._arm(self._headers_s)

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._identity, self._end_s = _peer(transport)
        self._inner.connection_made(transport)
        self._arm(self._headers_s)
        if not self._owner.admit(self):
            self.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._owner.release(self)
        self._inner.connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._inner.data_received(data)

    def eof_received(self) -> bool | None:
        return self._inner.eof_received()

    def pause_writing(self) -> None:
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._inner.resume_writing()

    def _arm(self, seconds: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(seconds, self.abort)


def _peer(transport: asyncio.BaseTransport) -> tuple[Identity | CertificateError | None, float]:
    """The identity, and when its certificate expires."""
    tls = transport.get_extra_info("ssl_object")
    if tls is None:
        return None, math.inf
    where = f"peer {transport.get_extra_info('peername')}"
    content = tls.getpeercert(binary_form=True)
    if content is None:
        return CertificateError("the client presented no certificate", where=where), math.inf
    try:
        return peer_of(content, where=where)
    except CertificateError as error:
        return error, math.inf
