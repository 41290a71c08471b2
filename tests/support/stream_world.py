"""Hosts, a queue, a store and consumers in virtual time, with random faults. One seed is one run.

Invariants that each run checks:
- A subscription gets every event from its start at least once.
- Between two calls of `last_token` the tokens of a consumer increase.
- A consumer that stores its token with its events gets each event once.
- The queue may delete acknowledged events. So an event that was acknowledged too early is missing later.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from dataclasses import dataclass, field
from typing import Any

from rt.errors import Overloaded, RtError, StorageFailed
from rt.objects import CommitUnknown, MemoryStore
from rt.streams.balancer.balancer import Fence, FixedBalancer
from rt.streams.core.event_batch import EventBatch
from rt.streams.core.stream_id import QueueId, SequenceToken, StartPosition, StreamId
from rt.streams.delivery.options import StreamOptions
from rt.streams.observer import StreamGap, StreamObserver
from rt.streams.provider import StreamProvider
from rt.streams.queue.adapter import QueueGap, QueueRead, StreamDirection
from rt.streams.queue.mapper import HashRingQueueMapper
from rt.streams.simulate import virtual_time
from rt.streams.stream import Subscription

KEYS = "abc"
FAULTS = (Overloaded("not now"), StorageFailed("the disk"), OSError("gone"))
QUIET_S = 3000.0


class Hand(FixedBalancer):
    """Assigns and removes the queue when the run calls it."""

    def __init__(self) -> None:
        super().__init__([])

    async def give_up(self, queue: QueueId, wait_s: float) -> None:
        for listener in self._listeners:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await listener.release(queue)
                    self.assign({})
                    return
        await self.lose(queue)

    async def lose(self, queue: QueueId) -> None:
        self._queues = {}
        for listener in self._listeners:
            await listener.revoke(queue)
        self.assign({})


@dataclass(eq=False)
class Host:
    """One process. After it is killed, its actions have no effect."""

    provider: StreamProvider
    hand: Hand
    is_alive: bool = True


@dataclass(eq=False)
class Watched:
    """The events that a subscription must get: from `start` until it `has_ended`."""

    stream: StreamId
    start: int | None = None
    got: set[int] = field(default_factory=set)
    has_ended: bool = False
    kept_from: int = 0
    """Events before this one were acknowledged before the subscription existed. The queue may delete them at
    any time; then the subscription gets a gap.
    """
    excused: set[int] = field(default_factory=set)
    """The events that such gaps reported as deleted."""


class World:
    """One run of `seed`."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.is_calm = False
        self.tape: list[str] = []
        self.forgotten = 0
        self.acknowledged = 0
        self.grown = asyncio.Event()
        self.mapper = HashRingQueueMapper(1)
        (self.queue,) = self.mapper.queues
        self.content: dict[str, Any] = {}
        self.opened: Store | None = None
        self.hosts: list[Host] = []
        self.watched: dict[str, Watched] = {}
        self.handles: dict[str, tuple[StreamId, str]] = {}
        self.kept: dict[str, list[int]] = {key: [] for key in KEYS}
        self.pending: set[asyncio.Task[None]] = set()
        self.fence = 0

    # Chance

    def chance(self, of: float) -> bool:
        return not self.is_calm and self.rng.random() < of

    async def fault(self, of: float = 0.02) -> None:
        """Sleep and raise an error, each with some probability."""
        if self.chance(0.5):
            await asyncio.sleep(self.rng.choice((0.0, 0.0, 0.01, 0.3, 3.0)))
        if self.chance(of):
            raise self.rng.choice(FAULTS)

    def delay_s(self) -> float:
        return self.rng.choice((0.0, 0.0, 0.02, 0.5, 2.0)) if not self.is_calm else 0.0

    # The hosts

    def host(self) -> Host:
        hand = Hand()
        options = StreamOptions(
            cache_events=self.rng.choice((10, 20, 60)),
            batch_events_max=self.rng.choice((1, 7, 100)),
            deliver_for_s=self.rng.choice((0, 5, 60)),
            on_poison="block",  # The queue may delete the events of a faulted subscription.
            drain_s=self.rng.choice((0, 2, 8)),
            catch_ups_max=self.rng.choice((1, 2, 16)),
            catch_up_events=self.rng.choice((3, 50)),
            inactive_s=self.rng.choice((3, 1800)),
        )
        made: list[Host] = []
        provider = StreamProvider(
            "p",
            Queues(self, made),
            balancer=hand,
            stores=lambda *_: Store(self, made[0]),
            options=options,
            draw=self.rng,
        )
        made.append(Host(provider, hand))
        provider.implicit("keeping", "n/[ab]", lambda stream: Keeping(self, made[0], f"keeping {stream}"))
        provider.implicit("plain", "n/*", lambda stream: Consumer(self, made[0], f"plain {stream}"))
        for index in range(4):
            provider.consumer(f"c{index}", lambda stream, i=index: Consumer(self, made[0], f"c{i} {stream}"))
        return made[0]

    async def kill(self, host: Host) -> None:
        """Kill a host: its later actions have no effect. Its tasks end later."""
        host.is_alive = False
        if self.opened is not None and self.opened.host is host:
            self.opened = None
        self.later(host.provider.stop())

    def later(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self.pending.add(task)
        task.add_done_callback(self.pending.discard)

    # The run

    async def run(self, steps: int) -> None:
        for key in KEYS:
            self.watched[f"plain n/{key}"] = Watched(StreamId("n", key), 0)
        self.hosts = [self.host() for _ in range(3)]
        for host in self.hosts:
            await host.provider.start()
        owner: Host | None = None
        for _ in range(steps):
            if owner is None or not owner.is_alive:
                owner = self.rng.choice(self.hosts)
                self.fence += 1
                owner.hand.assign({self.queue: Fence(self.fence)})
            await asyncio.sleep(self.rng.choice((0.0, 0.05, 0.5, 4.0)))
            self.publish(self.rng.randrange(12))
            if self.chance(0.3) and self.acknowledged > self.forgotten:
                self.forgotten = self.rng.randint(self.forgotten, self.acknowledged)
            self.check(owner)
            draw = self.rng.random()
            if draw < 0.1:
                await owner.hand.give_up(self.queue, self.rng.choice((0.1, 3, 60)))
                owner = None
            elif draw < 0.14:
                await owner.hand.lose(self.queue)
                owner = None
            elif draw < 0.18:
                self.hosts.remove(owner)
                await self.kill(owner)
                self.hosts.append(self.host())
                await self.hosts[-1].provider.start()
            elif draw < 0.5:
                self.later(self.client(owner))
        await self.calm_down(owner)

    def publish(self, count: int) -> None:
        self.tape += [self.rng.choice(KEYS) for _ in range(count)]
        self.grown.set()
        self.grown = asyncio.Event()

    def check(self, owner: Host) -> None:
        for agent in owner.provider._manager.agents():  # type: ignore[union-attr]
            assert agent.queue.cache.events <= owner.provider.options.cache_events

    async def client(self, owner: Host) -> None:
        """Subscribe, resume or unsubscribe, and perhaps cancel the call."""
        limit = self.rng.choice((0.0, 0.3, 3.0, 200.0))
        name = self.rng.choice(sorted(self.handles)) if self.handles and self.rng.random() < 0.6 else None
        with contextlib.suppress(RtError, TimeoutError):
            async with asyncio.timeout(limit):
                if name is None:
                    await self.subscribe(owner)
                else:
                    await self.change(owner, name)

    async def subscribe(self, owner: Host) -> None:
        name = f"c{self.rng.randrange(4)}"
        stream = StreamId("n", self.rng.choice(KEYS))
        start: Any = StartPosition.LATEST
        if self.rng.random() < 0.4 and self.forgotten < len(self.tape):
            start = SequenceToken(self.rng.randint(self.forgotten, len(self.tape)))
        if f"{name} {stream}" in self.handles:
            return
        self.handles[f"{name} {stream}"] = (stream, "")
        watched = self.watched[f"{name} {stream}"] = Watched(stream)
        try:
            made = await owner.provider.stream("n", stream.key).subscribe(
                Consumer(self, owner, f"{name} {stream}"), start=start, consumer=name
            )
        except BaseException:
            watched.has_ended = True  # The subscription may exist or not.
            raise
        if owner.is_alive:
            self.handles[f"{name} {stream}"] = (stream, made.id)
            is_latest = start is StartPosition.LATEST
            watched.start = len(self.tape) if is_latest else start.sequence_number
            watched.kept_from = self.acknowledged
        else:
            watched.has_ended = True

    async def change(self, owner: Host, name: str) -> None:
        stream, handle = self.handles[name]
        watched = self.watched[name]
        if not handle:
            return
        subscription = Subscription(owner.provider, stream, handle)
        if self.rng.random() < 0.3:
            watched.has_ended = True
            await subscription.unsubscribe()
        else:
            await subscription.resume(Consumer(self, owner, name))

    # The end

    async def calm_down(self, owner: Host | None) -> None:
        """End all faults, then check that every event arrives."""
        self.is_calm = True
        if owner is None or not owner.is_alive:
            owner = self.hosts[0]
            self.fence += 1
            owner.hand.assign({self.queue: Fence(self.fence)})
        self.publish(5)
        try:
            async with asyncio.timeout(QUIET_S):
                while self.missing():
                    await asyncio.sleep(1.0)
        except TimeoutError:
            raise AssertionError(f"missing: {self.missing()}") from None
        async with asyncio.timeout(QUIET_S):
            while self.pending:
                await asyncio.wait(self.pending)
            while owner.provider.status()[0].lag or owner.provider.status()[0].behind:
                await asyncio.sleep(1.0)
        await asyncio.sleep(400)  # After a slow commit the next one is delayed.
        agent = await owner.provider.agent_of(StreamId("n", "a"))
        assert not agent._table.leaving
        records = {record.id for record in agent._store.records()}
        assert len(records) <= sum(bool(handle) for _, handle in self.handles.values()) + agent_extras(
            self
        ), (
            sorted(map(str, agent._store.records())),
            self.handles,
        )
        for host in self.hosts:
            await host.provider.stop()
        for key in "ab":
            assert self.kept[key] == [at for at, each in enumerate(self.tape) if each == key], key
        left = asyncio.all_tasks() - {asyncio.current_task()}
        assert not left, left

    def missing(self) -> dict[str, list[int]]:
        found = {}
        for name, watched in self.watched.items():
            if watched.start is not None and not watched.has_ended:
                wanted = {
                    at
                    for at, key in enumerate(self.tape)
                    if key == watched.stream.key and at >= watched.start
                }
                if lacking := wanted - watched.got - watched.excused:
                    found[name] = sorted(lacking)
        for key in "ab":
            if lacking := {at for at, each in enumerate(self.tape) if each == key} - set(self.kept[key]):
                found[f"keeping n/{key}"] = sorted(lacking)
        return found


def agent_extras(world: World) -> int:
    """Return the maximum number of further subscriptions: a cancelled call may have made one."""
    return sum(watched.has_ended for watched in world.watched.values())


class Consumer(StreamObserver):
    """Records the events that it accepts."""

    def __init__(self, world: World, host: Host, name: str) -> None:
        self.world, self.host, self.name = world, host, name
        key = name[-1]
        self.watched = world.watched.setdefault(name, Watched(StreamId("n", key)))
        self.last = SequenceToken(0)
        self.is_called = False

    async def on_batch(self, batch: EventBatch) -> SequenceToken | None:
        assert not self.is_called, self.name
        self.is_called = True
        try:
            await self.world.fault(0.1)
            if self.world.chance(0.03):
                await asyncio.sleep(self.world.rng.choice((10.0, 100.0)))
            if self.world.chance(0.02):
                raise asyncio.CancelledError
            if self.world.chance(0.03):
                await self.world.client(self.host)
        finally:
            self.is_called = False
        if not self.host.is_alive:
            raise OSError("killed")
        assert batch.stream == self.watched.stream
        count = len(batch)
        answer = None
        if self.world.chance(0.1):
            count = self.world.rng.randint(1, count)
            answer = batch.token(count - 1)
        self.take(list(batch)[:count])
        return answer

    def take(self, events: list[tuple[SequenceToken, Any]]) -> None:
        for token, event in events:
            assert token >= self.last, (self.name, token, self.last)
            assert event == token.sequence_number
            self.last = token.next
            self.watched.got.add(event)

    async def last_token(self) -> SequenceToken | None:
        await self.world.fault(0.05)
        self.last = SequenceToken(0)
        return None

    async def on_gap(self, gap: StreamGap) -> None:
        await self.world.fault(0.1)
        told = range(gap.wanted.sequence_number, min(gap.resumed.sequence_number, self.watched.kept_from))
        self.watched.excused.update(told)

    async def on_close(self) -> None:
        await self.world.fault(0.1)


class Keeping(Consumer):
    """Stores its token with its events."""

    def take(self, events: list[tuple[SequenceToken, Any]]) -> None:
        super().take(events)
        self.world.kept[self.name[-1]] += [event for _, event in events]

    async def last_token(self) -> SequenceToken | None:
        await super().last_token()
        kept = self.world.kept[self.name[-1]]
        return SequenceToken(kept[-1]) if kept else None


class Store(MemoryStore):
    """A store that can be open only once at a time. A commit succeeds, fails, or has an unknown outcome."""

    def __init__(self, world: World, host: Host) -> None:
        if world.opened is not None or not host.is_alive or world.chance(0.1):
            raise StorageFailed("the store cannot be opened")
        super().__init__(world.content)
        self.world, self.host = world, host
        self.is_dead = False
        world.opened = self

    def begin(self, kind: Any) -> Any:
        if self.is_dead or self.world.chance(0.01):
            raise StorageFailed("the store failed")
        writer = super().begin(kind)
        commit = writer.commit

        def committed() -> None:
            draw = self.world.rng.random() if not self.world.is_calm else 1.0
            if self.is_dead or not self.host.is_alive or draw < 0.02:
                writer.rollback()
                raise StorageFailed("it was not committed")
            if draw < 0.03:
                writer.rollback()
                self.is_dead = True
                raise CommitUnknown("it did not happen")
            commit()
            assert self.world.opened is self
            self.world.content = self.content()
            if draw < 0.04:
                self.is_dead = True
                raise CommitUnknown("it did happen")

        writer.commit = committed  # type: ignore[method-assign]
        return writer

    def close(self) -> None:
        super().close()
        if self.world.opened is self:
            self.world.opened = None


class Queues:
    """Factory and adapter of one host."""

    is_rewindable = True
    direction = StreamDirection.READ_ONLY

    def __init__(self, world: World, made: list[Host]) -> None:
        self.world, self.made = world, made
        self.mapper = world.mapper

    async def adapter(self) -> Any:
        return self

    def reads(self, _: StreamId) -> bool:
        return True

    async def publish(self, *_: Any) -> None:
        raise AssertionError

    async def receiver(self, queue: QueueId, start: SequenceToken | None, *_: Any) -> Any:
        await self.world.fault()
        return Reader(self.world, self.made[0], start or SequenceToken(0), None)

    async def latest(self, _: QueueId) -> SequenceToken:
        await self.world.fault()
        return SequenceToken(len(self.world.tape))

    async def epoch(self, _: QueueId) -> None:
        await self.world.fault()

    async def history(self, queue: QueueId, stream: StreamId, start: SequenceToken) -> Any:
        await self.world.fault()
        return Reader(self.world, self.made[0], start, stream)

    async def close(self) -> None:
        await self.world.fault()


class Reader:
    """Receiver and history."""

    def __init__(self, world: World, host: Host, start: SequenceToken, only: StreamId | None) -> None:
        self.world, self.host, self.start, self.only = world, host, start, only
        self.at = start.sequence_number + (start.event_index > 0)

    @property
    def known_end(self) -> SequenceToken:
        return SequenceToken(len(self.world.tape))

    async def receive(self, events_max: int, timeout: float) -> QueueRead | None:
        await self.world.fault()
        if self.at >= len(self.world.tape):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout):
                    await self.world.grown.wait()
        return self.take(events_max) if self.at < len(self.world.tape) else None

    async def read(self, events_max: int) -> QueueRead:
        await self.world.fault()
        return self.take(events_max)

    async def acknowledge(self, low: SequenceToken) -> None:
        await self.world.fault()
        if self.host.is_alive:
            self.world.acknowledged = max(
                self.world.acknowledged, low.sequence_number + (low.event_index > 0)
            )

    async def close(self) -> None:
        await self.world.fault()

    def take(self, events_max: int) -> QueueRead:
        world, gap = self.world, None
        if self.at < world.forgotten:
            gap = QueueGap(SequenceToken(self.at), SequenceToken(world.forgotten), "forgotten")
            self.at = world.forgotten
        stop = min(len(world.tape), self.at + world.rng.randint(1, events_max))
        batches = []
        for key in KEYS:
            numbers = [at for at in range(self.at, stop) if world.tape[at] == key]
            if numbers and self.only in (None, StreamId("n", key)):
                batches.append(EventBatch(StreamId("n", key), numbers, numbers, None, 64 * len(numbers)))
        self.at = max(self.at, stop)
        return QueueRead(batches, SequenceToken(self.at), [] if gap is None else [gap])


def run(seed: int, steps: int = 60) -> World:
    """Run the world of `seed` to its end."""
    made: list[World] = []

    async def main() -> None:
        made.append(World(seed))
        await made[0].run(steps)

    virtual_time.run(main(), delay_s=lambda: made[0].delay_s() if made else 0.0)
    return made[0]
