"""Operators that hold values back, or leave some out, by time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from rt.objects import PersistedQueue
from rt.query.observing import Applied, Observable, Transform, applied
from rt.query.operator import Operator
from rt.query.operators.asking import ABSENT, Asking, period_ns, storable
from rt.query.operators.creating import interval
from rt.query.scheduling import Duration, duration_ns


def delay(duetime: Duration) -> Transform:
    """The same values, and the end, `duetime` later; an error at once.

    Saves the values that are on their way, in the object space.
    """
    return applied(Delay, duration_ns(duetime))


def debounce(duetime: Duration) -> Transform:
    """The values that no other follows within `duetime`, when that is over; the last one at the end.

    Saves the last value, and when it goes on.
    """
    return applied(Debounce, duration_ns(duetime))


def throttle_with_mapper(mapper: Callable[[Any], Observable[Any]]) -> Transform:
    """The values that no other follows before `mapper(value)` emits or ends; the last one at the end.

    `mapper` is called again after a crash, and must answer the same. Saves the last value.
    """
    return applied(Throttle, mapper)


def throttle_first(window_duration: Duration) -> Transform:
    """A value, then none that comes less than `window_duration` behind it, and so on. Saves when it was."""
    return applied(ThrottleFirst, period_ns("throttle_first", window_duration))


def sample(sampler: Observable[Any] | Duration) -> Transform:
    """At every value of `sampler`, or after every such duration, the last value, if one came since.

    The end waits for the sampler, which sends the last value when it ends. Saves the last value.
    """
    every = sampler if isinstance(sampler, Observable) else interval(sampler)
    return lambda source: Applied(Sample, (source, every))


class Delay(Operator[Any, Any]):
    """See `delay`. The timer is that of the first value in the queue, then that of the end."""

    __slots__ = ("_delay_ns", "_end_ns", "_waiting")

    NAME = "delay"

    def __init__(self, delay_ns: int) -> None:
        self._delay_ns: Final = delay_ns
        self._end_ns: int | None = None
        self._waiting: PersistedQueue[tuple[int, Any]]

    def on_open(self) -> None:
        """The queue of values, with their times."""
        self._waiting = self.objects.queue("waiting")

    def on_next(self, value: Any, /) -> None:
        """Into the queue."""
        due_ns = self.now_ns + self._delay_ns
        self._waiting.enqueue((due_ns, value))
        if not self.has_timer():
            self.set_timer(due_ns)

    def on_completed(self) -> None:
        """Later."""
        self._end_ns = self.now_ns + self._delay_ns
        self.changed()
        if not self.has_timer():
            self.set_timer(self._end_ns)

    def on_timer(self, key: str, /) -> None:  # noqa: ARG002
        """Send what is due."""
        now_ns, due = self.now_ns, []
        while self._waiting and self._waiting.peek()[0] <= now_ns:
            due.append(self._waiting.dequeue()[1])
        next_ns = self._waiting.peek()[0] if self._waiting else self._end_ns
        is_end = not self._waiting and next_ns is not None and next_ns <= now_ns
        if next_ns is not None and not is_end:
            self.set_timer(next_ns)
        for value in due:
            self.emit(value)
        if is_end:
            self.complete()

    def save_state(self) -> int | None:
        """When it ends."""
        return self._end_ns

    def load_state(self, state: Any, version: int, /) -> None:  # noqa: ARG002
        """The same."""
        self._end_ns = state


class Pending(Asking[Any, Any]):
    """An operator that keeps one value back."""

    __slots__ = ("_value",)

    def __init__(self) -> None:
        self._value: Any = ABSENT

    def keep(self, value: Any) -> None:
        """Instead of the one that was kept."""
        self._value = storable(value)
        self.changed()

    def send(self) -> None:
        """The value, if there is one."""
        if self._value is not ABSENT:
            value, self._value = self._value, ABSENT
            self.changed()
            self.emit(value)

    def on_completed(self) -> None:
        """Send it, and end."""
        self.send()
        self.complete()

    def save_state(self) -> list[Any]:
        """The value, if there is one."""
        return [] if self._value is ABSENT else [self._value]

    def load_state(self, state: Any, version: int, /) -> None:  # noqa: ARG002
        """The same."""
        self._value = state[0] if state else ABSENT


class Debounce(Pending):
    """See `debounce`."""

    __slots__ = ("_delay_ns",)

    NAME = "debounce"

    def __init__(self, delay_ns: int) -> None:
        super().__init__()
        self._delay_ns: Final = delay_ns

    def on_next(self, value: Any, /) -> None:
        """Wait for others."""
        self.keep(value)
        self.set_timer(self.now_ns + self._delay_ns)

    def on_timer(self, key: str, /) -> None:  # noqa: ARG002
        """None came."""
        self.send()


class Throttle(Pending):
    """See `throttle_with_mapper`."""

    __slots__ = ("_mapper",)

    NAME = "throttle_with_mapper"

    def __init__(self, mapper: Callable[[Any], Observable[Any]]) -> None:
        super().__init__()
        self._mapper: Final = mapper

    def on_next(self, value: Any, /) -> None:
        """Wait for others."""
        self.keep(value)
        for key in self.child_keys():
            self.close_child(key)
        self.ask(self.open_child, str(self._children_made), value)

    def child(self, key: str, seed: Any, /) -> Observable[Any]:  # noqa: ARG002
        """What says how long."""
        return self._mapper(seed)

    def on_inner_next(self, key: str, value: Any, /) -> None:  # noqa: ARG002
        """None came."""
        self.close_child(key)
        self.send()

    def on_inner_completed(self, key: str, /) -> None:  # noqa: ARG002
        """None came."""
        self.send()


class ThrottleFirst(Operator[Any, Any]):
    """See `throttle_first`."""

    __slots__ = ("_last_ns", "_window_ns")

    NAME = "throttle_first"

    def __init__(self, window_ns: int) -> None:
        self._window_ns: Final = window_ns
        self._last_ns: int | None = None

    def on_next(self, value: Any, /) -> None:
        """Let it pass, or not."""
        now_ns = self.now_ns
        if self._last_ns is None or now_ns - self._last_ns >= self._window_ns:
            self._last_ns = now_ns
            self.changed()
            self.emit(value)

    def save_state(self) -> int | None:
        """When the last one passed."""
        return self._last_ns

    def load_state(self, state: Any, version: int, /) -> None:  # noqa: ARG002
        """The same."""
        self._last_ns = state


class Sample(Pending):
    """See `sample`."""

    __slots__ = ()

    NAME = "sample"

    def on_inner_next(self, key: str, value: Any, /) -> None:
        """Keep it, or send what is kept."""
        if key == "0":
            self.keep(value)
            return
        self.send()
        if self.has_input_ended(0):
            self.complete()

    def on_inner_completed(self, key: str, /) -> None:
        """Wait for the other."""
        if key == "1":
            self.send()
        if not self.has_open_input():
            self.complete()
