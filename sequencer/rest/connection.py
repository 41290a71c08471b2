"""One HTTP connection: what aiohttp makes of it, between bounds of time.

Laws. A peer that says nothing, speaks slowly or does not read what it gets is cut off; a connection lives ten
minutes at most, so that a certificate is looked at again. Who the peer is was settled by the handshake.
"""

from __future__ import annotations

import asyncio
import math
from typing import Final, Protocol, cast

from cryptography import x509

from rt.errors import CertificateError
from rt.net.identity import Identity, identity_of, reading
from rt.net.rpc_validity import clock_s

HEADERS_S: Final = 10.0
"""From the end of a request (or the handshake) until all headers of the next are here."""
REQUEST_S: Final = 30.0
"""From then until the answer has left."""
AGE_S: Final = 600.0


class Owner(Protocol):
    """Who keeps account of connections."""

    def admit(self, connection: Connection) -> bool:
        """Take it in; False if it is one too many."""

    def release(self, connection: Connection) -> None:
        """It is gone."""


class Connection(asyncio.Protocol):
    """Passes on to `inner` what comes, and ends what takes too long."""

    def __init__(self, inner: asyncio.Protocol, owner: Owner, *, headers_s: float, request_s: float) -> None:
        self._inner, self._owner = inner, owner
        self._headers_s, self._request_s = headers_s, request_s
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._made_s = self._loop.time()
        self._identity: Identity | CertificateError | None = None
        self._end_s = math.inf
        """When the peer's certificate ends, since the epoch."""
        self.is_busy = False
        """Whether a request is being answered."""

    @property
    def identity(self) -> Identity | None:
        """Who the peer is; None without TLS. `rt.CertificateError` if its certificate is bad, or ended."""
        if isinstance(self._identity, CertificateError):
            raise self._identity
        if clock_s() > self._end_s:
            raise CertificateError(
                "the certificate of this connection has ended", hint="Connect with a new one."
            )
        return self._identity

    @property
    def is_old(self) -> bool:
        """Whether this answer shall be its last."""
        return self._loop.time() - self._made_s > AGE_S

    def begin_request(self) -> None:
        """All headers of a request are here."""
        self.is_busy = True
        self._arm(self._request_s)

    def end_request(self) -> None:
        """The answer has left, but for what the transport still holds."""
        self.is_busy = False
        self._arm(self._headers_s)

    def abort(self) -> None:
        """Cut it off."""
        if self._transport is not None:
            self._transport.abort()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio."""
        self._transport = cast("asyncio.Transport", transport)
        self._identity, self._end_s = _peer(transport)
        self._inner.connection_made(transport)
        self._arm(self._headers_s)
        if not self._owner.admit(self):
            self.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio."""
        if self._timer is not None:
            self._timer.cancel()
        self._owner.release(self)
        self._inner.connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """See asyncio."""
        self._inner.data_received(data)

    def eof_received(self) -> bool | None:
        """See asyncio."""
        return self._inner.eof_received()

    def pause_writing(self) -> None:
        """See asyncio."""
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        """See asyncio."""
        self._inner.resume_writing()

    def _arm(self, seconds: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(seconds, self.abort)


def _peer(transport: asyncio.BaseTransport) -> tuple[Identity | CertificateError | None, float]:
    """Who it is, and until when."""
    tls = transport.get_extra_info("ssl_object")
    if tls is None:
        return None, math.inf
    where = f"peer {transport.get_extra_info('peername')}"
    content = tls.getpeercert(binary_form=True)
    if content is None:
        return CertificateError("the peer showed no certificate", where=where), math.inf
    try:
        with reading(where, "the certificate is malformed"):
            certificate = x509.load_der_x509_certificate(content)
            return identity_of(certificate, where=where), certificate.not_valid_after_utc.timestamp()
    except CertificateError as error:
        return error, math.inf
