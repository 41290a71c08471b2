"""A driver that streams a log into Parquet and into nodes, and exports it, all at once, until it is killed.

python spark_victim.py JSON: `log`; `streamed` and `delivered`: the directories of the two queries; `options`:
of the nodes; `target`: of the export; `directory`: for Spark's files.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.sql import functions as F  # noqa: N812

PARTITIONS = 2
STARTS = 5


def into_parquet(spark: SparkSession, log: str, directory: str, limit: int, **trigger: Any) -> Any:
    """Start a query that writes positions and a hash of each value, in micro-batches of `limit` messages."""
    frame = spark.readStream.format("rt").option("maxOffsetsPerTrigger", str(limit)).load(log)
    rows = frame.select("position", "session", "number", F.sha2("value", 256).alias("digest"))
    writer = rows.writeStream.format("parquet").option("checkpointLocation", f"{directory}/checkpoint")
    return writer.option("path", f"{directory}/output").trigger(**trigger).start()


def into_nodes(
    spark: SparkSession, log: str, directory: str, options: dict[str, str], limit: int, **trigger: Any
) -> Any:
    """Start a query that writes all rows, partitioned by value, in micro-batches of `limit` messages."""
    frame = spark.readStream.format("rt").option("maxOffsetsPerTrigger", str(limit)).load(log)
    rows = frame.select("value", "topic", "timestamp").repartition(PARTITIONS, "value")
    writer = rows.writeStream.format("rt").options(**options)
    return writer.option("checkpointLocation", f"{directory}/checkpoint").trigger(**trigger).start()


def keep_running(start: Callable[[], Any]) -> None:
    """Start a query, and start it again when it ends. Spark gives its Python processes only some seconds to
    start, which is too short on a busy machine. The process ends if the query ends too often.
    """
    query = start()

    def run(query: Any) -> None:
        try:
            for _ in range(STARTS):
                try:
                    query.awaitTermination()
                except PySparkException as error:
                    sys.stderr.write(f"a query has ended: {error}\n")
                query = start()
        finally:
            os._exit(3)

    threading.Thread(target=run, args=[query], daemon=True).start()


def main() -> None:
    from spark_sessions import prepare, settings

    from rt.cli.commands import export
    from rt.cli.main import cli

    asked = json.loads(sys.argv[1])
    prepare(asked["directory"], sys.executable, os.environ)
    make = export.spark_session

    def session(*said: Any) -> SparkSession:
        """Make the session of the export, and run the two queries in it."""
        spark = make(*said)
        log, options, often = asked["log"], asked["options"], {"processingTime": "0 seconds"}
        keep_running(lambda: into_parquet(spark, log, asked["streamed"], 100, **often))
        keep_running(lambda: into_nodes(spark, log, asked["delivered"], options, 150, **often))
        return spark

    export.spark_session = session
    conf = [word for pair in settings(asked["directory"]).items() for word in ("--conf", "=".join(pair))]
    # With `local[2,4]` Spark runs a failing task up to four times.
    where = ["--path", asked["log"], "--linger-seconds", "0", "--master", "local[2,4]"]
    cli(["export", asked["target"], *where, *conf])


if __name__ == "__main__":
    main()
