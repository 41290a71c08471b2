"""The tasks that run the woken consumers of a queue: many consumers in one task, as long as none waits.

    woken     A B C D E F
    turn 1    one task runs A, B, and waits in C. It is C's task from now on.
    turn 2    two tasks run D, E and F

The number of tasks of a turn doubles as long as all of them wait. So only a few turns are needed, even if
many consumers wait.

Invariants:
- While a consumer is woken and not run, a turn is scheduled. So a consumer that hangs, raises or cancels its
  task does not prevent other consumers from running.
- A task that has waited in a consumer runs no other consumer. So cancelling the task of a consumer under way
  cancels nothing else.
- No consumer sees context variables that another one has set.
- A turn runs a limited number of consumers. Then the event loop does other work.
"""

from __future__ import annotations

import asyncio
from collections import deque
from contextvars import Context, copy_context
from operator import is_
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from rt.streams.delivery.consumer import Consumer

TURN_CONSUMERS: Final = 1000
"""The maximum number of consumers that one turn runs."""
_TASKS_MAX: Final = 1024
"""The maximum number of new tasks in one turn."""


class _SharedTask(asyncio.Task[None]):
    """A task for several consumers, while `is_fit`: until a consumer cancels it, even if the consumer takes
    the cancellation back.
    """

    is_fit = True

    def cancel(self, msg: object = None) -> bool:
        self.is_fit = False
        return super().cancel(msg)


class ConsumerTasks:
    """The woken consumers of one queue. Consumers see the context that this was created in."""

    __slots__ = ("_context", "_is_scheduled", "_left", "_turn", "_width", "_woken")

    def __init__(self) -> None:
        self._context = copy_context()
        self._woken: deque[Consumer] = deque()
        self._is_scheduled = False
        self._turn = 0
        self._width = 1
        self._left = 0
        """How many consumers this turn may still run."""

    def add(self, consumer: Consumer) -> None:
        """Run the consumer soon, after the consumers that were added before."""
        self._woken.append(consumer)
        if not self._is_scheduled:
            self._is_scheduled = True
            self._width, self._left = 1, 0
            asyncio.get_running_loop().call_soon(self._begin_turn, context=self._context)

    def _begin_turn(self) -> None:
        """Called by the event loop. So every task of an earlier turn has ended, or waits in a consumer.

        The next turn is scheduled before the tasks can schedule anything. So a task finds a new turn if it
        has waited, and only then.
        """
        self._turn += 1
        if not self._woken:
            self._is_scheduled = False
            return
        if self._left:  # All tasks wait.
            self._width = min(2 * self._width, _TASKS_MAX)
        self._left = TURN_CONSUMERS
        loop = asyncio.get_running_loop()
        for _ in range(min(self._width, len(self._woken))):
            # Not `create_task`: a task factory may start a task at once.
            _SharedTask(self._run(), loop=loop, context=self._context.copy())
        loop.call_soon(self._begin_turn, context=self._context)

    async def _run(self) -> None:
        """Run woken consumers in this task, until one of them has made it unfit for others."""
        task, turn, context = asyncio.current_task(), self._turn, copy_context()
        assert isinstance(task, _SharedTask)
        values = tuple(context.values())
        while self._woken and self._left:
            self._left -= 1
            await self._woken.popleft().run(task)
            if self._turn != turn or not task.is_fit or not _is_unchanged(context, values):
                return
        if not self._woken:
            self._width, self._left = 1, 0


def _is_unchanged(before: Context, values: tuple[object, ...]) -> bool:
    """Whether the current context has the same variables as `before`, and their values are the same objects.

    Equal values are not enough: a list that one consumer has set must not reach another consumer.
    """
    now = copy_context()
    try:
        return now == before and (not values or all(map(is_, now.values(), values)))
    except Exception:  # noqa: BLE001 - values that cannot be compared differ
        return False
