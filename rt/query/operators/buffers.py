"""Operators that emit lists of values. What is in open lists lies in the object space."""

from __future__ import annotations

from typing import Any, Final, TypeVar

from rt.objects import PersistedQueue
from rt.query.observing import Transform, applied
from rt.query.operator import Operator
from rt.query.operators.asking import compose
from rt.query.operators.collecting import to_list
from rt.query.operators.flattening import flat_map
from rt.query.operators.windows import window_with_time
from rt.query.scheduling import Duration, duration_ns

A = TypeVar("A")


def buffer_with_count(count: int, skip: int | None = None) -> Transform:
    """Lists of `count` values, begun at every `skip`th value (default: `count`).

    At the end the lists that are open are emitted as they are, oldest first. Saves the values of open lists,
    each once, in the object space, and how many are to be left out.
    """
    skip = count if skip is None else skip
    if count < 1 or skip < 1:
        raise ValueError(f"buffer_with_count({count}, {skip})")
    return applied(BufferWithCount, count, skip)


def buffer_with_time(timespan: Duration, timeshift: Duration | None = None) -> Transform:
    """Every `timespan` the list of the values since the last one, which may be empty; at the end the rest.

    With `timeshift`, lists of `timespan` that begin at every such time, as those of `window_with_time`. Saves
    the values, in the object space, and when the list ends.
    """
    if timeshift is not None:
        return compose(window_with_time(timespan, timeshift), flat_map(lambda window: window.pipe(to_list())))
    return buffer_with_time_or_count(timespan, None)


def buffer_with_time_or_count(timespan: Duration, count: int | None) -> Transform:
    """As `buffer_with_time`, but a list of `count` values is emitted at once, and the next begins there.

    Saves the values, in the object space, and when the list ends.
    """
    if duration_ns(timespan) < 1 or (count is not None and count < 1):
        raise ValueError(f"buffer_with_time_or_count({timespan}, {count})")
    return applied(BufferWithTime, duration_ns(timespan), count)


class BufferWithCount(Operator[A, list[A]]):
    """See `buffer_with_count`. The queue begins with the first value of the oldest open list."""

    __slots__ = ("_count", "_left_out", "_skip", "_values")

    NAME = "buffer_with_count"

    def __init__(self, count: int, skip: int) -> None:
        self._count: Final = count
        self._skip: Final = skip
        self._left_out = 0
        self._values: PersistedQueue[A]

    def on_open(self) -> None:
        """The queue."""
        self._values = self.objects.queue("values")

    def on_next(self, value: A, /) -> None:
        """Into the open lists; emit the oldest if it is full."""
        if self._left_out:
            self._left_out -= 1
            self.changed()
            return
        self._values.enqueue(value)
        if len(self._values) < self._count:
            return
        full = list(self._values)
        for _ in range(min(self._skip, self._count)):
            self._values.dequeue()
        if self._skip > self._count:
            self._left_out = self._skip - self._count
            self.changed()
        self.emit(full)

    def on_completed(self) -> None:
        """Emit what is open."""
        rest = list(self._values)
        for start in range(0, len(rest), self._skip):
            self.emit(rest[start:])
        self.complete()

    def save_state(self) -> int:
        """How many values are to be left out."""
        return self._left_out

    def load_state(self, state: Any, version: int, /) -> None:  # noqa: ARG002
        """The same."""
        self._left_out = state


class BufferWithTime(Operator[A, list[A]]):
    """See `buffer_with_time_or_count`. Its only timer says when the open list ends."""

    __slots__ = ("_count", "_span_ns", "_values")

    NAME = "buffer_with_time"

    def __init__(self, span_ns: int, count: int | None) -> None:
        self._span_ns: Final = span_ns
        self._count: Final = count
        self._values: PersistedQueue[A]

    def on_open(self) -> None:
        """The queue."""
        self._values = self.objects.queue("values")

    def on_start(self) -> None:
        """The first list begins."""
        self.set_timer(self.now_ns + self._span_ns)

    def on_next(self, value: A, /) -> None:
        """Into the list; emit it if it is full."""
        self._values.enqueue(value)
        if len(self._values) == self._count:
            self._flush(self.now_ns + self._span_ns)

    def on_timer(self, key: str, /) -> None:  # noqa: ARG002
        """The list ends. Lists that were missed while nothing ran are not made up for."""
        self._flush(self.now_ns + self._span_ns)

    def on_completed(self) -> None:
        """Emit the rest."""
        self.emit(list(self._values))
        self.complete()

    def _flush(self, next_due_ns: int) -> None:
        full = list(self._values)
        self._values.clear()
        self.set_timer(next_due_ns)
        self.emit(full)
