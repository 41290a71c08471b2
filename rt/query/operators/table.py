"""The table of all operators, made from their docstrings. `docs/operators.md` is `markdown()`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from rt.query import operators
from rt.query.operators import creation

_TITLES: Final = {
    "generators": "Observables to start with (`rt.query.operators.creation`)",
    "filter": "Filtering",
    "take_skip": "Take and skip",
    "transform": "Transforming and adding values",
    "side_effects": "Side effects",
    "aggregate": "Aggregates",
    "element": "One value",
    "conditional": "Conditions",
    "buffers": "Buffers",
    "windows": "Windows",
    "group_by": "Groups",
    "flatten": "Flattening: an observable for every value",
    "combine": "Combining sources",
    "concat": "Sources one after the other",
    "timed": "Time",
}

_INTRODUCTION: Final = """\
# Operators of queries

`from rt.query import operators as ops`. Pass operators to `pipe`. This page is made from their docstrings
(`pytest --rewrite tests/query/test_operator_table.py`). "Saves" is the state in a checkpoint. State "in the
object space" costs a checkpoint only what changed. An ended operator saves only that it ended. Functions are
Python functions, and are not saved.

The `…_async` operators of other libraries are `first`, `last` and `single`: nothing blocks here.
`to_subscribable` is `Source`.

Differences from RxPY 4:

- A missing value, or one too many, is `rt.query.WrongCount`.
- An exception of a user's function ends the operator, except in `finally_action`.
- `skip_until` ends with its source, even if no value passed. `sample` ends if its sampler ended.
- The handler of `catch` gets a `Failure` (what is stored of an error), and not the source.
- Windows and groups must be subscribed to immediately.
- Lists of `buffer_with_time`, ticks of `timer` and windows of `window_with_time` that were missed while the
  engine did not run are emitted once.
"""


@dataclass(frozen=True, slots=True)
class Row:
    """One operator. `also`: its other names. `module`: its module in `rt.query.operators`."""

    name: str
    also: tuple[str, ...]
    emits: str
    saves: str
    module: str

    @property
    def keeps_objects(self) -> bool:
        """Whether its state is in the object space."""
        return "object space" in self.saves


def rows() -> Iterator[Row]:
    """All operators by module, in the order of the source."""
    names: dict[Callable[..., Any], list[str]] = {}
    for package in (operators, creation):
        for name in package.__all__:
            found = getattr(package, name)
            if inspect.isfunction(found) and found.__module__.startswith(f"{operators.__name__}."):
                names.setdefault(found, []).append(name)
    places = list(_TITLES)
    for function in sorted(names, key=lambda each: (_place(each, places), each.__code__.co_firstlineno)):
        module = function.__module__.rpartition(".")[2]
        if module in _TITLES:
            emits, _, saves = _text(function).rpartition("Saves ")
            also = tuple(sorted(set(names[function]) - {function.__name__}))
            yield Row(function.__name__, also, emits.strip(), saves.rstrip("."), module)


def markdown() -> str:
    text, module = _INTRODUCTION, ""
    for row in rows():
        if row.module != module:
            module = row.module
            text += f"\n## {_TITLES[module]}\n\nIn `rt/query/operators/{module}.py`.\n"
            text += "\n| operator | emits | saves |\n|---|---|---|\n"
        also = f" (also {', '.join(f'`{each}`' for each in row.also)})" if row.also else ""
        text += f"| `{row.name}`{also} | {row.emits} | {row.saves} |\n"
    return text


def _place(function: Callable[..., Any], places: list[str]) -> int:
    module = function.__module__.rpartition(".")[2]
    return places.index(module) if module in places else len(places)


def _text(function: Callable[..., Any]) -> str:
    return " ".join((inspect.getdoc(function) or "").split())
