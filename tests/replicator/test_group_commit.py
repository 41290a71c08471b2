"""Group commit: which syncs run in the event loop, which run in threads, and how errors are reported."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

import rt
from replicator.receive import group_commit
from replicator.receive.group_commit import QUICK_BYTES_MAX, GroupCommit
from rt.errors import RtError
from rt.log.format.segment import SegmentId
from rt.log.write.writer import SyncPoint

WAIT_S = 60


class Receiver:
    """Stores bytes of one segment, and records which thread synced them."""

    def __init__(self) -> None:
        self.segment, self.stored, self.synced = SegmentId(0, 0), 0, 0
        self.threads: list[str] = []
        self.told: list[int] = []
        self.failed: list[RtError] = []
        self.error: Exception | None = None

    path = "replica"

    def store(self, size: int) -> None:
        self.stored += size

    def sync_point(self) -> SyncPoint | None:
        file: Any = None
        return None if self.stored == self.synced else SyncPoint(file, self.segment, self.stored, self.stored)

    def sync_to(self, point: SyncPoint) -> None:
        name = threading.current_thread().name
        self.threads.append("thread" if name.startswith("rt-sync") else "loop")
        if self.error is not None:
            raise self.error
        self.synced = point.offset

    def on_synced(self, point: SyncPoint | None) -> None:
        self.told.append(self.synced if point is None else point.offset)


class Clock:
    """Each sync takes `sync_s`."""

    def __init__(self) -> None:
        self.now_s = self.sync_s = 0.0

    def monotonic(self) -> float:
        self.now_s += self.sync_s
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(group_commit, "time", clock)
    return clock


async def stored(sync: GroupCommit, size: int, *receivers: Receiver) -> None:
    """Store in each of them, and wait until all is synced."""
    for receiver in receivers:
        receiver.store(size)
        sync.request_sync(receiver)
    async with asyncio.timeout(WAIT_S):
        await sync.wait_idle()


async def begun(count: int = 1) -> tuple[GroupCommit, list[Receiver]]:
    """Receivers with one completed sync, because the size of the first sync is unknown."""
    sync, receivers = GroupCommit(), [Receiver() for _ in range(count)]
    for receiver in receivers:
        sync.add(receiver, receiver.on_synced, receiver.failed.append)
        await stored(sync, 1, receiver)
        assert receiver.threads.pop() == "thread"
    return sync, receivers


def test_small_sync_runs_in_loop_but_large_or_first_of_segment_in_thread(
    clock: Clock,
) -> None:
    async def main() -> None:
        sync, (receiver,) = await begun()
        for size in (1, QUICK_BYTES_MAX, QUICK_BYTES_MAX + 1, 1):
            await stored(sync, size, receiver)
        assert receiver.threads == ["loop", "loop", "thread", "loop"]
        receiver.segment = SegmentId(0, 1)
        await stored(sync, 1, receiver)
        await stored(sync, 1, receiver)
        assert receiver.threads[4:] == ["thread", "loop"]
        assert receiver.told[-1] == receiver.stored == receiver.synced
        assert receiver.told == sorted({*receiver.told})
        await sync.close()

    asyncio.run(main())


def test_receiver_without_new_bytes_is_notified_without_sync(clock: Clock) -> None:
    async def main() -> None:
        sync, (receiver,) = await begun()
        await stored(sync, 0, receiver)
        await stored(sync, 1, receiver)
        assert (receiver.threads, receiver.told) == (["loop"], [1, 1, 2])
        await sync.close()

    asyncio.run(main())


def test_receivers_ready_together_are_synced_by_threads(clock: Clock) -> None:
    async def main() -> None:
        sync, receivers = await begun(3)
        await stored(sync, 1, *receivers)
        assert [receiver.threads for receiver in receivers] == [["thread"]] * 3
        await sync.close()

    asyncio.run(main())


def test_threads_run_syncs_for_a_while_after_slow_sync(clock: Clock) -> None:
    async def main() -> None:
        sync, (receiver,) = await begun()
        clock.sync_s = group_commit.QUICK_S * 1.1
        await stored(sync, 1, receiver)
        clock.sync_s = 0.0
        await stored(sync, 1, receiver)
        clock.now_s += group_commit.SLOW_S * 0.9
        await stored(sync, 1, receiver)
        clock.now_s += group_commit.SLOW_S
        await stored(sync, 1, receiver)
        assert receiver.threads == ["loop", "thread", "thread", "loop"]
        await sync.close()

    asyncio.run(main())


def test_loop_spends_at_most_half_of_its_time_on_syncs(clock: Clock) -> None:
    async def main() -> None:
        sync, (receiver,) = await begun()
        clock.sync_s = group_commit.QUICK_S / 2
        await stored(sync, 1, receiver)
        clock.sync_s = 0.0
        await stored(sync, 1, receiver)
        clock.now_s += group_commit.QUICK_S
        await stored(sync, 1, receiver)
        assert receiver.threads == ["loop", "thread", "loop"]
        await sync.close()

    asyncio.run(main())


@pytest.mark.parametrize("error", [rt.StorageFailed("no"), ValueError("bug")])
def test_failed_sync_in_loop_is_reported_once_and_is_final(clock: Clock, error: Exception) -> None:
    async def main() -> None:
        sync, (receiver,) = await begun()
        receiver.error = error
        await stored(sync, 1, receiver)
        await stored(sync, 1, receiver)
        assert receiver.threads == ["loop"]
        assert receiver.told == [1]
        (failed,) = receiver.failed
        assert str(error) in str(failed)
        await sync.close()

    asyncio.run(main())


def test_requested_sync_is_dropped_on_close_or_if_receiver_is_discarded(clock: Clock) -> None:
    async def main() -> None:
        sync, (one, other) = await begun(2)
        one.store(1)
        sync.request_sync(one)
        sync.discard(one)
        async with asyncio.timeout(WAIT_S):
            await sync.wait_idle()
        other.store(1)
        sync.request_sync(other)
        async with asyncio.timeout(WAIT_S):
            await sync.close()
        assert one.threads == other.threads == []

    asyncio.run(main())
