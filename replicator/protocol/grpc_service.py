"""Shared code of the push and pull servers: calls of grpc.aio, and the registration of the service."""

from __future__ import annotations

import asyncio
import contextlib
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from typing import Any, Final, TypeAlias

import rt.v1  # noqa: F401  the ciphers, before gRPC loads
from replicator.protocol.codec import PULL_METHOD, PUSH_METHOD
from rt.errors import ProtocolViolation
from rt.net.identity import Role

# isort: split
import grpc
import grpc.aio

Call: TypeAlias = grpc.aio.ServicerContext[Any, Any]
Handler: TypeAlias = Callable[[Any, Call], Awaitable[None]]

SERVICE: Final = "rt.v1.Replication"
ROLES: Final[dict[str, tuple[Role, ...]]] = {
    PUSH_METHOD: ("publisher",),
    PULL_METHOD: ("subscriber", "node", "operator"),
}
"""The roles that may call each method, for `rt.net.grpc_channel.serve`."""
HELLO_SECONDS: Final = 30.0
"""How long the node waits for the hello of a stream. One message of each other stream is handled before it.
That takes seconds if 40 publishers flood the node.
"""


def replication_service(
    *, push: Handler | None = None, pull: Handler | None = None
) -> Callable[[grpc.aio.Server], None]:
    """The service `Replication`, for `rt.net.grpc_channel.serve`. Its messages are bytes."""
    handlers = {"Push": push, "Pull": pull}
    service = grpc.method_handlers_generic_handler(
        SERVICE,
        {
            name: grpc.stream_stream_rpc_method_handler(handler)
            for name, handler in handlers.items()
            if handler is not None
        },
    )
    return lambda server: server.add_generic_rpc_handlers((service,))


async def read_first(call: Call) -> bytes:
    """The first message of a stream. `rt.ProtocolViolation` if none comes in time."""
    try:
        async with asyncio.timeout(HELLO_SECONDS):
            first = await call.read()
    except TimeoutError:
        first = None
    if not isinstance(first, bytes):
        raise ProtocolViolation("the client sent no hello", expected=f"one within {HELLO_SECONDS:g} s")
    return first


async def first_of(*parts: Coroutine[Any, Any, None]) -> None:
    """Run all until one of them ends; end the others; raise what the first one raised."""
    tasks = [asyncio.ensure_future(part) for part in parts]
    ended: list[asyncio.Future[None]] = []
    try:
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            ended = [task for task in tasks if task.done()]
        finally:
            _ = [task.cancel() for task in tasks]
            await asyncio.wait(tasks)
        while ended:
            ended.pop(0).result()
    finally:
        # Else the error holds this frame, and the frame holds the task that raised it.
        tasks.clear()
        ended.clear()


@contextlib.contextmanager
def frames_cleared() -> Iterator[None]:
    """Clear the frames of an error that the block raises.

    Errors and tasks refer to each other, so they would keep the last message of each failed stream until the
    garbage collector finds them. If a peer does this on purpose, it is hundreds of megabytes.
    """
    try:
        yield
    except BaseException as error:
        seen: BaseException | None = error
        while seen is not None:
            traceback.clear_frames(seen.__traceback__)
            seen = seen.__cause__ or seen.__context__
        raise
