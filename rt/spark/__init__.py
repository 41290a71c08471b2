"""Streams in Spark: `format("rt")` reads merged logs, in batches and in streams.

Pure: options, columns, filters, planning. Edges: log_source (what a log is to a query) with local_log (one
in a directory) and times, losses, gathering (Arrow), workers (the processes that Spark runs this in), and
Spark's interfaces: source, reading, streaming.
Writing: row_order and sink_options are pure, rows, ledger and delivering edges, writing Spark's interface.
Jobs: exporting with export_target and storage; auditing, of which audit is pure. What ledger and storage
share, files that are made once, is in once.
What reads from nodes is found as an entry point of `rt.logs`, so that rt never imports a service. Only
`gathering` and `rows` import pyarrow before it is needed, and only source, reading, streaming and writing
pyspark.
"""
