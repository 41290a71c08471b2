"""gRPC between the processes of rt: channels and servers over mutual TLS, with authorization.

Invariants:
- A peer is identified by its certificate. A method without an allowed role rejects all calls.
- The dialled name must be in the server's certificate.
- Without TLS only loopback is used.
- Certificates are read again for each handshake; if they are invalid, the previous ones stay in use.

gRPC itself rejects peers without a certificate of the CA, and reports it on stderr only. `RpcServer.refused`
counts calls rejected after that.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import time
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any, Final, Self, TypeAlias

import rt.v1  # noqa: F401 - the ciphers, before gRPC loads
from rt.errors import CertificateError, Closed, InvalidOption, RtError
from rt.net.cert_files import CertFiles
from rt.net.grpc_auth import GrpcAuthenticator, Roles, StreamCaps, caller, peer_identity
from rt.net.grpc_options import (
    CONNECTION_AGE_MS,
    MESSAGE_BYTES_MAX,
    WINDOW_BYTES,
    Options,
    channel_options,
    server_options,
)
from rt.net.identity import Identity
from rt.net.memory_guard import keep_freed_memory
from rt.net.tls import TLS

# isort: split
import grpc
import grpc.aio

__all__ = [
    "Channel",
    "Register",
    "Roles",
    "RpcServer",
    "StreamCaps",
    "caller",
    "end_call",
    "open_channel",
    "peer_identity",
    "serve",
    "server_credentials",
]

_RELOAD_PAUSE_S = 1.0  # between attempts to read invalid files, even if many peers connect

logger = logging.getLogger("rt.net")

Register: TypeAlias = Callable[[grpc.aio.Server], None]


class RpcServer:
    """A server that listens and answers, until `stop`. Made by `serve`."""

    def __init__(self, server: grpc.aio.Server, port: int, gate: GrpcAuthenticator) -> None:
        self.port: Final = port
        self.caps: Final = gate.caps
        self.calls: Final = gate.calls
        self.refused: Final = gate.refused
        """Counts of rejected calls by the class of the error."""
        self._server = server

    async def stop(self, grace_s: float | None = None) -> None:
        """Accept no more calls. Running ones have `grace_s` to end, then they are cancelled."""
        await self._server.stop(grace_s)


async def serve(
    address: str,
    services: Iterable[Register],
    *,
    roles: Roles,
    tls: TLS | None = None,
    insecure_as: Callable[[], Identity] | None = None,
    caps: StreamCaps | None = None,
    options: Options | None = None,
) -> RpcServer:
    """Listen on `address` (host:port; port 0: any) and serve `services`.

    `services` are called with the server, as in `partial(add_ReplicationServicer_to_server, servicer)`.
    `roles` are the allowed roles of each method, `"/rt.v1.Replication/Push"`; callers must belong to the
    stream of the server's certificate. Handlers get the caller from `caller()` and may raise any `RtError`.

    Without `tls` every caller has the identity `insecure_as()`, and the address must be loopback
    (`ValueError`). Raises `rt.RtError` if the port is in use, `rt.CertificateError` for bad certificates.
    """
    if (tls is None) == (insecure_as is None):
        raise InvalidOption("a server has either tls or insecure_as")
    if tls is None and not _is_loopback(address):
        raise InvalidOption(f"without TLS a server listens on loopback only, not on {address!r}")
    keep_freed_memory()
    gate = GrpcAuthenticator(roles, tls, insecure_as, caps or StreamCaps())
    server = grpc.aio.server(interceptors=(gate,), options=server_options() if options is None else options)
    for register in services:
        register(server)
    try:
        if tls is None:
            port = server.add_insecure_port(address)
        else:
            port = server.add_secure_port(address, server_credentials(tls))
    except RuntimeError as error:
        await server.stop(None)
        raise RtError(
            "cannot listen", where=address, got=str(error)[:200], hint="Does another process have the port?"
        ) from error
    await server.start()
    return RpcServer(server, port, gate)


def open_channel(
    target: str,
    tls: TLS | None,
    *,
    insecure: bool = False,
    message_bytes_max: int = MESSAGE_BYTES_MAX,
    window_bytes: int = WINDOW_BYTES,
) -> Channel:
    """A channel to `target`, host:port, where the host is the node's own name. Connects at the first call.

    Received messages may have up to `message_bytes_max` bytes. In each call, up to `window_bytes` arrive
    before the reader reads them. With `insecure` instead of `tls` the host must be loopback
    (`rt.InvalidOption`).
    """
    check_target(target, tls, insecure=insecure)
    keep_freed_memory()
    return Channel(target, tls, message_bytes_max, window_bytes)


def check_target(target: str, tls: TLS | None, *, insecure: bool) -> None:
    """Raise `rt.InvalidOption` if `open_channel` would refuse the target."""
    if (tls is None) != insecure:
        raise InvalidOption("a channel has either tls or insecure=True")
    if insecure and not _is_loopback(target):
        raise InvalidOption(f"without TLS a channel leads to loopback only, not to {target!r}")


class Channel:
    """The current gRPC channel to one target. For one event loop.

    A gRPC channel reconnects by itself, but with its first certificates. So call `get` again before each
    stream: if the files have changed, it makes a new channel. Calls on the old one continue; it is closed
    after them.
    """

    def __init__(
        self,
        target: str,
        tls: TLS | None,
        message_bytes_max: int = MESSAGE_BYTES_MAX,
        window_bytes: int = WINDOW_BYTES,
    ) -> None:
        self.target: Final = target
        self._options = channel_options(message_bytes_max=message_bytes_max, window_bytes=window_bytes)
        self._material = ReloadingCredentials(tls) if tls else None
        self._made_of: CertFiles | None = None
        self._present: grpc.aio.Channel | None = None
        self._retiring: set[asyncio.Task[None]] = set()
        self._is_closed = False

    def get(self) -> grpc.aio.Channel:
        """The channel for the next call. Do not close it."""
        if self._is_closed:
            raise Closed("the channel was closed", where=self.target)
        current = self._material.refresh() if self._material else None
        if self._present is None or current is not self._made_of:
            self._retire()
            self._present, self._made_of = self._make(current), current
        return self._present

    def renew(self) -> None:
        """Let the next call connect at once: a gRPC channel pauses between its attempts to connect."""
        self._retire()
        self._present = None

    async def close(self) -> None:
        """Close all channels; running calls are cancelled."""
        self._is_closed = True
        for task in self._retiring:
            task.cancel()
        await asyncio.gather(*self._retiring, return_exceptions=True)
        if self._present is not None:
            await self._present.close()
            self._present = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def _make(self, credentials: CertFiles | None) -> grpc.aio.Channel:
        if credentials is None:
            return grpc.aio.insecure_channel(self.target, options=self._options)
        native = grpc.ssl_channel_credentials(credentials.ca, credentials.key, credentials.cert)
        return grpc.aio.secure_channel(self.target, native, options=self._options)

    def _retire(self) -> None:
        if self._present is not None:
            task = asyncio.get_running_loop().create_task(_close_after_calls(self._present))
            self._retiring.add(task)
            task.add_done_callback(self._retiring.discard)


def server_credentials(tls: TLS) -> grpc.ServerCredentials:
    """Mutual TLS with the current files at each handshake.

    Raises `rt.CertificateError` if they are invalid now.
    """
    material = ReloadingCredentials(tls)

    def fetch() -> grpc.ServerCertificateConfiguration | None:
        before = material.present
        with contextlib.suppress(Exception):  # gRPC's native code calls this and cannot handle an exception
            material.refresh()
        return None if material.present is before else _configuration(material.present)

    return grpc.dynamic_ssl_server_credentials(
        _configuration(material.present),
        fetch,  # type: ignore[arg-type]  # None: as before
        require_client_authentication=True,
    )


def _configuration(of: CertFiles) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(of.key, of.cert)], root_certificates=of.ca)


class ReloadingCredentials:
    """The current, or else the last valid, credentials. Any thread may call `refresh`."""

    def __init__(self, tls: TLS) -> None:
        self.present = tls.load()
        self._tls = tls
        self._failed_at: float | None = None

    def refresh(self) -> CertFiles:
        """Check the files; return the credentials to use. Logs invalid files once."""
        failed_at = self._failed_at
        if failed_at is not None and time.monotonic() < failed_at + _RELOAD_PAUSE_S:
            return self.present
        if not self._tls.changed(self.present):
            self._failed_at = None
            return self.present
        try:
            self.present = self._tls.load()
        except CertificateError as error:
            self._failed_at = time.monotonic()
            if failed_at is None:
                logger.error(
                    "certificate_reload_failed identity=%s error=%r", self._tls.identity.uri, str(error)
                )
            return self.present
        self._failed_at = None
        logger.info(
            "certificate_reloaded identity=%s fingerprint=%s not_after=%s",
            self._tls.identity.uri,
            self.present.fingerprint,
            self.present.not_after.isoformat(),
        )
        return self.present


def end_call(call: Any) -> None:
    """Cancel a call of `Channel.get`, even after a failed write.

    grpc.aio treats such a call as finished, and its `cancel` does nothing. But while a reply is unread, gRPC
    keeps the call as one of the connection's `STREAMS_PER_CONNECTION_MAX`. When all are used, no new call
    starts on that connection.
    """
    call._cython_call.cancel("the caller ended it")


async def _close_after_calls(channel: grpc.aio.Channel) -> None:
    try:
        await channel.close(CONNECTION_AGE_MS / 1000)
    except asyncio.CancelledError:
        await channel.close()
        raise


def _is_loopback(address: str) -> bool:
    host = address.rpartition(":")[0].removeprefix("[").removesuffix("]")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
