"""Python workers of Spark: frozen modules, and no import of pandas for reading."""

import subprocess
import sys
from pathlib import Path

import pytest
from merged_logs import Feeds

SETTLING = """
import gc, sys
from importlib.machinery import ModuleSpec
sys.modules["__main__"].__spec__ = {spec}
from rt.spark.python_workers import freeze_modules
freeze_modules()
first = gc.get_freeze_count()
more = [[] for _ in range(1000)]
freeze_modules()
print(first > 0, gc.get_freeze_count() - first)
"""


@pytest.mark.parametrize(
    ("spec", "told"),
    [
        ('ModuleSpec("pyspark.daemon", None)', "True 0"),
        ('ModuleSpec("pyspark.worker", None)', "True 0"),
        ('ModuleSpec("my_program", None)', "False 0"),
        ("None", "False 0"),
    ],
)
def test_modules_are_frozen_once_and_only_in_spark_processes(spec: str, told: str) -> None:
    """After each task Spark's garbage collection visits all objects that are not frozen."""
    run = subprocess.run(
        [sys.executable, "-c", SETTLING.format(spec=spec)], capture_output=True, text=True, check=True
    )
    assert run.stdout.strip() == told


READ = """
import sys
from rt.log.read.range_reader import RangeReader
from rt.spark.source.arrow_batches import gather
columns = ("position", "timestamp", "session", "number", "topic", "value", "timestamp_ns", "run")
rows = RangeReader(sys.argv[1], 0, 300, on_loss=lambda event: sys.exit(str(event))).batches()
print(sum(batch.num_rows for batch in gather(rows, columns)), "pandas" in sys.modules)
"""


def test_worker_does_not_import_pandas_to_read(tmp_path: Path) -> None:
    """The import takes each new worker a third of a second, and each garbage collection 20 ms."""
    pytest.importorskip("pandas")
    feeds = Feeds(tmp_path)
    feeds.fill(300)
    feeds.close()
    run = subprocess.run([sys.executable, "-c", READ, feeds.path], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["300", "False"]
