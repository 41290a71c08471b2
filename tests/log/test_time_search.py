"""Time search with table and index agrees with a full scan, and readers can start at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from disks import MemoryDisk
from hypothesis import given, settings
from hypothesis import strategies as st
from merged_logs import Feeds

import rt
from rt.log.disk import REAL, RealDisk
from rt.log.format.index import decode_entries
from rt.log.format.segment import SegmentId
from rt.log.read import time_search
from rt.log.read.start_position import StartTime
from rt.log.read.time_search import FoundTime, search_time
from rt.log.scan.directory import read_header, read_identity
from rt.log.write import active_segment

STRIDE_BYTES = 256
"""Small, so that the index of a small segment has many entries."""

STAMPS = st.lists(st.integers(-4, 12), min_size=1, max_size=5)
STEP = st.one_of(
    st.tuples(st.just("publish"), st.sampled_from("abc"), STAMPS),
    st.tuples(st.just("roll")),
    st.tuples(st.just("trim")),
)


@pytest.fixture(autouse=True, scope="module")
def dense_index() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(active_segment, "INDEX_STRIDE_BYTES", STRIDE_BYTES)
        yield


def merged(disk: MemoryDisk, steps: list[Any]) -> Feeds:
    """Return a log written in these steps."""
    feeds, roll = Feeds("/log", disk=disk), 0
    for step in steps:
        match step:
            case "publish", name, stamps:
                feeds.publish(name, [bytes(60)] * len(stamps), "t", stamps)
                feeds.merge(block_bytes=300)
            case ("roll",):
                feeds.roll()
                roll += 1
            case ("trim",):
                feeds.trim(roll)
    return feeds


def found_in(path: str, timestamp_ns: int, disk: Any = REAL) -> FoundTime:
    return search_time(disk, path, read_identity(disk, path), timestamp_ns)


def check_every_time(feeds: Feeds, disk: MemoryDisk) -> None:
    """Compare each search with a scan of all messages."""
    rows = feeds.rows()
    end = rt.LogReader(feeds.path, position="latest", disk=disk).position
    for timestamp_ns in range(-6, 15):
        dumb = next((row.position for row in rows if row.timestamp_ns >= timestamp_ns), None)
        found = found_in(feeds.path, timestamp_ns, disk)
        assert (found.position, found.is_message, found.damage) == (
            end if dumb is None else dumb,
            dumb is not None,
            None,
        )


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(steps=st.lists(STEP, max_size=12))
def test_time_search_agrees_with_full_scan(steps: list[Any]) -> None:
    disk = MemoryDisk()
    feeds = merged(disk, steps)
    check_every_time(feeds, disk)
    feeds.close()
    check_every_time(feeds, disk)


@settings(max_examples=60, deadline=None)
@given(
    steps=st.lists(STEP, min_size=3, max_size=12),
    seed=st.integers(0, 2**20),
    way=st.sampled_from(["lost", "cut", "flipped", "of another segment"]),
)
def test_time_search_is_unchanged_by_missing_or_corrupt_index(steps: list[Any], seed: int, way: str) -> None:
    disk = MemoryDisk()
    feeds = merged(disk, steps)
    names = [path for path in disk.paths() if "/merged/index." in path]
    for path in names:
        content = disk.read(path)
        match way:
            case "lost":
                disk.remove(path)
            case "cut":
                disk.write(path, content[: seed % (len(content) + 1)])
            case "flipped" if content:
                disk.flip_bit(path, seed % len(content), seed % 8)
            case "of another segment":
                disk.write(path, disk.read(names[seed % len(names)]))
    check_every_time(feeds, disk)
    feeds.close()


@settings(max_examples=60, deadline=None)
@given(stamps=st.lists(STAMPS, max_size=8), dedup_id=st.sampled_from([None, "twins"]))
def test_time_search_in_session_log_finds_first_message_not_before_time(
    stamps: list[list[int]], dedup_id: str | None
) -> None:
    disk = MemoryDisk()
    with rt.Publisher(
        "/log", "s", publisher_id="feed", dedup_id=dedup_id, linger_ms=60_000, roll_bytes=4096, disk=disk
    ) as publisher:
        for batch in stamps:
            publisher.publish_many([bytes(1000)] * len(batch), timestamps_ns=batch)
            publisher.flush()
    rows = [stamp for batch in stamps for stamp in batch]
    with rt.LogReader(publisher.directory, disk=disk) as reader:
        for timestamp_ns in range(-6, 15):
            dumb = next((at for at, stamp in enumerate(rows) if stamp >= timestamp_ns), len(rows))
            assert reader.position_at(timestamp_ns) == dumb


class CountedFile:
    """A file that counts the bytes read from it."""

    def __init__(self, file: Any, disk: CountingDisk) -> None:
        self._file, self._disk = file, disk

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def pread(self, size: int, offset: int) -> bytes:
        data: bytes = self._file.pread(size, offset)
        self._disk.read_bytes += len(data)
        return data


class CountingDisk(RealDisk):
    """A disk that counts the bytes read from segments."""

    def __init__(self) -> None:
        self.read_bytes = 0

    def open(self, path: str, *, write: bool = False) -> Any:
        file = super().open(path, write=write)
        return CountedFile(file, self) if "/log." in path else file


def test_time_search_reads_about_one_index_stride(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(active_segment, "INDEX_STRIDE_BYTES", 2**20)
    feeds = Feeds(tmp_path)
    for _ in range(3):
        for _ in range(8):
            stamps = range(feeds._count, feeds._count + 500)
            feeds.publish("a", [bytes(1000)] * 500, "t", stamps)
            feeds._count += 500
        feeds.merge()
        feeds.roll()
    feeds.close()
    for timestamp_ns in (0, 1, 3999, 4000, 6123, 9001, 11_999, 12_000):
        disk = CountingDisk()
        assert found_in(feeds.path, timestamp_ns, disk).position == timestamp_ns
        assert disk.read_bytes < 3 * 2**20  # One stride, one batch, and the first frame twice.


def test_truncated_segment_raises_corrupt_in_time_lookup_and_in_reader_starting_there(tmp_path: Path) -> None:
    feeds = Feeds(tmp_path)
    for first in (0, 10, 20):
        feeds.publish("a", [bytes(100)] * 10, "t", range(first, first + 10))
        feeds.merge()
        feeds.roll()
    feeds.close()
    segment = Path(feeds.path) / "log.0.1"
    content = bytearray(segment.read_bytes())
    content[len(content) // 2] ^= 1
    segment.write_bytes(content)
    for timestamp_ns, position in ((3, 3), (25, 25), (30, 30)):
        assert found_in(feeds.path, timestamp_ns)[:2] == (position, timestamp_ns < 30)
    damaged = found_in(feeds.path, 15)
    assert (damaged.position, damaged.is_message) in {(10, False), (15, True)}
    with rt.LogReader(feeds.path) as reader:
        segment.write_bytes(content[: len(content) // 2])
        with pytest.raises(rt.Corrupt, match=r"log\.0\.1"):
            reader.position_at(15)
        reader.seek(datetime.fromtimestamp(0, UTC))
        assert next(iter(reader)).timestamp_ns == 0
    with rt.LogReader(feeds.path, position=StartTime(15)) as reader:
        assert reader.position == 10
        with pytest.raises(rt.Corrupt, match=r"log\.0\.1"):
            list(reader)


def test_time_search_survives_log_growth_during_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with rt.Publisher(tmp_path, "s", publisher_id="feed", linger_ms=60_000) as publisher:
        publish(publisher, 1)
        search = time_search._search_segment

        def grow(*arguments: Any) -> FoundTime | None:
            found = search(*arguments)
            publish(publisher, 2)
            return found

        monkeypatch.setattr(time_search, "_search_segment", grow)
        with rt.LogReader(publisher.directory) as reader:
            assert reader.position_at(NEW_YEAR_NS + 1000) == 1


# Readers


MICROSECOND = timedelta(microseconds=1)
NEW_YEAR = datetime(2026, 1, 1, tzinfo=UTC)
NEW_YEAR_NS = 1_767_225_600_000_000_000


def publish(publisher: rt.Publisher, *stamps: int, topic: str = "") -> None:
    publisher.publish_many(
        [b""] * len(stamps), topic=topic, timestamps_ns=[NEW_YEAR_NS + at for at in stamps]
    )
    publisher.flush()


def read(reader: Any) -> list[int]:
    return [message.timestamp_ns - NEW_YEAR_NS for message in reader]


def test_reader_starts_at_datetime_of_any_timezone(tmp_path: Path) -> None:
    with rt.Publisher(tmp_path, "s", publisher_id="feed") as publisher:
        publish(publisher, -1, 1000, 500, 2000)
    with rt.LogReader(publisher.directory, position=NEW_YEAR) as reader:
        assert reader.position == 1
        # Later messages are delivered even if their time is earlier.
        assert read(reader) == [1000, 500, 2000]
        reader.seek((NEW_YEAR + 2 * MICROSECOND).astimezone(timezone(timedelta(hours=-7))))
        assert read(reader) == [2000]
        reader.seek(datetime(1970, 1, 1, tzinfo=UTC))
        assert reader.position == 0


@pytest.mark.parametrize(
    ("time", "why"),
    [
        (datetime(2026, 1, 1), "without a timezone"),  # noqa: DTZ001 - that is what is refused
        (datetime(2500, 1, 1, tzinfo=UTC), "out of range"),
    ],
)
def test_naive_or_out_of_range_datetime_raises_invalid_option(
    tmp_path: Path, time: datetime, why: str
) -> None:
    with rt.Publisher(tmp_path, "s", publisher_id="feed") as publisher:
        publish(publisher, 1)
    with pytest.raises(rt.InvalidOption, match=why):
        rt.LogReader(publisher.directory, position=time)
    with rt.Subscriber(publisher.directory, "s") as subscriber:
        with pytest.raises(rt.InvalidOption, match=why):
            subscriber.seek(time)
        assert subscriber.position == 0


def test_subscriber_at_future_time_skips_earlier_messages(tmp_path: Path) -> None:
    with rt.Publisher(tmp_path, "s", publisher_id="feed") as publisher:
        publish(publisher, 1, 2)
        with rt.Subscriber(
            publisher.directory, "s", position=NEW_YEAR + MICROSECOND, name="sub", topics=["t"]
        ) as subscriber:
            assert subscriber.position == 2
            publish(publisher, 3, 999, topic="t")
            assert subscriber.poll(timeout=0.1) == []
            publish(publisher, 1000)  # The first match has another topic.
            publish(publisher, 5, 6000, topic="t")
            assert read(subscriber.poll(2, timeout=60)) == [5, 6000]
            subscriber.ack(subscriber.position)
            subscriber.seek("earliest")
            assert read(subscriber.poll(2, timeout=60)) == [3, 999]
            subscriber.seek("latest")
            assert subscriber.poll(timeout=0) == []
            assert subscriber.position == 7
            subscriber.seek(NEW_YEAR)
            assert subscriber.position == subscriber.stats().position == 0
            subscriber.seek(NEW_YEAR + MICROSECOND)
            assert subscriber.position == subscriber.stats().position == 4
            subscriber.seek(NEW_YEAR)
            assert read(subscriber.poll(timeout=60)) == [3, 999, 5, 6000]
            subscriber.seek(datetime.fromtimestamp(2**33 - 1, UTC))
            assert subscriber.poll(timeout=0) == []
        with rt.Subscriber(publisher.directory, "s", name="sub") as subscriber:
            assert subscriber.position == 7


def test_index_of_test_log_has_more_than_8_entries() -> None:
    disk = MemoryDisk()
    feeds = merged(disk, [("publish", "a", list(range(5)))] * 10)
    header = read_header(disk, feeds.path, SegmentId(0, 0))
    assert header is not None
    assert len(list(decode_entries(disk.read(f"{feeds.path}/index.0.0"), header.seed))) > 8
    feeds.close()


@pytest.mark.parametrize("failing_write", range(7))
def test_reader_from_any_position_misses_no_message_if_index_omits_declaration(failing_write: int) -> None:
    """If `failing_write` is 0, a bit of the index is flipped instead."""
    disk = MemoryDisk()
    feeds = Feeds("/log", disk=disk)
    for at, name in enumerate("abab"):
        feeds.publish(name, [bytes(STRIDE_BYTES)], "t", [at])
    if failing_write:
        disk.fail("pwritev", at=failing_write)
    with contextlib.suppress(rt.StorageError):  # Only a write of the index may fail without an error.
        feeds.merge(block_bytes=1)
    if not failing_write:
        disk.flip_bit(f"{feeds.path}/index.0.0", 0, 0)
    end = rt.LogReader(feeds.path, position="latest", disk=disk).position
    for position in range(end):
        with rt.LogReader(feeds.path, position=position, disk=disk, on_event=list[Any]().append) as reader:
            assert [message.position for message in reader] == list(range(position, end))
    with contextlib.suppress(rt.StorageError):
        feeds.close()
