"""Find out why a node cannot be reached, by one plain TLS connection to it.

gRPC reports only that it failed to connect. It reports the same for a node that refuses our certificate, for
the Raft port, and for a port on which no process listens. So after a failed attempt a client uses this module
to find the reason.
"""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from collections.abc import Mapping, Sequence
from typing import Final

from rt.endpoints import parse_endpoint
from rt.errors import CertificateError, RtError, Timeout
from rt.net.grpc_errors import Unreachable
from rt.net.tls import TLS

PROBE_SECONDS: Final = 3.0
_HTTP2: Final = "h2"
_NOT_YET_VALID: Final = 9
_EXPIRED: Final = 10
"""Verify codes of OpenSSL: X509_V_ERR_CERT_NOT_YET_VALID and X509_V_ERR_CERT_HAS_EXPIRED."""


async def probe_endpoint(endpoint: str, tls: TLS, *, timeout_s: float = PROBE_SECONDS) -> RtError | None:
    """The reason why gRPC calls to the node at `endpoint` fail; None if a connection can be made now.

    The reason is `rt.CertificateError` if our certificate or the node's certificate is at fault.
    """
    try:
        context = await asyncio.to_thread(tls.ssl_client_context)  # It reads files, and may wait for them.
        context.set_alpn_protocols([_HTTP2])
        async with asyncio.timeout(timeout_s):
            return await _connect(endpoint, context)
    except TimeoutError:
        return Timeout("no connection in time", where=endpoint, expected=f"within {timeout_s:g} s")
    except RtError as error:
        return error
    except ssl.SSLCertVerificationError as error:
        return _rejected(error, endpoint)
    except ssl.SSLError as error:
        return _meaning_of(error, endpoint)
    except socket.gaierror as error:
        return Unreachable("no such host", where=endpoint, got=error.strerror)
    except ConnectionRefusedError:
        return Unreachable("connection refused", where=endpoint, hint="Does the node run, with that port?")
    except OSError as error:
        got = os.strerror(error.errno) if error.errno else str(error) or type(error).__name__
        return Unreachable("no connection", where=endpoint, got=got)


async def explain_silence(
    endpoints: Sequence[str],
    stream: str,
    tls: TLS,
    failures: Mapping[str, RtError],
    *,
    within_seconds: float,
    probe_seconds: float,
) -> RtError:
    """The error, with a reason for each node: what a probe finds in time, else the node's error in
    `failures`.

    `within_seconds` is how long the caller waited for an answer. `probe_seconds` is the time limit for
    finding the reasons.
    """
    probes = (probe_endpoint(endpoint, tls, timeout_s=probe_seconds) for endpoint in endpoints)
    probed = dict(zip(endpoints, await asyncio.gather(*probes), strict=True))
    reasons = {endpoint: why or failures.get(endpoint) for endpoint, why in probed.items()}
    known = [why for why in reasons.values() if why is not None]
    hints = [why.hint for why in known if why.hint]
    is_refused = all(isinstance(why, CertificateError) for why in reasons.values())
    return (CertificateError if is_refused else Unreachable)(
        f"no node of stream {stream} answers",
        got="; ".join(f"{endpoint}: {_told(why)}" for endpoint, why in reasons.items()),
        expected=f"an answer within {within_seconds:g} s",
        hint=hints[0] if hints else "Check the endpoints and the network.",
    )


async def _connect(endpoint: str, context: ssl.SSLContext) -> RtError | None:
    host, port = parse_endpoint(endpoint)
    reader, writer = await asyncio.open_connection(
        host, port, ssl=context, server_hostname=host.removesuffix(".")
    )
    try:
        if writer.get_extra_info("ssl_object").selected_alpn_protocol() != _HTTP2:
            return _wrong_port(endpoint, "TLS without HTTP/2")
        # With TLS 1.3 our handshake ends before the node has checked our certificate. A node that accepts it
        # sends its HTTP/2 settings first; one that refuses it closes the connection.
        try:
            is_accepted = bool(await reader.read(1))
        except ConnectionError:
            is_accepted = False
        return None if is_accepted else _refused(endpoint, "the end of the connection")
    finally:
        writer.transport.abort()


def _rejected(error: ssl.SSLCertVerificationError, endpoint: str) -> CertificateError:
    """The error for a node's certificate that this machine does not accept."""
    if error.verify_code == _EXPIRED:
        return CertificateError(
            "the node's certificate has expired",
            where=endpoint,
            hint="Renew it where its CA is: `rt certs renew DIR NAME`. Then replace both files on the node. "
            "No restart is needed.",
        )
    if error.verify_code == _NOT_YET_VALID:
        hint = "Check the clocks of this machine and of the node."
        return CertificateError("the node's certificate is not valid yet", where=endpoint, hint=hint)
    return CertificateError(
        "the node's certificate is not of our CA, or not of that host",
        where=endpoint,
        got=error.verify_message,
        hint="Name the node as its certificate does, and check the CA file.",
    )


def _meaning_of(error: ssl.SSLError, endpoint: str) -> RtError:
    reason = error.reason or str(error)
    if "APPLICATION_PROTOCOL" in reason:
        return _wrong_port(endpoint, "TLS without HTTP/2")
    if "WRONG_VERSION_NUMBER" in reason or "RECORD_LAYER" in reason:
        return _wrong_port(endpoint, "no TLS")
    if "ALERT" in reason and ("CERTIFICATE" in reason or "UNKNOWN_CA" in reason):
        return _refused(endpoint, reason)
    return Unreachable("the TLS handshake failed", where=endpoint, got=reason)


def _wrong_port(endpoint: str, got: str) -> RtError:
    return Unreachable(
        "that is the Raft port, or the port of another server",
        where=endpoint,
        got=got,
        hint="Name the node's gRPC port (default 5002).",
    )


def _refused(endpoint: str, got: str) -> RtError:
    return CertificateError(
        "the node refuses our certificate",
        where=endpoint,
        got=got,
        hint="Is it of the node's CA, and valid now? See `rt certs show`, and the node's clock.",
    )


def _told(why: RtError | None) -> str:
    if why is None:
        return "connected, but no answer"
    return why.what if why.got is None else f"{why.what} ({why.got})"
