"""The query engine: checkpoints, crashes, its transaction log, mitigations and states."""

from __future__ import annotations

import contextlib
import random
import threading
from itertools import chain
from typing import Any

import pytest
from query_engines import FailingStore, Numbers, Sink

from rt.errors import DiskFull, InvalidName
from rt.objects import CheckpointKind, CommitUnknown, MemoryStore, NotSerializable, StateDamaged
from rt.objects.memory_store import MemoryWriter
from rt.query import operators as ops
from rt.query.checkpoint.edge import Release
from rt.query.checkpoint.factories import Factories
from rt.query.checkpoint.recovery import Mitigation
from rt.query.checkpoint.transaction_log import LOG, LogEntry, net_change
from rt.query.core.errors import (
    Backlogged,
    LogConflict,
    NoSuchQuery,
    QueryExists,
    SequenceGap,
    StateMismatch,
    WrongState,
)
from rt.query.core.lifecycle import EngineState, EventLock
from rt.query.core.observable import Observable, applied
from rt.query.core.operator import Operator
from rt.query.core.reliable import RESUME
from rt.query.core.scheduler import VirtualScheduler
from rt.query.core.source import Source
from rt.query.engine import QueryEngine
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


class Process:
    """A process with an engine. `store`, `sink` and `acknowledged` are from the previous process."""

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
        self.source = Numbers(acknowledged)
        self.engine = QueryEngine(self.store, factories, VirtualScheduler(), **more)
        self.engine.add_source("numbers", self.source, time_of=lambda value: value * 10**9)
        self.output = self.engine.add_sink("out", release=release, limit=limit)
        self.engine.recover()
        self.subscription = self.output.subscribe(self.sink)
        self.subscription.start(RESUME)

    def crash(self, **more: Any) -> Process:
        """Start another process on the content of the last commit."""
        store = MemoryStore(self.store.content())
        return Process(store, self.sink, self.source.acknowledged, release=self.release, **more)

    def feed(self, end: int) -> None:
        """Process the numbers below `end`, and acknowledge the output."""
        self.source.pump(end)
        self.engine.deliver()
        if self.sink.values:
            self.subscription.acknowledge(min(len(self.sink.values), self.output.buffer.end) - 1)


@pytest.mark.parametrize("release", ["commit", "now"])
def test_crashes_do_not_change_output(release: Release) -> None:
    draw = random.Random(11)
    for _ in range(5):
        script = {
            at: (draw.choice(["every", "timed"]), draw.randint(2, 5), draw.randint(5, 60))
            for at in range(1, 60, 9)
        }
        plain, crashed = Process(release=release), Process(release=release)
        furthest = 0
        for at in range(1, 90):
            for process in (plain, crashed):
                process.feed(at)
            while furthest < at:
                furthest += 1
                for process in (plain, crashed):
                    _act(process, script, furthest)
            match draw.randrange(12):
                case 0 | 1:
                    crashed = crashed.crash()
                    crashed.feed(at)
                case 2 | 3:
                    crashed.engine.checkpoint()
                case 4:
                    crashed.engine.checkpoint(CheckpointKind.FULL)
        for process in (plain, crashed):
            process.engine.checkpoint()
            process.feed(90)
            process.engine.checkpoint()
            process.engine.deliver()
        assert plain.sink.values == crashed.sink.values
        assert len(plain.sink.values) > 20
        assert plain.engine.queries == crashed.engine.queries


def _act(process: Process, script: dict[int, tuple[str, int, int]], at: int) -> None:
    if at in script:
        factory, size, _ = script[at]
        process.engine.start(
            f"q{at}", factory, {"count" if factory == "every" else "seconds": size}, sink="out"
        )
    for started_at, (_, _, lasts) in script.items():
        if started_at + lasts == at and at < 60:
            process.engine.stop(f"q{started_at}")


def test_source_is_acknowledged_only_by_checkpoints() -> None:
    process = Process()
    process.feed(5)
    assert process.source.acknowledged == -1
    process.engine.checkpoint()
    assert process.source.acknowledged == 4
    assert process.crash().source.next == 5


def test_differential_checkpoint_writes_only_changed_rows() -> None:
    process = Process()
    process.engine.start_many(
        [Start(f"q{n}", "every", {"count": 100, "modulo": 7 + n}, "out") for n in range(50)]
    )
    process.feed(1)
    process.engine.checkpoint()
    before = process.store.content()
    process.feed(8)  # 7 is for q0 only
    process.engine.checkpoint()
    after = process.store.content()
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
def test_next_checkpoint_saves_changes_of_failed_commit(happens: bool, error: Exception) -> None:
    if isinstance(error, DiskFull) and happens:
        return
    store = FailingStore()
    process = Process(store)
    process.engine.start("q", "every", {"count": 3}, sink="out")
    process.feed(4)
    store.fail_once(error, happens=happens)
    with pytest.raises(type(error)):
        process.engine.checkpoint()
    assert (process.source.acknowledged, process.engine.state) == (-1, EngineState.RUNNING)
    process.feed(7)
    process.engine.checkpoint()
    after = process.crash()
    after.feed(9)
    after.engine.checkpoint()
    after.engine.deliver()
    assert after.sink.values == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]


def test_next_checkpoint_deletes_rows_of_query_after_failed_stop() -> None:
    process = Process(store := FailingStore())
    process.engine.start("q", "every", {"count": 3}, sink="out")
    process.feed(2)
    process.engine.checkpoint()
    store.fail_once(DiskFull("full"))
    with pytest.raises(DiskFull):
        process.engine.stop("q")
    process.engine.checkpoint()
    content = store.content()
    assert not [category for category in content if "item/q" in category]
    assert "query/artifact" not in content
    assert process.crash().engine.queries == {}


def test_query_start_is_logged_for_commit_output_and_checkpointed_for_now_output() -> None:
    for release, is_logged in (("commit", True), ("now", False)):
        process = Process(release=release)  # type: ignore[arg-type]
        process.feed(3)
        process.engine.start("q", "every", {"count": 3}, sink="out")
        content = process.store.content()
        assert ((LOG in content), ("q" in content.get("query/artifact", {}))) == (is_logged, not is_logged)
        assert process.crash().source.next == (0 if is_logged else 3)


def test_query_is_not_started_if_its_start_cannot_be_stored() -> None:
    store = FailingStore()
    for release in ("commit", "now"):
        process = Process(store, release=release)  # type: ignore[arg-type]
        store.fail_once(DiskFull("full"))
        with pytest.raises(DiskFull):
            process.engine.start("q", "every", {"count": 3}, sink="out")
        assert process.engine.queries == {}
        process.engine.start("q", "every", {"count": 3}, sink="out")
        process.engine.stop("q")
        process.engine.unload()


def test_changes_of_queries_and_definitions_after_checkpoint_survive_crash() -> None:
    process = Process()
    process.engine.define("pairs", "every", {"count": 2})
    process.engine.start("old", "pairs", {"modulo": 2})
    process.engine.checkpoint()
    process.feed(4)
    process.engine.start("new", "pairs", sink="out")
    process.engine.stop("old")
    process.engine.undefine("pairs")
    process.engine.define("threes", "every", {"count": 3})
    after = process.crash()
    assert (after.engine.queries, list(after.engine.definitions)) == ({"new": None}, ["threes"])
    after.feed(6)
    after.engine.checkpoint()
    after.engine.deliver()
    assert after.sink.values == [[4, 5]]  # no values from before its start
    assert LOG not in after.store.content()
    assert after.crash().engine.queries == {"new": None}


def test_query_stopped_and_started_between_checkpoints_starts_with_empty_state() -> None:
    process = Process()
    process.engine.start("q", "every", {"count": 3})
    process.feed(2)
    process.engine.checkpoint()
    process.engine.stop("q")
    process.engine.start("q", "every", {"count": 2}, sink="out")
    assert len(process.store.content()[LOG]) == 2
    after = process.crash()
    after.feed(5)
    after.engine.checkpoint()
    after.engine.deliver()
    assert after.sink.values == [[2, 3]]
    assert after.crash().engine.queries == {"q": None}


def test_failing_query_ends_alone_and_its_error_survives_crash() -> None:
    ended: list[Any] = []
    process = Process(on_query_ended=lambda *end: ended.append(end))
    process.engine.start("bad", "fragile", sink="out", on_error="stop")
    process.engine.start("good", "every", {"count": 5}, sink="out")
    process.feed(5)
    assert [(query_id, type(error)) for query_id, error in ended] == [("bad", ZeroDivisionError)]
    process.engine.checkpoint()
    after = process.crash()
    assert set(after.engine.queries) == {"bad", "good"}
    assert "ZeroDivisionError" in (after.engine.queries["bad"] or "")
    after.engine.stop("bad")
    assert after.engine.queries == {"good": None}


def test_finished_query_stays_finished_after_crash() -> None:
    process = Process()
    process.engine.start("q", "timed", {"seconds": 2, "most": 2}, sink="out")
    process.feed(10)
    assert process.engine.queries == {"q": ""}
    process.engine.checkpoint()
    after = process.crash()
    after.feed(20)
    assert (after.engine.queries, after.output.buffer.end) == ({"q": ""}, 2)


def test_source_gets_backlogged_while_output_is_full_without_loss() -> None:
    process = Process(limit=3)
    process.engine.start("q", "every", {"count": 1}, sink="out")
    with pytest.raises(Backlogged):
        process.source.pump(10)
    assert process.source.next == 3
    process.engine.checkpoint()
    process.feed(3)
    process.source.pump(6)
    assert process.sink.values == [[0], [1], [2]]


def test_gap_raises_sequence_gap_to_source() -> None:
    process = Process()
    process.source.next = 2
    with pytest.raises(SequenceGap):
        process.source.pump(3)


@factories("sums")
def sums(count: int) -> Observable[Any]:
    return Source("between").pipe(buffer_with_count(count), ops.map(lambda lists: sum(chain(*lists))))


@pytest.mark.parametrize("release", ["commit", "now"])
def test_chained_queries_deliver_each_result_once_despite_crashes(release: Release) -> None:
    draw = random.Random(2)
    store, sink, acknowledged, position = MemoryStore(), Sink(), -1, 0
    for _ in range(25):
        source = Numbers(acknowledged)
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


# Failed recovery


def _broken() -> Process:
    process = Process()
    process.engine.start("bad", "every", {"count": 3}, sink="out")
    process.engine.start("good", "every", {"count": 4}, sink="out")
    process.feed(5)
    process.engine.checkpoint()
    content = process.store.content()
    content["query/artifact"]["bad"] = content["query/artifact"]["bad"].replace(b"where", b"other")
    process.store = MemoryStore(content)
    return process


def test_recovery_fails_by_default_if_a_query_cannot_be_loaded() -> None:
    process = _broken()
    with pytest.raises(StateMismatch):
        process.crash()


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
def test_mitigation_ignores_removes_or_regenerates_query_that_cannot_be_loaded(
    mitigation: Mitigation, queries: set[str], values: list[Any], kind: CheckpointKind
) -> None:
    process = _broken()
    stored = process.store.content()["query/artifact"]["bad"]
    after = process.crash(on_load_failed=lambda query_id, error: mitigation)
    after.feed(12)
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
        Process(again, Sink(), 11)
    else:
        with pytest.raises(StateMismatch):
            Process(again, Sink(), 11)


def test_recovery_fails_if_a_factory_is_missing() -> None:
    process = _broken()
    engine = QueryEngine(MemoryStore(process.store.content()), Factories(), VirtualScheduler())
    engine.add_source("numbers", Numbers())
    with pytest.raises(NoSuchQuery, match="factory"):
        engine.recover()
    assert engine.state is EngineState.UNLOADED


def test_ignored_new_query_starts_once_its_factory_is_available() -> None:
    process = Process()
    process.engine.start("q", "every", {"count": 2}, sink="out")
    process.feed(2)
    process.engine.unload()
    store, other = process.store, Factories()
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
    after = Process(MemoryStore(store.content()))
    after.feed(4)
    after.engine.checkpoint()
    after.engine.deliver()
    assert after.sink.values == [[0, 1], [2, 3]]


@pytest.mark.parametrize("breaks", [KeyboardInterrupt, SystemExit])
def test_checkpoint_after_interrupted_event_raises_wrong_state(breaks: type[BaseException]) -> None:
    process = Process()
    process.engine.start("q", "every", {"count": 2}, sink="out")
    process.engine.start("interrupted", "interrupted", {"at": 3})
    to_raise.append(breaks)
    process.feed(2)
    process.engine.checkpoint()
    with pytest.raises(breaks):
        process.feed(5)
    before = process.store.content()
    with pytest.raises(WrongState, match="was interrupted"):
        process.engine.checkpoint()
    assert process.store.content() == before
    process.engine.unload()
    after = process.crash()
    after.feed(6)
    after.engine.checkpoint()
    after.engine.deliver()
    assert after.sink.values == [[0, 1], [2, 3], [4, 5]]


@pytest.mark.parametrize("what", ["a checkpoint", "an entry of the log"])
def test_interrupt_before_commit_does_not_block_later_commits(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = Process()
    process.engine.start("q", "every", {"count": 2}, sink="out")
    process.feed(3)

    def interrupt(_: MemoryWriter) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(MemoryWriter, "commit", interrupt)
        if what == "a checkpoint":
            process.engine.checkpoint()
        else:
            process.engine.start("other", "every", {"count": 2}, sink="out")
    process.store.begin(CheckpointKind.FULL).rollback()
    process.engine.unload()


@pytest.mark.parametrize("waiting", ["for the state", "to record the commit"])
def test_interrupt_while_checkpoint_waits_for_event_lock_does_not_block_next_engine(
    waiting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = Process()
    process.engine.start("q", "every", {"count": 2}, sink="out")
    process.feed(3)
    waits, take = 0, EventLock.next

    def interrupted(lock: EventLock) -> contextlib.AbstractContextManager[None]:
        nonlocal waits
        waits += 1
        if waits == (1 if waiting == "for the state" else 2):
            raise KeyboardInterrupt
        return take(lock)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(EventLock, "next", interrupted)
        process.engine.checkpoint()
    if waiting == "for the state":
        process.engine.checkpoint()
    else:
        with pytest.raises(WrongState, match="make another one on the same store"):
            process.engine.checkpoint()
    process.engine.unload()
    after = Process(process.store, process.sink, process.source.acknowledged)
    assert after.engine.watermarks == {"numbers": 2}
    after.feed(4)
    after.engine.checkpoint()
    after.engine.deliver()
    assert after.sink.values == [[0, 1], [2, 3]]


to_raise: list[type[BaseException]] = []


@factories("interrupted")
def interrupted(at: int) -> Observable[Any]:
    def look(value: int) -> bool:
        if value == at and to_raise:
            raise to_raise.pop()
        return True

    return Source("numbers").pipe(where(look))


class Unsavable(Operator[int, int]):
    """An operator whose state cannot be stored from value 3 on."""

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


def test_unserializable_query_fails_checkpoint_or_ends_by_mitigation() -> None:
    process = Process()
    process.engine.start("bad", "unsavable")
    process.feed(4)
    with pytest.raises(NotSerializable):
        process.engine.checkpoint()
    assert process.source.acknowledged == -1
    process = Process(on_save_failed=lambda query_id, error: Mitigation.REMOVE)
    process.engine.start("bad", "unsavable")
    process.feed(4)
    process.engine.checkpoint()
    assert "NotSerializable" in (process.engine.queries["bad"] or "")
    assert process.crash().engine.queries == process.engine.queries


# Misuse, and states


def test_engine_misuse_raises_typed_errors() -> None:
    process = Process()
    engine = process.engine
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


def test_engine_must_be_recovered_exactly_once_before_use() -> None:
    engine = QueryEngine(MemoryStore(), factories)
    with pytest.raises(WrongState, match="recover first"):
        engine.start("q", "every", {"count": 1})
    engine.recover()
    with pytest.raises(WrongState):
        engine.recover()


def test_engine_call_from_its_own_callback_raises_wrong_state() -> None:
    caught: list[BaseException] = []

    def meddle(query_id: str, error: object) -> None:
        try:
            process.engine.stop(query_id)
        except WrongState as wrong:
            caught.append(wrong)

    process = Process(on_query_ended=meddle)
    process.engine.start("q", "timed", {"seconds": 1, "most": 1})
    process.feed(3)
    assert len(caught) == 1


def test_unload_disposes_sources_and_stores_nothing() -> None:
    process = Process()
    process.engine.start("q", "every", {"count": 1}, sink="out")
    process.feed(3)
    before = process.store.content()
    process.engine.unload()
    process.engine.unload()
    assert (process.source.is_disposed, process.engine.state) == (True, EngineState.UNLOADED)
    assert process.store.content() == before
    for use in (process.engine.checkpoint, process.engine.recover, lambda: process.engine.stop("q")):
        with pytest.raises(WrongState):
            use()


def test_queries_run_during_commit_while_second_checkpoint_is_rejected() -> None:
    class Slow(MemoryStore):
        def begin(self, kind: CheckpointKind) -> Any:
            writer = super().begin(kind)
            commit = writer.commit

            def wait() -> None:
                committing.set()
                assert go_on.wait(600)
                commit()

            if is_slow.is_set():
                writer.commit = wait  # type: ignore[method-assign]
            return writer

    committing, go_on, is_slow = threading.Event(), threading.Event(), threading.Event()
    process = Process(Slow())
    process.engine.start("q", "every", {"count": 1}, sink="out")
    process.feed(2)
    is_slow.set()
    thread = threading.Thread(target=process.engine.checkpoint)
    thread.start()
    try:
        assert committing.wait(600)
        assert process.engine.state is EngineState.CHECKPOINTING
        process.feed(4)
        with pytest.raises(WrongState):
            process.engine.checkpoint()
        assert process.sink.values == []
    finally:
        is_slow.clear()
        go_on.set()
        thread.join()
    process.engine.deliver()
    assert (process.sink.values, process.source.acknowledged) == ([[0], [1]], 1)


# The log


@pytest.mark.parametrize("exists", [False, True])
@pytest.mark.parametrize("length", range(1, 6))
def test_log_entries_of_one_key_combine_into_net_change(exists: bool, length: int) -> None:
    rows = [None if exists is (number % 2 == 0) else b"row" for number in range(length)]
    entries = [LogEntry("query", "q", row) for row in rows]
    expected = {(True, True): "delete-create", (True, False): "delete", (False, True): "create"}
    change = net_change(entries)
    assert (change and change.value) == expected.get((exists, rows[-1] is not None))
    if change is not None:  # Without a net change, recovery detects the conflict.
        with pytest.raises(LogConflict):
            net_change([*entries, entries[-1]])


def test_recovery_fails_if_log_contradicts_checkpoint_or_is_corrupt() -> None:
    process = Process()
    process.engine.start("q", "every", {"count": 1}, sink="out")
    process.engine.checkpoint()
    content = process.store.content()
    content[LOG] = {"000000000009": LogEntry("query", "none", None).encode()}
    process.store = MemoryStore(content)
    with pytest.raises(LogConflict):
        process.crash()
    assert process.crash(on_load_failed=lambda *_: Mitigation.REMOVE).engine.queries == {"q": None}
    content[LOG] = {"x": b"{}"}
    process.store = MemoryStore(content)
    with pytest.raises(StateDamaged):
        process.crash()
