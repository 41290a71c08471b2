"""`format("rt")`: the data source as Spark finds it.

Spark imports every top-level package named pyspark_* to find a format. `pyspark_rt` is ours, so no
registration is needed. If it is not installed, call `spark.dataSource.register(RtDataSource)`.
"""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSource

from rt.errors import RtError
from rt.spark.python_workers import freeze_modules, plain_errors
from rt.spark.sink.options import parse_write_options
from rt.spark.source.batch_reader import RtReader
from rt.spark.source.columns import default_schema
from rt.spark.source.log_source import open_log
from rt.spark.source.options import parse_options
from rt.spark.source.table import options_of_table, recorded_options, table_schema

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

    from rt.spark.sink.writer import RtStreamWriter, RtWriter
    from rt.spark.source.stream_reader import RefusedStreamReader, RtStreamReader


class RtDataSource(DataSource):
    """The merged logs of rt. docs/spark.md has the options."""

    @classmethod
    def name(cls) -> str:
        return "rt"

    @plain_errors
    def schema(self) -> str | StructType:
        """The columns if the user gives no schema. Raises for invalid options in `load` or CREATE TABLE."""
        freeze_modules()
        table = options_of_table(self.options)
        include_headers = parse_options(self.options if table is None else table).include_headers
        if table is None:
            return default_schema(include_headers=include_headers)
        return table_schema(table, include_headers=include_headers)

    @plain_errors
    def reader(self, schema: StructType) -> RtReader:
        return RtReader(parse_options(self._reading(schema), streaming=False), schema)

    def streamReader(self, schema: StructType) -> RtStreamReader | RefusedStreamReader:  # noqa: N802
        from rt.spark.source.stream_reader import RefusedStreamReader, RtStreamReader

        try:
            return RtStreamReader(parse_options(self._reading(schema), streaming=True), schema)
        except RtError as error:
            return RefusedStreamReader(error)

    def _reading(self, schema: StructType) -> dict[str, str]:
        """The options for reading. The options of a query override the options of its table."""
        given = {name.lower(): value for name, value in self.options.items()}
        return {**recorded_options(schema), **given}

    @plain_errors
    def writer(self, schema: StructType, overwrite: bool) -> RtWriter:
        from rt.spark.sink.writer import RtWriter

        options = parse_write_options(self.options, streaming=False)
        writer = RtWriter(options, schema, overwrite=overwrite)
        writer.check_nodes()
        return writer

    @plain_errors
    def streamWriter(self, schema: StructType, overwrite: bool) -> RtStreamWriter:  # noqa: N802
        from rt.spark.sink.writer import RtStreamWriter

        options = parse_write_options(self.options, streaming=True)
        writer = RtStreamWriter(options, schema, overwrite=overwrite)
        if writer.is_new:
            writer.check_nodes()  # Later the tasks wait for nodes that restart.
        return writer


def latest_position(**options: str) -> int:
    """One past the last position of the log that these options name. For `startingOffsets`.

    A new query that starts at a number starts at the same position after every restart. A query that starts
    with "latest" may start at another position each time, until its first micro-batch is planned.
    """
    with closing(open_log(parse_options(options).where)) as log:
        return log.bounds()[1]
