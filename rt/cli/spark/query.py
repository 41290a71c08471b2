"""`rt query run`: run a query that a file describes. For running engines there is `rt queries`."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from traceback import extract_tb
from types import ModuleType
from typing import TYPE_CHECKING, Final

import click

from rt.cli.options import ExistingPath, option
from rt.cli.signals import Interrupts
from rt.cli.spark.errors import spark_errors
from rt.cli.spark.session import parse_setting, spark_session
from rt.errors import InvalidOption, RtError

if TYPE_CHECKING:
    from rt.query.spark import SparkJob

_MODULE: Final = "rt_query_job"
_POLL_S: Final = 1
_HINT: Final = "The checkpoint is that of the last micro-batch. See the log of Spark."


@click.group()
def query() -> None:
    """Run a query (`rt.query`)."""


@query.command()
@click.argument("job", type=ExistingPath(dir_okay=False))
@option("--spark", "on_spark", is_flag=True, help="Run it as a streaming job of Spark. Required.")
@option("--once", is_flag=True, help="Stop at the end of the source. Default: wait for new messages.")
@option("--master", help="Master of Spark. Default: that of spark-submit, or all cores of this machine.")
@option(
    "--conf",
    multiple=True,
    metavar="NAME=VALUE",
    help="A setting of Spark, such as spark.sql.shuffle.partitions=8. Repeatable.",
)
def run(job: str, on_spark: bool, once: bool, master: str | None, conf: tuple[str, ...]) -> None:
    """Run the keyed query that the Python file JOB describes.

    JOB must set the variable `job` to a `rt.query.spark.SparkJob`. The query continues where its checkpoint
    ends. It needs the extra spark, and Java.
    """
    if not on_spark:
        raise click.UsageError(
            "Give --spark. To run a query in the engine, start an engine in your program: docs/queries.md."
        )
    settings = [parse_setting(each) for each in conf]
    with Interrupts() as interrupts, spark_errors("the query on Spark has failed", job, _HINT):
        found = load_job(job)
        spark = spark_session(f"rt query {Path(job).name}", master, settings)
        from rt.query.spark import start

        running = None
        try:
            with interrupts.waiting():
                running = start(found, spark, once=once)
                while not running.awaitTermination(_POLL_S):
                    pass
        finally:
            if running is not None:
                running.stop()
            spark.stop()


def load_job(path: str) -> SparkJob:
    """The variable `job` of a Python file. What is defined in the file is sent to Spark's workers."""
    try:
        from pyspark import cloudpickle
    except ModuleNotFoundError as error:
        raise RtError("pyspark is not installed", hint="pip install 'rt-transport[spark]'") from error

    spec = importlib.util.spec_from_file_location(_MODULE, path)
    if spec is None or spec.loader is None:
        raise InvalidOption("not a Python file", where=path, expected="a name that ends with .py")
    module = sys.modules[_MODULE] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except RtError:
        raise
    except Exception as error:
        line = _line_of(error, path)
        raise RtError(
            "the file raised an exception",
            where=f"{path}, line {line}" if line else path,
            got=f"{type(error).__name__}: {error}",
            hint="`rt --log-level debug` shows the traceback.",
        ) from error
    cloudpickle.register_pickle_by_value(module)  # type: ignore[no-untyped-call]
    return _job_of(module, path)


def _line_of(error: Exception, path: str) -> int | None:
    """The line of the file that raised the error, or that cannot be parsed."""
    file = os.path.abspath(path)
    if isinstance(error, SyntaxError) and error.filename == file:
        return error.lineno
    lines = [frame.lineno for frame in extract_tb(error.__traceback__) if frame.filename == file]
    return lines[-1] if lines else None


def _job_of(module: ModuleType, path: str) -> SparkJob:
    from rt.query.spark import SparkJob

    found = getattr(module, "job", None)
    if not isinstance(found, SparkJob):
        what = "the file must set the variable job to a SparkJob"
        raise InvalidOption(what, where=path, got=type(found).__name__)
    return found
