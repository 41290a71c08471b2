"""Operators that emit lists of values. Open lists are in the object space."""

from __future__ import annotations

from typing import Final, TypeVar

from rt.errors import InvalidOption
from rt.objects import PersistedQueue
from rt.query.core.observable import Transform, applied
from rt.query.core.operator import Operator
from rt.query.core.scheduler import Duration, duration_ns, next_tick_ns
from rt.query.operators.elements.aggregate import to_list
from rt.query.operators.inner.flatten import flat_map
from rt.query.operators.user_functions import check_least, compose, last_tick_ns, offset_ns
from rt.query.operators.windows import window_with_time

A = TypeVar("A")


def buffer_with_count(count: int, skip: int | None = None) -> Transform:
    """Lists of `count` values. A list starts at every `skip`th value; default: `count`.

    At the end, the open lists are emitted as they are, oldest first. Saves the values of open lists, each
    once, in the object space, and the number of values to skip.
    """
    skip = count if skip is None else skip
    check_least("buffer_with_count", "count", count, 1)
    check_least("buffer_with_count", "skip", skip, 1)
    return applied(BufferWithCount, count, skip)


def buffer_with_time(
    timespan: Duration, timeshift: Duration | None = None, *, aligned: bool = True, offset: Duration = 0
) -> Transform:
    """Every `timespan`, the list of the values since the last list, possibly empty. At the end, the rest.

    With `timeshift`, a list of `timespan` starts at every `timeshift`. Lists start and end at the round times
    of `window_with_time`. Saves the values, in the object space, and the end of the list.
    """
    if timeshift is not None:
        windows = window_with_time(timespan, timeshift, aligned=aligned, offset=offset)
        return compose(windows, flat_map(lambda window: window.pipe(to_list())))
    return buffer_with_time_or_count(timespan, None, aligned=aligned, offset=offset)


def buffer_with_time_or_count(
    timespan: Duration, count: int | None, *, aligned: bool = True, offset: Duration = 0
) -> Transform:
    """As `buffer_with_time`, but a list with `count` values is emitted at once, and the next one starts.

    It ends at the next round time. With `aligned=False`, after `timespan`, as in Rx. Saves the values, in the
    object space, and the end of the list.
    """
    if duration_ns(timespan) < 1 or (count is not None and count < 1):
        raise InvalidOption(
            f"buffer_with_time_or_count: expected 1 ns and 1 or more, got {timespan} and {count}"
        )
    from_ns = offset_ns("buffer_with_time", offset, aligned=aligned)
    return applied(BufferWithTime, duration_ns(timespan), count, from_ns)


class BufferWithCount(Operator[A, list[A]]):
    """The queue starts with the first value of the oldest open list."""

    __slots__ = ("_count", "_skip", "_to_skip", "_values")
    NAME = "buffer_with_count"
    SAVED = "_to_skip"

    def __init__(self, count: int, skip: int) -> None:
        self._count: Final = count
        self._skip: Final = skip
        self._to_skip = 0
        self._values: PersistedQueue[A]

    def on_open(self) -> None:
        self._values = self.objects.queue("values")

    def on_next(self, value: A, /) -> None:
        if self._to_skip:
            self._to_skip -= 1
            self.changed()
            return
        self._values.enqueue(value)
        if len(self._values) < self._count:
            return
        full = list(self._values)
        for _ in range(min(self._skip, self._count)):
            self._values.dequeue()
        if self._skip > self._count:
            self._to_skip = self._skip - self._count
            self.changed()
        self.emit(full)

    def on_completed(self) -> None:
        rest = list(self._values)
        for start in range(0, len(rest), self._skip):
            self.emit(rest[start:])
        self.complete()


class BufferWithTime(Operator[A, list[A]]):
    """The only timer fires at the end of the open list, or later while the clock jumps over empty lists."""

    __slots__ = ("_count", "_due_ns", "_is_skipping", "_offset_ns", "_span_ns", "_values")
    NAME = "buffer_with_time"
    SAVED = ("_due_ns", "_is_skipping")

    def __init__(self, span_ns: int, count: int | None, offset_ns: int | None) -> None:
        self._span_ns: Final = span_ns
        self._count: Final = count
        self._offset_ns: Final = offset_ns
        self._due_ns = 0
        """The end of the open list."""
        self._is_skipping = False
        self._values: PersistedQueue[A]

    def on_open(self) -> None:
        self._values = self.objects.queue("values")

    def on_start(self) -> None:
        self._start_list(last_tick_ns(self.now_ns, self._span_ns, self._offset_ns))

    def on_next(self, value: A, /) -> None:
        if self._is_skipping:
            self._start_list(self._due_ns - self._span_ns)
        self._values.enqueue(value)
        if len(self._values) == self._count:
            self._end_list(last_tick_ns(self.now_ns, self._span_ns, self._offset_ns))

    def on_timer(self, key: str, /) -> None:
        """The list ends. Lists that were missed while the engine did not run are not emitted."""
        self._end_list(self._due_ns, may_skip=True)

    def _end_list(self, tick_ns: int, *, may_skip: bool = False) -> None:
        full = list(self._values)
        self._values.clear()
        self._start_list(tick_ns, may_skip=may_skip)
        self.emit(full)

    def _start_list(self, tick_ns: int, *, may_skip: bool = False) -> None:
        """Start a list that ends at the next tick."""
        self._due_ns = next_tick_ns(tick_ns, self._span_ns, self.now_ns)
        due_ns = self.skip_ns(self._due_ns, self._span_ns) if may_skip else self._due_ns
        self._is_skipping = due_ns != self._due_ns
        self.set_timer(due_ns)

    def on_completed(self) -> None:
        self.emit(list(self._values))
        self.complete()
