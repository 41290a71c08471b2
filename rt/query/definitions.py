"""What is stored of a query, so that it can be built again: the name of a factory, and JSON arguments.

    query/definition    <name>    {"factory": …, "arguments": {…}}
    query/query         <id>      the same, and "sink", "order", "after", "begun_ns" …: see `Standing`

Code is never stored: a program registers the same factories, under the same names, before it recovers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Self, TypeVar

from rt.names import check_name
from rt.objects import ANY, StateDamaged
from rt.query.errors import NoSuchQuery, QueryExists
from rt.query.observing import Observable
from rt.query.rows import encode, plain

Factory = Callable[..., Observable[Any]]
F = TypeVar("F", bound=Factory)


class Factories:
    """Functions that make queries, by the names they are stored under."""

    def __init__(self) -> None:
        self._by_name: dict[str, Factory] = {}

    def add(self, name: str, factory: Factory) -> None:
        """`QueryExists` if the name is taken. The same arguments make the same query, in every run."""
        check_name(name, kind="factory")
        if name in self._by_name:
            raise QueryExists("a factory of that name is registered", got=repr(name))
        self._by_name[name] = factory

    def __call__(self, name: str) -> Callable[[F], F]:
        """As a decorator: `@factories("alert")`."""

        def register(factory: F) -> F:
            self.add(name, factory)
            return factory

        return register

    def __contains__(self, name: object) -> bool:
        return name in self._by_name

    def make(self, recipe: Recipe) -> Observable[Any]:
        """The query; `NoSuchQuery` for a factory that is not registered; what the factory raises."""
        if recipe.factory not in self._by_name:
            raise NoSuchQuery(
                "no factory of that name",
                got=repr(recipe.factory),
                hint="Register it with the engine's factories before the engine recovers.",
            )
        return self._by_name[recipe.factory](**recipe.arguments)


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a query is made."""

    factory: str
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def encode(self) -> bytes:
        """As it is stored; `NotSerializable` for arguments that JSON cannot give back as they were."""
        return encode({"factory": self.factory, "arguments": plain(dict(self.arguments))})

    @classmethod
    def decode(cls, data: bytes, where: str) -> Self:
        """What was stored."""
        found = decode(data, where)
        try:
            return cls(found["factory"], found["arguments"])
        except KeyError as error:
            raise StateDamaged("a definition is damaged", where=where, got=str(error)) from error


@dataclass(slots=True)
class Standing:
    """A query of an engine."""

    recipe: Recipe
    sink: str | None
    order: int
    """Queries are fed in the order in which they were started."""
    after: dict[str, int]
    """The watermarks of all sources when it was started: it sees what lies behind."""
    begun_ns: int
    """When that was: its clock is never behind it."""
    ended: str | None = None
    """None while it runs; "" when it has completed, else its error."""
    is_begun: bool = True
    """False for one that was logged, and then could not be built: there is no state of it."""

    def encode(self) -> bytes:
        """As it is stored."""
        return encode(
            {
                "factory": self.recipe.factory,
                "arguments": plain(dict(self.recipe.arguments)),
                "sink": self.sink,
                "order": self.order,
                "after": self.after,
                "begun_ns": self.begun_ns,
                "ended": self.ended,
                "is_begun": self.is_begun,
            }
        )

    @classmethod
    def decode(cls, data: bytes, where: str) -> Self:
        """What was stored."""
        found = decode(data, where)
        try:
            recipe = Recipe(found["factory"], found["arguments"])
            names = ("sink", "order", "after", "begun_ns", "ended", "is_begun")
            return cls(recipe, *(found[name] for name in names))
        except KeyError as error:
            raise StateDamaged("a query's row is damaged", where=where, got=str(error)) from error


def decode(data: bytes, where: str) -> dict[str, Any]:
    """A row; `StateDamaged`."""
    found = ANY.load(data)
    if type(found) is not dict:
        raise StateDamaged("a row is damaged", where=where, got=repr(data[:60]))
    return found


DEFINITIONS: Final = "query/definition"
QUERIES: Final = "query/query"
