"""Operators with several sources, which they subscribe to from left to right."""

from __future__ import annotations

from typing import Any, Final

from rt.objects import PersistedQueue
from rt.query.core.observable import Applied, Observable, Transform
from rt.query.core.operator import Operator
from rt.query.operators.user_functions import sources_of, storable


def merge(*sources: Observable[Any]) -> Transform:
    """The values of the source and of all `sources`, as they arrive.

    Ends when all have ended. Saves nothing.
    """
    sources_of("merge", sources)
    return lambda source: Applied(Merge, (source, *sources))


def combine_latest(*sources: Observable[Any]) -> Transform:
    """At every value, a tuple of the last values of the source and of all `sources`, once each has a value.

    Ends when all sources have ended, or at a value if all others ended and one had no value. Saves the last
    values.
    """
    sources_of("combine_latest", sources)
    return lambda source: Applied(lambda: CombineLatest(len(sources) + 1), (source, *sources))


def with_latest_from(*sources: Observable[Any]) -> Transform:
    """At every value of the source, a tuple of it and the last values of all `sources`.

    Emits nothing until each has a value. Ends with the source. Saves the last values.
    """
    sources_of("with_latest_from", sources)
    return lambda source: Applied(lambda: WithLatestFrom(len(sources) + 1), (source, *sources))


def zip(*sources: Observable[Any]) -> Transform:
    """Tuples of the first values of the source and of all `sources`, then of the second values, and so on.

    Ends when a source has ended and its values are used. Saves the unused values, in the object space: their
    number is how far one source is ahead of another.
    """
    sources_of("zip", sources)
    return lambda source: Applied(lambda: Zip(len(sources) + 1), (source, *sources))


def amb(*sources: Observable[Any]) -> Transform:
    """The events of the source or of one of `sources`: of the first that sends a value, or ends.

    The others are disposed. Saves which source it is.
    """
    sources_of("amb", sources)
    return lambda source: Applied(Amb, (source, *sources))


class MultiSource(Operator[Any, Any]):
    """An operator with one or more sources. A single source is handled like several."""

    __slots__ = ()

    def on_next(self, value: Any, /) -> None:
        self.on_inner_next("0", value)

    def on_completed(self) -> None:
        self.on_inner_completed("0")

    def on_inner_completed(self, key: str, /) -> None:
        if not self.has_open_input():
            self.complete()


class Merge(MultiSource):
    __slots__ = ()
    NAME = "merge"

    def on_inner_next(self, key: str, value: Any, /) -> None:
        self.emit(value)


class CombineLatest(MultiSource):
    """`_latest` has a list for each source with its last value. The list is empty before the first value."""

    __slots__ = ("_latest",)
    NAME = "combine_latest"
    SAVED = "_latest"

    def __init__(self, count: int) -> None:
        self._latest: list[list[Any]] = [[] for _ in range(count)]

    def on_inner_next(self, key: str, value: Any, /) -> None:
        mine = int(key)
        self.keep(mine, value)
        if all(self._latest):
            self.emit(tuple([each for (each,) in self._latest]))
        elif all(self.has_input_ended(each) for each in range(len(self._latest)) if each != mine):
            self.complete()

    def keep(self, index: int, value: Any) -> None:
        self._latest[index] = [storable(value)]
        self.changed()


class WithLatestFrom(CombineLatest):
    """The value of the first source is never kept."""

    __slots__ = ()
    NAME = "with_latest_from"

    def on_inner_next(self, key: str, value: Any, /) -> None:
        if key != "0":
            self.keep(int(key), value)
        elif all(others := self._latest[1:]):
            self.emit((value, *(each for (each,) in others)))

    def on_inner_completed(self, key: str, /) -> None:
        if key == "0":
            self.complete()


class Zip(MultiSource):
    __slots__ = ("_count", "_waiting")
    NAME = "zip"

    def __init__(self, count: int) -> None:
        self._count: Final = count
        self._waiting: list[PersistedQueue[Any]]

    def on_open(self) -> None:
        self._waiting = [self.objects.queue(str(index)) for index in range(self._count)]

    def on_inner_next(self, key: str, value: Any, /) -> None:
        self._waiting[int(key)].enqueue(value)
        if not all(self._waiting):
            return
        self.emit(tuple([each.dequeue() for each in self._waiting]))
        if not self.is_disposed and any(map(self._is_used_up, range(self._count))):
            self.complete()

    def on_inner_completed(self, key: str, /) -> None:
        if self._is_used_up(int(key)):
            self.complete()

    def _is_used_up(self, index: int) -> bool:
        return not self._waiting[index] and self.has_input_ended(index)


class Amb(MultiSource):
    """`_first`: the index of the source that sent an event first."""

    __slots__ = ("_first",)
    NAME = "amb"
    SAVED = "_first"

    def __init__(self) -> None:
        self._first: int | None = None

    def on_inner_next(self, key: str, value: Any, /) -> None:
        if self._choose(int(key)):
            self.emit(value)

    def on_inner_completed(self, key: str, /) -> None:
        if self._choose(int(key)):
            self.complete()

    def on_inner_error(self, key: str, error: Exception, /) -> None:
        if self._choose(int(key)):
            self.fail(error)

    def _choose(self, index: int) -> bool:
        """Whether events of this source are sent. The first event disposes the other sources."""
        if self._first is None:
            self._first = index
            self.changed()
            for other, source in enumerate(self._inputs):
                if other != index:
                    source.leave()
        return self._first == index
