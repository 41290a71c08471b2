"""Arrow record batches for Spark: rows of the log, in batches of bounded size, with Spark's types."""

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest
from merged_logs import Feeds
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DataType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from rt.log.read.projection import Projection
from rt.log.read.range_reader import RangeReader
from rt.log.scan.message_batch import MessageBatch
from rt.spark.source.arrow_batches import BYTES_MAX, BYTES_MIN, ROWS_MIN, gather
from rt.spark.source.arrow_columns import schema_of
from rt.spark.source.columns import COLUMNS, HEADERS_KIND

ALL = ("position", "timestamp", "session", "number", "topic", "value", "timestamp_ns", "run")


def batches(path: str, end: int, **interest: object) -> Iterator[MessageBatch]:
    return RangeReader(path, 0, end, interest=Projection(**interest), on_loss=lambda _: None).batches()


@pytest.fixture
def feeds(tmp_path: Path) -> Iterator[Feeds]:
    made = Feeds(tmp_path)
    yield made
    made.close()


def test_arrow_schema_matches_spark_types_of_columns() -> None:
    kinds: dict[str, DataType] = {
        "bigint": LongType(),
        "timestamp": TimestampType(),
        "string": StringType(),
        "binary": BinaryType(),
        HEADERS_KIND: ArrayType(StructType().add("key", "string").add("value", "binary")),
    }
    fields = [StructField(name, kinds[kind]) for name, kind in COLUMNS.items()]
    assert schema_of(tuple(COLUMNS)) == to_arrow_schema(StructType(fields), timezone="UTC")


def test_record_batch_rows_match_log(feeds: Feeds) -> None:
    feeds.fill(80)
    rows = feeds.rows()
    table = pa.Table.from_batches(gather(batches(feeds.path, len(rows)), ALL))
    assert table.to_pylist() == [
        {
            "position": row.position,
            "timestamp": table.column("timestamp")[i].as_py(),
            "session": row.session,
            "run": row.run,
            "number": row.number,
            "topic": row.topic,
            "value": row.value,
            "timestamp_ns": row.timestamp_ns,
        }
        for i, row in enumerate(rows)
    ]
    microseconds = table.column("timestamp").cast(pa.int64()).to_pylist()
    assert microseconds == [row.timestamp_ns // 1000 for row in rows]


def test_record_batch_columns_have_order_and_types_of_schema(feeds: Feeds) -> None:
    feeds.fill(10)
    names = ("value", "topic", "position")
    (batch,) = gather(batches(feeds.path, 10), names)
    assert batch.schema == schema_of(names)
    assert all(field.nullable for field in batch.schema)
    batch.validate(full=True)


def test_many_small_batches_are_combined_into_few_record_batches(feeds: Feeds) -> None:
    for start in range(0, 30_000, 1000):
        feeds.publish("ac"[start % 2], [b"%099d" % n for n in range(start, start + 1000)], "t", range(1000))
    feeds.merge()
    made = list(gather(batches(feeds.path, 30_000), ALL))
    assert sum(batch.num_rows for batch in made) == 30_000
    assert all(batch.num_rows >= ROWS_MIN and batch.nbytes >= BYTES_MIN for batch in made[:-1])
    assert len(made) <= 3


def test_record_batches_of_large_values_have_bounded_size(feeds: Feeds) -> None:
    for _ in range(30):
        feeds.publish("a", [os.urandom(2**20)], "t", [1])
    feeds.publish("c", [bytes(BYTES_MAX + 1)], "t", [1])
    feeds.merge()
    made = list(gather(batches(feeds.path, 31), ("value",)))
    assert sum(batch.num_rows for batch in made) == 31
    assert all(batch.nbytes <= 1.01 * BYTES_MAX for batch in made if batch.num_rows > 1)
    assert len(made) == 4


def test_batch_above_size_limit_is_split_into_record_batches() -> None:
    count, size = 100, 400_000
    batch = MessageBatch(
        np.arange(count),
        np.arange(count),
        np.arange(count),
        ("s",),
        (0,),
        None,
        ("t",),
        None,
        np.arange(count + 1, dtype=np.int32) * size,
        memoryview(bytes(count * size)),
    )
    made = list(gather([batch], ("position", "value")))
    assert [row for part in made for row in part.column(0).to_pylist()] == list(range(count))
    assert max(part.nbytes for part in made) <= 1.01 * BYTES_MAX


def test_projection_without_values_yields_only_requested_columns(feeds: Feeds) -> None:
    feeds.fill(40)
    names = ("position", "topic")
    (batch,) = gather(batches(feeds.path, 40, values=False), names)
    rows = feeds.rows()[:40]
    assert batch.to_pydict() == {
        "position": [row.position for row in rows],
        "topic": [row.topic for row in rows],
    }


def test_sessions_and_topics_match_their_rows_for_random_batches() -> None:
    draw = np.random.default_rng(5)
    names = ("one", "ärger", "", "x" * 1024)

    def drawn(count: int, kinds: int) -> tuple[tuple[str, ...], npt.NDArray[np.int64] | None]:
        chosen = tuple(names[place] for place in draw.permutation(len(names))[:kinds])
        return chosen, draw.integers(0, kinds, count) if kinds > 1 else None

    for pieces, kinds_max in ((1, 1), (1, 3), (7, 1), (7, 4), (250, 1), (250, 2)):
        made = []
        for _ in range(pieces):
            count = int(draw.integers(1, 40))
            zeros = np.zeros(count, np.int64)
            sessions, topics = (drawn(count, int(draw.integers(1, kinds_max + 1))) for _ in range(2))
            offsets = np.zeros(count + 1, np.int32)
            runs = tuple(draw.integers(0, 9, len(sessions[0])).tolist())
            named = sessions[0], runs, sessions[1]
            made.append(MessageBatch(zeros, zeros, zeros, *named, *topics, offsets, memoryview(b"")))
        table = pa.Table.from_batches(gather(made, ("session", "run", "topic")))
        assert table["run"].to_pylist() == [each for batch in made for each in batch.runs.tolist()]
        assert table["session"].to_pylist() == [each for batch in made for each in batch.sessions]
        assert table["topic"].to_pylist() == [each for batch in made for each in batch.topics]
