"""Reading corrupt or incomplete logs: each fault is reported, and hides no valid message."""

from __future__ import annotations

import errno
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from batches import columns, forge
from disks import MemoryDisk, Operation
from publishers import (
    DEADLINE_SECONDS,
    DIRECTORY,
    SMALL,
    is_told,
    numbers,
    on_files,
    on_memory,
    pull_the_plug,
    values,
)

import rt
import rt.log.write.writer
from rt.client.fork_safety import open_publishers
from rt.events import BadMessage, SkipForward
from rt.log.format.checksum import batch_seed
from rt.log.format.segment import LogKind, SegmentId
from rt.log.format.segment_table import LogIdentity, TrimReason
from rt.log.write.writer import BatchFrames, LogWriter


@pytest.fixture(autouse=True)
def no_publisher_outlives_its_test() -> Iterator[None]:
    yield
    for publisher in list(open_publishers):
        pull_the_plug(publisher)


def spoil(path: Path, *, is_emptied: bool) -> None:
    if is_emptied:
        path.write_bytes(b"")
    else:
        path.unlink()


@pytest.mark.parametrize("follow", [False, True])
@pytest.mark.parametrize("is_emptied", [False, True])
@pytest.mark.parametrize(("segment", "whole"), [("log.0.0", 0), ("log.0.1", 8), ("log.0.2", 16)])
def test_missing_or_empty_sealed_segment_raises_corrupt_after_messages_before_it(
    tmp_path: Path, segment: str, whole: int, is_emptied: bool, follow: bool
) -> None:
    with on_files(tmp_path, linger_ms=60_000, **SMALL) as publisher:
        publisher.publish_many(values(40))
    got: list[int] = []
    spoil(Path(publisher.directory) / segment, is_emptied=is_emptied)
    hint = "No pull can repair the log of a session"
    with rt.LogReader(publisher.directory, follow=follow) as reader, pytest.raises(rt.Corrupt, match=hint):
        while messages := reader.poll(1000, timeout=DEADLINE_SECONDS):
            got += [m.number for m in messages]
    assert got == list(range(whole))


def test_sealed_segment_emptied_while_read_raises_corrupt(tmp_path: Path) -> None:
    with on_files(tmp_path, linger_ms=60_000, roll_bytes=4 * 2**20) as publisher:
        for _ in range(60):
            publisher.publish(bytes(100_000))
    with rt.LogReader(publisher.directory) as reader:
        assert len(reader.poll(1)) == 1
        (Path(publisher.directory) / "log.0.0").write_bytes(b"")
        with pytest.raises(rt.Corrupt):
            list(reader)


def test_poll_returns_messages_before_corrupt_segment_then_raises_corrupt() -> None:
    disk = MemoryDisk()
    with on_memory(disk, **SMALL) as publisher:
        publisher.publish_many(values(40))
    disk.flip_bit(f"{DIRECTORY}/log.0.2", 100, 1)
    with rt.LogReader(DIRECTORY, disk=disk) as reader:
        assert [m.number for m in reader.poll(1000)] == list(range(16))
        assert reader.position == 16
        with pytest.raises(rt.Corrupt):
            reader.poll(1000)


def test_poll_returns_messages_before_undecodable_batch_then_raises_gap() -> None:
    disk = with_one_undecodable_batch()
    with rt.LogReader(DIRECTORY, disk=disk) as reader:
        assert [m.number for m in reader.poll(1000)] == [0, 1, 2]
        with pytest.raises(rt.Gap):
            reader.poll(1000)
        assert [m.number for m in reader.poll(1000)] == [4, 5, 6, 7, 8, 9]


def with_one_undecodable_batch() -> MemoryDisk:
    """Return a disk with ten batches of one message. Number 3 has a flag that this rt does not know."""
    disk = MemoryDisk()
    writer = LogWriter.open(DIRECTORY, LogIdentity(LogKind.SESSION, bytes(16), "feed"), disk=disk)
    writer.start(SegmentId(0, 0), first=0)
    for number in range(10):
        assert writer.active is not None
        batch = forge(
            columns([0, 8], [5], [], [0, 1], b"t"),
            b"8 bytes.",
            seed=batch_seed(writer.active.seed, writer.offset),
            first=number,
            flags=0x10 if number == 3 else 0,
            timestamp_low_ns=5,
            timestamp_high_ns=5,
        )
        writer.append([BatchFrames([batch], number + 1, 5, 5)])
    writer.sync()
    writer.close()
    return disk


ALL_BUT_THREE = [0, 1, 2, 4, 5, 6, 7, 8, 9]


def test_undecodable_batch_is_reported_once_and_all_others_are_read() -> None:
    told: list[object] = []
    assert numbers(with_one_undecodable_batch(), on_event=told.append) == ALL_BUT_THREE
    assert [(e.start, e.end) for e in told if isinstance(e, BadMessage)] == [(3, 4)]
    assert len(told) == 1


def fail(event: object) -> None:
    raise LookupError(event)


@pytest.mark.parametrize(("handler", "error"), [(None, rt.Gap), (fail, LookupError)])
def test_iteration_continues_after_undecodable_batch_raised_error(
    handler: Callable[[object], None] | None, error: type[Exception]
) -> None:
    got: list[int] = []
    with rt.LogReader(DIRECTORY, disk=with_one_undecodable_batch(), on_event=handler) as reader:
        with pytest.raises(error):
            got.extend(m.number for m in reader)
        assert (got, reader.position) == ([0, 1, 2], 4)
        got.extend(m.number for m in reader)
        assert (got, reader.position) == (ALL_BUT_THREE, 10)


def test_iteration_continues_at_new_position_after_seek() -> None:
    disk = MemoryDisk()
    with on_memory(disk) as publisher:
        publisher.publish_many([b"x"] * 10)
    with rt.LogReader(DIRECTORY, disk=disk) as reader:
        messages = iter(reader)
        assert [next(messages).number, next(messages).number] == [0, 1]
        reader.seek(5)
        assert reader.position == 5
        assert next(messages).number == 5
        assert reader.position == 6
        reader.seek(1)
        assert [m.number for m in messages] == list(range(1, 10))


def test_iteration_ends_after_close() -> None:
    disk = MemoryDisk()
    with on_memory(disk) as publisher:
        publisher.publish_many([b"x"] * 10)
    got = []
    reader = rt.LogReader(DIRECTORY, disk=disk)
    for message in reader:
        got.append(message.number)
        reader.close()
    assert got == [0]


def test_dedup_session_reader_reports_each_range_trimmed_while_reading() -> None:
    disk = MemoryDisk()
    publisher = on_memory(disk, dedup_id="twins", **SMALL)
    publisher.publish_many(values(40))
    publisher.flush()
    told: list[object] = []
    with rt.LogReader(DIRECTORY, disk=disk, position=0, on_event=told.append) as reader:
        got = [m.number for m in reader.poll(1)]
        assert publisher._log.writer.last_id is not None
        publisher._log.writer.trim(publisher._log.writer.last_id, TrimReason.SIZE)
        got += [m.number for m in reader]
    jumps = [(before + 1, after) for before, after in itertools.pairwise(got) if after != before + 1]
    assert jumps
    assert [(e.wanted, e.resumed) for e in told if isinstance(e, SkipForward)] == jumps
    assert got[-1] == 39


@pytest.mark.parametrize("operation", ["open", "pread", "list_directory"])
@pytest.mark.parametrize(
    "use",
    [
        lambda reader: list(reader),
        lambda reader: reader.poll(1000),
        lambda reader: reader.seek("latest"),
        lambda reader: reader.seek(7),
        lambda reader: reader.position_at(5),
    ],
    ids=["iterate", "poll", "seek-latest", "seek", "position_at"],
)
def test_disk_error_while_reading_raises_storage_error(
    operation: Operation, use: Callable[[rt.LogReader], object]
) -> None:
    disk = MemoryDisk()
    publisher = on_memory(disk, **SMALL)
    publisher.publish_many(values(12))
    publisher.flush()
    left = disk.after_power_cut("all")

    def attempt(at: int) -> bool:
        """Return whether call number `at` was reached. An `OSError` would fail the test."""
        disk = left.after_power_cut("all")
        disk.fail(operation, at=at, error=errno.EACCES)
        before = disk._calls[operation]

        def read_it() -> None:
            with rt.LogReader(DIRECTORY, disk=disk) as reader:
                use(reader)

        is_told(rt.StorageError, read_it)
        return disk._calls[operation] - before >= at

    assert any(attempt(at) is False for at in range(1, 100))
