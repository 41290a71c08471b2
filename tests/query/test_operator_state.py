"""State of operators: its cost in a checkpoint, its limits, and the lifetime of groups and windows."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest

from rt.errors import Timeout
from rt.objects import MemoryStore, NotSerializable
from rt.query import (
    LateSubscription,
    LimitExceeded,
    Observable,
    QueryError,
    QueryFailed,
    Source,
    Subject,
    VirtualScheduler,
    WrongCount,
)
from rt.query import operators as ops
from rt.query.core.operator_group import OperatorGroup
from rt.query.core.runtime import QueryRuntime
from rt.query.core.scheduler import NS_PER_S, next_tick_ns
from rt.query.operators import creation
from rt.testing.queries import MarbleError, MarbleEvent, check_laws, cold, hot, rows_written, run

IN = Source("in")


def listed(window: Observable[Any]) -> Observable[Any]:
    return window.pipe(ops.to_list())


@pytest.mark.parametrize(
    "query",
    [
        IN.pipe(ops.buffer_with_count(1000, 900)),
        IN.pipe(ops.buffer_with_time(2000)),
        IN.pipe(ops.delay(2000)),
        IN.pipe(ops.distinct()),
        IN.pipe(ops.flat_map(lambda _: creation.never(), max_concurrent=1)),
        IN.pipe(ops.group_by(lambda x: x), ops.merge_all()),
        IN.pipe(
            ops.group_by_until(lambda x: x, None, lambda _: creation.never()), ops.where(lambda _: False)
        ),
        IN.pipe(ops.join(creation.never(), lambda _: creation.never(), lambda _: creation.never())),
        IN.pipe(ops.max_by(lambda _: 0)),
        IN.pipe(ops.skip_last(1000)),
        IN.pipe(ops.take_last(1000)),
        IN.pipe(ops.to_dict(lambda x: x)),
        IN.pipe(ops.to_set()),
        IN.pipe(ops.window_toggle(IN, lambda _: creation.never()), ops.where(lambda _: False)),
        IN.pipe(ops.group_by(lambda x: x % 10), ops.flat_map(listed)),
        IN.pipe(ops.sequence_equal(creation.never())),
        IN.pipe(ops.to_list()),
        IN.pipe(ops.window_with_count(1000), ops.flat_map(listed)),
        IN.pipe(ops.zip(creation.never())),
    ],
)
def test_checkpoint_of_large_state_writes_only_changed_rows(query: Observable[Any]) -> None:
    events = {"in": [MarbleEvent(at / 100, "next", at) for at in range(400)]}
    few, many = (rows_written(query, {"in": events["in"][:count]}, last=4) for count in (60, 400))
    assert few == many <= 16


@pytest.mark.parametrize(
    ("query", "marbles", "error"),
    [
        (IN.pipe(ops.to_list(limit=2)), "123|", LimitExceeded),
        (IN.pipe(ops.sequence_equal(creation.never(), limit=2)), "123|", LimitExceeded),
        (IN.pipe(ops.first()), "|", WrongCount),
        (IN.pipe(ops.last()), "|", WrongCount),
        (IN.pipe(ops.single()), "12|", WrongCount),
        (IN.pipe(ops.element_at(3)), "12|", WrongCount),
        (IN.pipe(ops.average()), "|", WrongCount),
        (IN.pipe(ops.min()), "|", WrongCount),
        (IN.pipe(ops.sum(str)), "1|", TypeError),
        (IN.pipe(ops.distinct(lambda x: [x])), "1|", TypeError),
        (IN.pipe(ops.group_by(lambda x: [x])), "1|", TypeError),
        (IN.pipe(ops.flat_map(lambda x: x)), "1|", TypeError),
        (IN.pipe(ops.flat_map(lambda x: 1 // (x - 1))), "1|", ZeroDivisionError),
        (IN.pipe(ops.catch(lambda why: cold(why.text[99]))), "#", IndexError),
        (IN.pipe(ops.map(lambda x: cold("-1|")), ops.merge_all()), "1|", NotSerializable),
        (IN.pipe(ops.map(lambda x: object()), ops.last()), "1|", NotSerializable),
        (IN.pipe(ops.map(lambda x: object()), ops.to_list()), "1|", NotSerializable),
        (IN.pipe(ops.map(lambda x: object()), ops.flat_map(lambda x: IN)), "1|", NotSerializable),
        (IN.pipe(ops.scan(lambda seen, x: object(), 0)), "1|", NotSerializable),
        (IN.pipe(ops.pairwise()), "#", MarbleError),
        (IN.pipe(ops.to_dict(lambda x: [x])), "1|", TypeError),
        (IN.pipe(ops.to_set(limit=1)), "12|", LimitExceeded),
        (IN.pipe(ops.max_by(lambda x: 0, limit=1)), "12|", LimitExceeded),
        (IN.pipe(ops.join(IN, lambda _: creation.never(), lambda _: IN, limit=1)), "1|", LimitExceeded),
        (IN.pipe(ops.join(IN, lambda x: x, lambda _: IN)), "1|", TypeError),
        (
            IN.pipe(ops.group_by_until(lambda x: x, None, lambda x: x.key), ops.ignore_elements()),
            "1",
            TypeError,
        ),
        (IN.pipe(ops.buffer_when(lambda: 1 // 0)), "1|", ZeroDivisionError),
        (IN.pipe(ops.timeout(1)), "---1|", Timeout),
        (IN.pipe(ops.dematerialize()), "1|", TypeError),
    ],
)
def test_invalid_value_or_end_fails_query_with_typed_error(
    query: Observable[Any], marbles: str, error: type[Exception]
) -> None:
    (event,) = run(query, {"in": hot(marbles)})
    assert event.kind == "error"
    assert isinstance(event.value, error)
    if isinstance(event.value, QueryError):
        assert "query#" in str(event.value)


NONSENSE: list[Callable[[], object]] = [
    lambda: ops.buffer_with_count(0),
    lambda: ops.debounce(-1),
    lambda: ops.element_at(-1),
    lambda: ops.buffer_with_count(1.5),  # type: ignore[arg-type]
    lambda: ops.buffer_with_count(2, "1"),  # type: ignore[arg-type]
    lambda: ops.flat_map(cold, max_concurrent=0),
    lambda: ops.flat_map(cold, max_concurrent=1.5),  # type: ignore[arg-type]
    lambda: ops.repeat(0),
    lambda: ops.retry(0),
    lambda: ops.sample(0),
    lambda: ops.join(IN, cold, cold, limit=0),
    lambda: ops.share(),
    lambda: ops.skip(-1),
    lambda: ops.skip_last(-1),
    lambda: ops.skip_until_with_time(datetime(2026, 1, 1)),  # noqa: DTZ001
    lambda: ops.take(-1),
    lambda: ops.take_last(-1),
    lambda: ops.timeout(-1),
    lambda: ops.to_set(limit=-1),
    lambda: ops.take_with_time(float("inf")),
    lambda: ops.throttle_first(0),
    lambda: ops.to_list(limit=-1),
    lambda: ops.window_with_count(1, 0),
    lambda: ops.window_with_count(1.5),  # type: ignore[arg-type]
    lambda: ops.window_with_time(0),
    lambda: ops.window_with_time_or_count(1, 0),
    lambda: creation.interval(0),
]


def test_invalid_arguments_raise_value_error_when_operator_is_constructed() -> None:
    for make in NONSENSE:
        with pytest.raises(ValueError):
            make()


def test_source_argument_that_is_not_an_observable_raises_type_error() -> None:
    wrong: Any = 1
    for make in (ops.merge, ops.catch, ops.take_until, ops.amb, ops.on_error_resume_next, creation.zip):
        with pytest.raises(TypeError):
            make(wrong)
    with pytest.raises(TypeError):
        ops.concat()


def test_catch_handler_receives_kind_and_text_of_mapper_error() -> None:
    query = IN.pipe(ops.map(lambda x: 1 // x), ops.catch(lambda why: creation.of(why.kind, why.text)))
    output = check_laws(query, {"in": hot("10|")})
    assert [event.value for event in output[:-1]] == [
        1,
        "ZeroDivisionError",
        "integer division or modulo by zero",
    ]


def test_catch_handler_receives_same_failure_from_original_and_restored_error() -> None:
    query = ops.catch(lambda why: creation.of(why.kind, why.text))
    for error in (ValueError("so: what"), QueryFailed("ValueError: so: what")):
        output = run(creation.throw(error).pipe(query))
        assert [event.value for event in output[:-1]] == ["ValueError", "so: what"]


def test_take_until_with_time_accepts_datetime() -> None:
    at = datetime.fromtimestamp(2.5, UTC)
    query = IN.pipe(ops.take_until_with_time(at))
    assert [event.value for event in check_laws(query, {"in": hot("12345|")})] == [1, 2, 3, None]


def test_interval_emits_missed_ticks_once() -> None:
    assert [next_tick_ns(10, 10, now_ns) for now_ns in (9, 10, 19, 20, 35)] == [20, 20, 20, 30, 40]
    ticks, scheduler = _Recorder(), VirtualScheduler()
    _started(creation.interval(1), scheduler, ticks)
    for now_s in (1, 5.5, 6, 6.5):
        scheduler.restore(round(now_s * NS_PER_S))
        while scheduler.run_due():
            ticks.values.append(now_s)
    assert ticks.values == [0, 1, 1, 5.5, 2, 6]


def test_window_with_time_skips_missed_windows_except_the_open_one() -> None:
    output, scheduler = _Recorder(), VirtualScheduler()
    _started(creation.never().pipe(ops.window_with_time(1), ops.flat_map(listed)), scheduler, output)
    for now_s in (0.0, 1.0, 7.5, 8.0, 8.5):
        scheduler.restore(round(now_s * NS_PER_S))
        while scheduler.run_due():
            pass
        output.values.append(now_s)
    assert output.values == [0.0, [], 1.0, [], 7.5, [], 8.0, 8.5]


def test_groups_continue_after_group_by_is_unsubscribed_until_they_have_no_subscribers() -> None:
    runtime = QueryRuntime(VirtualScheduler())
    feed, output = runtime.add_feed("in"), _Recorder()
    query = IN.pipe(
        ops.group_by(lambda x: x % 2), ops.take(1), ops.flat_map(lambda group: group.pipe(ops.take(2)))
    )
    root = _started(query, runtime.scheduler, output, runtime)
    for number, value in enumerate((1, 2, 3, 5)):
        assert not root.is_finished or number == 3
        feed.on_next(number, value)
    assert output.values == [1, 3, "|"]
    assert root.is_finished
    assert runtime.space.ids() == []
    assert runtime.subjects == {}


def test_finally_action_is_called_once_and_not_on_unload() -> None:
    calls: list[str] = []
    query = IN.pipe(ops.finally_action(lambda: calls.append("ended")), ops.take(1))
    runtime = QueryRuntime(VirtualScheduler())
    runtime.add_feed("in")
    _started(query, runtime.scheduler, _Recorder(), runtime).abandon()
    assert calls == []
    run(query, {"in": hot("123|")})
    assert calls == ["ended"]


def test_error_in_finally_action_is_logged_and_query_still_ends(
    caplog: pytest.LogCaptureFixture, logged: Callable[[str], list[str]]
) -> None:
    for transforms in ([], [ops.take(1)], [ops.map(lambda x: 1 // 0)]):
        caplog.clear()
        output = run(IN.pipe(ops.finally_action(lambda: 1 // 0), *transforms), {"in": hot("1|")})
        assert [event.kind for event in output][-1] == ("error" if output[0].value != 1 else "completed")
        assert logged("rt.query") == [f"finally_action_failed operator=query#{len(transforms)}"]


def test_windows_without_subscribers_are_emitted_as_bare_subjects() -> None:
    seen: list[Any] = []
    output = run(
        IN.pipe(ops.window_with_count(2), ops.do_action(seen.append), ops.count()), {"in": hot("123|")}
    )
    assert [event.value for event in output] == [2, None]
    assert all(type(each) is Subject and not each.has_subscribers for each in seen)


class _Recorder:
    def __init__(self) -> None:
        self.values: list[Any] = []

    def on_next(self, value: Any, /) -> None:
        self.values.append(value)

    def on_error(self, error: Exception, /) -> None:
        self.values.append(error)

    def on_completed(self) -> None:
        self.values.append("|")


def _started(
    query: Observable[Any], scheduler: Any, out: _Recorder, runtime: QueryRuntime | None = None
) -> OperatorGroup:
    runtime = runtime or QueryRuntime(scheduler)
    runtime.load(MemoryStore().reader())
    root = runtime.roots["q"] = OperatorGroup(runtime, "q")
    root.build(query, out)
    root.open()
    root.start()
    return root


def test_dematerialized_error_keeps_its_kind_and_text() -> None:
    (event,) = run(IN.pipe(ops.materialize(), ops.dematerialize()), {"in": hot("#")})
    assert str(event.value) == "MarbleError: #"


def test_source_of_share_runs_once_and_ends_with_its_last_subscription() -> None:
    seen: list[Any] = []
    query = IN.pipe(ops.do_action(seen.append), ops.share(lambda it: it.pipe(ops.merge(it), ops.take(4))))
    output = run(query, {"in": hot("1234|")})
    assert [event.value for event in output[:-1]] == [1, 1, 2, 2]
    assert seen == [1, 2]


def test_late_subscription_to_shared_source_fails_with_late_subscription() -> None:
    (event,) = run(IN.pipe(ops.share(lambda it: it.pipe(ops.flat_map(lambda _: it)))), {"in": hot("1|")})
    assert isinstance(event.value, LateSubscription)
