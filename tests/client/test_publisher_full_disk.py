"""A full disk: publishing continues once there is space, and readers see no refused batch."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from disks import MemoryDisk, memory_file
from publishers import DIRECTORY, numbers, on_memory, pull_the_plug, read

import rt
from rt.client.fork_safety import open_publishers


@pytest.fixture(autouse=True)
def no_publisher_outlives_its_test() -> Iterator[None]:
    yield
    for publisher in list(open_publishers):
        pull_the_plug(publisher)


def sealed_without_a_next(disk: MemoryDisk, **options: Any) -> rt.Publisher:
    """Return a publisher that sealed its segment and had no space to start the next one."""
    publisher = on_memory(disk, batch_bytes=4096, roll_bytes=8192, **options)
    publisher.publish_many([bytes(1000)] * 6)
    publisher.flush()
    disk.fail("create", at=2, error=errno.ENOSPC)  # The first create is for the temporary file of the table.
    with pytest.raises(rt.DiskFull):
        publisher.publish_many([bytes(3000)] * 8)
    return publisher


def test_small_message_after_roll_failed_with_disk_full_survives_reopen() -> None:
    disk = MemoryDisk()
    publisher = sealed_without_a_next(disk)
    number = publisher.publish(b"small")
    publisher.flush()
    end = publisher.next_number
    publisher.close()
    with on_memory(disk) as again:
        assert again.next_number == end
    assert [m.value for m in read(disk=disk) if m.number == number] == [b"small"]


def test_messages_flushed_after_roll_failed_with_disk_full_survive_power_loss() -> None:
    disk = MemoryDisk()
    publisher = sealed_without_a_next(disk)
    publisher.publish(b"small")
    publisher.flush()
    publisher.publish_many([bytes(3000)] * 8)
    publisher.flush()
    end = publisher.next_number
    left = disk.after_power_cut("none")
    assert on_memory(left).next_number == end
    assert numbers(left) == list(range(end))


def test_publishing_continues_after_renumbering_failed_with_disk_full() -> None:
    disk = MemoryDisk()
    publisher = on_memory(disk, dedup_id="twins")
    disk.fail("create", at=2, error=errno.ENOSPC)
    with pytest.raises(rt.DiskFull):
        publisher.publish(b"x", number=100)
    number = publisher.publish(b"x")
    publisher.flush()
    left = disk.after_power_cut("none")
    assert on_memory(left, dedup_id="twins").next_number == number + 1
    assert numbers(left) == [number]


@pytest.mark.parametrize("room", [0, 100, 5000, 9000, 9216, 20_000])
def test_reader_never_sees_batch_refused_by_full_disk(room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = MemoryDisk()
    publisher = on_memory(disk, batch_bytes=4096)
    publisher.publish(b"0")
    publisher.flush()
    reader = rt.LogReader(DIRECTORY, disk=disk, on_event=lambda _: None)
    seen: list[tuple[int, bytes]] = []

    def look() -> None:
        seen.extend((m.number, m.value) for m in reader)

    def looking(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            look()
            done = real(*args)
            look()
            return done

        return call

    for name in ("truncate", "pwritev"):
        monkeypatch.setattr(memory_file.MemoryFile, name, looking(getattr(memory_file.MemoryFile, name)))
    refused = [b"A%d:" % i + bytes(1000) for i in range(60)]
    disk.capacity_bytes = disk.used_bytes + room
    with pytest.raises(rt.DiskFull) as caught:
        publisher.publish_many(refused)
    disk.capacity_bytes = None
    accepted = caught.value.accepted
    assert accepted.start == 1
    look()
    assert seen[1:] == list(zip(accepted, refused, strict=False))
    kept = len(seen)
    later = [b"B%d" % i + bytes(777) for i in range(8)]
    assert publisher.publish_many(later).start == accepted.stop
    publisher.flush()
    look()
    assert seen == [(m.number, m.value) for m in read(disk=disk)]
    assert [value for _, value in seen[kept:]] == later
    publisher.close()
