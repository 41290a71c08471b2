"""After a power cut at any disk change of a publisher, all flushed messages are there, once and in order.

After `flush` returned, its messages must survive: complete, once and in order. Any further messages must be
those published next. Recovery is cut as well.
"""

import pytest
from disks import MemoryDisk
from disks.crash_sweep import Log, Step, sweep

import rt
from rt.log.check.verify import verify
from rt.log.format.segment import SegmentId
from rt.log.format.segment_table import TrimReason
from rt.log.write.sealed_segments import empty_segments
from rt.log.write.writer import LogWriter

DIRECTORY = "/data/stream/sessions/feed"


def value_of(number: int) -> bytes:
    return b"%d:" % number + bytes(number * 577 % 1500)


class Publishing:
    """A publisher whose disk may lose power. Nothing runs in the background."""

    def __init__(self, disk: MemoryDisk, **options) -> None:
        self.publisher = rt.Publisher(
            "/data", "stream", publisher_id="feed", linger_ms=60_000, fsync="never", disk=disk, **options
        )

    def __enter__(self) -> rt.Publisher:
        return self.publisher

    def __exit__(self, *_: object) -> None:
        self.publisher._abandon()


def publish(publisher: rt.Publisher, log: Log, count: int) -> None:
    """Publish `count` messages and flush them; record the total number that must survive."""
    for _ in range(count):
        number = publisher.publish(value_of(publisher.next_number), topic=f"t{publisher.next_number % 3}")
    publisher.flush()
    log.append(number + 1)


def read_all(disk: MemoryDisk) -> list[rt.Message]:
    with rt.LogReader(DIRECTORY, disk=disk) as reader:
        return list(reader)


def check(disk: MemoryDisk, log: Log) -> None:
    """Reopen the log twice: the first time recovers it, the second must find nothing to do."""
    promised = max(log, default=0)
    with Publishing(disk) as publisher:
        end = publisher.next_number
        assert end >= promised
        assert publisher.publish(value_of(end), topic=f"t{end % 3}") == end
        publisher.flush()
    with Publishing(disk) as publisher:
        assert publisher.next_number == end + 1
    messages = read_all(disk)
    first = messages[0].number
    assert [message.number for message in messages] == list(range(first, end + 1))
    assert all(message.value == value_of(message.number) for message in messages)
    assert all(message.topic == f"t{message.number % 3}" for message in messages)
    assert verify(DIRECTORY, disk=disk).damage == []


def recover(disk: MemoryDisk, log: Log) -> None:
    with Publishing(disk) as publisher:
        assert publisher.next_number >= max(log, default=0)


def publish_and_flush(disk: MemoryDisk, log: Log) -> None:
    with Publishing(disk) as publisher:
        for count in (1, 4, 2):
            publish(publisher, log, count)


def publish_and_roll(disk: MemoryDisk, log: Log) -> None:
    with Publishing(disk, roll_bytes=4096, batch_bytes=4096) as publisher:
        for count in (6, 8, 5):
            publish(publisher, log, count)


def publish_compressed(disk: MemoryDisk, log: Log) -> None:
    with Publishing(disk, compression="zstd") as publisher:
        for count in (3, 3):
            publish(publisher, log, count)


def publish_in_three_lives(disk: MemoryDisk, log: Log) -> None:
    for count in (3, 1, 2):
        with Publishing(disk) as publisher:
            publish(publisher, log, count)


def publish_unflushed_then_flush(disk: MemoryDisk, log: Log) -> None:
    with Publishing(disk, batch_bytes=4096) as publisher:
        publisher.publish_many([value_of(number) for number in range(30)], topic="t0")
        publish(publisher, log, 2)


def check_one_topic(disk: MemoryDisk, log: Log) -> None:
    with Publishing(disk) as publisher:
        assert publisher.next_number >= max(log, default=0)
    messages = read_all(disk)
    assert [message.number for message in messages] == list(range(len(messages)))
    assert all(message.value == value_of(message.number) for message in messages)


def roll_and_trim(disk: MemoryDisk, log: Log) -> None:
    with Publishing(disk, roll_bytes=4096, batch_bytes=4096) as publisher:
        publish(publisher, log, 20)
        newest = publisher._log.writer.last_id
        assert newest is not None
        assert newest.roll >= 2
        publisher._log.writer.trim(SegmentId(0, 1), TrimReason.MERGED)
        publisher._log.writer.trim(newest, TrimReason.MERGED)
        publish(publisher, log, 3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("run", "checked", "seeds"),
    [
        (publish_and_flush, check, [2]),  # The other seeds are below, where recovery is cut as well.
        (publish_and_roll, check, [2]),
        (publish_in_three_lives, check, [2]),
        (roll_and_trim, check, [2]),
        (publish_compressed, check, [0, 1, 2]),
        (publish_unflushed_then_flush, check_one_topic, [0, 1, 2]),
    ],
)
def test_power_cut_at_any_change_loses_no_flushed_message(run: Step, checked: Step, seeds: list[int]) -> None:
    assert sweep(run, checked, seeds=seeds) > 100


@pytest.mark.slow
@pytest.mark.parametrize("run", [publish_and_flush, publish_and_roll, publish_in_three_lives, roll_and_trim])
def test_second_power_cut_during_recovery_loses_no_flushed_message(run: Step) -> None:
    assert sweep(run, check, seeds=range(2), recover=recover, recover_cuts=1) > 100


def test_sweep_detects_writer_without_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rt.log.write.writer.LogWriter.sync_to", lambda self, point: None)
    with pytest.raises(AssertionError, match="power cut"):
        sweep(publish_and_flush, check)


@pytest.mark.slow
def test_sweep_detects_recovery_without_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "rt.log.write.directory_recovery.DirectoryRecovery._cut_and_sync",
        lambda self, path, tail, durable_end: None,
    )
    with pytest.raises(AssertionError, match="power cut"):
        sweep(publish_and_flush, check, recover=recover, recover_cuts=2)


@pytest.mark.slow
def test_sweep_detects_trim_emptying_files_before_writing_table(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trim = LogWriter.trim

    def empty_first(self: LogWriter, before: SegmentId, reason: TrimReason):
        gone = [segment.id for segment in self.table.segments if segment.id < before]
        empty_segments(self._disk, self.path, gone)
        return trim(self, before, reason)

    monkeypatch.setattr(LogWriter, "trim", empty_first)
    with pytest.raises(AssertionError, match="power cut"):
        sweep(roll_and_trim, check)
