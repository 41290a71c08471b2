"""What a node's process shares with its supervisor: heartbeats, and the listening socket of the health port.

Heartbeats are lines on the socket that is the process's stdin.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from typing import Final, Self

BEAT_S: Final = 1.0
"""Time between two heartbeats. Several heartbeats fit into the silence after which a process counts as
hung.
"""
_BEAT: Final = b"beat\n"
_STDIN: Final = 0


class SupervisorLink:
    """The child's end. The first heartbeat says that the process serves. Thread-safe."""

    def __init__(
        self, connection: socket.socket | None = None, health_socket: socket.socket | None = None
    ) -> None:
        self._connection = connection
        """None if no supervisor has started this process; then heartbeats are not sent."""
        self.health_socket: Final = health_socket
        """The socket that listens at the health port; None if that port is not open yet."""

    @classmethod
    def of_child(cls, *fds: str) -> Self:
        """Return the link to the supervisor that has started this process. `fds`: the descriptor of the
        health socket, or nothing.

        `OSError` if stdin is no socket.
        """
        for fd in fds:
            os.set_inheritable(int(fd), False)
        return cls(socket.socket(fileno=os.dup(_STDIN)), *(socket.socket(fileno=int(fd)) for fd in fds))

    def beat(self) -> None:
        """Send a heartbeat. Never blocks: it is lost while the supervisor does not read, or has ended."""
        if self._connection is not None:
            with contextlib.suppress(OSError):
                self._connection.send(_BEAT, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)

    async def keep_beating(self) -> None:
        """Send a heartbeat every `BEAT_S`, from the event loop, until cancelled."""
        while True:
            self.beat()
            await asyncio.sleep(BEAT_S)


NO_SUPERVISOR: Final = SupervisorLink()
