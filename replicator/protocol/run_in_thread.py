"""Runs something to its end, such as a function in a thread, even if the waiting task is cancelled."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import Executor
from typing import TypeVar

_Result = TypeVar("_Result")


async def run_to_end(pool: Executor, act: Callable[[], _Result]) -> _Result:
    """Return the result of `act`, or raise its error.

    If cancelled, it first waits for the end of `act`. So the resources that `act` uses are never closed or
    used meanwhile.
    """
    return await to_end(asyncio.get_running_loop().run_in_executor(pool, act))


async def to_end(running: asyncio.Future[_Result]) -> _Result:
    """Return the result of `running`, or raise its error. If cancelled, wait for its end first."""
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        while not running.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([running])
        if not running.cancelled():
            running.exception()  # Read, so that asyncio does not log it as never retrieved.
        raise
