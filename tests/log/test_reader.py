"""Log readers: message order, positions, following, trims during reading, corrupt segments."""

import gc
import os
import threading
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from disks import MemoryDisk
from hypothesis import given
from hypothesis import strategies as st

import rt
from rt.events import BadTail, Event, SkipForward
from rt.log.format.index import ENTRY_BYTES
from rt.log.format.segment import SegmentId
from rt.log.format.segment_table import TrimReason
from rt.log.read.segment_cursor import EventSink
from rt.log.scan.directory import session_directory

LONG_MS = 60_000


def open_publisher(root: Path, **options) -> rt.Publisher:
    return rt.Publisher(root, "stream", publisher_id="feed", **{"linger_ms": LONG_MS} | options)


def directory_of(root: Path) -> Path:
    return Path(session_directory(root, "stream", "feed"))


@pytest.fixture(scope="module")
def long_log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """9,000 messages of 1 KiB and a few bytes, in several segments and two runs, with index hops."""
    root = tmp_path_factory.mktemp("long")
    for run in range(2):
        with open_publisher(root, roll_bytes=3 * 2**20, batch_bytes=32 * 1024) as publisher:
            for start in range(run * 4500, (run + 1) * 4500, 500):
                values = [b"%d" % number + bytes(1024) for number in range(start, start + 500)]
                stamps = [number * 10 for number in range(start, start + 500)]
                publisher.publish_many(values, topic=f"t{start // 500 % 4}", timestamps_ns=stamps)
    return directory_of(root)


def numbers(reader: rt.LogReader) -> list[int]:
    return [message.number for message in reader]


@pytest.mark.parametrize("position", [0, 1, 499, 500, 2999, 3000, 4499, 4500, 4501, 8999, 9000])
def test_reader_starts_exactly_at_given_position(long_log: Path, position: int) -> None:
    with rt.LogReader(long_log, position=position) as reader:
        assert reader.position == position
        assert numbers(reader) == list(range(position, 9000))
        assert reader.position == 9000


@given(position=st.integers(0, 9000), step=st.integers(1, 3000), then=st.integers(0, 9000))
def test_reads_polls_and_seeks_deliver_each_message_once(
    long_log: Path, position: int, step: int, then: int
) -> None:
    with rt.LogReader(long_log, position=position) as reader:
        got = [message.number for _, message in zip(range(step), reader, strict=False)]
        assert got == list(range(position, min(position + step, 9000)))
        assert reader.position == position + len(got)
        got = [message.number for message in reader.poll(step)]
        assert got == list(range(position + step, min(position + 2 * step, 9000)))
        batch = reader.next_batch()
        if batch is not None:
            assert batch.positions[0] == position + 2 * step
        reader.seek(then)
        assert [message.number for message in reader.poll(3)] == list(range(then, min(then + 3, 9000)))


def test_poll_during_iteration_delivers_no_message_twice(
    long_log: Path,
) -> None:
    with rt.LogReader(long_log) as reader:
        iteration = iter(reader)
        assert next(iteration).number == 0
        assert [message.number for message in reader.poll(5)] == [1, 2, 3, 4, 5]
        assert next(iteration).number == 6


def test_seek_reads_index_stride_instead_of_whole_segment(
    long_log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rt.log import disk

    read = []
    pread = disk._RealFile.pread

    def counted(self, size: int, offset: int) -> bytes:
        data = pread(self, size, offset)
        read.append(len(data))
        return data

    monkeypatch.setattr(disk._RealFile, "pread", counted)
    monkeypatch.setattr("rt.log.read.segment_cursor.READ_BYTES", 64 * 1024)
    monkeypatch.setattr("rt.log.scan.directory.READ_BYTES", 64 * 1024)
    with rt.LogReader(long_log, position=2900) as reader:
        assert reader.poll(1)[0].number == 2900
    assert sum(read) < 1.5 * 2**20


@pytest.mark.parametrize("how", ["deleted", "emptied", "damaged", "shifted"])
def test_reader_delivers_all_messages_with_missing_or_corrupt_index(
    long_log: Path, tmp_path: Path, how: str
) -> None:
    import shutil

    copy = tmp_path / "copy"
    shutil.copytree(long_log, copy)
    for path in copy.glob("index.*"):
        content = path.read_bytes()
        if how == "deleted":
            path.unlink()
        elif how == "emptied":
            path.write_bytes(b"")
        elif how == "damaged":
            path.write_bytes(bytes(byte ^ (position % 3 == 0) for position, byte in enumerate(content)))
        else:
            path.write_bytes(content[ENTRY_BYTES // 2 :])
    for position in (0, 2500, 2900, 8000):
        with rt.LogReader(copy, position=position) as reader:
            assert numbers(reader) == list(range(position, 9000))


def test_reader_ignores_index_of_another_segment(long_log: Path, tmp_path: Path) -> None:
    import shutil

    copy = tmp_path / "copy"
    shutil.copytree(long_log, copy)
    shutil.copy(copy / "index.0.1", copy / "index.0.0")
    with rt.LogReader(copy, position=2500) as reader:
        assert numbers(reader) == list(range(2500, 9000))


def test_latest_position_is_current_log_end(tmp_path: Path) -> None:
    with open_publisher(tmp_path) as publisher:
        with rt.LogReader(publisher.directory, position="latest") as reader:
            assert reader.position == 0
        publisher.publish_many([b""] * 10)
        publisher.flush()
        with rt.LogReader(publisher.directory, position="latest") as reader:
            assert (reader.position, numbers(reader)) == (10, [])
            publisher.publish(b"")
            publisher.flush()
            assert numbers(reader) == [10]


@pytest.mark.parametrize("position", [-1, 9001, "middle", True, 1.5])
def test_reader_rejects_invalid_position(long_log: Path, position) -> None:
    with pytest.raises(ValueError, match="position"):
        rt.LogReader(long_log, position=position)


@pytest.mark.parametrize(
    ("timestamp_ns", "position"),
    [(0, 0), (-5, 0), (5, 1), (44990, 4499), (44991, 4500), (89990, 8999), (89991, 9000)],
)
def test_position_at_returns_first_message_at_or_after_timestamp(
    long_log: Path, timestamp_ns: int, position: int
) -> None:
    with rt.LogReader(long_log) as reader:
        assert reader.position_at(timestamp_ns) == position


@pytest.mark.parametrize("timestamp_ns", [float("nan"), 1.5, "now", None, datetime.now(UTC)])
def test_position_at_rejects_invalid_timestamp(long_log: Path, timestamp_ns: Any) -> None:
    with rt.LogReader(long_log) as reader, pytest.raises(rt.InvalidOption, match="a whole number of"):
        reader.position_at(timestamp_ns)


def test_topic_filter_delivers_only_its_topics_and_advances_over_others(long_log: Path) -> None:
    with rt.LogReader(long_log, topics=["t1", "t3"]) as reader:
        assert numbers(reader) == [number for number in range(9000) if number // 500 % 4 in {1, 3}]
        assert reader.position == 9000
    with rt.LogReader(long_log, topics="none") as reader:
        assert numbers(reader) == []


def test_log_not_found_error_names_directory(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(rt.LogNotFound, match=str(path)):
            rt.LogReader(path)


def test_follower_receives_all_messages_while_log_is_written(tmp_path: Path) -> None:
    publisher = open_publisher(tmp_path, roll_bytes=64 * 1024, batch_bytes=4096, linger_ms=0)
    got: list[int] = []

    def follow() -> None:
        with rt.LogReader(publisher.directory, follow=True) as reader:
            for message in reader:
                got.append(message.number)
                if message.value == b"end":
                    return

    follower = threading.Thread(target=follow)
    follower.start()
    for _ in range(3):
        for _ in range(300):
            publisher.publish(bytes(500))
        publisher.publish_many([bytes(100)] * 700)
        publisher.close()
        publisher = open_publisher(tmp_path, roll_bytes=64 * 1024, batch_bytes=4096, linger_ms=0)
    publisher.publish(b"end")
    publisher.close()
    follower.join(60)
    assert not follower.is_alive()
    assert got == list(range(3001))


def test_close_ends_follower_in_another_thread(tmp_path: Path) -> None:
    with open_publisher(tmp_path) as publisher:
        reader = rt.LogReader(publisher.directory, follow=True)
        publisher.publish(b"")
        publisher.flush()
        seen = threading.Event()
        got: list[int] = []

        def follow() -> None:
            for message in reader:
                got.append(message.number)
                seen.set()

        follower = threading.Thread(target=follow)
        follower.start()
        assert seen.wait(120)
        reader.close()
        follower.join(120)
        assert not follower.is_alive()
        reader.close()
    assert got == [0]
    assert reader.poll() == []


def test_close_in_event_handler_ends_reading(tmp_path: Path) -> None:
    with open_publisher(tmp_path, roll_bytes=4096, batch_bytes=4096) as publisher:
        publisher.publish_many([bytes(1000)] * 20)
        publisher.flush()
        trim(publisher)
        reader = rt.LogReader(publisher.directory, position=0, on_event=lambda event: reader.close())
        assert numbers(reader) == []


@pytest.mark.parametrize("follow", [False, True])
def test_deleted_reader_leaves_no_open_file_descriptors(long_log: Path, follow: bool) -> None:
    def opened() -> list[str]:
        gc.collect()
        return os.listdir("/proc/self/fd")

    before = opened()
    reader = rt.LogReader(long_log, follow=follow)
    next(iter(reader))
    assert len(opened()) > len(before)
    del reader
    assert len(opened()) == len(before)


def test_poll_waits_only_for_first_message(tmp_path: Path) -> None:
    with open_publisher(tmp_path) as publisher, rt.LogReader(publisher.directory, follow=True) as reader:
        assert reader.poll(timeout=0) == []
        assert reader.poll(timeout=0.01) == []
        publisher.publish_many([b""] * 5)
        publisher.flush()
        assert len(reader.poll(3, timeout=120)) == 3
        assert len(reader.poll(3, timeout=None)) == 2


def test_follower_finds_new_messages_without_inotify(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import errno

    def exhausted(**_) -> None:
        raise OSError(errno.EMFILE, "too many inotify instances")

    monkeypatch.setattr("rt.log.read.watch.INotify", exhausted)
    with open_publisher(tmp_path) as publisher, rt.LogReader(publisher.directory, follow=True) as reader:
        writer = threading.Thread(target=lambda: (publisher.publish(b"found"), publisher.flush()))
        writer.start()
        assert [message.value for message in reader.poll(timeout=120)] == [b"found"]
        writer.join()


def test_follower_raises_log_not_found_if_directory_is_moved(tmp_path: Path) -> None:
    import shutil

    publisher = open_publisher(tmp_path)
    with rt.LogReader(publisher.directory, follow=True) as reader:
        assert reader.poll(timeout=0) == []
        shutil.move(publisher.directory, tmp_path / "elsewhere")
        with pytest.raises(rt.LogNotFound, match="removed or renamed"):
            reader.poll(timeout=120)
    publisher.close()


# Trimming


def trim(publisher: rt.Publisher, reason: TrimReason = TrimReason.TIME) -> int:
    """Trim all segments except the active one; return the new start position of the log."""
    active = publisher._log.writer.active
    assert active is not None
    publisher._log.writer.trim(active.id, reason)
    return active.first


def test_reader_at_trimmed_position_receives_skip_event_with_both_positions(tmp_path: Path) -> None:
    events: list[Event] = []
    with open_publisher(tmp_path, roll_bytes=4096, batch_bytes=4096) as publisher:
        publisher.publish_many([bytes(1000)] * 20)
        publisher.flush()
        first = trim(publisher)
        with rt.LogReader(publisher.directory, position=2, on_event=events.append) as reader:
            assert numbers(reader) == list(range(first, 20))
    assert events == [SkipForward(2, first, "time")]


def test_reader_without_event_handler_raises_gap_and_can_continue_after_it(tmp_path: Path) -> None:
    with open_publisher(tmp_path, roll_bytes=4096, batch_bytes=4096) as publisher:
        publisher.publish_many([bytes(1000)] * 20)
        publisher.flush()
        first = trim(publisher, TrimReason.DISK)
        with rt.LogReader(publisher.directory, position=2) as reader:
            with pytest.raises(rt.Gap) as caught:
                numbers(reader)
            assert caught.value.event == SkipForward(2, first, "disk")
            assert str(caught.value) == (
                f"messages 2 to {first - 1} were trimmed (reason: disk) before they were read (at "
                f"{publisher.directory}). Reading again continues at {first}. With on_event, a reader "
                "receives an event instead of this error."
            )
            assert numbers(reader) == list(range(first, 20))


@pytest.mark.parametrize(
    ("reason", "what", "is_held_back"),
    [
        ("time", "messages 2 to 8 were trimmed (reason: time) before they were read", True),
        ("followed", "messages 2 to 8 were trimmed (reason: followed) before they were read", True),
        ("disk", "messages 2 to 8 were trimmed (reason: disk) before they were read", False),
        ("merged", "messages 2 to 8 were trimmed (reason: merged) before they were read", False),
        ("lost", "messages 2 to 8 are not in the log any more, and why is not known", False),
    ],
)
def test_gap_message_suggests_hold_only_if_hold_prevents_such_trims(
    reason: str, what: str, is_held_back: bool
) -> None:
    with pytest.raises(rt.Gap) as caught:
        EventSink("/log", None).emit(SkipForward(2, 9, reason))
    assert caught.value.what == what
    assert "Reading again continues at 9." in str(caught.value)
    assert ("not acknowledged, within their hold_bytes_max" in str(caught.value)) is is_held_back


def test_follower_skips_segments_trimmed_during_reading_and_reports_it(tmp_path: Path) -> None:
    events: list[Event] = []
    with open_publisher(tmp_path, roll_bytes=2**20, batch_bytes=4096) as publisher:
        publisher.publish_many([bytes(1000)] * 5000)
        publisher.flush()
        with rt.LogReader(publisher.directory, on_event=events.append, follow=True) as reader:
            assert len(reader.poll(10)) == 10
            first = trim(publisher)
            assert first > 3000
            got = []
            while not got or got[-1] < 4999:
                got += [message.number for message in reader.poll(1000, timeout=120)]
    (event,) = events
    assert isinstance(event, SkipForward)
    assert event.resumed == first
    assert got == [*range(10, event.wanted), *range(first, 5000)]


def test_reader_at_log_end_is_unaffected_by_trim(tmp_path: Path) -> None:
    with open_publisher(tmp_path, roll_bytes=4096, batch_bytes=4096) as publisher:
        publisher.publish_many([bytes(1000)] * 20)
        publisher.flush()
        with rt.LogReader(publisher.directory) as reader:
            assert len(numbers(reader)) == 20
            trim(publisher)
            publisher.publish(b"next")
            publisher.flush()
            assert numbers(reader) == [20]


def test_earliest_position_is_first_kept_message(tmp_path: Path) -> None:
    with open_publisher(tmp_path, roll_bytes=4096, batch_bytes=4096) as publisher:
        publisher.publish_many([bytes(1000)] * 20)
        publisher.flush()
        first = trim(publisher)
        with rt.LogReader(publisher.directory) as reader:
            assert reader.position == first
            assert numbers(reader) == list(range(first, 20))


def test_oldest_trimmed_segments_are_removed_from_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rt.log.format.segment_table.SegmentTable.forgotten.__kwdefaults__", {"most": 3})
    with open_publisher(tmp_path, roll_bytes=4096, batch_bytes=4096) as publisher:
        publisher.publish_many([bytes(1000)] * 40)
        publisher.flush()
        first = trim(publisher)
        left = sorted(path.name for path in directory_of(tmp_path).glob("log.*"))
        assert len(left) == 4
        with rt.LogReader(publisher.directory) as reader:
            assert numbers(reader) == list(range(first, 40))


# Corruption


def flip(path: Path, offset: int) -> None:
    content = bytearray(path.read_bytes())
    content[offset] ^= 0x10
    path.write_bytes(content)


def test_flipped_bit_raises_corrupt_with_path_and_offset(tmp_path: Path) -> None:
    with open_publisher(tmp_path, batch_bytes=4096) as publisher:
        publisher.publish_many([b"%03d" % number + bytes(500) for number in range(40)])
    path = directory_of(tmp_path) / "log.0.0"
    good = path.read_bytes()
    for offset in range(64, len(good), 997):
        flip(path, offset)
        got: list[rt.Message] = []
        with rt.LogReader(path.parent) as reader, pytest.raises(rt.Corrupt) as caught:
            got.extend(reader)
        assert caught.value.path == str(path)
        assert caught.value.offset <= offset < caught.value.offset + 5000
        path.write_bytes(good)
    with rt.LogReader(path.parent) as reader:
        assert len(numbers(reader)) == 40


def test_corrupt_batch_before_later_segment_raises_corrupt_on_each_read(tmp_path: Path) -> None:
    for _ in range(2):
        with open_publisher(tmp_path) as publisher:
            publisher.publish_many([b"x"] * 10)
    path = directory_of(tmp_path) / "log.0.0"
    flip(path, path.stat().st_size - 10)
    with rt.LogReader(path.parent) as reader:
        for _ in range(2):
            with pytest.raises(rt.Corrupt):
                numbers(reader)


def test_torn_tail_is_reported_once_and_follower_continues_after_it(tmp_path: Path) -> None:
    with open_publisher(tmp_path) as publisher:
        publisher.publish(b"whole")
        publisher.flush()
        publisher._abandon()
    path = directory_of(tmp_path) / "log.0.0"
    end = path.stat().st_size
    with path.open("ab") as file:
        file.write(b"RTB1" + bytes(200))
    events: list[Event] = []
    with rt.LogReader(path.parent, on_event=events.append) as reader:
        assert numbers(reader) == [0]
        assert numbers(reader) == []
    assert events == [BadTail(str(path), end, 204)]
    with rt.LogReader(path.parent, follow=True) as reader:
        assert [message.number for message in reader.poll()] == [0]
        with open_publisher(tmp_path) as publisher:
            publisher.publish(b"after")
        assert [message.value for message in reader.poll(timeout=120)] == [b"after"]


def test_missing_synced_bytes_raise_corrupt_in_follower(tmp_path: Path) -> None:
    with open_publisher(tmp_path) as publisher:
        publisher.publish(b"synced")
        publisher.flush()
        publisher._abandon()
    path = directory_of(tmp_path) / "log.0.0"
    os.truncate(path, path.stat().st_size - 8)
    with rt.LogReader(path.parent, follow=True) as reader, pytest.raises(rt.Corrupt):
        reader.poll(timeout=120)


@pytest.mark.slow
def test_reader_memory_use_does_not_grow_with_log_size(tmp_path: Path) -> None:
    import subprocess
    import sys

    program = (
        "import resource, rt, sys\n"
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024\n"
        "p = rt.Publisher(sys.argv[1], 's', publisher_id='feed', roll_bytes=64 * 2**20)\n"
        "values = [bytes(1024)] * 10_000\n"
        "p.publish_many(values); p.flush(); list(map(len, rt.LogReader(p.directory).batches()))\n"
        "before = peak()\n"
        "for _ in range(50): p.publish_many(values)\n"
        "p.close()\n"
        "n = sum(map(len, rt.LogReader(p.directory).batches()))\n"
        "assert n == 510_000, n\n"
        "print(peak() - before)\n"
    )
    grown = subprocess.run(
        [sys.executable, "-c", program, tmp_path], check=True, capture_output=True, text=True
    )
    assert int(grown.stdout) < 32


def test_reader_of_memory_disk_delivers_written_messages() -> None:
    disk = MemoryDisk()
    with rt.Publisher("/data", "stream", publisher_id="feed", disk=disk) as publisher:
        publisher.publish_many([b"x"] * 3)
    with rt.LogReader(publisher.directory, disk=disk) as reader:
        assert numbers(reader) == [0, 1, 2]
    assert SegmentId(0, 0).file_name == "log.0.0"


def test_log_without_segments_table_is_readable_under_any_directory_name(tmp_path: Path) -> None:
    with open_publisher(tmp_path) as publisher:
        publisher.publish(b"kept")
    (directory_of(tmp_path) / "segments").unlink()
    for name, session in (("copy", "copy"), ("feed~", "unknown"), ("has space", "unknown")):
        directory_of(tmp_path).parent.joinpath(name).symlink_to("feed")
        with rt.LogReader(directory_of(tmp_path).parent / name) as reader:
            assert [(message.session, message.value) for message in reader] == [(session, b"kept")]
