"""What Spark takes of any source in Python: a source that has its rows ready, and hands them out again and
again.

Its rows are like those of a log, and come in record batches as large: nothing that reads a log can be faster.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition

from rt.spark.columns import SCHEMA
from rt.spark.workers import freeze_modules

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

PARTS: Final = 4


class Ceiling(DataSource):
    """`format("rt-ceiling")`: `rows` rows, as the log at `path` has them in its beginning."""

    @classmethod
    def name(cls) -> str:
        """What `format` is given."""
        return "rt-ceiling"

    def schema(self) -> str:
        """That of `format("rt")`."""
        freeze_modules()
        return SCHEMA

    def reader(self, schema: StructType) -> CeilingReader:
        """For `spark.read`."""
        return CeilingReader(self.options["path"], int(self.options["rows"]), tuple(schema.names))


class CeilingReader(DataSourceReader):
    """Hands the first record batch of a log out until there were enough rows."""

    def __init__(self, path: str, rows: int, columns: tuple[str, ...]) -> None:
        self._path = path
        self._rows = rows
        self._columns = columns

    def partitions(self) -> list[InputPartition]:
        """Parts of as many rows each."""
        freeze_modules()
        return [InputPartition(self._rows // PARTS)] * PARTS

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of a part; the log is read for as long as its first batch takes."""
        from rt.log.ranges import RangeReader
        from rt.spark.gathering import gather

        freeze_modules()
        rows = RangeReader(self._path, 0, self._rows, on_loss=_no_loss).batches()
        batch = next(gather(rows, self._columns))
        for left in range(partition.value, 0, -batch.num_rows):
            yield batch.slice(0, left)


def _no_loss(event: object) -> None:
    raise AssertionError(event)
