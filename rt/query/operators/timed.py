"""Operators that delay or drop values by time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Final

from rt.objects import PersistedQueue
from rt.query.core.observable import Applied, Observable, Transform, applied
from rt.query.core.operator import Operator
from rt.query.core.scheduler import Duration, duration_ns
from rt.query.operators.user_functions import (
    FAILED,
    UserFunctionOperator,
    last_tick_ns,
    offset_ns,
    period_ns,
    storable,
)


def delay(duetime: Duration) -> Transform:
    """The same values and completion, `duetime` later. An error is sent at once.

    Saves the delayed values, in the object space.
    """
    return applied(Delay, duration_ns(duetime))


def debounce(duetime: Duration) -> Transform:
    """A value when no other value followed it for `duetime`; at the end, the last value.

    Saves the last value, and the time when it is sent.
    """
    return applied(Debounce, duration_ns(duetime))


def throttle_with_mapper(mapper: Callable[[Any], Observable[Any]]) -> Transform:
    """A value when no other value followed before `mapper(value)` emitted or ended.

    At the end, the last value. `mapper` is called again after a crash, and must return the same. Saves the
    last value.
    """
    return applied(Throttle, mapper)


def throttle_first(window_duration: Duration) -> Transform:
    """The first value of every `window_duration`, which starts at that value. Saves its time."""
    return applied(ThrottleFirst, period_ns("throttle_first", window_duration))


def sample(sampler: Observable[Any] | Duration, *, aligned: bool = True, offset: Duration = 0) -> Transform:
    """At every value of `sampler`, or after every such duration, the last value, if it is new.

    The sampler's completion also emits. Completes when the source has completed and the sampler emits or
    completes. A duration ends at the round times of `window_with_time`. Saves the last value.
    """
    if isinstance(sampler, Observable):
        return lambda source: Applied(Sample, (source, sampler))
    return applied(SampleEvery, period_ns("sample", sampler), offset_ns("sample", offset, aligned=aligned))


class Delay(Operator[Any, Any]):
    """The timer fires for the first value in the queue, or for the completion."""

    __slots__ = ("_delay_ns", "_end_ns", "_waiting")
    NAME = "delay"
    SAVED = "_end_ns"

    def __init__(self, delay_ns: int) -> None:
        self._delay_ns: Final = delay_ns
        self._end_ns: int | None = None
        self._waiting: PersistedQueue[tuple[int, Any]]

    def on_open(self) -> None:
        """The queue has values with their due times."""
        self._waiting = self.objects.queue("waiting")

    def on_next(self, value: Any, /) -> None:
        due_ns = self.now_ns + self._delay_ns
        self._waiting.enqueue((due_ns, value))
        if not self.has_timer():
            self.set_timer(due_ns)

    def on_completed(self) -> None:
        self._end_ns = self.now_ns + self._delay_ns
        self.changed()
        if not self.has_timer():
            self.set_timer(self._end_ns)

    def on_timer(self, key: str, /) -> None:
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


class Pending(UserFunctionOperator[Any, Any]):
    """An operator that keeps one value back. `_kept` holds it, or nothing."""

    __slots__ = ("_kept",)
    SAVED: ClassVar[str | tuple[str, ...] | None] = "_kept"

    def __init__(self) -> None:
        self._kept: list[Any] = []

    def keep(self, value: Any) -> None:
        self._kept = [storable(value)]
        self.changed()

    def send(self) -> None:
        if self._kept:
            (value,), self._kept = self._kept, []
            self.changed()
            self.emit(value)

    def on_completed(self) -> None:
        self.send()
        self.complete()


class Debounce(Pending):
    __slots__ = ("_delay_ns",)
    NAME = "debounce"

    def __init__(self, delay_ns: int) -> None:
        super().__init__()
        self._delay_ns: Final = delay_ns

    def on_next(self, value: Any, /) -> None:
        self.keep(value)
        self.set_timer(self.now_ns + self._delay_ns)

    def on_timer(self, key: str, /) -> None:
        self.send()


class Throttle(Pending):
    __slots__ = ("_mapper",)
    NAME = "throttle_with_mapper"

    def __init__(self, mapper: Callable[[Any], Observable[Any]]) -> None:
        super().__init__()
        self._mapper: Final = mapper

    def on_next(self, value: Any, /) -> None:
        storable(value)
        before = self.child_keys()
        if self.call(self.open_child, str(self._children_made), value) is not FAILED:
            for key in before:
                self.close_child(key)
            self.keep(value)

    def child(self, key: str, seed: Any, /) -> Observable[Any]:
        return self._mapper(seed)

    def on_inner_next(self, key: str, value: Any, /) -> None:
        self.close_child(key)
        self.send()

    def on_inner_completed(self, key: str, /) -> None:
        self.send()


class ThrottleFirst(Operator[Any, Any]):
    __slots__ = ("_last_ns", "_window_ns")
    NAME = "throttle_first"
    SAVED = "_last_ns"

    def __init__(self, window_ns: int) -> None:
        self._window_ns: Final = window_ns
        self._last_ns: int | None = None

    def on_next(self, value: Any, /) -> None:
        now_ns = self.now_ns
        if self._last_ns is None or now_ns - self._last_ns >= self._window_ns:
            self._last_ns = now_ns
            self.changed()
            self.emit(value)


class Sample(Pending):
    __slots__ = ()
    NAME = "sample"

    def on_inner_next(self, key: str, value: Any, /) -> None:
        if key == "0":
            self.keep(value)
            return
        self.send()
        if self.has_input_ended(0):
            self.complete()

    def on_inner_completed(self, key: str, /) -> None:
        if key == "1":
            self.send()
        if not self.has_open_input():
            self.complete()


class SampleEvery(Pending):
    """The timer is set only while there is a new value, or the source has completed.

    Other ticks do nothing.
    """

    __slots__ = ("_every_ns", "_is_last", "_offset_ns", "_start_ns")
    NAME = "sample_every"
    SAVED = ("_kept", "_start_ns", "_is_last")

    def __init__(self, every_ns: int, offset_ns: int | None) -> None:
        super().__init__()
        self._every_ns: Final = every_ns
        self._offset_ns: Final = offset_ns
        self._start_ns = 0
        self._is_last = False

    def on_start(self) -> None:
        self._start_ns = last_tick_ns(self.now_ns, self._every_ns, self._offset_ns)

    def on_next(self, value: Any, /) -> None:
        self.keep(value)
        self._await_tick()

    def on_timer(self, key: str, /) -> None:
        self.send()
        if self._is_last:
            self.complete()

    def on_completed(self) -> None:
        self._is_last = True
        self.changed()
        self._await_tick()

    def _await_tick(self) -> None:
        if not self.has_timer():
            self.set_timer(last_tick_ns(self.now_ns, self._every_ns, self._start_ns) + self._every_ns)
