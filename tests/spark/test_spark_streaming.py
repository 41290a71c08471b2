"""Spark streams: micro-batches with each message once, limits, restarts, trims and forced resets."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from merged_logs import Feeds
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxBytes, ReadMaxRows
from pyspark.sql.types import LongType, StructField, StructType

import rt
from rt.cluster_epoch import epoch_of, forced_number
from rt.net.grpc_errors import Unreachable
from rt.spark.data_source import latest_position
from rt.spark.source import stream_reader
from rt.spark.source.batch_reader import RtPartition, RtReader
from rt.spark.source.options import parse_options
from rt.spark.source.stream_reader import RtStreamReader

SCHEMA = StructType([StructField("position", LongType())])


@pytest.fixture
def feeds(tmp_path: Path) -> Iterator[Feeds]:
    made = Feeds(tmp_path)
    yield made
    made.close()


def reader(feeds: Feeds, **options: str) -> RtStreamReader:
    return RtStreamReader(parse_options({"path": feeds.path, **options}, streaming=True), SCHEMA)


def at(position: int, first: int = 0, epoch: int = 1) -> dict[str, int]:
    return {"position": position, "epoch": epoch, "first": first}


# The reader by itself


@pytest.fixture
def forced(feeds: Feeds) -> tuple[int, int]:
    """Return the position of a forced reset, and a later position at which another segment starts."""
    position = feeds.fill(5).stop
    feeds.log.roll(forced_number(1))
    end = feeds.fill(5).stop
    feeds.log.roll()
    feeds.fill(5)
    return position, end


@pytest.mark.parametrize(
    "ask",
    [
        lambda stream, offset: stream.latestOffset(offset, ReadAllAvailable()),
        lambda stream, offset: stream.partitions(stream.initialOffset(), offset),
        lambda stream, offset: (stream.prepareForTriggerAvailableNow(), stream.partitions(at(0), offset)),
        lambda stream, offset: RtReader(
            parse_options({"path": stream.log.path, "startingOffsets": json.dumps(offset)}), SCHEMA
        ).partitions(),
        lambda stream, offset: RtReader(
            parse_options({"path": stream.log.path, "endingOffsets": json.dumps(offset)}), SCHEMA
        ).partitions(),
    ],
    ids=["end", "batch", "available_now", "start_of_a_table", "end_of_a_table"],
)
def test_offset_of_old_epoch_beyond_forced_reset_raises_diverged_in_directory(
    feeds: Feeds, forced: tuple[int, int], ask: Callable[[RtStreamReader, dict[str, int]], object]
) -> None:
    position, end = forced
    for ahead in (position + 1, end):
        stream = reader(feeds)
        with pytest.raises(rt.Diverged, match=f"Start again at position {position},"):
            ask(stream, at(ahead))
        stream.stop()
    for right in (at(position), at(end, epoch=epoch_of(forced_number(1), 0)), at(end, epoch=0)):
        stream = reader(feeds)
        ask(stream, right)
        stream.stop()


def test_stream_from_directory_continues_across_forced_reset(feeds: Feeds) -> None:
    position = feeds.fill(5).stop
    stream = reader(feeds)
    before = stream.latestOffset(stream.initialOffset(), ReadAllAvailable())
    feeds.log.roll(forced_number(1))
    end = feeds.fill(5).stop
    after = stream.latestOffset(before, ReadAllAvailable())
    epoch = epoch_of(forced_number(1), 0)
    assert (before, after) == (at(position), at(end, epoch=epoch))
    parts = stream.partitions(before, after)
    rows = [row for part in parts for batch in stream.read(part) for row in batch.to_pylist()]
    assert [row["position"] for row in rows] == list(range(position, end))
    stream.stop()


def test_task_planned_beyond_forced_reset_raises_diverged_in_directory(
    feeds: Feeds, forced: tuple[int, int]
) -> None:
    position, _ = forced
    with pytest.raises(rt.Diverged):
        list(reader(feeds).read(RtPartition(0, position + 1, epoch=1)))
    rows = [batch.num_rows for batch in reader(feeds).read(RtPartition(0, position, epoch=1))]
    assert sum(rows) == position


def test_initial_offset_has_fixed_json_text(feeds: Feeds) -> None:
    feeds.fill(5)
    assert json.dumps(reader(feeds).initialOffset()) == '{"position": 0, "epoch": 1, "first": 0}'


def test_initial_offset_stays_fixed_while_log_grows(feeds: Feeds) -> None:
    first = feeds.fill(5)
    stream = reader(feeds, startingOffsets="latest")
    start = at(first.stop, first.stop)
    assert stream.initialOffset() == start
    second = feeds.fill(5)
    assert stream.initialOffset() == start
    assert stream.latestOffset(start, ReadAllAvailable()) == at(second.stop, first.stop)
    assert latest_position(path=feeds.path) == second.stop
    stream.stop()


def test_latest_offset_follows_log_across_segments(feeds: Feeds) -> None:
    stream = reader(feeds)
    ends = []
    for _ in range(3):
        end = feeds.fill(5).stop
        feeds.roll()
        assert stream.latestOffset(at(0), ReadAllAvailable()) == at(end)
        assert stream.reportLatestOffset() == {"position": end}
        ends.append(end)
    assert stream.latestOffset(at(ends[-1]), ReadAllAvailable()) == at(ends[-1])
    stream.stop()


def test_latest_offset_excludes_torn_tail(feeds: Feeds) -> None:
    end = feeds.fill(5).stop
    stream = reader(feeds)
    with open(f"{feeds.path}/log.0.0", "ab") as file:
        file.write(os.urandom(100))
    assert stream.latestOffset(at(0), ReadAllAvailable()) == at(end)
    stream.stop()


def test_read_limit_matches_options_and_is_exact_for_message_count(feeds: Feeds) -> None:
    end = feeds.fill(100).stop
    stream = reader(feeds, maxOffsetsPerTrigger="10")
    assert stream.getDefaultReadLimit() == ReadMaxRows(10)
    assert stream.latestOffset(at(7), ReadMaxRows(10)) == at(17)
    assert stream.latestOffset(at(7), ReadAllAvailable()) == at(end)
    stream.stop()
    stream = reader(feeds, maxBytesPerTrigger="1k")
    assert stream.getDefaultReadLimit() == ReadMaxBytes(1024)
    assert at(7)["position"] < stream.latestOffset(at(7), ReadMaxBytes(1024))["position"] < 50
    stream.stop()
    assert reader(feeds).getDefaultReadLimit() == ReadAllAvailable()


def test_offset_and_byte_limits_both_apply(feeds: Feeds) -> None:
    for _ in range(40):
        feeds.publish("a", [os.urandom(100_000)], "t", [1])
    feeds.merge()
    stream = reader(feeds, maxOffsetsPerTrigger="30", maxBytesPerTrigger="2m")
    assert stream.getDefaultReadLimit() == ReadMaxRows(30)
    assert 10 <= stream.latestOffset(at(0), ReadMaxRows(30))["position"] <= 25
    stream.stop()


def test_available_now_ends_at_log_end_of_query_start(feeds: Feeds) -> None:
    first = feeds.fill(5).stop
    stream = reader(feeds)
    stream.prepareForTriggerAvailableNow()
    feeds.fill(5)
    assert stream.latestOffset(at(0), ReadAllAvailable()) == at(first)
    assert stream.latestOffset(at(first), ReadAllAvailable()) == at(first)
    stream.stop()


def test_start_below_log_start_raises_gap_with_both_positions_or_skips_trimmed_messages(feeds: Feeds) -> None:
    first = feeds.fill(5).stop
    feeds.roll()
    second = feeds.fill(5).stop
    feeds.trim(1)
    stream = reader(feeds)
    with pytest.raises(rt.Gap, match=f"the query needs position 2, .* starts again at position {first}"):
        stream.partitions(at(2), at(second))
    stream.stop()
    stream = reader(feeds, failOnDataLoss="false")
    (partition,) = stream.partitions(at(2), at(second))
    assert (partition.start, partition.end) == (first, second)
    assert stream.partitions(at(1), at(2)) == []
    stream.stop()


def test_checkpoint_beyond_log_end_raises_gap_unless_data_loss_is_allowed(feeds: Feeds) -> None:
    end = feeds.fill(5).stop
    stream = reader(feeds)
    for ask in (
        lambda: stream.latestOffset(at(end + 1), ReadAllAvailable()),
        lambda: stream.partitions(at(0), at(end + 1)),
    ):
        with pytest.raises(rt.Gap, match=f"is at position {end + 1}, but the log ends with {end}"):
            ask()
    stream.stop()
    careless = reader(feeds, failOnDataLoss="false")
    assert careless.latestOffset(at(end + 1), ReadAllAvailable()) == at(end + 1)
    careless.stop()


def test_repeated_first_batch_starts_at_original_start(feeds: Feeds) -> None:
    begin = feeds.fill(5).stop
    stream = reader(feeds, startingOffsets="latest")
    start = stream.initialOffset()
    middle = feeds.fill(5).stop
    end = stream.latestOffset(start, ReadAllAvailable())
    stream.stop()
    feeds.fill(5)
    restarted = reader(feeds, startingOffsets="latest")
    (partition,) = restarted.partitions(restarted.initialOffset(), end)
    assert (partition.start, partition.end) == (begin, middle)
    restarted.stop()


def test_repeated_first_batch_raises_gap_if_its_start_was_trimmed(feeds: Feeds) -> None:
    stream = reader(feeds)
    start = stream.initialOffset()
    low = feeds.fill(5).stop
    feeds.roll()
    feeds.fill(5)
    end = stream.latestOffset(start, ReadAllAvailable())
    stream.stop()
    feeds.trim(1)
    restarted = reader(feeds)
    assert restarted.initialOffset() == at(low, low)
    with pytest.raises(rt.Gap, match=f"needs position 0, but the log starts again at position {low}"):
        restarted.partitions(restarted.initialOffset(), end)
    restarted.stop()


def test_start_after_end_raises_gap(feeds: Feeds) -> None:
    feeds.fill(20)
    stream = reader(feeds)
    with pytest.raises(rt.Gap, match="the query needs position 3, but the log starts again at position 9"):
        stream.partitions(at(9), at(3))
    stream.stop()


@pytest.mark.parametrize(
    "offset",
    [{"offset": 1}, {"position": 1}, at(1) | {"position": "1"}, at(1) | {"epoch": 1.0}, at(1, -1), {}],
)
def test_checkpoint_with_invalid_offset_is_rejected(feeds: Feeds, offset: dict[str, Any]) -> None:
    feeds.fill(1)
    stream = reader(feeds)
    with pytest.raises(rt.InvalidOption, match="the offset in the checkpoint cannot be"):
        stream.latestOffset(offset, ReadAllAvailable())


class FakeLog:
    """A log from 3 to 30 that records holds. It raises `failure` if that is set."""

    epoch = 1

    def __init__(self) -> None:
        self.held: list[tuple[str, int]] = []
        self.failure: rt.RtError | None = None

    def bounds(self) -> tuple[int, int]:
        return 3, 30

    def hold(self, name: str, position: int) -> None:
        if self.failure is not None:
            raise self.failure
        self.held.append((name, position))


def holding(fake: FakeLog, monkeypatch: pytest.MonkeyPatch, **options: str) -> RtStreamReader:
    nodes = {"endpoints": "n1:1", "stream": "s", "ca": "/ca", "cert": "/cert", "key": "/key"}
    monkeypatch.setattr(stream_reader, "open_log", lambda _, epoch: fake)
    return RtStreamReader(parse_options({**nodes, **options}, streaming=True), SCHEMA)


def test_consumer_holds_positions_not_covered_by_its_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeLog()
    stream = holding(fake, monkeypatch, consumer="reader1", startingOffsets="7")
    start = stream.initialOffset()
    for _ in range(2):
        end = stream.latestOffset(start, ReadAllAvailable())
    stream.commit(at(20))
    assert fake.held == [("reader1", 7), ("reader1", 20)]
    # The first micro-batch is repeated.
    restarted = holding(fake, monkeypatch, consumer="reader1", startingOffsets="latest")
    with contextlib.suppress(AttributeError):  # The fake log has no outline.
        restarted.partitions(restarted.initialOffset(), end)
    assert fake.held == [("reader1", 7), ("reader1", 20)]


def test_query_without_consumer_sets_no_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeLog()
    stream = holding(fake, monkeypatch)
    stream.latestOffset(stream.initialOffset(), ReadAllAvailable())
    stream.commit(at(20))
    assert fake.held == []


def test_hold_is_sent_again_with_next_batch_if_nodes_are_unreachable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake = FakeLog()
    stream = holding(fake, monkeypatch, consumer="reader1")
    fake.failure = Unreachable("all nodes are away")
    start = stream.initialOffset()
    with pytest.raises(Unreachable):
        stream.latestOffset(start, ReadAllAvailable())
    fake.failure = None
    stream.latestOffset(start, ReadAllAvailable())
    fake.failure = Unreachable("all nodes are away")
    stream.commit(at(10))
    fake.failure = None
    stream.commit(at(20))
    assert fake.held == [("reader1", 3), ("reader1", 20)]
    fake.failure = rt.CertificateError("another name")
    with pytest.raises(rt.CertificateError):
        stream.commit(at(25))


def test_stream_reader_can_be_pickled_and_keeps_initial_offset(feeds: Feeds) -> None:
    import pickle

    feeds.fill(5)
    stream = reader(feeds)
    stream.initialOffset()
    twin = pickle.loads(pickle.dumps(stream))  # noqa: S301
    assert twin.initialOffset() == stream.initialOffset()
    twin.stop()
    stream.stop()


# In Spark


def run(
    frame: DataFrame, checkpoint: Path, take: Callable[[DataFrame, int], None], **trigger: Any
) -> list[dict[str, Any]]:
    """Run a query to its end, and return the progress of its micro-batches with rows."""
    query = (
        frame.writeStream.foreachBatch(take)
        .option("checkpointLocation", str(checkpoint))
        .trigger(**(trigger or {"availableNow": True}))
        .start()
    )
    assert query.awaitTermination(600), "the query does not end"
    return [progress for progress in query.recentProgress if progress["numInputRows"]]


def stream(spark: SparkSession, feeds: Feeds, **options: object) -> DataFrame:
    given = {name: str(value) for name, value in options.items()}
    return spark.readStream.format("rt").schema("position long").options(**given).load(feeds.path)


@pytest.mark.slow
def test_micro_batches_respect_limit_and_restart_continues_after_them(
    spark: SparkSession, feeds: Feeds, tmp_path: Path
) -> None:
    first = feeds.fill(60).stop
    limit = first // 3
    frame = stream(spark, feeds, maxOffsetsPerTrigger=limit)
    got: dict[int, list[int]] = {}

    def take(batch: DataFrame, number: int) -> None:
        got[number] = [row.position for row in batch.collect()]

    checkpoint = tmp_path / "checkpoint"
    progress = run(frame, checkpoint, take)
    assert [one["numInputRows"] for one in progress][:3] == [limit] * 3
    assert [position for number in sorted(got) for position in got[number]] == list(range(first))

    assert run(frame, checkpoint, take) == []
    got.clear()
    second = feeds.fill(10).stop
    run(frame, checkpoint, take)
    assert [position for number in sorted(got) for position in got[number]] == list(range(first, second))
    offsets = sorted((checkpoint / "offsets").glob("[0-9]*"), key=lambda path: int(path.name))
    assert offsets[-1].read_text().splitlines()[-1] == json.dumps(at(second))


@pytest.mark.slow
def test_checkpoint_below_log_start_fails_query_or_continues_after_gap(
    spark: SparkSession, feeds: Feeds, tmp_path: Path
) -> None:
    first = feeds.fill(10).stop
    got: list[int] = []

    def take(batch: DataFrame, _: int) -> None:
        got.extend(row.position for row in batch.collect())

    checkpoint = tmp_path / "checkpoint"
    run(stream(spark, feeds), checkpoint, take)
    second = feeds.fill(10).stop
    feeds.roll()
    third = feeds.fill(10).stop
    feeds.trim(1)
    with pytest.raises(PySparkException) as error:
        run(stream(spark, feeds), checkpoint, take)
    assert f"the query needs position {first}, but the log starts again at position {second}" in str(
        error.value
    )
    got.clear()
    run(stream(spark, feeds, failOnDataLoss="false"), checkpoint, take)
    assert got == list(range(second, third))
