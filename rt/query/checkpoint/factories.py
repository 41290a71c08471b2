"""How a query is stored so that it can be built again: the name of a factory, and JSON arguments.

    query/definition    <name>    {"factory": …, "arguments": {…}, "on_error": null or an error policy}
    query/query         <id>      the same, and "sink", "order", "after", "begun_ns" …: see `StoredQuery`

Code is never stored. A program must register the same factories under the same names before it recovers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any, Final, Self, TypeVar

from msgspec import Struct, field

from rt.names import check_name
from rt.query.checkpoint.error_policy import ErrorPolicy
from rt.query.core.errors import NoSuchQuery, QueryExists
from rt.query.core.observable import Observable
from rt.query.core.row_json import decode, encode, plain

Factory = Callable[..., Observable[Any]]
F = TypeVar("F", bound=Factory)

DEFINITIONS: Final = "query/definition"
QUERIES: Final = "query/query"
RECIPE: Final = ("factory", "arguments", "on_error")


class Factories:
    """Functions that make queries, by their stored names."""

    def __init__(self) -> None:
        self._by_name: dict[str, Factory] = {}

    def add(self, name: str, factory: Factory) -> None:
        """Register a factory. The same arguments must make the same query in every run.

        Raises `QueryExists` if the name is registered.
        """
        check_name(name, kind="factory")
        if name in self._by_name:
            raise QueryExists("a factory has this name", got=repr(name))
        self._by_name[name] = factory

    def __call__(self, name: str) -> Callable[[F], F]:
        """Register with a decorator: `@factories("alert")`."""

        def register(factory: F) -> F:
            self.add(name, factory)
            return factory

        return register

    def __contains__(self, name: object) -> bool:
        return name in self._by_name

    def make(self, recipe: Recipe) -> Observable[Any]:
        """Make the query.

        `NoSuchQuery` if the factory is not registered; also raises what the factory raises.
        """
        if recipe.factory not in self._by_name:
            raise NoSuchQuery(
                "no factory has this name",
                got=repr(recipe.factory),
                hint="Register it with the engine's factories before the engine recovers.",
            )
        return self._by_name[recipe.factory](**deepcopy(dict(recipe.arguments)))


class Recipe(Struct, frozen=True):
    factory: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    on_error: ErrorPolicy | None = None
    """None: the default of the engine."""

    def row(self) -> dict[str, Any]:
        """Raises `NotSerializable` for arguments that JSON cannot restore unchanged."""
        on_error = None if self.on_error is None else self.on_error.row()
        return {"factory": self.factory, "arguments": plain(dict(self.arguments)), "on_error": on_error}

    def encode(self) -> bytes:
        return encode(self.row())

    @classmethod
    def decode(cls, data: bytes, where: str) -> Self:
        return cls.of(decode(data, where, *RECIPE), where)

    @classmethod
    def of(cls, row: Mapping[str, Any], where: str) -> Self:
        return cls(row["factory"], row["arguments"], ErrorPolicy.from_row(row["on_error"], where))


class StoredQuery(Struct):
    recipe: Recipe
    sink: str | None
    order: int
    """Queries are fed in the order in which they were started."""
    after: dict[str, int]
    """The watermarks of all sources when it was started: it receives later values."""
    started_ns: int
    """When it was started. Its clock is never earlier."""
    ended: str | None = None
    """None while it runs; "" if it completed, otherwise its error."""
    is_started: bool = True
    """False if it was logged but could not be built: it has no state."""
    counts: dict[str, int] = field(default_factory=dict)
    """By source, how many values it had sent in all when the query was started."""
    skipped: int = 0
    """Number of dead letters."""

    def encode(self) -> bytes:
        return encode(
            {
                **self.recipe.row(),
                "sink": self.sink,
                "order": self.order,
                "after": self.after,
                "begun_ns": self.started_ns,
                "ended": self.ended,
                "is_begun": self.is_started,
                "counts": self.counts,
                "skipped": self.skipped,
            }
        )

    @classmethod
    def decode(cls, data: bytes, where: str) -> Self:
        names = ("sink", "order", "after", "begun_ns", "ended", "is_begun", "counts", "skipped")
        found = decode(data, where, *RECIPE, *names)
        return cls(Recipe.of(found, where), *(found[name] for name in names))
