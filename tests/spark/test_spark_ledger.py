"""The ledger of a Spark writer: one claim per partition, and batches that finish in order."""

from __future__ import annotations

import errno
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NoReturn

import pytest

import rt
from rt.spark.sink.create_once import encode_record
from rt.spark.sink.ledger import CompletedBatch, Ledger, PartitionSpan
from rt.spark.sink.writer import BATCH_WRITES


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(str(tmp_path / "shared"), "copy")


def order(first: int, rows: int, mark: int = 0) -> PartitionSpan:
    return PartitionSpan("query", first, bytes([mark]) * 16 * rows)


def test_concurrent_claims_of_partition_all_return_same_order(ledger: Ledger) -> None:
    with ThreadPoolExecutor(8) as pool:
        claims = list(pool.map(lambda mark: ledger.claim(0, 3, order(5, 4, mark)), range(8)))
    (winner,) = set(claims)
    assert (ledger.partitions(0), ledger.order(0, 3), ledger.order(0, 4)) == ({3}, winner, None)
    assert (winner.count, winner.end) == (4, 9)
    assert ledger.started() == [0]


def test_finished_batch_is_recorded_once_and_earlier_batches_are_deleted(ledger: Ledger) -> None:
    assert ledger.done() == CompletedBatch()
    for batch in range(3):
        ledger.claim(batch, 0, order(batch, 1))
        ledger.finish(CompletedBatch("query", batch, {0: batch + 1}))
        ledger.finish(CompletedBatch("query", batch, {0: batch + 1}))
    assert ledger.done() == CompletedBatch("query", 2, {0: 3})
    assert ledger.started() == []
    assert (ledger.partitions(1), ledger.order(1, 0), ledger.order(2, 0)) == (set(), None, order(2, 1))
    with pytest.raises(rt.WriteConflict, match="batch 2 is done already, with other content"):
        ledger.finish(CompletedBatch("query", 2, {0: 4}))


@pytest.mark.parametrize("place", [0, 10, 30, -1])
def test_corrupt_order_raises_corrupt(ledger: Ledger, place: int) -> None:
    ledger.claim(0, 0, order(7, 5))
    path = Path(ledger.path, "0", "0")
    content = bytearray(path.read_bytes())
    content[place] ^= 64
    path.write_bytes(content)
    with pytest.raises(rt.Corrupt, match="fails its checksum"):
        ledger.order(0, 0)


def test_corrupt_record_of_finished_batch_raises_corrupt(ledger: Ledger) -> None:
    ledger.finish(CompletedBatch("query", 0, {0: 10}))
    path = Path(ledger.path, "0.done")
    path.write_bytes(path.read_bytes().replace(b"10", b"11"))
    with pytest.raises(rt.Corrupt, match="fails its checksum"):
        ledger.done()


@pytest.mark.parametrize("record", [{"query": "q", "batch": 0}, {"query": "q", "batch": 0, "ends": [1]}, []])
def test_unknown_format_of_finished_batch_raises_unknown_version(ledger: Ledger, record: Any) -> None:
    ledger.finish(CompletedBatch("query", 0, {0: 10}))
    Path(ledger.path, "0.done").write_bytes(encode_record(record))
    with pytest.raises(rt.UnknownVersion, match=r"0\.done.*newer rt"):
        ledger.done()


def test_next_number_continues_after_end_of_last_batch(ledger: Ledger) -> None:
    assert ledger.next_number("query", 0, 2) == 0
    ledger.finish(CompletedBatch("query", 0, {2: 10}))
    assert ledger.next_number("query", 1, 2) == 10
    assert ledger.next_number("query", 1, 5) == 0
    with pytest.raises(rt.WriteConflict, match="another query writes"):
        ledger.next_number("other", 1, 2)
    with pytest.raises(rt.WriteConflict, match="batch 0 is done already, without partition 3"):
        ledger.next_number("query", 0, 3)


def test_batch_out_of_order_raises_write_conflict(ledger: Ledger) -> None:
    ledger.finish(CompletedBatch("query", 4, {0: 10}))
    with pytest.raises(rt.WriteConflict, match="batch 3 comes after batch 4"):
        ledger.next_number("query", 3, 0)
    ledger.claim(5, 0, order(10, 1))
    with pytest.raises(rt.WriteConflict, match="batch 5 was started and is not finished"):
        ledger.next_number("query", 6, 0)


def test_batch_is_not_started_if_claim_fails_with_disk_full(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> NoReturn:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch, pytest.raises(rt.DiskFull):
        patch.setattr(os, "link", fail)
        ledger.claim(7, 0, order(0, 1))
    assert ledger.started() == []
    assert (ledger.choose_version(None), ledger.choose_version(8)) == (0, 8)


def test_batch_write_gets_next_version_or_must_finish_unfinished_one(ledger: Ledger) -> None:
    assert ledger.choose_version(None) == 0
    assert ledger.choose_version(20260131) == 20260131
    ledger.claim(7, 0, PartitionSpan(BATCH_WRITES, 0, bytes(16)))
    assert ledger.choose_version(7) == 7
    for version in (None, 8):
        with pytest.raises(rt.WriteConflict, match="7 was started and is not finished"):
            ledger.choose_version(version)
    ledger.finish(CompletedBatch(BATCH_WRITES, 7, {0: 1}))
    assert (ledger.choose_version(None), ledger.choose_version(7)) == (8, 7)
