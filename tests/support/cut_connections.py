"""A proxy on the loopback that cuts a connection before or after the server has got a given text."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
from typing import Literal, TypeAlias

Cut: TypeAlias = Literal["before", "after"]


class CuttingProxy:
    """Forwards connections to a port. `cut(text, when)`: the next one that sends the text is cut.

    "before": the server does not get it. "after": the server gets it and has answered; the client does not
    get the answer.
    """

    def __init__(self, port: int) -> None:
        self._target = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._cut: tuple[bytes, Cut] | None = None
        self._threads: list[threading.Thread] = []
        self._is_closed = False
        self._accepting = threading.Thread(target=self._accept, daemon=True)
        self._accepting.start()

    def cut(self, text: bytes, when: Cut) -> None:
        self._cut = text, when

    def close(self) -> None:
        """Wait for its threads. Their connections must be closed."""
        self._is_closed = True
        with contextlib.suppress(OSError):
            socket.create_connection(("127.0.0.1", self.port), timeout=5).close()
        self._accepting.join()
        self._listener.close()
        for each in self._threads:
            each.join()

    def _accept(self) -> None:
        while True:
            client, _ = self._listener.accept()
            if self._is_closed:
                client.close()
                return
            thread = threading.Thread(target=self._forward, args=[client], daemon=True)
            self._threads.append(thread)
            thread.start()

    def _forward(self, client: socket.socket) -> None:
        with client, contextlib.suppress(OSError), socket.socket() as server:
            server.connect(("127.0.0.1", self._target))
            while True:
                for each in select.select([client, server], [], [])[0]:
                    data = each.recv(65536)
                    if not data:
                        return
                    if each is client and self._cut is not None and self._cut[0] in data:
                        _, when = self._cut
                        self._cut = None
                        if when == "after":
                            server.sendall(data)
                            server.recv(65536)
                        return
                    (server if each is client else client).sendall(data)
