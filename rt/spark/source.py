"""`format("rt")`: the data source as Spark finds it.

Spark imports every top-level package named pyspark_* when it looks for a format: `pyspark_rt` is ours, and no
registration is needed. Where that is not installed, `spark.dataSource.register(RtDataSource)` does it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSource

from rt.spark.columns import SCHEMA
from rt.spark.log_source import open_log
from rt.spark.options import parse_options
from rt.spark.reading import RtReader
from rt.spark.sink_options import parse_write_options
from rt.spark.workers import freeze_modules

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

    from rt.spark.streaming import RtStreamReader
    from rt.spark.writing import RtStreamWriter, RtWriter


class RtDataSource(DataSource):
    """Merged logs of rt; `rt.spark.options` says which options there are."""

    @classmethod
    def name(cls) -> str:
        """What `format` is given."""
        return "rt"

    def schema(self) -> str:
        """All columns. Wrong options are refused here, when `load` is called."""
        parse_options(self.options)
        freeze_modules()
        return SCHEMA

    def reader(self, schema: StructType) -> RtReader:
        """For `spark.read`."""
        return RtReader(parse_options(self.options, streaming=False), schema)

    def streamReader(self, schema: StructType) -> RtStreamReader:  # noqa: N802
        """For `spark.readStream`; PySpark before 4.2 lacks what streams need."""
        from rt.spark.streaming import RtStreamReader

        return RtStreamReader(parse_options(self.options, streaming=True), schema)

    def writer(self, schema: StructType, overwrite: bool) -> RtWriter:
        """For `df.write`; `rt.spark.sink_options` says with which options."""
        from rt.spark.writing import RtWriter

        options = parse_write_options(self.options, streaming=False)
        return RtWriter(options, schema, overwrite=overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> RtStreamWriter:  # noqa: N802
        """For `df.writeStream`."""
        from rt.spark.writing import RtStreamWriter

        options = parse_write_options(self.options, streaming=True)
        return RtStreamWriter(options, schema, overwrite=overwrite)


def latest_position(**options: str) -> int:
    """One past the last position of the log that these options name: for `startingOffsets`.

    A new query that begins with a number begins there however often it is started; one that begins with
    "latest" begins at another place each time, until its first micro-batch is done.
    """
    log = open_log(parse_options(options).where)
    try:
        return log.bounds()[1]
    finally:
        log.close()
