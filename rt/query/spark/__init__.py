"""The same query on Spark: a keyed query as a streaming job, with its state in Spark's state store.

    SparkJob      a query, where its messages come from and where its results go
    results       the job as a streaming DataFrame;  start: the job with the sink `format("rt")`

- `keyed_plan` is pure: which key a message has, and whether the query can run. `state_row` is pure: the
  state of a key as one row. `key_query` runs the operators of one key.
- `job` has the options. `key_rows` and `processor` run in Spark's Python workers.

Each key has a runtime of its own, made for the rows of one micro-batch. It runs the whole query, for the
messages of that key. So the operators are those of the engine, with their own save and load.

At import time only `key_rows` and `processor` import pyarrow and pyspark.
"""

from __future__ import annotations

from rt.query.spark.job import SparkJob, results, start

__all__ = ["SparkJob", "results", "start"]
