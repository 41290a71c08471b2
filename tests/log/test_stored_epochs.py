"""A reader at a stored position detects that a forced reset replaced messages it had read."""

from collections.abc import Iterator
from pathlib import Path

import pytest

import rt
from rt.client.follow_reader import FollowReader
from rt.errors import Diverged, InvalidOption
from rt.events import Event, SkipForward
from rt.log.format.segment import SegmentId
from rt.testing.merged import MergedLogBuilder

FORCED = 65_536
"""The number of the first epoch after one forced reset."""


class Log:
    """A merged log that a test builds: `add(7)` appends messages until position 7."""

    def __init__(self, root: Path, text: str) -> None:
        self._text = text
        self._publisher = rt.Publisher(root, "s", publisher_id="feed", linger_ms=60_000)
        self.log = MergedLogBuilder(root / "merged", cluster_id=bytes(16), stream="s")
        self.path = self.log.path

    def add(self, end: int) -> None:
        values = [f"{self._text} {number}".encode() for number in range(self.log.position, end)]
        self._publisher.publish_many(values)
        self._publisher.flush()
        self.log.merge_all([self._publisher.directory])
        self.log.sync()

    def close(self) -> None:
        self._publisher.close()
        self.log.close()


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Log]:
    """Positions up to 10, then a forced reset, then positions up to 30."""
    log = Log(tmp_path, "new")
    log.add(10)
    log.log.roll(FORCED)
    log.add(20)
    log.log.roll()
    log.add(30)
    yield log
    log.close()


def read(path: str, position: int, epoch: int | None, *, follow: bool = False) -> list[int]:
    with rt.LogReader(path, position=position, epoch=epoch, follow=follow) as reader:
        return [message.position for message in reader.poll(100)]


@pytest.mark.parametrize("follow", [False, True])
@pytest.mark.parametrize("position", [11, 20, 29, 30])
def test_stored_position_after_replaced_messages_raises_diverged(
    log: Log, position: int, follow: bool
) -> None:
    with rt.LogReader(log.path, position=position, epoch=0, follow=follow) as reader:
        for _ in range(2):
            with pytest.raises(Diverged, match="Start again at position 10") as raised:
                reader.poll(100)
        assert (reader.position, reader.epoch) == (position, 0), "what is stored now is not taken for right"
    assert raised.value.where == log.path
    assert raised.value.got == "epoch 65536 from position 10 on"
    assert raised.value.expected == f"epoch 0 up to position {position}"


@pytest.mark.parametrize(
    ("position", "epoch"), [(0, 0), (9, 0), (10, 0), (11, FORCED), (29, FORCED), (29, FORCED + 3), (25, None)]
)
def test_stored_position_unaffected_by_reset_is_read(log: Log, position: int, epoch: int | None) -> None:
    assert read(log.path, position, epoch) == list(range(position, 30))


def test_stored_position_stays_valid_after_hard_reset(tmp_path: Path) -> None:
    log = Log(tmp_path, "new")
    log.add(10)
    log.log.roll(5)
    log.add(20)
    log.log.trim(SegmentId(5, 0))
    assert read(log.path, 15, 0) == list(range(15, 20))
    log.close()


@pytest.mark.parametrize("trimmed", [SegmentId(FORCED, 0), SegmentId(FORCED, 1)])
def test_forced_reset_is_detected_after_its_position_was_trimmed(log: Log, trimmed: SegmentId) -> None:
    log.log.trim(trimmed)
    with pytest.raises(Diverged, match="Start again at position 10"):
        read(log.path, 20, 0)
    assert read(log.path, 20, FORCED) == list(range(20, 30))


def test_forced_reset_is_detected_after_segments_table_is_deleted(log: Log) -> None:
    """The next message is the first one in the log. It has the epoch of the message before it."""
    log.log.trim(SegmentId(FORCED, 1))
    for name in ("segments", "durable"):
        Path(log.path, name).unlink(missing_ok=True)
    for position in (15, 20, 25):
        with pytest.raises(Diverged, match=r"X from 65536 on\. Start again at its logPos,"):
            read(log.path, position, 0)
    assert read(log.path, 20, FORCED) == list(range(20, 30))


def test_first_of_several_forced_resets_is_reported(log: Log) -> None:
    log.log.roll(2 * FORCED)
    log.add(40)
    for epoch, first in ((0, 10), (FORCED, 30)):
        with pytest.raises(Diverged, match=f"Start again at position {first},"):
            read(log.path, 35, epoch)
    log.log.trim(SegmentId(2 * FORCED, 0))
    for name in ("segments", "durable"):
        Path(log.path, name).unlink(missing_ok=True)
    # The log no longer knows the segments of that epoch.
    with pytest.raises(Diverged, match="X from 65536 on"):
        read(log.path, 30, 0)
    assert read(log.path, 30, FORCED) == list(range(30, 40))


def test_stored_position_after_end_of_replacement_log_raises_diverged(log: Log) -> None:
    for follow in (False, True):
        with rt.LogReader(log.path, position=35, epoch=0, follow=follow) as reader:
            for _ in range(2):
                with pytest.raises(Diverged, match="Start again at position 10"):
                    reader.poll(100)
            assert (reader.position, reader.epoch) == (35, 0)
    with pytest.raises(InvalidOption, match="position 35 is beyond the end"):
        read(log.path, 35, FORCED)


def test_follower_ahead_of_lagging_log_raises_diverged_when_forced_reset_arrives(tmp_path: Path) -> None:
    log = Log(tmp_path, "new")
    log.add(10)
    with FollowReader(
        log.path, position=15, topics=None, on_event=None, epoch=0, check=lambda: None, may_be_ahead=True
    ) as reader:
        assert reader.poll(100) == []
        log.log.roll(FORCED)
        with pytest.raises(Diverged, match="Start again at position 10"):
            reader.poll(100, timeout=60)
    log.close()


@pytest.mark.parametrize("is_open", [False, True])
def test_reader_after_gap_has_position_and_epoch_of_log_start(log: Log, is_open: bool) -> None:
    with rt.LogReader(log.path, position=5, epoch=0) as reader:
        if is_open:
            assert len(reader.poll(1)) == 1
            reader.seek(6)
        log.log.trim(SegmentId(FORCED, 1))
        with pytest.raises(rt.Gap):
            reader.poll(100)
        position, epoch = reader.position, reader.epoch
    assert (position, epoch) == (20, FORCED)
    assert read(log.path, position, epoch) == list(range(20, 30))


def test_reader_epoch_is_epoch_of_last_read_message(log: Log) -> None:
    with rt.LogReader(log.path, position=0, on_event=list[Event]().append) as reader:
        assert reader.epoch is None
        reader.poll(5)
        assert reader.epoch == 0
        reader.poll(100)
        assert reader.epoch == FORCED
        reader.seek(3)
        assert reader.epoch is None
    with rt.LogReader(log.path, position=20, epoch=FORCED + 1) as reader:
        assert reader.epoch == FORCED + 1
        reader.poll(1)
        assert reader.epoch == FORCED
    with rt.Subscriber(log.path, "s", position=20, epoch=FORCED + 1) as subscriber:
        assert subscriber.epoch == FORCED + 1
        subscriber.poll(1)
        assert subscriber.epoch == FORCED


def test_follower_raises_diverged_after_log_files_are_replaced(tmp_path: Path) -> None:
    """A node continues with another node's log: the old files in its directory are deleted."""
    old = Log(tmp_path / "old", "old")
    old.add(20)
    with rt.LogReader(old.path, follow=True) as reader:
        assert len(reader.poll(100)) == 20
        old.close()
        new = Log(tmp_path / "new", "new")
        new.add(10)
        new.log.roll(FORCED)
        new.add(30)
        new.close()
        for path in Path(old.path).iterdir():
            path.unlink()
        for path in Path(new.path).iterdir():
            path.rename(Path(old.path, path.name))
        with pytest.raises(Diverged, match="Start again at position 10"):
            reader.poll(100, timeout=60)


def test_messages_trimmed_before_reading_are_skipped_without_diverged(tmp_path: Path) -> None:
    """The reader is at position 10. A reset is forced at 15, and two trims overtake the reader."""
    log, events = Log(tmp_path, "new"), list[Event]()
    log.add(10)
    with rt.LogReader(log.path, follow=True, on_event=events.append) as reader:
        assert len(reader.poll(100)) == 10
        log.add(15)
        log.log.roll(FORCED)
        log.add(20)
        log.log.roll()
        log.log.trim(SegmentId(FORCED, 1))
        assert reader.poll(100) == []
        log.log.roll()
        log.log.trim(SegmentId(FORCED, 2))
        assert reader.poll(100) == []
        log.add(25)
        assert [message.position for message in reader.poll(100, timeout=60)] == list(range(20, 25))
        assert reader.epoch == FORCED
    assert events[0] == SkipForward(10, 20, "time")
    log.close()


def acknowledge(log: Log, end: int) -> None:
    """Read as the subscriber "reader" up to `end`, and acknowledge that position."""
    with rt.Subscriber(log.path, "s", name="reader") as subscriber:
        messages = subscriber.poll(end - subscriber.position)
        assert subscriber.position == end, messages
        subscriber.ack(end)


def replace(old: Log, new: Log) -> None:
    """Replace the log in a node's directory by the log of other nodes, as after the node was emptied. Other
    files stay, such as the acknowledged positions of subscribers.
    """
    old.close()
    new.close()
    names = {path.name for path in Path(new.path).iterdir()}
    for path in Path(old.path).iterdir():
        if path.name in names or path.name.startswith(("log.", "index.")):
            path.unlink()
    for path in Path(new.path).iterdir():
        path.rename(Path(old.path, path.name))


@pytest.fixture
def lost(tmp_path: Path) -> Iterator[Log]:
    """The log before the forced reset of `log`. It has other messages from position 10 on, up to 20."""
    root = tmp_path / "lost"
    root.mkdir()
    lost = Log(root, "old")
    lost.add(10)
    lost.log.roll()
    lost.add(20)
    yield lost
    lost.close()


def test_named_subscriber_raises_diverged_after_acknowledged_messages_are_replaced(
    log: Log, lost: Log
) -> None:
    acknowledge(lost, 20)
    replace(lost, log)
    for _ in range(2):
        with rt.Subscriber(lost.path, "s", name="reader") as subscriber:
            assert (subscriber.position, subscriber.epoch) == (20, 0)
            with pytest.raises(Diverged, match="Start again at position 10"):
                subscriber.poll(timeout=60)
    with rt.Subscriber(lost.path, "s", name="reader", position=10) as subscriber:
        assert [message.value for message in subscriber.poll(5)] == [b"new %d" % n for n in range(10, 15)]
        subscriber.ack(15)
    with rt.Subscriber(lost.path, "s", name="reader") as subscriber:
        assert [message.position for message in subscriber.poll()] == list(range(15, 30))


def test_subscriber_with_log_replaced_while_running_stores_epoch_of_read_messages(
    log: Log, lost: Log
) -> None:
    with rt.Subscriber(lost.path, "s", name="reader") as subscriber:
        assert len(subscriber.poll()) == 20
        replace(lost, log)
        subscriber.ack(20)
    with rt.Subscriber(lost.path, "s", name="reader") as subscriber:
        with pytest.raises(Diverged, match="Start again at position 10"):
            subscriber.poll(timeout=60)
        subscriber.seek(10)
        assert [message.position for message in subscriber.poll()] == list(range(10, 30))
        with pytest.raises(InvalidOption, match="not delivered yet"):
            subscriber.ack(31)
        subscriber.ack(12)  # Lower than 20, a position of the earlier log.
        with pytest.raises(InvalidOption, match="a lower position was acknowledged"):
            subscriber.ack(11)


@pytest.mark.parametrize("is_trimmed", [False, True])
def test_subscriber_raises_diverged_if_log_directory_is_moved_and_replaced(
    log: Log, lost: Log, is_trimmed: bool
) -> None:
    """A moved file still has a name, so nothing else shows that the segment left the directory. With
    `is_trimmed` the new log starts after the position.
    """
    if is_trimmed:
        log.log.roll()
        log.log.trim(SegmentId(FORCED, 2))
        log.add(40)
    with rt.Subscriber(lost.path, "s", name="reader") as subscriber:
        assert len(subscriber.poll()) == 20
        lost.close()
        log.close()
        Path(lost.path).rename(f"{lost.path}.aside")
        Path(log.path).rename(lost.path)
        for _ in range(2):
            with pytest.raises(Diverged, match="Start again at position 10"):
                subscriber.poll(timeout=60)
        assert (subscriber.position, subscriber.epoch) == (20, 0)


def test_named_subscriber_resumes_before_and_after_forced_reset(log: Log) -> None:
    for end in (5, 10, 15, 30):
        acknowledge(log, end)


def test_position_acknowledged_before_first_read_has_no_epoch(log: Log) -> None:
    with rt.Subscriber(log.path, "s", name="reader", position=15) as subscriber:
        subscriber.ack(15)
        assert subscriber.epoch is None
    acknowledge(log, 30)


@pytest.mark.parametrize("follow", [False, True])
def test_latest_position_has_epoch_of_last_segment(log: Log, follow: bool) -> None:
    def epoch_of_end() -> int | None:
        with rt.LogReader(log.path, position="latest", follow=follow) as reader:
            assert reader.position == 30
            return reader.epoch

    assert epoch_of_end() == FORCED
    log.log.writer.seal()
    assert epoch_of_end() == FORCED
    log.log.roll(FORCED + 1)
    assert epoch_of_end() == FORCED + 1


def test_session_log_has_no_epoch(tmp_path: Path) -> None:
    for _ in range(2):
        with rt.Publisher(tmp_path, "s", publisher_id="feed") as publisher:
            publisher.publish(b"v")
    with rt.Subscriber(publisher.directory, "s", name="reader") as subscriber:
        assert len(subscriber.poll()) == 2
        subscriber.ack(2)
        assert subscriber.epoch is None


@pytest.mark.parametrize("position", ["earliest", "latest", None])
def test_epoch_without_numeric_position_is_rejected(log: Log, position: str | None) -> None:
    with pytest.raises(InvalidOption, match="epoch= belongs to a number as position="):
        rt.Subscriber(log.path, "s", position=position, epoch=0)  # type: ignore[arg-type]


@pytest.mark.parametrize("epoch", [-1, 1 << 24, True, "0", 1.0])
def test_invalid_epoch_is_rejected(log: Log, epoch: int) -> None:
    with pytest.raises(InvalidOption, match="invalid epoch"):
        rt.Subscriber(log.path, "s", position=0, epoch=epoch)
    with pytest.raises(InvalidOption, match="invalid epoch"):
        rt.LogReader(log.path, position=0, epoch=epoch)
