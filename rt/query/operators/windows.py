"""Operators that emit windows or groups: parts of their values, each as an observable.

Windows and groups must be subscribed to while they are handed out, as `flat_map` does. The first window is
handed out at the start, before the first value.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from rt.errors import InvalidOption
from rt.objects import PersistedDictionary
from rt.query.core.observable import Transform, applied
from rt.query.core.scheduler import Duration
from rt.query.core.subject import Subject
from rt.query.operators.user_functions import (
    FAILED,
    UserFunctionOperator,
    check_least,
    key_of,
    next_tick_ns,
    period_ns,
)

BEGIN: Final = "begin"
END: Final = "end"


def window_with_count(count: int, skip: int | None = None) -> Transform:
    """Windows of `count` values. A window starts at every `skip`th value; default: `count`.

    The last window may be shorter. Saves the number of values, and which windows are open.
    """
    skip = count if skip is None else skip
    if count < 1 or skip < 1:
        raise InvalidOption(f"window_with_count: count and skip must be 1 or more, got {count} and {skip}")
    return applied(WindowWithCount, count, skip)


def window_with_time(timespan: Duration, timeshift: Duration | None = None) -> Transform:
    """Windows of `timespan`. A window starts every `timeshift`; default: `timespan`.

    Of the windows that started while the engine did not run, only the last is emitted, if it is still open.
    Saves the start of the next window, and the ends of the open ones.
    """
    shift = timespan if timeshift is None else timeshift
    return applied(
        WindowWithTime, period_ns("window_with_time", timespan), period_ns("window_with_time", shift)
    )


def window_with_time_or_count(timespan: Duration, count: int) -> Transform:
    """Windows that end after `count` values or `timespan`. The next window starts there.

    Saves the number of values in the window, and its end.
    """
    check_least("window_with_time_or_count", "count", count, 1)
    return applied(WindowWithTimeOrCount, period_ns("window_with_time_or_count", timespan), count)


def group_by(
    key_mapper: Callable[[Any], Any], element_mapper: Callable[[Any], Any] | None = None
) -> Transform:
    """For every key a group, emitted at its first value. It sends `element_mapper(value)`.

    A group has its `key`, and must be subscribed to immediately, as `flat_map` does. Groups end with the
    source. Saves the keys, in the object space.
    """
    return applied(GroupBy, key_mapper, element_mapper)


class SubjectOwner(UserFunctionOperator[Any, Subject]):
    """Base of operators that hand out windows or groups. It runs while it or one of them has a subscriber."""

    __slots__ = ("_is_unsubscribed", "_subjects")

    def __init__(self) -> None:
        self._subjects: dict[str, Subject] = {}
        self._is_unsubscribed = False

    def leave(self) -> None:
        """End if no window or group has subscribers. Otherwise continue for them, without new ones."""
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
            super().dispose()
            for inner in list(self._subjects.values()):
                inner.on_completed()

    def on_dispose(self) -> None:
        for inner in self._subjects.values():
            inner.drop()

    def _end_if_idle(self) -> None:
        if self._is_unsubscribed and not any(inner.has_subscribers for inner in self._subjects.values()):
            self.dispose()


class GroupBy(SubjectOwner):
    """Groups are named by numbers, in the order of their first values."""

    __slots__ = ("_element_mapper", "_key_mapper", "_names")
    NAME = "group_by"

    def __init__(self, key_mapper: Callable[[Any], Any], element_mapper: Callable[[Any], Any] | None) -> None:
        super().__init__()
        self._key_mapper: Final = key_mapper
        self._element_mapper: Final = element_mapper
        self._names: PersistedDictionary[Any, str]

    def on_open(self) -> None:
        self._names = self.objects.dictionary("keys")

    def on_next(self, value: Any, /) -> None:
        key = key_of(self.call(self._key_mapper, value))
        if key is FAILED or (name := self.call(self._names.get, key)) is FAILED:
            return
        if name is None:
            if self._is_unsubscribed:
                return
            name = self._names[key] = str(len(self._names))
            self.open_inner(name, key)
        element = value if self._element_mapper is None else self.call(self._element_mapper, value)
        if not self.is_disposed:
            self._subjects[name].on_next(element)

    def save_state(self) -> bool:
        return self._is_unsubscribed

    def load_state(self, state: Any, version: int, /) -> None:
        self._is_unsubscribed = state
        for key, name in self._names.items():
            self.reopen_inner(name, key)


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
        """Hand out the first window, if it was not."""
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
    SAVED = ("_received",)

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
    __slots__ = ("_ends_ns", "_next_ns", "_shift_ns", "_span_ns")
    NAME = "window_with_time"
    SAVED = ("_next_ns", "_ends_ns")

    def __init__(self, span_ns: int, shift_ns: int) -> None:
        super().__init__()
        self._span_ns: Final = span_ns
        self._shift_ns: Final = shift_ns
        self._next_ns = 0
        self._ends_ns: list[int] = []

    def on_start(self) -> None:
        self._next_ns = self.now_ns
        super().on_start()

    def on_timer(self, key: str, /) -> None:
        """A window starts, or ends, or both in this order."""
        now_ns = self.now_ns
        if self._next_ns <= now_ns:
            self._next_ns = next_tick_ns(self._next_ns, self._shift_ns, now_ns)
            end_ns = self._next_ns - self._shift_ns + self._span_ns
            if end_ns > now_ns and not self._is_unsubscribed:
                self._ends_ns.append(end_ns)
                self.open_window()
        while self._ends_ns and self._ends_ns[0] <= now_ns:
            del self._ends_ns[0]
            self.close_oldest()
        if not self.is_disposed:
            self.set_timer(min([self._next_ns, *self._ends_ns[:1]]), END)


class WindowWithTimeOrCount(CountingWindows):
    __slots__ = ("_span_ns",)
    NAME = "window_with_time_or_count"

    def __init__(self, span_ns: int, count: int) -> None:
        super().__init__(count)
        self._span_ns: Final = span_ns

    def on_timer(self, key: str, /) -> None:
        self._received = 0
        self.set_timer(self.now_ns + self._span_ns, END)
        self.close_oldest()
        self.open_window()

    def on_next(self, value: Any, /) -> None:
        super().on_next(value)
        if self.is_disposed:
            return
        self._received += 1
        self.changed()
        if self._received == self._count:
            self.on_timer(END)
