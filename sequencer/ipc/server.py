"""The Unix socket that the data process connects to.

Sending never waits. A data process that does not read is disconnected; when it reconnects, it gets everything
again. A newer connection replaces the older one.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import socket
import threading
from collections.abc import Callable
from typing import Final

from rt.errors import FormatError
from sequencer.ipc.framing import FrameDecoder, frame

UNSENT_BYTES_MAX: Final = 256 << 20
_READ_BYTES: Final = 256 << 10
_SOCKET_BYTES: Final = 4 << 20

logger = logging.getLogger("sequencer")


class ControlServer:
    """The listening end. One thread calls `run`; any thread may call `send` and `stop`."""

    def __init__(
        self, path: str, on_message: Callable[[bytes], None], on_tick: Callable[[], None], tick_s: float
    ) -> None:
        self._on_message, self._on_tick, self._tick_s = on_message, on_tick, tick_s
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(path)
        os.chmod(path, 0o600)
        self._listener.listen(4)
        self._listener.setblocking(False)
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        self._lock = threading.Lock()
        """Guards `_peer` and `_unsent`."""
        self._peer: socket.socket | None = None
        self._unsent = bytearray()
        self._decoder = FrameDecoder()
        self._is_stopping = False

    def run(self) -> None:
        while not self._is_stopping:
            for key, events in self._selector.select(self._tick_s):
                if key.fileobj is self._listener:
                    self._accept()
                elif key.fileobj == self._wake_read:
                    self._drain_wakes()
                elif key.fileobj is self._peer:
                    if events & selectors.EVENT_WRITE:
                        self._flush()
                    if events & selectors.EVENT_READ:
                        self._read()
            self._on_tick()
        self._drop("stopping")
        self._listener.close()
        os.close(self._wake_read)
        os.close(self._wake_write)

    def stop(self) -> None:
        self._is_stopping = True
        with contextlib.suppress(OSError):
            os.write(self._wake_write, b"x")

    def send(self, content: bytes) -> None:
        """Send a message; dropped if no data process is connected. Never waits."""
        with self._lock:
            if self._peer is None:
                return
            if len(self._unsent) > UNSENT_BYTES_MAX:
                logger.error("data_process_not_reading unsent_bytes=%d", len(self._unsent))
                with contextlib.suppress(OSError):
                    self._peer.shutdown(socket.SHUT_RDWR)
                return
            had_rest = bool(self._unsent)
            self._unsent += frame(content)
            if had_rest or self._send_now():
                return
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake_write, b"x")  # `run` sends the rest when the socket takes more.

    def _send_now(self) -> bool:
        """Send what the socket takes; true if nothing is left. The caller holds the lock."""
        assert self._peer is not None
        try:
            sent = self._peer.send(self._unsent)
        except BlockingIOError:
            return False
        except OSError:
            return True  # `run` will read the end of the connection.
        del self._unsent[:sent]
        return not self._unsent

    def _flush(self) -> None:
        with self._lock:
            if self._peer is not None:
                self._send_now()
        self._watch()

    def _watch(self) -> None:
        if self._peer is not None:
            wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._unsent else 0)
            self._selector.modify(self._peer, wanted)

    def _drain_wakes(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake_read, 4096)
        self._watch()

    def _accept(self) -> None:
        try:
            peer, _ = self._listener.accept()
        except OSError:
            return
        self._drop("replaced")
        peer.setblocking(False)
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BYTES)
        self._decoder = FrameDecoder()
        self._selector.register(peer, selectors.EVENT_READ)
        with self._lock:
            self._peer = peer

    def _read(self) -> None:
        assert self._peer is not None
        try:
            data = self._peer.recv(_READ_BYTES)
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
        except FormatError as error:
            self._drop(str(error))

    def _drop(self, reason: str) -> None:
        with self._lock:
            peer, self._peer = self._peer, None
            self._unsent.clear()
        if peer is not None:
            logger.info("data_process_left reason=%r", reason)
            self._selector.unregister(peer)
            peer.close()
