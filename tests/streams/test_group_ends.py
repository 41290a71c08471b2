"""Group handlers that are cancelled or hang: no partition stalls silently, and stop returns."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

import pytest
from memory_leases import LeaseTable, MemoryLeases

import rt
from rt.net.lease_client import GroupProgress
from rt.streams.balancer.balancers import LeaseBalancer, LeaseTimes
from rt.streams.group.handler_threads import HandlerThreads
from rt.streams.group.handlers import Handler, HandlerCalls, TopicHandler
from rt.streams.group.member import Member
from rt.streams.group.options import GroupOptions
from rt.streams.group.partitions import Partitions

WAIT_S = 60.0
COUNT = 12


class Positions:
    """The positions that a cluster keeps."""

    def __init__(self, partitions: Partitions) -> None:
        self.held = {partitions.position_name(queue): 0 for queue in partitions.queues}

    async def acknowledge(self, positions: Mapping[str, int]) -> GroupProgress:
        for name, position in positions.items():
            self.held[name] = max(self.held[name], position)
        return GroupProgress(dict(self.held), 0, 10**9)


class Balancer(LeaseBalancer):
    """Gives up a partition after 0.05 s if its work does not end."""

    def __init__(self, leases: MemoryLeases) -> None:
        super().__init__(leases, times=LeaseTimes(30.0, look_s=0.02, give_up_s=0.05))
        self.now_s = leases.now_s


class World:
    """A log with a few messages of one partition, and one member that handles them."""

    def __init__(self, root: Path) -> None:
        self._log = root / "s" / "sessions" / "feed1"
        self._partitions = Partitions("workers", ["a"], 1)
        self.positions = Positions(self._partitions)
        self.member: Member | None = None
        with rt.Publisher(root, "s", publisher_id="feed1") as publisher:
            publisher.publish_many([b"%d" % number for number in range(COUNT)], topic="a")

    async def run(self, handler: Handler) -> None:
        """Run the member until it is stopped. Fail after `WAIT_S`."""
        options = GroupOptions(retry_for_s=0, retry_min_s=0.001, retry_max_s=0.001)
        calls = HandlerCalls([TopicHandler("a", handler, None)], options)
        leases = MemoryLeases(LeaseTable(time.monotonic), "workers~m0")
        with closing(rt.Subscriber(self._log, "s", position=0)) as reader:
            self.member = Member(self._partitions, options, Balancer(leases), self.positions, reader, calls)
            try:
                async with asyncio.timeout(WAIT_S):
                    await self.member.run()
            finally:
                calls.close()

    def stop(self) -> None:
        assert self.member is not None
        self.member.stop()


async def cancelled_within(message: rt.Message) -> None:
    """Raise `CancelledError`, as a library does if its own task was cancelled."""
    if message.position == 5:
        raise asyncio.CancelledError


def cancelled_in_a_thread(message: rt.Message) -> None:
    if message.position == 5:
        raise asyncio.CancelledError


@pytest.mark.parametrize("handler", [cancelled_within, cancelled_in_a_thread])
def test_cancellation_raised_by_handler_raises_handler_failed_with_position(
    tmp_path: Path, handler: Handler
) -> None:
    world = World(tmp_path)
    with pytest.raises(rt.HandlerFailed, match="position 5,"):
        asyncio.run(world.run(handler))
    assert set(world.positions.held.values()) == {5}


def test_handler_cancelling_its_task_stops_member_with_runtime_error(tmp_path: Path) -> None:
    world = World(tmp_path)

    async def cancel(message: rt.Message) -> None:
        if message.position == 5 and (task := asyncio.current_task()) is not None:
            task.cancel()
            await asyncio.Event().wait()

    with pytest.raises(RuntimeError, match="cancelled its task"):
        asyncio.run(world.run(cancel))
    assert set(world.positions.held.values()) == {5}


@pytest.mark.parametrize("raised", [StopIteration, asyncio.CancelledError])
def test_stop_iteration_or_cancellation_while_reading_stops_member_with_runtime_error(
    tmp_path: Path, raised: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path)

    def fail(*_: object) -> None:
        raise raised

    monkeypatch.setattr(rt.Subscriber, "next_batch", fail)
    with pytest.raises(RuntimeError, match=raised.__name__):
        asyncio.run(world.run(lambda _: None))


@pytest.mark.parametrize("kind", ["async", "thread"])
def test_hanging_handler_does_not_block_stop_and_its_message_is_not_acknowledged(
    tmp_path: Path, kind: str
) -> None:
    world, is_free = World(tmp_path), threading.Event()
    calls: list[int] = []

    async def hang(message: rt.Message) -> None:
        calls.append(message.position)
        world.stop()
        await asyncio.Event().wait()

    def block(message: rt.Message) -> None:
        calls.append(message.position)
        loop.call_soon_threadsafe(world.stop)
        is_free.wait()

    async def main() -> None:
        nonlocal loop
        loop = asyncio.get_running_loop()
        await world.run(hang if kind == "async" else block)

    loop: asyncio.AbstractEventLoop
    try:
        asyncio.run(main())
    finally:
        is_free.set()
    assert calls == [0], "none after it"
    assert set(world.positions.held.values()) == {0}, "it is handled again by another member"


HANGING = """
import asyncio, sys, threading
import rt
from rt.streams.group.handler_threads import HandlerThreads
from rt.streams.group.handlers import HandlerCalls, TopicHandler
from rt.streams.group.options import GroupOptions

began = threading.Event()

def hang(message):
    began.set()
    threading.Event().wait()

async def main():
    calls = HandlerCalls([TopicHandler("a", hang, None)], GroupOptions())
    message = rt.Message(0, 0, "feed1", 0, 0, "a", b"")
    handling = asyncio.create_task(calls.handle([(message, 0)], lambda: True))
    while not began.is_set():
        await asyncio.sleep(0.01)
    handling.cancel()
    await asyncio.wait([handling])
    calls.close()

asyncio.run(main())
print("over")
"""


def test_hanging_handler_does_not_block_interpreter_exit() -> None:
    program = [sys.executable, "-c", HANGING]
    ended = subprocess.run(program, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert (ended.returncode, ended.stdout) == (0, "over\n"), ended.stderr


def test_handler_threads_do_not_exceed_limit_and_end_after_close() -> None:
    seen: set[threading.Thread] = set()
    threads = HandlerThreads(3)

    def note() -> None:
        seen.add(threading.current_thread())

    def fail() -> None:
        raise LookupError("no price")

    async def main() -> None:
        for _ in range(20):
            await asyncio.gather(
                *(threads.run(lambda: seen.add(threading.current_thread())) for _ in range(8))
            )
        with pytest.raises(LookupError, match="no price"):
            await threads.run(fail)
        threads.close()

    asyncio.run(main())
    assert 1 <= len(seen) <= 3
    for thread in seen:
        thread.join(WAIT_S)
    assert not any(thread.is_alive() for thread in seen)
