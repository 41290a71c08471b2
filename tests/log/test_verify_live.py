"""Verifying logs that are trimmed or written meanwhile."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from disks import MemoryDisk
from verify_bench import CLUSTER, DIRECTORY, MERGED, ReadOnlyDisk, publish

import rt
from rt.log.check.status import SegmentState
from rt.log.check.verify import verify
from rt.log.disk import REAL, Disk, File
from rt.log.format.segment import SEGMENT_HEADER_BYTES, SegmentId
from rt.log.format.segment_table import TrimReason
from rt.log.scan.directory import list_segments, read_header, read_table, scans
from rt.log.scan.scanner import scanner_for
from rt.log.write.writer import LogWriter
from rt.testing.merged import MergedLogBuilder

# Trims


def trim(disk: Disk, directory: str, before: SegmentId) -> None:
    table = read_table(disk, directory)
    assert table is not None
    writer = LogWriter.open(directory, table.identity, disk=disk)
    writer.trim(before, TrimReason.TIME)
    writer.close()


def test_trimmed_segments_are_reported_as_trimmed_without_problems(disk: MemoryDisk) -> None:
    publish(disk, 4, size=2000, roll_bytes=8192)
    trim(disk, DIRECTORY, SegmentId(0, 2))
    report = verify(DIRECTORY, disk=disk)
    assert report.all_problems == []
    assert [(segment.state, segment.message_count) for segment in report.segments] == [
        (SegmentState.TRIMMED, 0),
        (SegmentState.TRIMMED, 0),
        (SegmentState.SEALED, 3),
        (SegmentState.SEALED, 3),
    ]
    assert [segment.first for segment in report.segments] == [0, 3, 6, 9]


class HookedDisk(ReadOnlyDisk):
    """A disk that calls `hook` before it opens a file."""

    def __init__(self, disk: Disk, hook: Callable[[str], None]) -> None:
        super().__init__(disk)
        self._hook = hook

    def open(self, path: str, *, write: bool = False) -> File:
        self._hook(path)
        return super().open(path, write=write)


class LaggingFile:
    """A file whose first read stops short, as if its last bytes were just being written."""

    def __init__(self, file: File, *, short_by: int) -> None:
        self._file = file
        self._short_by = short_by

    def pread(self, size: int, offset: int) -> bytes:
        data = self._file.pread(size, offset)
        if offset < SEGMENT_HEADER_BYTES:
            return data
        short_by, self._short_by = self._short_by, 0
        return data[: len(data) - short_by]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


class LaggingDisk(ReadOnlyDisk):
    """A disk whose segments lag behind."""

    def __init__(self, disk: Disk, *, short_by: int) -> None:
        super().__init__(disk)
        self._short_by = short_by

    def open(self, path: str, *, write: bool = False) -> Any:
        file = super().open(path, write=write)
        return LaggingFile(file, short_by=self._short_by) if "/log." in path else file


@pytest.mark.parametrize("short_by", [1, 40, 200, 250])
def test_batch_being_written_is_read_again_and_verified(disk: MemoryDisk, short_by: int) -> None:
    publish(disk, 2)
    session = publish(disk, 1)
    with MergedLogBuilder(MERGED, cluster_id=CLUSTER, stream="stream", disk=disk) as merged:
        merged.merge_all([session])
    for directory, count in ((DIRECTORY, 9), (MERGED, 9)):
        report = verify(directory, disk=LaggingDisk(disk, short_by=short_by))
        assert report.all_problems == []
        assert sum(segment.message_count for segment in report.segments) == count


def test_segment_trimmed_during_verification_causes_no_problem(disk: MemoryDisk) -> None:
    publish(disk, 4, size=2000, roll_bytes=8192)
    for call in range(1, 8):
        copy = disk.after_power_cut("all")
        calls = 0

        def trim_now(path: str, copy: Disk = copy, call: int = call) -> None:
            nonlocal calls
            calls += 1
            if calls == call:
                trim(copy, DIRECTORY, SegmentId(0, 3))

        report = verify(DIRECTORY, disk=HookedDisk(copy, trim_now))
        assert calls >= call
        assert report.all_problems == []


# Live logs


@pytest.mark.slow
@pytest.mark.parametrize("fsync", ["batch", "interval", "never"])
def test_session_log_written_during_verification_is_never_reported_corrupt(
    tmp_path: Path, fsync: Any
) -> None:
    lives = 3
    looked = threading.Semaphore(0)
    failures: list[BaseException] = []

    def write() -> None:
        """Publish one run after another. Before each later run, wait for one more verification."""
        try:
            for run in range(lives):
                if run:
                    looked.acquire()
                with rt.Publisher(
                    tmp_path, "s", publisher_id="feed", roll_bytes=300_000, batch_bytes=60_000, fsync=fsync
                ) as publisher:
                    for size in range(100):
                        publisher.publish_many([bytes(size * 37 % 5000)] * 20, topic="t" * (size % 5))
                        publisher.publish(b"one more")
        except BaseException as error:
            failures.append(error)
            raise

    writer = threading.Thread(target=write)
    writer.start()
    directory = tmp_path / "s" / "sessions" / "feed"
    while not (directory / "log.0.0").exists():
        assert writer.is_alive()
    looks = 0
    while writer.is_alive():
        looked.release()
        assert verify(directory).damage == []
        looks += 1
    writer.join()
    assert failures == []
    assert looks >= lives - 1
    final = verify(directory)
    assert final.all_problems == []
    assert sum(segment.message_count for segment in final.segments) == lives * 2100


@pytest.mark.slow
def test_merged_log_written_rolled_and_trimmed_during_verification_is_never_reported_corrupt(
    tmp_path: Path,
) -> None:
    with rt.Publisher(tmp_path, "s", publisher_id="feed", batch_bytes=20_000) as publisher:
        for _ in range(40):
            publisher.publish_many([bytes(1000)] * 100)
    stop = threading.Event()
    merged = MergedLogBuilder(tmp_path / "merged", cluster_id=CLUSTER, stream="s")
    places = [batch.offset for scan in session_scans(publisher.directory) for batch in scan.batches]

    def write() -> None:
        for index, (start, end) in enumerate(itertools.pairwise(places)):
            merged.merge(publisher.directory, start, end)
            if index % 3 == 0:
                merged.sync()
            if index % 10 == 9:
                merged.roll()
                merged.trim(SegmentId(0, max(index // 10 - 2, 0)))
        stop.set()

    writer = threading.Thread(target=write)
    writer.start()
    try:
        is_over = False
        while not is_over:
            is_over = stop.is_set() or not writer.is_alive()
            assert verify(tmp_path / "merged").damage == []
    finally:
        writer.join()
    merged.close()
    assert stop.is_set()
    assert verify(tmp_path / "merged").all_problems == []


def test_segment_trimmed_while_being_read_causes_no_corruption_report_for_next_segment(
    tmp_path: Path,
) -> None:
    with rt.Publisher(tmp_path, "s", publisher_id="feed", batch_bytes=200_000) as publisher:
        for _ in range(40):
            publisher.publish_many([bytes(1000)] * 200)
    places = [batch.offset for scan in session_scans(publisher.directory) for batch in scan.batches]
    with MergedLogBuilder(tmp_path / "merged", cluster_id=CLUSTER, stream="s") as merged:
        for index, (start, end) in enumerate(itertools.pairwise(places)):
            merged.merge(publisher.directory, start, end)
            if index in {0, 30}:
                merged.roll()
        walked: list[int] = []

        def on_progress(size: int, _total: int) -> None:
            walked.append(size)
            if len(walked) == 2:  # This is in the middle of the second segment.
                merged.trim(SegmentId(0, 2))

        report = verify(tmp_path / "merged", on_progress=on_progress)
    assert len(walked) > 2
    assert [segment.state for segment in report.segments] == [
        SegmentState.SEALED,
        SegmentState.TRIMMED,
        SegmentState.ACTIVE,
    ]
    assert report.damage == []


def session_scans(directory: str) -> Iterator[Any]:
    header = read_header(REAL, directory, list_segments(REAL, directory)[0])
    assert header is not None
    file = REAL.open(f"{directory}/{header.id}")
    yield from scans(file.pread, scanner_for(header))
    file.close()
