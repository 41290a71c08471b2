"""Group members in one process share partitions, hand them over exactly, and stop at a failure."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path

import pytest
from memory_leases import LeaseTable, MemoryLeases

import rt
from rt.net.lease_client import GroupProgress
from rt.streams.balancer.balancers import LeaseBalancer, LeaseTimes
from rt.streams.group.handlers import Handler, HandlerCalls, TopicHandler
from rt.streams.group.member import Member
from rt.streams.group.options import GroupOptions
from rt.streams.group.partitions import Partitions

WAIT_S = 60.0
TOPICS = [f"a/{number}" for number in range(8)]


class Positions:
    """The positions that a cluster stores. The first `failures` calls raise a retriable error."""

    def __init__(self, partitions: Partitions) -> None:
        self.held = {partitions.position_name(queue): 0 for queue in partitions.queues}
        self.failures = 0

    async def acknowledge(self, positions: Mapping[str, int]) -> GroupProgress:
        if self.failures:
            self.failures -= 1
            raise rt.Overloaded("busy")
        for name, position in positions.items():
            self.held[name] = max(self.held[name], position)
        return GroupProgress(dict(self.held), 0, 10**9)


class Balancer(LeaseBalancer):
    def __init__(self, leases: MemoryLeases) -> None:
        super().__init__(leases, times=LeaseTimes(30.0, look_s=0.02, give_up_s=30.0))
        self.now_s = leases.now_s


class World:
    def __init__(self, root: Path, count: int = 4) -> None:
        self.root = root
        self.partitions = Partitions("workers", ["a/*"], count)
        self.positions, self.table = Positions(self.partitions), LeaseTable(time.monotonic)
        self.publisher = rt.Publisher(root, "s", publisher_id="feed1")
        self.publish(40)

    def publish(self, count: int) -> None:
        for number in range(count):
            self.publisher.publish(b"%d" % number, topic=TOPICS[number % len(TOPICS)])
        self.publisher.flush()

    async def run(self, handler: Handler, made: list[Member], **options: float) -> None:
        """Run a member on the log file until it is stopped."""
        leases = MemoryLeases(self.table, f"workers~m{len(made)}")
        settings = GroupOptions(retry_min_s=0.001, retry_max_s=0.001, **options)  # type: ignore[arg-type]
        calls = HandlerCalls([TopicHandler("a/*", handler, None)], settings)
        with closing(rt.Subscriber(self.root / "s" / "sessions" / "feed1", "s", position=0)) as reader:
            member = Member(self.partitions, settings, Balancer(leases), self.positions, reader, calls)
            made.append(member)
            try:
                await member.run()
            finally:
                calls.close()


async def until(is_met: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not is_met():
            await asyncio.sleep(0.01)


def test_members_share_messages_and_handle_each_once_when_members_stop(tmp_path: Path) -> None:
    world = World(tmp_path)
    handled: list[tuple[str, rt.Message]] = []
    members: list[Member] = []

    def by(name: str) -> set[str]:
        return {message.topic for other, message in handled if other == name}

    async def main() -> None:
        async def note(message: rt.Message) -> None:
            handled.append(("first", message))

        first = asyncio.create_task(world.run(note, members))
        await until(lambda: len(handled) == 40)
        second = asyncio.create_task(world.run(lambda message: handled.append(("second", message)), members))
        total = 40
        while not by("second"):
            world.publish(8)
            total += 8
            await until(lambda total=total: len(handled) >= total)  # type: ignore[misc]
        world.publish(400)
        members[0].stop()
        await first
        world.publish(40)
        total += 440
        await until(lambda: len(handled) >= total)
        members[1].stop()
        await second
        assert len(handled) == total, "each once, as no member died"
        for topic in TOPICS:
            positions = [message.position for _, message in handled if message.topic == topic]
            assert positions == sorted(positions)
        assert set(world.positions.held.values()) == {total}

    with world.publisher:
        asyncio.run(main())


def test_failing_message_stops_member_and_is_not_acknowledged(tmp_path: Path) -> None:
    world = World(tmp_path, count=1)
    world.positions.failures = 2
    handled: list[int] = []

    async def fail(message: rt.Message) -> None:
        if message.position == 17:
            raise ValueError("no price")
        handled.append(message.position)

    with world.publisher:
        with pytest.raises(rt.HandlerFailed, match="position 17"):
            asyncio.run(world.run(fail, [], retry_for_s=0))
        assert handled == list(range(17))
        assert set(world.positions.held.values()) == {17}

        async def main() -> None:
            members: list[Member] = []
            running = asyncio.create_task(
                world.run(lambda message: handled.append(message.position), members)
            )
            await until(lambda: len(handled) == 40)
            members[0].stop()
            await running

        asyncio.run(main())
    assert handled == list(range(40))


@pytest.mark.parametrize("end", ["stopped", "lost"])
def test_member_with_expired_leases_acknowledges_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    """The member's process was paused. Meanwhile an operator may have moved the positions back, or deleted
    them.
    """
    world = World(tmp_path, count=1)
    handled: list[int] = []
    paused_s = 0.0
    world.table = LeaseTable(lambda: time.monotonic() + paused_s)

    async def main() -> None:
        nonlocal paused_s
        members: list[Member] = []
        running = asyncio.create_task(
            world.run(lambda message: handled.append(message.position), members, commit_every_s=0.01)
        )
        await until(lambda: set(world.positions.held.values()) == {40})
        world.positions.failures = 10**9
        world.publish(40)
        await until(lambda: len(handled) == 80)
        paused_s = 3600.0
        monkeypatch.setattr(world.table, "acquire", lambda *_: 0)  # Another member has acquired the leases.
        world.positions.held = dict.fromkeys(world.positions.held, 0)
        world.positions.failures = 0
        if end == "lost":
            await until(lambda: not members[0]._work)
        members[0].stop()
        await running

    with world.publisher:
        asyncio.run(main())
    assert set(world.positions.held.values()) == {0}


def _fullness(member: Member, bound: str) -> int:
    return member.waiting if bound == "buffer_messages" else member.waiting_bytes


@pytest.mark.parametrize("bound", ["buffer_messages", "buffer_bytes"])
def test_member_stops_reading_while_its_buffer_is_full(tmp_path: Path, bound: str) -> None:
    """The buffer limits the size of its messages, not only their number. Here 40 MB of messages follow."""
    world, size = World(tmp_path), 8000 if bound == "buffer_bytes" else 1
    for number in range(5000):
        world.publisher.publish(bytes(size), topic=TOPICS[number % len(TOPICS)])
    world.publisher.flush()
    handled: list[int] = []
    is_free = asyncio.Event()

    async def wait(message: rt.Message) -> None:
        await is_free.wait()
        handled.append(message.position)

    async def main() -> None:
        members: list[Member] = []
        most = 10 if bound == "buffer_messages" else 10**6
        running = asyncio.create_task(world.run(wait, members, concurrency=4, **{bound: most}))
        await until(lambda: bool(members) and _fullness(members[0], bound) >= most)
        for _ in range(20):
            await asyncio.sleep(0.01)
            assert members[0].waiting < 2000, "one read more than the buffer at most"
            assert members[0].waiting_bytes < 10 * 2**20
        is_free.set()
        await until(lambda: len(handled) == 5040)
        assert members[0].waiting_bytes == 0
        members[0].stop()
        await running

    with world.publisher:
        asyncio.run(main())


def test_subscriber_seeks_forward_and_backward(tmp_path: Path) -> None:
    world = World(tmp_path)
    with (
        world.publisher,
        rt.Subscriber(tmp_path / "s" / "sessions" / "feed1", "s", position=0) as subscriber,
    ):
        assert [message.position for message in subscriber.poll(3)] == [0, 1, 2]
        subscriber.seek(30)
        assert (subscriber.position, subscriber.poll(1)[0].position, subscriber.position) == (30, 30, 31)
        subscriber.seek(1)
        assert [message.position for message in subscriber.poll(2)] == [1, 2]
        with pytest.raises(rt.InvalidOption):
            subscriber.seek("middle")  # type: ignore[arg-type]
        assert subscriber.poll(1)[0].position == 3
