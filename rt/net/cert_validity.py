"""End a peer's calls when its certificate expires, by this machine's clock.

Within `LOOK_S` of the expiry every call ends and new ones are rejected, on existing connections too. The
calls end as if the connection was lost, so a client with a newer certificate reconnects and continues.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from functools import lru_cache
from typing import Any, Final

from cryptography import x509

from rt.net.grpc_errors import Unreachable
from rt.net.identity import UNREADABLE

# isort: split
import grpc.aio

LOOK_S: Final = 5.0
"""Seconds between two readings of the clock, because the clock may be set."""


def clock_s() -> float:
    return time.time()


def end_of(context: grpc.aio.ServicerContext[Any, Any]) -> float:
    """When the peer's certificate expires, seconds since the epoch."""
    (content,) = context.auth_context().get("x509_pem_cert", (b"",))
    return _end_of(bytes(content))


def check_valid(end_s: float, where: str) -> None:
    """Raise `Unreachable` if the certificate that expires at `end_s` has expired."""
    if clock_s() > end_s:
        raise Unreachable(
            "the certificate of this connection has expired",
            where=where,
            hint="Put a new certificate and key in the place of the files. Each connection reads them from "
            "disk. `rt certs show` prints when a certificate expires.",
        )


@contextlib.asynccontextmanager
async def while_valid(end_s: float, where: str) -> AsyncIterator[None]:
    """Cancel the block, and raise `Unreachable`, when the certificate expires, at `end_s`."""
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
    """When the certificate expires; 0.0 if it cannot be read, because then our CA did not issue it."""
    try:
        return x509.load_pem_x509_certificate(content).not_valid_after_utc.timestamp()
    except UNREADABLE:
        return 0.0
