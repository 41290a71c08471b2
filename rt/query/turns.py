"""The order in which the taps of an engine process values that sources and stages send at the same event.

Stages come first, in the order in which they were added, so that each stage has everything that it reads.
Then the queries come, in the order of their starts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from heapq import heappop, heappush
from itertools import count
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from rt.query.core.scheduler import Scheduler
    from rt.query.core.source import SourceTap, Step


def order_of(tap: SourceTap) -> int:
    assert tap.order is not None
    return tap.order


def send_all(steps: Iterable[Step], value: Any) -> None:
    """Let each tap process the value. An error of a query concerns only that query."""
    for test, send, tap in steps:
        try:
            if not test(value):
                continue
        except Exception as error:  # noqa: BLE001 - any error of a query concerns only that query
            tap.test_failed(error, value)
            continue
        try:
            send(value)
        except Exception as error:  # noqa: BLE001 - as above
            tap._group.crash(error, tap._out)


class Turns:
    """The order of all taps of an engine, and the values that wait for the turns of their taps.

    The order is saved, because a query may start or end others, and a recovery attaches taps in another
    order.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler: Final = scheduler
        self._next_order = 0
        self._is_collecting = False
        self._numbers: Final = count()
        self._for_stages: list[tuple[int, int, int, Step, Any, int | None]] = []
        """A heap: rank, order, number, step, and the value and its event time for the step."""
        self._for_queries: list[tuple[list[Step], Any, int | None]] = []

    def next_order(self) -> int:
        self._next_order += 1
        return self._next_order - 1

    def reserve(self, order: int | None) -> None:
        """Give new taps an order after this saved order."""
        if order is not None:
            self._next_order = max(self._next_order, order + 1)

    def add_for_stage(self, step: Step, value: Any) -> None:
        """Let a stage process a value, after all earlier stages. Call in `collect` only."""
        tap, number = step[2], next(self._numbers)
        assert tap.rank is not None
        heappush(self._for_stages, (tap.rank, order_of(tap), number, step, value, self._scheduler.event_ns))

    def add_for_queries(self, steps: list[Step], value: Any) -> None:
        """Let queries process a value, after all stages. Call in `collect` only."""
        if steps:
            self._for_queries.append((steps, value, self._scheduler.event_ns))

    def collect(self, work: Callable[[], object]) -> None:
        """Run `work`. Then let the stages process the values that it added, and after them the queries.

        Stages and queries each keep their order.
        """
        if self._is_collecting:
            work()
            return
        self._is_collecting, event_ns = True, self._scheduler.event_ns
        try:
            work()
            while self._for_stages:
                *_, step, value, self._scheduler.event_ns = heappop(self._for_stages)
                if not step[2].is_disposed:
                    send_all((step,), value)
            waiting = self._for_queries
        finally:
            self._for_stages, self._for_queries = [], []
            self._is_collecting = False
        if len(waiting) == 1:
            steps, value, self._scheduler.event_ns = waiting[0]
            send_all(steps, value)
        elif waiting:
            self._send_waiting(waiting)
        self._scheduler.event_ns = event_ns

    def _send_waiting(self, waiting: list[tuple[list[Step], Any, int | None]]) -> None:
        """Each tap processes all its values in one turn, and then its end, which is in a separate list.

        The memory grows with the number of values and the number of taps, not with the number of pairs of
        them.
        """
        values: dict[int, list[tuple[Any, int | None]]] = {}
        turns: list[tuple[int, Step, list[tuple[Any, int | None]]]] = []
        for steps, value, event_ns in waiting:
            found = values.get(id(steps))
            if found is None:
                found = values[id(steps)] = []
                turns += [(order_of(step[2]), step, found) for step in steps]
            found.append((value, event_ns))
        if len(values) > 1:
            turns.sort(key=itemgetter(0))
        for _, step, found in turns:
            for value, self._scheduler.event_ns in found:
                if step[2].is_disposed:
                    break
                send_all((step,), value)
