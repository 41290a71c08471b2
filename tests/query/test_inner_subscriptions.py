"""Inner subscriptions to sources, windows and groups, with saves and crashes at every event."""

from __future__ import annotations

from typing import Any

import pytest

from rt.objects import StateDamaged
from rt.query.core.errors import LateSubscription, StateMismatch
from rt.query.core.observable import Applied, Observable, applied
from rt.query.core.operator import Operator
from rt.query.core.operator_group import OperatorGroup
from rt.query.core.runtime import QueryRuntime
from rt.query.core.scheduler import VirtualScheduler
from rt.query.core.source import Source
from rt.query.core.subject import Subject
from rt.query.operators import (
    buffer_with_count,
    delay,
    flat_map,
    group_by,
    share,
    switch_map,
    take,
    to_list,
    window_with_time,
)
from rt.query.operators import map as mapped
from rt.query.operators.creation import merge
from rt.query.operators.inner.flatten import FlatMap
from rt.testing.queries import MarbleEvent, check_laws, cold, hot, run

IN = Source("in")


def values(events: list[MarbleEvent]) -> list[Any]:
    return [event.value for event in events if event.kind == "next"]


def test_inner_subscriptions_continue_after_recovery() -> None:
    spread = flat_map(lambda x: cold(f"-{x}-{x + 1}--{x + 2}|").pipe(take(2)))
    assert values(check_laws(IN.pipe(spread), {"in": hot("1--5-|")})) == [1, 2, 5, 6]


def test_nested_inner_subscriptions_continue_after_recovery() -> None:
    nested = flat_map(lambda x: cold("--a-b|").pipe(flat_map(lambda y: cold(f"-{x}|"))))
    assert values(check_laws(IN.pipe(nested), {"in": hot("12|")})) == [1, 2, 1, 2]


def test_groups_continue_after_recovery() -> None:
    query = IN.pipe(group_by(lambda x: x % 2), flat_map(lambda group: group.pipe(buffer_with_count(2))))
    output = check_laws(query, {"in": hot("1-2-3-4-5-7-8|")})
    assert values(output) == [[1, 3], [2, 4], [5, 7], [8]]


def test_failing_inner_subscription_ends_query_with_error() -> None:
    output = check_laws(IN.pipe(flat_map(lambda x: cold("-#"))), {"in": hot("1|")})
    assert [event.kind for event in output] == ["error"]


class Late(FlatMap):
    """Subscribes to each group when the next one arrives."""

    __slots__ = ("_before",)
    NAME = "late"

    def on_next(self, value: Any, /) -> None:
        if hasattr(self, "_before"):
            self.open_child("late", self._before)
        self._before = value


def test_late_subscription_to_group_fails_with_late_subscription() -> None:
    late = applied(Late, lambda group: group, False, None)
    output = run(IN.pipe(group_by(lambda x: x % 2), late), {"in": hot("12|")})
    assert [type(event.value) for event in output] == [LateSubscription]


class Two(Operator[Any, Any]):
    """Merges two sources."""

    __slots__ = ()
    NAME = "two"

    def on_inner_next(self, key: str, value: Any, /) -> None:
        self.emit((key, value))

    def on_inner_completed(self, key: str, /) -> None:
        if not self.has_open_input():
            self.complete()


def test_operator_with_two_sources_receives_values_of_both() -> None:
    query = Applied(Two, (IN.pipe(take(2)), cold("--x|")))
    output = check_laws(query, {"in": hot("1-2|")})
    assert sorted(values(output)) == [("0", 1), ("0", 2), ("1", "x")]
    assert output[-1].kind == "completed"


@pytest.mark.parametrize("nested_first", [True, False])
def test_inner_subscriptions_to_source_keep_their_order_after_crashes(nested_first: bool) -> None:
    tens = Source("in").pipe(flat_map(lambda v: Source("in").pipe(mapped(lambda x: 10 * v + x))))
    check_laws(merge(*(tens, Source("in"))[:: 1 if nested_first else -1]), {"in": hot("12345|")})
    check_laws(Source("in").pipe(switch_map(lambda v: Source("in"))), {"in": hot("1234|")})


class Opens(Operator[Any, Any]):
    __slots__ = ()
    NAME = "opens"

    def on_next(self, value: Any, /) -> None:
        self.open_child(value)

    def child(self, key: str, seed: Any, /) -> Observable[Any]:
        return Source("in")


@pytest.mark.parametrize("key", ["a/b", "a#b"])
def test_inner_key_with_id_separator_fails_with_value_error(key: str) -> None:
    (event,) = check_laws(Source("in").pipe(applied(Opens)), {"in": hot("k", {"k": key})})
    assert isinstance(event.value, ValueError)


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        (window_with_time(2), [(None, [1]), (None, [2]), (None, [3])]),
        (group_by(lambda x: x % 2, ttl=2), [(1, [1]), (0, [2]), (1, [3])]),
    ],
    ids=["windows", "groups"],
)
def test_operators_on_window_or_group_emit_after_its_end(parts: Any, expected: list[Any]) -> None:
    later = flat_map(lambda part: part.pipe(to_list(), delay(3), mapped(lambda each: (part.key, each))))
    assert values(check_laws(IN.pipe(parts, later), {"in": hot("1-2-3|")})) == expected


def test_saved_subscription_to_missing_window_is_rejected_as_corrupt() -> None:
    runtime = QueryRuntime(VirtualScheduler())
    tap = Subject.ended(runtime, "q#1#1", None)
    group = OperatorGroup(runtime, "q")
    group.build(tap, Subject(runtime, "out", None))
    group.load({"operators": [["inner", 1, 0, None, [], 0]]})
    with pytest.raises(StateDamaged, match="does not exist"):
        group.start()


def test_load_of_share_with_state_of_another_operator_raises_state_mismatch() -> None:
    runtime = QueryRuntime(VirtualScheduler())
    runtime.add_feed("in")
    group = OperatorGroup(runtime, "q")
    group.build(IN.pipe(take(1), share(lambda shared: shared)), Subject(runtime, "out", None))
    saved = [["share", 1, 0, None, [], 0], ["skip", 1, 0, 1, [], 0], ["source", 1, 0, [-1, 0], [], 0]]
    with pytest.raises(StateMismatch):
        group.load({"operators": saved})
    group.abandon()
