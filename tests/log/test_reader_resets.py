"""A reader of a merged log gets one event for a reset, with its position."""

from pathlib import Path

import pytest

import rt
from rt.events import Event, Reset, SkipForward
from rt.log.format.segment import SegmentId
from rt.log.format.segment_table import TrimReason
from rt.testing.merged import MergedLogBuilder

CLUSTER = bytes(range(16))


class Log:
    """Twenty messages in log.0.*, and twenty messages after a reset in log.5.0."""

    def __init__(self, root: Path, *, is_trimmed: bool) -> None:
        self.path = root / "merged"
        self.log = MergedLogBuilder(self.path, cluster_id=CLUSTER, stream="s")
        with rt.Publisher(root, "s", publisher_id="feed", linger_ms=60_000) as publisher:
            for start in range(0, 40, 10):
                publisher.publish_many([b"%d" % number for number in range(start, start + 10)])
                publisher.flush()
            self.session = publisher.directory
            self.log.merge_all([self.session])
            self.end = self.log.position
            self.log.writer.start(SegmentId(5, 0), first=self.end)
            publisher.publish(b"behind")
            publisher.flush()
            self.log.merge_all([self.session])
        if is_trimmed:
            self.log.trim(SegmentId(5, 0), TrimReason.RESET)
        self.log.sync()

    def close(self) -> None:
        self.log.close()


@pytest.mark.parametrize("follow", [False, True])
@pytest.mark.parametrize("position", [0, 39])
def test_reader_reports_reset_with_its_position_once(tmp_path: Path, position: int, follow: bool) -> None:
    log, events = Log(tmp_path, is_trimmed=False), list[Event]()
    with rt.LogReader(log.path, position=position, follow=follow, on_event=events.append) as reader:
        got = reader.poll(100)
        while follow and len(got) < 41 - position:
            got += reader.poll(100, timeout=1.0)
    assert [message.position for message in got] == list(range(position, 41))
    assert events == [Reset(40, 5)]
    log.close()


@pytest.mark.parametrize("position", [0, 39])
def test_reader_reports_messages_trimmed_by_reset_before_reset(tmp_path: Path, position: int) -> None:
    log, events = Log(tmp_path, is_trimmed=True), list[Event]()
    with rt.LogReader(log.path, position=position, on_event=events.append) as reader:
        assert [message.value for message in reader] == [b"behind"]
    assert events == [SkipForward(position, 40, "reset"), Reset(40, 5)]
    log.close()


def test_reader_starting_at_reset_position_reports_reset(tmp_path: Path) -> None:
    log, events = Log(tmp_path, is_trimmed=True), list[Event]()
    with rt.LogReader(log.path, position=40, on_event=events.append) as reader:
        assert [message.position for message in reader] == [40]
    assert events == [Reset(40, 5)]
    log.close()


def test_reader_starting_after_reset_reports_no_event(tmp_path: Path) -> None:
    log, events = Log(tmp_path, is_trimmed=True), list[Event]()
    with rt.LogReader(log.path, position=41, on_event=events.append) as reader:
        assert list(reader) == []
    assert events == []
    log.close()


def test_reader_without_event_handler_raises_gap_but_only_logs_reset(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = Log(tmp_path, is_trimmed=True)
    with rt.LogReader(log.path, position=0) as reader:
        with pytest.raises(rt.Gap):
            reader.poll(10)
        assert [message.position for message in reader] == [40]
    assert "stream_was_reset" in caplog.text
    log.close()
