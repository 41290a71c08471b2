"""The table of all operators, made from their docstrings. `docs/operators.md` is `markdown()`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rt.query import operators
from rt.query.operators import creation

_ROOT: Final = Path(operators.__path__[0])
_PATHS: Final = {
    path.stem: f"rt/query/operators/{path.relative_to(_ROOT).as_posix()}" for path in _ROOT.rglob("*.py")
}
"""The path of each module below `rt.query.operators`, by its name, which is unique."""

_TITLES: Final = {
    "creation": "Observables to start with (`rt.query.operators.creation`)",
    "filter": "Filtering, and one value",
    "take_skip": "Take and skip",
    "tail": "The last values",
    "transform": "Transforming and adding values",
    "map_async": "Functions that wait",
    "side_effects": "Side effects",
    "aggregate": "Aggregates",
    "collect": "Collections",
    "notifications": "Events and times as values",
    "conditional": "Conditions",
    "buffers": "Buffers",
    "windows": "Windows",
    "keyed": "By key: groups and aggregates",
    "groups": "Groups that end",
    "toggles": "Windows and lists between events",
    "flatten": "Flattening: an observable for every value",
    "share": "One subscription for several parts",
    "combine": "Combining sources",
    "concat": "Sources one after the other",
    "joins": "Joins",
    "timed": "Time",
    "timeout": "Timeouts",
    "event_windows": "Windows of event time",
    "time_order": "Order by event time",
    "event_joins": "Joins in event time",
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
- The error policy of the query handles an exception of a user's function, except in `finally_action`. With
  `on_error="stop"` it ends the operator, as in RxPY.
- `skip_until` ends with its source, even if no value passed. `sample` ends if its sampler ended.
- The handler of `catch` gets a `Failure` (what is stored of an error), and not the source.
- Windows and groups must be subscribed to immediately.
- `group_join` emits groups, whose `key` is the value of the source, and not tuples.
- `window_toggle` and `buffer_toggle` end with their source. RxPY ignores its end.
- `share` takes a mapper, as `publish` of RxPY does. Without one it is refused: a query is one description,
  which has no later subscribers. Every query of an engine has its own operators.
- `materialize`, `timestamp` and `time_interval` emit tuples of plain values, which can be saved.
- `timeout` fails with `rt.Timeout`. `partition` returns a tuple, and each part has its own source.
- What RxPY collects without bound has a `limit` here: `to_list`, `to_dict`, `to_set`, `min_by`, `max_by`,
  `join`, `group_join`, `sequence_equal`.
- Windows and lists of a time start at round times, as in Flink, or with the query (`aligned=False`).
- Lists of `buffer_with_time`, ticks of `timer` and windows of `window_with_time` that were missed while the
  engine did not run are emitted once. A virtual clock that jumps over more than its `ticks_max` of them
  (`VirtualScheduler(ticks_max=100)`) emits the last ones.

`ttl` of operators with state for each key (seconds, or a timedelta): keys without values for that long are
forgotten, by the query's clock, and the same after a crash. A key lives for `ttl` to 1.07 `ttl` after its
last value, because time is divided into periods of a sixteenth of `ttl`. So one timer serves all keys, and a
key costs one row a period. `rt.query.KeyExpiry` does this for operators of your own.
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


def functions() -> dict[Callable[..., Any], list[str]]:
    """The public functions of the operators and of `creation`, with all their names."""
    names: dict[Callable[..., Any], list[str]] = {}
    found = [(name, vars(operators)[name]) for name in operators.__all__]
    found += [
        (name, each)
        for name, each in vars(creation).items()
        if getattr(each, "__module__", "") == creation.__name__
    ]
    for name, each in found:
        if inspect.isfunction(each):
            names.setdefault(each, []).append(name)
    return names


def rows() -> Iterator[Row]:
    """All operators by module, in the order of the source."""
    names, modules = functions(), list(_TITLES)

    def place(function: Callable[..., Any]) -> tuple[int, int]:
        return modules.index(_module(function)), function.__code__.co_firstlineno

    listed = [each for each in names if _module(each) in modules]
    for function in sorted(listed, key=place):
        emits, saved, saves = " ".join((inspect.getdoc(function) or "").split()).rpartition("Saves ")
        if saved:
            also = tuple(sorted(set(names[function]) - {function.__name__}))
            yield Row(function.__name__, also, emits.strip(), saves.rstrip("."), _module(function))


def markdown() -> str:
    text, module = _INTRODUCTION, ""
    for row in rows():
        if row.module != module:
            module = row.module
            text += f"\n## {_TITLES[module]}\n\nIn `{_PATHS[module]}`.\n"
            text += "\n| operator | emits | saves |\n|---|---|---|\n"
        also = f" (also {', '.join(f'`{each}`' for each in row.also)})" if row.also else ""
        text += f"| `{row.name}`{also} | {row.emits} | {row.saves} |\n"
    return text


def _module(function: Callable[..., Any]) -> str:
    return function.__module__.rpartition(".")[2]
