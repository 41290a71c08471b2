"""`map_async` in an engine: order of results, back-pressure, crashes, errors, timeouts and unloading."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import pytest

from rt.errors import Timeout
from rt.objects import MemoryStore
from rt.query import RESUME, Backlogged, ErrorPolicy, Factories, QueryEngine, RealScheduler, Source
from rt.query import operators as ops
from rt.query.runner import EngineRunner
from rt.testing.queries import hot, run, until

WAIT_S = 300.0
"""The longest wait for a call that was answered."""


class Numbers:
    """A source of numbers, sent by `pump`. A refused number is sent again."""

    is_dense = True

    def __init__(self, count: int) -> None:
        self._count = count
        self._next = 0

    def subscribe(self, observer: Any, /) -> Numbers:
        self._observer = observer
        return self

    def start(self, sequence_id: int, /) -> None:
        self._next = sequence_id

    def acknowledge(self, sequence_id: int, /) -> None: ...
    def dispose(self) -> None: ...

    def pump(self, max_messages: int = 1000, timeout: float = 0.0) -> int:
        sent = 0
        while self._next < self._count and sent < max_messages:
            self._observer.on_next(self._next, self._next)
            self._next += 1
            sent += 1
        return sent


class Service:
    """Answers each call when the test allows it. `calls` are the values, in the order of the calls."""

    def __init__(self) -> None:
        self.calls: list[int] = []
        self.called = threading.Event()
        self.cancelled: Future[int] = Future()
        self._answers: dict[int, Future[Any]] = {}
        self._lock = threading.Lock()

    async def __call__(self, value: int) -> Any:
        self.calls.append(value)
        self.called.set()
        try:
            return await asyncio.wrap_future(self._answer(value))
        except asyncio.CancelledError:
            self.cancelled.set_result(value)
            raise

    def answer(self, value: int) -> None:
        self._answer(value).set_result(f"answer {value}")

    def refuse(self, value: int, error: BaseException) -> None:
        self._answer(value).set_exception(error)

    def _answer(self, value: int) -> Future[Any]:
        with self._lock:
            return self._answers.setdefault(value, Future())


class Consumer:
    def __init__(self) -> None:
        self.values: list[Any] = []

    def on_next(self, sequence_id: int, value: Any, /) -> None:
        """A source sends a value again after a crash if the value was not acknowledged."""
        assert sequence_id <= len(self.values)
        assert self.values[sequence_id : sequence_id + 1] in ([], [value])
        self.values[sequence_id : sequence_id + 1] = [value]

    def on_error(self, error: Exception, /) -> None: ...
    def on_completed(self) -> None: ...


class Rig:
    """An engine with a query `map_async(function)` over numbers. `consumer` outlives it."""

    def __init__(
        self,
        store: MemoryStore,
        function: Any,
        consumer: Consumer,
        count: int,
        *,
        on_error: Any = "stop",
        after: Any = (),
        **options: Any,
    ) -> None:
        factories = Factories()
        factories.add("asked", lambda: Source("in").pipe(ops.map_async(function, **options), *after))
        self.source = Numbers(count)
        self.engine = QueryEngine(store, factories, RealScheduler())
        self.engine.add_source("in", self.source)
        output = self.engine.add_sink("out")
        self.engine.recover()
        output.subscribe(consumer).start(RESUME)
        if not self.engine.queries:
            self.engine.start("q", "asked", sink="out", on_error=on_error)

    def take_results(self, consumer: Consumer, count: int) -> None:
        """Process and deliver until the consumer has `count` results."""
        while len(consumer.values) < count:
            assert self.engine.calls.wait(WAIT_S)
            self.engine.run_due()
            self.engine.checkpoint()
            self.engine.deliver()


@contextmanager
def rig(function: Any, count: int, **options: Any) -> Iterator[tuple[Rig, Consumer]]:
    consumer = Consumer()
    made = Rig(MemoryStore(), function, consumer, count, **options)
    try:
        yield made, consumer
    finally:
        made.engine.unload()


def test_results_are_emitted_in_order_of_values() -> None:
    service = Service()
    with rig(service, 3) as (made, consumer):
        assert made.source.pump() == 3
        service.answer(2)
        assert made.engine.calls.wait(WAIT_S)
        made.engine.run_due()
        assert made.engine.calls.open_count == 2
        service.answer(1)
        service.answer(0)
        made.take_results(consumer, 3)
        assert consumer.values == ["answer 0", "answer 1", "answer 2"]
        assert made.engine.calls.open_count == 0


def test_unordered_results_are_emitted_in_order_of_completion() -> None:
    service = Service()
    with rig(service, 3, ordered=False) as (made, consumer):
        made.source.pump()
        for value in (2, 0, 1):
            service.answer(value)
            made.take_results(consumer, len(consumer.values) + 1)
        assert consumer.values == ["answer 2", "answer 0", "answer 1"]


def test_source_is_refused_while_concurrency_limit_is_reached() -> None:
    service = Service()
    with rig(service, 5, concurrency=2) as (made, consumer):
        with pytest.raises(Backlogged, match=r"calls are in flight \(at \['map_async@q#0'\]\)"):
            made.source.pump()
        assert made.engine.is_backlogged
        assert made.engine.status().queries[0].blocked_by == ("map_async@q#0",)
        assert made.engine.calls.open_count == 2
        service.answer(0)
        made.take_results(consumer, 1)
        assert not made.engine.is_backlogged
        assert made.engine.status().queries[0].blocked_by == ()
        with pytest.raises(Backlogged):
            made.source.pump()
        assert made.engine.watermarks == {"in": 2}


def test_calls_in_flight_are_repeated_after_crash_and_emitted_once() -> None:
    store, service, consumer = MemoryStore(), Service(), Consumer()
    first = Rig(store, service, consumer, 4)
    first.source.pump()
    service.answer(0)
    service.answer(2)
    first.take_results(consumer, 1)
    while first.engine.calls.open_count != 2:
        assert first.engine.calls.wait(WAIT_S)
        first.engine.run_due()
    first.engine.checkpoint()
    first.engine.unload()
    again = Service()
    for value in (1, 3):
        again.answer(value)
    second = Rig(store, again, consumer, 4)
    second.take_results(consumer, 4)
    second.engine.unload()
    assert consumer.values == [f"answer {value}" for value in range(4)]
    assert service.calls == [0, 1, 2, 3]
    assert again.calls == [1, 3]  # The checkpoint had the result of 2, which waited for that of 1.


def test_function_error_ends_query_after_results_of_earlier_values() -> None:
    service = Service()
    with rig(service, 3) as (made, consumer):
        made.source.pump()
        service.refuse(1, ConnectionError("away"))
        service.answer(2)
        service.answer(0)
        made.take_results(consumer, 1)
        while made.engine.queries["q"] is None:
            assert made.engine.calls.wait(WAIT_S)
            made.engine.run_due()
        assert consumer.values == ["answer 0"]
        assert made.engine.queries == {"q": "ConnectionError: away"}
        assert made.engine.calls.open_count == 0


@pytest.mark.parametrize(
    ("make", "text"),
    [(lambda value: value, "must return an awaitable"), (sys.exit, "SystemExit(0)")],
)
def test_function_without_awaitable_or_with_exit_ends_only_its_query(make: Any, text: str) -> None:
    with rig(make, 1) as (made, _):
        made.source.pump()
        assert made.engine.calls.wait(WAIT_S)
        made.engine.run_due()
        assert text in str(made.engine.queries["q"])
        made.engine.start("next", "asked", sink="out")


def test_call_over_timeout_is_cancelled_and_ends_query() -> None:
    service = Service()
    with rig(service, 1, timeout=0.001) as (made, _):
        made.source.pump()
        assert made.engine.calls.wait(WAIT_S)
        made.engine.run_due()
        assert str(made.engine.queries["q"]).startswith("Timeout: the function did not return in time")
        assert service.cancelled.result(WAIT_S) == 0


def test_query_stop_cancels_its_calls_and_unblocks_source() -> None:
    service = Service()
    with rig(service, 2, concurrency=1) as (made, _):
        with pytest.raises(Backlogged):
            made.source.pump()
        assert service.called.wait(WAIT_S)
        made.engine.stop("q")
        assert service.cancelled.result(WAIT_S) == 0
        assert made.source.pump() == 1
        assert made.engine.calls.open_count == 0


def test_unload_ends_call_thread_with_calls_in_flight() -> None:
    def calling() -> set[threading.Thread]:
        return {thread for thread in threading.enumerate() if thread.name == "rt-query-calls"}

    before, service = calling(), Service()
    with rig(service, 2) as (made, _):
        made.source.pump()
        (thread,) = calling() - before
    assert not thread.is_alive()


def test_finished_call_wakes_runner() -> None:
    async def soon(value: int) -> str:
        await asyncio.sleep(0.001)
        return f"answer {value}"

    with rig(soon, 6, concurrency=2) as (made, consumer):
        runner = EngineRunner(made.engine, [made.source], checkpoint_s=WAIT_S, idle_s=10 * WAIT_S)
        runner.run(until=lambda: made.engine.watermarks["in"] == 5 and not made.engine.calls.open_count)
        assert consumer.values == [f"answer {value}" for value in range(6)]


def test_late_call_times_out_in_virtual_time() -> None:
    async def slow(value: int) -> int:
        await until(value)
        return value

    values, late = run(Source("in").pipe(ops.map_async(slow, timeout=2)), {"in": hot("19|")})
    assert (values.at_s, values.value) == (1.0, 1)
    assert (late.at_s, type(late.value)) == (3.0, Timeout)
    assert "9" not in str(values.value)


@pytest.mark.parametrize("raises", [False, True])
def test_late_call_may_await_or_raise_when_cancelled_in_virtual_time(raises: bool) -> None:
    ended: list[int] = []

    async def slow(value: int) -> None:
        try:
            await until(100)
        finally:
            ended.append(value)
            if raises:
                raise ValueError(value)
            await until(101)

    [late] = run(Source("in").pipe(ops.map_async(slow, timeout=2)), {"in": hot("1---|")})
    assert (late.at_s, type(late.value), ended) == (2.0, Timeout, [1])


def test_failed_call_is_dead_letter_and_other_results_stay_in_order() -> None:
    service = Service()
    with rig(service, 3, on_error="skip") as (made, consumer):
        made.source.pump()
        service.refuse(1, ConnectionError("away"))
        service.answer(2)
        service.answer(0)
        made.take_results(consumer, 2)
        assert consumer.values == ["answer 0", "answer 2"]
        (letter,) = made.engine.dead_letters
        assert (letter.operator, letter.value, letter.error) == ("map_async", "1", "ConnectionError: away")


def test_retry_policy_calls_function_again() -> None:
    calls = []

    async def flaky(value: int) -> int:
        calls.append(value)
        if len(calls) < 3:
            raise ConnectionError("away")
        return value

    with rig(flaky, 1, on_error=ErrorPolicy(retries=2, pause_s=0.0)) as (made, consumer):
        made.source.pump()
        made.take_results(consumer, 1)
        assert consumer.values == [0]
        assert calls == [0, 0, 0]


def test_waiting_results_do_not_block_first_call_after_concurrency_is_lowered() -> None:
    store, service, consumer = MemoryStore(), Service(), Consumer()
    first = Rig(store, service, consumer, 4, concurrency=4)
    first.source.pump()
    for value in (1, 2, 3):
        service.answer(value)
    while first.engine.calls.open_count != 1:
        assert first.engine.calls.wait(WAIT_S)
        first.engine.run_due()
    first.engine.checkpoint()
    first.engine.unload()
    again = Service()
    again.answer(0)
    second = Rig(store, again, consumer, 4, concurrency=2)
    second.take_results(consumer, 4)
    second.engine.unload()
    assert consumer.values == [f"answer {value}" for value in range(4)]
    assert again.calls == [0]


@pytest.mark.parametrize("on_error", ["skip", "stop-engine"])
def test_failed_call_after_query_end_is_ignored(on_error: str) -> None:
    service, consumer = Service(), Consumer()
    made = Rig(MemoryStore(), service, consumer, 2, on_error=on_error, after=[ops.take(1)])
    made.source.pump()
    service.refuse(1, ConnectionError("away"))
    while made.engine.calls.open_count != 1:
        assert made.engine.calls.wait(WAIT_S)
        made.engine.run_due()
    service.answer(0)
    made.take_results(consumer, 1)
    assert made.engine.dead_letters == []
    assert made.engine.queries == {"q": ""}
    made.engine.unload()
