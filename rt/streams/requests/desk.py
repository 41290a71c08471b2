"""Reads the requests that others send to the owner of a queue, has them carried out, and answers them.

Invariants:
- A request and its answer are in one commit. The code that carries out the request hands in the answer in the
  same step as the edits, without waiting in between. So a kill loses no request, and no request is carried
  out twice.
- A request is not carried out after its time limit.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Final, Protocol

from rt.errors import Closed, Overloaded, RtError
from rt.streams.core.errors import OwnerTimeout, StreamError
from rt.streams.requests.request import (
    PostedRequest,
    QueueAnswer,
    QueueRequest,
    RequestedStore,
    decode_request,
    rejection,
)

logger = logging.getLogger("rt.streams")

LOOK_S: Final = 0.5
"""The interval at which requests are polled."""
_REMEMBERED_NS: Final = 600 * 10**9
"""How long a request is remembered after its time limit, because a node that is behind may show it again."""


class Answering(Protocol):
    """Makes answers durable, with the other edits of the next commit."""

    def answer(self, posted: PostedRequest, answer: QueueAnswer) -> None: ...

    async def commit(self) -> None: ...


class Undone(Exception):
    """The edits of a request and its answer are undone. The cause says why. If that is `rt.Overloaded`, the
    request is rejected; otherwise it is read again.
    """


CarryOut = Callable[[QueueRequest, PostedRequest, Callable[[QueueAnswer], None]], Awaitable[None]]
"""Carries out a request, and calls its last argument in the same step as the edits. Returns when the edits
are durable. Raises `StreamError` or `ValueError` if the request is rejected; then there were no edits. After
any other error except `Undone`, the edits are part of the next commit.
"""


class RequestDesk:
    def __init__(
        self,
        queue: object,
        store: RequestedStore,
        answering: Answering,
        carry_out: CarryOut,
        *,
        clock_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self._queue, self._store, self._answering = queue, store, answering
        self._carry_out, self._clock_ns = carry_out, clock_ns
        self._known: dict[bytes, int] = {}
        """The requests under way or answered, with their time limits."""
        self._working: dict[asyncio.Task[None], bytes] = {}

    async def run(self) -> None:
        """Poll requests and have them carried out, until cancelled."""
        try:
            while True:
                await self._poll()
                await asyncio.sleep(LOOK_S)
        finally:
            for task in self._working:
                task.cancel()
            if self._working:
                await asyncio.wait(self._working)

    async def _poll(self) -> None:
        try:
            found = await self._store.requests()
        except (RtError, OSError) as error:
            if isinstance(error, Closed):
                raise
            logger.info("requests_not_read queue=%s error=%r", self._queue, str(error))
            return
        now_ns, under_way = self._clock_ns(), {*self._working.values()}
        for request, until_ns in list(self._known.items()):
            if until_ns + _REMEMBERED_NS < now_ns and request not in under_way:  # The clock may have jumped.
                del self._known[request]
        for posted in found:
            if posted.id not in self._known:
                self._known[posted.id] = posted.until_ns
                task = asyncio.create_task(self._work(posted))
                self._working[task] = posted.id
                task.add_done_callback(self._working.pop)

    async def _work(self, posted: PostedRequest) -> None:
        try:
            await self._decide(posted)
        except Exception as error:  # noqa: BLE001 - the next commit has it, or it is read again
            logger.warning("request_delayed queue=%s error=%r", self._queue, str(error))

    async def _decide(self, posted: PostedRequest) -> None:
        is_answered = False

        def answer(given: QueueAnswer) -> None:
            nonlocal is_answered
            is_answered = True
            self._answering.answer(posted, given)

        try:
            if (late_ns := self._clock_ns() - posted.until_ns) >= 0:
                raise OwnerTimeout(
                    "the time of the request is over",
                    where=str(self._queue),
                    got=f"{late_ns / 10**9:,.0f} s too late by the clock of the host that owns the queue",
                    hint="If it was posted just now, that clock and those of the nodes differ.",
                )
            request = decode_request(posted.content)
            await self._carry_out(request, posted, answer)
        except BaseException as error:
            if isinstance(error, Undone):
                is_answered = False
            why = error.__cause__ if isinstance(error, Undone) else error
            has_room = not (isinstance(error, Undone) and isinstance(why, Overloaded))
            is_final = isinstance(why, ValueError) or (isinstance(why, StreamError) and not why.retriable)
            is_final = is_final or not has_room or isinstance(why, OwnerTimeout)
            if isinstance(why, Exception) and is_final and not is_answered:
                logger.info("request_rejected queue=%s why=%r", self._queue, str(why))
                answer(rejection(why))
                await self._answering.commit()
                return
            if not is_answered:
                del self._known[posted.id]  # Nothing was done: this host or the next owner reads it again.
            raise
        else:
            logger.info("request_carried_out queue=%s action=%s", self._queue, request.action)
