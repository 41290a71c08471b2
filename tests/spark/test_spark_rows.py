"""Rows to be published: spooled to disk, read back in any order, and rejected if invalid."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

import rt
from rt.log.write import batcher
from rt.spark.sink import spool as spool_module
from rt.spark.sink.spool import Spool, SpooledRow, check_written_columns


def batch(**columns: pa.Array) -> pa.RecordBatch:
    return pa.record_batch(list(columns.values()), names=list(columns))


def spooled(tmp_path: Path, *batches: pa.RecordBatch, topic: str | None = None) -> Spool:
    spool = Spool(str(tmp_path / "disk"), topic)
    spool.fill(batches)
    return spool


def test_spooled_rows_are_read_back_in_original_or_given_order(tmp_path: Path) -> None:
    made = [SpooledRow(b"%d" % n, "t" * (n % 3), n) for n in range(3000)]
    parts = [made[:1], made[1:2500], [], made[2500:]]
    batches = [
        batch(
            topic=pa.array([row.topic for row in part], pa.string()),
            value=pa.array([row.value for row in part], pa.binary()),
            timestamp_ns=pa.array([row.timestamp_ns for row in part], pa.int64()),
        )
        for part in parts
    ]
    with spooled(tmp_path, *batches) as spool:
        assert list(spool.rows(None)) == made
        order = np.random.default_rng(3).permutation(3000)
        assert list(spool.rows(order)) == [made[at] for at in order]
        assert len(spool.digests) == 16 * 3000
        assert os.listdir(tmp_path / "disk") == []


def test_spool_converts_microseconds_to_nanoseconds_and_strings_to_utf_8(tmp_path: Path) -> None:
    stamps = pa.array([5, -7], pa.timestamp("us", tz="UTC"))
    with spooled(tmp_path, batch(value=pa.array(["é", "b"]), timestamp=stamps), topic="all") as spool:
        assert list(spool.rows(None)) == [
            SpooledRow("é".encode(), "all", 5000),
            SpooledRow(b"b", "all", -7000),
        ]


def test_spooled_rows_have_no_timestamp_without_timestamp_column(tmp_path: Path) -> None:
    with spooled(tmp_path, batch(value=pa.array([b"a"]))) as spool:
        assert list(spool.rows(None)) == [SpooledRow(b"a", "", None)]
    with spooled(tmp_path) as spool:
        assert list(spool.rows(None)) == []


@pytest.mark.parametrize(
    ("columns", "error"),
    [
        ({"value": pa.array([b"a", None])}, r"a row has no value \(at row 1\)"),
        (
            {"value": pa.array([b"a"]), "topic": pa.array([None], pa.string())},
            r"a row has no topic \(at row 0\)",
        ),
        (
            {
                "value": pa.array([b"a", b"b"]),
                "timestamp": pa.array([1, -(2**63)], pa.timestamp("us", tz="UTC")),
            },
            r"a timestamp is out of range \(at row 1\)",
        ),
        (
            {"value": pa.array([b"", b""]), "topic": pa.array(["t", "é" * 513])},
            r"topic too long \(at row 1\): got 1026 bytes of UTF-8, expected at most 1024",
        ),
        (
            {
                "value": pa.array([b"", b""]),
                "topic": pa.array([b"t", b"\xff"]).view(pa.string()),
            },
            r"a topic is not UTF-8 \(at row 1\): got b'\\xff'",
        ),
    ],
)
def test_invalid_rows_raise_invalid_message(tmp_path: Path, columns: dict[str, pa.Array], error: str) -> None:
    with Spool(str(tmp_path), None) as spool, pytest.raises(rt.InvalidMessage, match=error):
        spool.fill([batch(**columns)])


def test_rows_above_size_limit_raise_message_too_large_while_spooling(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (spool_module, batcher):
        monkeypatch.setattr(module, "MESSAGE_BYTES_MAX", 2**21)
    kind = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
    headers = pa.array([None, None, [{"key": "k", "value": b"v"}]], kind)

    def rows(size: int) -> pa.RecordBatch:
        return batch(value=pa.array([b"a", bytes(2**21), bytes(size)]), headers=headers)

    with spooled(tmp_path, rows(2**21 - 1000)) as spool:
        assert len(list(spool.rows(None))) == 3
    with (
        Spool(str(tmp_path), None) as spool,
        pytest.raises(rt.MessageTooLarge, match=r"at row 5\): .* at most 2097152"),
    ):
        spool.fill([rows(2**20), rows(2**21)])


@pytest.mark.parametrize(
    ("fields", "topic", "error"),
    [
        ([("value", "binary"), ("number", "bigint")], None, "column 'number' cannot be published"),
        ([("value", "bigint")], None, "the wrong type: got bigint, expected binary or string"),
        ([("topic", "string")], None, "the column value is missing"),
        ([("value", "binary"), ("value", "binary")], None, "a column is duplicated"),
        ([("value", "binary"), ("topic", "string")], "t", "topic exclude each other"),
        (
            [("value", "string"), ("timestamp", "timestamp"), ("timestamp_ns", "bigint")],
            None,
            "exclude each other",
        ),
    ],
)
def test_invalid_columns_raise_invalid_option(
    fields: list[tuple[str, str]], topic: str | None, error: str
) -> None:
    with pytest.raises(rt.InvalidOption, match=error):
        check_written_columns(fields, topic=topic)
