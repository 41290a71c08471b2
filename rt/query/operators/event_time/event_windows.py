"""Windows of event time. Each value belongs to the windows of its own time, in any order of arrival.

Invariants:
- A window is emitted when the watermark passes its end. The order is by end, then by key, then by start.
- A value is late if all its windows are closed: the watermark passed their ends by the allowed lateness.
- Without late values, the result does not depend on the order of arrival, if the fold does not depend on it.
- A window is one row, in the object space.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterable
from typing import Any, Final, Self, TypedDict

from msgspec import Struct

from rt.errors import InvalidOption
from rt.objects import PersistedDictionary
from rt.objects.core.typed_json import key_of
from rt.query.core.observable import Transform, applied
from rt.query.core.scheduler import Duration, duration_ns
from rt.query.mutation_check import keeping_arguments
from rt.query.operators.event_time.time_operator import TimeOperator, order_of
from rt.query.operators.user_functions import FAILED, period_ns

_OVERLAP_MAX: Final = 10_000
"""Largest number of windows to which a value may belong: each window costs a row."""


def _same(value: Any) -> Any:
    return value


class Fold(Struct, frozen=True):
    """`add(accumulated, value)` returns the new accumulated value, starting with `initial()`.

    - `add` may change `accumulated` and return it. Then `result` must copy it, if late values are allowed.
      If `add` raises, it must raise before it changes `accumulated`.
    - `merge(first, second)` joins the accumulated values of two sessions; `first` is of the earlier session.
      It must not change them, because the sessions stay as they are if the value that joins them is left
      out. `check_values` finds such a change.
    - `result(accumulated)` is the value that the window emits.
    - The accumulated value must be storable (`rt.objects.ANY`).
    - The values of several sources arrive in any order. The result is the same if `add` does not depend on
      the order.
    """

    initial: Callable[[], Any]
    add: Callable[[Any, Any], Any]
    merge: Callable[[Any, Any], Any] | None = None
    result: Callable[[Any], Any] = _same

    @classmethod
    def count(cls) -> Self:
        """The number of values."""
        return cls(int, lambda count, _: count + 1, lambda first, second: first + second)

    @classmethod
    def sum(cls, of: Callable[[Any], Any] = _same) -> Self:
        """The sum of `of(value)`. The last digits of a sum of floats depend on the order."""
        return cls(int, lambda total, value: total + of(value), lambda first, second: first + second)

    @classmethod
    def to_list(cls, of: Callable[[Any], Any] = _same) -> Self:
        """A list of `of(value)`, in the order of arrival."""
        return cls(list, lambda values, value: [*values, of(value)], lambda first, second: first + second)


def tumbling_window(
    size: Duration,
    fold: Fold,
    *,
    key_mapper: Callable[[Any], Any] | None = None,
    offset: Duration = 0,
    allowed_lateness: Duration = 0,
    late: str | None = None,
) -> Transform:
    """A `WindowResult` for every key and every `size` of event time that has values.

    Windows start at multiples of `size` since 1970 (UTC), plus `offset`. After the first result, a value
    within `allowed_lateness` emits the result again, with the next `revision`. Later values are counted and
    sent to the sink `late`, as `LateValue`. Saves the open windows, in the object space.
    """
    size_ns = period_ns("tumbling_window", size)
    options = fold, key_mapper, duration_ns(allowed_lateness), late
    return applied(TumblingWindows, size_ns, size_ns, duration_ns(offset), *options)


def sliding_window(
    size: Duration,
    step: Duration,
    fold: Fold,
    *,
    key_mapper: Callable[[Any], Any] | None = None,
    offset: Duration = 0,
    allowed_lateness: Duration = 0,
    late: str | None = None,
) -> Transform:
    """As `tumbling_window`, but a window starts every `step`.

    A value belongs to `size / step` windows. Saves the open windows, in the object space.
    """
    size_ns, step_ns = period_ns("sliding_window", size), period_ns("sliding_window", step)
    if step_ns > size_ns:
        raise InvalidOption(f"sliding_window: step must be at most size, got {step} and {size}")
    if size_ns > step_ns * _OVERLAP_MAX:
        raise InvalidOption(
            f"sliding_window: size must be at most {_OVERLAP_MAX} steps, got {size} and a step of {step}"
        )
    options = fold, key_mapper, duration_ns(allowed_lateness), late
    return applied(SlidingWindows, size_ns, step_ns, duration_ns(offset), *options)


def session_window(
    gap: Duration,
    fold: Fold,
    *,
    key_mapper: Callable[[Any], Any] | None = None,
    allowed_lateness: Duration = 0,
    late: str | None = None,
) -> Transform:
    """A `WindowResult` for every key and every time in which its values are less than `gap` apart.

    It ends `gap` after its last value. A value between two sessions joins them, so `fold` needs `merge`.
    Lateness as in `tumbling_window`; the next revision of a session may start earlier or end later. Saves the
    open sessions, in the object space.
    """
    if fold.merge is None:
        raise InvalidOption("session_window: fold needs merge, because a value can join two sessions")
    lateness_ns = duration_ns(allowed_lateness)
    return applied(SessionWindows, period_ns("session_window", gap), fold, key_mapper, lateness_ns, late)


class WindowResult(TypedDict):
    """`start_ns` is included, `end_ns` is not. `revision`: 0, then 1, 2, … for updates by late values."""

    key: Any
    start_ns: int
    end_ns: int
    revision: int
    value: Any


_Window = tuple[Any, int]
"""A key and a start."""
_Row = tuple[int, Any, int, bool]
"""The end, the accumulated value, the next revision, and whether the watermark has not yet passed the end."""


class EventWindows(TimeOperator):
    """`_heap` has each window with a time that is not later than its `_due` time. The heap is not saved."""

    __slots__ = ("_fold", "_heap", "_key_mapper", "_lateness_ns", "_pushed", "_windows")

    def __init__(
        self, fold: Fold, key_mapper: Callable[[Any], Any] | None, lateness_ns: int, late: str | None
    ) -> None:
        super().__init__(late)
        self._fold: Final = fold
        self._key_mapper: Final = key_mapper
        self._lateness_ns: Final = lateness_ns
        self._windows: PersistedDictionary[_Window, _Row]
        self._heap: list[tuple[int, int, _Window]] = []
        self._pushed = 0

    def on_open(self) -> None:
        super().on_open()
        self._windows = self.objects.dictionary("windows")

    def load_state(self, state: Any, version: int, /) -> None:
        super().load_state(state, version)
        for window, row in self._windows.items():
            self.restore(window, row)

    def restore(self, window: _Window, row: _Row) -> None:
        self._push(self._due(row), window)

    def key_of_value(self, value: Any) -> Any:
        """The key, or FAILED."""
        return None if self._key_mapper is None else key_of(self.call(self._key_mapper, value))

    def put(self, window: _Window, row: _Row, before: _Row | None) -> None:
        """Store a window that changed. If the watermark passed its end, emit it now."""
        self.store(window, row, before)
        if not row[3]:
            self.emit_window(window, row)

    def store(self, window: _Window, row: _Row, before: _Row | None) -> None:
        """Store a window that changed. If this raises, nothing is changed."""
        end_ns, accumulated, revision, is_open = row
        if not is_open:
            self._windows[window] = end_ns, accumulated, revision + 1, False
        else:
            self._windows[window] = row
        due_ns = self._due(row)
        if before is None or due_ns < self._due(before):
            self._push(due_ns, window)
            self.wake(due_ns)

    def drop(self, window: _Window) -> None:
        del self._windows[window]

    def next_due_ns(self) -> int | None:
        while self._heap:
            due_ns, _, window = self._heap[0]
            row = self._windows.get(window)
            if row is not None and self._due(row) == due_ns:
                return due_ns
            heapq.heappop(self._heap)
            if row is not None:
                self._push(self._due(row), window)
        return None

    def on_due(self, watermark_ns: int) -> None:
        while (due_ns := self.next_due_ns()) is not None and due_ns <= watermark_ns:
            due: dict[_Window, None] = {}
            while self.next_due_ns() == due_ns:
                due[heapq.heappop(self._heap)[2]] = None
            self._close(due)
            if self.is_disposed:
                return

    def on_completed(self) -> None:
        """Emit all open windows."""
        by_end: dict[int, list[_Window]] = {}
        for window, (end_ns, _, _, is_open) in self._windows.items():
            if is_open:
                by_end.setdefault(end_ns, []).append(window)
        for _, windows in sorted(by_end.items()):
            self._close(windows)
        self.complete()

    def _close(self, windows: Iterable[_Window]) -> None:
        """Emit these windows, or delete them if they were emitted before."""
        for window in sorted(windows, key=lambda each: (order_of(each[0]), each[1])):
            row = end_ns, accumulated, revision, is_open = self._windows[window]
            if is_open and self._lateness_ns:
                self._windows[window] = end_ns, accumulated, revision + 1, False
                self._push(end_ns + self._lateness_ns, window)
            else:
                self.drop(window)
            if is_open:
                self.emit_window(window, row)
            if self.is_disposed:
                return

    def emit_window(self, window: _Window, row: _Row) -> None:
        (key, start_ns), (end_ns, accumulated, revision, _) = window, row
        value = self.call(self._fold.result, accumulated)
        if value is not FAILED:
            found = WindowResult(key=key, start_ns=start_ns, end_ns=end_ns, revision=revision, value=value)
            self.emit_at(end_ns - 1, found)

    def _due(self, row: _Row) -> int:
        """When the window is emitted, or deleted."""
        return row[0] if row[3] else row[0] + self._lateness_ns

    def _push(self, due_ns: int, window: _Window) -> None:
        self._pushed += 1
        heapq.heappush(self._heap, (due_ns, self._pushed, window))


class SlidingWindows(EventWindows):
    __slots__ = ("_offset_ns", "_size_ns", "_step_ns")
    NAME = "sliding_window"

    def __init__(self, size_ns: int, step_ns: int, offset_ns: int, *options: Any) -> None:
        super().__init__(*options)
        self._size_ns: Final = size_ns
        self._step_ns: Final = step_ns
        self._offset_ns: Final = offset_ns

    def on_next(self, value: Any, /) -> None:
        time_ns, watermark_ns = self.times()
        last_ns = time_ns - (time_ns - self._offset_ns) % self._step_ns
        first_ns = max(time_ns, watermark_ns - self._lateness_ns) - self._size_ns + 1
        starts = range(last_ns, first_ns - 1, -self._step_ns)
        if not starts:
            self.leave_out(value, time_ns)
            return
        if (key := self.key_of_value(value)) is FAILED:
            return
        changed: list[tuple[_Window, _Row, _Row | None]] = []
        for start_ns in reversed(starts):
            before = self.call(self._windows.get, (key, start_ns))
            if before is FAILED:
                return
            accumulated, revision = (self._fold.initial(), 0) if before is None else before[1:3]
            if (accumulated := self.call(self._fold.add, accumulated, value)) is FAILED:
                # `add` changed these accumulated values in place. They stay changed, so they must be saved.
                changed = [each for each in changed if each[2] is not None and each[1][1] is each[2][1]]
                break
            end_ns = start_ns + self._size_ns
            changed.append(((key, start_ns), (end_ns, accumulated, revision, end_ns > watermark_ns), before))
        for each in changed:
            if not self.is_disposed:
                self.put(*each)


class TumblingWindows(SlidingWindows):
    """A separate class because of its name, which is used in logs and dead letters."""

    __slots__ = ()
    NAME = "tumbling_window"


class SessionWindows(EventWindows):
    """`_starts` has the starts of the sessions of each key, sorted. Sessions of a key do not overlap."""

    __slots__ = ("_gap_ns", "_merge", "_starts")
    NAME = "session_window"

    def __init__(self, gap_ns: int, *options: Any) -> None:
        super().__init__(*options)
        self._gap_ns: Final = gap_ns
        self._starts: dict[Any, list[int]] = {}
        self._merge: Callable[[Any, Any], Any]

    def on_open(self) -> None:
        super().on_open()
        assert self._fold.merge is not None
        is_checked = self._group.runtime.watch is not None
        self._merge = keeping_arguments(self._fold.merge, self) if is_checked else self._fold.merge

    def restore(self, window: _Window, row: _Row) -> None:
        super().restore(window, row)
        insort(self._starts.setdefault(window[0], []), window[1])

    def drop(self, window: _Window) -> None:
        super().drop(window)
        starts = self._starts[window[0]]
        del starts[bisect_left(starts, window[1])]
        if not starts:
            del self._starts[window[0]]

    def on_next(self, value: Any, /) -> None:
        time_ns, watermark_ns = self.times()
        if (key := self.key_of_value(value)) is FAILED or (
            starts := self.call(self._starts.get, key)
        ) is FAILED:
            return
        start_ns, end_ns, revision = time_ns, time_ns + self._gap_ns, 0
        joined = []
        starts = starts or []
        first = max(0, bisect_right(starts, time_ns) - 1)  # the only session that may start before the value
        for each_ns in starts[first : bisect_left(starts, time_ns + self._gap_ns)]:
            row = self._windows[key, each_ns]
            if time_ns < row[0]:
                joined.append(((key, each_ns), row))
                start_ns, end_ns, revision = (
                    min(start_ns, each_ns),
                    max(end_ns, row[0]),
                    max(revision, row[2]),
                )
        if end_ns + self._lateness_ns <= watermark_ns:
            self.leave_out(value, time_ns)
            return
        accumulated = joined[0][1][1] if joined else self._fold.initial()
        for _, row in joined[1:]:
            if (accumulated := self.call(self._merge, accumulated, row[1])) is FAILED:
                return
        if (accumulated := self.call(self._fold.add, accumulated, value)) is FAILED:
            return
        session = (key, start_ns), (end_ns, accumulated, revision, end_ns > watermark_ns)
        before = next((row for window, row in joined if window == session[0]), None)
        self.store(*session, before)
        for window, _ in joined:
            if window != session[0]:
                self.drop(window)
        if before is None:
            insort(self._starts.setdefault(key, []), start_ns)
        if end_ns <= watermark_ns:
            self.emit_window(*session)
