"""Windows and lists whose bounds are the events of other observables.

Mappers are called again after a crash, and must return the same. A bound must not come at once: an observable
that ends immediately would create empty windows indefinitely.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from rt.objects import PersistedSortedSet
from rt.query.core.observable import Applied, Observable, Transform, applied
from rt.query.operators.elements.aggregate import to_list
from rt.query.operators.inner.flatten import flat_map
from rt.query.operators.user_functions import FAILED, compose, sources_of
from rt.query.operators.windows import SubjectOwner, Windows

Opening = Callable[[Any], Observable[Any]]
Closing = Callable[[], Observable[Any]]

SOURCE: Final = "0"
OPENINGS: Final = "1"


def window_when(closing_mapper: Closing) -> Transform:
    """Windows, one after the other: each until the observable of `closing_mapper()` emits or ends.

    Saves the number of windows.
    """
    return applied(WindowWhen, closing_mapper)


def window_toggle(openings: Observable[Any], closing_mapper: Opening) -> Transform:
    """A window for every value of `openings`, until `closing_mapper(value)` emits or ends.

    Ends with the source, or when `openings` has ended and no window is open. Saves which windows are open, in
    the object space.
    """
    sources_of("window_toggle", (openings,))
    return lambda source: Applied(lambda: WindowToggle(closing_mapper), (source, openings))


def buffer_when(closing_mapper: Closing) -> Transform:
    """The lists of the values of `window_when`. Saves them, as `to_list`."""
    return compose(window_when(closing_mapper), flat_map(_listed))


def buffer_toggle(openings: Observable[Any], closing_mapper: Opening) -> Transform:
    """The lists of the values of `window_toggle`. Saves them, as `to_list`."""
    return compose(window_toggle(openings, closing_mapper), flat_map(_listed))


class WindowWhen(Windows):
    """The inner subscription is the end of the window with the same name."""

    __slots__ = ("_closing_mapper",)
    NAME = "window_when"
    SAVED = ()

    def __init__(self, closing_mapper: Closing) -> None:
        super().__init__()
        self._closing_mapper: Final = closing_mapper

    def on_timer(self, key: str, /) -> None:
        """At the start, open the first window."""
        self._open_next()

    def child(self, key: str, seed: Any, /) -> Observable[Any]:
        return _observable(self.NAME, self._closing_mapper())

    def on_inner_next(self, key: str, value: Any, /) -> None:
        self.close_child(key)
        self.on_inner_completed(key)

    def on_inner_completed(self, key: str, /) -> None:
        self.close_oldest()
        if self._is_unsubscribed:
            self._end_if_idle()
        elif not self.is_disposed:
            self._open_next()

    def _open_next(self) -> None:
        self.open_window()
        if self.is_disposed or str(self._made) not in self._subjects:
            return
        try:
            self.open_child(str(self._made))
        except Exception as error:  # noqa: BLE001 - a user's function
            self.fail(error)  # No value can be left out, and a window without an end would grow.


class WindowToggle(SubjectOwner):
    """A window is named by a number. The inner subscription "w<number>" is its end."""

    __slots__ = ("_closing_mapper", "_open")
    NAME = "window_toggle"

    def __init__(self, closing_mapper: Opening) -> None:
        super().__init__()
        self._closing_mapper: Final = closing_mapper
        self._open: PersistedSortedSet[int]

    def on_open(self) -> None:
        self._open = self.objects.sorted_set("open", of=int)

    def child(self, key: str, seed: Any, /) -> Observable[Any]:
        return _observable(self.NAME, self._closing_mapper(seed))

    def on_inner_next(self, key: str, value: Any, /) -> None:
        match key:
            case "0":
                for inner in list(self._subjects.values()):
                    inner.on_next(value)
            case "1":
                self._open_window(value)
            case _:
                self.close_child(key)
                self._close_window(key)

    def on_inner_completed(self, key: str, /) -> None:
        if key == SOURCE or (key == OPENINGS and not self._subjects):
            self.complete()
        elif key != OPENINGS:
            self._close_window(key)

    def save_state(self) -> bool:
        return self._is_unsubscribed

    def load_state(self, state: Any, version: int, /) -> None:
        self._is_unsubscribed = state
        for number in self._open:
            self.reopen_inner(str(number))

    def _open_window(self, value: Any) -> None:
        if self._is_unsubscribed:
            return
        number = self._children_made
        if self.call(self.open_child, f"w{number}", value) is not FAILED:
            self._open.add(number)
            self.open_inner(str(number))

    def _close_window(self, key: str) -> None:
        number = int(key[1:])
        self._open.remove(number)
        self._subjects.pop(str(number)).on_completed()
        if self.has_input_ended(1) and not self._subjects:
            self.complete()
        self._end_if_idle()


def _listed(window: Observable[Any]) -> Observable[Any]:
    return window.pipe(to_list())


def _observable(name: str, made: Any) -> Observable[Any]:
    if not isinstance(made, Observable):
        raise TypeError(f"{name}: the mapper must return an observable, got {made!r}")
    return made
