"""Decides which part of a query runs for each key, and which key a message has. Pure.

    Source ─ where, map ─ group_by(key) ─ where, map, flat_map(of a group) ─► results

Spark runs the query once for every key, on the messages of that key. The results are the same as in the
engine only if no operator outside of the groups keeps state from one key to another. So such operators are
refused, and the error names them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

from msgspec import Struct

from rt.objects.core.typed_json import key_of
from rt.query.core.errors import InvalidKey, NoSuchQuery, NotOnSpark
from rt.query.core.observable import Observable, Observer
from rt.query.core.operator import Operator
from rt.query.core.operator_group import OperatorGroup
from rt.query.core.runtime import QueryRuntime
from rt.query.core.scheduler import VirtualScheduler
from rt.query.core.source import SourceTap, ValueFeed
from rt.query.core.subject import Subject
from rt.query.operators.elements.filter import Where
from rt.query.operators.elements.map_async import MapAsync
from rt.query.operators.elements.transform import Map
from rt.query.operators.event_time.event_windows import EventWindows
from rt.query.operators.inner.flatten import FlatMap
from rt.query.operators.inner.groups import GroupByUntil
from rt.query.operators.keyed import GroupBy, ScanBy

KEYED: Final = (GroupBy, GroupByUntil, ScanBy, EventWindows)
"""Operators whose state is separate for each key."""

STATELESS: Final = (Where, Map)
"""Includes `filter`, `select` and `starmap`, but not subclasses, because subclasses may have state."""


class KeyedPlan(Struct, frozen=True):
    """How a query is split by key. `steps`: the functions that run on a message before its key is known."""

    source: str
    steps: tuple[tuple[bool, Callable[[Any], Any]], ...]
    """Pairs: whether the function belongs to `where` (otherwise to `map`), and the function."""
    key_mapper: Callable[[Any], Any]

    def key_text(self, message: Any) -> str | None:
        """The key of a message as text; None if the query leaves the message out before it has a key.

        Raises the errors of the query's functions, and `InvalidKey`.
        """
        value = message
        for is_test, function in self.steps:
            made = function(value)
            if not is_test:
                value = made
            elif not made:
                return None
        key = self.key_mapper(value)
        try:
            hash(key)
        except TypeError as error:
            raise InvalidKey("the key of a value is not hashable", got=repr(key)[:200]) from error
        return text_of(key_of(key))


def text_of(key: Any) -> str:
    """A text that is equal for equal keys, as in a dictionary: 1, 1.0 and `True` are one key."""
    match key:
        case str():
            return f"str {key}"
        case bool() | int():
            return f"number {int(key)}"
        case float():
            return f"number {int(key) if math.isfinite(key) and key.is_integer() else key!r}"
        case tuple():
            return f"tuple {[text_of(each) for each in key]}"
        case frozenset():
            return f"frozenset {sorted(text_of(each) for each in key)}"
        case bytes() | None:
            return f"{type(key).__name__} {key!r}"
    raise InvalidKey(
        "a key of this type cannot be grouped on Spark",
        got=repr(key)[:200],
        expected="str, int, float, bool, bytes, None, or a tuple or frozenset of these",
    )


def keyed_plan(query: Observable[Any], late_outputs: Iterable[str] = ()) -> KeyedPlan:
    """The plan of a query. `NotOnSpark` if it cannot run there.

    `late_outputs`: the names that operators may use as `late`.
    """
    runtime = KeyRuntime(VirtualScheduler())
    runtime.outputs.update(dict.fromkeys(late_outputs, _Nothing()))
    group = OperatorGroup(runtime, "query")
    query.build(group, _Nothing())
    chain = list(_chain(group._operators[0]))
    tap, operators = chain[-1], chain[-2::-1]  # from the source to the result
    if not isinstance(tap, SourceTap):
        raise _refused(tap, "a query on Spark begins with a Source")
    place = next((i for i, each in enumerate(operators) if isinstance(each, KEYED)), None)
    before = operators if place is None else operators[:place]
    for each in before:
        if type(each) not in STATELESS:
            raise _refused(each, "it is before group_by, so it sees the values of all keys")
    if place is None:
        hint = "Group the values: group_by(key_mapper), then flat_map."
        raise NotOnSpark("the query has no key", expected="group_by", hint=hint)
    keyed: Any = operators[place]
    if keyed._key_mapper is None:
        raise _refused(keyed, "without key_mapper it is a window over the whole stream")
    for each in operators[place + 1 :]:
        if isinstance(each, FlatMap) and each._open_max is None and not each._is_indexed:
            _probe_groups(group, each)
        elif type(each) not in STATELESS:
            raise _refused(each, "it is after group_by, outside of the groups, so it sees all keys")
    return KeyedPlan(tap._name, tuple(map(_step, before)), keyed._key_mapper)


class KeyRuntime(QueryRuntime):
    """Runs a query for one key. `NotOnSpark` for an operator that cannot run on Spark, anywhere in the
    query.
    """

    def __init__(self, scheduler: VirtualScheduler) -> None:
        super().__init__(scheduler, watch=_check)

    def feed(self, name: str) -> ValueFeed:
        """The source of the query. A group that reads a source is refused by its tap."""
        return self.add_feed(name)


def _check(operator: Operator[Any, Any], out: Observer[Any]) -> Observer[Any]:
    if isinstance(operator, MapAsync):
        hint = "Use the engine, or call the service in mapInPandas before."
        raise _refused(operator, "its calls end between two events, when no operator runs there", hint)
    if isinstance(operator, SourceTap) and operator._group.root is not operator._group:
        hint = "Run the query in the engine."
        raise _refused(operator, f"a group reads the source {operator._name!r}: a join across keys", hint)
    return out


def _step(operator: Any) -> tuple[bool, Callable[[Any], Any]]:
    is_test = type(operator) is Where
    return is_test, operator._predicate if is_test else operator._mapper


def _chain(operator: Operator[Any, Any]) -> Iterator[Operator[Any, Any]]:
    """The operator and its sources, from the result to the source.

    `NotOnSpark` if an operator has several sources.
    """
    while True:
        yield operator
        if len(operator._inputs) > 1:
            raise _refused(operator, "it has several sources, so it joins across keys")
        if not operator._inputs:
            return
        operator = operator._inputs[0]


def _probe_groups(group: OperatorGroup, operator: Operator[Any, Any]) -> None:
    """Make the operators of a group, to check them.

    A mapper may need a real key, or a plain value. Then the operators are checked when the group is opened.
    """
    subject = Subject(group.runtime, "query#probe", None)
    child = group.new_child(operator._index, "probe", None, 1)
    try:
        operator.child("0", subject).build(child, _Nothing())
    except (NotOnSpark, NoSuchQuery):
        raise
    except Exception:  # noqa: BLE001 - a user's function
        return


def _refused(operator: Operator[Any, Any], why: str, hint: str = "") -> NotOnSpark:
    return NotOnSpark(
        f"{operator.NAME} cannot run on Spark: {why}",
        hint=hint or "Put it inside of flat_map(lambda group: …), or run the query in the engine.",
    )


class _Nothing:
    """Receives nothing: no query runs."""

    def on_next(self, value: Any, /) -> None: ...

    def on_error(self, error: Exception, /) -> None: ...

    def on_completed(self) -> None: ...
