"""Spark data source and sink: `format("rt")` reads merged logs, in batch and streaming, and writes to
streams.

- `options`: the common part of the options for reading and for writing. `kafka_names`: the rt names of
  Kafka's options. Both are pure. `python_workers`: special handling in the processes of Spark.
- `source/`: options, columns, filter pushdown and partitioning are pure. `table` keeps a table's options.
  `log_source` opens a log. `batch_reader` and `stream_reader` implement Spark's interfaces.
- `sink/`: options and `row_order` are pure. `spool`, `ledger` and `partition_publisher` do I/O. `writer`
  implements Spark's interface.
- `export/`: the Parquet exporter with its target and file systems, and the audit job (`audit` is pure).

Reading from nodes is an entry point of the group `rt.logs`, so that rt imports no service. At import time
only `arrow_batches`, `arrow_columns`, `packed_headers` and `spool` import pyarrow, and only `data_source`,
`table`, the readers and `writer` import pyspark.
"""
