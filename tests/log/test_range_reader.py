"""Reading a range of a merged log: each position once, projections, corrupt bytes, reported losses."""

import itertools
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from merged_logs import TOPICS, Feeds

import rt
from rt.errors import Corrupt, LogNotFound
from rt.events import BadMessage, SkipForward
from rt.log.read.projection import EVERYTHING, Projection
from rt.log.read.range_reader import RangeReader
from rt.log.scan.message_batch import MessageBatch


def refuse(event: SkipForward | BadMessage) -> None:
    raise AssertionError(event)


@pytest.fixture(scope="module")
def feeds(tmp_path_factory: pytest.TempPathFactory) -> Feeds:
    """Three segments of small batches, of three sessions, one of them compressed."""
    made = Feeds(tmp_path_factory.mktemp("ranges"))
    for segment in range(3):
        if segment:
            made.roll()
        made.fill(60)
    yield made
    made.close()


@pytest.fixture(scope="module")
def rows(feeds: Feeds) -> list[rt.Message]:
    return feeds.rows()


def read(path: str, start: int, end: int, interest: Projection = EVERYTHING) -> list[rt.Message]:
    reader = RangeReader(path, start, end, interest=interest, on_loss=refuse, wait_seconds=0)
    batches: list[MessageBatch] = list(reader.batches())
    assert reader.position == end or interest.is_nothing or start >= end
    return [message for batch in batches for message in batch.messages()]


@given(data=st.data())
def test_consecutive_ranges_return_each_message_once(
    feeds: Feeds, rows: list[rt.Message], data: st.DataObject
) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(rows)), max_size=4)))
    cuts = [0, *cuts, len(rows)]
    got = [message for start, end in itertools.pairwise(cuts) for message in read(feeds.path, start, end)]
    assert got == rows


@given(data=st.data())
def test_projection_returns_all_messages_of_given_sessions_topics_and_times(
    feeds: Feeds, rows: list[rt.Message], data: st.DataObject
) -> None:
    start = data.draw(st.integers(0, len(rows)))
    end = data.draw(st.integers(start, len(rows)))
    sessions = data.draw(st.none() | st.frozensets(st.sampled_from("abcx")))
    topics = data.draw(st.none() | st.frozensets(st.sampled_from(TOPICS)))
    stamps = st.sampled_from([row.timestamp_ns for row in rows])
    low, high = sorted(data.draw(st.tuples(stamps, stamps)))
    interest = Projection(data.draw(st.booleans()), sessions, topics, low, high)

    got = read(feeds.path, start, end, interest)

    wanted = [
        row if interest.values else row._replace(value=b"")
        for row in rows[start:end]
        if (sessions is None or row.session in sessions)
        and (topics is None or row.topic in topics)
        and low <= row.timestamp_ns <= high
    ]
    assert [row for row in got if low <= row.timestamp_ns <= high] == wanted
    assert all(sessions is None or row.session in sessions for row in got)
    assert all(topics is None or row.topic in topics for row in got)


def test_values_are_not_read_if_projection_excludes_them(tmp_path: Path) -> None:
    feeds = Feeds(tmp_path)
    for _ in range(40):
        feeds.publish("a", [os.urandom(200_000)], "trade", [1])
    feeds.merge(block_bytes=2**20)
    size = os.path.getsize(f"{feeds.path}/log.0.0")

    reader = RangeReader(feeds.path, 0, 40, interest=Projection(values=False), on_loss=refuse)
    assert sum(map(len, reader.batches())) == 40

    assert reader.read_bytes < size / 5
    feeds.close()


def test_blocks_of_sessions_outside_projection_are_not_read(tmp_path: Path) -> None:
    feeds = Feeds(tmp_path)
    for name in "abac" * 10:
        feeds.publish(name, [os.urandom(100_000)], "trade", [1])
    feeds.merge(block_bytes=2**20)
    size = os.path.getsize(f"{feeds.path}/log.0.0")

    reader = RangeReader(feeds.path, 0, 40, interest=Projection(sessions=frozenset("b")), on_loss=refuse)
    assert sum(map(len, reader.batches())) == 10

    assert reader.read_bytes < size / 2
    feeds.close()


@pytest.mark.parametrize("values", [True, False])
def test_corrupt_values_raise_corrupt_only_if_values_are_read(tmp_path: Path, values: bool) -> None:
    feeds = Feeds(tmp_path)
    feeds.publish("a", [bytes(5000)] * 4, "trade", [1, 2, 3, 4])
    feeds.publish("a", [bytes(5000)], "trade", [5])
    feeds.merge()
    feeds.close()
    path = f"{feeds.path}/log.0.0"
    with open(path, "r+b") as file:
        file.seek(os.path.getsize(path) - 100)
        file.write(b"\1")
    reader = RangeReader(feeds.path, 0, 5, interest=Projection(values=values), on_loss=refuse, wait_seconds=0)
    if not values:
        assert sum(map(len, reader.batches())) == 5
        return
    got = []
    with pytest.raises(Corrupt, match="values fail their checksum") as error:
        got += reader.batches()
    assert error.value.path == path


def test_corrupt_columns_raise_corrupt_when_values_are_not_read(tmp_path: Path) -> None:
    feeds = Feeds(tmp_path)
    feeds.publish("a", [bytes(5000)], "trade", [1])
    feeds.merge()
    feeds.close()
    path = f"{feeds.path}/log.0.0"
    content = Path(path).read_bytes()
    at = content.index(b"RTB1") + 64 + 9
    Path(path).write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
    reader = RangeReader(feeds.path, 0, 1, interest=Projection(values=False), on_loss=refuse, wait_seconds=0)
    with pytest.raises(Corrupt, match="columns fail"):
        list(reader.batches())


def test_range_start_trimmed_before_reading_is_reported_and_skipped(tmp_path: Path) -> None:
    feeds = Feeds(tmp_path)
    first = feeds.fill(20)
    feeds.roll()
    second = feeds.fill(20)
    feeds.trim(1)
    events: list[object] = []
    reader = RangeReader(feeds.path, 3, second.stop, on_loss=events.append)
    got = [message.position for batch in reader.batches() for message in batch.messages()]
    assert got == list(second)
    assert events == [SkipForward(3, first.stop, "time")]
    feeds.close()


def test_positions_trimmed_while_reading_are_reported_and_skipped(tmp_path: Path) -> None:
    feeds = Feeds(tmp_path)
    for _ in range(60):
        feeds.publish("a", [os.urandom(90_000)], "trade", [1])
    feeds.merge()
    feeds.roll()
    feeds.publish("a", [b"last"], "trade", [2])
    feeds.merge()
    events: list[SkipForward | BadMessage] = []
    reader = RangeReader(feeds.path, 0, 61, on_loss=events.append)
    batches = reader.batches()
    got = [next(batches)]
    feeds.trim(1)
    got += batches
    positions = [message.position for batch in got for message in batch.messages()]
    (event,) = events
    assert isinstance(event, SkipForward)
    assert positions == [*range(event.wanted), 60]
    assert event.resumed == 60
    feeds.close()


def test_fully_trimmed_range_is_reported(tmp_path: Path) -> None:
    feeds = Feeds(tmp_path)
    first = feeds.fill(5)
    feeds.roll()
    feeds.fill(5)
    feeds.trim(1)
    events: list[object] = []
    assert list(RangeReader(feeds.path, 0, first.stop, on_loss=events.append).batches()) == []
    assert events == [SkipForward(0, first.stop, "time")]
    feeds.close()


def test_log_ending_before_range_end_is_reported_as_lost(tmp_path: Path) -> None:
    feeds = Feeds(tmp_path)
    end = feeds.fill(5).stop
    events: list[object] = []
    reader = RangeReader(feeds.path, 0, end + 3, on_loss=events.append, wait_seconds=0)
    assert sum(map(len, reader.batches())) == end
    assert events == [SkipForward(end, end + 3, "lost")]
    feeds.close()


def test_session_log_or_directory_without_log_raises_log_not_found(tmp_path: Path) -> None:
    feeds = Feeds(tmp_path)
    feeds.fill(1)
    with pytest.raises(LogNotFound, match="one session"):
        RangeReader(f"{tmp_path}/sources/s/sessions/a", 0, 1, on_loss=refuse)
    with pytest.raises(LogNotFound, match="no log directory"):
        RangeReader(tmp_path, 0, 1, on_loss=refuse)
    feeds.close()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (Path.touch, "is not a directory"),
        (lambda path: path.symlink_to("gone"), "is a link to gone, where nothing is"),
    ],
)
def test_file_or_broken_link_in_place_of_log_is_named_in_error(
    tmp_path: Path, make: Callable[[Path], None], words: str
) -> None:
    make(tmp_path / "log")
    for open_log in (lambda path: RangeReader(path, 0, 1, on_loss=refuse), rt.LogReader):
        with pytest.raises(rt.StorageFailed, match=f"{tmp_path}/log {words}"):
            open_log(tmp_path / "log")


def test_torn_tail_after_range_is_ignored(tmp_path: Path) -> None:
    feeds = Feeds(tmp_path)
    feeds.publish("a", [bytes(70_000)], "trade", [1])
    first = feeds.merge()
    feeds.publish("b", [os.urandom(70_000)], "trade", [2])
    feeds.merge()
    feeds.close()
    path = f"{feeds.path}/log.0.0"
    os.truncate(path, os.path.getsize(path) - 60_000)
    for interest in (Projection(), Projection(values=False), Projection(sessions=frozenset("a"))):
        assert [row.position for row in read(feeds.path, 0, first.stop, interest)] == list(first)
