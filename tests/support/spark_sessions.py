"""Local Spark sessions for tests.

`python tests/support/spark_sessions.py` keeps the classes that Spark loads in a file of the environment. With
it, each session takes half the processor time to start.
"""

from __future__ import annotations

import os
import shlex
import sys
import tempfile
from collections.abc import MutableMapping
from pathlib import Path
from typing import Final

import pyspark
from pyspark.sql import SparkSession

_SMALL: Final = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
"""Small queries, of which none runs twice: what compilers would do for them costs more than it saves."""
_KEPT: Final = Path(sys.prefix, f"spark-{pyspark.__version__}")
"""The file of classes, and the home of Spark with its jars: Java compares their paths."""
_CLASSES: Final = _KEPT / "classes.jsa"


def local_session(
    directory: Path | str, python: str, environment: MutableMapping[str, str], *, master: str = "local[2]"
) -> SparkSession:
    """A session with two cores whose workers run `python`; what it leaves behind is in `directory`."""
    prepare(directory, python, environment)
    builder = SparkSession.builder.master(master).appName("rt")
    for name, value in settings(directory).items():
        builder = builder.config(name, value)
    return builder.getOrCreate()


def cheap_environment(directory: Path) -> dict[str, str]:
    """The environment of a program that makes a session of its own: with the settings of `local_session`."""
    environment = dict(os.environ)
    prepare(directory, sys.executable, environment)
    lines = [f"{name} {value}\n" for name, value in settings(directory).items()]
    # Not in `home/conf`: Java uses no file of classes if there is such a directory among their paths.
    (defaults := directory / "spark-defaults.conf").write_text("".join(lines))
    environment["PYSPARK_SUBMIT_ARGS"] = shlex.join(["--properties-file", str(defaults), "pyspark-shell"])
    return environment


def prepare(directory: Path | str, python: str, environment: MutableMapping[str, str]) -> None:
    """Set what the JVM must find when it starts, or the workers run the first python3 there is."""
    environment["PYSPARK_PYTHON"] = environment["PYSPARK_DRIVER_PYTHON"] = python
    environment["SPARK_LOCAL_IP"] = "127.0.0.1"
    environment["SPARK_LAUNCHER_OPTS"] = _SMALL
    environment["SPARK_HOME"] = _home(_KEPT if _CLASSES.exists() else directory)


def settings(directory: Path | str) -> dict[str, str]:
    """Of a session that is cheap to start; what it leaves behind is in `directory`."""
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
        "spark.driver.extraJavaOptions": f"{_SMALL} {_classes_option()}",
        "spark.sql.codegen.wholeStage": "false",
        "spark.sql.codegen.factoryMode": "NO_CODEGEN",
        "spark.sql.ui.explainMode": "formatted",
    }


def _classes_option() -> str:
    """Java ignores a file that another Java or other jars have made; it would say so on stdout."""
    return f"-XX:SharedArchiveFile={_CLASSES} -Xlog:disable" if _CLASSES.exists() else ""


def keep_classes() -> None:
    """Write the file of classes, if it is missing."""
    if _CLASSES.exists():
        return
    made = _KEPT / f"{os.getpid()}.jsa"
    with tempfile.TemporaryDirectory() as directory:
        prepare(directory, sys.executable, os.environ)
        os.environ["SPARK_HOME"] = _home(_KEPT)
        options = f"{_SMALL} -XX:ArchiveClassesAtExit={made} -Xlog:disable"
        builder = SparkSession.builder.master("local[2]")
        for name, value in {**settings(directory), "spark.driver.extraJavaOptions": options}.items():
            builder = builder.config(name, value)
        session = builder.getOrCreate()
        session.range(100).groupBy("id").count().collect()
        session.createDataFrame([(1, "a")], "number int, text string").filter("number > 0").collect()
        java = session.sparkContext._gateway.proc
        session.stop()
        java.stdin.close()  # Java ends, and writes the file.
        java.wait()
    made.rename(_CLASSES)


def _home(directory: Path | str) -> str:
    """Spark as it is installed, without the zip file whose modules each new worker would compile anew."""
    home, installed = os.path.join(directory, "home"), os.path.dirname(pyspark.__file__)
    os.makedirs(home, exist_ok=True)
    for name in ("bin", "jars"):
        if not os.path.lexists(os.path.join(home, name)):
            os.symlink(os.path.join(installed, name), os.path.join(home, name))
    return home


if __name__ == "__main__":
    keep_classes()
