"""A driver of its own process: streams a log into nodes until it is killed.

python sink_driver.py LOG CHECKPOINT OPTIONS DIRECTORY; the options are JSON.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from pyspark.sql import SparkSession

PARTITIONS = 3


def into_nodes(
    spark: SparkSession, log: str, checkpoint: str, options: dict[str, str], limit: int, **trigger: Any
) -> Any:
    """The running query: all rows, shuffled by what is in them, in micro-batches of `limit` messages."""
    frame = spark.readStream.format("rt").option("maxOffsetsPerTrigger", str(limit)).load(log)
    rows = frame.select("value", "topic", "timestamp").repartition(PARTITIONS, "value")
    writer = rows.writeStream.format("rt").options(**options).option("checkpointLocation", checkpoint)
    return writer.trigger(**trigger).start()


def main() -> None:
    from spark_sessions import local_session

    log, checkpoint, options, directory = sys.argv[1:]
    # A task that fails is run again, up to four times.
    spark = local_session(directory, sys.executable, os.environ, master="local[2,4]")
    into_nodes(
        spark, log, checkpoint, json.loads(options), 250, processingTime="0 seconds"
    ).awaitTermination()


if __name__ == "__main__":
    main()
