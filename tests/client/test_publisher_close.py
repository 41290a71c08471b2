"""Closing a publisher: concurrent calls and failures; also invalid arguments and the background thread."""

from __future__ import annotations

import contextlib
import math
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from disks import MemoryDisk, Operation
from publishers import (
    DEADLINE_SECONDS,
    is_told,
    numbers,
    on_files,
    on_memory,
    pull_the_plug,
    read,
    wait_until,
)

import rt
import rt.client.session_log
from rt.client.fork_safety import open_publishers


@pytest.fixture(autouse=True)
def no_publisher_outlives_its_test() -> Iterator[None]:
    yield
    for publisher in list(open_publishers):
        pull_the_plug(publisher)


# Closing


def test_calls_during_close_after_last_write_raise_closed() -> None:
    disk = MemoryDisk()
    publisher = on_memory(disk)
    publisher.publish(b"0")
    release = publisher._abandon
    refused: list[bool] = []

    def abandon() -> None:
        refused.append(is_told(rt.Closed, lambda: publisher.publish(b"late")))
        refused.append(is_told(rt.Closed, lambda: publisher.publish_many([b"late"])))
        refused.append(is_told(rt.Closed, publisher.flush))
        release()

    publisher._abandon = abandon  # type: ignore[method-assign]
    publisher.close()
    assert refused == [True, True, True]
    assert numbers(disk.after_power_cut("none")) == [0]


@pytest.mark.parametrize("fsync", ["never", "interval", "batch"])
def test_flush_returned_during_concurrent_close_is_durable(fsync: str) -> None:
    disk = MemoryDisk()
    publisher = on_memory(disk, fsync=fsync)
    flushed: list[int] = []
    under_way = threading.Event()

    def publish() -> None:
        with contextlib.suppress(rt.Closed):
            while True:
                number = publisher.publish(b"x")
                publisher.flush()
                flushed.append(number)
                if number > 20:
                    under_way.set()

    threads = [threading.Thread(target=publish) for _ in range(3)]
    for thread in threads:
        thread.start()
    assert under_way.wait(DEADLINE_SECONDS)
    publisher.close()
    for thread in threads:
        thread.join(DEADLINE_SECONDS)
    left = numbers(disk.after_power_cut("none"))
    assert left == list(range(len(left)))
    assert set(flushed) <= set(left)


def test_close_called_during_close_returns() -> None:
    disk = MemoryDisk()
    publisher = on_memory(disk)
    publisher.publish(b"x")
    finish = publisher._writer.finish

    def finish_second() -> None:
        publisher._writer.finish = finish  # type: ignore[method-assign]
        publisher.close()
        finish()

    publisher._writer.finish = finish_second  # type: ignore[method-assign]
    publisher.close()
    assert numbers(disk) == [0]


@pytest.mark.parametrize("operation", ["pwritev", "sync"])
def test_close_failing_with_disk_error_releases_lock(operation: Operation) -> None:
    disk = MemoryDisk()
    publisher = on_memory(disk)
    publisher.publish(b"x")
    disk.fail(operation)
    with pytest.raises(rt.StorageFailed):
        publisher.close()
    on_memory(disk).close()


def test_close_failing_with_unexpected_error_releases_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    disk = MemoryDisk()
    publisher = on_memory(disk)
    publisher.publish(b"x")
    with monkeypatch.context() as patch:
        patch.setattr(rt.client.session_log, "encode_batch", fail_to_encode)
        with pytest.raises(MemoryError):
            publisher.close()
    on_memory(disk).close()


def fail_to_encode(*args: object, **options: object) -> None:
    raise MemoryError


# Input of callers


def test_publish_many_writes_thousands_of_small_batches_in_one_call(tmp_path: Path) -> None:
    with on_files(tmp_path, batch_bytes=4096, fsync="never") as publisher:
        assert publisher.publish_many([bytes(1501)] * 40_000) == range(40_000)
    with rt.LogReader(publisher.directory) as reader:
        assert sum(map(len, reader.batches())) == 40_000


@pytest.mark.parametrize(
    "slip",
    [
        lambda publisher: publisher.publish_many([b"a", b"b"], timestamps_ns=np.array([[1], [2]])),
        lambda publisher: publisher.publish_many([b"a"], topic="\ud800"),
        lambda publisher: publisher.publish(b"a", number=2**62 - 1),
        lambda publisher: publisher.publish(b"a", number=2**63),
        lambda publisher: publisher.publish(b"a", number=-1),
        lambda publisher: publisher.publish(b"a", number=0.0),
        lambda publisher: publisher.publish(b"a", number=7.0),
    ],
    ids=["2-D", "surrogate", "last", "too large", "negative", "float", "float to come"],
)
@pytest.mark.parametrize("before", [0, 1])
def test_invalid_argument_is_rejected_and_publisher_continues(
    slip: Callable[[rt.Publisher], object], before: int
) -> None:
    disk = MemoryDisk()
    publisher = on_memory(disk, dedup_id="twins")
    publisher.publish_many([b"good"] * before)
    with pytest.raises((TypeError, ValueError)):
        slip(publisher)
    publisher.publish(b"good")
    publisher.flush()
    publisher.close()
    assert [(m.number, m.value) for m in read(disk=disk)] == [(n, b"good") for n in range(before + 1)]
    on_memory(disk, dedup_id="twins").close()


# The background thread


def test_small_publish_many_is_written_without_another_call(tmp_path: Path) -> None:
    interval = sys.getswitchinterval()
    with (
        on_files(tmp_path, linger_ms=0, fsync="never") as publisher,
        rt.LogReader(publisher.directory, follow=True) as reader,
    ):
        sys.setswitchinterval(1e-6)  # The thread can now run between any two steps of the call.
        try:
            for i in range(100):
                publisher.publish_many([b"%d" % i])
                assert [m.value for m in reader.poll(1, timeout=DEADLINE_SECONDS)] == [b"%d" % i]
        finally:
            sys.setswitchinterval(interval)


def test_fsync_interval_syncs_during_long_linger() -> None:
    disk = MemoryDisk()
    publisher = on_memory(disk, fsync="interval", batch_bytes=4096)
    synced, sync_to = threading.Event(), publisher._log.writer.sync_to

    def spied(point: Any) -> None:
        sync_to(point)
        synced.set()

    publisher._log.writer.sync_to = spied  # type: ignore[method-assign]
    for _ in range(10):
        publisher.publish(bytes(1000))
    assert synced.wait(50)  # The linger ends after 60 s.
    publisher._log.writer.sync_to = sync_to  # type: ignore[method-assign]
    publisher.close()


@pytest.mark.parametrize("pause_s", [0, math.inf])
def test_background_thread_failure_raises_storage_failed_in_later_calls(
    monkeypatch: pytest.MonkeyPatch, pause_s: float
) -> None:
    """This also holds if the call itself tried to write first. Its message was accepted and must not be
    repeated.
    """
    disk = MemoryDisk()
    publisher = on_memory(disk, linger_ms=0)
    publisher._writer._pause_s = pause_s
    with monkeypatch.context() as patch:
        patch.setattr(rt.client.session_log, "encode_batch", fail_to_encode)
        publisher.publish(b"x")
        wait_until(lambda: isinstance(publisher._writer.pending_error, rt.StorageFailed))
    with pytest.raises(rt.StorageFailed):
        publisher.publish(b"y")
    with pytest.raises(rt.StorageFailed):
        publisher.flush()
    with pytest.raises(rt.StorageFailed):
        publisher.close()
    on_memory(disk).close()
