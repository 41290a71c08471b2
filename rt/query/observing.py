"""Descriptions of queries, and who observes what they make.

An `Observable` is a description: nothing runs until an artifact builds it, and it can be built any number of
times. Inside a query values carry no ids: those end at the input edge and begin again at the output edge.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeAlias, TypeVar

if TYPE_CHECKING:
    from rt.query.artifact import Artifact
    from rt.query.operator import Operator

T_contra = TypeVar("T_contra", contravariant=True)
T_co = TypeVar("T_co", covariant=True)


class Observer(Protocol[T_contra]):
    """Takes values, then at most one error or completion, and nothing behind that."""

    def on_next(self, value: T_contra, /) -> None:
        """A value."""

    def on_error(self, error: Exception, /) -> None:
        """No more: what was before failed."""

    def on_completed(self) -> None:
        """No more."""


class Observable(ABC, Generic[T_co]):
    """What a query is made of."""

    @abstractmethod
    def build(self, artifact: Artifact, out: Observer[Any]) -> Operator[Any, Any]:
        """Make the operators, in `artifact`, that will send to `out`; the last of them. Starts nothing.

        The same description makes the same operators in the same order, in every run of the program: saved
        state is given back to them by their place.
        """

    def pipe(self, *transforms: Transform) -> Observable[Any]:
        """This, with operators applied from left to right."""
        return pipe(self, *transforms)


Transform: TypeAlias = Callable[[Observable[Any]], Observable[Any]]
"""What `where(…)` and the others return: puts an operator behind an observable."""


def pipe(source: Observable[Any], *transforms: Transform) -> Observable[Any]:
    """`source` with operators applied from left to right."""
    for transform in transforms:
        source = transform(source)
    return source


class Applied(Observable[Any]):
    """An operator behind its sources: `make` makes it, anew for every build.

    With one source the operator itself is the observer. With several, what comes from source i arrives as
    `on_inner_next(str(i), value)`, and so on.
    """

    def __init__(self, make: Callable[[], Operator[Any, Any]], sources: Sequence[Observable[Any]]) -> None:
        self._make = make
        self._sources = tuple(sources)

    def build(self, artifact: Artifact, out: Observer[Any]) -> Operator[Any, Any]:
        """The operator first, then its sources, from left to right."""
        operator = self._make()
        operator.bind(artifact, out)
        is_only = len(self._sources) == 1
        for index, source in enumerate(self._sources):
            operator.add_input(source.build(artifact, operator if is_only else operator.inlet(str(index))))
        return operator


def applied(kind: Callable[..., Operator[Any, Any]], *arguments: Any) -> Transform:
    """The transform that puts `kind(*arguments)` behind an observable."""
    return lambda source: Applied(lambda: kind(*arguments), (source,))
