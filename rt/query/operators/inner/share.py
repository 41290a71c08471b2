"""An operator that lets several parts of a query use one subscription to its source."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from rt.errors import InvalidOption
from rt.query.core.observable import Observable, Transform, applied
from rt.query.core.operator import Operator
from rt.query.core.subject import Subject

Mapper = Callable[[Observable[Any]], Observable[Any]]
ONLY: Final = "0"


def share(mapper: Mapper | None = None) -> Transform:
    """The values of `mapper(shared)`, where `shared` can be used several times: the source runs once.

    `shared` must be subscribed to at the start, not for a later value. If all its subscriptions have ended,
    so does the source. `mapper` is called again after a crash, and must return the same. Without it `share`
    is refused (`InvalidOption`): a query has no connections outside that could come later. Saves whether each
    part has ended.
    """
    if mapper is None:
        raise InvalidOption(
            "share needs a mapper: share(lambda shared: merge(shared.pipe(…), shared.pipe(…))). "
            "To share work between queries, see docs/queries.md"
        )
    return applied(Share, mapper)


class Share(Operator[Any, Any]):
    __slots__ = ("_is_open", "_mapper", "_shared")
    NAME = "share"

    def __init__(self, mapper: Mapper) -> None:
        self._mapper: Final = mapper
        self._is_open = False
        self._shared: Subject

    def on_open(self) -> None:
        self._is_open = True
        self._shared = self.make_inner("shared")
        self._shared.on_idle = self._leave_source

    def on_start(self) -> None:
        with self._shared.handed_out():
            self.open_child(ONLY)

    def child(self, key: str, seed: Any, /) -> Observable[Any]:
        made = self._mapper(self._shared)
        if not isinstance(made, Observable):
            raise TypeError(f"share: the mapper must return an observable, got {made!r}")
        return made

    def on_next(self, value: Any, /) -> None:
        self._shared.on_next(value)

    def on_error(self, error: Exception, /) -> None:
        self._shared.on_error(error)

    def on_completed(self) -> None:
        self._shared.on_completed()

    def on_inner_next(self, key: str, value: Any, /) -> None:
        self.emit(value)

    def on_inner_completed(self, key: str, /) -> None:
        self.complete()

    def on_dispose(self) -> None:
        """This is also called after a load that failed before `on_open`."""
        if self._is_open:
            self._shared.drop()

    def _leave_source(self) -> None:
        for source in self._inputs:
            source.leave()
