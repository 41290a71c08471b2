"""A push process that can be seen and stopped: its socket for `rt pushes`, and its command line for `ps`.

Invariants:
- Only a process of the same user, or of root, is answered.
- Only a push whose publisher has ended can be stopped. If the publisher is running, its program would start
  the push again.
- A process that cannot listen still pushes.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from contextlib import suppress
from pathlib import Path
from typing import Final, Protocol

from rt.sidecar.push_control import (
    ListRequested,
    PushesListed,
    PushSummary,
    StopAnswered,
    StopRequested,
    decode_request,
    encode_answer,
    peer_of,
    socket_name,
)

logger = logging.getLogger("replicator")

_REQUEST_SECONDS: Final = 5.0
"""How long a caller may take to send its request."""
_ARGUMENTS_START: Final = 48
_ARGUMENTS_END: Final = 49
"""Fields of /proc/self/stat, counted from 1: where the kernel reads the command line."""


class ServedPushes(Protocol):
    """The pushes of this process. Called in its event loop."""

    def summaries(self) -> list[PushSummary]: ...

    async def stop(self, directory: str) -> str | None:
        """Stop pushing a session whose publisher has ended. Returns why it was not stopped."""


async def listen(pushes: ServedPushes) -> asyncio.Server | None:
    """Answer `rt pushes` until the server is closed; None if this process cannot listen."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(_REQUEST_SECONDS):
                request = decode_request(await reader.readline())
            match request:
                case ListRequested():
                    writer.write(encode_answer(PushesListed(tuple(pushes.summaries()))))
                case StopRequested(directory):
                    writer.write(encode_answer(StopAnswered(await pushes.stop(directory))))
            await writer.drain()
        except (TimeoutError, OSError, ValueError) as error:
            logger.debug("control_failed reason=%r", error)
        finally:
            writer.close()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        uid, pid = peer_of(writer.get_extra_info("socket"))
        if uid in {0, os.geteuid()}:
            await answer(reader, writer)
        else:
            logger.warning("control_refused uid=%d pid=%d", uid, pid)
            writer.close()

    listening = socket.socket(socket.AF_UNIX)
    try:
        listening.bind(socket_name(uid=os.geteuid(), pid=os.getpid()))
        return await asyncio.start_unix_server(accept, sock=listening)
    except OSError as error:
        listening.close()
        logger.warning("control_not_started reason=%s", error)
        return None


def show_in_ps(pushes: list[PushSummary]) -> None:
    """Name the sessions in this process's command line, as far as there is room."""
    names = [f"{push.stream}/{push.session}" for push in pushes]
    title = " ".join(["rt push --attached", *names]).encode(errors="replace")
    with suppress(OSError, ValueError, IndexError):
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        # Two fields, the process id and the name, precede the parenthesis.
        start, end = int(fields[_ARGUMENTS_START - 3]), int(fields[_ARGUMENTS_END - 3])
        # The kernel shows only what precedes the first zero, if the last byte is not zero.
        text = title[: end - start - 2].ljust(end - start - 1, b"\0") + b" "
        memory = os.open("/proc/self/mem", os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.pwrite(memory, text, start)
        finally:
            os.close(memory)
