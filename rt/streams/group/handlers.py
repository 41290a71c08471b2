"""Calls the handlers of a member: retries failed messages, and then asks the program for a decision.

Invariants:
- A message is handled, is skipped by a decision of the program, or ends with a raised error. Nothing else
  ends its turn.
- No call starts after the partition's lease has ended by the clock.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from itertools import takewhile
from typing import Any, Final, TypeAlias

from msgspec import Struct

from rt.errors import HandlerFailed, InvalidOption, UndecodableValue
from rt.log.scan.message_batch import Message
from rt.serializers import Serializer, decode
from rt.streams.group.handler_threads import HandlerThreads
from rt.streams.group.options import Decision, GroupOptions, HandlerFailure

logger = logging.getLogger("rt.streams.group")

Handler: TypeAlias = Callable[..., Awaitable[object] | object]
"""Called with a message; with a serializer, with the message and its value."""

_TURN_S: Final = 0.05
"""How long a thread calls a plain function for waiting messages, before other calls have their turn."""
TURN_MESSAGES: Final = 256
"""The maximum number of messages in one turn."""
_LOOK_S: Final = 0.1
"""How often a wait for the next try checks whether the partition may still be handled."""


class TopicHandler(Struct, frozen=True):
    pattern: str
    handler: Handler
    serializer: Serializer[Any] | None

    @property
    def is_async(self) -> bool:
        call = getattr(self.handler, "__call__", None)  # noqa: B004 - an object may have an async __call__
        return inspect.iscoroutinefunction(self.handler) or inspect.iscoroutinefunction(call)

    def call(self, message: Message) -> Awaitable[object] | object:
        if self.serializer is None:
            return self.handler(message)
        return self.handler(message, decode(message, self.serializer))


MayHandle: TypeAlias = Callable[[], bool]


class HandlerCalls:
    """The calls of one member. At most `options.concurrency` run at a time."""

    def __init__(self, subscriptions: Sequence[TopicHandler], options: GroupOptions) -> None:
        self._subscriptions, self._options = subscriptions, options
        self._turns = asyncio.Semaphore(options.concurrency)
        self._threads = HandlerThreads(options.concurrency)

    def close(self) -> None:
        """Start no more calls. A call under way ends by itself."""
        self._threads.close()

    async def handle(self, waiting: Sequence[tuple[Message, int]], may_handle: MayHandle) -> int:
        """Handle the first of these messages, and further ones of the same pattern if its handler is a plain
        function. Returns how many are done; 0 if the partition may not be handled here.

        Raises `rt.UndecodableValue` or `rt.HandlerFailed` for a message that the program gives up.
        """
        (message, index), attempts, failed_s = waiting[0], 0, math.inf
        while True:
            done, error = await self._try(waiting, index, may_handle)
            if done or error is None:
                return done
            attempts += 1
            # Not the start of the call: the call may have waited for its turn, or taken long.
            failed_s = min(failed_s, time.monotonic())
            is_over = isinstance(error, UndecodableValue) or (
                time.monotonic() - failed_s >= self._options.retry_for_s
            )
            logger.warning(
                "handler_failed position=%d topic=%s attempts=%d error=%r",
                message.position,
                message.topic,
                attempts,
                error,
            )
            if is_over:
                decision = self._decide(HandlerFailure(message, error, attempts))
                if decision == "skip":
                    logger.error(
                        "message_skipped position=%d topic=%s error=%r",
                        message.position,
                        message.topic,
                        error,
                    )
                    return 1
                if decision == "stop":
                    raise _given_up(message, error, attempts)
                failed_s = time.monotonic()
            next_s = time.monotonic() + self._wait_s(attempts)
            while (left_s := next_s - time.monotonic()) > 0:
                await asyncio.sleep(min(left_s, _LOOK_S))
                if not may_handle():
                    return 0

    async def _try(
        self, waiting: Sequence[tuple[Message, int]], index: int, may_handle: MayHandle
    ) -> tuple[int, Exception | None]:
        """The number of handled messages, and the error of the message after them."""
        subscription = self._subscriptions[index]
        async with self._turns:
            if not subscription.is_async:
                same = takewhile(lambda one: one[1] == index, waiting)
                messages = [message for message, _ in same]
                return await self._threads.run(partial(_call_all, subscription, messages, may_handle))
            if not may_handle():
                return 0, None
            try:
                called = subscription.call(waiting[0][0])
                if inspect.isawaitable(called):
                    await called
            except asyncio.CancelledError as error:
                if _is_cancelled():
                    raise
                return 0, _cancelled_within(error)
            except Exception as error:  # noqa: BLE001 - whatever a handler raises
                return 0, error
            return 1, None

    def _decide(self, failure: HandlerFailure) -> Decision:
        if self._options.on_error is None:
            return "stop"
        decision = self._options.on_error(failure)
        if decision not in ("retry", "skip", "stop"):
            raise InvalidOption(
                "not a decision", where="on_error", got=repr(decision)[:200], expected="retry | skip | stop"
            )
        return decision

    def _wait_s(self, attempts: int) -> float:
        return retry_wait_s(attempts, self._options.retry_min_s, self._options.retry_max_s)


def retry_wait_s(attempts: int, least_s: float, most_s: float) -> float:
    """The wait after `attempts` failed attempts, in seconds. It doubles each time, up to `most_s`."""
    return min(most_s, least_s * 2.0 ** min(attempts - 1, 60))


def _call_all(
    subscription: TopicHandler, messages: Sequence[Message], may_handle: MayHandle
) -> tuple[int, Exception | None]:
    """In a thread: call a plain function until one call fails, the turn is over, or the lease ends."""
    end_s = time.monotonic() + _TURN_S
    for count, message in enumerate(messages):
        if not may_handle() or (count and time.monotonic() > end_s):
            return count, None
        try:
            returned = subscription.call(message)
        except asyncio.CancelledError as error:
            return count, _cancelled_within(error)
        except Exception as error:  # noqa: BLE001 - whatever a handler raises
            return count, error
        if inspect.isawaitable(returned):  # Nothing was handled.
            if inspect.iscoroutine(returned):
                returned.close()
            raise InvalidOption(
                "a plain handler returned an awaitable, which a thread cannot await",
                where=f"the handler of {subscription.pattern!r}",
                got=repr(subscription.handler)[:200],
                expected="`async def`, or a result that needs no await",
            )
    return len(messages), None


def _is_cancelled() -> bool:
    """Whether this task must end. If not, a `CancelledError` comes from something that a handler awaited."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _cancelled_within(error: asyncio.CancelledError) -> Exception:
    """The failure of a handler that raised `error`. A bare `CancelledError` would silently end the
    partition's task.
    """
    failure = RuntimeError(f"CancelledError in the handler: {error}".removesuffix(": "))
    failure.__cause__ = error
    return failure


def _given_up(message: Message, error: Exception, attempts: int) -> Exception:
    if isinstance(error, UndecodableValue):
        return error
    failed = HandlerFailed(
        "a handler failed, so this member of the group stopped; the message is not acknowledged",
        where=f"position {message.position}, session {message.session}, number {message.number}, "
        f"topic {message.topic!r}",
        got=f"{type(error).__name__}: {error}"[:500] + f" ({attempts} attempts)",
        hint="Fix the handler and start the member again, or give on_error= that decides.",
    )
    failed.__cause__ = error
    return failed
