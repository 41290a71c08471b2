"""Planning and reading of batch queries as Spark calls them, without a JVM: bounds, parts, errors."""

from __future__ import annotations

import contextlib
import os
import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest
from merged_logs import Feeds
from pyspark.sql.datasource import (
    DataSourceReader,
    EqualTo,
    Filter,
    GreaterThanOrEqual,
    InputPartition,
    IsNotNull,
)
from pyspark.sql.types import (
    BinaryType,
    DataType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

import rt
from rt.spark.data_source import RtDataSource
from rt.spark.source.batch_reader import RtReader

TYPES: dict[str, DataType] = {
    "position": LongType(),
    "timestamp": TimestampType(),
    "session": StringType(),
    "number": LongType(),
    "topic": StringType(),
    "value": BinaryType(),
}
ALL = tuple(TYPES.items())
POSITION = ALL[:1]
Schema = tuple[tuple[str, DataType], ...]


@pytest.fixture(scope="module")
def feeds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Feeds]:
    made = Feeds(tmp_path_factory.mktemp("reading"))
    made.fill(80)
    yield made
    made.close()


def reader(path: str, schema: Schema = ALL, **options: str) -> RtReader:
    fields = [StructField(name, kind) for name, kind in schema]
    return RtDataSource({"path": path, **options}).reader(StructType(fields))


def opened(path: str) -> list[str]:
    """Return the files below `path` that this process has open for reading. The feeds only write their
    files.
    """
    found = []
    for name in os.listdir("/proc/self/fdinfo"):
        with contextlib.suppress(FileNotFoundError):
            target = os.readlink(f"/proc/self/fd/{name}")
            flags = int(Path(f"/proc/self/fdinfo/{name}").read_text().split()[3], 8)
            if target.startswith(path) and flags & os.O_ACCMODE == os.O_RDONLY:
                found.append(os.path.basename(target))
    return found


def positions(path: str, filters: list[Filter] | None = None, **options: str) -> list[int]:
    planning = reader(path, POSITION, **options)
    if filters is not None:
        list(planning.pushFilters(filters))
    parts = planning.partitions()
    reading = pickle.loads(pickle.dumps(planning))  # noqa: S301
    return [row for part in parts for batch in reading.read(part) for row in batch["position"].to_pylist()]


def test_parts_together_yield_each_row_once_in_order(feeds: Feeds) -> None:
    wanted = [row.position for row in feeds.rows()]
    assert positions(feeds.path, minPartitions="7") == wanted
    assert positions(feeds.path, maxPartitionBytes="5k") == wanted
    assert len(reader(feeds.path, maxPartitionBytes="5k").partitions()) > 3


def test_bounds_are_positions_or_timestamps(feeds: Feeds) -> None:
    rows = feeds.rows()
    assert positions(feeds.path, startingOffsets="17", endingOffsets="90") == list(range(17, 90))
    assert positions(feeds.path, startingOffsets="latest") == []
    millis = rows[len(rows) // 2].timestamp_ns // 1_000_000
    first = next(row.position for row in rows if row.timestamp_ns >= millis * 1_000_000)
    assert positions(feeds.path, startingTimestamp=str(millis)) == list(range(first, len(rows)))
    assert positions(feeds.path, endingTimestamp=str(millis)) == list(range(first))
    assert positions(feeds.path, endingTimestamp=str(2**42)) == list(range(len(rows)))


def test_pushed_filters_select_matching_rows(feeds: Feeds) -> None:
    filters = [IsNotNull(("position",)), GreaterThanOrEqual(("position",), 30)]
    wanted = [row.position for row in feeds.rows(30)]
    assert positions(feeds.path, filters) == wanted
    assert positions(feeds.path, [EqualTo(("session",), "nobody")]) == []


def test_reader_does_not_override_push_filters_if_pushdown_is_off(feeds: Feeds) -> None:
    planning = reader(feeds.path)
    assert planning.pushFilters.__func__ is DataSourceReader.pushFilters


def test_query_without_rows_has_no_partitions_and_ignores_foreign_partitions(feeds: Feeds) -> None:
    planning = reader(feeds.path, startingOffsets="latest")
    assert planning.partitions() == []
    assert list(planning.read(InputPartition(None))) == []
    assert list(planning.read(None)) == []  # type: ignore[arg-type]


def test_pickled_reader_and_partition_are_small(feeds: Feeds) -> None:
    planning = reader(feeds.path)
    (part,) = planning.partitions()
    assert len(pickle.dumps(part)) < 200
    assert len(pickle.dumps(planning)) < 2000


def test_abandoned_read_closes_its_files(tmp_path: Path) -> None:
    feeds = Feeds(tmp_path)
    feeds.publish("a", [bytes(2**20)] * 24, "t", range(24))
    feeds.merge()
    planning = reader(feeds.path)
    (part,) = planning.partitions()
    rows = planning.read(part)
    next(rows)
    assert opened(feeds.path) == ["log.0.0"]
    rows.close()
    assert opened(feeds.path) == []
    feeds.close()


@pytest.mark.parametrize(
    ("schema", "options", "expected"),
    [
        (ALL, {"failOnDataLoss": "maybe"}, "failOnDataLoss cannot be 'maybe': expected true or false"),
        ((("key", BinaryType()),), {}, "the schema has an unknown column 'key'"),
        ((("value", StringType()),), {}, "the schema has the wrong type for column value"),
        (POSITION * 2, {}, "the schema is empty or has a duplicate column"),
        (
            ALL,
            {"startingOffsets": "999999"},
            "startingOffsets is at position 999999, but the log ends with",
        ),
        (ALL, {"endingOffsets": "999999"}, "endingOffsets is at position 999999, but the log ends with"),
        (
            ALL,
            {"startingTimestamp": str(2**42)},
            "no message has a timestamp at or after startingTimestamp",
        ),
        (ALL, {"consumer": "reader1"}, "consumer needs endpoints"),
    ],
)
def test_invalid_schema_or_option_raises_one_line_error(
    feeds: Feeds, schema: Schema, options: dict[str, str], expected: str
) -> None:
    with pytest.raises(rt.RtError) as error:
        reader(feeds.path, schema, **options).partitions()
    assert expected in str(error.value)
    assert "\n" not in str(error.value)


def test_schema_with_not_null_columns_is_rejected(feeds: Feeds) -> None:
    """Otherwise Spark would reject the rows in each task."""
    schema = StructType().add("position", LongType(), nullable=False).add("topic", StringType())
    with pytest.raises(rt.InvalidOption, match="columns that are NOT NULL: position"):
        RtDataSource({"path": feeds.path}).reader(schema)


def test_directory_without_log_raises_log_not_found_with_its_path(tmp_path: Path) -> None:
    with pytest.raises(rt.LogNotFound) as error:
        reader(str(tmp_path)).partitions()
    assert f"not a log directory (at {tmp_path})" in str(error.value)


def test_missing_path_and_endpoints_raise_invalid_option_before_reading() -> None:
    with pytest.raises(rt.InvalidOption, match="neither path nor endpoints"):
        RtDataSource({}).schema()


def test_messages_trimmed_before_planning_or_reading_raise_gap_or_are_skipped(tmp_path: Path) -> None:
    feeds = Feeds(tmp_path)
    first = feeds.fill(20)
    feeds.roll()
    second = feeds.fill(20)
    planned = reader(feeds.path, POSITION, startingOffsets="5")
    (part,) = planned.partitions()
    careless = reader(feeds.path, POSITION, startingOffsets="5", failOnDataLoss="false")
    feeds.trim(1)
    expected = f"the query needs position 5, but the log starts again at position {first.stop}: "
    with pytest.raises(rt.Gap, match=expected):
        list(planned.read(part))
    with pytest.raises(rt.Gap, match=expected):
        planned.partitions()
    rows = [row for batch in careless.read(part) for row in batch["position"].to_pylist()]
    assert rows == list(second)
    assert positions(feeds.path, startingOffsets="5", failOnDataLoss="false") == list(second)
    feeds.close()
