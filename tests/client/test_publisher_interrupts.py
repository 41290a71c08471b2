"""Interrupts at any line of publishing or opening lose and duplicate no flushed message, leave no lock."""

from __future__ import annotations

import contextlib
import functools
import itertools
import linecache
import math
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, cast

import pytest
from disks import MemoryDisk
from publishers import DEADLINE_SECONDS, numbers, on_memory, pull_the_plug, read, wait_until
from receiving_node import make_pki, tls_of

import rt
import rt.log.write.sealed_segments
from rt.client.fork_safety import open_publishers
from rt.errors import DirectoryLocked
from rt.log.whole_files import write_whole
from rt.sidecar import push_pool
from rt.sidecar.protocol import PushRequested
from rt.sidecar.push_pool import Follower, PushPool


@pytest.fixture(autouse=True)
def no_publisher_outlives_its_test() -> Iterator[None]:
    yield
    for publisher in list(open_publishers):
        pull_the_plug(publisher)


class Interrupt(KeyboardInterrupt):
    pass


@functools.cache
def is_of_publishing(file: str) -> bool:
    return file.endswith(
        (
            "rt/client/publisher.py",
            "rt/client/background.py",
            "rt/client/batch_writer.py",
            "rt/client/session_log.py",
            "rt/log/write/active_segment.py",
            "rt/log/write/failure_latch.py",
            "rt/log/write/sealed_segments.py",
            "rt/log/write/writer.py",
            "rt/log/write/batcher.py",
        )
    )


@functools.cache
def is_of_opening(file: str) -> bool:
    return file.endswith(("rt/client/publisher.py", "rt/client/wait_handle.py", "rt/sidecar/push_pool.py"))


@functools.cache
def can_be_interrupted(file: str, number: int) -> bool:
    """Return whether a signal can interrupt this line. CPython checks no signals between a lock and the body
    of its `with`, nor at a bare `try`.
    """
    line = linecache.getline(file, number).partition("#")[0].strip()
    return line not in {"try:", "return"} and not line.startswith("with self._")


class Interrupter:
    """Raises `Interrupt` at one line of the publisher, as Ctrl-C does."""

    def __init__(self, at: int, is_of: Callable[[str], bool] = is_of_publishing) -> None:
        self.left = at
        self.is_of = is_of
        self.where = ""

    def __call__(self, frame: FrameType, event: str, arg: object) -> Any:
        name = frame.f_code.co_filename
        if not self.is_of(name):
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
    """Interrupt a publisher at a line, continue, and check the messages; return False if there is no such
    line.
    """
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
    # The publisher's thread may hold a lock at this moment.
    for lock in (publisher._lock, publisher._log._syncing):
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
def test_interrupt_at_any_line_of_publish_loses_and_duplicates_no_flushed_message(first: int) -> None:
    """Test every seventh line, starting with the first one. Together the cases test all lines."""
    lines = itertools.takewhile(interrupted_at, itertools.count(first, 7))
    assert sum(1 for _ in lines) * 7 > 300


def test_interrupt_after_sealed_segment_table_write_loses_no_flushed_message(
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
        patch.setattr(rt.log.write.sealed_segments, "write_whole", write_and_stop)
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


def publish_one(publisher: rt.Publisher) -> None:
    publisher.publish(b"interrupted")


def publish_few(publisher: rt.Publisher) -> None:
    publisher.publish_many([b"interrupted"])


def publish_with_headers(publisher: rt.Publisher) -> None:
    publisher.publish_many([b"interrupted"], headers={"key": b"value"})


@pytest.mark.slow
@pytest.mark.parametrize("publish", [publish_one, publish_few, publish_with_headers])
@pytest.mark.parametrize("is_after_pause", [False, True])
def test_publish_after_interrupted_call_is_written_without_extra_linger(
    publish: Callable[[rt.Publisher], None], *, is_after_pause: bool
) -> None:
    """No other call makes the background thread write the batch that the interrupted call started."""
    for line in itertools.count(1):
        publisher = on_memory(MemoryDisk(), linger_ms=0)
        publisher._writer._pause_s = 0 if is_after_pause else math.inf
        interrupter = Interrupter(line)
        before = sys.gettrace()
        sys.settrace(interrupter)
        try:
            publish(publisher)
        except Interrupt:
            pass
        finally:
            sys.settrace(before)
        publisher._writer._pause_s = math.inf
        with contextlib.suppress(rt.StorageFailed):  # The interrupt may have hit a write.
            number = publisher.publish(b"after")
            wait_until(lambda number=number, publisher=publisher: publisher.progress.written > number)
        pull_the_plug(publisher)
        if not interrupter.where:
            break
    assert line > 10


class UnservedPool(PushPool):
    """A pool that keeps its requests, because no thread takes them."""

    def _begin(self) -> None:
        self._thread = threading.current_thread()

    def unfinished(self) -> set[int]:
        found: set[int] = set()
        for what in self._requests:
            if isinstance(what, int):
                found.discard(what)
            else:
                found.add(what[0].number)
        return found


def test_interrupt_at_any_line_of_opening_leaves_no_session_in_push_pool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the next publisher of the directory would wait for the push of that session."""
    make_pki(tmp_path)
    tls = tls_of(tmp_path, "feed")
    for line in itertools.count(1):
        pool = UnservedPool()
        monkeypatch.setattr(push_pool, "_shared", [pool])
        interrupter = Interrupter(line, is_of_opening)
        before = sys.gettrace()
        sys.settrace(interrupter)
        try:
            publisher = rt.Publisher(
                tmp_path / str(line), "s", publisher_id="feed", endpoints=["localhost:1"], tls=tls
            )
        except Interrupt:
            pass
        finally:
            sys.settrace(before)
        assert len(pool.unfinished()) == (0 if interrupter.where else 1), interrupter.where
        if not interrupter.where:
            break
    publisher.close(timeout=0)
    assert pool.unfinished() == set()
    assert line > 50


@functools.cache
def is_of_log_opening(file: str) -> bool:
    return file.endswith(("rt/client/publisher.py", "rt/client/batch_writer.py", "rt/client/session_log.py"))


def test_interrupt_while_publisher_opens_leaves_no_directory_lock(tmp_path: Path) -> None:
    for line in itertools.count(1):
        interrupter = Interrupter(line, is_of_log_opening)
        before = sys.gettrace()
        sys.settrace(interrupter)
        try:
            publisher = rt.Publisher(tmp_path, "s", publisher_id="feed")
        except Interrupt as error:
            interrupt = error  # The error keeps the opened objects alive, as in a debugger.
        finally:
            sys.settrace(before)
        if not interrupter.where:
            publisher.close()
            break
        try:
            rt.Publisher(tmp_path, "s", publisher_id="feed").close()
        except DirectoryLocked:
            pytest.fail(interrupter.where)
        del interrupt
    assert line > 50


def test_push_thread_ends_if_its_start_is_interrupted(
    monkeypatch: pytest.MonkeyPatch, logged: Callable[[str], list[str]]
) -> None:
    threads: list[threading.Thread] = []
    start = threading.Thread.start

    def start_and_stop(thread: threading.Thread) -> None:
        start(thread)
        threads.append(thread)
        raise Interrupt

    pool = PushPool()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start_and_stop)
        with pytest.raises(Interrupt):
            pool.start(PushRequested(pool.new_number(), "", "s", (), "", "", ""), cast(Follower, None))
    threads[0].join(DEADLINE_SECONDS)
    assert not threads[0].is_alive()
    assert logged("rt.client.publisher") == []
