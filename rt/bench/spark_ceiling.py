"""The upper limit of any Python source in Spark: a source whose rows are ready, and are returned repeatedly.

Its rows and record batches are like those of a log, so nothing that reads a log can be faster.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition

from rt.spark.python_workers import freeze_modules
from rt.spark.source.columns import default_schema

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

PARTS: Final = 4


class SparkCeiling(DataSource):
    """`format("rt-ceiling")`: `rows` rows, like the first ones of the log at `path`."""

    @classmethod
    def name(cls) -> str:
        return "rt-ceiling"

    def schema(self) -> str:
        freeze_modules()
        return default_schema()

    def reader(self, schema: StructType) -> CeilingReader:
        return CeilingReader(self.options["path"], int(self.options["rows"]), tuple(schema.names))


class CeilingReader(DataSourceReader):
    """Returns the first record batch of a log repeatedly, until there are enough rows."""

    def __init__(self, path: str, rows: int, columns: tuple[str, ...]) -> None:
        self._path = path
        self._rows = rows
        self._columns = columns

    def partitions(self) -> list[InputPartition]:
        freeze_modules()
        return [InputPartition(self._rows // PARTS)] * PARTS

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of a partition. The log is read only for its first record batch."""
        from rt.log.read.range_reader import RangeReader
        from rt.spark.source.arrow_batches import gather

        freeze_modules()
        rows = RangeReader(self._path, 0, self._rows, on_loss=_no_loss).batches()
        batch = next(gather(rows, self._columns))
        for left in range(partition.value, 0, -batch.num_rows):
            yield batch.slice(0, left)


def _no_loss(event: object) -> None:
    raise AssertionError(event)
