"""A query engine that separate threads feed, checkpoint, change and unload at the same time."""

from __future__ import annotations

import threading
from typing import Any

from rt.objects import MemoryStore
from rt.query import (
    RESUME,
    EngineState,
    Factories,
    QueryEngine,
    RealScheduler,
    ReliableObserver,
    Source,
    WrongState,
)
from rt.query.operators import buffer_with_count, take

COUNT = 3000
WAIT_S = 30.0
"""The longest wait for a thread."""
factories = Factories()


@factories("lists")
def lists(size: int) -> Any:
    return Source("in").pipe(buffer_with_count(size))


@factories("first")
def first() -> Any:
    return Source("in").pipe(take(3))


class Feeding:
    """A source with its own thread."""

    is_dense = True

    def __init__(self) -> None:
        self.acknowledged = -1

    def subscribe(self, observer: ReliableObserver[int], /) -> Feeding:
        self.thread = threading.Thread(target=self._feed, args=(observer,))
        return self

    def start(self, sequence_id: int, /) -> None:
        assert sequence_id == 0

    def acknowledge(self, sequence_id: int, /) -> None:
        assert sequence_id >= self.acknowledged
        self.acknowledged = sequence_id

    def dispose(self) -> None:
        pass

    def _feed(self, observer: ReliableObserver[int]) -> None:
        for number in range(COUNT):
            observer.on_next(number, number)


class Results:
    def __init__(self) -> None:
        self.values: list[Any] = []

    def on_next(self, sequence_id: int, value: Any, /) -> None:
        assert sequence_id == len(self.values)
        self.values.append(value)

    def on_error(self, error: Exception, /) -> None: ...
    def on_completed(self) -> None: ...


def test_results_are_exact_while_three_threads_feed_checkpoint_and_change_engine() -> None:
    source, results, store = Feeding(), Results(), MemoryStore()
    engine = QueryEngine(store, factories, RealScheduler())
    engine.add_source("in", source)
    output = engine.add_sink("out")
    engine.recover()
    subscription = output.subscribe(results)
    subscription.start(RESUME)
    engine.start("lists", "lists", {"size": 7}, sink="out")
    source.thread.start()

    def change() -> None:
        for number in range(30):
            engine.start(f"q{number}", "first")
            engine.stop(f"q{number}")

    changing = threading.Thread(target=change)
    changing.start()
    while source.thread.is_alive() or changing.is_alive():
        engine.checkpoint()
        engine.deliver()
        if results.values:
            subscription.acknowledge(len(results.values) - 1)
    source.thread.join()
    changing.join()
    engine.checkpoint()
    engine.deliver()
    assert results.values == [list(range(n, n + 7)) for n in range(0, COUNT - 6, 7)]
    assert (source.acknowledged, engine.queries) == (COUNT - 1, {"lists": None})
    engine.unload()
    assert engine.state is EngineState.UNLOADED


class Gate:
    """A lock that the thread `second` gets only after another thread had it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.second: threading.Thread | None = None
        self.second_waits = threading.Event()
        self._was_held = threading.Event()

    def __enter__(self) -> None:
        if threading.current_thread() is self.second:
            self.second_waits.set()
            assert self._was_held.wait(WAIT_S)
            self._lock.acquire()
        else:
            self._lock.acquire()
            self._was_held.set()

    def __exit__(self, *error: object) -> None:
        self._lock.release()


class Joining(Feeding):
    """A source whose thread changes the engine. `dispose` waits for that thread."""

    def dispose(self) -> None:
        self.thread.join(WAIT_S)
        assert not self.thread.is_alive(), "unload and the thread of a source wait for each other"


def test_unload_holds_no_lock_while_source_joins_its_thread() -> None:
    engine, source, gate, errors = QueryEngine(MemoryStore(), factories), Joining(), Gate(), list[str]()
    engine.add_source("in", source)
    engine.recover()
    checkpointer: Any = engine._checkpointer
    checkpointer.writing = gate

    def start() -> None:
        try:
            engine.start("q", "first")
        except WrongState as error:
            errors.append(str(error))

    gate.second = source.thread = threading.Thread(target=start)
    source.thread.start()
    assert gate.second_waits.wait(WAIT_S)  # The engine was running when the thread started its call.
    engine.unload()
    assert engine.state is EngineState.UNLOADED
    assert len(errors) == 1
    assert "not running" in errors[0]
    source.thread.join()
