"""Counters that `stats()` of publishers and subscribers returns."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from disks import MemoryDisk
from publishers import on_memory, values
from push_node import NodesInThread, PushNode

import rt
import rt.aio
from rt.client.follow_reader import DeliveryCounter
from rt.log.format.segment_table import TrimReason
from rt.log.write.writer import LogWriter
from rt.net.dev_pki import init_ca, issue
from rt.net.identity import Identity
from rt.net.tls import TLS

WAIT_SECONDS = 120


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def in_a_thread(call: Callable[[], Any]) -> Any:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(call()))
    thread.start()
    thread.join()
    return found[0]


def test_publisher_stats_count_messages_bytes_and_batches(tmp_path: Path) -> None:
    publisher = rt.Publisher(tmp_path, "s", publisher_id="feed", linger_ms=60_000, fsync="never")
    with publisher:
        assert publisher.stats() == rt.PublisherStats(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, None)
        publisher.publish(b"12345", topic="a topic")
        publisher.publish(b"6", headers={"key": b"value"})
        stats = in_a_thread(publisher.stats)
        assert (stats.messages, stats.bytes, stats.batches) == (2, 6, 0)
        assert (stats.written, stats.synced, stats.waiting_messages) == (0, 0, 2)
        assert stats.waiting_bytes > 6
        publisher.flush()
        stats = publisher.stats()
        assert (stats.messages, stats.bytes, stats.batches) == (2, 6, 1)
        assert (stats.written, stats.synced, stats.replicated, stats.merged) == (2, 2, 0, 0)
        assert publisher.publish_many([bytes(1000)] * 600) == range(2, 602)
        stats = publisher.stats()
        assert (stats.messages, stats.bytes) == (602, 600_006)
        assert stats.batches > 1
        assert 2 < stats.written < 602
    stats = publisher.stats()
    assert (stats.messages, stats.bytes, stats.written, stats.synced) == (602, 600_006, 602, 602)
    with rt.Publisher(tmp_path, "s", publisher_id="feed") as again:
        again.publish(b"x")
        stats = again.stats()
        assert (stats.messages, stats.bytes) == (1, 1)
        assert stats.waiting_messages == 603, "those of the earlier run, too"


def test_publisher_stats_count_from_first_number_of_dedup_session(tmp_path: Path) -> None:
    with rt.Publisher(tmp_path, "s", publisher_id="feed", dedup_id="source", linger_ms=60_000) as publisher:
        publisher.publish(b"one", number=5000)
        publisher.publish(b"two")
        stats = publisher.stats()
        assert (stats.messages, stats.bytes, stats.written, stats.synced) == (2, 6, 0, 0)
        publisher.flush()
        assert (publisher.stats().written, publisher.stats().synced) == (2, 2)


@pytest.mark.parametrize("room", [0, 3000, 20_000])
def test_publisher_stats_count_only_accepted_messages_when_disk_is_full(room: int) -> None:
    disk = MemoryDisk()
    with on_memory(disk, batch_bytes=4096) as publisher:
        publisher.publish(b"first")
        publisher.flush()
        disk.capacity_bytes = disk.used_bytes + room
        with pytest.raises(rt.DiskFull) as caught:
            publisher.publish_many(values(100))
        accepted = values(100)[: len(caught.value.accepted)]
        stats = publisher.stats()
        assert stats.messages == publisher.next_number == 1 + len(accepted)
        assert stats.bytes == 5 + sum(map(len, accepted))
        assert isinstance(stats.last_error, rt.DiskFull)
        disk.capacity_bytes = None
        publisher.flush()
        stats = publisher.stats()
        assert (stats.messages, stats.bytes) == (1 + len(accepted), 5 + sum(map(len, accepted)))
        assert stats.written == stats.synced == stats.messages
        assert stats.last_error is None


@pytest.mark.slow
def test_publisher_stats_report_merged_waiting_disconnects_and_problems(tmp_path: Path) -> None:
    init_ca(tmp_path)
    issue(tmp_path, Identity("s", "node", "n1"), loopback=True)
    issue(tmp_path, Identity("s", "publisher", "feed"))
    node_tls, tls = (
        TLS(tmp_path / "ca.crt", tmp_path / f"{n}.crt", tmp_path / f"{n}.key") for n in ("n1", "feed")
    )
    node = PushNode(members=1)
    with (
        NodesInThread(node, tls=node_tls) as nodes,
        rt.Publisher(
            tmp_path, "s", publisher_id="feed", linger_ms=0, endpoints=[node.endpoint], tls=tls
        ) as publisher,
    ):
        publisher.wait(publisher.publish(b"one"), timeout=WAIT_SECONDS)
        stats = publisher.stats()
        assert (stats.messages, stats.replicated, stats.merged) == (1, 1, 1)
        assert (stats.waiting_messages, stats.waiting_bytes) == (0, 0)
        assert (stats.problems, stats.last_error) == (0, None)
        until(lambda: publisher.status().state == "replicating")
        before = publisher.stats().disconnects
        nodes.do(node.stop)
        until(lambda: publisher.stats().disconnects > before)
        publisher.publish(b"two")
        publisher.flush()
        stats = publisher.stats()
        assert (stats.messages, stats.merged, stats.waiting_messages) == (2, 1, 1)
        assert stats.waiting_bytes > 3
        node.refusal = rt.CertificateError("the nodes refuse the certificate")
        nodes.do(lambda: node.start(node_tls))
        until(lambda: publisher.stats().problems)
        node.refusal = None
        until(lambda: publisher.stats().merged == 2)
        until(lambda: publisher.status().error is None)
        stats = publisher.stats()
        assert stats.problems >= 1
        assert isinstance(stats.last_error, rt.CertificateError), "it stays after it was fixed"
    assert node.faults == []


def test_subscriber_stats_count_each_delivered_message(tmp_path: Path) -> None:
    with rt.Publisher(tmp_path, "s", publisher_id="feed", linger_ms=0) as publisher:
        publisher.publish_many([b"%02d" % number for number in range(10)], topic="a")
        publisher.publish_many([b"123"] * 5, topic="b")
        publisher.flush()
        with rt.Subscriber(publisher.directory, "s") as subscriber:
            assert subscriber.stats() == rt.SubscriberStats(0, 0, 0, 15, 15, 0, 0, None)
            iterator = iter(subscriber)
            for delivered in range(1, 4):
                next(iterator)
                stats = in_a_thread(subscriber.stats)
                assert (stats.messages, stats.bytes, stats.position) == (delivered, 2 * delivered, delivered)
                assert stats.lag == 15 - delivered
            assert len(subscriber.poll(4)) == 4
            stats = subscriber.stats()
            assert (stats.messages, stats.bytes, stats.position, stats.lag) == (7, 14, 7, 8)
            batch = subscriber.next_batch(max_messages=1)
            assert batch is not None
            assert subscriber.stats().messages == 8
            while subscriber.stats().lag:
                subscriber.next_batch(timeout=0)
            stats = subscriber.stats()
            assert (stats.messages, stats.bytes, stats.position) == (15, 35, 15)
            publisher.publish(b"x")
            publisher.flush()
            assert subscriber.stats().lag == 1
        assert subscriber.stats().messages == 15


def test_subscriber_stats_exclude_undelivered_messages_after_seek_and_close(tmp_path: Path) -> None:
    with rt.Publisher(tmp_path, "s", publisher_id="feed", linger_ms=0) as publisher:
        publisher.publish_many([b"%02d" % number for number in range(10)])
        publisher.flush()
        with rt.Subscriber(publisher.directory, "s") as subscriber:
            next(iter(subscriber))
            subscriber.seek(8)
            stats = subscriber.stats()
            assert (stats.messages, stats.bytes, stats.position, stats.lag) == (1, 2, 8, 2)
            next(iter(subscriber))
            assert subscriber.stats().messages == 2
        stats = subscriber.stats()
        assert (stats.messages, stats.bytes) == (2, 4)


def test_subscriber_stats_count_gaps_and_keep_last_event(tmp_path: Path) -> None:
    with rt.Publisher(tmp_path, "s", publisher_id="feed", linger_ms=0, roll_bytes=4096) as publisher:
        for _ in range(8):
            publisher.publish_many([bytes(3000)])
            publisher.flush()
        directory = publisher.directory
    with closing(LogWriter.open(directory, publisher._log.writer.identity)) as writer:
        writer.trim(writer.table.segments[4].id, TrimReason.MERGED)
    with rt.Subscriber(directory, "s", position=0) as subscriber:
        with pytest.raises(rt.Gap):
            subscriber.poll(timeout=0)
        stats = subscriber.stats()
        assert (stats.gaps, stats.messages) == (1, 0)
        assert isinstance(stats.last_event, rt.events.SkipForward)
        assert stats.missing == stats.last_event.resumed == stats.position > 0
        assert subscriber.poll(timeout=0)
        assert subscriber.stats().gaps == 1


def test_subscriber_stats_report_log_end_none_if_log_files_are_missing(tmp_path: Path) -> None:
    with rt.Publisher(tmp_path, "s", publisher_id="feed", linger_ms=0) as publisher:
        publisher.publish(b"x")
    with rt.Subscriber(publisher.directory, "s") as subscriber:
        for path in Path(publisher.directory).glob("*"):
            path.rename(tmp_path / path.name)
        stats = subscriber.stats()
        assert (stats.position, stats.log_end, stats.lag) == (0, None, None)


def test_delivery_counter_never_decreases_between_two_updates_of_reading_thread(tmp_path: Path) -> None:
    with rt.Publisher(tmp_path, "s", publisher_id="feed") as publisher:
        publisher.publish_many([b"12"] * 4)
    with rt.LogReader(publisher.directory) as reader:
        batch = reader.next_batch()
    assert batch is not None
    counter = DeliveryCounter()
    counter.add(batch)
    assert counter.delivered([(batch, 1)]) == (3, 6)
    assert counter.delivered([(batch, 4)]) == (3, 6)
    assert counter.delivered([]) == (4, 8)


def test_aio_client_stats_count_messages_returned_by_calls(tmp_path: Path) -> None:
    async def main() -> None:
        async with rt.aio.Publisher(tmp_path, "s", publisher_id="feed", linger_ms=0) as publisher:
            publisher.publish_many([b"%02d" % number for number in range(10)])
            await publisher.flush()
            assert (publisher.stats().messages, publisher.stats().synced) == (10, 10)
            assert publisher.stream == "s"
            unopened = rt.aio.Subscriber(publisher.directory, "s")
            with pytest.raises(rt.Closed, match="not open"):
                unopened.stats()
            async with rt.aio.Subscriber(publisher.directory, "s") as subscriber:
                assert subscriber.stats().messages == 0
                await anext(subscriber)
                await anext(subscriber)
                stats = await asyncio.to_thread(subscriber.stats)
                assert (stats.messages, stats.bytes, stats.position, stats.lag) == (2, 4, 2, 8)
                await subscriber.poll(3)
                stats = subscriber.stats()
                assert (stats.messages, stats.bytes, stats.position, stats.lag) == (5, 10, 5, 5)
                while subscriber.stats().lag:
                    await subscriber.poll()
                assert subscriber.stats().messages == 10

    async def within() -> None:
        async with asyncio.timeout(WAIT_SECONDS):
            await main()

    asyncio.run(within())
