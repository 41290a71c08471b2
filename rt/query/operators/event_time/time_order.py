"""Values in the order of their times, for any order of arrival."""

from __future__ import annotations

import heapq
from typing import Any

from rt.objects import PersistedDictionary
from rt.query.core.observable import Applied, Observable, Transform
from rt.query.operators.event_time.time_operator import TimeOperator


def in_time_order(*sources: Observable[Any], late: str | None = None) -> Transform:
    """The values of the source and of all `sources`, in the order of their times.

    A value is emitted when the watermark has passed its time. At equal times the values of the first source
    come first, and those of one source in the order of arrival. A value is late if the watermark has passed
    its time already: it is counted and sent to the sink `late`, as `LateValue`. Saves the waiting values, in
    the object space.
    """
    return lambda source: Applied(lambda: InTimeOrder(late), (source, *sources))


class TimeOrdered(TimeOperator):
    """Base of operators that process the values of their sources in the order of time.

    `_waiting` has the time, the rank and the value by arrival number. `_heap` has the same values in the
    order of time, rank and arrival number.
    """

    __slots__ = ("_arrived", "_heap", "_waiting")
    SAVED = (*TimeOperator.SAVED, "_arrived")

    def __init__(self, late: str | None) -> None:
        super().__init__(late)
        self._arrived = 0
        self._waiting: PersistedDictionary[int, tuple[int, int, Any]]
        self._heap: list[tuple[int, int, int]] = []

    def process(self, index: int, time_ns: int, number: int, value: Any) -> None:
        """Process the next value of source `index`. If this raises, the error policy applies to the value."""
        raise NotImplementedError

    def rank(self, index: int) -> int:
        """The rank of a source's values among values with equal times. `rank(rank(index))` is `index`."""
        return index

    def next_expiry_ns(self) -> int | None:
        """The next watermark at which `expire` has work."""
        return None

    def expire(self) -> None:
        """Remove what expired at `next_expiry_ns`, which the watermark has reached."""

    def on_open(self) -> None:
        super().on_open()
        self._waiting = self.objects.dictionary("waiting", keys=int)

    def load_state(self, state: Any, version: int, /) -> None:
        super().load_state(state, version)
        self._heap = sorted((time_ns, rank, number) for number, (time_ns, rank, _) in self._waiting.items())

    def on_next(self, value: Any, /) -> None:
        self.on_inner_next("0", value)

    def on_inner_next(self, key: str, value: Any, /) -> None:
        time_ns, watermark_ns = self.times()
        if time_ns < watermark_ns:
            self.leave_out(value, time_ns)
            return
        number, rank = self._arrived, self.rank(int(key))
        self._waiting[number] = time_ns, rank, value
        self._arrived += 1
        self.changed()
        heapq.heappush(self._heap, (time_ns, rank, number))
        self.wake(time_ns + 1)

    def next_due_ns(self) -> int | None:
        expiry_ns = self.next_expiry_ns()
        if not self._heap:
            return expiry_ns
        due_ns = self._heap[0][0] + 1
        return due_ns if expiry_ns is None else min(due_ns, expiry_ns)

    def on_due(self, watermark_ns: int) -> None:
        self._run(watermark_ns)

    def on_completed(self) -> None:
        self.on_inner_completed("0")

    def on_inner_completed(self, key: str, /) -> None:
        """When all sources have ended, process all values."""
        if not self.has_open_input():
            self._run(None)
            self.complete()

    def _run(self, watermark_ns: int | None) -> None:
        """Process everything that is due, in the order of time. If `watermark_ns` is None, everything is
        due.
        """
        while not self.is_disposed:
            due_ns = self.next_due_ns()
            if due_ns is None or (watermark_ns is not None and due_ns > watermark_ns):
                return
            if self._heap and self._heap[0][0] + 1 == due_ns:
                time_ns, rank, number = heapq.heappop(self._heap)
                value = self._waiting.pop(number)[2]
                try:
                    self.process(self.rank(rank), time_ns, number, value)
                except Exception as error:  # noqa: BLE001 - the value is left out, and the others must follow
                    self.reject(error)
            else:
                self.expire()


class InTimeOrder(TimeOrdered):
    __slots__ = ()
    NAME = "in_time_order"

    def process(self, index: int, time_ns: int, number: int, value: Any) -> None:
        self.emit_at(time_ns, value)
