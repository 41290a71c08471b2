"""What the push and pull servers share: calls of grpc.aio, and how the service is put together."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Final, TypeAlias

import rt.v1  # noqa: F401  the ciphers, before gRPC loads
from replicator.wire import PULL_METHOD, PUSH_METHOD
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
"""Who may call what, for `rt.net.rpc.serve`."""
HELLO_SECONDS: Final = 30.0
"""A stream that says nothing holds a place that others may want. A hello that is here waits for its turn,
behind a message of each other stream: for seconds on a node that 40 publishers flood."""


def replication_service(
    *, push: Handler | None = None, pull: Handler | None = None
) -> Callable[[grpc.aio.Server], None]:
    """The service `Replication`, for `rt.net.rpc.serve`; its messages come and go as bytes."""
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
    """The first message of a stream; `rt.ProtocolViolation` if none comes in time."""
    try:
        first = await asyncio.wait_for(call.read(), HELLO_SECONDS)
    except TimeoutError:
        first = None
    if not isinstance(first, bytes):
        raise ProtocolViolation("no hello came", wanted=f"one within {HELLO_SECONDS:g} s")
    return first


async def first_of(*parts: Coroutine[Any, Any, None]) -> None:
    """Run them side by side until one of them ends; end the others; raise what the first one raised."""
    tasks = [asyncio.ensure_future(part) for part in parts]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        ended = [task for task in tasks if task.done()]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
    for task in ended:
        task.result()
