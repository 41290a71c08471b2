"""One partition written as a task of Spark does it, here or in a process that dies half done.

python sink_part.py JSON: options, batch, partition, seed, count, `headers` (a text in those of some rows);
of what goes wrong: `shuffle` (another order), `change` (other rows), `die_at` (rows that are merged when it
kills itself), `lost` (it never reaches the nodes, and dies with all rows on its disk).
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
    """The rows of a partition: value, topic, nanoseconds; some are alike."""
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
    """Of every third row: none."""
    value, topic, timestamp_ns = row
    return () if timestamp_ns % 3 == 0 else (("topic", topic.encode()), ("own", text.encode() + value[:9]))


def batches_of(rows: list[tuple[bytes, str, int]], headers: str | None) -> Iterator[Any]:
    """As Spark hands them over."""
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
    """A task's context."""

    def __init__(self, partition: int) -> None:
        self._partition = partition

    def partitionId(self) -> int:  # noqa: N802
        return self._partition


def die() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def fail_as(asked: dict[str, Any], partition_publisher: Any) -> None:
    """Put what goes wrong in the way."""
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
    """Write what is asked for; the first number and the end."""
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
