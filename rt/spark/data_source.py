"""`format("rt")`: the data source as Spark finds it.

Spark imports every top-level package named pyspark_* to find a format. `pyspark_rt` is ours, so no
registration is needed. If it is not installed, call `spark.dataSource.register(RtDataSource)`.
"""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSource

from rt.spark.sink.options import parse_write_options
from rt.spark.source.batch_reader import RtReader
from rt.spark.source.columns import SCHEMA
from rt.spark.source.log_source import open_log
from rt.spark.source.options import parse_options
from rt.spark.source.python_workers import freeze_modules

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

    from rt.spark.sink.writer import RtStreamWriter, RtWriter
    from rt.spark.source.stream_reader import RtStreamReader


class RtDataSource(DataSource):
    """The merged logs of rt. docs/spark.md has the options."""

    @classmethod
    def name(cls) -> str:
        return "rt"

    def schema(self) -> str:
        """All columns. Raises for invalid options as early as `load`."""
        parse_options(self.options)
        freeze_modules()
        return SCHEMA

    def reader(self, schema: StructType) -> RtReader:
        return RtReader(parse_options(self.options, streaming=False), schema)

    def streamReader(self, schema: StructType) -> RtStreamReader:  # noqa: N802
        from rt.spark.source.stream_reader import RtStreamReader

        return RtStreamReader(parse_options(self.options, streaming=True), schema)

    def writer(self, schema: StructType, overwrite: bool) -> RtWriter:
        from rt.spark.sink.writer import RtWriter

        options = parse_write_options(self.options, streaming=False)
        return RtWriter(options, schema, overwrite=overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> RtStreamWriter:  # noqa: N802
        from rt.spark.sink.writer import RtStreamWriter

        options = parse_write_options(self.options, streaming=True)
        return RtStreamWriter(options, schema, overwrite=overwrite)


def latest_position(**options: str) -> int:
    """One past the last position of the log that these options name. For `startingOffsets`.

    A new query that starts at a number starts there after every restart. One that starts with "latest" may
    start elsewhere each time, until its first micro-batch is done.
    """
    with closing(open_log(parse_options(options).where)) as log:
        return log.bounds()[1]
