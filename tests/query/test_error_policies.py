"""Error policies of a query: skip, retry, stop, stop-engine; its dead letters; query ids used again."""

from __future__ import annotations

import importlib
import pkgutil
import random
from typing import Any

import pytest
from query_engines import FailingStore, Numbers, Sink

import rt.query.operators
from rt.errors import DiskFull, InvalidOption
from rt.objects import MemoryStore, StateDamaged
from rt.query import (
    DeadLetter,
    EngineStopped,
    ErrorPolicy,
    Factories,
    Observable,
    Operator,
    QueryEngine,
    QueryExists,
    Source,
    Start,
    VirtualScheduler,
    WrongState,
    applied,
)
from rt.query import operators as ops
from rt.query.core.reliable import RESUME
from rt.query.monitoring.dead_letters import KEPT, TEXT_MAX, shown
from rt.query.operators import creation

factories = Factories()
calls: list[Any] = []
to_fail: list[Any] = []


def unless_three(value: int) -> int:
    if value % 10 == 3:
        raise ValueError(f"no {value}")
    return value


def flaky(value: int) -> int:
    """Raise once for each occurrence of the value in `to_fail`."""
    calls.append(value)
    if value in to_fail:
        to_fail.remove(value)
        raise ConnectionError(str(value))
    return value


class Careless(Operator[Any, Any]):
    """An operator whose own code raises."""

    __slots__ = ()
    NAME = "careless"

    def on_next(self, value: Any, /) -> None:
        if value % 10 == 5:
            self.set_timer(self.now_ns, str(value))
        self.emit(unless_three(value))

    def on_timer(self, key: str, /) -> None:
        raise LookupError(f"timer {key}")


class CarelessEnd(Operator[Any, Any]):
    __slots__ = ()
    NAME = "careless_end"

    def on_next(self, value: Any, /) -> None:
        self.emit(value)

    def on_completed(self) -> None:
        raise LookupError("end")


def numbers(*transforms: Any) -> Observable[Any]:
    return Source("numbers").pipe(*transforms)


def after(value: int) -> Observable[Any]:
    """Return an observable that ends soon. Raise for the value three."""
    unless_three(value)
    return creation.timer(0.5)


CASES: dict[str, Observable[Any]] = {
    "map": numbers(ops.map(unless_three)),
    "where": numbers(ops.where(lambda v: unless_three(v) >= 0)),
    "filter_indexed": numbers(ops.filter_indexed(lambda v, i: unless_three(v) >= 0)),
    "map_indexed": numbers(ops.map_indexed(lambda v, i: unless_three(v))),
    "distinct": numbers(ops.distinct(unless_three)),
    "distinct_until_changed": numbers(ops.distinct_until_changed(unless_three)),
    "scan": numbers(ops.scan(lambda last, v: unless_three(v), -1)),
    "take_while": numbers(ops.take_while(lambda v: unless_three(v) >= 0)),
    "skip_while": numbers(ops.skip_while(lambda v: unless_three(v) < 4)),
    "do_action": numbers(ops.do_action(unless_three)),
    "flat_map": numbers(ops.flat_map(lambda v: creation.of(unless_three(v)))),
    "concat_map": numbers(ops.concat_map(lambda v: creation.of(unless_three(v)))),
    "switch_map": numbers(ops.switch_map(lambda v: creation.of(unless_three(v)))),
    "group_by": numbers(ops.group_by(unless_three), ops.flat_map(lambda g: g)),
    "group_by elements": numbers(ops.group_by(lambda v: v % 2, unless_three), ops.flat_map(lambda g: g)),
    "in a group": numbers(
        ops.group_by(lambda v: v % 2), ops.flat_map(lambda g: g.pipe(ops.map(unless_three)))
    ),
    "in a window": numbers(ops.window_with_count(4), ops.flat_map(lambda w: w.pipe(ops.map(unless_three)))),
    "operator": numbers(applied(Careless)),
    "after take": numbers(ops.map(unless_three), ops.take(1000)),
    "starmap": numbers(ops.pairwise(), ops.starmap(lambda before, v: unless_three(v))),
    "group_by_until": numbers(
        ops.group_by_until(unless_three, None, lambda g: creation.timer(1.5)), ops.flat_map(lambda g: g)
    ),
    "duration of a group": numbers(
        ops.group_by_until(lambda v: v, None, lambda g: after(g.key)), ops.flat_map(lambda g: g)
    ),
    "join": numbers(
        ops.join(Source("numbers"), after, lambda v: creation.timer(0.5)), ops.map(lambda pair: pair[0])
    ),
    "group_join": numbers(
        ops.group_join(Source("numbers"), after, lambda v: creation.timer(0.5)), ops.flat_map(lambda g: g)
    ),
    "window_toggle": numbers(
        ops.delay(0.1), ops.window_toggle(Source("numbers"), after), ops.flat_map(lambda w: w)
    ),
    "in share": numbers(ops.share(lambda all_: all_.pipe(ops.map(unless_three)))),
    "throttle": numbers(ops.throttle_with_mapper(lambda v: creation.of(unless_three(v)))),
}
for name, case in CASES.items():
    factories.add(name.replace(" ", "-"), lambda case=case: case)


@factories("flaky")
def flaky_query() -> Observable[Any]:
    return numbers(ops.map(flaky))


@factories("caught")
def caught() -> Observable[Any]:
    return numbers(ops.map(unless_three), ops.catch(creation.of("caught")))


@factories("retried")
def retried(times: int) -> Observable[Any]:
    return numbers(ops.map(unless_three), ops.retry(times))


@factories("last-of-two")
def last_of_two() -> Observable[Any]:
    """The value three is the last value of `take`. It is skipped after `take` has completed."""
    return numbers(ops.take(4), ops.map(unless_three), ops.to_list())


@factories("thrown")
def thrown() -> Observable[Any]:
    return creation.merge(Source("numbers"), creation.throw(ValueError("mine")))


@factories("ends")
def ends() -> Observable[Any]:
    return numbers(ops.take(2), applied(CarelessEnd))


@factories("mean")
def mean() -> Observable[Any]:
    return numbers(ops.take(2), ops.do_action(on_completed=lambda: unless_three(3)))


@factories("waiting")
def waiting() -> Observable[Any]:
    """Two values wait for the end of the first inner subscription. The subscription for one of them fails."""
    return numbers(
        ops.take(4),
        ops.concat_map(lambda v: creation.of(unless_three(v)).pipe(ops.delay(5))),
        ops.to_list(),
    )


class Process:
    """A process with an engine on the content of a store."""

    def __init__(self, content: Any = None, sinks: dict[str, Sink] | None = None, seen: int = -1) -> None:
        self.store = FailingStore(content)
        self.sinks = sinks or {"out": Sink(), "dead": Sink()}
        self.source = Numbers(seen)
        self.engine = QueryEngine(self.store, factories, VirtualScheduler())
        self.engine.add_source("numbers", self.source, time_of=lambda value: value * 10**9)
        self.outputs = {"out": self.engine.add_sink("out"), "dead": self.engine.add_dead_letters("dead")}
        self.engine.recover()
        for name, each in self.outputs.items():
            each.subscribe(self.sinks[name]).start(RESUME)

    def crash(self) -> Process:
        return Process(self.store.content(), self.sinks, self.source.acknowledged)

    def feed(self, end: int) -> None:
        self.source.pump(end)
        self.engine.run_due()
        self.engine.deliver()

    def commit(self) -> None:
        self.engine.checkpoint()
        self.engine.deliver()

    def results(self) -> list[Any]:
        self.commit()
        return self.sinks["out"].values

    def dead(self) -> list[dict[str, Any]]:
        self.commit()
        return self.sinks["dead"].values


@pytest.mark.parametrize("name", CASES)
def test_malformed_message_is_skipped_and_query_continues(name: str) -> None:
    process = Process()
    process.engine.start("q", name.replace(" ", "-"), sink="out")
    process.feed(10)
    assert process.engine.queries == {"q": None}
    letters = [each for each in process.engine.dead_letters if each.source is not None]
    assert [(each.sequence_id, each.error, each.value) for each in letters] == [(3, "ValueError: no 3", "3")]
    assert 3 not in process.results()
    assert {4, 5, 6} <= set(process.results())


@factories("indexed")
def indexed(name: str) -> Observable[Any]:
    """Call a function for every value. The function records the index."""

    def note(value: int, index: int) -> Any:
        calls.append(index)
        unless_three(value)
        return creation.empty() if name == "flat_map_indexed" else True

    return numbers(getattr(ops, name)(note))


@pytest.mark.parametrize("name", ["map_indexed", "filter_indexed", "skip_while_indexed", "flat_map_indexed"])
def test_skipped_value_consumes_an_index(name: str) -> None:
    process = Process()
    calls.clear()
    process.engine.start("q", "indexed", {"name": name})
    process.feed(6)
    assert calls == list(range(6))


def test_malformed_message_ends_none_of_1000_queries() -> None:
    process = Process()
    process.engine.start_many(Start(f"q{at}", "map") for at in range(1000))
    process.feed(5)
    assert set(process.engine.queries.values()) == {None}
    assert len(process.dead()) == 1000
    assert [each.query for each in process.engine.dead_letters] == [f"q{at}" for at in range(900, 1000)]


def test_dead_letter_has_query_operator_source_and_value() -> None:
    process = Process()
    process.engine.start("q", "operator", sink="out")
    process.feed(8)
    value, timer = process.engine.dead_letters
    assert value == DeadLetter("q", "careless", "q#0", "numbers", 3, 3 * 10**9, "ValueError: no 3", "3")
    assert (timer.source, timer.sequence_id, timer.error, timer.value) == (
        None,
        None,
        "LookupError: timer 5",
        "",
    )
    assert process.dead() == [value.row(), timer.row()]


def test_store_keeps_last_dead_letters_and_output_gets_all() -> None:
    process = Process()
    process.engine.start("q", "map")
    process.feed(10 * KEPT + 100)
    process.commit()
    kept = process.crash().engine.dead_letters
    assert [each.sequence_id for each in kept] == [10 * at + 3 for at in range(10, KEPT + 10)]
    assert len(process.dead()) == KEPT + 10


def test_dead_letters_are_exact_after_crashes_failed_commits_and_restarts() -> None:
    for seed in range(10):
        draw, process = random.Random(seed), Process()
        expected = []
        process.engine.start("q", "map", sink="out")
        process.engine.start("none", "map")
        started = 0
        for at in range(1, 80):
            process.feed(at)
            match draw.randrange(8):
                case 0 | 1:
                    process = process.crash()
                    process.feed(at)
                case 2:
                    process.commit()
                case 3:
                    process.store.fail_once(DiskFull("full"), happens=False)
                    with pytest.raises(DiskFull):
                        process.engine.checkpoint()
                case 4:
                    # A log entry would be enough to stop "none", but its letters must not be lost.
                    process.engine.stop("none")
                    expected += [("none", v) for v in range(started, at) if v % 10 == 3]
                    process = process.crash()
                    process.feed(at)
                    process.engine.start("none", "map")
                    started = at
        expected += [("none", v) for v in range(started, 79) if v % 10 == 3]
        expected += [("q", v) for v in range(79) if v % 10 == 3]
        found = [(each["query"], each["sequence_id"]) for each in process.dead()]
        assert sorted(found) == sorted(expected), seed


@pytest.mark.parametrize("name", CASES)
def test_crashes_change_neither_results_nor_dead_letters(name: str) -> None:
    plain, crashed = Process(), Process()
    for process in (plain, crashed):
        process.engine.start("q", name.replace(" ", "-"), sink="out")
    for at in range(1, 26):
        plain.feed(at)
        crashed.feed(at)
        if at % 3:
            crashed.commit()
        crashed = crashed.crash()
        crashed.feed(at)
    assert crashed.results() == plain.results()
    assert crashed.dead() == plain.dead()
    assert crashed.engine.dead_letters == plain.engine.dead_letters


def test_dead_letters_are_listed_by_engine_without_output() -> None:
    store = MemoryStore()
    engine = QueryEngine(store, factories)
    source = Numbers(-1)
    engine.add_source("numbers", source)
    engine.recover()
    engine.start("q", "map")
    source.pump(40)
    assert [each.sequence_id for each in engine.dead_letters] == [3, 13, 23, 33]


def test_full_dead_letter_output_refuses_sources() -> None:
    engine = QueryEngine(MemoryStore(), factories)
    source = Numbers(-1)
    engine.add_source("numbers", source)
    engine.add_dead_letters(limit=2)
    engine.recover()
    engine.start("q", "map")
    with pytest.raises(Exception, match="an output is full"):
        source.pump(40)
    assert engine.watermarks == {"numbers": 13}
    assert engine.is_backlogged


def test_unstorable_dead_letter_ends_query() -> None:
    engine = QueryEngine(MemoryStore(), factories)
    source = Numbers(-1)
    engine.add_source("numbers", source)
    engine.add_dead_letters(encode=lambda letter: object())
    engine.recover()
    engine.start("q", "map")
    source.pump(5)
    assert engine.queries == {"q": "ValueError: no 3"}


# The other policies


def test_stop_policy_ends_query_with_the_error() -> None:
    process = Process()
    process.engine.start("q", "map", sink="out", on_error="stop")
    process.feed(5)
    assert process.engine.queries == {"q": "ValueError: no 3"}
    assert process.results() == [0, 1, 2]
    assert process.dead() == []


@pytest.mark.parametrize("name", CASES)
def test_stop_policy_ends_query_for_every_operator(name: str) -> None:
    process = Process()
    process.engine.start("q", name.replace(" ", "-"), on_error="stop")
    process.feed(10)
    assert process.engine.queries == {"q": "ValueError: no 3"}
    assert process.engine.dead_letters == []


def test_retry_policy_calls_function_again_then_skips_value() -> None:
    calls.clear()
    to_fail[:] = [1, 1, 3, 3, 3, 3]
    process = Process()
    process.engine.start("q", "flaky", sink="out", on_error="retry")
    process.feed(5)
    assert calls == [0, 1, 1, 1, 2, 3, 3, 3, 3, 4]
    assert process.results() == [0, 1, 2, 4]
    assert [each.error for each in process.engine.dead_letters] == ["ConnectionError: 3"]


def test_retry_policy_can_end_query_after_last_retry() -> None:
    to_fail[:] = [1, 1]
    process = Process()
    process.engine.start("q", "flaky", sink="out", on_error=ErrorPolicy("stop", retries=1))
    process.feed(3)
    assert process.engine.queries == {"q": "ConnectionError: 1"}


@pytest.mark.parametrize("name", CASES)
def test_stop_engine_policy_does_not_accept_the_value(name: str) -> None:
    process = Process()
    process.engine.start("q", name.replace(" ", "-"), sink="out", on_error="stop-engine")
    with pytest.raises(EngineStopped, match="no 3") as raised:
        process.feed(10)
    assert isinstance(raised.value.__cause__, ValueError)
    assert process.engine.watermarks["numbers"] <= 3
    with pytest.raises(WrongState, match="interrupted"):
        process.feed(10)
    with pytest.raises(WrongState, match="interrupted"):
        process.engine.checkpoint()


def test_next_process_reads_value_again_after_stop_engine() -> None:
    to_fail[:] = [3]
    process = Process()
    process.engine.start("q", "flaky", sink="out", on_error="stop-engine")
    process.feed(2)
    process.commit()
    with pytest.raises(EngineStopped, match="query 'q', operator map"):
        process.feed(10)
    process = process.crash()
    process.feed(5)
    assert process.results() == [0, 1, 2, 3, 4]
    assert process.engine.queries == {"q": None}


def test_timer_error_can_stop_engine() -> None:
    engine = QueryEngine(MemoryStore(), factories, on_error="stop-engine")
    source = Numbers(4)
    engine.add_source("numbers", source, begin=5)
    engine.recover()
    engine.start("q", "operator")
    source.pump(6)
    with pytest.raises(EngineStopped, match="timer 5"):
        engine.run_due()


# Errors covered by the policy


def test_error_handling_operator_receives_errors_under_any_policy() -> None:
    for policy in ("skip", "stop", "stop-engine"):
        process = Process()
        process.engine.start("q", "caught", sink="out", on_error=policy)  # type: ignore[arg-type]
        process.feed(6)
        assert process.results() == [0, 1, 2, "caught"]
        assert process.engine.queries == {"q": ""}
        assert process.engine.dead_letters == []


def test_policy_applies_when_retry_operator_gives_up() -> None:
    process = Process()
    process.engine.start("q", "retried", {"times": 2}, sink="out")
    process.feed(30)
    assert process.engine.queries == {"q": None}
    assert [each.sequence_id for each in process.engine.dead_letters] == [13, 23]
    assert process.results() == [v for v in range(30) if v % 10 != 3]


def test_upstream_take_counts_skipped_value_and_completes() -> None:
    process = Process()
    process.engine.start("q", "last-of-two", sink="out")
    process.feed(6)
    assert process.results() == [[0, 1, 2]]
    assert process.engine.queries == {"q": ""}


def test_waiting_value_is_skipped_if_its_inner_subscription_fails() -> None:
    process = Process()
    process.engine.start("q", "waiting", sink="out")
    process.feed(60)
    assert process.results() == [[0, 1, 2]]
    assert process.engine.queries == {"q": ""}


def test_errors_of_stream_itself_end_query_without_dead_letter() -> None:
    for factory, error in (
        ("thrown", "ValueError: mine"),
        ("ends", "LookupError: end"),
        ("mean", "ValueError: no 3"),
    ):
        process = Process()
        process.engine.start("q", factory, sink="out")
        process.feed(4)
        assert process.engine.queries == {"q": error}
        assert process.engine.dead_letters == []


def test_policy_of_start_overrides_definition_and_definition_overrides_engine() -> None:
    store = MemoryStore()
    engine = QueryEngine(store, factories, on_error="stop")
    source = Numbers(-1)
    engine.add_source("numbers", source)
    engine.recover()
    engine.define("careful", "map", on_error=ErrorPolicy(retries=2, pause_s=0.0))
    engine.start("default", "map")
    engine.start("defined", "careful")
    engine.start("own", "careful", on_error="stop")
    engine.unload()
    engine = QueryEngine(MemoryStore(store.content()), factories, on_error="skip")
    source = Numbers(-1)
    engine.add_source("numbers", source)
    engine.recover()
    assert engine.definitions["careful"].on_error == ErrorPolicy("skip", 2)
    source.pump(5)
    assert engine.queries == {"default": "ValueError: no 3", "defined": None, "own": "ValueError: no 3"}


def test_invalid_error_policy_is_rejected() -> None:
    with pytest.raises(InvalidOption, match="on_error must be one of skip, stop, stop-engine"):
        ErrorPolicy.of("ignore")  # type: ignore[arg-type]
    with pytest.raises(InvalidOption, match="retries"):
        ErrorPolicy(retries=-1)
    with pytest.raises(InvalidOption, match="pause_s"):
        ErrorPolicy(retries=1, pause_s=float("nan"))
    with pytest.raises(StateDamaged, match="not an error policy"):
        ErrorPolicy.from_row({"then": "what"}, "query/query/q")
    process = Process()
    with pytest.raises(InvalidOption):
        process.engine.start("q", "map", on_error="never")  # type: ignore[arg-type]
    assert process.engine.queries == {}


# Ids used again


@pytest.mark.parametrize("sink", ["out", None])
@pytest.mark.parametrize("is_stored", [True, False])
def test_id_of_ended_query_can_be_started_again(sink: str | None, is_stored: bool) -> None:
    process = Process()
    process.engine.start("q", "map", sink=sink, on_error="stop")
    process.feed(5)
    if is_stored:
        process.commit()
    assert process.engine.queries == {"q": "ValueError: no 3"}
    process.engine.start("q", "scan", sink=sink)
    process.feed(8)
    after = process.crash()
    after.feed(8)
    for each in (process, after):
        assert each.engine.queries == {"q": None}
    assert after.results() == ([] if sink is None else [0, 1, 2, 5, 6, 7])


def test_start_with_id_of_running_query_raises_query_exists() -> None:
    process = Process()
    process.engine.start("q", "map")
    with pytest.raises(QueryExists):
        process.engine.start("q", "map")
    with pytest.raises(QueryExists):
        process.engine.start_many([Start("other", "map"), Start("other", "map")])
    assert process.engine.queries == {"q": None}


def test_failed_restart_leaves_no_query() -> None:
    process = Process()
    process.engine.start("q", "map", sink="out", on_error="stop")
    process.feed(5)
    process.store.fail_once(DiskFull("full"), happens=False)
    with pytest.raises(DiskFull):
        process.engine.start("q", "scan", sink="out")
    assert process.engine.queries == {}
    process.feed(7)
    assert process.results() == [0, 1, 2]
    process.engine.start("q", "scan", sink="out")
    process.feed(9)
    assert process.results() == [0, 1, 2, 7, 8]


# Texts


def test_shown_value_has_bounded_length() -> None:
    from rt.log.scan.message_batch import Message

    message = Message(7, 1, "s", 0, 3, "clicks", b"x" * 10**6)
    assert shown(message).startswith("Message(position=7, timestamp_ns=1, session='s'")
    for value in (message, "y" * 10**6, list(range(10**5)), dict.fromkeys(range(100), "z" * 2000), 10**4000):
        assert len(shown(value)) < TEXT_MAX + 200


class Unshown:
    def __repr__(self) -> str:
        raise RuntimeError("no")


def test_shown_value_has_text_if_repr_fails() -> None:
    assert "Unshown" in shown(Unshown())
    assert shown("\udcff").encode()


PASS_ON = {"amb", "do_action", "share", "start_with"}
"""Operators that act on an error, and then fail with it."""


def test_operators_with_error_handlers_override_handles_errors() -> None:
    """Otherwise the query's error policy would handle errors meant for these operators."""
    for module in pkgutil.walk_packages(rt.query.operators.__path__, "rt.query.operators."):
        importlib.import_module(module.name)
    unclear, waiting = [], [Operator]
    while waiting:
        kind: Any = waiting.pop()
        waiting += kind.__subclasses__()
        if not kind.__module__.startswith("rt.query.operators"):
            continue
        code = ("on_error", "on_inner_error")
        has_code = any(getattr(kind, each) is not getattr(Operator, each) for each in code)
        is_silent = kind.handles_errors is Operator.handles_errors
        if has_code and is_silent and getattr(kind, "NAME", "") not in PASS_ON:
            unclear.append(kind.__qualname__)
    assert unclear == [], "override handles_errors, or add the NAME to PASS_ON"
