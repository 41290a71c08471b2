"""A publisher's directory lock: forks, processes being started, interrupts, and removed lock files."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from disks import MemoryDisk
from publishers import DEADLINE_SECONDS, on_files, on_memory, pull_the_plug, read

import rt
from rt.client.fork_safety import open_publishers
from rt.log.disk import REAL, Lock, _RealLock
from rt.objects import SqliteStore


@pytest.fixture(autouse=True)
def no_publisher_outlives_its_test() -> Iterator[None]:
    yield
    for publisher in list(open_publishers):
        pull_the_plug(publisher)


def test_forked_child_releases_directory_lock(tmp_path: Path) -> None:
    publisher = on_files(tmp_path)
    ready, say_ready = os.pipe()
    wait_for_end, end = os.pipe()
    child = os.fork()
    if child == 0:  # Fork handlers of the child have run when fork returns.
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


def test_store_lock_is_released_when_its_process_dies_though_forked_child_survives(tmp_path: Path) -> None:
    program = """
import os, signal, sys
from rt.objects import SqliteStore
store = SqliteStore(sys.argv[1])
if os.fork() == 0:
    store.close()  # Closes nothing: the store is the parent's.
    print(os.getpid(), flush=True)
    signal.pause()
os.wait()
"""
    path = str(tmp_path / "store.db")
    with subprocess.Popen([sys.executable, "-c", program, path], stdout=subprocess.PIPE) as opener:
        assert opener.stdout is not None
        child = int(opener.stdout.readline())
        try:
            with pytest.raises(rt.DirectoryLocked):
                SqliteStore(path)
            opener.kill()
            opener.wait()
            SqliteStore(path).close()
        finally:
            os.kill(child, signal.SIGKILL)


def test_child_forked_while_lock_is_being_acquired_does_not_inherit_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken, forked = threading.Event(), threading.Event()
    path, take = str(tmp_path / "lock"), fcntl.flock

    def take_and_wait(fd: int, operation: int) -> None:
        take(fd, operation)
        if not operation & fcntl.LOCK_UN:
            taken.set()
            forked.wait(0.5)  # A fork that does not wait for the lock is done by then.

    monkeypatch.setattr(fcntl, "flock", take_and_wait)
    locks: list[Lock] = []
    taking = threading.Thread(target=lambda: locks.append(REAL.lock(path)))
    taking.start()
    assert taken.wait(DEADLINE_SECONDS)
    child = os.fork()
    if child == 0:  # pragma: no cover
        fds = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
        os._exit(any(os.path.lexists(fd) and os.readlink(fd) == path for fd in fds))
    forked.set()
    assert os.waitpid(child, 0)[1] == 0
    taking.join()
    locks[0].close()


def test_interrupt_after_lock_is_acquired_closes_its_descriptor_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second close could close a file that another thread has opened in between."""
    path, close, closed = str(tmp_path / "lock"), os.close, list[int]()

    def note_and_close(fd: int) -> None:
        closed.append(fd)
        close(fd)

    def take_and_interrupt(lock: _RealLock) -> None:
        fcntl.flock(lock._fd, fcntl.LOCK_EX)
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "close", note_and_close)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(_RealLock, "take", take_and_interrupt)
        REAL.lock(path)
    assert len(closed) == 1
    REAL.lock(path).close()


def test_closed_lock_is_free_while_duplicate_of_its_descriptor_is_open(
    tmp_path: Path,
) -> None:
    path = tmp_path / "lock"
    lock = REAL.lock(str(path))
    descriptors = [one for one in Path("/proc/self/fd").iterdir() if one.resolve() == path]
    copy = os.dup(int(descriptors[0].name))
    lock.close()
    REAL.lock(str(path)).close()
    os.close(copy)


def test_publisher_releases_directory_if_its_thread_cannot_start(
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


def test_publisher_flush_raises_storage_failed_after_lock_file_is_removed(tmp_path: Path) -> None:
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


def test_directory_locked_error_suggests_distinct_publisher_name(tmp_path: Path) -> None:
    """This includes the default name: the name of the host, which all its workers share."""
    for name, example in ((None, "~2"), ("feed1", "feed1~2"), ("feed1~7", "feed1~2")):
        with (
            rt.Publisher(tmp_path, "s", publisher_id=name) as first,
            pytest.raises(rt.DirectoryLocked) as refused,
        ):
            rt.Publisher(tmp_path, "s", publisher_id=name)
        assert f"Another publisher has the session {first.session!r} open" in str(refused.value)
        assert f"{example}'" in str(refused.value)
