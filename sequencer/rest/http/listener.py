"""An HTTP port: accepts connections, with or without TLS, within limits.

Invariants:
- Each handshake uses the newest valid certificates; changed files are reloaded.
- Handshakes and connections are limited. At the limit the oldest handshake or idle connection is closed, so
  that silent clients cannot lock out others.
- If the port is taken, the listener retries indefinitely. The rest of the node does not wait for it.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import ssl
from collections import Counter
from collections.abc import Callable
from typing import Final

from sequencer.rest.http.connection import HEADERS_S, REQUEST_S, HttpConnection

CONNECTIONS_MAX: Final = 128
HANDSHAKES_MAX: Final = 32
HANDSHAKE_S: Final = 5.0
AGAIN_S: Final = 1.0
"""Pause before listening again, or accepting again after an error such as no file descriptors."""
BACKLOG: Final = 128

logger = logging.getLogger("sequencer")


class HttpListener:
    """Listens from `start` to `close`. `context` returns the TLS context of each handshake (None: plain)."""

    def __init__(
        self,
        name: str,
        make: Callable[[], asyncio.Protocol],
        address: tuple[str, int],
        context: Callable[[], ssl.SSLContext | None],
        *,
        listening: socket.socket | None = None,
        connections_max: int = CONNECTIONS_MAX,
        headers_s: float = HEADERS_S,
        request_s: float = REQUEST_S,
    ) -> None:
        """`listening`: a socket that listens at `address` already, which is closed with this listener."""
        self.name: Final = name
        self.refused: Final = Counter[str]()
        """Connections rejected before a request, by reason."""
        self._make, self._address, self._context = make, address, context
        self._connections_max = connections_max
        self._headers_s, self._request_s = headers_s, request_s
        self._handshakes: dict[asyncio.Task[None], None] = {}
        self._connections: dict[HttpConnection, None] = {}
        """Oldest first, like `_handshakes`."""
        self._logged_s = -1.0
        self._socket = listening
        self._running: asyncio.Task[None] | None = None

    @property
    def port(self) -> int:
        """The port; 0 while it could not be opened."""
        return 0 if self._socket is None else int(self._socket.getsockname()[1])

    @property
    def connections(self) -> int:
        return len(self._connections)

    def start(self) -> None:
        """Start listening: at once if the port is free."""
        if self._socket is None:
            self._listen(is_first=True)
        else:
            logger.info("%s_listens port=%d", self.name, self.port)
        self._running = asyncio.get_running_loop().create_task(self._run())

    async def close(self) -> None:
        """Stop, and abort all connections."""
        tasks = [*self._handshakes, *([self._running] if self._running is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._socket is not None:
            self._socket.close()
        for connection in list(self._connections):
            connection.abort()

    # ConnectionOwner

    def admit(self, connection: HttpConnection) -> bool:
        if len(self._connections) >= self._connections_max:
            idle = next((one for one in self._connections if not one.is_busy), None)
            self._refuse("Overloaded")
            if idle is None:
                return False
            del self._connections[idle]
            idle.abort()
        self._connections[connection] = None
        return True

    def release(self, connection: HttpConnection) -> None:
        self._connections.pop(connection, None)

    # Accepting

    def _listen(self, *, is_first: bool) -> None:
        host, port = self._address
        try:
            self._socket = _listening(host, port)
        except OSError as error:
            if is_first:
                logger.error("%s_port_failed port=%d error=%r", self.name, port, error.strerror or str(error))
        else:
            logger.info("%s_listens port=%d", self.name, self.port)

    async def _run(self) -> None:
        while self._socket is None:
            await asyncio.sleep(AGAIN_S)
            self._listen(is_first=False)
        loop = asyncio.get_running_loop()
        while True:
            try:
                accepted, _ = await loop.sock_accept(self._socket)
            except OSError as error:
                self.refused[errno.errorcode.get(error.errno or 0, "OSError")] += 1
                await asyncio.sleep(AGAIN_S)
                continue
            if len(self._handshakes) >= HANDSHAKES_MAX:
                next(iter(self._handshakes)).cancel()
            task = loop.create_task(self._serve(accepted))
            self._handshakes[task] = None
            task.add_done_callback(lambda task: self._handshakes.pop(task, None))
            await asyncio.sleep(0)  # A task cancelled before it started would leak the socket.

    async def _serve(self, accepted: socket.socket) -> None:
        """Do the handshake; then the connection serves itself."""
        try:
            context = self._context()
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: HttpConnection(
                    self._make(), self, headers_s=self._headers_s, request_s=self._request_s
                ),
                accepted,
                ssl=context,
                ssl_handshake_timeout=HANDSHAKE_S if context is not None else None,
                ssl_shutdown_timeout=1.0 if context is not None else None,
            )
        except ssl.SSLError as error:
            self._refuse(error.reason or "SSLError")
        except OSError as error:
            self._refuse(type(error).__name__)

    def _refuse(self, reason: str) -> None:
        """Count it; log at most once a second, so that clients cannot fill the disk."""
        self.refused[reason] += 1
        now_s = asyncio.get_running_loop().time()
        if now_s >= self._logged_s + 1.0:
            self._logged_s = now_s
            logger.warning("%s_refused reason=%s total=%d", self.name, reason, self.refused.total())


def _listening(host: str, port: int) -> socket.socket:
    """A listening socket. Host "" is every IPv4 and IPv6 address."""
    is_both = not host and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if is_both or ":" in host else socket.AF_INET
    try:
        listening = socket.create_server((host, port), family=family, backlog=BACKLOG, dualstack_ipv6=is_both)
    except OSError as error:
        if not is_both or error.errno == errno.EADDRINUSE:
            raise
        # The machine supports IPv6, but it is disabled.
        listening = socket.create_server((host, port), backlog=BACKLOG)
    listening.setblocking(False)
    return listening
