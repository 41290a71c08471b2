"""Runs the push clients that one process with publishers requests.

Invariants:
- The end of one client does not end another one.
- A client that failed is restarted after the pauses of `RestartBackoff`, unless the cluster has fenced its
  session, or its directory was removed. After its publisher has ended, it is restarted once more at most.
- The sidecar ends when the publishers' process has ended and each client has sent what is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from contextvars import ContextVar
from typing import Final, TypeAlias

from replicator.push.client import PushClient
from replicator.push.problem_log import ProblemLog, PushReport
from rt.child_process import RestartBackoff
from rt.errors import DirectoryLocked, Fenced, LogNotFound, RtError
from rt.sidecar.protocol import FinishRequested, PushEnded, PushReported, PushRequested
from rt.sidecar.push_control import PushSummary

logger = logging.getLogger("replicator")

SERVED: Final[ContextVar[str]] = ContextVar("SERVED", default="")
"""The session directory that the current task serves; empty if the task serves none."""


_GIVEN_UP_HINT: Final = "What was not sent stays: open its publisher again, or run `rt push`."
MakeClient: TypeAlias = Callable[[PushRequested, Callable[[PushReport], None], ProblemLog], PushClient]


class PushSidecar:
    """`make` creates the client of a session. It gets the callback and the log that the client uses.

    `say` is called with each report for the publishers' process.
    """

    def __init__(self, make: MakeClient, say: Callable[[PushEnded | PushReported], None]) -> None:
        self._make = make
        self._say = say
        self._sessions: dict[int, _Session] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_finishing = False
        self._changed = asyncio.Event()
        self.on_change: Callable[[], None] = _ignore
        """Called when the sidecar starts or stops serving a session."""

    @property
    def directories(self) -> list[str]:
        """The directories of the served sessions, the longest served first."""
        return [session.asked.directory for session in self._sessions.values()]

    def handle(self, asked: PushRequested | FinishRequested) -> None:
        match asked:
            case PushRequested(number):
                session = self._sessions[number] = _Session(asked, self._say)
                task = asyncio.create_task(self._serve(session))
                self._tasks.add(task)
                session.task = task
                task.add_done_callback(self._tasks.discard)
                self._changed.set()
            case FinishRequested(number) if number in self._sessions:
                self._sessions[number].finish()

    def finish(self) -> None:
        self._is_finishing = True
        for session in self._sessions.values():
            session.finish()
        self._changed.set()

    def summaries(self) -> list[PushSummary]:
        """The sessions that are served, for `rt pushes`."""
        return [
            PushSummary(one.directory, one.stream, one.endpoints, session.ended_at, session.stuck)
            for session in self._sessions.values()
            for one in [session.asked]
        ]

    async def stop(self, directory: str) -> str | None:
        """Stop pushing a session whose publisher has ended; its files stay. Return None, or the reason why
        the push goes on.
        """
        served = [session for session in self._sessions.values() if session.asked.directory == directory]
        if not served:
            return "it is not pushed by this process"
        if not all(session.finishing.is_set() for session in served):
            return "its publisher is open: close it first"
        for session in served:
            logger.warning("push_stopped path=%s", directory)
            await session.cancel()
            self._end(session)
        return None

    async def run(self) -> None:
        """Returns after `finish`, when all sessions have ended."""
        try:
            while self._sessions or not self._is_finishing:
                self._changed.clear()
                self.on_change()
                await self._changed.wait()
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, session: _Session) -> None:
        directory = session.asked.directory
        SERVED.set(directory)
        restarts, clock = RestartBackoff(), asyncio.get_running_loop().time
        while True:
            restarts.record_start(clock())
            is_last = session.finishing.is_set()
            try:
                await session.push(self._make)
                break
            except Fenced as error:
                session.report_failure(error)  # The client has logged it.
                break
            except LogNotFound as error:  # There is nothing to push any more.
                session.report_failure(error)
                logger.error("push_ended path=%s reason=%s", directory, error)
                break
            except Exception as error:  # noqa: BLE001 - the others go on
                session.report_failure(error)
            if is_last:
                logger.error("push_given_up path=%s hint=%r", directory, _GIVEN_UP_HINT)
                break
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(restarts.record_end(clock())):
                    await session.finishing.wait()
        self._end(session)

    def _end(self, session: _Session) -> None:
        number = session.asked.number
        if self._sessions.pop(number, None) is not None:
            self._say(PushEnded(number))
        self._changed.set()


class _Session:
    def __init__(self, asked: PushRequested, say: Callable[[PushReported], None]) -> None:
        self.asked = asked
        self.finishing = asyncio.Event()
        self._say = say
        self.ended_at: float | None = None
        """When its publisher ended, in seconds since 1970."""
        self.task: asyncio.Task[None] | None = None
        self._client: PushClient | None = None
        self._problems = ProblemLog(asked.directory)
        self._report = PushReport(None, ())
        """What the client reported last."""
        self._error: RtError | None = None
        """What blocks the push. A client that tries again does not clear it; success does."""
        self._is_of_client = False
        """Whether the client reported `_error`. If not, the client could not even start."""

    @property
    def stuck(self) -> str:
        """Why nothing of the session is merged although a part of it waits; empty if nothing is wrong."""
        if self._error is not None:
            return f"blocked: {self._error.reason}"
        return "" if self._client is None else self._client.stuck

    def finish(self) -> None:
        if self.ended_at is None:
            self.ended_at = time.time()
        self.finishing.set()
        if self._client is not None:
            self._client.finish()

    def report_failure(self, error: Exception) -> None:
        """Handle a failure of the client. An error that a retry fixes, such as another client in the
        directory, is not reported to the publishers' process.
        """
        is_of_client = error is self._report.error
        if not is_of_client and not isinstance(error, Fenced):
            self._problems.record("push_failed", error)
        if isinstance(error, RtError) and not error.retriable and not isinstance(error, DirectoryLocked):
            self._error, self._is_of_client = error, is_of_client
            self._send_report()

    async def cancel(self) -> None:
        """Cancel the push. Return when its client has released the directory."""
        if self.task is not None:
            self.task.cancel()
            await asyncio.gather(self.task, return_exceptions=True)

    async def push(self, make: MakeClient) -> None:
        self._client = make(self.asked, self._on_report, self._problems)
        try:
            if self.finishing.is_set():
                self._client.finish()
            await self._client.run()
        finally:
            self._client = None

    def _on_report(self, report: PushReport) -> None:
        self._report = report
        if report.error is not None:
            self._error, self._is_of_client = report.error, True
        elif report.is_connected or not self._is_of_client:
            self._error = None
        self._send_report()

    def _send_report(self) -> None:
        report = self._report
        self._say(PushReported.of(self.asked.number, self._error, report.endpoints, report.members))


def _ignore() -> None:
    """Ignore the changes: the default of `on_change`."""
