"""Acts as systemd: a datagram socket for the reports of services."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from typing import Self


class ServiceManager:
    """Receives the messages of services to `name`, an abstract socket in the form of $NOTIFY_SOCKET."""

    def __init__(self) -> None:
        self.name = f"@rt-{os.getpid()}-{os.urandom(8).hex()}"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind("\0" + self.name[1:])
        self._socket.setblocking(False)
        self.received: list[str] = []
        """The lines of all messages so far, in order."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._socket.close()

    def read(self) -> list[str]:
        """Receive the waiting messages. Return `received`."""
        self.received += self._lines()
        return self.received

    def _lines(self) -> Iterator[str]:
        with contextlib.suppress(BlockingIOError):
            while True:
                yield from self._socket.recv(65536).decode().split("\n")
