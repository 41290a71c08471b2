"""An engine among things that fail: commits of every outcome, sources and consumers, interrupts."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest

from rt.errors import DiskFull
from rt.objects import CheckpointKind, CommitUnknown, MemoryStore
from rt.query.checkpoint.edge import OutputEdge, Release
from rt.query.checkpoint.factories import Factories
from rt.query.checkpoint.recovery import Mitigation
from rt.query.checkpoint.transaction_log import LOG, LogEntry
from rt.query.core.errors import Backlogged, QueryExists, WrongState
from rt.query.core.observable import Observable
from rt.query.core.reliable import RESUME, ReliableObserver
from rt.query.core.scheduler import VirtualScheduler
from rt.query.core.source import Source
from rt.query.engine import QueryEngine
from rt.query.lifecycle import EngineState
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

factories = Factories()


def _numbered(source: Observable[Any], tag: str) -> Observable[Any]:
    """(tag, how many came, value)."""
    return source.pipe(scan(lambda found, v: (found[0] + 1, v), (0, -1)), mapped(lambda found: (tag, *found)))


@factories("plain")
def plain(tag: str) -> Observable[Any]:
    return _numbered(Source("numbers"), tag)


@factories("late")
def late(tag: str) -> Observable[Any]:
    return _numbered(Source("numbers").pipe(delay(2.5)), tag)


@factories("nested")
def nested(tag: str) -> Observable[Any]:
    """What follows each multiple of 4, up to the next."""
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


class Numbers:
    """The value of id n is n. Pumped by hand; `fails` says which of its methods raises."""

    is_dense = True

    def __init__(self, acknowledged: int = -1, fails: str = "") -> None:
        self.next = -1
        self.acknowledged = acknowledged
        self.fails = fails
        self.is_disposed = False

    def subscribe(self, observer: ReliableObserver[int], /) -> Numbers:
        self.observer = observer
        return self

    def start(self, sequence_id: int, /) -> None:
        self._fail("start")
        assert sequence_id > self.acknowledged, "asked for what was acknowledged"
        self.next = sequence_id

    def acknowledge(self, sequence_id: int, /) -> None:
        self._fail("acknowledge")
        self.acknowledged = max(self.acknowledged, sequence_id)

    def dispose(self) -> None:
        self._fail("dispose")
        self.is_disposed = True

    def pump(self, end: int) -> None:
        while self.next < end:
            self.observer.on_next(self.next, self.next)
            self.next += 1

    def _fail(self, what: str) -> None:
        if self.fails == what:
            raise DiskFull(what)


class Sink:
    """Takes each id once, and notes if one comes again with another value. `error` is raised once."""

    def __init__(self, error: Exception | None = None) -> None:
        self.values: list[Any] = []
        self.ends = 0
        self.error = error

    def on_next(self, sequence_id: int, value: Any, /) -> None:
        self._fail()
        if sequence_id == len(self.values):
            self.values.append(value)
        assert self.values[sequence_id] == value

    def on_error(self, error: Exception, /) -> None:
        raise AssertionError(error)

    def on_completed(self) -> None:
        self._fail()
        self.ends += 1

    def _fail(self) -> None:
        error, self.error = self.error, None
        if error is not None:
            raise error


Fault = tuple[BaseException, bool]
"""What a commit raises, and whether it happens all the same."""


class BadCommits(MemoryStore):
    """Whose commits fail as `draw` says."""

    def __init__(self, content: Any = None) -> None:
        super().__init__(content)
        self.draw: Callable[[], Fault | None] = lambda: None

    def fail_once(self, error: BaseException, *, happens: bool = False) -> None:
        faults = [None, (error, happens)]
        self.draw = lambda: faults.pop() if faults else None

    def begin(self, kind: CheckpointKind) -> Any:
        writer = super().begin(kind)
        fault = self.draw()
        if fault is not None:
            commit = writer.commit

            def fail() -> None:
                (commit if fault[1] else writer.rollback)()
                raise fault[0]

            writer.commit = fail  # type: ignore[method-assign]
        return writer


class Life:
    """One life of an engine on what a store holds, with a sink of each kind of release."""

    def __init__(self, content: Any = None, sinks: dict[Release, Sink] | None = None, seen: int = -1) -> None:
        self.store = BadCommits(content)
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

    def crash(self) -> Life:
        """The next one."""
        return Life(self.store.content(), self.sinks, self.source.acknowledged)

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


def test_nothing_is_lost_or_doubled_over_commits_that_fail_in_every_way() -> None:
    for seed in range(20):
        _run(random.Random(seed))


def _run(draw: random.Random) -> None:
    faults = [*OUTCOMES, (SystemExit(), False), (SystemExit(), True)]
    life, at, furthest = Life(), 1, 0

    def bad(life: Life) -> Life:
        life.store.draw = lambda: draw.choice(faults) if draw.random() < 0.25 else None
        return life

    bad(life)
    for step in range(100):
        furthest = max(furthest, life.source.next)
        try:
            match draw.choice([*"rrrrrsssttccfda"]):
                case "r":
                    at += draw.randrange(4)
                    life.source.pump(max(at, life.source.next))
                case "s" if life.source.next == furthest:
                    kind, sink = (
                        draw.choice(["plain", "late", "nested", "grouped"]),
                        draw.choice(["commit", "now"]),
                    )
                    life.engine.start(f"q{draw.randrange(6)}", kind, {"tag": f"{kind}.{step}"}, sink=sink)
                case "t" if life.source.next == furthest and life.engine.queries:
                    life.engine.stop(draw.choice(sorted(life.engine.queries)))
                case "c":
                    life.engine.checkpoint()
                case "f":
                    life.engine.checkpoint(CheckpointKind.FULL)
                case "d":
                    life = bad(life.crash())
                case "a":
                    life.acknowledge(draw)
        except (DiskFull, CommitUnknown, QueryExists, SystemExit):
            pass
        except WrongState:  # An interrupt came.
            life = bad(life.crash())
    life = life.crash()
    life.source.pump(max(at, furthest) + 5)
    life.engine.checkpoint()
    life.engine.deliver()
    _check([each for sink in life.sinks.values() for each in sink.values])
    content = life.store.content()
    assert set(content.get("query/query", ())) == set(life.engine.queries)
    assert {each.split("/")[0] for each in content.get("query/artifact", ())} <= set(life.engine.queries)


def _check(values: list[Any]) -> None:
    """Every query has emitted, without gap or repetition, what follows from the values it saw."""
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
def test_what_could_not_be_stopped_durably_can_be_started_again(error: Exception, happens: bool) -> None:
    life = Life()
    life.engine.start("q", "plain", {"tag": "old"}, sink="commit")
    life.engine.checkpoint()
    life.store.fail_once(error, happens=happens)
    with pytest.raises(type(error)):
        life.engine.stop("q")
    life.engine.start("q", "plain", {"tag": "new"}, sink="commit")
    life = life.crash()
    life.source.pump(1)
    life.engine.checkpoint()
    life.engine.deliver()
    assert life.sinks["commit"].values == [("new", 1, 0)]


def test_an_entry_of_unknown_outcome_is_gone_with_the_next_commit() -> None:
    life = Life()
    life.store.fail_once(CommitUnknown("yes"), happens=True)
    with pytest.raises(CommitUnknown):
        life.engine.start_many([Start("a", "sized"), Start("b", "sized")])
    life.engine.start("b", "sized")
    assert life.crash().engine.queries == {"b": None}
    life.store.fail_once(CommitUnknown("yes"), happens=True)
    with pytest.raises(CommitUnknown):
        life.engine.stop("b")
    life.engine.checkpoint()
    assert LOG not in life.store.content()
    assert life.crash().engine.queries == {"b": None}


@pytest.mark.parametrize(("error", "happens"), OUTCOMES)
def test_what_is_sent_at_once_waits_where_it_is_not_known_which_queries_there_are(
    error: Exception, happens: bool
) -> None:
    life = Life()
    life.engine.start("q", "plain", {"tag": "q"}, sink="now")
    life.engine.start("other", "plain", {"tag": "other"}, sink="now")
    life.source.pump(1)
    life.store.fail_once(error, happens=happens)
    with pytest.raises(type(error)):
        life.engine.stop("q")
    life.source.pump(2)
    life.engine.deliver()
    assert life.sinks["now"].values == [("q", 1, 0), ("other", 1, 0)]
    life.engine.checkpoint()
    life.engine.deliver()
    assert life.sinks["now"].values[2:] == [("other", 2, 1)]


def test_no_query_begins_or_ends_among_what_was_sent_at_once_before_a_crash() -> None:
    life = Life()
    life.engine.start("q", "plain", {"tag": "q"}, sink="now")
    life.source.pump(3)
    life.engine.deliver()
    life = life.crash()
    life.outputs["now"].expect(len(life.sinks["now"].values))
    for use in (
        lambda: life.engine.stop("q"),
        lambda: life.engine.start("more", "plain", {"tag": "more"}, sink="now"),
    ):
        with pytest.raises(WrongState, match="not yet produced again"):
            use()
    life.engine.start("more", "plain", {"tag": "more"}, sink="commit")
    life.source.pump(3)
    life.engine.stop("q")
    life.engine.start("other", "plain", {"tag": "other"}, sink="now")
    life.source.pump(4)
    life.engine.deliver()
    assert life.sinks["now"].values == [("q", 1, 0), ("q", 2, 1), ("q", 3, 2), ("other", 1, 3)]


def test_a_conflict_about_a_definition_does_not_touch_the_query_of_that_name() -> None:
    life = Life()
    life.engine.start("defined", "sized")
    life.engine.checkpoint()
    content = life.store.content()
    content[LOG] = {"000000000009": LogEntry("definition", "defined", None).encode()}
    assert Life(content).engine.queries == {"defined": None}


# Sources


def test_an_engine_whose_source_cannot_be_started_lets_all_go() -> None:
    good, bad = Numbers(), Numbers(fails="start")
    engine = QueryEngine(MemoryStore(), factories)
    engine.add_source("good", good)
    engine.add_source("bad", bad)
    with pytest.raises(DiskFull):
        engine.recover()
    assert (engine.state, good.is_disposed, bad.is_disposed) == (EngineState.UNLOADED, True, True)


def test_a_source_that_could_not_be_started_can_be_added_again() -> None:
    engine = QueryEngine(MemoryStore(), factories)
    engine.recover()
    with pytest.raises(DiskFull):
        engine.add_source("numbers", Numbers(fails="start"))
    source = Numbers()
    engine.add_source("numbers", source)
    source.pump(2)
    assert engine.watermarks == {"numbers": 1}


def test_a_source_that_raises_does_not_keep_others_from_being_let_go() -> None:
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


def test_a_query_whose_start_raised_can_be_started_again() -> None:
    life = Life()
    life.source.fails = "acknowledge"
    with pytest.raises(DiskFull):
        life.engine.start("q", "sized", sink="now")
    assert life.engine.queries == {}
    life.source.fails = ""
    life.engine.start("q", "sized")
    assert life.crash().engine.queries == {"q": None}


def test_values_without_a_time_wait_until_there_is_one() -> None:
    life = Life()
    other = Numbers()
    life.engine.add_source("other", other)
    other.pump(1)
    life.engine.start("q", "plain", {"tag": "q"}, sink="now")
    with pytest.raises(Backlogged, match="time"):
        other.pump(2)
    life.source.pump(1)
    other.pump(2)
    assert life.engine.watermarks == {"numbers": 0, "other": 1}


def test_a_query_that_is_stopped_before_there_is_a_time_is_forgotten() -> None:
    life = Life()
    life.engine.start("q", "plain", {"tag": "old"}, sink="now")
    life.engine.stop("q")
    life.engine.start("q", "plain", {"tag": "new"}, sink="now")
    assert len(life.engine._clock._waiting) == 1
    life.source.pump(1)
    life.engine.deliver()
    assert life.sinks["now"].values == [("new", 1, 0)]


def test_a_source_that_ends_without_a_value_ends_its_queries() -> None:
    life = Life()
    life.engine.start("q", "sized", sink="now")
    life.source.observer.on_completed()
    life.engine.run_due()
    life.engine.deliver()
    assert (life.sinks["now"].values, life.engine.queries) == ([0], {"q": ""})


def test_nothing_goes_on_behind_an_event_that_was_broken_off() -> None:
    life = Life()
    factory = Factories()
    factory.add("broken", lambda: Source("numbers").pipe(mapped(_interrupt)))
    engine = QueryEngine(MemoryStore(), factory)
    engine.add_source("numbers", life.source)
    engine.recover()
    engine.start("q", "broken")
    with pytest.raises(SystemExit):
        life.source.pump(1)
    for use in (
        lambda: life.source.pump(1),
        life.source.observer.on_completed,
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


def test_a_consumer_that_raises_keeps_nothing_from_others() -> None:
    life = Life()
    error = OSError("once")
    bad, good = Sink(error), Sink()
    for name, sink in (("a", bad), ("b", good)):
        life.engine.add_sink(name, release="now").subscribe(sink).start(0)
        life.engine.start(name, "plain", {"tag": name}, sink=name)
    life.source.pump(1)
    with pytest.raises(OSError, match="once"):
        life.engine.deliver()
    assert (bad.values, good.values) == ([], [("b", 1, 0)])
    life.engine.deliver()
    assert bad.values == [("a", 1, 0)]


def test_the_end_is_told_again_to_a_consumer_that_did_not_take_it() -> None:
    output: OutputEdge = Life().outputs["now"]
    sink = Sink(OSError("once"))
    output.subscribe(sink, "other").start(0)
    output.on_completed()
    with pytest.raises(OSError, match="once"):
        output.deliver()
    output.deliver()
    output.deliver()
    assert sink.ends == 1


def test_an_output_that_may_hold_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="1 or more, got 0"):
        Life().engine.add_sink("none", limit=0)
