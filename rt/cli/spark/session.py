"""The Spark session of a command, and the settings that a user gives it."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

import click

from rt.cli.formats.tables import escape
from rt.cli.spark.errors import spark_errors
from rt.errors import RtError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def parse_setting(text: str) -> tuple[str, str]:
    """The name and the value of a setting of Spark."""
    name, equals, value = text.partition("=")
    if not equals or not name.startswith("spark."):
        raise click.UsageError(f"--conf {escape(text)}: give NAME=VALUE with a NAME that starts with spark.")
    return name, value


def spark_session(name: str, master: str | None, settings: list[tuple[str, str]]) -> SparkSession:
    """A Spark session whose workers run this Python."""
    try:
        from pyspark import SparkConf
        from pyspark.sql import SparkSession
    except ModuleNotFoundError as error:
        raise RtError("pyspark is not installed", hint="pip install 'rt-transport[spark]'") from error
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    conf = SparkConf()
    for setting, value in (
        ("spark.ui.showConsoleProgress", "false"),
        ("spark.python.unix.domain.socket.enabled", "true"),
    ):
        conf.setIfMissing(setting, value)
    conf.setAll(settings)
    if master is not None:
        conf.setMaster(master)
    conf.setIfMissing("spark.master", "local[*]")
    conf.setIfMissing("spark.app.name", name)
    hint = "It needs Java 17 or newer: set JAVA_HOME. Spark's own messages are above."
    with spark_errors("Spark does not start", None, hint):
        return SparkSession.builder.config(conf=conf).getOrCreate()
