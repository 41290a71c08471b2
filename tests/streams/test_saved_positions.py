"""Saved positions bound the events that a kill repeats, with a slow disk, in virtual time."""

import asyncio
import itertools
from typing import Any

import pytest
from stream_consumers import Collector, until

from rt.objects import MemoryStore
from rt.streams.balancer.balancer import Fence
from rt.streams.core.event_batch import EventBatch
from rt.streams.core.stream_id import QueueId, SequenceToken, StartPosition, StreamId
from rt.streams.delivery.options import StreamOptions
from rt.streams.provider import StreamProvider
from rt.streams.queue.generator import GeneratorQueues
from rt.streams.simulate import virtual_time
from rt.streams.subscriptions.subscription_store import SubscriptionStore


def one(_: QueueId, number: int) -> tuple[StreamId, Any]:
    return StreamId("n", "one"), number


class Disk:
    """The store of the one queue, and the content of its disk after a kill."""

    def __init__(self) -> None:
        self.store = MemoryStore(None)

    def opened(self, _: QueueId, _fence: int) -> MemoryStore:
        self.store = MemoryStore(self.store.content())
        return self.store

    def place(self, subscription_id: str) -> SequenceToken:
        """Return the token from which a host with this store would continue."""
        left = SubscriptionStore(MemoryStore(self.store.content()), QueueId(0, "q"), Fence(2**40))
        return left.place(subscription_id) or left.low or SequenceToken(0)


@pytest.mark.parametrize("commit_s", [0.0, 0.5, 2.0])
@pytest.mark.parametrize("save_every_s", [0.25, 1.0])
def test_kill_repeats_only_events_accepted_within_save_every_s_and_two_commits(
    commit_s: float, save_every_s: float
) -> None:
    accepted: list[tuple[float, int]] = []
    disk = Disk()

    async def note(batch: EventBatch) -> None:
        accepted.append((asyncio.get_running_loop().time(), batch.last.sequence_number))

    async def main() -> None:
        options = StreamOptions(save_every_s=save_every_s)
        queues = GeneratorQueues(one, events=None, rate_per_s=100)
        async with StreamProvider("p", queues, stores=disk.opened, options=options) as provider:
            stream = provider.stream("n", "one")
            held = Collector(slow_s=0.3, act=note)
            subscription = await stream.subscribe(held, start=StartPosition.EARLIEST_AVAILABLE)
            for _ in range(100):
                await asyncio.sleep(0.37)
                old = asyncio.get_running_loop().time() - save_every_s - 2 * commit_s - 0.01
                must = max((number for at, number in accepted if at <= old), default=-1)
                assert disk.place(subscription.id) > SequenceToken(must)

    virtual_time.run(main(), delay_s=lambda: commit_s)
    assert accepted[-1][1] > 1000


class Lingering(Collector):
    """A consumer that needs a long time to close."""

    async def on_close(self) -> None:
        await super().on_close()
        await asyncio.sleep(1e6)


def test_consumers_closing_slowly_do_not_delay_saving() -> None:
    """The idle consumers hang in `on_close` after they had no events for `inactive_s`."""
    accepted: list[tuple[float, int]] = []
    idle: list[Lingering] = []
    disk = Disk()

    def first_one_only(_: QueueId, number: int) -> tuple[StreamId, Any]:
        return StreamId("n", "one" if number else "idle"), number

    def lingering(_: StreamId) -> Lingering:
        idle.append(Lingering())
        return idle[-1]

    async def note(batch: EventBatch) -> None:
        accepted.append((asyncio.get_running_loop().time(), batch.last.sequence_number))

    async def main() -> None:
        options = StreamOptions(inactive_s=20)
        queues = GeneratorQueues(first_one_only, events=None, rate_per_s=100)
        provider = StreamProvider("p", queues, stores=disk.opened, options=options)
        provider.implicit("idle", "n/idle", lingering)
        async with provider:
            held = Collector(act=note)
            subscription = await provider.stream("n", "one").subscribe(held)
            for _ in range(100):
                await asyncio.sleep(0.37)
                old = asyncio.get_running_loop().time() - options.save_every_s - 0.01
                must = max((number for at, number in accepted if at <= old), default=-1)
                assert disk.place(subscription.id) > SequenceToken(must)
            assert [each.closed for each in idle] == [1]

    virtual_time.run(main())


def test_commits_are_less_frequent_than_save_every_s_if_preparing_them_is_slow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    at: list[float] = []
    commit = SubscriptionStore.commit

    async def slow(self: SubscriptionStore) -> None:
        await commit(self)
        at.append(asyncio.get_running_loop().time())
        self.prepared_s = 2.0

    async def main() -> None:
        queues = GeneratorQueues(one, events=None, rate_per_s=100)
        async with StreamProvider("p", queues, options=StreamOptions(save_every_s=1)) as provider:
            await provider.stream("n", "one").subscribe(Collector())
            monkeypatch.setattr(SubscriptionStore, "commit", slow)
            await until(lambda: len(at) == 5)
            monkeypatch.undo()

    virtual_time.run(main())
    assert min(after - before for before, after in itertools.pairwise(at)) > 17.9
