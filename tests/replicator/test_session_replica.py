"""A session replica in its event loop: it acknowledges only bytes on disk with reported batches."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from disks import MemoryDisk
from log_items import COPY, SESSION, items_of, publish, session_copy

from replicator.protocol.messages import Chunk, LogOffset, Run, SegmentSealed
from replicator.protocol.run_in_thread import to_end
from replicator.receive.batch_boundaries import SegmentBoundaries
from replicator.receive.group_commit import GroupCommit
from replicator.receive.session_replica import SessionReplicaWriter
from rt.errors import Closed, RtError, StorageFailed
from rt.log.scan.catalog import segment_path
from rt.net.grpc_errors import Overloaded


def test_seal_during_sync_report_is_acknowledged_only_after_its_batches_are_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    disk = MemoryDisk()
    publish(disk, *[100] * 10)
    publish(disk, 50)  # Another run: the first one is sealed.
    run, whole, sealed = items_of(disk, SESSION)[:3]
    assert isinstance(run, Run)
    assert isinstance(whole, Chunk)
    assert isinstance(sealed, SegmentSealed)
    cut = len(whole.data) // 2
    first = Chunk(whole.start, whole.data[:cut])
    rest = Chunk(whole.start._replace(offset=cut), whole.data[cut:])
    receiver = session_copy(disk)
    reported: list[LogOffset] = []
    answered: list[tuple[LogOffset, LogOffset]] = []
    """Pairs of the acknowledged offset and the reported batch end at that time."""

    def report(found: list[SegmentBoundaries]) -> None:
        reported.extend(LogOffset(*one.segment, one.marks[-1].offset) for one in found)

    async def main() -> None:
        sync, pool = GroupCommit(), ThreadPoolExecutor(1)
        replica = SessionReplicaWriter(receiver, sync, pool, on_marks=report, on_failed=pytest.fail)
        on_synced = receiver.on_synced

        def store_rest() -> None:
            receiver.append(rest)
            receiver.seal(sealed)  # Everything is durable from here on.

        def on_synced_then_sealed(*arguments: Any) -> Any:
            monkeypatch.setattr(receiver, "on_synced", on_synced)
            found = on_synced(*arguments)
            pool.submit(store_rest).result()
            return found

        monkeypatch.setattr(receiver, "on_synced", on_synced_then_sealed)
        await replica.start_run(run)
        await replica.append(first)
        for _ in range(2):  # The sync that is just being reported, and the next one.
            await sync.wait_idle()
            answered.append((replica.progress.durable, reported[-1]))
            sync.request_sync(receiver)
        await replica.close()
        await sync.close()
        pool.shutdown()

    asyncio.run(main())
    assert all(durable <= told for durable, told in answered), answered
    assert answered[-1][0] == sealed.end_offset


def test_interrupted_push_stream_does_not_end_wait_for_sync() -> None:
    disk = MemoryDisk()
    publish(disk, *[100] * 10)
    run, whole = items_of(disk, SESSION)[:2]
    assert isinstance(run, Run)
    assert isinstance(whole, Chunk)
    receiver = session_copy(disk)

    async def main() -> None:
        sync, pool = GroupCommit(), ThreadPoolExecutor(1)
        replica = SessionReplicaWriter(receiver, sync, pool, on_marks=lambda _: None, on_failed=pytest.fail)
        await replica.start_run(run)
        await replica.append(whole)
        end = receiver.next_offset
        assert end is not None
        replica._interrupt(Overloaded("memory is short"))
        with pytest.raises(Overloaded):
            await replica.next_progress(replica.progress)
        await asyncio.wait_for(replica.wait_durable(end), 60)
        waiting = asyncio.ensure_future(replica.wait_durable(end._replace(offset=end.offset + 1)))
        await asyncio.sleep(0)
        await replica.close()
        with pytest.raises(Closed):
            await waiting
        await sync.close()
        pool.shutdown()

    asyncio.run(main())


def test_to_end_finishes_its_task_although_caller_is_cancelled() -> None:
    async def main() -> None:
        lock, done = asyncio.Lock(), []

        async def act() -> None:
            async with lock:
                done.append(1)

        await lock.acquire()
        calling = asyncio.ensure_future(to_end(asyncio.ensure_future(act())))
        await asyncio.sleep(0)
        calling.cancel()
        await asyncio.sleep(0)
        assert not calling.done()
        lock.release()
        with pytest.raises(asyncio.CancelledError):
            await calling
        assert done == [1]

    asyncio.run(main())


def halves(disk: MemoryDisk) -> tuple[Run, Chunk, Chunk]:
    """A run with one segment, and its bytes in two chunks."""
    publish(disk, *[100] * 10)
    run, whole = items_of(disk, SESSION)[:2]
    assert isinstance(run, Run)
    assert isinstance(whole, Chunk)
    cut = len(whole.data) // 2
    rest = Chunk(whole.start._replace(offset=whole.start.offset + cut), whole.data[cut:])
    return run, Chunk(whole.start, whole.data[:cut]), rest


@pytest.mark.parametrize("is_replaced", [True, False])
def test_bytes_in_removed_or_replaced_file_are_never_acknowledged(*, is_replaced: bool) -> None:
    disk = MemoryDisk()
    run, first, rest = halves(disk)
    receiver = session_copy(disk)
    reported, failed = list[SegmentBoundaries](), list[RtError]()

    async def main() -> None:
        sync, pool = GroupCommit(), ThreadPoolExecutor(1)
        replica = SessionReplicaWriter(
            receiver, sync, pool, on_marks=reported.extend, on_failed=failed.append
        )
        await replica.start_run(run)
        await replica.append(first)
        await sync.wait_idle()
        known, count = replica.progress, len(reported)
        assert known.durable.offset > 0
        path = segment_path(COPY, first.start.segment)
        if is_replaced:
            file = disk.create(f"{COPY}/other")
            file.pwritev([disk.open(path).pread(1 << 20, 0)], 0)
            disk.rename(f"{COPY}/other", path)
        else:
            disk.remove(path)
        await replica.append(rest)
        await sync.wait_idle()
        assert (replica.progress, len(reported)) == (known, count)
        assert [type(error) for error in failed] == [StorageFailed]
        with pytest.raises(StorageFailed):
            await replica.next_progress(known)
        await replica.close()
        await sync.close()
        pool.shutdown()

    asyncio.run(main())


def test_cancelled_append_is_acknowledged_only_after_its_own_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    disk = MemoryDisk()
    run, first, rest = halves(disk)
    receiver = session_copy(disk)
    events = list[str]()
    is_storing, may_store = threading.Event(), threading.Event()
    append, sync_to = receiver.append, receiver.sync_to

    def slow_append(chunk: Chunk) -> None:
        is_storing.set()
        assert may_store.wait(60)
        append(chunk)
        events.append("stored")

    def watched_sync(point: Any) -> None:
        sync_to(point)
        events.append("synced")

    async def main() -> None:
        sync, pool = GroupCommit(), ThreadPoolExecutor(1)
        replica = SessionReplicaWriter(
            receiver, sync, pool, on_marks=lambda _: events.append("reported"), on_failed=pytest.fail
        )
        await replica.start_run(run)
        await replica.append(first)
        await sync.wait_idle()
        known = replica.progress
        monkeypatch.setattr(receiver, "append_if_quick", lambda _: False)
        monkeypatch.setattr(receiver, "append", slow_append)
        monkeypatch.setattr(receiver, "sync_to", watched_sync)
        events.clear()
        storing = asyncio.ensure_future(replica.append(rest))
        await asyncio.to_thread(is_storing.wait, 60)
        storing.cancel()
        restarting = asyncio.ensure_future(replica.restart())  # The next stream of the session.
        for _ in range(3):
            await asyncio.sleep(0)
        assert not storing.done()
        assert not restarting.done()
        assert (replica.progress, events) == (known, [])
        may_store.set()
        await asyncio.wait([storing])
        await restarting
        await sync.wait_idle()
        assert storing.cancelled()
        assert events == ["stored", "synced", "reported"]
        assert replica.progress.durable == receiver.next_offset == rest.end
        await replica.close()
        await sync.close()
        pool.shutdown()

    asyncio.run(main())
