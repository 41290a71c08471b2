"""The push pool spreads sessions over push processes, watches their progress, and ends with the last."""

from __future__ import annotations

import errno
import os
import select
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from rt.sidecar import progress_watch, push_pool
from rt.sidecar.progress_file import PROGRESS_FILE
from rt.sidecar.protocol import PushReported, PushRequested
from rt.sidecar.push_pool import PushPool

WAIT_SECONDS = 120


class FakeProcess:
    """A process that serves until it must finish. It is settled if `is_open` is set."""

    made: list[FakeProcess]
    is_open = True

    def __init__(self, on_report: Callable[[PushReported], None]) -> None:
        self.on_report = on_report
        self.made.append(self)
        self.served: list[str] = []
        self.load = 0
        self.pid: int | None = None
        self.is_dismissed = False

    @property
    def is_over(self) -> bool:
        return self.load == 0

    @property
    def is_settled(self) -> bool:
        return self.is_open

    def serve(self, session: PushRequested) -> None:
        self.served.append(session.directory)
        self.load += 1

    def finish(self, number: int) -> None:
        assert number
        self.load -= 1

    def step(self, now: float) -> None:
        assert now

    def due_in(self, now: float) -> float | None:
        assert now
        return None

    def register(self, poll: select.poll) -> None:
        assert poll


class FakeFollower:
    """A follower that records each poll and the data that it read."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir()
        self.path = directory / PROGRESS_FILE
        self.path.write_bytes(b"")
        self.directory = str(directory)
        self.is_awaited = self.is_heard = False
        self.seen: list[bytes] = []
        self.reports: list[PushReported] = []
        self.is_released = False
        self.fails = False

    def poll(self) -> bool:
        assert threading.current_thread().name == "rt-pushing"
        if self.fails:
            raise AssertionError("cannot poll")
        now = self.path.read_bytes()
        is_new = now != self.seen[-1:]
        self.seen.append(now)
        return is_new

    def record_report(self, report: PushReported) -> None:
        self.reports.append(report)

    def release(self) -> None:
        self.is_released = True


@pytest.fixture(autouse=True)
def processes(monkeypatch: pytest.MonkeyPatch) -> list[FakeProcess]:
    FakeProcess.made = []
    monkeypatch.setattr(push_pool, "PushProcess", FakeProcess)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    return FakeProcess.made


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def started(made: PushPool, root: Path, count: int) -> tuple[list[FakeFollower], list[int]]:
    followers = [FakeFollower(root / str(number)) for number in range(count)]
    numbers = [made.new_number() for _ in followers]
    for number, follower in zip(numbers, followers, strict=True):
        made.start(PushRequested(number, follower.directory, "s", (), "", "", ""), follower)
    return followers, numbers


def ended(made: PushPool, numbers: list[int]) -> None:
    for number in numbers:
        made.finish(number)
    until(lambda: made._thread is None)
    assert made._wake_fd == -1


def test_sessions_are_balanced_over_processes_and_pool_restarts_after_last_ends(
    tmp_path: Path, processes: list[FakeProcess]
) -> None:
    made = PushPool()
    followers, numbers = started(made, tmp_path, 5)
    until(lambda: sum(process.load for process in processes) == 5)
    assert [len(process.served) for process in processes] == [3, 2]
    ended(made, numbers)
    assert all(follower.is_released for follower in followers)
    (tmp_path / "again").mkdir()
    _, numbers = started(made, tmp_path / "again", 1)
    until(lambda: len(processes) == 3)
    ended(made, numbers)


def test_invalid_push_request_raises_type_error_and_leaves_pool_usable(tmp_path: Path) -> None:
    made = PushPool()
    follower = FakeFollower(tmp_path / "bad")
    with pytest.raises(TypeError):
        made.start(PushRequested(0, follower.directory, "s", (b"host:1",), "", "", ""), follower)  # type: ignore[arg-type]
    assert made._thread is None
    followers, numbers = started(made, tmp_path, 1)
    until(lambda: followers[0].seen)
    ended(made, numbers)


def test_written_progress_is_seen_and_failing_follower_affects_no_other(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = PushPool()
    followers, numbers = started(made, tmp_path, 3)
    until(lambda: all(follower.seen for follower in followers))
    followers[1].fails = True
    for text in (b"1", b"2"):
        for follower in followers:
            follower.path.write_bytes(text)
        until(lambda text=text: all(followers[at].seen[-1] == text for at in (0, 2)))
    until(lambda: "progress_failed" in caplog.text)
    ended(made, numbers)


def test_progress_of_other_followers_is_seen_while_one_is_awaited(tmp_path: Path) -> None:
    made = PushPool()
    (awaited, other), numbers = started(made, tmp_path, 2)
    awaited.is_awaited = True
    made.start_waiting()
    other.path.write_bytes(b"x")
    deadline = time.monotonic() + WAIT_SECONDS
    writes = 0
    while not writes or other.seen[-1:] != [b"x"]:
        awaited.path.write_bytes(str(writes := writes + 1).encode())
        assert time.monotonic() < deadline
    last = str(writes).encode()
    until(lambda: awaited.seen[-1] == last)
    made.stop_waiting()
    ended(made, numbers)


def test_written_progress_is_seen_without_inotify(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def exhausted(**_: object) -> None:
        raise OSError(errno.EMFILE, "too many")

    monkeypatch.setattr(progress_watch, "INotify", exhausted)
    made = PushPool()
    (follower,), numbers = started(made, tmp_path, 1)
    for text in (b"1", b"2"):
        follower.path.write_bytes(text)
        until(lambda text=text: follower.seen and follower.seen[-1] == text)
    ended(made, numbers)


def test_pool_is_settled_only_when_its_processes_are_settled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeProcess, "is_open", False)
    made = PushPool()
    made.settle(WAIT_SECONDS)
    _, numbers = started(made, tmp_path, 1)
    made.settle(0)
    assert not made._is_settled
    monkeypatch.setattr(FakeProcess, "is_open", True)
    made.start_waiting()  # This wakes the pool.
    made.settle(WAIT_SECONDS)
    made.stop_waiting()
    assert made._is_settled
    ended(made, numbers)
