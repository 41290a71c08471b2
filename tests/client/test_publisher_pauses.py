"""The first batch after a pause is written by the call that publishes it, without linger."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from disks import MemoryDisk
from publishers import numbers, on_memory

import rt
from rt.client import batch_writer
from rt.client.batch_writer import PAUSE_LINGERS

LINGER_MS = 60_000
"""So long that the background thread writes nothing during a test."""
PAUSE_S = PAUSE_LINGERS * LINGER_MS / 1000


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(batch_writer, "monotonic", made)
    return made


def open_publisher(disk: MemoryDisk, **options: Any) -> rt.Publisher:
    return on_memory(disk, linger_ms=LINGER_MS, **options)


def publish_one(publisher: rt.Publisher) -> None:
    publisher.publish(b"one")


def publish_with_headers(publisher: rt.Publisher) -> None:
    publisher.publish(b"one", "topic", headers={"k": b"v"})


def publish_few(publisher: rt.Publisher) -> None:
    publisher.publish_many([b"one", b"two"])


publishing = pytest.mark.parametrize("publish", [publish_one, publish_with_headers, publish_few])


@publishing
def test_first_batch_after_pause_is_written_at_once_and_next_messages_linger(
    clock: Clock, publish: Callable[[rt.Publisher], None]
) -> None:
    disk = MemoryDisk()
    with open_publisher(disk) as publisher:
        for _ in range(2):
            clock.now_s += PAUSE_S
            publish(publisher)
            written = publisher.next_number
            assert publisher.progress.written == written
            clock.now_s += PAUSE_S - 1
            publish(publisher)
            publish(publisher)
            assert publisher.progress.written == written
            publisher.flush()
        end = publisher.next_number
    assert numbers(disk) == list(range(end))


def test_collected_batch_is_not_written_by_publish_after_pause(clock: Clock) -> None:
    """The background thread must write it."""
    disk = MemoryDisk()
    with open_publisher(disk) as publisher:
        publisher.publish(b"before")
        clock.now_s += PAUSE_S
        publisher.publish(b"after")
        assert publisher.progress.written == 0
    assert numbers(disk) == [0, 1]


@publishing
def test_first_batch_after_pause_is_not_written_at_once_with_fsync_batch(
    clock: Clock, publish: Callable[[rt.Publisher], None]
) -> None:
    disk = MemoryDisk()
    with open_publisher(disk, fsync="batch") as publisher:
        clock.now_s += PAUSE_S
        publish(publisher)
        assert publisher.progress.written == 0


@publishing
def test_first_batch_after_pause_is_kept_on_full_disk_and_next_publish_raises_disk_full(
    clock: Clock, publish: Callable[[rt.Publisher], None]
) -> None:
    disk = MemoryDisk()
    with open_publisher(disk) as publisher:
        clock.now_s += PAUSE_S
        disk.capacity_bytes = 0
        publish(publisher)
        end = publisher.next_number
        assert (end > 0, publisher.progress.written) == (True, 0)
        with pytest.raises(rt.DiskFull):
            publisher.publish(b"not accepted")
        with pytest.raises(rt.DiskFull):
            publisher.flush()
        disk.capacity_bytes = None
        assert publisher.publish(b"accepted") == end
    assert numbers(disk) == list(range(end + 1))
