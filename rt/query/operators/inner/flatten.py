"""Operators that subscribe to an observable for every value. Each is saved as its own row, with the value.

The function that makes the observable is called again after a crash, and must return the same. Windows and
groups can be values. Other observables cannot, because they cannot be saved.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from rt.objects import NotSerializable, PersistedQueue
from rt.query.core.observable import Observable, Transform, applied
from rt.query.core.subject import Subject
from rt.query.operators.user_functions import FAILED, UserFunctionOperator, check_least

Mapper = Callable[..., Observable[Any]]


def flat_map(mapper: Mapper, *, max_concurrent: int | None = None) -> Transform:
    """The values of `mapper(value)`, for every value. Ends when all have ended.

    With `max_concurrent`, values wait until fewer are open; they cannot be windows or groups. Saves the
    values that are open or wait, the latter in the object space.
    """
    return _flat_map("flat_map", mapper, max_concurrent)


def flat_map_indexed(mapper: Mapper, *, max_concurrent: int | None = None) -> Transform:
    """As `flat_map`, with `mapper(value, index)`. Saves the same."""
    return _flat_map("flat_map_indexed", mapper, max_concurrent)


def concat_map(mapper: Mapper) -> Transform:
    """As `flat_map`, one after the other, in the order of the values. Saves the same."""
    return flat_map(mapper, max_concurrent=1)


def merge_all() -> Transform:
    """The values of all windows or groups, as `flat_map`. Saves which are open."""
    return flat_map(_identity)


def switch_map(mapper: Mapper) -> Transform:
    """The values of `mapper(value)`, until the next value. Ends with the last. Saves the last value.

    If `mapper` raises, and the error policy leaves the value out, the values of the one before continue.
    """
    return applied(SwitchMap, mapper, False)


def switch_map_indexed(mapper: Mapper) -> Transform:
    """As `switch_map`, with `mapper(value, index)`. Saves the same."""
    return applied(SwitchMap, mapper, True)


def switch_latest() -> Transform:
    """The values of each window or group, until the next one, as `switch_map`. Saves which is open."""
    return switch_map(_identity)


class SwitchMap(UserFunctionOperator[Any, Any]):
    __slots__ = ("_is_done", "_is_indexed", "_mapper")
    NAME = "switch_map"
    SAVED = "_is_done"

    def __init__(self, mapper: Mapper, is_indexed: bool) -> None:
        self._mapper: Final = mapper
        self._is_indexed: Final = is_indexed
        self._is_done = False

    def on_next(self, value: Any, /) -> None:
        before = self.child_keys()
        if self.subscribe(value):
            for key in before:
                self.close_child(key)

    def subscribe(self, value: Any) -> bool:
        """Subscribe to the observable of the value. False if the value is left out, or this operator
        failed.
        """
        if isinstance(value, Observable) and not isinstance(value, Subject):
            hint = "Emit plain values, and pass a mapper here that makes an observable of each."
            self.fail(
                NotSerializable("a value is an observable, which cannot be saved", got=value, hint=hint)
            )
            return False
        if self.call(self.open_child, str(self._children_made), value) is FAILED:
            self._children_made += 1  # The index of a value that is left out is not used again.
            self.changed()
            return False
        return True

    def can_skip(self) -> bool:
        """Always true: after a value that is left out, the operator subscribes to the next value, or ends."""
        return True

    def child(self, key: str, seed: Any, /) -> Observable[Any]:
        """`TypeError` if the mapper does not return an observable."""
        made = self._mapper(seed, int(key)) if self._is_indexed else self._mapper(seed)
        if not isinstance(made, Observable):
            raise TypeError(f"{self.NAME}: the mapper must return an observable, got {made!r}")
        return made

    def on_inner_next(self, key: str, value: Any, /) -> None:
        self.emit(value)

    def on_inner_completed(self, key: str, /) -> None:
        self.end()

    def on_completed(self) -> None:
        self._is_done = True
        self.changed()
        self.end()

    def end(self) -> None:
        """Complete if no more values can arrive."""
        if self._is_done and not self._children:
            self.complete()


class FlatMap(SwitchMap):
    __slots__ = ("_open_max", "_waiting")
    NAME = "flat_map"

    def __init__(self, mapper: Mapper, is_indexed: bool, open_max: int | None) -> None:
        super().__init__(mapper, is_indexed)
        self._open_max: Final = open_max
        self._waiting: PersistedQueue[Any] | None = None

    def on_open(self) -> None:
        if self._open_max is not None:
            self._waiting = self.objects.queue("waiting")

    def on_next(self, value: Any, /) -> None:
        if self._waiting is not None and len(self.child_keys()) == self._open_max:
            self._waiting.enqueue(value)
        else:
            self.subscribe(value)

    def on_inner_completed(self, key: str, /) -> None:
        while self._waiting and not self.is_disposed:
            if self.subscribe(self._waiting.dequeue()):
                return
        super().on_inner_completed(key)


def _flat_map(name: str, mapper: Mapper, max_concurrent: int | None) -> Transform:
    if max_concurrent is not None:
        check_least(name, "max_concurrent", max_concurrent, 1)
    return applied(FlatMap, mapper, name == "flat_map_indexed", max_concurrent)


def _identity(value: Any) -> Any:
    return value
