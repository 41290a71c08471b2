"""Tracking of pushes and pulls on a node: counters, lag, silence, stalls, and ended clients."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from rest_node import OPERATOR, OTHER, PUBLISHER, SECOND, SUBSCRIBER

from replicator.protocol.handshake import (
    PullMerged,
    PullProgress,
    PullRange,
    PullSession,
    PushHello,
    PushProgress,
    PushStart,
    PushStatus,
)
from replicator.protocol.messages import Chunk, LogOffset, Run, SegmentSealed, WholeRun
from replicator.pull.server import Pull
from replicator.receive.group_commit import GroupCommit
from rt.errors import Fenced, StorageFailed
from rt.log.format.segment import SegmentId
from rt.log.write.writer import SyncPoint
from rt.net.identity import Identity
from sequencer.sessions.client_tracker import ENDED_MAX, KEPT_NS, ClientTracker, TrackedStores
from sequencer.sessions.sync_timing import TimedGroupCommit

HELLO = PushHello("s", "feed", b"\1" * 16)


class Clock:
    def __init__(self) -> None:
        self.ns = 1000 * SECOND

    def __call__(self) -> int:
        return self.ns


def a_pull(identity: Identity = SUBSCRIBER, **changes: Any) -> Pull:
    return Pull(identity, "ipv4:10.0.0.1:77", PullMerged(), 1000 * SECOND, **changes)


class FakeIntake:
    def __init__(self) -> None:
        self.calls: list[object] = []
        self.failure: Exception | None = None
        self.start = PushStart(b"\2" * 16, 1, 3, "n1", None)

    async def open_run(self, active: Run) -> None:
        self.calls.append(active)

    async def append(self, item: Chunk | SegmentSealed) -> None:
        self.calls.append(item)
        if self.failure is not None:
            raise self.failure

    async def take_runs(self, runs: Sequence[WholeRun]) -> None:
        self.calls.append(runs)

    def record_status(self, status: PushStatus) -> None:
        self.calls.append(status)

    async def next_progress(self, told: PushProgress | None) -> PushProgress:
        return PushProgress(durable_number=7, merged_number=5)

    async def close(self) -> None:
        self.calls.append("close")
        if self.failure is not None:
            raise self.failure


class FakeStores:
    cluster = b"\2" * 16

    def __init__(self, intake: FakeIntake | None) -> None:
        self.intake = intake

    async def accept(self, hello: PushHello, identity: Identity) -> FakeIntake:
        if self.intake is None:
            raise Fenced("no")
        return self.intake


def test_tracked_push_passes_calls_through_and_is_counted() -> None:
    async def check() -> None:
        clients, intake = ClientTracker(), FakeIntake()
        stores = TrackedStores(FakeStores(intake), clients)
        chunk, active = Chunk(LogOffset(0, 0, 64), b"x" * 128), Run(0, b"\4" * 8)

        watched = await stores.accept(HELLO, PUBLISHER)
        await watched.open_run(active)
        await watched.append(chunk)
        progress = await watched.next_progress(None)

        assert (stores.cluster, watched.start) == (FakeStores.cluster, intake.start)
        assert progress == PushProgress(durable_number=7, merged_number=5)
        (client,) = clients.clients()
        assert (client.identity, client.session, client.ended_ns) == (PUBLISHER, "feed", 0)
        assert (client.total_bytes, client.position, client.merged) == (128, 7, 5)
        assert clients.push_bytes == 128
        await watched.close()
        assert intake.calls == [active, chunk, "close"]
        (client,) = clients.clients()
        assert client.ended_ns > 0
        assert clients.push_bytes == 128

    asyncio.run(check())


def test_rejected_push_is_not_listed_and_failed_push_is_marked_ended() -> None:
    async def check() -> None:
        clients, intake = ClientTracker(), FakeIntake()
        with pytest.raises(Fenced):
            await TrackedStores(FakeStores(None), clients).accept(HELLO, PUBLISHER)
        assert clients.clients() == ()

        watched = await TrackedStores(FakeStores(intake), clients).accept(HELLO, PUBLISHER)
        intake.failure = StorageFailed("disk")
        with pytest.raises(StorageFailed):
            await watched.append(Chunk(LogOffset(0, 0, 64), b"x" * 128))
        with pytest.raises(StorageFailed):
            await watched.close()
        (client,) = clients.clients()
        assert (client.ended_ns > 0, client.total_bytes, clients.push_bytes) == (True, 0, 0)

    asyncio.run(check())


def test_pull_is_listed_while_running_and_for_one_day_after_its_end() -> None:
    clock = Clock()
    clients = ClientTracker(clock)
    pull = a_pull(sent_bytes=100, progress=PullProgress(40))

    clients.update({1: pull})
    pull.sent_bytes = 600
    clock.ns += 2 * SECOND
    clients.update({1: pull})
    (client,) = clients.clients()
    assert (client.address, client.total_bytes, client.rate) == ("10.0.0.1:77", 600, 250.0)
    assert (client.position, client.is_of_merged, client.ended_ns) == (40, True, 0)

    pull.sent_bytes = 650
    clients.update({})
    (client,) = clients.clients()
    assert (client.ended_ns, client.total_bytes, client.rate) == (clock.ns, 650, 0.0)
    assert clients.pull_bytes == 650

    clock.ns += KEPT_NS
    clients.update({})
    assert len(clients.clients()) == 1
    clock.ns += 1
    clients.update({})
    assert clients.clients() == ()
    assert clients.pull_bytes == 650


def test_pull_lag_is_age_of_oldest_log_end_not_reached() -> None:
    clock = Clock()
    clients = ClientTracker(clock)
    pull = a_pull(progress=PullProgress(40))

    def lag_s() -> float:
        (client,) = clients.clients()
        return client.lag_ns / SECOND

    clients.update({1: pull}, 100)
    assert lag_s() == 0
    clock.ns += 3 * SECOND
    clients.update({1: pull}, 200)
    assert lag_s() == 3
    pull.progress = PullProgress(100)
    assert lag_s() == 0
    clients.update({1: pull}, 300)
    clock.ns += 2 * SECOND
    pull.progress = PullProgress(299)
    clients.update({1: pull}, 400)
    assert lag_s() == 2
    clients.update({}, 500)
    assert lag_s() == 0


def test_range_reader_reports_no_lag() -> None:
    clock = Clock()
    clients = ClientTracker(clock)
    pull = Pull(SUBSCRIBER, "ipv4:10.0.0.1:77", PullMerged(range=PullRange(90)), 0, progress=PullProgress(40))
    clients.update({1: pull}, 100)
    clock.ns += 3 * SECOND
    clients.update({1: pull}, 200)
    (client,) = clients.clients()
    assert (client.lag_ns, client.position) == (0, 40)


def test_push_lag_is_age_of_oldest_durable_end_not_merged() -> None:
    async def check() -> None:
        clock = Clock()
        clients = ClientTracker(clock)
        watched = await TrackedStores(FakeStores(FakeIntake()), clients).accept(HELLO, PUBLISHER)
        await watched.next_progress(None)
        clients.update({}, 100)
        clock.ns += 4 * SECOND
        clients.update({}, 100)
        (client,) = clients.clients()
        assert (client.lag_ns, client.incarnation) == (4 * SECOND, HELLO.incarnation)

    asyncio.run(check())


def test_reconnected_client_is_listed_once() -> None:
    clock = Clock()
    clients = ClientTracker(clock)
    for key in range(3):
        clients.update({key: a_pull(sent_bytes=10)})
        clock.ns += SECOND
    (client,) = clients.clients()
    assert (client.ended_ns, clients.pull_bytes) == (0, 30)

    clients.update({})

    assert [one.ended_ns for one in clients.clients()] == [clock.ns]


def test_clients_with_different_certificate_or_log_are_listed_separately() -> None:
    clients = ClientTracker(Clock())
    session = Pull(OPERATOR, "ipv4:1.1.1.1:1", PullSession(3), 5)

    clients.update({1: a_pull(), 2: a_pull(OTHER), 3: session})
    clients.update({})

    found = clients.clients()
    assert [one.identity.name for one in found] == ["sub", "other", "op"]
    assert [one.is_of_merged for one in found] == [True, True, False]


def test_ended_clients_are_bounded_and_newest_are_kept() -> None:
    clients = ClientTracker(Clock())
    names = [f"n{index}" for index in range(ENDED_MAX + 5)]

    for key, name in enumerate(names):
        clients.record_pulls({key: a_pull(Identity("s", "subscriber", name), sent_bytes=1)})
    clients.record_pulls({})

    assert [one.identity.name for one in clients.clients()] == names[5:]
    assert clients.pull_bytes == len(names)


_NO_FILE: Any = None
POINT = SyncPoint(_NO_FILE, SegmentId(0, 0), 128, 1)


class FakeReceiver:
    """Syncs at once, or fails."""

    path = "/session"

    def __init__(self, failure: StorageFailed | None = None) -> None:
        self.synced: list[object] = []
        self.failure = failure

    def sync_point(self) -> Any:
        return POINT

    def sync_to(self, point: Any) -> None:
        self.synced.append(point)
        if self.failure is not None:
            raise self.failure


@pytest.mark.parametrize("failure", [None, StorageFailed("fsync failed")])
@pytest.mark.parametrize("make", [GroupCommit, TimedGroupCommit])
def test_group_commit_with_and_without_timing_syncs_and_reports_errors(
    make: type[GroupCommit], failure: StorageFailed | None
) -> None:
    async def check() -> None:
        sync, receiver = make(), FakeReceiver(failure)
        points: list[object] = []
        errors: list[object] = []
        sync.add(receiver, points.append, errors.append)

        sync.request_sync(receiver)
        await sync.wait_idle()
        sync.request_sync(receiver)
        await sync.wait_idle()
        sync.discard(receiver)
        sync.request_sync(receiver)
        await sync.close()

        assert receiver.synced == ([POINT, POINT] if failure is None else [POINT])
        assert (len(points), errors) == ((2, []) if failure is None else (0, [failure]))
        if isinstance(sync, TimedGroupCommit):
            assert sum(sync.durations.histogram().counts) == len(receiver.synced)

    asyncio.run(check())


def test_push_without_reports_is_silent_unless_node_is_busy_with_it_or_was_paused() -> None:
    async def check() -> None:
        clock = Clock()
        queued: set[str] = set()
        clients, intake = ClientTracker(clock, is_queued=queued.__contains__), FakeIntake()
        watched = await TrackedStores(FakeStores(intake), clients).accept(HELLO, PUBLISHER)

        def silent_s(seconds: int = 0, step: int = 1) -> float:
            for _ in range(0, seconds, step):
                clock.ns += step * SECOND
                clients.update({}, 100)
            (client,) = clients.clients()
            return client.silent_s

        clients.update({}, 100)
        assert silent_s(7) == 0  # An older client never reports its status.
        watched.record_status(PushStatus(10, 3000))
        assert silent_s(6) == 6
        (client,) = clients.clients()
        assert (client.waiting_bytes, client.stalled_s) == (10, 3.0)
        await watched.append(Chunk(LogOffset(0, 0, 64), b"x"))
        assert silent_s() == 0
        with watched._push.storing():
            assert silent_s(12) == 0
            (client,) = clients.clients()
            assert client.stalled_s == 12
        queued.add(PUBLISHER.uri)  # Other sessions of the same certificate keep a slow disk busy.
        assert silent_s(12) == 0
        queued.clear()
        assert silent_s(600, step=300) == 4  # This process was paused twice.
        await watched.close()
        (client,) = clients.clients()
        assert (client.silent_s, client.ended_ns) == (4, clock.ns)

    asyncio.run(check())


def test_push_of_large_message_is_not_stalled_while_chunks_arrive() -> None:
    """A message of 256 MiB takes 20 s at 100 Mbit/s, and none of it is synced before its end."""

    async def check() -> None:
        clock = Clock()
        clients, intake = ClientTracker(clock), FakeIntake()
        watched = await TrackedStores(FakeStores(intake), clients).accept(HELLO, PUBLISHER)

        def stalled_s(seconds: int) -> float:
            clock.ns += SECOND
            watched.record_status(PushStatus(2**28, 1000 * seconds))
            clients.update({}, 100)
            (client,) = clients.clients()
            return client.stalled_s

        clients.update({}, 100)
        for second in range(20):
            await watched.append(Chunk(LogOffset(0, 0, 64 + 8 * second), b"x" * 8))
            assert stalled_s(second) <= 1
        assert [stalled_s(second) for second in range(20, 32)] == list(range(2, 14))

    asyncio.run(check())


def test_push_counts_as_unmerged_only_when_other_messages_are_merged() -> None:
    async def check() -> None:
        clock = Clock()
        clients, intake = ClientTracker(clock), FakeIntake()
        watched = await TrackedStores(FakeStores(intake), clients).accept(HELLO, PUBLISHER)

        def unmerged_s(*ends: int) -> float:
            for end in ends:
                clock.ns += SECOND
                clients.update({}, end)
            (client,) = clients.clients()
            return client.unmerged_s

        assert unmerged_s(100, 101, 102) == 0  # Nothing waits.
        await watched.next_progress(None)
        assert unmerged_s(102, 102, 102) == 0  # The cluster merges nothing at all.
        assert unmerged_s(103) == 3
        assert unmerged_s(103, 103) == 5
        await watched.close()
        assert unmerged_s(104) == 0

    asyncio.run(check())
