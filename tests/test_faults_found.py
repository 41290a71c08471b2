"""Faults that were found by attacking the log library; each stays found."""

from __future__ import annotations

import contextlib
import errno
import functools
import itertools
import linecache
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
from batches import columns, forge

import rt
import rt.client.publisher
import rt.log.read.reader
import rt.log.write.writer
from rt.client.fork_safety import open_publishers
from rt.events import BadMessage, SkipForward
from rt.log.disk import REAL, write_whole
from rt.log.format.checksum import batch_seed
from rt.log.format.segment import LogKind, SegmentId
from rt.log.format.segment_table import TABLE_FILE, LogIdentity, SegmentTable, TrimReason, encode_table
from rt.log.scan.directory import read_table
from rt.log.write.writer import BatchFrames, LogWriter
from rt.testing import memory_file
from rt.testing.crash import Log, sweep
from rt.testing.disk import FaultyDisk, MemoryDisk, Operation, PowerCut

DIRECTORY = "/data/stream/sessions/feed"
DEADLINE_SECONDS = 120
SMALL: dict[str, int] = {"batch_bytes": 4096, "roll_bytes": 4096}
"""Four of `values` a batch, and eight a segment."""


@pytest.fixture(autouse=True)
def no_publisher_outlives_its_test() -> Iterator[None]:
    yield
    for publisher in list(open_publishers):
        pull_the_plug(publisher)


def on_memory(disk: MemoryDisk, **options: Any) -> rt.Publisher:
    options = {"linger_ms": 60_000, "fsync": "never"} | options
    return rt.Publisher("/data", "stream", publisher_id="feed", disk=disk, **options)


def on_files(root: Path, **options: Any) -> rt.Publisher:
    return rt.Publisher(root, "stream", publisher_id="feed", **options)


def read(directory: str = DIRECTORY, **options: Any) -> list[rt.Message]:
    with rt.LogReader(directory, **options) as reader:
        return list(reader)


def numbers(disk: MemoryDisk, **options: Any) -> list[int]:
    return [message.number for message in read(disk=disk, **options)]


def values(count: int) -> list[bytes]:
    return [b"%d:" % i + bytes(600) for i in range(count)]


def pull_the_plug(publisher: rt.Publisher) -> None:
    """End a publisher without a flush, whether its disk has power or not."""
    with contextlib.suppress(PowerCut):
        publisher._abandon()


def is_told(error: type[Exception], call: Callable[[], object]) -> bool:
    try:
        call()
    except error:
        return True
    return False


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"


def files(disk: MemoryDisk) -> dict[str, bytes]:
    return {path: disk.read(path) for path in disk.paths() if path.startswith(DIRECTORY)}


def restore(content: dict[str, bytes]) -> MemoryDisk:
    disk = MemoryDisk()
    disk.make_directory(DIRECTORY)
    for path, data in content.items():
        disk.write(path, data)
    return disk


# A full disk


def sealed_without_a_next(disk: MemoryDisk, **options: Any) -> rt.Publisher:
    """A publisher that sealed its segment, and found no room to start the next."""
    publisher = on_memory(disk, batch_bytes=4096, roll_bytes=8192, **options)
    publisher.publish_many([bytes(1000)] * 6)
    publisher.flush()
    disk.fail("create", at=2, error=errno.ENOSPC)  # The first one is of the table, written aside.
    with pytest.raises(rt.DiskFull):
        publisher.publish_many([bytes(3000)] * 8)
    return publisher


def test_a_small_write_after_a_roll_that_found_the_disk_full_goes_into_the_next_segment() -> None:
    disk = MemoryDisk()
    publisher = sealed_without_a_next(disk)
    number = publisher.publish(b"small")
    publisher.flush()
    end = publisher.next_number
    publisher.close()
    with on_memory(disk) as again:
        assert again.next_number == end
    assert [m.value for m in read(disk=disk) if m.number == number] == [b"small"]


def test_what_was_flushed_after_a_roll_that_found_the_disk_full_survives_a_power_cut() -> None:
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


def test_publishing_goes_on_after_a_renumbering_that_found_the_disk_full() -> None:
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
def test_no_reader_ever_sees_a_batch_that_a_full_disk_refuses(
    room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
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


# Broken off anywhere


class Interrupt(KeyboardInterrupt):
    pass


@functools.cache
def is_of_publishing(file: str) -> bool:
    return file.endswith(
        (
            "rt/client/publisher.py",
            "rt/client/background.py",
            "rt/log/write/writer.py",
            "rt/log/write/batcher.py",
        )
    )


@functools.cache
def can_be_interrupted(file: str, number: int) -> bool:
    """CPython looks at no signals between a lock and the body of its `with`, nor at a bare `try`."""
    line = linecache.getline(file, number).partition("#")[0].strip()
    return line not in {"try:", "return"} and not line.startswith("with self._")


class Interrupter:
    """Raises `Interrupt` at one line of the publisher, as Ctrl-C does."""

    def __init__(self, at: int) -> None:
        self.left = at
        self.where = ""

    def __call__(self, frame: FrameType, event: str, arg: object) -> Any:
        name = frame.f_code.co_filename
        if not is_of_publishing(name):
            return None
        if event in {"line", "call"} and can_be_interrupted(name, frame.f_lineno):
            self.left -= 1
            if self.left == 0:
                self.where = f"{os.path.basename(name)}:{frame.f_lineno} {frame.f_code.co_name}"
                sys.settrace(None)
                raise Interrupt
        return self


def publish_all(publisher: rt.Publisher, given: dict[int, bytes], flushed: dict[int, bytes]) -> None:
    for turn in range(2):
        for i in range(3):
            value = b"p%d.%d:" % (turn, i) + bytes(700)
            given[publisher.publish(value, topic=f"t{i % 2}")] = value
        many = [b"m%d.%d:" % (turn, i) + bytes(700) for i in range(13)]
        given.update(zip(publisher.publish_many(many, topic="z"), many, strict=True))
        publisher.flush()
        flushed.update(given)


def interrupted_at(line: int) -> bool:
    """Publish with an interrupt at a line, go on, and check what is left; False if there is no such line."""
    disk = MemoryDisk()
    publisher = on_memory(disk, batch_bytes=4096, roll_bytes=8192)
    given: dict[int, bytes] = {}
    flushed: dict[int, bytes] = {}
    interrupter = Interrupter(line)
    before = sys.gettrace()
    sys.settrace(interrupter)
    try:
        publish_all(publisher, given, flushed)
    except Interrupt:
        pass
    finally:
        sys.settrace(before)
    where = interrupter.where
    if not where:
        publisher.close()
        return False
    for lock in (publisher._lock, publisher._syncing):  # The publisher's thread may have one just now.
        assert lock.acquire(timeout=DEADLINE_SECONDS), where
        lock.release()
    try:
        for i in range(3):
            value = b"after %d" % i
            number = publisher.publish(value)
            assert number not in given, (where, number)
            given[number] = value
        publisher.flush()
        publisher.close()
        flushed = given
    except rt.StorageFailed:
        with contextlib.suppress(rt.StorageFailed):
            publisher.close()
    on_memory(disk).close()
    messages = read(disk=disk)
    assert [m.number for m in messages] == list(range(len(messages))), where
    got = {m.number: m.value for m in messages}
    wrong = {number: value[:8] for number, value in flushed.items() if got.get(number) != value}
    assert not wrong, (where, wrong)
    doubled = [value[:8] for value, count in Counter(got.values()).items() if count > 1]
    assert not doubled, (where, doubled)
    return True


@pytest.mark.parametrize("first", [1, *(pytest.param(n, marks=pytest.mark.slow) for n in range(2, 8))])
def test_an_interrupt_at_any_line_loses_and_doubles_nothing(first: int) -> None:
    """Every seventh line from the first on: together they are all."""
    lines = itertools.takewhile(interrupted_at, itertools.count(first, 7))
    assert sum(1 for _ in lines) * 7 > 300


def test_an_interrupt_just_after_the_table_lists_a_segment_as_sealed_harms_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    disk = MemoryDisk()
    publisher = on_memory(disk, batch_bytes=4096, roll_bytes=8192)
    publisher.publish_many([bytes(1000)] * 6)
    publisher.flush()

    def write_and_stop(disk: MemoryDisk, path: str, content: bytes) -> None:
        write_whole(disk, path, content)
        raise Interrupt

    with monkeypatch.context() as patch:
        patch.setattr(rt.log.write.writer, "write_whole", write_and_stop)
        with pytest.raises(Interrupt):
            publisher.publish_many([bytes(3000)] * 8)
    with contextlib.suppress(rt.StorageFailed):
        publisher.publish(b"small")
        publisher.flush()
    with contextlib.suppress(rt.StorageFailed):
        publisher.close()
    on_memory(disk).close()
    found = numbers(disk)
    assert found == list(range(len(found)))
    assert len(found) >= 6


# Opening again


def test_a_dedup_publisher_killed_before_the_first_sync_of_lower_numbers_opens_again() -> None:
    disk = MemoryDisk()
    with on_memory(disk, dedup_id="twins") as publisher:
        publisher.publish(b"x", number=0)
        publisher.publish_many([b"x"] * 999)
    on_memory(disk, dedup_id="twins").publish(b"x", number=500)
    left = disk.after_power_cut("all")
    for _ in range(2):
        with on_memory(left, dedup_id="twins") as again:
            assert again.next_number == 500


def test_opening_leaves_an_acknowledgement_under_way_alone() -> None:
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
            assert publisher._writer.last_id is not None
            publisher._writer.trim(publisher._writer.last_id, TrimReason.SIZE)
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
def test_a_power_cut_in_a_trim_that_forgets_leaves_no_hole(
    recover: Callable[[MemoryDisk, Log], None] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SegmentTable.forgotten.__kwdefaults__, "most", 2)
    seeds = range(1) if recover is None else range(2)
    assert sweep(trimming, check_trimmed, seeds=seeds, recover=recover, recover_cuts=3) > 100


def test_a_segment_of_another_incarnation_is_damage_for_reader_and_writer() -> None:
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


def test_a_segment_that_the_table_does_not_know_between_two_that_it_knows_is_damage() -> None:
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


def test_segments_of_two_moments_whose_numbers_overlap_are_damage() -> None:
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


def test_an_old_table_with_a_trimmed_log_of_today_is_damage_or_a_told_gap() -> None:
    disk = MemoryDisk()
    publisher = on_memory(disk, **SMALL)
    publisher.publish_many(values(20))
    publisher.flush()
    old = disk.read(f"{DIRECTORY}/{TABLE_FILE}")
    assert publisher._writer.last_id is not None
    publisher._writer.trim(publisher._writer.last_id, TrimReason.SIZE)
    publisher.close()
    disk.write(f"{DIRECTORY}/{TABLE_FILE}", old)
    with pytest.raises(rt.Corrupt):
        read(disk=disk)
    with pytest.raises(rt.Corrupt):
        on_memory(disk)


# Reading what is not whole


def spoil(path: Path, *, is_emptied: bool) -> None:
    if is_emptied:
        path.write_bytes(b"")
    else:
        path.unlink()


@pytest.mark.parametrize("follow", [False, True])
@pytest.mark.parametrize("is_emptied", [False, True])
@pytest.mark.parametrize(("segment", "whole"), [("log.0.0", 0), ("log.0.1", 8), ("log.0.2", 16)])
def test_a_sealed_segment_that_is_gone_is_damage_and_never_the_end(
    tmp_path: Path, segment: str, whole: int, is_emptied: bool, follow: bool
) -> None:
    with on_files(tmp_path, linger_ms=60_000, **SMALL) as publisher:
        publisher.publish_many(values(40))
    got: list[int] = []
    spoil(Path(publisher.directory) / segment, is_emptied=is_emptied)
    with rt.LogReader(publisher.directory, follow=follow) as reader, pytest.raises(rt.Corrupt):
        while messages := reader.poll(1000, timeout=DEADLINE_SECONDS):
            got += [m.number for m in messages]
    assert got == list(range(whole))


def test_a_sealed_segment_that_is_emptied_while_it_is_read_is_damage(tmp_path: Path) -> None:
    with on_files(tmp_path, linger_ms=60_000, roll_bytes=4 * 2**20) as publisher:
        for _ in range(60):
            publisher.publish(bytes(100_000))
    with rt.LogReader(publisher.directory) as reader:
        assert len(reader.poll(1)) == 1
        (Path(publisher.directory) / "log.0.0").write_bytes(b"")
        with pytest.raises(rt.Corrupt):
            list(reader)


def test_poll_hands_out_what_it_has_before_it_raises_damage() -> None:
    disk = MemoryDisk()
    with on_memory(disk, **SMALL) as publisher:
        publisher.publish_many(values(40))
    disk.flip_bit(f"{DIRECTORY}/log.0.2", 100, 1)
    with rt.LogReader(DIRECTORY, disk=disk) as reader:
        assert [m.number for m in reader.poll(1000)] == list(range(16))
        assert reader.position == 16
        with pytest.raises(rt.Corrupt):
            reader.poll(1000)


def test_poll_hands_out_what_it_has_before_it_raises_a_gap() -> None:
    disk = with_one_undecodable_batch()
    with rt.LogReader(DIRECTORY, disk=disk) as reader:
        assert [m.number for m in reader.poll(1000)] == [0, 1, 2]
        with pytest.raises(rt.Gap):
            reader.poll(1000)
        assert [m.number for m in reader.poll(1000)] == [4, 5, 6, 7, 8, 9]


def with_one_undecodable_batch() -> MemoryDisk:
    """Ten batches of a message each; number 3 has a flag that this rt does not know."""
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


def test_one_undecodable_batch_is_told_and_hides_no_other() -> None:
    told: list[object] = []
    assert numbers(with_one_undecodable_batch(), on_event=told.append) == ALL_BUT_THREE
    assert [(e.start, e.end) for e in told if isinstance(e, BadMessage)] == [(3, 4)]
    assert len(told) == 1


def fail(event: object) -> None:
    raise LookupError(event)


@pytest.mark.parametrize(("handler", "error"), [(None, rt.Gap), (fail, LookupError)])
def test_reading_on_after_an_undecodable_batch_gives_all_the_others(
    handler: Callable[[object], None] | None, error: type[Exception]
) -> None:
    got: list[int] = []
    with rt.LogReader(DIRECTORY, disk=with_one_undecodable_batch(), on_event=handler) as reader:
        with pytest.raises(error):
            got.extend(m.number for m in reader)
        assert (got, reader.position) == ([0, 1, 2], 4)
        got.extend(m.number for m in reader)
        assert (got, reader.position) == (ALL_BUT_THREE, 10)


def test_a_seek_inside_an_iteration_goes_on_at_the_new_place() -> None:
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


def test_a_close_inside_an_iteration_ends_it() -> None:
    disk = MemoryDisk()
    with on_memory(disk) as publisher:
        publisher.publish_many([b"x"] * 10)
    got = []
    reader = rt.LogReader(DIRECTORY, disk=disk)
    for message in reader:
        got.append(message.number)
        reader.close()
    assert got == [0]


def test_what_is_trimmed_under_the_reader_of_a_dedup_session_is_told() -> None:
    disk = MemoryDisk()
    publisher = on_memory(disk, dedup_id="twins", **SMALL)
    publisher.publish_many(values(40))
    publisher.flush()
    told: list[object] = []
    with rt.LogReader(DIRECTORY, disk=disk, position=0, on_event=told.append) as reader:
        got = [m.number for m in reader.poll(1)]
        assert publisher._writer.last_id is not None
        publisher._writer.trim(publisher._writer.last_id, TrimReason.SIZE)
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
def test_a_disk_that_fails_under_a_reader_is_told_as_a_storage_error(
    operation: Operation, use: Callable[[rt.LogReader], object]
) -> None:
    disk = MemoryDisk()
    publisher = on_memory(disk, **SMALL)
    publisher.publish_many(values(12))
    publisher.flush()
    left = disk.after_power_cut("all")

    def attempt(at: int) -> bool:
        """Whether the call `at` was reached; an `OSError` gets through to pytest."""
        disk = left.after_power_cut("all")
        disk.fail(operation, at=at, error=errno.EACCES)
        before = disk._calls[operation]

        def read_it() -> None:
            with rt.LogReader(DIRECTORY, disk=disk) as reader:
                use(reader)

        is_told(rt.StorageError, read_it)
        return disk._calls[operation] - before >= at

    assert any(attempt(at) is False for at in range(1, 100))


# Closing


def test_nothing_is_taken_between_the_last_write_of_a_close_and_its_end() -> None:
    disk = MemoryDisk()
    publisher = on_memory(disk)
    publisher.publish(b"0")
    release = publisher._abandon
    refused: list[bool] = []

    def abandon() -> None:
        refused.append(is_told(rt.Closed, lambda: publisher.publish(b"late")))
        refused.append(is_told(rt.Closed, lambda: publisher.publish_many([b"late"])))
        refused.append(is_told(rt.Closed, publisher.flush))
        release()

    publisher._abandon = abandon  # type: ignore[method-assign]
    publisher.close()
    assert refused == [True, True, True]
    assert numbers(disk.after_power_cut("none")) == [0]


@pytest.mark.parametrize("fsync", ["never", "interval", "batch"])
def test_a_flush_that_returned_beside_a_close_is_durable(fsync: str) -> None:
    disk = MemoryDisk()
    publisher = on_memory(disk, fsync=fsync)
    flushed: list[int] = []
    under_way = threading.Event()

    def publish() -> None:
        with contextlib.suppress(rt.Closed):
            while True:
                number = publisher.publish(b"x")
                publisher.flush()
                flushed.append(number)
                if number > 20:
                    under_way.set()

    threads = [threading.Thread(target=publish) for _ in range(3)]
    for thread in threads:
        thread.start()
    assert under_way.wait(DEADLINE_SECONDS)
    publisher.close()
    for thread in threads:
        thread.join(DEADLINE_SECONDS)
    left = numbers(disk.after_power_cut("none"))
    assert left == list(range(len(left)))
    assert set(flushed) <= set(left)


def test_two_closes_at_once_both_return() -> None:
    disk = MemoryDisk()
    publisher = on_memory(disk)
    publisher.publish(b"x")
    finish = publisher._finish

    def finish_second() -> None:
        publisher._finish = finish  # type: ignore[method-assign]
        publisher.close()
        finish()

    publisher._finish = finish_second  # type: ignore[method-assign]
    publisher.close()
    assert numbers(disk) == [0]


@pytest.mark.parametrize("operation", ["pwritev", "sync"])
def test_a_close_that_fails_releases_the_lock(operation: Operation) -> None:
    disk = MemoryDisk()
    publisher = on_memory(disk)
    publisher.publish(b"x")
    disk.fail(operation)
    with pytest.raises(rt.StorageFailed):
        publisher.close()
    on_memory(disk).close()


def test_a_close_that_meets_an_unexpected_error_releases_the_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    disk = MemoryDisk()
    publisher = on_memory(disk)
    publisher.publish(b"x")
    with monkeypatch.context() as patch:
        patch.setattr(rt.client.publisher, "encode_batch", fail_to_encode)
        with pytest.raises(MemoryError):
            publisher.close()
    on_memory(disk).close()


def fail_to_encode(*args: object, **options: object) -> None:
    raise MemoryError


# What a caller gives


def test_one_call_may_write_any_number_of_small_batches(tmp_path: Path) -> None:
    with on_files(tmp_path, batch_bytes=4096, fsync="never") as publisher:
        assert publisher.publish_many([bytes(1501)] * 40_000) == range(40_000)
    with rt.LogReader(publisher.directory) as reader:
        assert sum(map(len, reader.batches())) == 40_000


@pytest.mark.parametrize(
    "slip",
    [
        lambda publisher: publisher.publish_many([b"a", b"b"], timestamps_ns=np.array([[1], [2]])),
        lambda publisher: publisher.publish_many([b"a"], topic="\ud800"),
        lambda publisher: publisher.publish(b"a", number=2**62 - 1),
        lambda publisher: publisher.publish(b"a", number=2**63),
        lambda publisher: publisher.publish(b"a", number=-1),
        lambda publisher: publisher.publish(b"a", number=0.0),
        lambda publisher: publisher.publish(b"a", number=7.0),
    ],
    ids=["2-D", "surrogate", "last", "too large", "negative", "float", "float to come"],
)
@pytest.mark.parametrize("before", [0, 1])
def test_a_slip_of_the_caller_is_refused_and_harms_nothing(
    slip: Callable[[rt.Publisher], object], before: int
) -> None:
    disk = MemoryDisk()
    publisher = on_memory(disk, dedup_id="twins")
    publisher.publish_many([b"good"] * before)
    with pytest.raises((TypeError, ValueError)):
        slip(publisher)
    publisher.publish(b"good")
    publisher.flush()
    publisher.close()
    assert [(m.number, m.value) for m in read(disk=disk)] == [(n, b"good") for n in range(before + 1)]
    on_memory(disk, dedup_id="twins").close()


# The background thread


def test_the_batch_of_a_small_publish_many_is_written_without_another_call(tmp_path: Path) -> None:
    interval = sys.getswitchinterval()
    with (
        on_files(tmp_path, linger_ms=0, fsync="never") as publisher,
        rt.LogReader(publisher.directory, follow=True) as reader,
    ):
        sys.setswitchinterval(1e-6)  # The thread then runs between any two steps of the call.
        try:
            for i in range(100):
                publisher.publish_many([b"%d" % i])
                assert [m.value for m in reader.poll(1, timeout=DEADLINE_SECONDS)] == [b"%d" % i]
        finally:
            sys.setswitchinterval(interval)


def test_the_sync_interval_runs_while_a_long_linger_does() -> None:
    disk = MemoryDisk()
    publisher = on_memory(disk, fsync="interval", batch_bytes=4096)
    synced, sync_to = threading.Event(), publisher._writer.sync_to

    def spied(point: Any) -> None:
        sync_to(point)
        synced.set()

    publisher._writer.sync_to = spied  # type: ignore[method-assign]
    for _ in range(10):
        publisher.publish(bytes(1000))
    assert synced.wait(50)  # The linger is over after 60.
    publisher._writer.sync_to = sync_to  # type: ignore[method-assign]
    publisher.close()


def test_a_background_thread_that_fails_is_told_to_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    disk = MemoryDisk()
    publisher = on_memory(disk, linger_ms=0)
    with monkeypatch.context() as patch:
        patch.setattr(rt.client.publisher, "encode_batch", fail_to_encode)
        publisher.publish(b"x")
        wait_until(lambda: isinstance(publisher._pending_error, rt.StorageFailed))
    with pytest.raises(rt.StorageFailed):
        publisher.publish(b"y")
    with pytest.raises(rt.StorageFailed):
        publisher.flush()
    with pytest.raises(rt.StorageFailed):
        publisher.close()
    on_memory(disk).close()


# Who holds the directory


def test_a_forked_child_gives_the_lock_up(tmp_path: Path) -> None:
    publisher = on_files(tmp_path)
    ready, say_ready = os.pipe()
    wait_for_end, end = os.pipe()
    child = os.fork()
    if child == 0:  # What is to run in a forked child has run before fork returned.
        os.close(end)
        os.write(say_ready, b"1")
        os.read(wait_for_end, 1)
        os._exit(0)
    try:
        assert os.read(ready, 1) == b"1"
        publisher.publish(b"x")
        publisher.close()
        with on_files(tmp_path) as again:
            assert again.next_number == 1
    finally:
        os.close(end)
        os.waitpid(child, 0)
        for descriptor in (ready, say_ready, wait_for_end):
            os.close(descriptor)


def test_a_lock_is_free_when_it_is_given_back_though_a_program_that_is_being_started_has_it(
    tmp_path: Path,
) -> None:
    path = tmp_path / "lock"
    lock = REAL.lock(str(path))
    descriptors = [one for one in Path("/proc/self/fd").iterdir() if one.resolve() == path]
    copy = os.dup(int(descriptors[0].name))
    lock.close()
    REAL.lock(str(path)).close()
    os.close(copy)


def test_a_publisher_whose_thread_cannot_start_releases_the_directory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    disk = MemoryDisk()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="thread"):
            on_memory(disk)
    on_memory(disk).close()


def test_a_publisher_whose_lock_file_was_removed_fails_at_its_next_flush(tmp_path: Path) -> None:
    publisher = on_files(tmp_path, linger_ms=60_000, fsync="never")
    (Path(publisher.directory) / "lock").unlink()
    with on_files(tmp_path, linger_ms=60_000) as second:
        publisher.publish(b"first")
        with pytest.raises(rt.StorageFailed):
            publisher.flush()
        with pytest.raises(rt.StorageFailed):
            publisher.close()
        second.publish(b"second")
    assert [m.value for m in read(publisher.directory)] == [b"second"]


# Acknowledging


class NoWatch:
    """A watch of a directory that is in memory: nothing ever wakes."""

    def __init__(self, path: str) -> None:
        pass

    def wait(self, timeout: float | None) -> bool:
        return False

    def wake(self) -> None:
        pass

    def close(self) -> None:
        pass


def written_but_not_synced(disk: MemoryDisk) -> int:
    """A publisher with a flushed start and full batches behind it that no sync covers; what is written."""
    publisher = on_memory(disk, batch_bytes=4096)
    publisher.publish_many(values(5))
    publisher.flush()
    publisher.publish_many(values(20))
    return publisher._writer.end


def test_what_was_read_and_made_durable_survives_a_power_cut() -> None:
    disk = MemoryDisk()
    written = written_but_not_synced(disk)
    with rt.LogReader(DIRECTORY, disk=disk) as reader:
        assert len(list(reader)) == written
        reader.make_durable()
    left = disk.after_power_cut("none")
    assert on_memory(left).next_number == written
    assert numbers(left) == list(range(written))


def test_an_acknowledged_position_is_never_ahead_of_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_an_acknowledgement_that_cannot_be_made_durable_is_refused(tmp_path: Path) -> None:
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


def test_a_reader_that_is_interrupted_while_it_decodes_goes_on_where_it_was(
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
