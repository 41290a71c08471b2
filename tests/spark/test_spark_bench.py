"""The Spark benchmarks report every figure and leave no files in the scratch directory."""

from contextlib import nullcontext
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from rt.bench.measure import scratch_directory
from rt.bench.spark import SparkBench
from rt.bench.spark_queries import SparkQueriesBench


@pytest.mark.slow
def test_spark_bench_reports_every_figure_and_leaves_no_files(spark: SparkSession, tmp_path: Path) -> None:
    with scratch_directory(str(tmp_path)) as root:
        bench = SparkBench(root, rounds=1, warm_ups=0, size_bytes=2**20, stream_seconds=0.2)
        figures = list(bench.figures_of(spark))
    assert len({figure.name for figure in figures}) == len(figures) == 22
    assert all(figure.median > 0 for figure in figures if figure.unit != "s/GB")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_spark_queries_bench_reports_every_figure_and_leaves_no_files(
    spark: SparkSession, tmp_path: Path
) -> None:
    with scratch_directory(str(tmp_path)) as root:
        figures = list(SparkQueriesBench(root, keys=20).figures_of(lambda: nullcontext(spark)))
    assert len({figure.name for figure in figures}) == len(figures) == 12
    assert all(figure.median > 0 for figure in figures)
    assert list(tmp_path.iterdir()) == []
