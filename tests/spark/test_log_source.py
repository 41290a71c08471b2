"""The end of a local merged log, as the driver of a Spark query asks for it repeatedly."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from merged_logs import Feeds

import rt
from rt.log import disk
from rt.spark.source import log_source
from rt.spark.source.log_source import LocalLog

MEGABYTES = 24


@pytest.fixture
def feeds(tmp_path: Path) -> Iterator[Feeds]:
    made = Feeds(tmp_path, names=("a",))
    made.fill(5)
    yield made
    made.close()


@pytest.fixture
def log(feeds: Feeds, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalLog]:
    """Yield a log that has read everything that existed before the test."""
    monkeypatch.setattr(log_source, "LEAP_BYTES", 4 * 2**20)
    made = LocalLog(feeds.path)
    made.bounds()
    yield made
    made.close()


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the number of bytes of each read of a file."""
    pread, found = disk._RealFile.pread, []

    def counted(self: disk._RealFile, size: int, offset: int) -> bytes:
        data = pread(self, size, offset)
        found.append(len(data))
        return data

    monkeypatch.setattr(disk._RealFile, "pread", counted)
    return found


def publish(feeds: Feeds, megabytes: int) -> None:
    for _ in range(megabytes):
        feeds.publish("a", [os.urandom(2**20)], "t", [1])


def merge_unsynced(feeds: Feeds) -> int:
    feeds.log.merge_all([feeds._publishers["a"].directory])
    return feeds.log.position


def test_log_end_is_found_without_reading_all_synced_messages(
    feeds: Feeds, log: LocalLog, reads: list[int]
) -> None:
    low, before = log.bounds()
    for _ in range(2):
        publish(feeds, MEGABYTES)
        end = feeds.merge().stop
        reads.clear()
        assert log.bounds() == (low, end)
        assert sum(reads) < MEGABYTES / 2 * 2**20
        feeds.roll()
    assert end == before + 2 * MEGABYTES


def test_unsynced_messages_are_offered_only_after_they_verify(feeds: Feeds, log: LocalLog) -> None:
    publish(feeds, 6)
    feeds.merge()
    publish(feeds, 1)
    end = merge_unsynced(feeds)
    assert log.bounds()[1] == end
    with open(f"{feeds.path}/log.0.0", "r+b") as file:
        file.seek(-100, os.SEEK_END)
        file.write(bytes(50))
    assert log.bounds()[1] == end, "it was verified when it was offered"
    fresh = LocalLog(feeds.path)
    assert fresh.bounds()[1] == end - 1
    fresh.close()


def test_missing_bytes_of_synced_message_raise_corrupt(feeds: Feeds, log: LocalLog) -> None:
    publish(feeds, 6)
    feeds.merge()
    with open(f"{feeds.path}/log.0.0", "r+b") as file:
        file.truncate(os.fstat(file.fileno()).st_size - 8)
    with pytest.raises(rt.Corrupt, match=r"log\.0\.0"):
        log.bounds()
