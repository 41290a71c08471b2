"""Operators that subscribe to an observable for every value: each is a row of its own, with that value.

The function that makes the observable of a value is called again after a crash, and must answer the same.
Windows and groups are values that may pass as they are; observables that were made elsewhere cannot be saved.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from rt.objects import NotSerializable, PersistedQueue
from rt.query.inner import Inner
from rt.query.observing import Observable, Transform, applied
from rt.query.operators.asking import Asking

Mapper = Callable[..., Observable[Any]]


def flat_map(mapper: Mapper, *, max_concurrent: int | None = None) -> Transform:
    """What comes out of `mapper(value)`, for all values; ends with the last of all.

    With `max_concurrent`, values wait until fewer than that are open: windows and groups cannot. Saves the
    values of those that are open or wait, the latter in the object space.
    """
    if max_concurrent is not None and max_concurrent < 1:
        raise ValueError(f"flat_map(max_concurrent={max_concurrent})")
    return applied(FlatMap, mapper, False, max_concurrent)


def flat_map_indexed(mapper: Mapper, *, max_concurrent: int | None = None) -> Transform:
    """As `flat_map`, with `mapper(value, index)`. Saves the same."""
    if max_concurrent is not None and max_concurrent < 1:
        raise ValueError(f"flat_map_indexed(max_concurrent={max_concurrent})")
    return applied(FlatMap, mapper, True, max_concurrent)


def concat_map(mapper: Mapper) -> Transform:
    """As `flat_map`, one after the other, in the order of the values. Saves the same."""
    return flat_map(mapper, max_concurrent=1)


def merge_all() -> Transform:
    """What comes out of all windows or groups. As `flat_map`. Saves which are open."""
    return flat_map(_itself)


def switch_map(mapper: Mapper) -> Transform:
    """What comes out of `mapper(value)`, until the next value; ends with the last. Saves the last value."""
    return applied(SwitchMap, mapper, False)


def switch_map_indexed(mapper: Mapper) -> Transform:
    """As `switch_map`, with `mapper(value, index)`. Saves the same."""
    return applied(SwitchMap, mapper, True)


def switch_latest() -> Transform:
    """What comes out of each window or group, until the next one. As `switch_map`. Saves which is open."""
    return switch_map(_itself)


class SwitchMap(Asking[Any, Any]):
    """See `switch_map`."""

    __slots__ = ("_is_done", "_is_indexed", "_mapper")

    NAME = "switch_map"

    def __init__(self, mapper: Mapper, is_indexed: bool) -> None:
        self._mapper: Final = mapper
        self._is_indexed: Final = is_indexed
        self._is_done = False

    def on_next(self, value: Any, /) -> None:
        """Close what is open."""
        for key in self.child_keys():
            self.close_child(key)
        self.subscribe(value)

    def subscribe(self, value: Any) -> None:
        """To what the mapper makes of the value."""
        if isinstance(value, Observable) and not isinstance(value, Inner):
            hint = (
                "Have select make values of them, and give the function that makes observables of these here."
            )
            self.fail(
                NotSerializable("an observable as a value, which cannot be stored", got=value, hint=hint)
            )
            return
        self.ask(self.open_child, str(self._children_made), value)

    def child(self, key: str, seed: Any, /) -> Observable[Any]:
        """What the mapper makes of it; `TypeError` if that is no observable."""
        made = self._mapper(seed, int(key)) if self._is_indexed else self._mapper(seed)
        if not isinstance(made, Observable):
            raise TypeError(f"the mapper of {self.NAME} made {made!r}, which is no observable")
        return made

    def on_inner_next(self, key: str, value: Any, /) -> None:  # noqa: ARG002
        """Send it on."""
        self.emit(value)

    def on_inner_completed(self, key: str, /) -> None:  # noqa: ARG002
        """Perhaps the last one."""
        self.end()

    def on_completed(self) -> None:
        """No more will be opened, but those that wait."""
        self._is_done = True
        self.changed()
        self.end()

    def end(self) -> None:
        """If nothing can come any more."""
        if self._is_done and not self.has_children():
            self.complete()

    def save_state(self) -> bool:
        """Whether the source has ended."""
        return self._is_done

    def load_state(self, state: Any, version: int, /) -> None:  # noqa: ARG002
        """The same."""
        self._is_done = state


class FlatMap(SwitchMap):
    """See `flat_map`."""

    __slots__ = ("_open_max", "_waiting")

    NAME = "flat_map"

    def __init__(self, mapper: Mapper, is_indexed: bool, open_max: int | None) -> None:
        super().__init__(mapper, is_indexed)
        self._open_max: Final = open_max
        self._waiting: PersistedQueue[Any] | None = None

    def on_open(self) -> None:
        """The queue."""
        if self._open_max is not None:
            self._waiting = self.objects.queue("waiting")

    def on_next(self, value: Any, /) -> None:
        """Open it, or let it wait."""
        if self._waiting is not None and len(self.child_keys()) == self._open_max:
            self._waiting.enqueue(value)
        else:
            self.subscribe(value)

    def on_inner_completed(self, key: str, /) -> None:
        """The next one's turn."""
        if self._waiting:
            self.subscribe(self._waiting.dequeue())
        else:
            super().on_inner_completed(key)


def _itself(value: Any) -> Any:
    return value
