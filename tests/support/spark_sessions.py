"""Local Spark sessions for tests."""

from __future__ import annotations

import os
import sys
from collections.abc import MutableMapping
from pathlib import Path

import pyspark
from pyspark.sql import SparkSession


def local_session(
    directory: Path | str, python: str, environment: MutableMapping[str, str], *, master: str = "local[2]"
) -> SparkSession:
    """A session with two cores whose workers run `python`; its files are in `directory`."""
    prepare(directory, python, environment)
    builder = SparkSession.builder.master(master).appName("rt")
    for name, value in settings(directory).items():
        builder = builder.config(name, value)
    return builder.getOrCreate()


def cheap_environment(directory: Path) -> dict[str, str]:
    """Return an environment for a program that makes its own session, with the settings of
    `local_session`.
    """
    environment = dict(os.environ)
    prepare(directory, sys.executable, environment)
    conf = directory / "home" / "conf"
    conf.mkdir()
    lines = [f"{name} {value}\n" for name, value in settings(directory).items()]
    (conf / "spark-defaults.conf").write_text("".join(lines))
    return environment


def prepare(directory: Path | str, python: str, environment: MutableMapping[str, str]) -> None:
    """Set variables that the JVM reads when it starts. Without them the workers run the first python3 on the
    path.
    """
    environment["PYSPARK_PYTHON"] = environment["PYSPARK_DRIVER_PYTHON"] = python
    environment["SPARK_LOCAL_IP"] = "127.0.0.1"
    environment["SPARK_LAUNCHER_OPTS"] = _SMALL
    environment["SPARK_HOME"] = _home(os.path.join(directory, "home"))


def settings(directory: Path | str) -> dict[str, str]:
    """Settings of a session that is cheap to start; its files are in `directory`."""
    return {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.shuffle.partitions": "1",
        "spark.sql.session.timeZone": "UTC",
        "spark.python.unix.domain.socket.enabled": "true",
        "spark.sql.execution.pyspark.udf.faulthandler.enabled": "true",
        "spark.sql.warehouse.dir": os.path.join(directory, "warehouse"),
        "spark.local.dir": os.path.join(directory, "local"),
        "spark.driver.host": "localhost",
        "spark.log.level": "ERROR",
        "spark.driver.memory": "1g",
        "spark.driver.extraJavaOptions": _SMALL,
        "spark.sql.codegen.wholeStage": "false",
        "spark.sql.codegen.factoryMode": "NO_CODEGEN",
        "spark.sql.ui.explainMode": "formatted",
    }


_SMALL = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
"""The queries are small and run once each, so optimizing compilers would cost more than they save."""


def _home(path: str) -> str:
    """Return a Spark home that links to the installed Spark, but without its zip file: each new worker would
    compile the zip's modules again.
    """
    installed = os.path.dirname(pyspark.__file__)
    os.makedirs(path, exist_ok=True)
    for name in ("bin", "jars"):
        os.symlink(os.path.join(installed, name), os.path.join(path, name))
    return path
