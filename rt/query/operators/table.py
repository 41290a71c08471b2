"""The table of all operators, made of what each says of itself: `docs/operators.md` is `markdown()`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from rt.query import creation, operators

_TITLES: Final = {
    "creating": "Observables to begin with (`rt.query.creation`)",
    "filtering": "Which values pass",
    "taking": "The first values",
    "skipping": "All but the first values",
    "mapping": "Something for every value, or besides them",
    "watching": "Functions that see what goes by",
    "folding": "Sums",
    "picking": "One of the values",
    "judging": "Yes or no",
    "collecting": "All values at once",
    "buffers": "Lists of values",
    "windows": "Windows",
    "grouping": "Groups",
    "flattening": "An observable for every value",
    "combining": "Several sources at once",
    "chaining": "One source behind the other",
    "timing": "Time",
}

_INTRODUCTION: Final = """\
# Operators of queries

`from rt.query import operators as ops`: each is given to `pipe`, and described by its docstring, from which
this page is made (`pytest --rewrite tests/query/test_operator_table.py`). Saved state is what a checkpoint
holds of an operator; what lies "in the object space" costs a checkpoint only what changed of it. An operator
that has ended saves only that. Functions are given as Python functions and are no part of what is saved.

The `…_async` names of other libraries are `first`, `last` and `single`: here nothing blocks.
`to_subscribable` is `Source`, of a feed of the engine.

What differs from RxPY 4: errors are `rt.query.WrongCount` where a value is missing or one too many, and the
error of a user's function ends the operator everywhere, but in `finally_action`. `skip_until` ends with its
source even if nothing opened it, and `sample` if its sampler has ended. `catch` tells its handler a
`Failure`, what can be kept of an error, and not the source. Windows and groups must be subscribed to when
they are handed out. Lists of `buffer_with_time`, ticks of `timer` and windows of `window_with_time` that
were missed while nothing ran come once, not as often as they were missed.
"""


@dataclass(frozen=True, slots=True)
class Row:
    """One operator. `also` are its other names; `module` is below `rt.query.operators`."""

    name: str
    also: tuple[str, ...]
    emits: str
    saves: str
    module: str

    @property
    def keeps_objects(self) -> bool:
        """Whether it has large state."""
        return "object space" in self.saves


def rows() -> Iterator[Row]:
    """All operators, by module; within one, as they stand there."""
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
    """The page of the documentation."""
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
