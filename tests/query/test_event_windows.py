"""Windows and joins in event time match plain definitions in any arrival order, with crashes."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from timed_engines import SECOND, Collected, Timed, TimedRun, TimedSource

from rt import InvalidOption
from rt.objects import MemoryStore, PersistedDictionary
from rt.query import Factories, Observable, QueryEngine, RealScheduler, Source
from rt.query import operators as ops
from rt.testing.queries import MarbleEvent, check_laws, rows_written

BOTH = Source("a").pipe(ops.merge(Source("b")))
KEYS = "xyz"


def key(value: Timed) -> Any:
    return value[1][0]


def timed(times: list[int]) -> list[Timed]:
    """Values in the order of their times, with keys and numbers."""
    return [(float(second), [KEYS[second % 3], number]) for number, second in enumerate(sorted(times))]


def disordered(times: list[tuple[int, int]]) -> list[Timed]:
    """Values that arrive up to `DISORDER_S` after later ones."""
    arrivals = sorted((second + delay, second) for second, delay in times)
    return [(float(second), [KEYS[second % 3], number]) for number, (_, second) in enumerate(arrivals)]


DISORDER_S = 5
DISORDERED = st.lists(st.tuples(st.integers(0, 40), st.integers(0, DISORDER_S)), min_size=1, max_size=12).map(
    disordered
)
TIMES = st.lists(st.integers(0, 40), min_size=1, max_size=12).map(timed)
ORDERS = st.lists(st.sampled_from("aabb.!"), max_size=40)
"""Values, checkpoints and crashes. A crash loses everything after the last checkpoint."""
FOLD = ops.Fold(
    list, lambda seen, value: sorted([*seen, value]), lambda first, second: sorted([*first, *second])
)
"""A fold whose result does not depend on the order."""


def windows_of(values: list[Timed], size: int, step: int, offset: int) -> list[Any]:
    """The definition of sliding windows."""
    starts = range(-size * 2 + offset % step - step * 9, 60, step)
    found = [
        (start + size, each_key, start, members)
        for start in starts
        for each_key in KEYS
        if (
            members := sorted(
                each for each in values if start <= each[0] < start + size and key(each) == each_key
            )
        )
    ]
    return [(end, each_key, start, list(members)) for end, each_key, start, members in sorted(found)]


def sessions_of(values: list[Timed], gap: int) -> list[Any]:
    """The definition of sessions."""
    found = []
    for each_key in KEYS:
        session: list[Timed] = []
        for each in [*sorted(each for each in values if key(each) == each_key), None]:
            if session and (each is None or each[0] - session[-1][0] >= gap):
                found.append((session[-1][0] + gap, each_key, session[0][0], session))
                session = []
            if each is not None:
                session.append(each)
    return sorted(found)


def shown(results: list[Any]) -> list[Any]:
    assert all(each["revision"] == 0 for each in results)
    return [
        (each["end_ns"] / SECOND, each["key"], each["start_ns"] / SECOND, list(map(tuple, each["value"])))
        for each in results
    ]


def run(
    query: Observable[Any], a: list[Timed], b: list[Timed], order: list[str], *, crashes: bool
) -> list[Any]:
    options = {name: {"max_out_of_orderness_s": DISORDER_S} for name in "ab"}
    made = TimedRun(query, {"a": a, "b": b}, options)
    results = made.finish(order, crashes=crashes)
    assert made.late.values == []
    return results


@settings(deadline=None, max_examples=60)
@given(DISORDERED, DISORDERED, ORDERS, st.booleans(), st.sampled_from([(10, 10, 0), (7, 7, 3), (6, 2, 1)]))
def test_sliding_windows_match_definition_in_any_arrival_order(
    a: list[Timed], b: list[Timed], order: list[str], crashes: bool, size: tuple[int, int, int]
) -> None:
    span, step, offset = size
    query = BOTH.pipe(ops.sliding_window(span, step, FOLD, key_mapper=key, offset=offset))
    assert shown(run(query, a, b, order, crashes=crashes)) == windows_of([*a, *b], span, step, offset)


@settings(deadline=None, max_examples=60)
@given(DISORDERED, DISORDERED, ORDERS, st.booleans(), st.sampled_from([1, 3, 9]))
def test_session_windows_match_definition_in_any_arrival_order(
    a: list[Timed], b: list[Timed], order: list[str], crashes: bool, gap: int
) -> None:
    query = BOTH.pipe(ops.session_window(gap, FOLD, key_mapper=key))
    assert shown(run(query, a, b, order, crashes=crashes)) == sessions_of([*a, *b], gap)


@settings(deadline=None, max_examples=60)
@given(TIMES, TIMES, ORDERS, st.booleans(), st.sampled_from(["matched", "left", "right", "all"]))
def test_interval_join_matches_definition_in_any_arrival_order(
    a: list[Timed], b: list[Timed], order: list[str], crashes: bool, keep: Any
) -> None:
    join = ops.interval_join(Source("b"), left_key=key, right_key=key, before=4, after=2, keep=keep)
    found = run(Source("a").pipe(join), a, b, order, crashes=crashes)
    pairs = [
        (left, right)
        for left, right in itertools.product(a, b)
        if key(left) == key(right) and left[0] - 4 <= right[0] <= left[0] + 2
    ]
    alone: list[Any] = []
    if keep in {"left", "all"}:
        alone += [(left, None) for left in a if all(left is not pair[0] for pair in pairs)]
    if keep in {"right", "all"}:
        alone += [(None, right) for right in b if all(right is not pair[1] for pair in pairs)]
    assert sorted(map(repr, found)) == sorted(map(repr, [*pairs, *alone]))
    assert found == run(Source("a").pipe(join), a, b, [], crashes=False)


@settings(deadline=None, max_examples=60)
@given(TIMES, TIMES, ORDERS, st.booleans(), st.sampled_from([None, 5]))
def test_temporal_join_returns_row_valid_at_time_of_value(
    a: list[Timed], b: list[Timed], order: list[str], crashes: bool, ttl: Any
) -> None:
    join = ops.temporal_join(
        Source("b"),
        left_key=key,
        table_key=key,
        is_deleted=lambda row: row[1][1] % 4 == 3,
        ttl=ttl,
        keep="left",
    )

    def row(left: Timed) -> Any:
        rows = [each for each in b if key(each) == key(left) and each[0] <= left[0]]
        last = rows[-1] if rows else None
        is_valid = last is not None and last[1][1] % 4 != 3 and (ttl is None or left[0] - last[0] <= ttl)
        return last if is_valid else None

    assert run(Source("a").pipe(join), a, b, order, crashes=crashes) == [(each, row(each)) for each in a]


@settings(deadline=None, max_examples=40)
@given(TIMES, TIMES, ORDERS, st.booleans())
def test_in_time_order_emits_values_of_two_sources_by_time(
    a: list[Timed], b: list[Timed], order: list[str], crashes: bool
) -> None:
    query = Source("a").pipe(ops.in_time_order(Source("b")))
    expected = sorted([*a, *b], key=lambda each: each[0])
    assert run(query, a, b, order, crashes=crashes) == expected


@settings(deadline=None, max_examples=40)
@given(DISORDERED, DISORDERED, ORDERS, st.booleans())
def test_windows_over_windows_lose_no_values(
    a: list[Timed], b: list[Timed], order: list[str], crashes: bool
) -> None:
    inner = ops.tumbling_window(4, ops.Fold.count(), key_mapper=key)
    outer = ops.tumbling_window(8, ops.Fold.sum(lambda each: each["value"]))
    found = run(BOTH.pipe(inner, outer), a, b, order, crashes=crashes)
    expected = [
        (start, count)
        for start in range(0, 48, 8)
        if (count := sum(start <= each[0] < start + 8 for each in [*a, *b]))
    ]
    assert [(each["start_ns"] // SECOND, each["value"]) for each in found] == expected


def event(at_s: float, time_s: float, value: Any) -> MarbleEvent:
    return MarbleEvent(at_s, "next", value, time_s)


def results(query: Observable[Any], *events: MarbleEvent) -> list[Any]:
    """The results with their times. `check_laws` also crashes the engine at every event."""
    end = MarbleEvent(events[-1].at_s + 100, "completed")
    found = check_laws(query, {"in": [*events, end]})
    return [(each.at_s, each.value) for each in found if each.kind == "next"]


def revisions(query: Observable[Any], *events: MarbleEvent) -> list[Any]:
    return [
        (at_s, each["start_ns"] // SECOND, each["end_ns"] // SECOND, each["revision"], each["value"])
        for at_s, each in results(query, *events)
    ]


def test_late_value_within_allowed_lateness_emits_window_again() -> None:
    query = Source("in").pipe(ops.tumbling_window(10, ops.Fold.to_list(), allowed_lateness=5))
    found = revisions(query, event(3, 3, "a"), event(12, 8, "b"), event(14.5, 9, "c"), event(15, 9, "late"))
    assert found == [(10, 0, 10, 0, ["a"]), (12, 0, 10, 1, ["a", "b"]), (14.5, 0, 10, 2, ["a", "b", "c"])]


def test_late_first_value_of_window_emits_it_at_once() -> None:
    query = Source("in").pipe(ops.tumbling_window(10, ops.Fold.to_list(), allowed_lateness=5))
    assert revisions(query, event(12, 8, "a"), event(13, 9, "b")) == [
        (12, 0, 10, 0, ["a"]),
        (13, 0, 10, 1, ["a", "b"]),
    ]


def test_late_value_continues_emitted_session() -> None:
    query = Source("in").pipe(ops.session_window(10, ops.Fold.to_list(), allowed_lateness=20))
    found = revisions(
        query,
        event(3, 3, "a"),
        event(14, 12, "b"),
        event(23, 23, "c"),
        event(24, 21.5, "d"),
        event(70, 70, "e"),
    )
    assert found == [
        (13, 3, 13, 0, ["a"]),
        (22, 3, 22, 1, ["a", "b"]),
        (33, 3, 33, 2, ["a", "b", "c", "d"]),
        (80, 70, 80, 0, ["e"]),
    ]


def test_value_between_two_sessions_merges_them() -> None:
    query = Source("in").pipe(ops.session_window(10, ops.Fold.to_list()))
    found = revisions(query, event(1, 15, "b"), event(2, 0, "a"), event(3, 7, "c"))
    assert found == [(25, 0, 25, 0, ["a", "b", "c"])]


def test_results_of_windows_with_equal_end_are_sorted_by_keys_of_any_type() -> None:
    keys = ["b", 2, (1, "a"), None, "a", 10, b"x", True, 1.5, float("nan"), frozenset({1})]
    query = Source("in").pipe(ops.tumbling_window(10, ops.Fold.count(), key_mapper=lambda each: each))
    forward = results(query, *(event(1, 1, each) for each in keys))
    backward = results(query, *(event(1, 1, each) for each in reversed(keys)))
    assert repr(forward) == repr(backward)
    found = [each["key"] for _, each in forward]
    assert [each for each in found if type(each) is str] == ["a", "b"]
    assert [each for each in found if type(each) in {int, float}][1:] == [1.5, 2, 10]


def test_checkpoint_writes_only_changed_windows() -> None:
    query = Source("in").pipe(ops.tumbling_window(5000, ops.Fold.count(), key_mapper=lambda each: each))
    events = [event(1, 1, str(number)) for number in range(200)]
    assert rows_written(query, {"in": [*events, event(2, 2, "7")]}, last=1) <= 2
    sessions = Source("in").pipe(ops.session_window(5000, ops.Fold.count(), key_mapper=lambda each: each))
    assert rows_written(sessions, {"in": [*events, event(2, 2, "7")]}, last=1) <= 2


EVENTS = st.lists(
    st.tuples(st.integers(0, 30), st.integers(0, 30), st.sampled_from(KEYS)), min_size=1, max_size=8
).map(lambda each: [event(at, time, [key, at]) for at, time, key in sorted(each)])
FIRST = ops.Fold.to_list(lambda value: value[1])
LATE: dict[str, Any] = {"late": "late", "key_mapper": lambda value: value[0]}
BY_KEY: dict[str, Any] = {"left_key": lambda value: value[0], "late": "late"}
IN = Source("in")


@settings(deadline=None, max_examples=30)
@given(EVENTS, EVENTS)
@pytest.mark.parametrize(
    "query",
    [
        IN.pipe(ops.sliding_window(6, 2, FIRST, allowed_lateness=4, **LATE)),
        IN.pipe(ops.session_window(4, FIRST, allowed_lateness=7, **LATE)),
        IN.pipe(
            ops.interval_join(Source("b"), right_key=lambda value: value[0], before=5, keep="all", **BY_KEY)
        ),
        IN.pipe(
            ops.temporal_join(Source("b"), table_key=lambda value: value[0], ttl=5, keep="left", **BY_KEY)
        ),
        IN.pipe(ops.in_time_order(Source("b"), late="late")),
    ],
    ids=["sliding", "session", "interval_join", "temporal_join", "in_time_order"],
)
def test_late_values_are_same_with_saves_and_crashes(
    query: Observable[Any], first: list[MarbleEvent], second: list[MarbleEvent]
) -> None:
    end = MarbleEvent(40, "completed")
    check_laws(query, {"in": [*first, end], "b": [*second, end]}, sinks=["late"])


def test_value_reads_only_sessions_near_it(monkeypatch: pytest.MonkeyPatch) -> None:
    many = [(float(second), [second, second]) for second in range(0, 600, 2)]
    query = IN.pipe(ops.session_window(1, ops.Fold.count()))
    run = TimedRun(query, {"in": [*many, (299.5, [])]}, {"in": {"max_out_of_orderness_s": 10_000}})
    for _ in many:
        assert run.send("in")
    read: list[Any] = []
    get = PersistedDictionary.__getitem__

    def counted(self: PersistedDictionary[Any, Any], key: Any) -> Any:
        read.append(key)
        return get(self, key)

    monkeypatch.setattr(PersistedDictionary, "__getitem__", counted)
    assert run.send("in")
    assert len(read) < 5


def test_session_window_requires_fold_with_merge() -> None:
    with pytest.raises(InvalidOption, match="merge"):
        ops.session_window(1, ops.Fold(int, max))


def test_windows_without_time_of_follow_system_clock() -> None:
    now = [100 * SECOND]
    factories = Factories()
    factories.add("counts", lambda: IN.pipe(ops.tumbling_window(10, ops.Fold.count()), ops.in_time_order()))
    engine = QueryEngine(MemoryStore(), factories, RealScheduler(lambda: now[0]))
    output, source, got = engine.add_sink("out"), TimedSource([(0.0, 0)] * 3), Collected()
    engine.add_source("in", source)
    engine.recover()
    engine.start("counts", "counts", sink="out")
    output.subscribe(got).start(0)
    for now[0] in (103 * SECOND, 109 * SECOND, 110 * SECOND):
        assert source.send()
    now[0] += 1000
    engine.run_due()
    engine.checkpoint()
    engine.deliver()
    assert [(each["start_ns"] // SECOND, each["value"]) for each in got.values] == [(100, 2)]
    engine.unload()


def test_source_can_be_joined_with_itself() -> None:
    join = ops.interval_join(Source("a"), left_key=key, right_key=key, before=1)
    one, two, three = values = [(1.0, ["x", 0]), (2.0, ["x", 1]), (4.0, ["x", 2])]
    run = TimedRun(Source("a").pipe(join), {"a": values})
    assert run.finish(crashes=True) == [(one, one), (two, one), (two, two), (three, three)]


def test_windows_with_excessive_overlap_are_rejected() -> None:
    with pytest.raises(InvalidOption, match="10000"):
        ops.sliding_window(60, 0.001, ops.Fold.count())


def test_step_longer_than_window_is_rejected() -> None:
    with pytest.raises(InvalidOption, match="step"):
        ops.sliding_window(1, 2, ops.Fold.count())
