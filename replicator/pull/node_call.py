"""A pull that one node has answered, for readers that keep nothing.

Invariants:
- The next item is requested while the last one is processed.
- A node that is silent is reported within the seconds that the caller allows.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable
from typing import Any, Final

from replicator.protocol.codec import (
    PULL_METHOD,
    PULL_REPLY_BYTES_MAX,
    PullReply,
    decode_pull_reply,
    encode_pull_request,
)
from replicator.protocol.handshake import HoldRejected, LogOutline, PullHello, PullStart
from replicator.protocol.messages import Item
from rt.errors import ProtocolViolation, Timeout
from rt.net.grpc_channel import Channel, open_channel
from rt.net.grpc_errors import asking
from rt.net.tls import TLS

# isort: split
import grpc.aio

logger = logging.getLogger("replicator")

SILENCE_SECONDS: Final = 15.0


def pull_channel(endpoint: str, tls: TLS | None, *, insecure: bool = False) -> Channel:
    """A channel of a client that pulls: it accepts the largest chunks. See `open_channel`."""
    return open_channel(endpoint, tls, insecure=insecure, message_bytes_max=PULL_REPLY_BYTES_MAX)


class NodeCall:
    """A call that a node has answered. Made by `open`; call `end` at the end."""

    def __init__(self, target: str, call: Any, start: PullStart) -> None:
        self.target = target
        self.start = start
        self._call = call
        self._next = asyncio.ensure_future(call.read())

    @classmethod
    async def open(cls, channel: Channel, hello: PullHello, silence_seconds: float) -> NodeCall:
        call: Any = channel.get().stream_stream(PULL_METHOD)()
        try:
            with asking(channel.target):
                with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                    # If the write fails, the read raises the error.
                    await call.write(encode_pull_request(hello))
                start = await _read(call.read(), channel.target, silence_seconds)
            if not isinstance(start, PullStart):
                raise ProtocolViolation("a stream must begin with a start", where=channel.target)
        except BaseException:
            call.cancel()
            raise
        return cls(channel.target, call, start)

    async def next_item(self) -> Item | PullStart | LogOutline | None:
        """The next item; None after the last one."""
        while True:
            with asking(self.target):
                item = await _read(self._next, self.target)
            self._next = asyncio.ensure_future(self._call.read())
            if not isinstance(item, HoldRejected):
                return item
            logger.warning("hold_refused name=%s why=%r", item.name, item.why)

    async def end(self) -> None:
        self._call.cancel()
        self._next.cancel()
        with contextlib.suppress(asyncio.CancelledError, grpc.aio.AioRpcError, asyncio.InvalidStateError):
            await self._next


async def _read(
    reading: Awaitable[object], target: str, silence_seconds: float = SILENCE_SECONDS
) -> PullReply | None:
    try:
        async with asyncio.timeout(silence_seconds):
            data = await asyncio.shield(reading)
    except TimeoutError:
        raise Timeout("the node is silent", where=target, expected=f"{silence_seconds:.1f} s") from None
    return decode_pull_reply(data) if isinstance(data, bytes) else None
