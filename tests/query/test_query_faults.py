"""The query engine with failing commits of every outcome, failing sources and consumers, interrupts."""

from __future__ import annotations

import random
from collections import defaultdict
from typing import Any

import pytest
from query_engines import FailingStore, Fault, Numbers, Sink

from rt.errors import DiskFull, InvalidOption
from rt.objects import CheckpointKind, CommitUnknown, MemoryStore
from rt.query.checkpoint.edge import OutputEdge, Release
from rt.query.checkpoint.factories import Factories
from rt.query.checkpoint.recovery import Mitigation
from rt.query.checkpoint.transaction_log import LOG, LogEntry
from rt.query.core.errors import Backlogged, QueryExists, WrongState
from rt.query.core.lifecycle import EngineState
from rt.query.core.observable import Observable
from rt.query.core.reliable import RESUME
from rt.query.core.scheduler import VirtualScheduler
from rt.query.core.source import Source
from rt.query.engine import QueryEngine
from rt.query.operators import (
    buffer_with_count,
    count,
    delay,
    flat_map,
    group_by,
    scan,
    switch_map,
    where,
)
from rt.query.operators import (
    map as mapped,
)
from rt.query.query_registry import Start
from rt.query.runner import EngineRunner

factories = Factories()


def _numbered(source: Observable[Any], tag: str) -> Observable[Any]:
    """(tag, number of values so far, value)."""
    return source.pipe(scan(lambda found, v: (found[0] + 1, v), (0, -1)), mapped(lambda found: (tag, *found)))


@factories("plain")
def plain(tag: str) -> Observable[Any]:
    return _numbered(Source("numbers"), tag)


@factories("late")
def late(tag: str) -> Observable[Any]:
    return _numbered(Source("numbers").pipe(delay(2.5)), tag)


@factories("nested")
def nested(tag: str) -> Observable[Any]:
    """The values after each multiple of 4, up to the next one."""
    fours = Source("numbers").pipe(where(lambda v: v % 4 == 0))
    return fours.pipe(switch_map(lambda v: Source("numbers").pipe(mapped(lambda x: (tag, v, x)))))


@factories("grouped")
def grouped(tag: str) -> Observable[Any]:
    return Source("numbers").pipe(
        group_by(lambda v: v % 3),
        flat_map(lambda group: group.pipe(buffer_with_count(2), mapped(lambda b: (tag, b[0] % 3, tuple(b))))),
    )


@factories("sized")
def sized() -> Observable[Any]:
    return Source("numbers").pipe(count())


class Process:
    """A process with an engine on the content of a store, and a sink for each kind of release."""

    def __init__(self, content: Any = None, sinks: dict[Release, Sink] | None = None, seen: int = -1) -> None:
        self.store = FailingStore(content)
        self.sinks: dict[Release, Sink] = sinks or {"commit": Sink(), "now": Sink()}
        self.source = Numbers(seen)
        self.answer: Mitigation | None = None
        self.engine = QueryEngine(self.store, factories, VirtualScheduler(), on_load_failed=self._answer)
        self.engine.add_source("numbers", self.source, time_of=lambda value: value * 10**9)
        self.outputs = {name: self.engine.add_sink(name, release=name) for name in self.sinks}
        self.engine.recover()
        self.subscriptions = {name: each.subscribe(self.sinks[name]) for name, each in self.outputs.items()}
        for each in self.subscriptions.values():
            each.start(RESUME)

    def crash(self) -> Process:
        """Start another process on the content of the last commit."""
        return Process(self.store.content(), self.sinks, self.source.acknowledged)

    def acknowledge(self, draw: random.Random) -> None:
        self.engine.deliver()
        for name, each in self.subscriptions.items():
            end = min(len(self.sinks[name].values), self.outputs[name].buffer.end)
            each.acknowledge(draw.randint(-1, end - 1))

    def _answer(self, query_id: str, error: Exception) -> Mitigation | None:
        return Mitigation.REMOVE if query_id == "defined" else None


OUTCOMES: list[Fault] = [
    (DiskFull("full"), False),
    (CommitUnknown("no"), False),
    (CommitUnknown("yes"), True),
]


# Commits


def test_failing_commits_and_crashes_neither_lose_nor_repeat_values() -> None:
    for seed in range(20):
        _run(random.Random(seed))


def _run(draw: random.Random) -> None:
    faults = [*OUTCOMES, (SystemExit(), False), (SystemExit(), True)]
    process, at, furthest = Process(), 1, 0

    def bad(process: Process) -> Process:
        process.store.draw = lambda: draw.choice(faults) if draw.random() < 0.25 else None
        return process

    bad(process)
    for step in range(100):
        furthest = max(furthest, process.source.next)
        try:
            match draw.choice([*"rrrrrsssttccfda"]):
                case "r":
                    at += draw.randrange(4)
                    process.source.pump(max(at, process.source.next))
                case "s" if process.source.next == furthest:
                    kind, sink = (
                        draw.choice(["plain", "late", "nested", "grouped"]),
                        draw.choice(["commit", "now"]),
                    )
                    process.engine.start(f"q{draw.randrange(6)}", kind, {"tag": f"{kind}.{step}"}, sink=sink)
                case "t" if process.source.next == furthest and process.engine.queries:
                    process.engine.stop(draw.choice(sorted(process.engine.queries)))
                case "c":
                    process.engine.checkpoint()
                case "f":
                    process.engine.checkpoint(CheckpointKind.FULL)
                case "d":
                    process = bad(process.crash())
                case "a":
                    process.acknowledge(draw)
        except (DiskFull, CommitUnknown, QueryExists, SystemExit):
            pass
        except WrongState:  # An interrupt stopped the engine.
            process = bad(process.crash())
    process = process.crash()
    process.source.pump(max(at, furthest) + 5)
    process.engine.checkpoint()
    process.engine.deliver()
    _check([each for sink in process.sinks.values() for each in sink.values])
    content = process.store.content()
    assert set(content.get("query/query", ())) == set(process.engine.queries)
    assert {each.split("/")[0] for each in content.get("query/artifact", ())} <= set(process.engine.queries)


def _check(values: list[Any]) -> None:
    """Check that every query emitted each result for its values exactly once."""
    by_tag = defaultdict(list)
    for tag, what, value in values:
        by_tag[tag].append((what, value))
    for tag, found in by_tag.items():
        first, last = found[0][1], found[-1][1]
        match tag.split(".")[0]:
            case "plain" | "late":
                assert found == list(enumerate(range(first, last + 1), 1)), tag
            case "nested":
                assert found == [(x - x % 4, x) for x in range(first, last + 1) if x % 4], tag
            case _:
                for group in range(3):
                    flat = [value for what, pair in found if what == group for value in pair]
                    assert flat == list(range(flat[0], flat[-1] + 1, 3)) if flat else True, tag


@pytest.mark.parametrize(("error", "happens"), OUTCOMES)
def test_query_can_be_started_again_after_failed_stop(error: Exception, happens: bool) -> None:
    process = Process()
    process.engine.start("q", "plain", {"tag": "old"}, sink="commit")
    process.engine.checkpoint()
    process.store.fail_once(error, happens=happens)
    with pytest.raises(type(error)):
        process.engine.stop("q")
    process.engine.start("q", "plain", {"tag": "new"}, sink="commit")
    process = process.crash()
    process.source.pump(1)
    process.engine.checkpoint()
    process.engine.deliver()
    assert process.sinks["commit"].values == [("new", 1, 0)]


def test_next_commit_deletes_log_entry_of_unknown_outcome() -> None:
    process = Process()
    process.store.fail_once(CommitUnknown("yes"), happens=True)
    with pytest.raises(CommitUnknown):
        process.engine.start_many([Start("a", "sized"), Start("b", "sized")])
    process.engine.start("b", "sized")
    assert process.crash().engine.queries == {"b": None}
    process.store.fail_once(CommitUnknown("yes"), happens=True)
    with pytest.raises(CommitUnknown):
        process.engine.stop("b")
    process.engine.checkpoint()
    assert LOG not in process.store.content()
    assert process.crash().engine.queries == {"b": None}


@pytest.mark.parametrize(("error", "happens"), OUTCOMES)
def test_output_is_paused_after_failed_stop_until_next_checkpoint(error: Exception, happens: bool) -> None:
    process = Process()
    process.engine.start("q", "plain", {"tag": "q"}, sink="now")
    process.engine.start("other", "plain", {"tag": "other"}, sink="now")
    process.source.pump(1)
    process.store.fail_once(error, happens=happens)
    with pytest.raises(type(error)):
        process.engine.stop("q")
    process.source.pump(2)
    process.engine.deliver()
    assert process.sinks["now"].values == [("q", 1, 0), ("other", 1, 0)]
    process.engine.checkpoint()
    process.engine.deliver()
    assert process.sinks["now"].values[2:] == [("other", 2, 1)]


def test_queries_cannot_start_or_stop_until_delivered_values_are_produced_again() -> None:
    process = Process()
    process.engine.start("q", "plain", {"tag": "q"}, sink="now")
    process.source.pump(3)
    process.engine.deliver()
    process = process.crash()
    process.outputs["now"].expect(len(process.sinks["now"].values))
    for use in (
        lambda: process.engine.stop("q"),
        lambda: process.engine.start("more", "plain", {"tag": "more"}, sink="now"),
    ):
        with pytest.raises(WrongState, match="not yet produced again"):
            use()
    process.engine.start("more", "plain", {"tag": "more"}, sink="commit")
    process.source.pump(3)
    process.engine.stop("q")
    process.engine.start("other", "plain", {"tag": "other"}, sink="now")
    process.source.pump(4)
    process.engine.deliver()
    assert process.sinks["now"].values == [("q", 1, 0), ("q", 2, 1), ("q", 3, 2), ("other", 1, 3)]


def test_log_conflict_of_definition_keeps_query_of_the_same_name() -> None:
    process = Process()
    process.engine.start("defined", "sized")
    process.engine.checkpoint()
    content = process.store.content()
    content[LOG] = {"000000000009": LogEntry("definition", "defined", None).encode()}
    assert Process(content).engine.queries == {"defined": None}


# Sources


def test_failed_recovery_disposes_all_sources() -> None:
    good, bad = Numbers(), Numbers(fails="start")
    engine = QueryEngine(MemoryStore(), factories)
    engine.add_source("good", good)
    engine.add_source("bad", bad)
    with pytest.raises(DiskFull):
        engine.recover()
    assert (engine.state, good.is_disposed, bad.is_disposed) == (EngineState.UNLOADED, True, True)


def test_source_can_be_added_again_after_failed_start() -> None:
    engine = QueryEngine(MemoryStore(), factories)
    engine.recover()
    with pytest.raises(DiskFull):
        engine.add_source("numbers", Numbers(fails="start"))
    source = Numbers()
    engine.add_source("numbers", source)
    source.pump(2)
    assert engine.watermarks == {"numbers": 1}


def test_unload_disposes_all_sources_even_if_one_raises() -> None:
    bad, good = Numbers(fails="dispose"), Numbers()
    engine = QueryEngine(MemoryStore(), factories)
    engine.add_source("bad", bad)
    engine.add_source("good", good)
    engine.recover()
    with pytest.raises(DiskFull):
        engine.unload()
    assert (good.is_disposed, engine.state) == (True, EngineState.UNLOADED)
    for add in (lambda: engine.add_source("more", Numbers()), lambda: engine.add_sink("more")):
        with pytest.raises(WrongState):
            add()


def test_query_starts_although_source_rejects_acknowledgement() -> None:
    process = Process()
    process.source.fails = "acknowledge"
    process.engine.start("q", "sized", sink="now")
    assert process.crash().engine.queries == {"q": None}
    with pytest.raises(DiskFull):
        process.engine.checkpoint()
    process.source.fails = ""
    process.source.pump(1)
    process.engine.checkpoint()
    assert process.source.acknowledged == 0


def test_source_without_times_gets_backlogged_until_event_time_starts() -> None:
    process = Process()
    other = Numbers()
    process.engine.add_source("other", other)
    other.pump(1)
    process.engine.start("q", "plain", {"tag": "q"}, sink="now")
    with pytest.raises(Backlogged, match="time"):
        other.pump(2)
    process.source.pump(1)
    other.pump(2)
    assert process.engine.watermarks == {"numbers": 0, "other": 1}


def test_query_stopped_before_event_time_starts_never_runs() -> None:
    process = Process()
    process.engine.start("q", "plain", {"tag": "old"}, sink="now")
    process.engine.stop("q")
    process.engine.start("q", "plain", {"tag": "new"}, sink="now")
    assert len(process.engine._clock._waiting) == 1
    process.source.pump(1)
    process.engine.deliver()
    assert process.sinks["now"].values == [("new", 1, 0)]


def test_source_that_completes_without_values_completes_its_queries() -> None:
    process = Process()
    process.engine.start("q", "sized", sink="now")
    process.source.observer.on_completed()
    process.engine.run_due()
    process.engine.deliver()
    assert (process.sinks["now"].values, process.engine.queries) == ([0], {"q": ""})


def test_engine_calls_after_interrupted_event_raise_wrong_state() -> None:
    process = Process()
    factory = Factories()
    factory.add("broken", lambda: Source("numbers").pipe(mapped(_interrupt)))
    engine = QueryEngine(MemoryStore(), factory)
    engine.add_source("numbers", process.source)
    engine.recover()
    engine.start("q", "broken")
    with pytest.raises(SystemExit):
        process.source.pump(1)
    for use in (
        lambda: process.source.pump(1),
        process.source.observer.on_completed,
        engine.run_due,
        engine.deliver,
        engine.checkpoint,
        lambda: engine.stop("q"),
    ):
        with pytest.raises(WrongState, match="was interrupted"):
            use()
    engine.unload()


def _interrupt(value: int) -> int:
    raise SystemExit


# Consumers


def test_error_of_one_consumer_does_not_affect_others() -> None:
    process = Process()
    error = OSError("once")
    bad, good = Sink(error), Sink()
    for name, sink in (("a", bad), ("b", good)):
        process.engine.add_sink(name, release="now").subscribe(sink).start(0)
        process.engine.start(name, "plain", {"tag": name}, sink=name)
    process.source.pump(1)
    with pytest.raises(OSError, match="once"):
        process.engine.deliver()
    assert (bad.values, good.values) == ([], [("b", 1, 0)])
    process.engine.deliver()
    assert bad.values == [("a", 1, 0)]


def test_completion_rejected_by_consumer_is_delivered_again() -> None:
    output: OutputEdge = Process().outputs["now"]
    sink = Sink(OSError("once"))
    output.subscribe(sink, "other").start(0)
    output.on_completed()
    with pytest.raises(OSError, match="once"):
        output.deliver()
    output.deliver()
    output.deliver()
    assert sink.ends == 1


def test_output_limit_must_be_a_positive_integer() -> None:
    for bad in (0, 1.5, float("inf")):
        with pytest.raises(InvalidOption, match="limit"):
            Process().engine.add_sink("none", limit=bad)  # type: ignore[arg-type]


def test_engine_runner_rejects_invalid_durations() -> None:
    for bad in (
        {"checkpoint_s": float("nan")},
        {"checkpoint_s": -1},
        {"idle_s": float("inf")},
        {"idle_s": "1"},
    ):
        with pytest.raises(InvalidOption, match=next(iter(bad))):
            EngineRunner(Process().engine, [], **bad)  # type: ignore[arg-type]
