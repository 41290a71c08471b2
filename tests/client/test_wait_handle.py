"""The wait handle: how calls of a publisher read its progress file."""

from __future__ import annotations

import itertools
import linecache
import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any, cast

import pytest

from rt.client import wait_handle
from rt.client.publisher_status import PublisherStatus
from rt.client.replication_problem import ReplicationProblem
from rt.client.wait_handle import WaitHandle
from rt.net.tls import TLS
from rt.sidecar import push_pool
from rt.sidecar.cluster_file import PushedCluster, write_cluster
from rt.sidecar.progress_file import NO_LEVEL, Level, ProgressFile, ProgressRecord
from rt.sidecar.protocol import PushRequested

INCARNATION = bytes(range(16))
CLUSTER = bytes(range(16, 32))
SOON_SECONDS = 60


class IdlePool:
    """A pool that starts nothing and never reads."""

    def new_number(self) -> int:
        return 1

    pids = ()

    def start(self, session: PushRequested, follower: WaitHandle) -> None:
        assert (session.number, session.directory) == (1, follower.directory)

    def start_waiting(self) -> None: ...

    def stop_waiting(self) -> None: ...

    def finish(self, number: int) -> None:
        assert number == 1


@pytest.fixture
def records() -> list[ProgressRecord]:
    return []


@pytest.fixture(autouse=True)
def pool(monkeypatch: pytest.MonkeyPatch) -> None:
    idle = IdlePool()
    monkeypatch.setattr(push_pool, "shared", lambda: idle)


def handle_of(directory: Path, records: list[ProgressRecord]) -> WaitHandle:
    made = WaitHandle(
        str(directory),
        "s",
        ["localhost:1"],
        cast(TLS, SimpleNamespace(ca="ca", cert="cert", key="key")),
        incarnation=INCARNATION,
        on_progress=records.append,
        problem=ReplicationProblem(str(directory), None),
    )
    made.start()
    return made


@pytest.fixture
def handle(tmp_path: Path, records: list[ProgressRecord]) -> Iterator[WaitHandle]:
    made = handle_of(tmp_path, records)
    yield made
    if made._fd >= 0:
        made.release()


@pytest.fixture
def file(handle: WaitHandle) -> Iterator[ProgressFile]:
    made = ProgressFile(handle.directory, INCARNATION, CLUSTER)
    yield made
    made.close()


def test_poll_reads_written_progress_and_reports_it_once(
    handle: WaitHandle, file: ProgressFile, records: list[ProgressRecord]
) -> None:
    file.write(replicated=Level(0, 7), merged=Level(0, 5))
    assert (handle.poll(), handle.poll()) == (True, False)
    assert (handle.replicated, handle.merged) == (Level(0, 7), Level(0, 5))
    assert [record.merged for record in records] == [NO_LEVEL, Level(0, 5)]


def test_closing_publisher_logs_number_not_replicated_without_node_failure(
    handle: WaitHandle, file: ProgressFile, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(wait_handle, "SILENT_SECONDS", 0.001)
    file.write(replicated=Level(0, 5), merged=Level(0, 5))
    assert handle.poll()
    status = SimpleNamespace(endpoints=(), unsent_messages=2, unsent_bytes=9)
    assert handle.linger(0, 7, 0.002, "feed", lambda: cast(PublisherStatus, status)) is None
    (line,) = (line for line in caplog.messages if "closing_waits" in line)
    assert "number 7 is not replicated yet" in line
    assert "got 5" in line


@pytest.mark.parametrize(
    ("followed", "counts"),
    [(CLUSTER, True), (b"another cluster!", False), (b"", False)],
    ids=["the same cluster", "another cluster", "no cluster: its file was removed"],
)
def test_merged_level_of_another_cluster_is_ignored(
    tmp_path: Path, records: list[ProgressRecord], followed: bytes, *, counts: bool
) -> None:
    """Otherwise the publisher would delete messages that only the lost cluster had."""
    file = ProgressFile(str(tmp_path), INCARNATION, CLUSTER)
    file.write(replicated=Level(0, 7), merged=Level(0, 5))
    file.close()
    if followed:
        write_cluster(str(tmp_path), PushedCluster(followed, 1))
    handle = handle_of(tmp_path, records)
    assert not handle.poll()
    assert handle.merged == records[-1].deletable == (Level(0, 5) if counts else NO_LEVEL)

    file = ProgressFile(str(tmp_path), INCARNATION, followed)
    if not followed:
        file.set_cluster(b"another cluster!")
    file.write(replicated=Level(0, 8), merged=Level(0, 1))
    file.close()
    assert handle.poll()
    assert handle.merged == records[-1].merged == Level(0, 5 if counts else 1)
    handle.release()


def test_merged_level_never_decreases_for_concurrent_readers(
    handle: WaitHandle, file: ProgressFile, records: list[ProgressRecord]
) -> None:
    count = 2000

    def read() -> None:
        seen = 0
        while seen < count:
            handle.poll()
            now = handle.merged.number
            assert now >= seen
            seen = now

    readers = [threading.Thread(target=read, daemon=True) for _ in range(3)]
    for reader in readers:
        reader.start()
    for number in range(1, count + 1):
        file.write(replicated=Level(0, number), merged=Level(0, number))
    for reader in readers:
        reader.join(SOON_SECONDS)
        assert not reader.is_alive()
    told = [record.merged for record in records]
    assert told == sorted(told)
    assert told[-1] == Level(0, count)


def test_released_handle_reads_no_file_with_reused_descriptor(handle: WaitHandle, file: ProgressFile) -> None:
    handle.release()
    file.write(replicated=Level(0, 7), merged=Level(0, 5))
    other = os.open(
        os.path.join(handle.directory, ".progress"), os.O_RDONLY
    )  # The system assigns the lowest free descriptor number.
    try:
        assert not handle.poll()
    finally:
        os.close(other)
    assert handle.merged == NO_LEVEL


def test_handle_is_heard_after_first_listener_is_added(handle: WaitHandle) -> None:
    assert not handle.is_heard
    handle.listen(lambda: None)
    assert handle.is_heard


class Interrupt(KeyboardInterrupt):
    pass


def interrupted_at(line: int, call: Callable[[], object]) -> bool:
    """Return whether the call reached this line of the progress reading and was interrupted there."""
    left = line

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal left
        name = frame.f_code.co_filename
        if not name.endswith(("rt/client/wait_handle.py", "rt/client/local_retention.py")):
            return None
        source = linecache.getline(name, frame.f_lineno).strip()
        if event == "line" and source != "try:" and not source.startswith("with self._"):
            left -= 1
            if not left:
                sys.settrace(None)
                raise Interrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except Interrupt:
        return True
    finally:
        sys.settrace(before)
    return False


def test_progress_is_read_again_after_interrupted_poll(
    handle: WaitHandle, file: ProgressFile, records: list[ProgressRecord]
) -> None:
    heard: list[int] = []
    handle.listen(lambda: heard.append(handle.merged.number))
    for line in itertools.count(1):
        reached = Level(0, line)
        file.write(replicated=reached, merged=reached)
        was_interrupted = interrupted_at(line, handle.poll)
        handle.poll()
        assert (handle.merged, records[-1].merged, heard[-1]) == (reached, reached, line)
        if not was_interrupted:
            break
    assert line > 5
