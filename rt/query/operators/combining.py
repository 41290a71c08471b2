"""Operators of several sources at once, which they subscribe to from left to right."""

from __future__ import annotations

from typing import Any, Final

from rt.objects import PersistedQueue
from rt.query.observing import Applied, Observable, Transform
from rt.query.operator import Operator
from rt.query.operators.asking import ABSENT, sources_of, storable


def merge(*sources: Observable[Any]) -> Transform:
    """The values of this and of all `sources` as they come; ends with the last of them. Saves nothing."""
    sources_of("merge", sources)
    return lambda source: Applied(Merge, (source, *sources))


def combine_latest(*sources: Observable[Any]) -> Transform:
    """At every value, the tuple of the last values of this and of all `sources`, once each has one.

    Ends when all have ended, or at a value that is alone when all others have. Saves the last values.
    """
    sources_of("combine_latest", sources)
    return lambda source: combined((source, *sources))


def with_latest_from(*sources: Observable[Any]) -> Transform:
    """At every value of this, the tuple of it and the last of all `sources`, once each has one.

    Ends with this. Saves the last values.
    """
    sources_of("with_latest_from", sources)
    return lambda source: Applied(lambda: WithLatestFrom(len(sources) + 1), (source, *sources))


def zip(*sources: Observable[Any]) -> Transform:
    """The tuples of the first values of this and of all `sources`, of the second ones, and so on.

    Ends when a source has ended whose values are all used. Saves the values that wait for those of others, as
    many as one source is ahead of another, in the object space.
    """
    sources_of("zip", sources)
    return lambda source: zipped((source, *sources))


def merged(sources: tuple[Observable[Any], ...]) -> Observable[Any]:
    """See `merge`."""
    return Applied(Merge, sources)


def combined(sources: tuple[Observable[Any], ...]) -> Observable[Any]:
    """See `combine_latest`."""
    return Applied(lambda: CombineLatest(len(sources)), sources)


def zipped(sources: tuple[Observable[Any], ...]) -> Observable[Any]:
    """See `zip`."""
    return Applied(lambda: Zip(len(sources)), sources)


class Several(Operator[Any, Any]):
    """An operator of one source or more: an only one arrives as the others do."""

    __slots__ = ()

    def on_next(self, value: Any, /) -> None:
        """Of the only source."""
        self.on_inner_next("0", value)

    def on_completed(self) -> None:
        """Of the only source."""
        self.on_inner_completed("0")


class Merge(Several):
    """See `merge`."""

    __slots__ = ()

    NAME = "merge"

    def on_inner_next(self, key: str, value: Any, /) -> None:  # noqa: ARG002
        """Send it on."""
        self.emit(value)

    def on_inner_completed(self, key: str, /) -> None:  # noqa: ARG002
        """Perhaps the last one."""
        if not self.has_open_input():
            self.complete()


class CombineLatest(Several):
    """See `combine_latest`."""

    __slots__ = ("_latest", "_missing")

    NAME = "combine_latest"

    def __init__(self, count: int) -> None:
        self._latest: list[Any] = [ABSENT] * count
        self._missing = count

    def on_inner_next(self, key: str, value: Any, /) -> None:
        """Send it on, with the others' last."""
        mine = int(key)
        self.keep(mine, value)
        if not self._missing:
            self.emit(tuple(self._latest))
        elif all(self.has_input_ended(each) for each in range(len(self._latest)) if each != mine):
            self.complete()

    def on_inner_completed(self, key: str, /) -> None:  # noqa: ARG002
        """Perhaps of the last one."""
        if not self.has_open_input():
            self.complete()

    def keep(self, index: int, value: Any) -> None:
        """As the last value of a source."""
        if self._latest[index] is ABSENT:
            self._missing -= 1
        self._latest[index] = storable(value)
        self.changed()

    def save_state(self) -> list[list[Any]]:
        """The last values, each in a list; an empty one where none came."""
        return [[] if each is ABSENT else [each] for each in self._latest]

    def load_state(self, state: Any, version: int, /) -> None:  # noqa: ARG002
        """The same."""
        self._latest = [each[0] if each else ABSENT for each in state]
        self._missing = sum(not each for each in state)


class WithLatestFrom(CombineLatest):
    """See `with_latest_from`. The first value of its own is never kept."""

    __slots__ = ()

    NAME = "with_latest_from"

    def on_inner_next(self, key: str, value: Any, /) -> None:
        """Keep it, or send it on with the others' last."""
        if key != "0":
            self.keep(int(key), value)
        elif self._missing == 1:
            self.emit((value, *self._latest[1:]))

    def on_inner_completed(self, key: str, /) -> None:
        """The ends of the others mean nothing."""
        if key == "0":
            self.complete()


class Zip(Several):
    """See `zip`."""

    __slots__ = ("_count", "_waiting")

    NAME = "zip"

    def __init__(self, count: int) -> None:
        self._count: Final = count
        self._waiting: list[PersistedQueue[Any]]

    def on_open(self) -> None:
        """The queues."""
        self._waiting = [self.objects.queue(str(index)) for index in range(self._count)]

    def on_inner_next(self, key: str, value: Any, /) -> None:
        """Send it on, if it was the one that others waited for."""
        self._waiting[int(key)].enqueue(value)
        if not all(self._waiting):
            return
        self.emit(tuple([each.dequeue() for each in self._waiting]))
        if not self.is_disposed and any(map(self._is_used_up, range(self._count))):
            self.complete()

    def on_inner_completed(self, key: str, /) -> None:
        """Of no use without values."""
        if self._is_used_up(int(key)):
            self.complete()

    def _is_used_up(self, index: int) -> bool:
        return not self._waiting[index] and self.has_input_ended(index)
