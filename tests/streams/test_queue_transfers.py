"""Queues that are released, lost or reassigned between hosts, in virtual time."""

import asyncio
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from memory_leases import LeaseTable, MemoryLeases
from stream_consumers import Collector, until

from rt.errors import Fenced, Overloaded, StorageFailed
from rt.objects import CommitUnknown, MemoryStore, SqliteStore
from rt.streams.balancer.balancer import Fence, FixedBalancer
from rt.streams.balancer.balancers import LeaseBalancer
from rt.streams.core.errors import OwnerTimeout, QueueElsewhere
from rt.streams.core.event_batch import EventBatch
from rt.streams.core.stream_id import QueueId, SequenceToken, StartPosition, StreamId
from rt.streams.delivery.options import StreamOptions
from rt.streams.provider import StreamProvider
from rt.streams.queue.generator import GeneratorQueues
from rt.streams.queue.memory import MemoryQueues
from rt.streams.simulate import virtual_time
from rt.streams.stores import directory_stores, memory_stores
from rt.streams.subscriptions.subscription_store import Stores, SubscriptionRecord, SubscriptionStore

EARLIEST = StartPosition.EARLIEST_AVAILABLE
THREADS = 2


class Hand(FixedBalancer):
    """Assigns and removes queues when the test calls it."""

    def __init__(self) -> None:
        super().__init__([])

    async def give_up(self, queue: QueueId) -> None:
        for listener in self._listeners:
            await listener.release(queue)
        self.assign({each: fence for each, fence in self.my_queues().items() if each != queue})

    async def lose(self, queue: QueueId) -> None:
        left = {each: fence for each, fence in self.my_queues().items() if each != queue}
        self._queues = left
        for listener in self._listeners:
            await listener.revoke(queue)
        self.assign(left)

    def win(self, queue: QueueId, fence: int) -> None:
        self.assign({**self.my_queues(), queue: Fence(fence)})


def three(_: QueueId, number: int) -> tuple[StreamId, Any]:
    return StreamId("n", "abc"[number % 3]), number


def test_released_queue_delivers_each_event_once_across_owners() -> None:
    """Deliveries under way finish, accepted events are saved, and the next owner starts after them."""
    queues = MemoryQueues(1)
    (queue,) = queues.mapper.queues
    stores = memory_stores()

    async def main() -> None:
        first, second = Hand(), Hand()
        got: list[Collector] = []

        def make(_: StreamId) -> Collector:
            got.append(Collector(slow_s=3))
            return got[-1]

        hosts = [StreamProvider("p", queues, balancer=each, stores=stores) for each in (first, second)]
        for host in hosts:
            host.implicit("all", "n/*", make)
        async with hosts[0], hosts[1]:
            stream = hosts[0].stream("n", "a")
            first.win(queue, 1)
            await stream.publish([1, 2])
            await until(lambda: got)
            await asyncio.sleep(1)
            await stream.publish([3])
            await first.give_up(queue)
            assert got[0].events == [1, 2]
            assert got[0].closed == 1
            second.win(queue, 2)
            await hosts[0].stream("n", "a").publish([4])
            await until(lambda: len(got) == 2 and got[1].events == [3, 4])
            with pytest.raises(QueueElsewhere):
                await stream.subscribe(Collector())

    virtual_time.run(main())


def test_revoked_queue_stops_immediately_without_saving_progress() -> None:
    stores = memory_stores()
    queues = GeneratorQueues(three)
    (queue,) = queues.mapper.queues

    async def main() -> None:
        hand = Hand()
        got = Collector(slow_s=100)
        again = Collector()
        async with StreamProvider("p", queues, balancer=hand, stores=stores) as host:
            hand.win(queue, 1)
            subscription = await host.stream("n", "a").subscribe(got, start=EARLIEST)
            await asyncio.sleep(5)
            await hand.lose(queue)
            assert asyncio.get_running_loop().time() < 6
            assert got.events == []
            assert host.status()[0].state == "elsewhere"
            assert f'rt_streams_queue_losses_total{{provider="p",host="{host.host}",queue="{queue}"}} 1' in (
                host.metrics().splitlines()
            )
            hand.win(queue, 2)
            await subscription.resume(again)
            await until(lambda: len(again.events) == 34)

    virtual_time.run(main())


def test_released_queue_is_not_served_until_assigned_with_new_fence() -> None:
    queues = GeneratorQueues(three)
    (queue,) = queues.mapper.queues

    async def main() -> None:
        hand = Hand()
        async with StreamProvider("p", queues, balancer=hand) as host:
            hand.win(queue, 5)
            await until(lambda: host.status()[0].state == "served")
            (listener,) = hand._listeners
            await listener.release(queue)
            hand.assign(hand.my_queues())
            await asyncio.sleep(10)
            assert host.status()[0].state == "elsewhere"
            hand.win(queue, 6)
            await until(lambda: host.status()[0].state == "served")

    virtual_time.run(main())


def test_subscription_continues_only_on_host_with_its_registered_consumer() -> None:
    stores = memory_stores()
    queues = GeneratorQueues(three, events=300)
    (queue,) = queues.mapper.queues

    async def main() -> None:
        first, second, third = Hand(), Hand(), Hand()
        made = Collector()
        host = StreamProvider("p", queues, balancer=first, stores=stores, host="one")
        stranger = StreamProvider("p", queues, balancer=second, stores=stores, host="two")
        knowing = StreamProvider("p", queues, balancer=third, stores=stores, host="three")
        knowing.consumer("billing", lambda _: made)
        async with host, stranger, knowing:
            first.win(queue, 1)
            got, nameless = Collector(slow_s=1), Collector()
            stream = host.stream("n", "a")
            named = await stream.subscribe(got, start=EARLIEST, consumer="billing")
            other = await stream.subscribe(nameless, start=EARLIEST)
            await until(lambda: len(nameless.events) == 100)
            await first.give_up(queue)
            before = list(got.events)
            second.win(queue, 2)
            await until(lambda: stranger.status()[0].unattended == 2)
            await asyncio.sleep(10)
            await second.give_up(queue)
            third.win(queue, 3)
            await until(lambda: len(before) + len(made.events) == 100)
            assert before + made.events == list(range(0, 300, 3))
            found = dict(await knowing.stream("n", "a").subscriptions())
            assert found[named].consumer == "billing"
            again = Collector()
            await next(each for each in found if each == other).resume(again)
            await asyncio.sleep(1)
            assert again.events == []

    virtual_time.run(main())


def test_queue_is_acknowledged_only_up_to_position_of_slowest_subscription() -> None:
    acknowledged: list[SequenceToken] = []

    class Watched(GeneratorQueues):
        async def receiver(self, queue: QueueId, start: SequenceToken | None, *more: Any) -> Any:
            receiver = await super().receiver(queue, start, *more)

            async def acknowledge(low: SequenceToken) -> None:
                acknowledged.append(low)

            receiver.acknowledge = acknowledge  # type: ignore[method-assign]
            return receiver

    async def main() -> None:
        options = StreamOptions(batch_events_max=10, cache_events=5000)
        async with StreamProvider("p", Watched(three, events=3000), options=options) as host:
            slow, fast = Collector(slow_s=1), Collector()
            await host.stream("n", "a").subscribe(slow, start=EARLIEST)
            await host.stream("n", "b").subscribe(fast, start=EARLIEST)
            while len(slow.events) < 1000:
                await asyncio.sleep(0.5)
                if acknowledged:
                    assert acknowledged[-1] <= (slow.tokens[-1].next if slow.tokens else SequenceToken(0))
            await asyncio.sleep(3)
            assert acknowledged[-1] == SequenceToken(3000)
            assert acknowledged == sorted(set(acknowledged))

    virtual_time.run(main())


def test_failed_agent_restarts_without_losing_events() -> None:
    broken = [Overloaded("come back later"), StorageFailed("the disk"), OSError("gone")]

    class Broken(GeneratorQueues):
        async def receiver(self, queue: QueueId, start: SequenceToken | None, *more: Any) -> Any:
            receiver = await super().receiver(queue, start, *more)
            receive = receiver.receive

            async def breaking(events_max: int, timeout: float) -> Any:
                if broken and receiver._at > 100 * (4 - len(broken)):
                    raise broken.pop()
                return await receive(min(events_max, 50), timeout)

            receiver.receive = breaking  # type: ignore[method-assign]
            return receiver

    async def main() -> None:
        got = Collector()
        queues = Broken(three, events=900, rate_per_s=100)
        async with StreamProvider("p", queues) as host:
            await host.stream("n", "a").subscribe(got, start=EARLIEST)
            await until(lambda: 897 in got.events)
            assert sorted(set(got.events)) == list(range(0, 900, 3))
            ((_, counts),) = host._manager.status()  # type: ignore[union-attr]
            assert counts.agent_failures == 2  # A retriable error is not a failure.

    virtual_time.run(main())
    assert broken == []


def test_locked_store_is_retried_until_previous_owner_closes_it(
    tmp_path: Path,
) -> None:
    stores = directory_stores(tmp_path)
    queues = GeneratorQueues(three)
    (queue,) = queues.mapper.queues

    async def main() -> None:
        held = stores(queue, Fence(0))
        got = Collector()
        async with StreamProvider("p", queues, stores=stores) as host:
            await asyncio.sleep(3)
            assert host.status()[0].state == "failed"
            held.close()
            await host.stream("n", "a").subscribe(got, start=EARLIEST)
            await until(lambda: len(got.events) == 34)
        with SqliteStore(tmp_path / f"{queue.name}.db") as store:
            registry = SubscriptionStore(store, queue, Fence(0))
            assert registry.low == SequenceToken(100)

    virtual_time.run(main())


def test_new_owner_serves_queue_while_previous_owner_is_unaware_of_its_loss(tmp_path: Path) -> None:
    queues = GeneratorQueues(three)
    (queue,) = queues.mapper.queues

    async def main() -> None:
        held = asyncio.Event()

        async def hang(_: EventBatch) -> None:
            await held.wait()

        before, after = Collector(act=hang), Collector()
        hands = Hand(), Hand()
        first = StreamProvider("p", queues, stores=directory_stores(tmp_path), balancer=hands[0])
        second = StreamProvider("p", queues, stores=directory_stores(tmp_path), balancer=hands[1])
        async with first, second:
            hands[0].win(queue, 1)
            await first.stream("n", "a").subscribe(before, start=EARLIEST, name="reader")
            hands[1].win(queue, 2)
            ((found, _),) = await second.stream("n", "a").subscriptions()
            await found.resume(after)
            await until(lambda: len(after.events) == 34)
            assert second.status()[0].state == "served"
            held.set()  # The first host continues, but its saves are rejected now.
            await until(lambda: first.status()[0].state == "failed")
        with SqliteStore(tmp_path / f"{queue.name}~{2:020d}.db") as store:
            assert SubscriptionStore(store, queue, Fence(2)).low == SequenceToken(100)

    virtual_time.run(main())


def test_store_raises_fenced_if_opened_by_replaced_owner() -> None:
    queue = QueueId(0, "q")
    store = MemoryStore()

    async def main() -> None:
        newer = SubscriptionStore(store, queue, Fence(7))
        await newer.commit()
        with pytest.raises(Fenced, match="has taken over the queue"):
            SubscriptionStore(store, queue, Fence(6))
        SubscriptionStore(store, queue, Fence(7))

    virtual_time.run(main())


def test_store_keeps_only_positions_different_from_low() -> None:
    queue, stream = QueueId(0, "q"), StreamId("n", "a")
    store = MemoryStore()

    async def main() -> None:
        subscriptions = SubscriptionStore(store, queue, Fence(1))
        subscriptions.put(SubscriptionRecord("away", stream, "c"), SequenceToken(3))
        subscriptions.put(SubscriptionRecord("here", stream), SequenceToken(3))
        subscriptions.record_positions(
            SequenceToken(10), {"ahead": SequenceToken(12)}, lambda each: each != "away"
        )
        await subscriptions.commit()
        again = SubscriptionStore(store, queue, Fence(1))
        assert again.low == SequenceToken(10)
        assert [again.place(each) for each in ("away", "here", "ahead")] == [
            SequenceToken(3),
            None,
            SequenceToken(12),
        ]
        again.record_positions(SequenceToken(12), {}, lambda each: each != "away")
        assert again.place("ahead") is None
        assert {record.id for record in again.records()} == {"away", "here"}
        again.remove("away")
        assert again.place("away") is None

    virtual_time.run(main())


def test_subscribe_raises_storage_failed_and_adds_no_subscription_if_store_is_full() -> None:
    class Full(MemoryStore):
        is_full = False

        def begin(self, kind: Any) -> Any:
            if Full.is_full:
                raise StorageFailed("no room for the store")
            return super().begin(kind)

    async def main() -> None:
        queues = MemoryQueues(1)
        async with StreamProvider("p", queues, stores=lambda *_: Full()) as host:
            stream = host.stream("n", "a")
            await stream.subscribe(Collector())
            Full.is_full = True
            with pytest.raises(StorageFailed):
                await stream.subscribe(Collector())
            assert len(await stream.subscriptions()) == 1
            Full.is_full = False

    virtual_time.run(main())


class Keeping(Collector):
    """Stores its events and its last token together."""

    def __init__(self, kept: dict[StreamId, list[int]], stream: StreamId, slow_s: float) -> None:
        super().__init__(slow_s=slow_s)
        self._kept = kept.setdefault(stream, [])

    async def on_batch(self, batch: EventBatch) -> SequenceToken | None:
        await super().on_batch(batch)
        self._kept += batch.events
        return None

    async def last_token(self) -> SequenceToken | None:
        return SequenceToken(self._kept[-1]) if self._kept else None


@settings(max_examples=15)
@given(
    st.lists(
        st.tuples(st.sampled_from(["give up", "lose", "kill"]), st.integers(0, 2), st.floats(0.1, 3.0)),
        min_size=1,
        max_size=6,
    ),
    st.integers(10, 60),
    st.sampled_from([0.0, 0.05, 1.5]),
)
def test_events_are_delivered_in_order_without_loss_after_random_host_failures(
    changes: list[tuple[str, int, float]], cache_events: int, slow_s: float
) -> None:
    """One of three hosts serves at a time. Consumers that store their token get each event once. All
    consumers get the events in order.
    """
    queues = GeneratorQueues(three, events=300, rate_per_s=30)
    (queue,) = queues.mapper.queues
    stores = memory_stores()
    kept: dict[StreamId, list[int]] = {}
    plain: list[tuple[StreamId, Collector]] = []
    options = StreamOptions(cache_events=cache_events, batch_events_max=20, drain_s=2)

    def make_plain(stream: StreamId) -> Collector:
        plain.append((stream, Collector(slow_s=slow_s if stream.key == "b" else 0.0)))
        return plain[-1][1]

    def host(hand: Hand) -> StreamProvider:
        provider = StreamProvider("p", queues, balancer=hand, stores=stores, options=options)
        provider.implicit("keeping", "n/[ab]", lambda stream: Keeping(kept, stream, slow_s))
        provider.implicit("plain", "n/*", make_plain)
        return provider

    async def main() -> None:
        hands = [Hand() for _ in range(3)]
        hosts = [host(hand) for hand in hands]
        for each in hosts:
            await each.start()
        owner, fence = 0, 1
        hands[0].win(queue, fence)
        for change, to, seconds in changes:
            await asyncio.sleep(seconds)
            for each in hosts:
                agents = each._manager.agents() if each._manager is not None else []
                assert all(agent.queue.cache.events <= cache_events for agent in agents)
            if change == "give up":
                await hands[owner].give_up(queue)
            else:
                await hands[owner].lose(queue)
            if change == "kill":
                await hosts[owner].stop()
                hands[owner] = Hand()
                hosts[owner] = host(hands[owner])
                await hosts[owner].start()
            owner, fence = to, fence + 1
            hands[owner].win(queue, fence)
        last = {"a": 297, "b": 298, "c": 299}
        everything = {key: list(range("abc".index(key), 300, 3)) for key in last}

        def seen(key: str) -> list[int]:
            return [event for stream, got in plain if stream.key == key for event in got.events]

        await until(lambda: all(kept.get(StreamId("n", key), [])[-1:] == [last[key]] for key in "ab"), 1e5)
        await until(lambda: all(set(seen(key)) == set(everything[key]) for key in last), 1e5)
        for each in hosts:
            await each.stop()
        for key in "ab":
            assert kept[StreamId("n", key)] == everything[key]
        for _, got in plain:
            assert got.tokens == sorted(set(got.tokens))

    virtual_time.run(main())


def test_memory_stores_keep_committed_data() -> None:
    stores: Stores = memory_stores()
    queue = QueueId(0, "q")
    names: Mapping[str, int] = {"fence": 3}

    async def main() -> None:
        subscriptions = SubscriptionStore(stores(queue, Fence(0)), queue, Fence(names["fence"]))
        await subscriptions.commit()
        await subscriptions.close()
        with pytest.raises(Fenced):
            SubscriptionStore(stores(queue, Fence(2)), queue, Fence(2))

    virtual_time.run(main())


@pytest.mark.parametrize("who", ["explicit", "implicit", "answers"])
def test_rewound_consumer_keeps_its_position_at_next_owner(who: str) -> None:
    """The consumer went back to an event still in the cache, and no new event arrives."""
    stores = memory_stores()
    queues = GeneratorQueues(three, events=60, rate_per_s=20)
    (queue,) = queues.mapper.queues
    again = Collector()

    async def back(batch: EventBatch) -> SequenceToken | None:
        if batch.last < SequenceToken(50):
            return None
        await asyncio.sleep(3)
        went_back.append(batch.first)
        if len(went_back) > 1:
            await asyncio.sleep(1e6)
        return SequenceToken(20)

    went_back: list[SequenceToken] = []

    async def main() -> None:
        first, second = Hand(), Hand()
        options = StreamOptions(cache_events=1000, drain_s=0)
        host = StreamProvider("p", queues, balancer=first, stores=stores, options=options)
        other = StreamProvider("p", queues, balancer=second, stores=stores, options=options)
        host.implicit("all", "n/c", lambda _: Collector())
        other.implicit("all", "n/c", lambda _: again if who == "implicit" else Collector())
        other.consumer("c", lambda _: again)
        async with host, other:
            first.win(queue, 1)
            stream = host.stream("n", "a")
            if who == "answers":
                await stream.subscribe(Collector(act=back), start=EARLIEST, consumer="c")
            await asyncio.sleep(12)
            if who == "explicit":
                await stream.subscribe(Collector(slow_s=50), start=SequenceToken(21), consumer="c")
            if who == "implicit":
                handles = await host.stream("n", "c").subscriptions()
                await handles[0][0].resume(Collector(slow_s=50), SequenceToken(21))
            await asyncio.sleep(5)
            await first.lose(queue)
            second.win(queue, 2)
            await until(lambda: again.events[-1:] > [56])
            assert again.events == list(range(23 if who == "implicit" else 21, 60, 3))

    virtual_time.run(main())


def test_queue_reassigned_while_its_agent_awaits_restart_is_served() -> None:
    class Broken(GeneratorQueues):
        is_broken = True

        async def receiver(self, queue: QueueId, start: SequenceToken | None, *more: Any) -> Any:
            if self.is_broken:
                raise OSError("no queue")
            return await super().receiver(queue, start, *more)

    queues = Broken(three)
    (queue,) = queues.mapper.queues

    async def main() -> None:
        hand = Hand()
        async with StreamProvider("p", queues, balancer=hand) as host:
            hand.win(queue, 1)
            await asyncio.sleep(100)
            hand.assign({})
            await asyncio.sleep(0.1)
            queues.is_broken = False
            hand.win(queue, 2)
            await until(lambda: host.status()[0].state == "served", 1)

    virtual_time.run(main())


@pytest.mark.parametrize("begins_s", [0.5, 5.0, 11.0])
def test_queue_revoked_after_release_timeout_leaves_no_store_open(
    begins_s: float,
) -> None:
    """The store takes 4 s to open, commit and close. The queue is revoked while it starts or is served."""
    opened: set[object] = set()

    class Store(MemoryStore):
        def __init__(self) -> None:
            super().__init__()
            opened.add(self)

        def close(self) -> None:
            super().close()
            opened.discard(self)

    async def main() -> None:
        queues = GeneratorQueues(three)
        (queue,) = queues.mapper.queues
        hand = Hand()
        options = StreamOptions(drain_s=30)
        async with StreamProvider(
            "p", queues, balancer=hand, stores=lambda *_: Store(), options=options
        ) as host:
            host.implicit("all", "n/*", lambda _: Collector(slow_s=100))
            hand.win(queue, 1)
            await asyncio.sleep(begins_s)
            for _ in range(3):
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(0.5):
                        await hand.give_up(queue)
            await hand.lose(queue)
            assert not opened
            assert host.status()[0].state == "elsewhere"
            hand.win(queue, 2)
            await until(lambda: host.status()[0].state == "served")
        assert not opened

    virtual_time.run(main(), delay_s=lambda: 4.0)


def test_queue_lost_while_draining_stops_immediately_without_further_acknowledgement() -> None:
    told: list[float] = []

    class Told(GeneratorQueues):
        async def receiver(self, queue: QueueId, start: SequenceToken | None, *more: Any) -> Any:
            receiver = await super().receiver(queue, start, *more)

            async def acknowledge(_: SequenceToken) -> None:
                told.append(asyncio.get_running_loop().time())

            receiver.acknowledge = acknowledge  # type: ignore[method-assign]
            return receiver

    async def main() -> None:
        queues = Told(three)
        (queue,) = queues.mapper.queues
        hand, got = Hand(), Collector(slow_s=20)
        options = StreamOptions(drain_s=100)
        async with StreamProvider("p", queues, balancer=hand, options=options) as host:
            host.implicit("all", "n/a", lambda _: got)
            hand.win(queue, 1)
            await asyncio.sleep(15.5)
            giving_up = asyncio.ensure_future(hand.give_up(queue))
            await asyncio.sleep(1)
            before = asyncio.get_running_loop().time()
            await hand.lose(queue)
            assert asyncio.get_running_loop().time() - before < 1
            await giving_up
            assert got.events == []
            assert max(told) <= before

    virtual_time.run(main())


class Unanswered(MemoryStore):
    """A store whose commits wait until they are interrupted, once `hang` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.hang = threading.Event()
        self.hung = threading.Event()
        self.interrupted = threading.Event()

    def begin(self, kind: Any) -> Any:
        writer = super().begin(kind)
        commit = writer.commit

        def committed() -> None:
            if self.hang.is_set():
                self.hung.set()
                self.interrupted.wait()
                raise CommitUnknown("nobody answered")
            commit()

        writer.commit = committed  # type: ignore[method-assign]
        return writer

    def interrupt(self) -> None:
        self.interrupted.set()


@pytest.mark.parametrize("is_draining", [False, True])
def test_lost_queue_does_not_wait_for_unanswered_commit(*, is_draining: bool) -> None:
    """Otherwise the host could not serve the queue again when the cluster returns."""
    queues = MemoryQueues(1)
    (queue,) = queues.mapper.queues
    store, hand = Unanswered(), Hand()

    async def main() -> None:
        options = StreamOptions(save_every_s=0.01)
        provider = StreamProvider("p", queues, balancer=hand, stores=lambda *_: store, options=options)
        async with provider:
            hand.win(queue, 1)
            held = Collector()
            await provider.stream("n", "a").subscribe(held)
            store.hang.set()
            await provider.stream("n", "a").publish([1])
            await until(store.hung.is_set)
            giving_up = asyncio.create_task(hand.give_up(queue)) if is_draining else None
            await asyncio.sleep(0)
            try:
                async with asyncio.timeout(60):
                    await hand.lose(queue)
                    if giving_up is not None:
                        await giving_up
            finally:
                store.interrupted.set()  # Otherwise a failed test would wait for the thread.

    asyncio.run(main())


def test_hanging_stores_do_not_delay_other_queues() -> None:
    """The number of hanging stores exceeds the number of threads of the event loop."""
    queues, hand = MemoryQueues(9), Hand()
    stores = {queue: Unanswered() for queue in queues.mapper.queues}
    last = queues.mapper.queues[-1]
    keys = {queues.mapper.queue_for(StreamId("n", str(key))): str(key) for key in range(1000)}

    async def main() -> None:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(THREADS))
        options = StreamOptions(save_every_s=0.01)
        provider = StreamProvider(
            "p", queues, balancer=hand, stores=lambda queue, _: stores[queue], options=options
        )
        async with provider:
            hand.assign(dict.fromkeys(stores, Fence(1)))
            for queue in stores:
                await provider.stream("n", keys[queue]).subscribe(Collector())
            hanging = [store for queue, store in stores.items() if queue != last]
            for store in hanging:
                store.hang.set()
            for queue in stores:
                await provider.stream("n", keys[queue]).publish([1])
            try:
                await until(lambda: sum(store.hung.is_set() for store in hanging) >= THREADS, 60)
                async with asyncio.timeout(60):
                    await provider.stream("n", keys[last]).subscribe(Collector())
            finally:
                for store in stores.values():
                    store.interrupt()

    asyncio.run(main())


def test_host_stopped_while_agent_starts_leaves_no_store_open() -> None:
    opened: list[MemoryStore] = []
    closed: list[MemoryStore] = []

    class Store(MemoryStore):
        def close(self) -> None:
            super().close()
            closed.append(self)

    def store(*_: object) -> MemoryStore:
        opened.append(Store())
        return opened[-1]

    class Silent(Hand):
        async def stop(self) -> None:
            """Do not notify the listeners."""

    async def main() -> None:
        queues = GeneratorQueues(three)
        (queue,) = queues.mapper.queues
        hand = Silent()
        async with StreamProvider("p", queues, balancer=hand, stores=store) as host:
            hand.win(queue, 1)
            await asyncio.sleep(2)
            assert host.status()[0].state == "elsewhere"
        assert len(opened) == len(closed) == 1

    virtual_time.run(main(), delay_s=lambda: 4.0)


def test_waiting_resume_raises_queue_elsewhere_if_queue_is_lost() -> None:
    queues = GeneratorQueues(three)
    (queue,) = queues.mapper.queues

    async def main() -> None:
        hand = Hand()
        observers = [Collector(slow_s=8), Collector(), Collector()]
        async with StreamProvider("p", queues, balancer=hand, options=StreamOptions(drain_s=60)) as host:
            hand.win(queue, 1)
            subscription = await host.stream("n", "a").subscribe(observers[0], start=EARLIEST)
            await asyncio.sleep(1)
            resuming = [asyncio.ensure_future(subscription.resume(each)) for each in observers[1:]]
            await asyncio.sleep(1)
            await hand.lose(queue)
            await asyncio.wait(resuming)
            assert isinstance(resuming[1].exception(), QueueElsewhere)
            await asyncio.sleep(5)
            assert [each.events for each in observers[1:]] == [[], []]

    virtual_time.run(main())


def test_owner_timeout_of_request_is_counted_in_metrics() -> None:
    class Silent:
        """Stores whose owners do not answer."""

        def __init__(self) -> None:
            self.open = memory_stores()

        def __call__(self, queue: QueueId, fence: Fence) -> Any:
            return self.open(queue, fence)

        async def ask_owner(self, queue: QueueId, content: bytes, timeout_s: float) -> bytes:
            raise OwnerTimeout("the owner of the queue did not answer in time", where=queue)

    queues = GeneratorQueues(three)
    (queue,) = queues.mapper.queues

    async def main() -> None:
        host = StreamProvider("p", queues, balancer=Hand(), stores=Silent())
        host.consumer("c", lambda _: Collector())
        async with host:
            with pytest.raises(OwnerTimeout):
                await host.stream("n", "a").subscribe(Collector(), start=EARLIEST, consumer="c")
            sample = f'rt_streams_owner_timeouts_total{{provider="p",host="{host.host}",queue="{queue}"}} 1'
            assert sample in host.metrics().splitlines()

    virtual_time.run(main())


@pytest.mark.parametrize("is_late", [False, True], ids=["from the cache", "from the history"])
def test_host_paused_past_its_lease_calls_no_consumer_until_it_has_new_lease(is_late: bool) -> None:
    """The leases' clock jumps during a call, as on a host that was paused. No timer has fired yet, and no
    renewal has failed.
    """
    queues = GeneratorQueues(three)
    (queue,) = queues.mapper.queues
    slept_s = [0.0]
    fences: list[int] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        balancer = LeaseBalancer(MemoryLeases(LeaseTable(lambda: loop.time() + slept_s[0]), "h1"))

        async def act(_: EventBatch) -> None:
            fences.append(balancer.my_queues().get(queue, Fence(0)))
            if len(fences) == 2:
                slept_s[0] += 60

        options = StreamOptions(batch_events_max=1, cache_events=10)
        host = StreamProvider("p", queues, balancer=balancer, stores=memory_stores(), options=options)
        early, slept = Collector(), Collector(act=act)
        host.implicit("all", "n/a", lambda _: early if is_late else slept)
        async with host:
            if is_late:
                await until(lambda: early.events[-1:] == [99])
                await host.stream("n", "a").subscribe(slept, start=EARLIEST)
            await until(lambda: slept.events[-1:] == [99])
        first, second = fences[0], fences[-1]
        assert fences == [first] * 2 + [second] * (len(fences) - 2)
        assert 0 < first < second
        assert slept.events[:2] == [0, 3]
        assert slept.events[-34:] == list(range(0, 100, 3))

    virtual_time.run(main())
