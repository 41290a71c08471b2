"""Holds of a streaming query: nodes trim no message that a named consumer still needs."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession

import rt
from rt.log.check.status import LogStatus, read_status
from sequencer.localcluster.nodes import LocalCluster

pytestmark = pytest.mark.slow

BATCH, STEP, VALUE = 100, 20, b"x" * 1000
LIMIT_BYTES = 64 << 10


@pytest.fixture
def nodes() -> Iterator[LocalCluster]:
    """Start one node that keeps about 65 messages, in segments of 20 to 40."""
    root = Path(tempfile.mkdtemp(prefix="rt", dir="/tmp"))  # Unix sockets need a short path.
    try:
        with LocalCluster(root, 1, flags=["--roll-bytes", "32Ki", "--retention-bytes", "64Ki"]) as nodes:
            nodes.start()
            nodes.wait_ready()
            yield nodes
    finally:
        shutil.rmtree(root)


def test_nodes_keep_messages_until_consumer_checkpoint_covers_them(
    spark: SparkSession, nodes: LocalCluster, tmp_path: Path
) -> None:
    tls = nodes.certificate("subscriber", "reader")
    files = {"ca": str(tls.ca), "cert": str(tls.cert), "key": str(tls.key)}
    options = {"endpoints": ",".join(nodes.endpoints), "stream": nodes.stream, "consumer": "reader", **files}
    got: list[int] = []

    def take(batch: DataFrame, _: int) -> None:
        got.extend(row.position for row in batch.collect())

    def read_all() -> None:
        """Start the query, or continue from its checkpoint, up to the messages that are merged now."""
        frame = spark.readStream.format("rt").schema("position long, value binary").options(**options)
        query = (
            frame.option("maxOffsetsPerTrigger", str(BATCH))
            .load()
            .writeStream.foreachBatch(take)
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .trigger(availableNow=True)
            .start()
        )
        assert query.awaitTermination(600), "the query does not end"

    def kept() -> LogStatus:
        return read_status(nodes.merged_directory("n1"))

    def is_trimmed_to(position: int) -> bool:
        """Return whether everything is trimmed that may be trimmed while `position` is held."""
        return kept().kept[0].end > position

    with rt.Publisher(
        tmp_path / "feed",
        nodes.stream,
        publisher_id="feed",
        endpoints=nodes.endpoints,
        tls=nodes.certificate("publisher", "feed"),
    ) as publisher:

        def publish(count: int) -> None:
            """Publish in steps that are merged one by one, so that segments can end between them."""
            for _ in range(count // STEP):
                numbers = publisher.publish_many([VALUE] * STEP)
                publisher.flush()
                publisher.wait(numbers[-1], "merged", 300)
            nodes.wait_merged(numbers[-1] + 1)  # Written as well, so the query finds them.

        read_all()  # The log is empty. From now on the query has a hold at its start.
        publish(3 * BATCH)
        end = 3 * BATCH
        read_all()
        assert got == list(range(end)), "nothing went before it was read"
        held = end - BATCH  # Spark commits a micro-batch only when it plans the next one.
        publish(3 * BATCH)
        nodes.wait(lambda: is_trimmed_to(held), "what was read to be trimmed")
        assert 0 < kept().start <= held
        assert sum(segment.size_bytes for segment in kept().kept) > 2 * LIMIT_BYTES

        read_all()
        end += 3 * BATCH
        assert got == list(range(end)), "each message once"
        nodes.wait(lambda: is_trimmed_to(end - BATCH), "the rest to be trimmed as well")
