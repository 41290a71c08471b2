"""The Unix socket that the data process connects to.

Sending never waits. A data process that does not read is disconnected; when it reconnects, it gets everything
again. A newer connection replaces the older one. Only the thread that polls its descriptors uses it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
from collections.abc import Callable
from typing import Final, Protocol

from rt.errors import FormatError
from rt.log.disk import storage_errors
from sequencer.ipc.frames import FrameDecoder, frame

UNSENT_BYTES_MAX: Final = 256 << 20
_READ_BYTES: Final = 16 << 10
"""Maximum number of bytes that are read in one round of the consensus thread. It handles these reports in
less than a heartbeat.
"""
_SOCKET_BYTES: Final = 4 << 20

logger = logging.getLogger("sequencer")


class Watch(Protocol):
    """Polls descriptors of other owners."""

    def __call__(self, fd: int, events: int, on_ready: Callable[[int], None] = ...) -> None:
        """Call `on_ready` with the events of epoll whenever some of `events` are due. If `events` is 0, stop
        that.
        """


class ControlServer:
    """The listening end: `on_message` gets what the data process sends, after `start`."""

    def __init__(self, path: str, on_message: Callable[[bytes], None]) -> None:
        self._on_message = on_message
        with storage_errors(path, "making the socket between the processes of the node"):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self._listener.bind(path)
            os.chmod(path, 0o600)
        self._listener.listen(4)
        self._listener.setblocking(False)
        self._watch: Watch | None = None
        self._is_accepting = False
        self._peer: socket.socket | None = None
        self._polled = 0
        """The events for which the peer is polled."""
        self._unsent = bytearray()
        self._decoder = FrameDecoder()

    def start(self, watch: Watch) -> None:
        self._watch = watch
        self.accept_again()

    def accept_again(self) -> None:
        """Accept connections again if that failed. Call it about twice a second."""
        if self._watch is not None and not self._is_accepting:
            self._is_accepting = True
            self._watch(self._listener.fileno(), select.EPOLLIN, lambda _: self._accept())

    def close(self) -> None:
        """End the connection and stop listening. Idempotent."""
        if self._watch is not None:
            self._drop("stopping")
            self._stop_accepting(self._watch)
            self._watch = None
        self._listener.close()

    def _stop_accepting(self, watch: Watch) -> None:
        if self._is_accepting:
            self._is_accepting = False
            watch(self._listener.fileno(), 0)

    def send(self, content: bytes) -> None:
        """Send a message; dropped if no data process is connected. Never waits."""
        if self._peer is None:
            return
        if len(self._unsent) > UNSENT_BYTES_MAX:
            logger.error("data_process_not_reading unsent_bytes=%d", len(self._unsent))
            self._drop("not reading")
            return
        self._unsent += frame(content)
        if not self._polled & select.EPOLLOUT:
            self._send_now(self._peer)

    def _send_now(self, peer: socket.socket) -> None:
        """Send what the socket takes. The rest is sent when it takes more."""
        try:
            del self._unsent[: peer.send(self._unsent)]
        except BlockingIOError:
            pass
        except ConnectionError:
            self._unsent.clear()  # Reading will show the end of the connection.
        except OSError as error:  # A connection that continues must not lose unsent bytes.
            self._drop(str(error))
            return
        self._poll(peer)

    def _poll(self, peer: socket.socket) -> None:
        polled = select.EPOLLIN | (select.EPOLLOUT if self._unsent else 0)
        if polled != self._polled and self._watch is not None:
            self._polled = polled
            self._watch(peer.fileno(), polled, lambda events: self._serve(peer, events))

    def _accept(self) -> None:
        try:
            peer, _ = self._listener.accept()
        except (BlockingIOError, ConnectionError):
            return
        except OSError as error:  # No descriptor or no memory is free. The listener would always be ready.
            logger.error("data_process_not_accepted error=%r", str(error))
            if self._watch is not None:
                self._stop_accepting(self._watch)
            return
        self._drop("replaced")
        peer.setblocking(False)
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BYTES)
        self._decoder = FrameDecoder()
        self._peer = peer
        self._poll(peer)

    def _serve(self, peer: socket.socket, events: int) -> None:
        if events & select.EPOLLOUT and peer is self._peer:
            self._send_now(peer)
        if events & ~select.EPOLLOUT and peer is self._peer:
            self._read(peer)

    def _read(self, peer: socket.socket) -> None:
        try:
            data = peer.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._drop("ended")
            return
        try:
            for message in self._decoder.feed(data):
                self._on_message(message)
                if peer is not self._peer:
                    return
        except FormatError as error:
            self._drop(str(error))

    def _drop(self, reason: str) -> None:
        peer, self._peer = self._peer, None
        self._unsent.clear()
        self._polled = 0
        if peer is not None and self._watch is not None:
            logger.info("data_process_left reason=%r", reason)
            self._watch(peer.fileno(), 0)
            peer.close()
