"""Detecting changes of a log directory by polling, without inotify."""

from __future__ import annotations

import errno
import threading
from pathlib import Path

import pytest

import rt
from rt.log.read import watch
from rt.log.read import watch as watch_module
from rt.log.read.watch import POLL_SECONDS_MIN, DirectoryWatch, LogPoll

WAIT_SECONDS = 120


def test_log_poll_detects_write_roll_and_removed_directory_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lists = 0

    def counted(*arguments: object) -> list[rt.log.format.segment.SegmentId]:  # type: ignore[name-defined]
        nonlocal lists
        lists += 1
        return listing(*arguments)  # type: ignore[arg-type]

    listing = watch_module.list_segments
    monkeypatch.setattr(watch_module, "list_segments", counted)
    monkeypatch.setattr(watch_module, "_TICK_NS", -(2**62))
    with rt.Publisher(tmp_path, "s", publisher_id="feed", roll_bytes=10_000, fsync="never") as publisher:
        publisher.publish(b"one")
        publisher.flush()
        poll = LogPoll(publisher.directory)
        poll.is_changed()
        assert not poll.is_changed()
        publisher.publish(b"two")
        publisher.flush()
        assert poll.is_changed()
        assert not poll.is_changed()
        before = lists
        for _ in range(3):
            assert not poll.is_changed()
        assert lists == before
        publisher.publish(bytes(20_000))
        publisher.flush()
        assert poll.is_changed()
        publisher.publish(b"into the new one")
        publisher.flush()
        assert poll.is_changed()
    Path(publisher.directory).rename(tmp_path / "away")
    assert poll.is_changed()
    assert poll.is_changed()
    assert poll.pace.seconds == POLL_SECONDS_MIN


def test_log_poll_detects_change_in_same_clock_tick_as_last_poll(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch_module, "_TICK_NS", 2**62)
    (tmp_path / "log.0.0").write_bytes(bytes(100))
    poll = LogPoll(str(tmp_path))
    modified_ns = tmp_path.stat().st_mtime_ns
    assert not poll.is_changed()
    (tmp_path / "log.0.1").write_bytes(b"")
    monkeypatch.setattr(watch_module.os, "stat", _with_time(watch_module.os.stat, tmp_path, modified_ns))
    assert poll.is_changed()


def _with_time(stat, path: Path, modified_ns: int):  # type: ignore[no-untyped-def]
    class Stat:
        st_mtime_ns = modified_ns

    return lambda name: Stat if str(name) == str(path) else stat(name)


def test_reader_without_inotify_receives_messages_and_watch_can_be_woken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def exhausted(**_: object) -> None:
        raise OSError(errno.EMFILE, "too many")

    monkeypatch.setattr(watch, "INotify", exhausted)
    with rt.Publisher(tmp_path, "s", publisher_id="feed") as publisher:
        directory = DirectoryWatch(publisher.directory)
        while directory.wait(0):
            pass
        publisher.publish(b"one")
        publisher.flush()
        assert directory.wait(WAIT_SECONDS)
        while directory.wait(0.1):
            pass
        waking = threading.Thread(target=directory.wake)
        waking.start()
        assert directory.wait(WAIT_SECONDS)
        waking.join()
        directory.close()
        with rt.LogReader(publisher.directory, follow=True) as reader:
            assert [message.value for message in reader.poll(timeout=WAIT_SECONDS)] == [b"one"]
            publisher.publish(b"two")
            assert [message.value for message in reader.poll(timeout=WAIT_SECONDS)] == [b"two"]
