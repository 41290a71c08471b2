"""Write one partition as a Spark task does, here or in a process that is killed halfway.

python sink_part.py JSON: options, batch, partition, seed, count, `headers` (a text in the headers of some
rows). Faults: `shuffle` (another order), `change` (other rows), `die_at` (the process kills itself after this
number of rows is merged), `lost` (the process never reaches the nodes, and kills itself when all rows are on
its disk).
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, NoReturn

BASE_NS = 1_700_000_000_000_000_000


def rows_of(seed: int, count: int) -> list[tuple[bytes, str, int]]:
    """The rows of a partition: value, topic, nanoseconds; some are equal."""
    draw = random.Random(seed)
    made: list[tuple[bytes, str, int]] = []
    for number in range(count):
        if made and draw.random() < 0.05:
            made.append(draw.choice(made))
        else:
            value = b"%d/%d " % (seed, number) + draw.randbytes(draw.randint(0, 300))
            made.append((value, draw.choice(["trade", "quote", "", "ärger"]), BASE_NS + number // 3))
    return made


def headers_of(row: tuple[bytes, str, int], text: str) -> tuple[tuple[str, bytes], ...]:
    """Return the headers of a row. A row has none if its timestamp is divisible by 3."""
    value, topic, timestamp_ns = row
    return () if timestamp_ns % 3 == 0 else (("topic", topic.encode()), ("own", text.encode() + value[:9]))


def batches_of(rows: list[tuple[bytes, str, int]], headers: str | None) -> Iterator[Any]:
    """The rows in Arrow batches, as Spark passes them."""
    import pyarrow as pa

    kind = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
    for at in range(0, len(rows), 100):
        part = rows[at : at + 100]
        made = dict(
            zip(["value", "topic", "timestamp_ns"], map(pa.array, zip(*part, strict=True)), strict=True)
        )
        if headers is not None:
            made["headers"] = pa.array([headers_of(row, headers) or None for row in part], kind)
        yield pa.record_batch(made)


class Context:
    """The context of a Spark task."""

    def __init__(self, partition: int) -> None:
        self._partition = partition

    def partitionId(self) -> int:  # noqa: N802
        return self._partition


def die() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def fail_as(asked: dict[str, Any], partition_publisher: Any) -> None:
    """Install the requested faults in `partition_publisher`."""
    publish, publisher_class = partition_publisher._publish, partition_publisher.Publisher

    def half(publisher: Any, rows: Iterable[Any], first: int) -> int:
        last = publish(publisher, islice(rows, asked["die_at"]), first)
        publisher.wait(last, "merged", 300)
        die()

    def lost(publisher: Any, rows: Iterable[Any], first: int) -> int:
        publish(publisher, rows, first)
        die()

    def files_only(*arguments: Any, **options: Any) -> Any:
        return publisher_class(*arguments, **{**options, "endpoints": (), "tls": None})

    if "die_at" in asked:
        partition_publisher._publish = half
    if asked.get("lost"):
        partition_publisher._publish, partition_publisher.Publisher = lost, files_only


def attempt(asked: dict[str, Any]) -> list[int]:
    """Write the requested rows. Return the first number and the end."""
    from pyspark.sql.types import ArrayType, StructType

    from rt.spark.sink import writer as writer_module
    from rt.spark.sink.options import parse_write_options

    rows = rows_of(asked["seed"], asked["count"])
    if "shuffle" in asked:
        random.Random(asked["shuffle"]).shuffle(rows)
    if asked.get("change"):
        rows[-1] = (b"other", *rows[-1][1:])
    writer_module._context = lambda: Context(asked["partition"])  # type: ignore[assignment,return-value]
    schema = StructType().add("value", "binary").add("topic", "string").add("timestamp_ns", "long")
    headers = asked.get("headers")
    if headers is not None:
        schema.add("headers", ArrayType(StructType().add("key", "string").add("value", "binary")))
    options = parse_write_options(asked["options"], streaming=True)
    writer = writer_module.RtStreamWriter(options, schema, overwrite=False)
    written = writer.write_part("query", asked["batch"], batches_of(rows, headers))
    if asked.get("finish"):
        writer.commit([written], asked["batch"])
    return [written.first, written.end]


def main() -> None:
    from rt.spark.sink import partition_publisher

    asked = json.loads(sys.argv[1])
    fail_as(asked, partition_publisher)
    attempt(asked)


if __name__ == "__main__":
    main()
