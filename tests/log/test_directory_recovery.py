"""Opening a log directory again: after crashes, with segments of another log, with an old table."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from disks import MemoryDisk
from disks.crash_sweep import Log, sweep
from msgspec.structs import replace
from publishers import DIRECTORY, SMALL, files, numbers, on_memory, pull_the_plug, read, restore, values

import rt
import rt.log.read.reader
from rt.client.fork_safety import open_publishers
from rt.log.format.segment_table import TABLE_FILE, SegmentTable, TrimReason, encode_table
from rt.log.scan.directory import read_table


@pytest.fixture(autouse=True)
def no_publisher_outlives_its_test() -> Iterator[None]:
    yield
    for publisher in list(open_publishers):
        pull_the_plug(publisher)


def test_dedup_publisher_reopens_after_crash_before_first_sync_of_lower_number() -> None:
    disk = MemoryDisk()
    with on_memory(disk, dedup_id="twins") as publisher:
        publisher.publish(b"x", number=0)
        publisher.publish_many([b"x"] * 999)
    on_memory(disk, dedup_id="twins").publish(b"x", number=500)
    left = disk.after_power_cut("all")
    for _ in range(2):
        with on_memory(left, dedup_id="twins") as again:
            assert again.next_number == 500


def test_reopening_keeps_temporary_acknowledgement_file_and_removes_leftover_segment() -> None:
    disk = MemoryDisk()
    on_memory(disk).close()
    disk.write(f"{DIRECTORY}/.acknowledged.x.new", b"half of it")
    disk.write(f"{DIRECTORY}/.log.0.9.new", b"a leftover")
    on_memory(disk).close()
    assert disk.read(f"{DIRECTORY}/.acknowledged.x.new") == b"half of it"
    assert f"{DIRECTORY}/.log.0.9.new" not in disk.paths()


def trimming(disk: MemoryDisk, log: Log) -> None:
    publisher = on_memory(disk, **SMALL)
    try:
        for count in (12, 10):
            for _ in range(count):
                number = publisher.publish(bytes(publisher.next_number * 577 % 1500))
            publisher.flush()
            log.append(number + 1)
            assert publisher._log.writer.last_id is not None
            publisher._log.writer.trim(publisher._log.writer.last_id, TrimReason.SIZE)
    finally:
        pull_the_plug(publisher)


def check_trimmed(disk: MemoryDisk, log: Log) -> None:
    publisher = on_memory(disk)
    try:
        assert publisher.next_number >= max(log, default=0)
        end = publisher.publish(b"more")
        publisher.flush()
    finally:
        pull_the_plug(publisher)
    told: list[rt.log.read.reader.Event] = []
    found = numbers(disk, on_event=told.append)
    assert (found, told) == (list(range(found[0], end + 1)), [])


def recover_trimmed(disk: MemoryDisk, log: Log) -> None:
    pull_the_plug(on_memory(disk))


@pytest.mark.parametrize("recover", [None, pytest.param(recover_trimmed, marks=pytest.mark.slow)])
def test_power_cut_in_trim_with_dropped_table_entries_leaves_no_gap(
    recover: Callable[[MemoryDisk, Log], None] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SegmentTable.forgotten.__kwdefaults__, "most", 2)
    seeds = range(1) if recover is None else range(2)
    assert sweep(trimming, check_trimmed, seeds=seeds, recover=recover, recover_cuts=3) > 100


def test_segment_of_another_incarnation_raises_corrupt_for_reader_and_writer() -> None:
    disk, other = MemoryDisk(), MemoryDisk()
    with on_memory(disk) as publisher:
        publisher.publish_many([b"ours"] * 40)
    for _ in range(2):
        with on_memory(other) as publisher:
            publisher.publish_many([b"theirs"] * 40)
    disk.write(f"{DIRECTORY}/log.1.0", other.read(f"{DIRECTORY}/log.1.0"))
    with pytest.raises(rt.Corrupt, match="another log"):
        read(disk=disk)
    with pytest.raises(rt.Corrupt, match="another log"):
        on_memory(disk)


def test_segment_missing_in_middle_of_table_raises_corrupt_for_writer_and_error_for_reader() -> None:
    disk = MemoryDisk()
    with on_memory(disk, **SMALL) as publisher:
        publisher.publish_many(values(20))
    on_memory(disk).close()
    table = read_table(disk, DIRECTORY)
    assert table is not None
    without = replace(table, segments=(table.segments[0], *table.segments[2:]))
    disk.write(f"{DIRECTORY}/{TABLE_FILE}", encode_table(without))
    with pytest.raises(rt.Corrupt):
        on_memory(disk)
    with pytest.raises((rt.Corrupt, rt.Gap)):
        read(disk=disk)


def test_segments_with_overlapping_numbers_raise_corrupt() -> None:
    old = MemoryDisk()
    with on_memory(old) as publisher:
        publisher.publish_many([b"a"] * 5)
    disk = restore(files(old))
    with on_memory(old) as publisher:
        publisher.publish(b"b")
    on_memory(old).close()
    with on_memory(disk) as publisher:
        publisher.publish_many([b"c"] * 50)
    with on_memory(disk) as publisher:
        publisher.publish(b"d")
    disk.write(f"{DIRECTORY}/log.2.0", old.read(f"{DIRECTORY}/log.2.0"))
    disk.write(f"{DIRECTORY}/durable", bytes(128))
    with pytest.raises(rt.Corrupt):
        on_memory(disk)


def test_old_table_with_newly_trimmed_log_raises_corrupt() -> None:
    disk = MemoryDisk()
    publisher = on_memory(disk, **SMALL)
    publisher.publish_many(values(20))
    publisher.flush()
    old = disk.read(f"{DIRECTORY}/{TABLE_FILE}")
    assert publisher._log.writer.last_id is not None
    publisher._log.writer.trim(publisher._log.writer.last_id, TrimReason.SIZE)
    publisher.close()
    disk.write(f"{DIRECTORY}/{TABLE_FILE}", old)
    with pytest.raises(rt.Corrupt):
        read(disk=disk)
    with pytest.raises(rt.Corrupt):
        on_memory(disk)
