"""Engines that feed each other from several threads: chains, cycles, and locking sources."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import pytest
from query_engines import Numbers, Sink

from rt.objects import MemoryStore
from rt.query import (
    RESUME,
    Backlogged,
    EngineState,
    Factories,
    QueryEngine,
    ReliableObserver,
    Source,
    WrongState,
)
from rt.query.checkpoint.edge import OutputEdge, Release
from rt.query.operators import flat_map, take, where
from rt.query.operators import map as mapped
from rt.query.operators.creation import of

COUNT = 400
ROUNDS = 60
WAIT_S = 600

factories = Factories()
factories.add("doubled", lambda: Source("in").pipe(mapped(lambda x: 2 * x)))
factories.add("next", lambda end: Source("back").pipe(mapped(lambda x: x + 1), where(lambda x: x < end)))
factories.add("seen", lambda: Source("back").pipe(mapped(lambda x: x)))
factories.add("passed", lambda: Source("in").pipe(mapped(lambda x: x)))
factories.add("many", lambda count: Source("in").pipe(flat_map(lambda x: of(*[x] * count))))
factories.add("from", lambda source: Source(source).pipe(mapped(lambda x: x)))
factories.add("one", lambda: Source("in").pipe(take(1)))


class Threads:
    """Runs functions again and again, each in a thread, until the test has its results."""

    def __init__(self) -> None:
        self._is_over = threading.Event()
        self._threads: list[threading.Thread] = []
        self.errors: list[BaseException] = []

    def repeat(self, *steps: Callable[[], object]) -> None:
        def run() -> None:
            while not self._is_over.is_set():
                for step in steps:
                    try:
                        with contextlib.suppress(Backlogged):
                            step()
                    except BaseException as error:  # noqa: BLE001 - reported by the test
                        self.errors.append(error)
                        self._is_over.set()

        self._threads.append(threading.Thread(target=run, daemon=True))

    def run_until(self, done: threading.Event) -> None:
        """Fails if the results are not there in time, which means a deadlock."""
        for each in self._threads:
            each.start()
        is_done = done.wait(WAIT_S)
        self._is_over.set()
        for each in self._threads:
            each.join(WAIT_S)
        assert not self.errors, self.errors
        assert is_done, "the threads wait for each other"
        assert not any(each.is_alive() for each in self._threads)


class Last(Sink):
    """Sets `done` at the last of `count` values."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.done = threading.Event()
        self._count = count

    def on_next(self, sequence_id: int, value: Any, /) -> None:
        super().on_next(sequence_id, value)
        if len(self.values) == self._count:
            self.done.set()


def acknowledging(engine: QueryEngine, output: Any, sink: Last) -> Callable[[], None]:
    subscription = output.subscribe(sink)
    subscription.start(RESUME)

    def step() -> None:
        engine.deliver()
        if sink.values:
            subscription.acknowledge(len(sink.values) - 1)

    return step


def test_two_chained_engines_in_separate_threads_do_not_deadlock() -> None:
    numbers, sink, threads = Numbers(), Last(COUNT), Threads()
    first, second = QueryEngine(MemoryStore(), factories), QueryEngine(MemoryStore(), factories)
    first.add_source("in", numbers)
    between = first.add_sink("between", limit=50)
    first.recover()
    first.start("q", "doubled", sink="between")
    second.add_source("in", between)
    output = second.add_sink("out", limit=50)
    second.recover()
    second.start("q", "doubled", sink="out")
    feed = iter(range(1, 10**9))
    threads.repeat(lambda: numbers.pump(min(COUNT, next(feed))))
    threads.repeat(first.checkpoint, first.deliver)
    threads.repeat(second.checkpoint, acknowledging(second, output, sink))
    threads.run_until(sink.done)
    assert sink.values == [4 * n for n in range(COUNT)]
    for engine in (second, first):
        engine.unload()


def test_cycle_of_two_engines_delivers_each_value_once_without_deadlock() -> None:
    """A number goes around: the first engine adds 1 and sends it to the second, which sends it back."""
    numbers, sink, threads = Numbers(), Last(ROUNDS), Threads()
    first, second = QueryEngine(MemoryStore(), factories), QueryEngine(MemoryStore(), factories)
    first.add_source("in", numbers)
    first.add_source("back", second.add_sink("back"))
    second.add_source("in", first.add_sink("there"))
    output = first.add_sink("out")
    for engine in (first, second):
        engine.recover()
    first.start("start", "one", sink="there")
    first.start("around", "next", {"end": ROUNDS}, sink="there")
    first.start("seen", "seen", sink="out")
    second.start("q", "passed", sink="back")
    numbers.pump(1)
    threads.repeat(first.checkpoint, first.deliver)
    threads.repeat(second.checkpoint, second.deliver)
    threads.repeat(acknowledging(first, output, sink))
    threads.run_until(sink.done)
    assert sink.values == list(range(ROUNDS))
    for engine in (first, second):
        engine.unload()


@pytest.mark.parametrize("release", ["commit", "now"])
def test_output_as_source_of_its_own_engine_delivers_each_value_once(release: Release) -> None:
    numbers, sink, threads = Numbers(), Last(ROUNDS), Threads()
    engine = QueryEngine(MemoryStore(), factories)
    engine.add_source("in", numbers)
    engine.add_source("back", engine.add_sink("back", release=release))
    output = engine.add_sink("out", release=release)
    engine.recover()
    engine.start("start", "one", sink="back")
    engine.start("around", "next", {"end": ROUNDS}, sink="back")
    engine.start("seen", "seen", sink="out")
    numbers.pump(1)
    threads.repeat(engine.checkpoint)
    threads.repeat(engine.deliver)
    threads.repeat(acknowledging(engine, output, sink))
    threads.run_until(sink.done)
    assert sink.values == list(range(ROUNDS))
    engine.unload()


def fan_out(values: int, limit: int) -> tuple[QueryEngine, Numbers, OutputEdge]:
    """An engine that reads two outputs of its own, `first` and `second`, each with this limit."""
    engine, numbers = QueryEngine(MemoryStore(), factories), Numbers()
    engine.add_source("in", numbers)
    for name in ("first", "second"):
        engine.add_source(name, engine.add_sink(name, limit=limit))
    output = engine.add_sink("out")
    engine.recover()
    engine.start("many", "many", {"count": values}, sink="first")
    return engine, numbers, output


def pump_all(engine: QueryEngine, numbers: Numbers, output: OutputEdge, end: int) -> tuple[list[Any], int]:
    """Send the numbers below `end`. Return the output of the queries, and the largest number of values in
    `second`.
    """
    sink, most = Sink(), 0
    output.subscribe(sink).start(RESUME)
    for _ in range(100):
        with contextlib.suppress(Backlogged):
            numbers.pump(end)
        engine.run_due()
        engine.deliver()
        most = max(most, engine.sinks["second"])
        engine.checkpoint()
    engine.unload()
    assert numbers.next == end
    return sink.values, most


def test_two_full_outputs_read_by_their_own_engine_do_not_deadlock() -> None:
    engine, numbers, output = fan_out(values=1, limit=2)
    engine.start("too", "many", {"count": 1}, sink="second")
    for source in ("first", "second"):
        engine.start(f"{source}-seen", "from", {"source": source}, sink="out")
    values, _ = pump_all(engine, numbers, output, end=5)
    assert sorted(values) == sorted(2 * list(range(5)))


def test_full_output_fed_by_another_output_of_its_engine_does_not_deadlock() -> None:
    engine, numbers, output = fan_out(values=9, limit=2)
    engine.start("on", "from", {"source": "first"}, sink="second")
    engine.start("seen", "from", {"source": "second"}, sink="out")
    values, most = pump_all(engine, numbers, output, end=3)
    assert values == [each for each in range(3) for _ in range(9)]
    assert most == 2, "the first output was read although the second one was full"


class Locking:
    """A source that keeps its lock while it sends, and during `acknowledge` and `dispose`."""

    is_dense = True

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._next = 0
        self.acknowledged = -1

    def subscribe(self, observer: ReliableObserver[int], /) -> Locking:
        self._observer = observer
        return self

    def start(self, sequence_id: int, /) -> None:
        with self._lock:
            self._next = sequence_id

    def acknowledge(self, sequence_id: int, /) -> None:
        with self._lock:
            self.acknowledged = max(self.acknowledged, sequence_id)

    def dispose(self) -> None:
        with self._lock:
            self._next = COUNT

    def send(self) -> None:
        with self._lock:
            if self._next < COUNT:
                self._observer.on_next(self._next, self._next)
                self._next += 1


def test_source_holding_its_lock_while_sending_does_not_deadlock() -> None:
    source, sink, threads = Locking(), Last(COUNT), Threads()
    engine = QueryEngine(MemoryStore(), factories)
    engine.add_source("in", source)
    output = engine.add_sink("out")
    engine.recover()
    engine.start("q", "passed", sink="out")
    names = iter(range(10**9))

    def change() -> None:
        name = f"q{next(names)}"
        engine.start(name, "passed", sink="now")
        engine.stop(name)

    engine.add_sink("now", release="now")  # Queries of this sink start and stop through checkpoints.
    threads.repeat(source.send)
    threads.repeat(engine.checkpoint)
    threads.repeat(change)
    threads.repeat(acknowledging(engine, output, sink))
    threads.run_until(sink.done)
    assert sink.values == list(range(COUNT))
    engine.checkpoint()
    assert source.acknowledged == COUNT - 1
    engine.unload()


class Meddling(Sink):
    """Calls its engine for each value."""

    def __init__(self, engine: QueryEngine, *calls: Callable[[], object]) -> None:
        super().__init__()
        self._calls = (engine.checkpoint, engine.deliver, engine.run_due, *calls)

    def on_next(self, sequence_id: int, value: Any, /) -> None:
        super().on_next(sequence_id, value)
        for each in self._calls:
            each()


@pytest.mark.parametrize("release", ["commit", "now"])
def test_consumer_can_unload_its_engine_during_delivery(release: Release) -> None:
    numbers = Numbers()
    engine = QueryEngine(MemoryStore(), factories)
    engine.add_source("in", numbers)
    output = engine.add_sink("out", release=release)
    engine.recover()
    engine.start("q", "passed", sink="out")
    sink = Meddling(engine, lambda: engine.unload() if len(sink.values) == 3 else None)
    output.subscribe(sink).start(RESUME)
    numbers.pump(5)
    engine.checkpoint()
    engine.deliver()
    assert (sink.values, engine.state) == ([0, 1, 2], EngineState.UNLOADED)


def test_unload_by_source_during_acknowledgement_raises_wrong_state() -> None:
    class Unloading(Numbers):
        def acknowledge(self, sequence_id: int, /) -> None:
            with pytest.raises(WrongState, match="unload"):
                engine.unload()
            super().acknowledge(sequence_id)

    source = Unloading()
    engine = QueryEngine(MemoryStore(), factories)
    engine.add_source("in", source)
    engine.recover()
    source.pump(2)
    engine.checkpoint()
    assert source.acknowledged == 1
    engine.unload()


def test_consumer_that_restarts_from_0_during_delivery_receives_values_again() -> None:
    numbers = Numbers()
    engine = QueryEngine(MemoryStore(), factories)
    engine.add_source("in", numbers)
    output = engine.add_sink("out", release="now")
    engine.recover()
    engine.start("q", "passed", sink="out")
    got: list[int] = []

    class Rewinding(Sink):
        def on_next(self, sequence_id: int, value: Any, /) -> None:
            got.append(value)
            if len(got) == 2:
                subscription.start(0)

    subscription = output.subscribe(Rewinding())
    subscription.start(RESUME)
    numbers.pump(3)
    while engine.deliver():
        pass
    assert got == [0, 1, 0, 1, 2]
    engine.unload()
