"""One watch for the `.progress` files of many publishers."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from rt.log.read.watch import POLL_SECONDS_MAX, POLL_SECONDS_MIN, PollBackoff
from rt.sidecar import progress_watch
from rt.sidecar.progress_watch import ProgressWatch


def files_in(path: Path, count: int) -> list[str]:
    for number in range(count):
        (path / str(number)).write_bytes(bytes(64))
    return [str(path / str(number)) for number in range(count)]


def test_watch_reports_each_written_file_once_and_removed_file_never(tmp_path: Path) -> None:
    watch = ProgressWatch()
    assert watch.fileno() == -1
    for number, path in enumerate(files := files_in(tmp_path, 3)):
        watch.add(number, path)
    assert watch.changed() == set()
    for number in (0, 2, 0):
        Path(files[number]).write_bytes(b"x")
    assert watch.changed() == {0, 2}
    assert watch.changed() == set()
    watch.remove(0)
    Path(files[0]).write_bytes(b"y")
    Path(files[1]).write_bytes(b"y")
    assert watch.changed() == {1}
    for number in (1, 2):
        watch.remove(number)
    assert watch.fileno() == -1
    assert watch.changed() == set()


def test_two_entries_of_one_file_are_both_reported_until_each_is_removed(tmp_path: Path) -> None:
    (path,) = files_in(tmp_path, 1)
    watch = ProgressWatch()
    watch.add(1, path)
    watch.add(2, path)
    Path(path).write_bytes(b"x")
    assert watch.changed() == {1, 2}
    watch.remove(1)
    Path(path).write_bytes(b"y")
    assert watch.changed() == {2}
    os.unlink(path)
    watch.changed()
    watch.remove(2)
    assert watch.fileno() == -1


def test_file_is_polled_if_it_cannot_be_watched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def exhausted(**_: object) -> None:
        raise OSError(errno.EMFILE, "too many")

    (path,) = files_in(tmp_path, 1)
    watch = ProgressWatch()
    with monkeypatch.context() as patch:
        patch.setattr(progress_watch, "INotify", exhausted)
        watch.add(1, path)
    watch.add(2, str(tmp_path / "missing"))
    assert (watch.fileno(), watch.polled) == (-1, {1, 2})
    assert "max_user_instances" in caplog.text
    watch.add(3, path)
    Path(path).write_bytes(b"x")
    assert watch.changed() == {3}
    for number in (1, 2, 3):
        watch.remove(number)
    assert (watch.fileno(), watch.polled) == (-1, set())


def test_poll_backoff_doubles_up_to_maximum_and_resets_on_change() -> None:
    pace = PollBackoff()
    pauses = [pace.seconds]
    for is_changed in (False, False, False, False, False, True, False):
        pace.record(is_changed=is_changed)
        pauses.append(pace.seconds)
    least, most = POLL_SECONDS_MIN, POLL_SECONDS_MAX
    assert pauses == [least, 2 * least, 4 * least, 8 * least, most, most, least, 2 * least]
