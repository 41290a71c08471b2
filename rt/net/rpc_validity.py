"""How long a peer's certificate lets its calls go on: until it ends, by this machine's clock.

Law: within `LOOK_S` of that every call ends, and none is let in any more, on connections too that were made
before. They end as if the connection was lost: who has a newer certificate by then just goes on with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from functools import lru_cache
from typing import Any, Final

from cryptography import x509

from rt.net.identity import UNREADABLE
from rt.net.rpc_errors import Unreachable

# isort: split
import grpc.aio

LOOK_S: Final = 5.0
"""How often the clock is looked at: it may be set."""


def clock_s() -> float:
    """The wall clock, seconds since the epoch."""
    return time.time()


def end_of(context: grpc.aio.ServicerContext[Any, Any]) -> float:
    """When the certificate that the peer showed ends, seconds since the epoch."""
    (content,) = context.auth_context().get("x509_pem_cert", (b"",))
    return _end_of(bytes(content))


def check_valid(end_s: float, where: str) -> None:
    """`Unreachable` if that certificate has ended."""
    if clock_s() > end_s:
        raise Unreachable(
            "the certificate of this connection has ended",
            where=where,
            hint="A new one is read from disk for each connection: `rt certs show` tells when it ends.",
        )


@contextlib.asynccontextmanager
async def while_valid(end_s: float, where: str) -> AsyncIterator[None]:
    """Cancel the block, and raise `Unreachable`, once that certificate has ended."""
    loop, deadline = asyncio.get_running_loop(), asyncio.timeout(None)
    looking: asyncio.Handle

    def look() -> None:
        nonlocal looking
        left_s = end_s - clock_s()
        if left_s < 0:
            deadline.reschedule(loop.time())
        else:
            looking = loop.call_later(min(left_s, LOOK_S) + 0.001, look)

    check_valid(end_s, where)
    try:
        async with deadline:
            looking = loop.call_soon(look)
            try:
                yield
            finally:
                looking.cancel()
    except TimeoutError:
        if not deadline.expired():
            raise
        check_valid(end_s, where)
        raise


@lru_cache(maxsize=1024)
def _end_of(content: bytes) -> float:
    """0.0 of one that cannot be read: gRPC has read it, so that is no certificate of ours."""
    try:
        return x509.load_pem_x509_certificate(content).not_valid_after_utc.timestamp()
    except UNREADABLE:
        return 0.0
