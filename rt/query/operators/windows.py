"""Operators that hand out windows: parts of their values, each as an observable of its own.

A window must be subscribed to when it is handed out, as `flat_map` does. The first is handed out as soon as
time runs, and before the first value.
"""

from __future__ import annotations

from typing import Any, Final

from rt.query.observing import Transform, applied
from rt.query.operators.asking import next_tick_ns, period_ns
from rt.query.operators.handing_out import HandsOut
from rt.query.scheduling import Duration

BEGIN: Final = "begin"
END: Final = "end"


def window_with_count(count: int, skip: int | None = None) -> Transform:
    """Windows of `count` values, begun at every `skip`th value (default: `count`). The last may be shorter.

    Saves how many values came, and which windows are open.
    """
    skip = count if skip is None else skip
    if count < 1 or skip < 1:
        raise ValueError(f"window_with_count({count}, {skip})")
    return applied(WindowWithCount, count, skip)


def window_with_time(timespan: Duration, timeshift: Duration | None = None) -> Transform:
    """Windows of `timespan`, one every `timeshift` (default: `timespan`) from the start.

    Of those that began while nothing ran, only the last is handed out, if it is not over. Saves when the next
    begins, and the open ones end.
    """
    shift = timespan if timeshift is None else timeshift
    return applied(
        WindowWithTime, period_ns("window_with_time", timespan), period_ns("window_with_time", shift)
    )


def window_with_time_or_count(timespan: Duration, count: int) -> Transform:
    """Windows that end when they have `count` values, or `timespan` is over; the next begins there.

    Saves how many values the window has, and when it ends.
    """
    if count < 1:
        raise ValueError(f"window_with_time_or_count({timespan}, {count})")
    return applied(WindowWithTimeOrCount, period_ns("window_with_time_or_count", timespan), count)


class Windows(HandsOut):
    """An operator of windows. They are named by numbers; all that are open get every value."""

    __slots__ = ("_made",)

    def __init__(self) -> None:
        super().__init__()
        self._made = 0

    def on_start(self) -> None:
        """The first, as soon as time runs."""
        self.set_timer(self.now_ns, BEGIN)

    def on_next(self, value: Any, /) -> None:
        """To all windows."""
        self.begin()
        for inner in list(self._inners.values()):
            inner.on_next(value)

    def fail(self, error: Exception) -> None:
        """Not before the first window."""
        self.begin()
        super().fail(error)

    def on_completed(self) -> None:
        """Not before the first window."""
        self.begin()
        self.complete()

    def begin(self) -> None:
        """Hand out the first window, unless it was."""
        if self.has_timer(BEGIN):
            self.cancel_timer(BEGIN)
            self.on_timer(BEGIN)

    def open_window(self) -> None:
        """Hand out one more."""
        self._made += 1
        self.changed()
        self.open_inner(str(self._made))

    def close_oldest(self) -> None:
        """It has ended. Nothing if none is open."""
        if self._inners:
            self.changed()
            self.close_inner(next(iter(self._inners)))

    def save_windows(self) -> list[Any]:
        """Whether nobody wants more, how many there were, and which are open."""
        return [self._is_left, self._made, list(self._inners)]

    def load_windows(self, state: list[Any]) -> None:
        """The same."""
        self._is_left, self._made, names = state
        for name in names:
            self.reopen_inner(name)


class CountingWindows(Windows):
    """Windows that end by the number of values that came."""

    __slots__ = ("_came", "_count")

    def __init__(self, count: int) -> None:
        super().__init__()
        self._count: Final = count
        self._came = 0

    def save_state(self) -> list[Any]:
        """How many came, and the windows."""
        return [self._came, *self.save_windows()]

    def load_state(self, state: Any, version: int, /) -> None:  # noqa: ARG002
        """The same."""
        self._came, *windows = state
        self.load_windows(windows)


class WindowWithCount(CountingWindows):
    """See `window_with_count`."""

    __slots__ = ("_skip",)

    NAME = "window_with_count"

    def __init__(self, count: int, skip: int) -> None:
        super().__init__(count)
        self._skip: Final = skip

    def on_timer(self, key: str, /) -> None:  # noqa: ARG002
        """The first."""
        self.open_window()

    def on_next(self, value: Any, /) -> None:
        """To all windows; perhaps the last of one, and the last before another."""
        super().on_next(value)
        if self.is_disposed:
            return
        self._came += 1
        self.changed()
        past = self._came - self._count
        if past >= 0 and past % self._skip == 0:
            self.close_oldest()
        if self._came % self._skip == 0:
            self.open_window()


class WindowWithTime(Windows):
    """See `window_with_time`."""

    __slots__ = ("_ends_ns", "_next_ns", "_shift_ns", "_span_ns")

    NAME = "window_with_time"

    def __init__(self, span_ns: int, shift_ns: int) -> None:
        super().__init__()
        self._span_ns: Final = span_ns
        self._shift_ns: Final = shift_ns
        self._next_ns = 0
        self._ends_ns: list[int] = []

    def on_start(self) -> None:
        """The first, as soon as time runs."""
        self._next_ns = self.now_ns
        super().on_start()

    def on_timer(self, key: str, /) -> None:  # noqa: ARG002
        """One begins, or one ends, or both: in this order."""
        now_ns = self.now_ns
        if self._next_ns <= now_ns:
            self._next_ns = next_tick_ns(self._next_ns, self._shift_ns, now_ns)
            end_ns = self._next_ns - self._shift_ns + self._span_ns
            if end_ns > now_ns and not self._is_left:
                self._ends_ns.append(end_ns)
                self.open_window()
        while self._ends_ns and self._ends_ns[0] <= now_ns:
            del self._ends_ns[0]
            self.close_oldest()
        if not self.is_disposed:
            self.set_timer(min([self._next_ns, *self._ends_ns[:1]]), END)

    def save_state(self) -> list[Any]:
        """When the next begins, when the open ones end, and these."""
        return [self._next_ns, self._ends_ns, *self.save_windows()]

    def load_state(self, state: Any, version: int, /) -> None:  # noqa: ARG002
        """The same."""
        self._next_ns, self._ends_ns, *windows = state
        self.load_windows(windows)


class WindowWithTimeOrCount(CountingWindows):
    """See `window_with_time_or_count`."""

    __slots__ = ("_span_ns",)

    NAME = "window_with_time_or_count"

    def __init__(self, span_ns: int, count: int) -> None:
        super().__init__(count)
        self._span_ns: Final = span_ns

    def on_timer(self, key: str, /) -> None:  # noqa: ARG002
        """The window ends, and the next begins."""
        self._came = 0
        self.set_timer(self.now_ns + self._span_ns, END)
        self.close_oldest()
        self.open_window()

    def on_next(self, value: Any, /) -> None:
        """Into the window; perhaps its last."""
        super().on_next(value)
        if self.is_disposed:
            return
        self._came += 1
        self.changed()
        if self._came == self._count:
            self.on_timer(END)
