"""The data process's connection to the control process. For one event loop.

It reconnects indefinitely. While it is down nothing is acknowledged, because no report would arrive. A
control process that hangs is disconnected; after the next hello it gets everything again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from typing import Final

from google.protobuf.message import DecodeError

from rt.errors import FormatError
from rt.v1 import sequencer_pb2 as pb
from sequencer.ipc.frames import FrameDecoder, frame
from sequencer.ipc.silence import HUNG_S, SilenceDetector

RETRY_S: Final = 0.1
UNSENT_BYTES_MAX: Final = 64 << 20
"""Maximum number of bytes that wait while the control process is silent. Otherwise the memory of this process
would grow without bound: publishers need only this process to continue.
"""
_READ_BYTES: Final = 1 << 20

logger = logging.getLogger("sequencer")


class ControlLink:
    """Connects to the control process's socket and calls `hello` for each connection.

    The next message is read when `on_message` has handled the previous one. An error of `on_message` ends
    `run`.
    """

    def __init__(
        self,
        path: str,
        hello: Callable[[], pb.DataHello],
        on_message: Callable[[pb.ToData], Awaitable[None]],
        on_lost: Callable[[], None],
    ) -> None:
        self._path, self._hello, self._on_message, self._on_lost = path, hello, on_message, on_lost
        self._writer: asyncio.StreamWriter | None = None
        self.silence: Final = SilenceDetector()
        """The silence of the control process, which sends its view of the cluster every 500 ms."""

    @property
    def is_up(self) -> bool:
        return self._writer is not None

    def send(self, message: pb.ToControl) -> None:
        """Send a message; dropped if the connection is down. Never waits."""
        # The peer may have closed the connection before `_serve` reads that: a closed transport accepts no
        # write.
        if self._writer is None or self._writer.is_closing():
            return
        transport = self._writer.transport
        unsent_bytes = transport.get_write_buffer_size()
        if unsent_bytes > UNSENT_BYTES_MAX and self.silence.silent_s >= HUNG_S:
            logger.error("control_process_not_reading unsent_bytes=%d", unsent_bytes)
            transport.abort()
            return
        self._writer.write(frame(message.SerializeToString()))

    async def run(self) -> None:
        """Keep the connection until cancelled."""
        while True:
            with contextlib.suppress(OSError):
                reader, writer = await asyncio.open_unix_connection(self._path)
                try:
                    await self._serve(reader, writer)
                finally:
                    self._writer = None
                    writer.close()
                    self._on_lost()
            await asyncio.sleep(RETRY_S)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self.send(pb.ToControl(hello=self._hello()))
        decoder = FrameDecoder()
        while data := await reader.read(_READ_BYTES):
            try:
                messages = [pb.ToData.FromString(content) for content in decoder.feed(data)]
            except (FormatError, DecodeError) as error:
                logger.error("control_link_broken error=%r", str(error))
                return
            self.silence.record_message()
            self.silence.is_paused = True
            try:
                for message in messages:
                    await self._on_message(message)
            finally:
                self.silence.is_paused = False
