"""The engine: checkpoints, crashes, the transaction log, mitigations, states."""

from __future__ import annotations

import contextlib
import random
import threading
from itertools import chain
from typing import Any

import pytest

from rt.errors import DiskFull, InvalidName
from rt.objects import CheckpointKind, CommitUnknown, MemoryStore, NotSerializable, StateDamaged
from rt.query import operators as ops
from rt.query.checkpoint.edge import Release
from rt.query.checkpoint.factories import Factories
from rt.query.checkpoint.recovery import Mitigation
from rt.query.checkpoint.transaction_log import LOG, Change, LogEntry, coalesce, combine
from rt.query.core.errors import (
    Backlogged,
    LogConflict,
    NoSuchQuery,
    QueryExists,
    SequenceGap,
    StateMismatch,
    WrongState,
)
from rt.query.core.observable import Observable, applied
from rt.query.core.operator import Operator
from rt.query.core.reliable import RESUME, ReliableObserver
from rt.query.core.scheduler import VirtualScheduler
from rt.query.core.source import Source
from rt.query.engine import QueryEngine
from rt.query.lifecycle import EngineState
from rt.query.operators import buffer_with_count, buffer_with_time, take, where
from rt.query.query_registry import Start

factories = Factories()


@factories("every")
def every(count: int, modulo: int = 1) -> Observable[Any]:
    return Source("numbers").pipe(where(lambda x: x % modulo == 0), buffer_with_count(count))


@factories("timed")
def timed(seconds: float, most: int = 1000) -> Observable[Any]:
    return Source("numbers").pipe(buffer_with_time(seconds), take(most))


@factories("fragile")
def fragile() -> Observable[Any]:
    return Source("numbers").pipe(where(lambda x: 1 // (x - 3)))


class Numbers:
    """A source that can be asked again: the value of id n is n. Pumped by hand."""

    is_dense = True

    def __init__(self) -> None:
        self.next: int | None = None
        self.acknowledged = -1
        self.is_disposed = False

    def subscribe(self, observer: ReliableObserver[int], /) -> Numbers:
        self.observer = observer
        return self

    def start(self, sequence_id: int, /) -> None:
        assert sequence_id > self.acknowledged, "asked for what was acknowledged"
        self.next = sequence_id

    def acknowledge(self, sequence_id: int, /) -> None:
        self.acknowledged = max(self.acknowledged, sequence_id)

    def dispose(self) -> None:
        self.is_disposed = True

    def pump(self, end: int) -> None:
        assert self.next is not None
        while self.next < end:
            self.observer.on_next(self.next, self.next)
            self.next += 1


class Sink:
    """A consumer that takes each id once, and notes if one comes again with another value."""

    def __init__(self) -> None:
        self.values: list[Any] = []

    def on_next(self, sequence_id: int, value: Any, /) -> None:
        if sequence_id < len(self.values):
            assert self.values[sequence_id] == value, (sequence_id, self.values[sequence_id], value)
        else:
            assert sequence_id == len(self.values)
            self.values.append(value)

    def on_error(self, error: Exception, /) -> None:
        raise AssertionError(error)

    def on_completed(self) -> None:
        raise AssertionError


class Life:
    """One life of an engine on a store, with what outlives it."""

    def __init__(
        self,
        store: MemoryStore | None = None,
        sink: Sink | None = None,
        acknowledged: int = -1,
        *,
        release: Release = "commit",
        limit: int = 1000,
        **more: Any,
    ) -> None:
        self.store = store or MemoryStore()
        self.sink = sink or Sink()
        self.release: Release = release
        self.source = Numbers()
        self.source.acknowledged = acknowledged
        self.engine = QueryEngine(self.store, factories, VirtualScheduler(), **more)
        self.engine.add_source("numbers", self.source, time_of=lambda value: value * 10**9)
        self.output = self.engine.add_sink("out", release=release, limit=limit)
        self.engine.recover()
        self.subscription = self.output.subscribe(self.sink)
        self.subscription.start(RESUME)

    def crash(self, **more: Any) -> Life:
        """The next life, with what the last commit left."""
        store = MemoryStore(self.store.content())
        return Life(store, self.sink, self.source.acknowledged, release=self.release, **more)

    def run(self, end: int) -> None:
        self.source.pump(end)
        self.engine.deliver()
        if self.sink.values:
            self.subscription.acknowledge(min(len(self.sink.values), self.output.buffer.end) - 1)


class BadCommits(MemoryStore):
    """Whose next commit fails, perhaps after it happened."""

    error: Exception | None = None
    happens = False

    def begin(self, kind: CheckpointKind) -> Any:
        writer = super().begin(kind)
        if self.error is None:
            return writer
        error, self.error, commit = self.error, None, writer.commit

        def fail() -> None:
            if self.happens:
                commit()
            else:
                writer.rollback()
            raise error

        writer.commit = fail  # type: ignore[method-assign]
        return writer


@pytest.mark.parametrize("release", ["commit", "now"])
def test_what_comes_out_is_the_same_however_often_it_crashes(release: Release) -> None:
    draw = random.Random(11)
    for _ in range(5):
        script = {
            at: (draw.choice(["every", "timed"]), draw.randint(2, 5), draw.randint(5, 60))
            for at in range(1, 60, 9)
        }
        plain, crashed = Life(release=release), Life(release=release)
        furthest = 0
        for at in range(1, 90):
            for life in (plain, crashed):
                life.run(at)
            while furthest < at:
                furthest += 1
                for life in (plain, crashed):
                    _act(life, script, furthest)
            match draw.randrange(12):
                case 0 | 1:
                    crashed = crashed.crash()
                    crashed.run(at)
                case 2 | 3:
                    crashed.engine.checkpoint()
                case 4:
                    crashed.engine.checkpoint(CheckpointKind.FULL)
        for life in (plain, crashed):
            life.engine.checkpoint()
            life.run(90)
            life.engine.checkpoint()
            life.engine.deliver()
        assert plain.sink.values == crashed.sink.values
        assert len(plain.sink.values) > 20
        assert plain.engine.queries == crashed.engine.queries


def _act(life: Life, script: dict[int, tuple[str, int, int]], at: int) -> None:
    if at in script:
        factory, size, _ = script[at]
        life.engine.start(f"q{at}", factory, {"count" if factory == "every" else "seconds": size}, sink="out")
    for begun, (_, _, lasts) in script.items():
        if begun + lasts == at and at < 60:
            life.engine.stop(f"q{begun}")


def test_a_source_is_acknowledged_by_checkpoints_only() -> None:
    life = Life()
    life.run(5)
    assert life.source.acknowledged == -1
    life.engine.checkpoint()
    assert life.source.acknowledged == 4
    assert life.crash().source.next == 5


def test_a_differential_checkpoint_writes_what_changed() -> None:
    life = Life()
    life.engine.start_many(
        [Start(f"q{n}", "every", {"count": 100, "modulo": 7 + n}, "out") for n in range(50)]
    )
    life.run(1)
    life.engine.checkpoint()
    before = life.store.content()
    life.run(8)  # 7 is for q0 only
    life.engine.checkpoint()
    after = life.store.content()
    changed = {
        (category, key)
        for category in after
        for key in after[category]
        if after[category][key] != before.get(category, {}).get(key)
    }
    assert not [key for category, key in changed if category == "query/artifact"]
    assert {category for category, _ in changed if "objects" in category} == {
        "query/objects/state/item/q0%230%23values/items",
        "query/objects/state/item/q0%230%23values/metadata",
    }


@pytest.mark.parametrize("happens", [False, True])
@pytest.mark.parametrize("error", [CommitUnknown("power"), DiskFull("full")])
def test_a_commit_that_fails_is_made_up_for_by_the_next(happens: bool, error: Exception) -> None:
    if isinstance(error, DiskFull) and happens:
        return
    store = BadCommits()
    life = Life(store)
    life.engine.start("q", "every", {"count": 3}, sink="out")
    life.run(4)
    store.error, store.happens = error, happens
    with pytest.raises(type(error)):
        life.engine.checkpoint()
    assert (life.source.acknowledged, life.engine.state) == (-1, EngineState.RUNNING)
    life.run(7)
    life.engine.checkpoint()
    after = life.crash()
    after.run(9)
    after.engine.checkpoint()
    after.engine.deliver()
    assert after.sink.values == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]


def test_what_a_failed_checkpoint_would_have_deleted_is_deleted_by_the_next() -> None:
    life = Life(store := BadCommits())
    life.engine.start("q", "every", {"count": 3}, sink="out")
    life.run(2)
    life.engine.checkpoint()
    store.error = DiskFull("full")
    with pytest.raises(DiskFull):
        life.engine.stop("q")
    life.engine.checkpoint()
    content = store.content()
    assert not [category for category in content if "item/q" in category]
    assert "query/artifact" not in content
    assert life.crash().engine.queries == {}


def test_a_query_that_begins_among_those_that_wait_for_nothing_is_in_a_checkpoint() -> None:
    for release, is_logged in (("commit", True), ("now", False)):
        life = Life(release=release)  # type: ignore[arg-type]
        life.run(3)
        life.engine.start("q", "every", {"count": 3}, sink="out")
        content = life.store.content()
        assert ((LOG in content), ("q" in content.get("query/artifact", {}))) == (is_logged, not is_logged)
        assert life.crash().source.next == (0 if is_logged else 3)


def test_what_could_not_be_logged_was_not_started() -> None:
    store = BadCommits()
    for release in ("commit", "now"):
        life = Life(store, release=release)  # type: ignore[arg-type]
        store.error = DiskFull("full")
        with pytest.raises(DiskFull):
            life.engine.start("q", "every", {"count": 3}, sink="out")
        assert life.engine.queries == {}
        life.engine.start("q", "every", {"count": 3}, sink="out")
        life.engine.stop("q")
        life.engine.unload()


def test_queries_and_definitions_made_since_the_checkpoint_outlive_a_crash() -> None:
    life = Life()
    life.engine.define("pairs", "every", {"count": 2})
    life.engine.start("old", "pairs", {"modulo": 2})
    life.engine.checkpoint()
    life.run(4)
    life.engine.start("new", "pairs", sink="out")
    life.engine.stop("old")
    life.engine.undefine("pairs")
    life.engine.define("threes", "every", {"count": 3})
    after = life.crash()
    assert (after.engine.queries, list(after.engine.definitions)) == ({"new": None}, ["threes"])
    after.run(6)
    after.engine.checkpoint()
    after.engine.deliver()
    assert after.sink.values == [[4, 5]]  # not what came before it was started
    assert LOG not in after.store.content()
    assert after.crash().engine.queries == {"new": None}


def test_a_query_stopped_and_started_again_between_checkpoints_begins_anew() -> None:
    life = Life()
    life.engine.start("q", "every", {"count": 3})
    life.run(2)
    life.engine.checkpoint()
    life.engine.stop("q")
    life.engine.start("q", "every", {"count": 2}, sink="out")
    assert len(life.store.content()[LOG]) == 2
    after = life.crash()
    after.run(5)
    after.engine.checkpoint()
    after.engine.deliver()
    assert after.sink.values == [[2, 3]]
    assert after.crash().engine.queries == {"q": None}


def test_a_query_that_fails_ends_alone_and_its_error_is_kept() -> None:
    ended: list[Any] = []
    life = Life(on_query_ended=lambda *end: ended.append(end))
    life.engine.start("bad", "fragile", sink="out")
    life.engine.start("good", "every", {"count": 5}, sink="out")
    life.run(5)
    assert [(query_id, type(error)) for query_id, error in ended] == [("bad", ZeroDivisionError)]
    life.engine.checkpoint()
    after = life.crash()
    assert set(after.engine.queries) == {"bad", "good"}
    assert "ZeroDivisionError" in (after.engine.queries["bad"] or "")
    after.engine.stop("bad")
    assert after.engine.queries == {"good": None}


def test_a_finished_query_stays_finished() -> None:
    life = Life()
    life.engine.start("q", "timed", {"seconds": 2, "most": 2}, sink="out")
    life.run(10)
    assert life.engine.queries == {"q": ""}
    life.engine.checkpoint()
    after = life.crash()
    after.run(20)
    assert (after.engine.queries, after.output.buffer.end) == ({"q": ""}, 2)


def test_sources_are_refused_while_an_output_is_full_and_nothing_is_lost() -> None:
    life = Life(limit=3)
    life.engine.start("q", "every", {"count": 1}, sink="out")
    with pytest.raises(Backlogged):
        life.source.pump(10)
    assert life.source.next == 3
    life.engine.checkpoint()
    life.run(3)
    life.source.pump(6)
    assert life.sink.values == [[0], [1], [2]]


def test_a_gap_is_raised_to_the_source() -> None:
    life = Life()
    life.source.next = 2
    with pytest.raises(SequenceGap):
        life.source.pump(3)


@factories("sums")
def sums(count: int) -> Observable[Any]:
    return Source("between").pipe(buffer_with_count(count), ops.map(lambda lists: sum(chain(*lists))))


@pytest.mark.parametrize("release", ["commit", "now"])
def test_queries_of_queries_are_exact_over_crashes(release: Release) -> None:
    draw = random.Random(2)
    store, sink, acknowledged, position = MemoryStore(), Sink(), -1, 0
    for _ in range(25):
        source = Numbers()
        source.acknowledged = acknowledged
        store = MemoryStore(store.content())
        engine = QueryEngine(store, factories, VirtualScheduler())
        engine.add_source("numbers", source, time_of=lambda value: value * 10**9)
        engine.add_source("between", engine.add_sink("between", release=release, limit=3))
        output = engine.add_sink("out", release=release)
        engine.recover()
        output.subscribe(sink).start(RESUME)
        if not engine.queries:
            engine.start("lists", "every", {"count": 2}, sink="between")
            engine.start("sums", "sums", {"count": 2}, sink="out")
        for _ in range(draw.randint(3, 9)):
            position = engine.watermarks["numbers"] + 1
            with contextlib.suppress(Backlogged):
                source.pump(position + draw.randint(1, 9))
            draw.choice([engine.deliver, engine.deliver, engine.checkpoint])()
        acknowledged = source.acknowledged
    assert len(sink.values) > 10
    assert sink.values == [16 * n + 6 for n in range(len(sink.values))]


# What cannot be recovered


def _broken() -> Life:
    life = Life()
    life.engine.start("bad", "every", {"count": 3}, sink="out")
    life.engine.start("good", "every", {"count": 4}, sink="out")
    life.run(5)
    life.engine.checkpoint()
    content = life.store.content()
    content["query/artifact"]["bad"] = content["query/artifact"]["bad"].replace(b"where", b"other")
    life.store = MemoryStore(content)
    return life


def test_a_query_that_cannot_be_loaded_fails_the_recovery_unless_somebody_says_what_to_do() -> None:
    life = _broken()
    with pytest.raises(StateMismatch):
        life.crash()


@pytest.mark.parametrize(
    ("mitigation", "queries", "values"),
    [
        (Mitigation.IGNORE, {"bad", "good"}, [[0, 1, 2], [0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]),
        (Mitigation.REMOVE, {"good"}, [[0, 1, 2], [0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]),
        (
            Mitigation.REGENERATE,
            {"bad", "good"},
            [[0, 1, 2], [0, 1, 2, 3], [4, 5, 6, 7], [5, 6, 7], [8, 9, 10], [8, 9, 10, 11]],
        ),
    ],
)
@pytest.mark.parametrize("kind", list(CheckpointKind))
def test_mitigations(
    mitigation: Mitigation, queries: set[str], values: list[Any], kind: CheckpointKind
) -> None:
    life = _broken()
    stored = life.store.content()["query/artifact"]["bad"]
    after = life.crash(on_load_failed=lambda query_id, error: mitigation)
    after.run(12)
    after.engine.checkpoint(kind)
    after.engine.deliver()
    assert after.sink.values == values
    assert set(after.engine.queries) == queries
    content = after.store.content()
    is_kept = content["query/artifact"].get("bad") == stored
    assert is_kept is (mitigation is Mitigation.IGNORE)
    objects = [each for each in content if "bad" in each]
    assert bool(objects) is (mitigation is not Mitigation.REMOVE)
    again = MemoryStore(content)
    if mitigation is not Mitigation.IGNORE:
        Life(again, Sink(), 11)
    else:
        with pytest.raises(StateMismatch):
            Life(again, Sink(), 11)


def test_a_query_whose_factory_or_sink_is_gone_is_not_lost() -> None:
    life = _broken()
    engine = QueryEngine(MemoryStore(life.store.content()), Factories(), VirtualScheduler())
    engine.add_source("numbers", Numbers())
    with pytest.raises(NoSuchQuery, match="factory"):
        engine.recover()
    assert engine.state is EngineState.UNLOADED


def test_a_new_query_that_was_ignored_begins_when_it_can_be_built() -> None:
    life = Life()
    life.engine.start("q", "every", {"count": 2}, sink="out")
    life.run(2)
    store, other = life.store, Factories()
    for _ in range(2):
        engine = QueryEngine(
            store, other, VirtualScheduler(), on_load_failed=lambda query_id, error: Mitigation.IGNORE
        )
        engine.add_source("numbers", Numbers(), time_of=lambda value: value * 10**9)
        engine.add_sink("out")
        engine.recover()
        engine.checkpoint()
        engine.unload()
    assert LOG not in store.content()
    after = Life(MemoryStore(store.content()))
    after.run(4)
    after.engine.checkpoint()
    after.engine.deliver()
    assert after.sink.values == [[0, 1], [2, 3]]


@pytest.mark.parametrize("breaks", [KeyboardInterrupt, SystemExit])
def test_what_an_interrupt_broke_off_is_never_saved(breaks: type[BaseException]) -> None:
    life = Life()
    life.engine.start("q", "every", {"count": 2}, sink="out")
    life.engine.start("interrupted", "interrupted", {"at": 3})
    to_raise.append(breaks)
    life.run(2)
    life.engine.checkpoint()
    with pytest.raises(breaks):
        life.run(5)
    before = life.store.content()
    with pytest.raises(WrongState, match="was interrupted"):
        life.engine.checkpoint()
    assert life.store.content() == before
    life.engine.unload()
    after = life.crash()
    after.run(6)
    after.engine.checkpoint()
    after.engine.deliver()
    assert after.sink.values == [[0, 1], [2, 3], [4, 5]]


to_raise: list[type[BaseException]] = []


@factories("interrupted")
def interrupted(at: int) -> Observable[Any]:
    def look(value: int) -> bool:
        if value == at and to_raise:
            raise to_raise.pop()
        return True

    return Source("numbers").pipe(where(look))


class Unsavable(Operator[int, int]):
    """Has a state that JSON knows no word for, from 3 on."""

    __slots__ = ("_state",)
    NAME = "unsavable"

    def __init__(self) -> None:
        self._state: Any = None

    def on_next(self, value: int, /) -> None:
        self._state = object() if value == 3 else value
        self.changed()

    def save_state(self) -> Any:
        return self._state


factories.add("unsavable", lambda: Source("numbers").pipe(applied(Unsavable)))


def test_a_query_that_cannot_be_saved_fails_the_checkpoint_or_ends() -> None:
    life = Life()
    life.engine.start("bad", "unsavable")
    life.run(4)
    with pytest.raises(NotSerializable):
        life.engine.checkpoint()
    assert life.source.acknowledged == -1
    life = Life(on_save_failed=lambda query_id, error: Mitigation.REMOVE)
    life.engine.start("bad", "unsavable")
    life.run(4)
    life.engine.checkpoint()
    assert "NotSerializable" in (life.engine.queries["bad"] or "")
    assert life.crash().engine.queries == life.engine.queries


# Misuse, and states


def test_misuse_is_refused_by_type() -> None:
    life = Life()
    engine = life.engine
    with pytest.raises(NoSuchQuery, match="factory"):
        engine.start("q", "none")
    with pytest.raises(NoSuchQuery, match="sink"):
        engine.start("q", "every", {"count": 1}, sink="none")
    with pytest.raises(TypeError):
        engine.start("q", "every", {"no": 1})
    with pytest.raises(NotSerializable):
        engine.start("q", "every", {"count": 1, "modulo": object()})
    with pytest.raises(InvalidName):
        engine.start("a/b", "every", {"count": 1})
    engine.start("q", "every", {"count": 1})
    with pytest.raises(QueryExists):
        engine.start("q", "every", {"count": 1})
    with pytest.raises(NoSuchQuery):
        engine.stop("other")
    with pytest.raises(NoSuchQuery):
        engine.undefine("other")
    with pytest.raises(QueryExists):
        engine.define("every", "every")
    with pytest.raises(QueryExists):
        engine.add_sink("out")
    with pytest.raises(QueryExists):
        engine.add_source("numbers", Numbers())
    assert engine.queries == {"q": None}


def test_an_engine_is_recovered_once_before_it_is_used() -> None:
    engine = QueryEngine(MemoryStore(), factories)
    with pytest.raises(WrongState, match="recover first"):
        engine.start("q", "every", {"count": 1})
    engine.recover()
    with pytest.raises(WrongState):
        engine.recover()


def test_an_engine_that_is_called_by_its_own_queries_says_so() -> None:
    caught: list[BaseException] = []

    def meddle(query_id: str, error: object) -> None:
        try:
            life.engine.stop(query_id)
        except WrongState as wrong:
            caught.append(wrong)

    life = Life(on_query_ended=meddle)
    life.engine.start("q", "timed", {"seconds": 1, "most": 1})
    life.run(3)
    assert len(caught) == 1


def test_an_unloaded_engine_lets_everything_go_and_stores_nothing() -> None:
    life = Life()
    life.engine.start("q", "every", {"count": 1}, sink="out")
    life.run(3)
    before = life.store.content()
    life.engine.unload()
    life.engine.unload()
    assert (life.source.is_disposed, life.engine.state) == (True, EngineState.UNLOADED)
    assert life.store.content() == before
    for use in (life.engine.checkpoint, life.engine.recover, lambda: life.engine.stop("q")):
        with pytest.raises(WrongState):
            use()


def test_queries_run_while_a_checkpoint_is_committed_and_others_are_refused() -> None:
    class Slow(MemoryStore):
        def begin(self, kind: CheckpointKind) -> Any:
            writer = super().begin(kind)
            commit = writer.commit

            def wait() -> None:
                committing.set()
                assert go_on.wait(60)
                commit()

            if is_slow.is_set():
                writer.commit = wait  # type: ignore[method-assign]
            return writer

    committing, go_on, is_slow = threading.Event(), threading.Event(), threading.Event()
    life = Life(Slow())
    life.engine.start("q", "every", {"count": 1}, sink="out")
    life.run(2)
    is_slow.set()
    thread = threading.Thread(target=life.engine.checkpoint)
    thread.start()
    try:
        assert committing.wait(60)
        assert life.engine.state is EngineState.CHECKPOINTING
        life.run(4)
        with pytest.raises(WrongState):
            life.engine.checkpoint()
        assert life.sink.values == []
    finally:
        is_slow.clear()
        go_on.set()
        thread.join()
    life.engine.deliver()
    assert (life.sink.values, life.source.acknowledged) == ([[0], [1]], 1)


# The log


@pytest.mark.parametrize("earlier", [None, *Change])
@pytest.mark.parametrize("later", list(Change))
def test_changes_are_coalesced_to_what_they_are_together(earlier: Change | None, later: Change) -> None:
    def apply(change: Change, there: int) -> int | None:
        """What is there, as 0 nothing, 1 the old one, 2 a new one; None if it cannot happen."""
        match change:
            case Change.CREATE:
                return 2 if there == 0 else None
            case Change.DELETE:
                return 0 if there else None
            case Change.DELETE_CREATE:
                return 2 if there else None

    outcomes = {}
    for there in (0, 1):
        between = there if earlier is None else apply(earlier, there)
        outcomes[there] = None if between is None else apply(later, between)
    if outcomes == {0: None, 1: None}:
        with pytest.raises(LogConflict):
            combine(earlier, later, "q")
        return
    as_one = combine(earlier, later, "q")
    assert outcomes == {there: apply(as_one, there) if as_one else (there or None) for there in (0, 1)} or (
        as_one is None and outcomes == {0: 0, 1: None}
    )


def test_entries_of_other_keys_do_not_matter() -> None:
    entries = [LogEntry("query", "a", b"1"), LogEntry("query", "b", None), LogEntry("query", "a", None)]
    assert [(each.key, each.change) for each in coalesce(entries)] == [("b", Change.DELETE)]


def test_a_log_that_contradicts_the_checkpoint_fails_the_recovery() -> None:
    life = Life()
    life.engine.start("q", "every", {"count": 1}, sink="out")
    life.engine.checkpoint()
    content = life.store.content()
    content[LOG] = {"000000000009": LogEntry("query", "none", None).encode()}
    life.store = MemoryStore(content)
    with pytest.raises(LogConflict):
        life.crash()
    assert life.crash(on_load_failed=lambda *_: Mitigation.REMOVE).engine.queries == {"q": None}
    content[LOG] = {"x": b"{}"}
    life.store = MemoryStore(content)
    with pytest.raises(StateDamaged):
        life.crash()
