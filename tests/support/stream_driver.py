"""A driver of its own process: streams a log into Parquet until it is killed.

python stream_driver.py LOG CHECKPOINT OUTPUT DIRECTORY
"""

from __future__ import annotations

import os
import sys
from typing import Any

from pyspark.sql import SparkSession
from pyspark.sql import functions as F  # noqa: N812


def into_parquet(
    spark: SparkSession, log: str, checkpoint: str, output: str, limit: int, **trigger: Any
) -> Any:
    """The running query: positions and a hash of each value, in micro-batches of `limit` messages."""
    frame = spark.readStream.format("rt").option("maxOffsetsPerTrigger", str(limit)).load(log)
    rows = frame.select("position", "session", "number", F.sha2("value", 256).alias("digest"))
    writer = (
        rows.writeStream.format("parquet").option("checkpointLocation", checkpoint).option("path", output)
    )
    return writer.trigger(**trigger).start()


def main() -> None:
    from spark_sessions import local_session

    log, checkpoint, output, directory = sys.argv[1:]
    spark = local_session(directory, sys.executable, os.environ)
    into_parquet(spark, log, checkpoint, output, 300, processingTime="0 seconds").awaitTermination()


if __name__ == "__main__":
    main()
