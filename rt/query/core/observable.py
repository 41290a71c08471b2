"""Descriptions of queries, the protocol of observers, and the observers between two operators.

An `Observable` is a description: nothing runs until an operator group builds it, any number of times. Values
inside a query have no ids; input edges remove them, output edges assign new ones.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, Generic, Protocol, TypeAlias, TypeVar

if TYPE_CHECKING:
    from rt.query.core.operator import Operator
    from rt.query.core.operator_group import OperatorGroup

T_contra = TypeVar("T_contra", contravariant=True)
T_co = TypeVar("T_co", covariant=True)


class Observer(Protocol[T_contra]):
    """Receives values, then at most one error or completion, and nothing after it."""

    def on_next(self, value: T_contra, /) -> None: ...

    def on_error(self, error: Exception, /) -> None:
        """The source failed. No further calls."""

    def on_completed(self) -> None:
        """The source completed. No further calls."""


class Observable(ABC, Generic[T_co]):
    @abstractmethod
    def build(self, group: OperatorGroup, out: Observer[Any]) -> Operator[Any, Any]:
        """Make the operators in `group` that will send to `out`. Returns the last one. Starts nothing.

        Must make the same operators in the same order in every run: saved state is matched to them by
        position.
        """

    def pipe(self, *transforms: Transform) -> Observable[Any]:
        """Apply operators from left to right."""
        return pipe(self, *transforms)


Transform: TypeAlias = Callable[[Observable[Any]], Observable[Any]]
"""The result of `where(…)` and other operators: a function that adds an operator after an observable."""


def pipe(source: Observable[Any], *transforms: Transform) -> Observable[Any]:
    """Apply operators to `source` from left to right."""
    for transform in transforms:
        source = transform(source)
    return source


class Applied(Observable[Any]):
    """An operator after its sources. Every build calls `make` for a new operator.

    With one source the operator is the observer. With several, source i calls `on_inner_next(str(i), value)`
    etc.
    """

    def __init__(self, make: Callable[[], Operator[Any, Any]], sources: Sequence[Observable[Any]]) -> None:
        self._make = make
        self._sources = tuple(sources)

    def build(self, group: OperatorGroup, out: Observer[Any]) -> Operator[Any, Any]:
        """Builds the operator first, then its sources from left to right."""
        operator = self._make()
        operator.bind(group, out)
        is_only = len(self._sources) == 1
        for index, source in enumerate(self._sources):
            operator.add_input(source.build(group, operator if is_only else operator.inlet(str(index))))
        return operator


def applied(kind: Callable[..., Operator[Any, Any]], *arguments: Any) -> Transform:
    """A transform that adds the operator `kind(*arguments)` after an observable."""
    return lambda source: Applied(lambda: kind(*arguments), (source,))


class Watched:
    """Takes the place of an observer, `out`, and passes everything on to it."""

    def __init__(self, out: Observer[Any]) -> None:
        self.out: Final = out

    def on_next(self, value: Any, /) -> None:
        self.out.on_next(value)

    def on_error(self, error: Exception, /) -> None:
        self.out.on_error(error)

    def on_completed(self) -> None:
        self.out.on_completed()


class Inlet:
    """Receives the values and the end of one of several sources, or of an inner subscription."""

    __slots__ = ("_key", "operator")

    def __init__(self, operator: Operator[Any, Any], key: str) -> None:
        self.operator = operator
        self._key = key

    def on_next(self, value: Any, /) -> None:
        if not self.operator.is_disposed:
            self.operator.on_inner_next(self._key, value)

    def on_error(self, error: Exception, /) -> None:
        self.operator.close_child(self._key)
        if not self.operator.is_disposed:
            self.operator.on_inner_error(self._key, error)

    def on_completed(self) -> None:
        self.operator.close_child(self._key)
        if not self.operator.is_disposed:
            self.operator.on_inner_completed(self._key)
