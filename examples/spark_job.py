"""Counts the messages of each topic with Spark. Needs the extra `spark`, and Java 17.

A directory:  python examples/spark_job.py --path data/trades/merged
The nodes:    … --endpoints node1:5002,… --stream trades --ca /etc/rt/ca.crt --cert … --key …
"""

import argparse
import os
import sys

from pyspark.sql import SparkSession

parser = argparse.ArgumentParser(description="Count the messages of each topic.")
parser.add_argument("--path", help="A merged log that all executors see.")
for name in ("endpoints", "stream", "ca", "cert", "key"):
    parser.add_argument(f"--{name}")
given = {name: value for name, value in vars(parser.parse_args()).items() if value}
if "path" in given:
    given["path"] = os.path.abspath(given["path"])

os.environ.setdefault("PYSPARK_PYTHON", sys.executable)  # workers need the Python that has rt
spark = SparkSession.builder.appName("rt-example").getOrCreate()
log = spark.read.format("rt").options(**given).schema("position long, topic string").load()
for row in log.groupBy("topic").count().orderBy("topic").collect():
    print(row.topic, row["count"])
spark.stop()
