"""The push clients of one process with publishers, as that process requests them.

Invariants:
- The end of one client ends no other.
- A client that failed is restarted after the pauses of `RestartBackoff`, unless the cluster has fenced its
  session, or its directory was removed; once more when its publisher has ended.
- The sidecar ends when the publishers' process has ended and each client has sent what is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from contextvars import ContextVar
from typing import Final

from replicator.push.client import PushClient
from rt.child_process import RestartBackoff
from rt.errors import Fenced, LogNotFound
from rt.sidecar.push_protocol import FinishRequested, PushRequested

logger = logging.getLogger("replicator")

SERVED: Final[ContextVar[str]] = ContextVar("SERVED", default="")
"""The session directory that the current task serves; empty outside of all."""


class PushSidecar:
    """`on_end` is called with the number of each session that has ended."""

    def __init__(self, make: Callable[[PushRequested], PushClient], on_end: Callable[[int], None]) -> None:
        self._make = make
        self._on_end = on_end
        self._sessions: dict[int, _Session] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_finishing = False
        self._changed = asyncio.Event()

    @property
    def directories(self) -> list[str]:
        """Of the sessions that are served, the longest served first."""
        return [session.asked.directory for session in self._sessions.values()]

    def handle(self, asked: PushRequested | FinishRequested) -> None:
        match asked:
            case PushRequested(number):
                session = self._sessions[number] = _Session(asked)
                task = asyncio.create_task(self._serve(session))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            case FinishRequested(number) if number in self._sessions:
                self._sessions[number].finish()

    def finish(self) -> None:
        self._is_finishing = True
        for session in self._sessions.values():
            session.finish()
        self._changed.set()

    async def run(self) -> None:
        """Returns after `finish`, when all sessions have ended."""
        try:
            while self._sessions or not self._is_finishing:
                self._changed.clear()
                await self._changed.wait()
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, session: _Session) -> None:
        number, directory = session.asked.number, session.asked.directory
        SERVED.set(directory)
        restarts, clock = RestartBackoff(), asyncio.get_running_loop().time
        while True:
            restarts.record_start(clock())
            is_last = session.finishing.is_set()
            try:
                await session.push(self._make)
                break
            except Fenced:
                break  # The client has logged it.
            except LogNotFound as error:  # There is nothing to push any more.
                logger.error("push_ended path=%s reason=%s", directory, error)
                break
            except Exception as error:  # noqa: BLE001 - the others go on
                logger.error("push_failed path=%s reason=%s", directory, error)
            if is_last:
                break
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(restarts.record_end(clock())):
                    await session.finishing.wait()
        del self._sessions[number]
        self._on_end(number)
        self._changed.set()


class _Session:
    def __init__(self, asked: PushRequested) -> None:
        self.asked = asked
        self.finishing = asyncio.Event()
        self._client: PushClient | None = None

    def finish(self) -> None:
        self.finishing.set()
        if self._client is not None:
            self._client.finish()

    async def push(self, make: Callable[[PushRequested], PushClient]) -> None:
        self._client = make(self.asked)
        try:
            if self.finishing.is_set():
                self._client.finish()
            await self._client.run()
        finally:
            self._client = None
