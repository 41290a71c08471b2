"""Many consumers share tasks without stopping, cancelling or changing each other, in virtual time."""

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import Any

import pytest
from stream_consumers import Collector, until

from rt.streams.core.errors import ConsumerGone
from rt.streams.core.event_batch import EventBatch
from rt.streams.core.stream_id import QueueId, SequenceToken, StartPosition, StreamId
from rt.streams.delivery import consumer_tasks
from rt.streams.delivery.consumer_tasks import TURN_CONSUMERS, ConsumerTasks
from rt.streams.delivery.options import StreamOptions
from rt.streams.observer import StreamObserver
from rt.streams.provider import StreamProvider
from rt.streams.queue.generator import GeneratorQueues
from rt.streams.queue.memory import MemoryQueues
from rt.streams.simulate import virtual_time
from rt.streams.stores import memory_stores
from rt.streams.stream import Subscription

EARLIEST = StartPosition.EARLIEST_AVAILABLE
MARK: ContextVar[str] = ContextVar("mark", default="none")


def run(
    program: Callable[[StreamProvider], Awaitable[None]],
    queues: MemoryQueues | GeneratorQueues | None = None,
    **options: Any,
) -> None:
    """Run `program` with a provider of one queue in memory, or of `queues`."""

    async def main() -> None:
        chosen = queues or MemoryQueues(1)
        async with StreamProvider("p", chosen, options=StreamOptions(**options)) as provider:
            await program(provider)
        await asyncio.sleep(0)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    virtual_time.run(main())


async def subscribe_all(provider: StreamProvider, observers: list[Any]) -> list[Subscription]:
    """Subscribe each observer to a stream of its own: `n/0`, `n/1` and so on."""
    streams = [provider.stream("n", str(number)) for number in range(len(observers))]
    return [await stream.subscribe(observer) for stream, observer in zip(streams, observers, strict=True)]


async def publish_to_all(provider: StreamProvider, count: int, event: Any) -> None:
    """All events become available in one step."""
    for number in range(count):
        await provider.stream("n", str(number)).publish([event])


def many_streams(streams: int, events: int) -> GeneratorQueues:
    names = [StreamId("n", str(number)) for number in range(streams)]
    return GeneratorQueues(lambda _, number: (names[number % streams], number), events=events)


class Task(Collector):
    """A consumer that records the tasks in which it is called."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.tasks: list[Any] = []

    async def on_batch(self, batch: EventBatch) -> SequenceToken | None:
        self.tasks.append(asyncio.current_task())
        return await super().on_batch(batch)


@pytest.mark.slow
def test_ten_thousand_woken_consumers_run_in_few_tasks_and_keep_event_order() -> None:
    streams, each = 10_000, 3
    found: dict[StreamId, Task] = {}

    async def program(provider: StreamProvider) -> None:
        provider.implicit("all", "n/*", lambda stream: found.setdefault(stream, Task()))
        await until(lambda: sum(len(got.events) for got in found.values()) == streams * each)
        assert len(found) == streams
        for stream, got in found.items():
            first = int(stream.key)
            assert got.events == [first + lap * streams for lap in range(each)]
        assert len({id(task) for got in found.values() for task in got.tasks}) < 1000

    run(program, many_streams(streams, streams * each))


def test_hanging_consumer_does_not_delay_consumers_woken_with_it() -> None:
    async def program(provider: StreamProvider) -> None:
        hanging = [Collector(slow_s=1e9) for _ in range(50)]
        got = [Collector() for _ in range(50)]
        mixed = [each for pair in zip(hanging, got, strict=True) for each in pair]
        await subscribe_all(provider, mixed)
        await publish_to_all(provider, len(mixed), 1)
        before = asyncio.get_running_loop().time()
        await until(lambda: all(each.events == [1] for each in got))
        await publish_to_all(provider, len(mixed), 2)
        await until(lambda: all(each.events == [1, 2] for each in got))
        assert asyncio.get_running_loop().time() - before < 2
        assert all(each.events == [] for each in hanging)

    run(program, drain_s=1)


def test_waiting_consumers_run_concurrently() -> None:
    """A thousand consumers that need a second each need a second together."""

    async def program(provider: StreamProvider) -> None:
        got = [Task(slow_s=1.0) for _ in range(1000)]
        await subscribe_all(provider, got)
        before = asyncio.get_running_loop().time()
        await publish_to_all(provider, len(got), 1)
        await until(lambda: all(each.events == [1] for each in got))
        assert asyncio.get_running_loop().time() - before < 2
        assert len({id(task) for each in got for task in each.tasks}) > 1

    run(program)


def test_raising_consumer_is_retried_alone() -> None:
    async def refuse(_: EventBatch) -> None:
        raise LookupError("not this one")

    async def program(provider: StreamProvider) -> None:
        bad, leaving, good = Collector(act=refuse), Collector(act=leave), Collector()
        await subscribe_all(provider, [bad, leaving, good])
        await publish_to_all(provider, 3, 1)
        await until(lambda: good.events == [1] and leaving.closed == 1)
        assert good.batches == [1]
        await until(lambda: bad.errors)
        assert bad.closed == 1

    async def leave(_: EventBatch) -> None:
        raise ConsumerGone("enough")

    run(program, deliver_for_s=5)


class Panic(BaseException):
    """An exception that is not an `Exception`, as some extension modules raise."""


def test_consumer_raising_base_exception_fails_without_disturbing_others() -> None:
    async def panic(batch: EventBatch) -> None:
        if 2 in batch.events:
            raise Panic("of an extension module")

    async def program(provider: StreamProvider) -> None:
        good, bad = Collector(), Collector(act=panic)
        await subscribe_all(provider, [good, bad, good])
        await publish_to_all(provider, 3, 1)
        await publish_to_all(provider, 3, 2)
        await until(lambda: bad.errors)
        assert "Panic" in str(bad.errors[0])
        assert bad.events == [1]
        assert bad.closed == 1
        assert sorted(good.events) == [1, 1, 2, 2]

    run(program, deliver_for_s=5)


def test_consumer_with_non_async_on_batch_is_retried_alone() -> None:
    class Sync(StreamObserver):
        calls = 0

        def on_batch(self, batch: EventBatch) -> None:  # type: ignore[override]
            self.calls += 1

    async def program(provider: StreamProvider) -> None:
        sync, good = Sync(), Collector()
        await subscribe_all(provider, [sync, good])
        await publish_to_all(provider, 2, 1)
        await until(lambda: good.events == [1])
        await until(lambda: provider.status()[0].faulted == 1)
        assert sync.calls > 1
        await publish_to_all(provider, 2, 2)
        await until(lambda: good.events == [1, 2])

    run(program, deliver_for_s=5)


def test_consumer_can_unsubscribe_itself_and_consumers_woken_with_it() -> None:
    handles: list[Subscription] = []

    async def end_all(_: EventBatch) -> None:
        for handle in handles[:3]:
            await handle.unsubscribe()

    async def program(provider: StreamProvider) -> None:
        got = [Collector(act=end_all), Collector(), Collector(slow_s=1), Collector()]
        handles.extend(await subscribe_all(provider, got))
        await publish_to_all(provider, 4, 1)
        await until(lambda: all(each.closed for each in got[:3]))
        await publish_to_all(provider, 4, 2)
        await until(lambda: got[3].events == [1, 2])
        assert got[0].events == [1]
        assert all(2 not in each.events for each in got[:3])
        await until(lambda: provider.status()[0].lag == 0)

    run(program)


def test_consumer_can_subscribe_other_consumers_within_its_call() -> None:
    made: list[Collector] = []

    async def program(provider: StreamProvider) -> None:
        async def grow(_: EventBatch) -> None:
            made.append(Collector(act=grow if len(made) < 20 else None))
            await provider.stream("n", str(len(made))).subscribe(made[-1], start=EARLIEST)

        await publish_to_all(provider, 30, 1)
        await provider.stream("n", "0").subscribe(Collector(act=grow), start=EARLIEST)
        await until(lambda: len(made) == 21 and all(each.events == [1] for each in made))

    run(program, save_every_s=1000)


def test_consumer_cancelling_its_task_cancels_no_other_consumer() -> None:
    """The cancellation is raised during the call, or later, when the task may serve another consumer."""
    tasks: list[asyncio.Task[Any]] = []
    cancels = 2

    async def cancel_now(_: EventBatch) -> None:
        nonlocal cancels
        if cancels:
            cancels -= 1
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
            await asyncio.sleep(0)

    async def cancel_silently(_: EventBatch) -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()

    async def keep_task(_: EventBatch) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.append(task)

    async def wait(_: EventBatch) -> None:
        await asyncio.sleep(1)

    async def program(provider: StreamProvider) -> None:
        acts = [cancel_now, wait, cancel_silently, wait, keep_task, wait, wait]
        got = [Collector(act=act) for act in acts]
        await subscribe_all(provider, got)
        await publish_to_all(provider, len(got), 1)
        await until(lambda: tasks)
        await asyncio.sleep(0.1)
        for task in tasks:
            task.cancel()
        await until(lambda: all(each.events == [1] for each in got))
        await until(lambda: provider.status()[0].lag == 0)
        assert provider.status()[0].failing == 0

    run(program)


def test_consumer_cancelling_and_uncancelling_its_task_disturbs_no_other_consumer() -> None:
    """After `uncancel` the task still raises `CancelledError` where it waits next."""
    calls = 0

    async def cancel_and_take_back(_: EventBatch) -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        task.uncancel()

    async def wait(_: EventBatch) -> None:
        nonlocal calls
        calls += 1
        await asyncio.sleep(0.01)

    async def program(provider: StreamProvider) -> None:
        got = [Collector(act=act) for act in (wait, *[cancel_and_take_back] * 3, wait, wait)]
        await subscribe_all(provider, got)
        await publish_to_all(provider, len(got), 1)
        await until(lambda: all(each.events == [1] for each in got))
        assert calls == 3

    run(program)


class CancelsItself(Collector):
    """A consumer that cancels its task in each call of `last_token`."""

    asked = 0
    asked_after_close = 0

    async def last_token(self) -> SequenceToken | None:
        self.asked += 1
        self.asked_after_close += self.closed
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await asyncio.sleep(0)
        return None


def test_consumer_cancelling_its_task_is_not_called_after_close() -> None:
    """The stream has no events for longer than `inactive_s`. Then the provider stops."""
    made: list[CancelsItself] = []

    def make(_: StreamId) -> CancelsItself:
        made.append(CancelsItself())
        return made[-1]

    async def main() -> None:
        options = StreamOptions(inactive_s=5)
        async with StreamProvider("p", MemoryQueues(1), options=options) as provider:
            taken = Collector()
            provider.implicit("first", "n/*", lambda _: taken)
            await provider.stream("n", "a").publish([1])
            await until(lambda: taken.events)
            provider.implicit("second", "n/*", make)
            await until(lambda: made)
            await asyncio.sleep(300)
        assert [each.closed for each in made] == [1]
        await asyncio.sleep(300)
        assert made[0].asked > 10
        assert made[0].asked_after_close == 0

    virtual_time.run(main())


def test_consumer_rewinding_endlessly_starves_no_other_consumer() -> None:
    calls = 0

    async def to_and_fro(batch: EventBatch) -> SequenceToken:
        nonlocal calls
        calls += 1
        if calls > 10_000:
            raise ConsumerGone("nothing else runs")
        return SequenceToken(9 if batch.first < SequenceToken(9) else 2)

    async def program(provider: StreamProvider) -> None:
        good, bad = Collector(), Collector(act=to_and_fro)
        provider.implicit("all", "n/*", lambda stream: bad if stream.key == "0" else good)
        while len(good.events) < 10:
            await asyncio.sleep(0)
        assert calls < 10_000

    run(program, many_streams(2, 20), batch_events_max=1)


def test_tasks_of_waiting_consumers_are_not_shared() -> None:
    async def program(provider: StreamProvider) -> None:
        fast, slow = [Task() for _ in range(20)], [Task(slow_s=0.01) for _ in range(20)]
        await subscribe_all(provider, [*slow, *fast])
        for event in range(20):
            await publish_to_all(provider, 40, event)
            await asyncio.sleep(0.005)
        await until(lambda: all(len(each.events) == 20 for each in [*slow, *fast]))
        used = [{id(task) for task in each.tasks} for each in slow]
        assert all(each.events == list(range(20)) for each in [*slow, *fast])
        for at, mine in enumerate(used):
            assert all(mine.isdisjoint(others) for others in used[at + 1 :])

    run(program)


def test_context_variables_set_by_consumer_are_invisible_to_others() -> None:
    seen: list[str] = []

    async def mark(_: EventBatch) -> None:
        seen.append(MARK.get())
        MARK.set("set by another consumer")

    async def look(_: EventBatch) -> None:
        seen.append(MARK.get())

    async def program(provider: StreamProvider) -> None:
        got = [Collector(act=act) for act in (mark, look, mark, look, mark)]
        await subscribe_all(provider, got)
        for event in range(3):
            await publish_to_all(provider, len(got), event)
            await until(lambda event=event: all(event in each.events for each in got))  # type: ignore[misc]
        assert set(seen) == {"of the program"}

    MARK.set("of the program")
    run(program)


def test_context_variable_replaced_by_equal_value_is_invisible_to_others() -> None:
    """Two empty lists are equal, but they are different objects: an item added to one is not in the other."""
    bag: ContextVar[list[int]] = ContextVar("bag")
    seen: list[list[int]] = []

    async def replace(_: EventBatch) -> None:
        seen.append(bag.get())
        bag.set([])

    async def program(provider: StreamProvider) -> None:
        got = [Collector(act=replace) for _ in range(5)]
        await subscribe_all(provider, got)
        await publish_to_all(provider, len(got), 1)
        await until(lambda: all(each.events == [1] for each in got))
        assert all(each is of_the_program for each in seen)

    of_the_program: list[int] = []
    bag.set(of_the_program)
    run(program)


def test_context_variable_with_incomparable_value_stops_no_consumer() -> None:
    class Odd:
        def __eq__(self, other: object) -> bool:
            raise TypeError("not comparable")

        __hash__ = None  # type: ignore[assignment]

    odd: ContextVar[Any] = ContextVar("odd", default=None)

    async def put(_: EventBatch) -> None:
        odd.set(Odd())

    async def program(provider: StreamProvider) -> None:
        odd.set(Odd())
        got = [Collector(act=put) for _ in range(5)]
        await subscribe_all(provider, got)
        await publish_to_all(provider, 5, 1)
        await until(lambda: all(each.events == [1] for each in got))

    run(program)


def test_stop_while_consumers_are_woken_loses_no_event_and_makes_no_later_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The next host delivers what the first one did not."""
    streams = 500
    first: dict[StreamId, Collector] = {}
    second: dict[StreamId, Collector] = {}

    async def main() -> None:
        stores = memory_stores()
        before = StreamProvider("p", many_streams(streams, streams), stores=stores)
        before.implicit("all", "n/*", lambda stream: first.setdefault(stream, Collector()))
        await before.start()
        while not any(each.events for each in first.values()):
            await asyncio.sleep(0)
        await before.stop()
        had = [event for each in first.values() for event in each.events]
        assert 0 < len(had) < streams
        assert all(each.closed == 1 for each in first.values())
        after = StreamProvider("p", many_streams(streams, streams), stores=stores)
        after.implicit("all", "n/*", lambda stream: second.setdefault(stream, Collector()))
        async with after:
            await until(lambda: len(had) + sum(len(each.events) for each in second.values()) == streams)
        assert [event for each in first.values() for event in each.events] == had
        left = [event for each in second.values() for event in each.events]
        assert sorted([*had, *left]) == list(range(streams))

    monkeypatch.setattr(consumer_tasks, "TURN_CONSUMERS", 1)
    virtual_time.run(main())


def test_stop_waits_only_for_calls_in_progress() -> None:
    async def main() -> None:
        provider = StreamProvider("p", MemoryQueues(1), options=StreamOptions(drain_s=100))
        got = [Collector(slow_s=5 if at % 2 else 0) for at in range(100)]
        await provider.start()
        await subscribe_all(provider, got)
        await publish_to_all(provider, 100, 1)
        await until(lambda: all(each.events for each in got[::2]))
        before = asyncio.get_running_loop().time()
        await provider.stop()
        assert asyncio.get_running_loop().time() - before < 6
        assert all(each.events == [1] and each.closed == 1 for each in got)

    virtual_time.run(main())


class Plain:
    """A substitute for a consumer: it only calls `act` with the task that runs it."""

    def __init__(self, act: Callable[[asyncio.Task[None]], Awaitable[object]]) -> None:
        self.act = act

    async def run(self, task: asyncio.Task[None]) -> None:
        assert asyncio.current_task() is task
        await self.act(task)


def test_turn_runs_at_most_turn_consumers_before_yielding_to_event_loop() -> None:
    calls = 0
    seen: list[int] = []

    async def act(_: asyncio.Task[None]) -> None:
        nonlocal calls
        calls += 1

    async def main() -> None:
        tasks = ConsumerTasks()
        for _ in range(5 * TURN_CONSUMERS):
            tasks.add(Plain(act))  # type: ignore[arg-type]
        while calls < 5 * TURN_CONSUMERS:
            await asyncio.sleep(0)
            seen.append(calls)
        assert max(after - before for before, after in itertools.pairwise([0, *seen])) <= TURN_CONSUMERS

    virtual_time.run(main())


def test_thousand_waiting_consumers_start_within_50_turns() -> None:
    begun = 0
    end = asyncio.Event()

    async def act(_: asyncio.Task[None]) -> None:
        nonlocal begun
        begun += 1
        await end.wait()

    async def main() -> None:
        tasks = ConsumerTasks()
        for _ in range(1000):
            tasks.add(Plain(act))  # type: ignore[arg-type]
        turns = 0
        while begun < 1000:
            await asyncio.sleep(0)
            turns += 1
        assert turns < 50
        end.set()
        await asyncio.sleep(1)

    virtual_time.run(main())


def test_task_that_waited_runs_no_consumer_woken_meanwhile() -> None:
    ran: dict[str, list[asyncio.Task[None]]] = {"slow": [], "fast": []}
    end = asyncio.Event()

    async def fast(task: asyncio.Task[None]) -> None:
        ran["fast"].append(task)

    async def slow(task: asyncio.Task[None]) -> None:
        ran["slow"].append(task)
        await end.wait()

    async def main() -> None:
        tasks = ConsumerTasks()
        tasks.add(Plain(slow))  # type: ignore[arg-type]
        await asyncio.sleep(1)
        tasks.add(Plain(fast))  # type: ignore[arg-type]
        end.set()  # The slow consumer ends after the fast one's turn has started.
        await until(lambda: ran["fast"])
        assert ran["fast"] != ran["slow"]

    virtual_time.run(main())


def test_task_cancelled_by_consumer_does_not_stop_other_consumers() -> None:
    ended: list[str] = []

    async def cancel(task: asyncio.Task[None]) -> None:
        task.cancel()
        ended.append("cancel")

    async def wait(_: asyncio.Task[None]) -> None:
        await asyncio.sleep(0)
        ended.append("wait")

    async def fail(_: asyncio.Task[None]) -> None:
        raise asyncio.CancelledError

    async def main() -> None:
        tasks = ConsumerTasks()
        for act in (cancel, wait, fail, wait, cancel, cancel, wait):
            tasks.add(Plain(act))  # type: ignore[arg-type]
        await until(lambda: len(ended) == 6)
        assert ended.count("wait") == 3

    virtual_time.run(main())


def one(_: QueueId, number: int) -> tuple[StreamId, Any]:
    return StreamId("n", "one"), number


def test_consumer_calls_do_not_overlap_when_events_arrive_during_call() -> None:
    """New events, a gap and a resume arrive during a call. Two calls must never overlap."""
    under_way = most = 0

    async def act(_: EventBatch) -> None:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        await asyncio.sleep(0.3)
        under_way -= 1

    async def program(provider: StreamProvider) -> None:
        got = Collector(act=act)
        await provider.stream("n", "one").subscribe(got, start=EARLIEST)
        await until(lambda: len(got.events) == 100)
        assert got.events == list(range(100))
        assert most == 1

    run(program, GeneratorQueues(one, rate_per_s=50), batch_events_max=7)
