"""Acknowledged positions are durable and never ahead of the log."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from disks import FaultyDisk, MemoryDisk
from publishers import DEADLINE_SECONDS, DIRECTORY, numbers, on_files, on_memory, pull_the_plug, values

import rt
import rt.log.read.reader
from rt.client.fork_safety import open_publishers
from rt.log.disk import REAL, RealDisk


@pytest.fixture(autouse=True)
def no_publisher_outlives_its_test() -> Iterator[None]:
    yield
    for publisher in list(open_publishers):
        pull_the_plug(publisher)


class NoWatch:
    """A watch for a directory in memory, which never wakes."""

    def __init__(self, path: str) -> None:
        pass

    def wait(self, timeout: float | None) -> bool:
        return False

    def wake(self) -> None:
        pass

    def close(self) -> None:
        pass


def written_but_not_synced(disk: MemoryDisk) -> int:
    """Publish flushed messages, then full batches that are not synced; return the end of the written
    messages.
    """
    publisher = on_memory(disk, batch_bytes=4096)
    publisher.publish_many(values(5))
    publisher.flush()
    publisher.publish_many(values(20))
    return publisher._log.writer.end


def test_messages_made_durable_by_reader_survive_power_cut() -> None:
    disk = MemoryDisk()
    written = written_but_not_synced(disk)
    with rt.LogReader(DIRECTORY, disk=disk) as reader:
        assert len(list(reader)) == written
        reader.make_durable()
    left = disk.after_power_cut("none")
    assert on_memory(left).next_number == written
    assert numbers(left) == list(range(written))


def test_acknowledged_position_is_not_ahead_of_log_after_power_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rt.log.read.reader, "DirectoryWatch", NoWatch)
    disk = MemoryDisk()
    written = written_but_not_synced(disk)
    with rt.Subscriber(DIRECTORY, "stream", name="n", disk=disk) as subscriber:
        assert len(subscriber.poll(1000, timeout=0)) == written
        subscriber.ack(written)
    left = disk.after_power_cut("none")
    publisher = on_memory(left)
    assert publisher.publish(b"new") == written
    publisher.flush()
    with rt.Subscriber(DIRECTORY, "stream", name="n", disk=left) as subscriber:
        assert [m.value for m in subscriber.poll(1000, timeout=0)] == [b"new"]


def test_subscribers_with_same_name_and_copy_acknowledge_concurrently(tmp_path: Path) -> None:
    with rt.Publisher(tmp_path, "s", publisher_id="feed") as publisher:
        publisher.publish_many(values(9))
    directory = publisher.directory

    class Meanwhile(RealDisk):
        """A disk where another subscriber acknowledges between the write of a file and its rename."""

        def rename(self, source: str, target: str) -> None:
            acknowledging = threading.Thread(target=other.ack, args=(7,))
            acknowledging.start()
            acknowledging.join()
            super().rename(source, target)

    with (
        rt.Subscriber(directory, "s", name="sink", disk=Meanwhile()) as subscriber,
        rt.Subscriber(directory, "s", name="sink") as other,
    ):
        subscriber.poll(8)
        other.poll(7)
        subscriber.ack(8)
    with rt.Subscriber(directory, "s", name="sink") as next_one:
        assert next_one.position == 8
    assert not list(Path(directory).glob(".acknowledged*"))


def test_ack_raises_storage_error_and_keeps_position_if_sync_fails(tmp_path: Path) -> None:
    disk = FaultyDisk(REAL)
    with on_files(tmp_path) as publisher:
        publisher.publish(b"x")
        publisher.flush()
        with rt.Subscriber(publisher.directory, "stream", name="n", disk=disk) as subscriber:
            assert len(subscriber.poll(1, timeout=DEADLINE_SECONDS)) == 1
            disk.fail("sync")
            with pytest.raises(rt.StorageError):
                subscriber.ack(1)
        with rt.Subscriber(publisher.directory, "stream", name="n") as subscriber:
            assert subscriber.position == 0


def test_reader_interrupted_during_decode_resumes_without_loss(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    disk = MemoryDisk()
    with rt.Publisher("/data", "stream", publisher_id="feed", disk=disk) as publisher:
        for size in range(4):
            publisher.publish_many([bytes(1000)] * 300, topic=str(size))
            publisher.flush()
    decode = rt.log.read.reader.decode
    calls = 0

    def interrupted(*arguments):
        nonlocal calls
        calls += 1
        if calls == 3:
            raise KeyboardInterrupt
        return decode(*arguments)

    monkeypatch.setattr(rt.log.read.reader, "decode", interrupted)
    got: list[int] = []
    with rt.LogReader(publisher.directory, disk=disk) as reader:
        with pytest.raises(KeyboardInterrupt):
            got.extend(message.number for message in reader)
        got = list(range(reader.position))
        assert 0 < len(got) < 1200
        got += [message.number for message in reader]
    assert got == list(range(1200))
