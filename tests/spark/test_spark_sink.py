"""`format("rt")` as a batch sink: rows are merged when the write returns, and a repeat adds none."""

from __future__ import annotations

import re
import types

import pytest
from doc_blocks import blocks
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from sink_nodes import Sink

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def save(frame: DataFrame, options: dict[str, str], mode: str = "append") -> None:
    frame.write.format("rt").options(**options).mode(mode).save()


def numbers(spark: SparkSession, count: int) -> DataFrame:
    return spark.range(0, count, 1, 2).selectExpr(
        "cast(concat('row ', id) as binary) value",
        "concat('t', id % 3) topic",
        "timestamp_micros(id) timestamp",
    )


def test_batch_write_is_merged_on_return_and_repeat_adds_no_rows(spark: SparkSession, sink: Sink) -> None:
    options = sink.options("batch")
    save(numbers(spark, 500), {**options, "version": "7"})

    wanted = [(b"row %d" % n, f"t{n % 3}", n * 1000) for n in range(500)]
    assert sink.written("batch", 0, 500) + sink.written("batch", 1, 500) == wanted
    save(numbers(spark, 500), {**options, "version": "7"})
    save(numbers(spark, 10).coalesce(1), options)
    assert sink.written("batch", 0, 510) == wanted[:250] + wanted[:10]
    assert sink.written("batch", 1, 510) == wanted[250:]
    with pytest.raises(PySparkException, match="batch 7 comes after batch 8"):
        save(numbers(spark, 5), {**options, "version": "7"})


def test_batch_write_example_of_docs_page_can_be_repeated(spark: SparkSession, sink: Sink) -> None:
    (block,) = [
        block
        for block in blocks("docs/spark.md")
        if "report.write" in block.text and block.language == "python"
    ]
    options = sink.options("reports")
    names = {name: options[name] for name in ("ca", "cert", "key")}
    text = block.text.replace("/shared/rt", options["ledger"])
    for name, path in names.items():
        text = re.sub(rf'"{name}": "[^"]*"', f'"{name}": "{path}"', text)
    nodes = {name: options[name] for name in ("endpoints", "stream", "path")}
    code = compile(text, block.where, "exec")
    for _ in range(2):
        types.FunctionType(code, {"spark": spark, "nodes": nodes})()
    assert [(each.value, each.topic) for each in sink.messages("reports", 1)] == [(b"hello", "reports")]


@pytest.mark.parametrize(
    ("query", "more", "error"),
    [
        ("select cast(null as binary) value", {}, "a row has no value.*coalesce"),
        ("select 'a' value, 2 position", {}, "column 'position' cannot be published"),
        ("select 'a' value", {"nmae": "x"}, "Did you mean name"),
        ("select 'a' value", {"key": "/none.key"}, "/none.key"),
    ],
)
def test_invalid_rows_or_columns_are_rejected_with_hint_and_publish_no_messages(
    spark: SparkSession, sink: Sink, query: str, more: dict[str, str], error: str
) -> None:
    with pytest.raises(PySparkException, match=error):
        save(spark.sql(query), sink.options("refused", **more))
    assert sink.messages("refused") == []


def test_write_with_rejected_row_is_finished_by_repeat_with_corrected_row(
    spark: SparkSession, sink: Sink
) -> None:
    options = sink.options("corrected")
    rows = spark.range(0, 300, 1, 3)  # Two tasks run at a time: one is done when the last one starts.
    refused = rows.selectExpr("cast(id as string) value", "repeat('t', if(id = 207, 1025, 1)) topic")
    with pytest.raises(PySparkException) as error:
        save(refused, options)
    text = str(error.value)
    assert "topic too long (at row 7 of partition 2 of batch 0 of corrected): got 1025 bytes" in text
    assert re.search(r"Correct the row, and write again with version=0\. Partitions [01]", text)
    corrected = refused.selectExpr("value", "left(topic, 1) topic")
    with pytest.raises(PySparkException, match=r"Repeat it with version=0\. The rows of the partitions [01]"):
        save(corrected, options)
    for _ in range(2):
        save(corrected, {**options, "version": "0"})
    found = sorted(int(each.value) for each in sink.messages("corrected", 300))
    assert found == list(range(300))


def test_overwrite_mode_is_rejected(spark: SparkSession, sink: Sink) -> None:
    with pytest.raises(PySparkException, match="messages cannot be overwritten"):
        save(numbers(spark, 1), sink.options("refused"), "overwrite")
