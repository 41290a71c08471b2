"""Operators that emit windows: parts of their values, each as an observable. Groups are in `keyed`.

Windows and groups must be subscribed to while they are handed out, as `flat_map` does. The first window is
handed out at the start, before the first value.
"""

from __future__ import annotations

from typing import Any, ClassVar, Final

from rt.query.core.observable import Transform, applied
from rt.query.core.scheduler import Duration, next_tick_ns
from rt.query.core.subject import Subject
from rt.query.operators.user_functions import (
    UserFunctionOperator,
    check_least,
    last_tick_ns,
    offset_ns,
    period_ns,
)

BEGIN: Final = "begin"
END: Final = "end"


def window_with_count(count: int, skip: int | None = None) -> Transform:
    """Windows of `count` values. A window starts at every `skip`th value; default: `count`.

    The last window may be shorter. Saves the number of values, and which windows are open.
    """
    skip = count if skip is None else skip
    check_least("window_with_count", "count", count, 1)
    check_least("window_with_count", "skip", skip, 1)
    return applied(WindowWithCount, count, skip)


def window_with_time(
    timespan: Duration, timeshift: Duration | None = None, *, aligned: bool = True, offset: Duration = 0
) -> Transform:
    """Windows of `timespan`. A window starts every `timeshift`; default: `timespan`.

    Windows start at round times: the multiples of `timeshift` since 1970 (UTC), plus `offset`. So a window of
    an hour starts at the full hour. The first windows are those that contain the start of the query. With
    `aligned=False`, the first window starts with the query, as in Rx.

    Of the windows that started while the engine did not run, those that are still open are emitted. If a
    virtual clock jumps over more than its `ticks_max` empty windows, the last of them are emitted. Saves the
    start of the next window, and the ends of the open ones.
    """
    name, shift = "window_with_time", timespan if timeshift is None else timeshift
    from_ns = offset_ns(name, offset, aligned=aligned)
    return applied(WindowWithTime, period_ns(name, timespan), period_ns(name, shift), from_ns)


def window_with_time_or_count(
    timespan: Duration, count: int, *, aligned: bool = True, offset: Duration = 0
) -> Transform:
    """Windows that end after `count` values or at the next round time. The next window starts there.

    Round times are those of `window_with_time`. With `aligned=False`, a window ends after `timespan`, as in
    Rx. Saves the number of values in the window, and its end.
    """
    name = "window_with_time_or_count"
    check_least(name, "count", count, 1)
    from_ns = offset_ns(name, offset, aligned=aligned)
    return applied(WindowWithTimeOrCount, period_ns(name, timespan), count, from_ns)


class SubjectOwner(UserFunctionOperator[Any, Subject]):
    """Base of operators that hand out windows or groups.

    The operator runs while it, or one of its windows or groups, has a subscriber.
    """

    __slots__ = ("_is_unsubscribed", "_subjects")

    def __init__(self) -> None:
        self._subjects: dict[str, Subject] = {}
        self._is_unsubscribed = False

    def leave(self) -> None:
        """End if no window or group has subscribers. Otherwise continue for them, but open no new ones."""
        if self.is_disposed or self._is_unsubscribed:
            return
        self._is_unsubscribed = True
        self.changed()
        self._end_if_idle()

    def open_inner(self, name: str, key: Any = None) -> None:
        """Hand out a new window or group, unless the operator has no subscriber."""
        if not self._is_unsubscribed:
            self.reopen_inner(name, key)
            self.hand_out(self._subjects[name])

    def reopen_inner(self, name: str, key: Any = None) -> None:
        """Make a window or group again that was open at the checkpoint."""
        inner = self._subjects[name] = self.make_inner(name, key)
        inner.on_idle = self._end_if_idle

    def fail(self, error: Exception) -> None:
        for inner in list(self._subjects.values()):
            inner.on_error(error)
        if self._is_unsubscribed:
            self.dispose()
        else:
            super().fail(error)

    def complete(self) -> None:
        if self._is_unsubscribed:
            self.dispose()
        else:
            super().complete()

    def dispose(self) -> None:
        """End. Remaining subscribers of windows and groups, for example of a `switch_map`, are completed."""
        if not self.is_disposed:
            try:
                super().dispose()
            finally:
                for inner in list(self._subjects.values()):
                    inner.on_completed()

    def on_dispose(self) -> None:
        for inner in self._subjects.values():
            inner.drop()

    def _end_if_idle(self) -> None:
        if self._is_unsubscribed and not any(inner.has_subscribers for inner in self._subjects.values()):
            self.dispose()


class Windows(SubjectOwner):
    """Windows are named by numbers. Every open window receives every value."""

    __slots__ = ("_made",)

    def __init__(self) -> None:
        super().__init__()
        self._made = 0

    def on_start(self) -> None:
        self.set_timer(self.now_ns, BEGIN)

    def on_next(self, value: Any, /) -> None:
        self.open_first()
        for inner in list(self._subjects.values()):
            inner.on_next(value)

    def fail(self, error: Exception) -> None:
        self.open_first()
        super().fail(error)

    def on_completed(self) -> None:
        self.open_first()
        self.complete()

    def open_first(self) -> None:
        """Hand out the first window, if it was not handed out yet."""
        if self.has_timer(BEGIN):
            self.cancel_timer(BEGIN)
            self.on_timer(BEGIN)

    def open_window(self) -> None:
        self._made += 1
        self.changed()
        self.open_inner(str(self._made))

    def close_oldest(self) -> None:
        """Complete the oldest window. Does nothing if none is open."""
        if self._subjects:
            self.changed()
            self._subjects.pop(next(iter(self._subjects))).on_completed()

    def save_state(self) -> list[Any]:
        return [*super().save_state(), self._is_unsubscribed, self._made, list(self._subjects)]

    def load_state(self, state: Any, version: int, /) -> None:
        *own, self._is_unsubscribed, self._made, names = state
        super().load_state(own, version)
        for name in names:
            self.reopen_inner(name)


class CountingWindows(Windows):
    """Windows that end after a number of values."""

    __slots__ = ("_count", "_received")
    SAVED: ClassVar[str | tuple[str, ...] | None] = ("_received",)

    def __init__(self, count: int) -> None:
        super().__init__()
        self._count: Final = count
        self._received = 0


class WindowWithCount(CountingWindows):
    __slots__ = ("_skip",)
    NAME = "window_with_count"

    def __init__(self, count: int, skip: int) -> None:
        super().__init__(count)
        self._skip: Final = skip

    def on_timer(self, key: str, /) -> None:
        self.open_window()

    def on_next(self, value: Any, /) -> None:
        super().on_next(value)
        if self.is_disposed:
            return
        self._received += 1
        self.changed()
        past = self._received - self._count
        if past >= 0 and past % self._skip == 0:
            self.close_oldest()
        if self._received % self._skip == 0:
            self.open_window()


class WindowWithTime(Windows):
    """The only timer fires at the next start or end, or later while the clock jumps over empty windows."""

    __slots__ = (
        "_empty",
        "_ends_ns",
        "_is_skipping",
        "_next_ns",
        "_offset_ns",
        "_shift_ns",
        "_span_ns",
    )
    NAME = "window_with_time"
    SAVED = ("_next_ns", "_ends_ns", "_empty", "_is_skipping")

    def __init__(self, span_ns: int, shift_ns: int, offset_ns: int | None) -> None:
        super().__init__()
        self._span_ns: Final = span_ns
        self._shift_ns: Final = shift_ns
        self._offset_ns: Final = offset_ns
        self._next_ns = 0
        self._ends_ns: list[int] = []
        self._is_skipping = False
        self._empty = 0
        """Number of windows that were opened after the last value."""

    def on_start(self) -> None:
        now_ns = self.now_ns
        last_ns = last_tick_ns(now_ns, self._shift_ns, self._offset_ns)
        open_before = (
            0 if self._offset_ns is None else (last_ns - now_ns + self._span_ns - 1) // self._shift_ns
        )
        self._next_ns = last_ns - self._shift_ns * max(0, open_before)
        super().on_start()

    def on_next(self, value: Any, /) -> None:
        if self._is_skipping:
            self._resume()
        if self._empty:
            self._empty = 0
            self.changed()
        super().on_next(value)

    def on_timer(self, key: str, /) -> None:
        """A window starts, or ends, or both in this order."""
        now_ns = self.now_ns
        self._open_started(now_ns)
        while self._ends_ns and self._ends_ns[0] <= now_ns:
            del self._ends_ns[0]
            self.close_oldest()
        if self.is_disposed:
            return
        due_ns = at_ns = min([self._next_ns, *self._ends_ns[:1]])
        if self._empty >= len(self._ends_ns):
            at_ns = self.skip_ns(due_ns, self._shift_ns)
        self._is_skipping = at_ns != due_ns
        self.set_timer(at_ns, END)

    def _open_started(self, now_ns: int) -> None:
        """Open the windows that have started and not ended."""
        if self._next_ns > now_ns:
            return
        after_ns = next_tick_ns(self._next_ns, self._shift_ns, now_ns)
        still_open = -(-self._span_ns // self._shift_ns)
        first_ns = max(self._next_ns, after_ns - still_open * self._shift_ns)
        self._next_ns = after_ns
        for start_ns in range(first_ns, after_ns, self._shift_ns):
            if start_ns + self._span_ns > now_ns and not self._is_unsubscribed:
                self._ends_ns.append(start_ns + self._span_ns)
                self._empty += 1
                self.open_window()

    def _resume(self) -> None:
        """A value arrives while the clock jumps: continue with the windows of its time."""
        self._is_skipping = False
        due_ns = min([self._next_ns, *self._ends_ns[:1]])
        if due_ns <= self.now_ns:
            self.on_timer(END)
        else:
            self.set_timer(due_ns, END)


class WindowWithTimeOrCount(CountingWindows):
    """`_due_ns` is the end of the window. The timer is later while the clock jumps over empty windows."""

    __slots__ = ("_due_ns", "_is_skipping", "_offset_ns", "_span_ns")
    NAME = "window_with_time_or_count"
    SAVED = ("_received", "_due_ns", "_is_skipping")

    def __init__(self, span_ns: int, count: int, offset_ns: int | None) -> None:
        super().__init__(count)
        self._span_ns: Final = span_ns
        self._offset_ns: Final = offset_ns
        self._due_ns = 0
        self._is_skipping = False

    def on_timer(self, key: str, /) -> None:
        tick_ns = self._start_ns() if key == BEGIN else self._due_ns
        self._start_window(tick_ns, may_skip=True)

    def on_next(self, value: Any, /) -> None:
        if self._is_skipping:
            self._await_tick(self._due_ns - self._span_ns)
        super().on_next(value)
        if self.is_disposed:
            return
        self._received += 1
        self.changed()
        if self._received == self._count:
            self._start_window(self._start_ns())

    def _start_ns(self) -> int:
        return last_tick_ns(self.now_ns, self._span_ns, self._offset_ns)

    def _start_window(self, tick_ns: int, *, may_skip: bool = False) -> None:
        self._received = 0
        self._await_tick(tick_ns, may_skip=may_skip)
        self.close_oldest()
        self.open_window()

    def _await_tick(self, tick_ns: int, *, may_skip: bool = False) -> None:
        self._due_ns = next_tick_ns(tick_ns, self._span_ns, self.now_ns)
        at_ns = self.skip_ns(self._due_ns, self._span_ns) if may_skip else self._due_ns
        self._is_skipping = at_ns != self._due_ns
        self.set_timer(at_ns, END)
