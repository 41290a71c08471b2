"""What is installed, and what is loaded when."""

import subprocess
import sys
import tomllib
from importlib.metadata import entry_points
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_the_wheel_has_the_package_that_spark_looks_for() -> None:
    assert "pyspark_rt" in PYPROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert (ROOT / "pyspark_rt" / "__init__.py").exists()
    assert (ROOT / "pyspark_rt" / "py.typed").exists()


def test_spark_finds_our_source_there() -> None:
    import pyspark_rt
    from rt.spark.data_source import RtDataSource

    assert pyspark_rt.DefaultSource is RtDataSource
    assert RtDataSource.name() == "rt"


def test_the_reader_of_nodes_is_found_as_an_entry_point() -> None:
    (found,) = entry_points(group="rt.logs", name="nodes")
    assert found.load().__name__ == "RemoteLog"


@pytest.mark.parametrize("module", ["pyspark", "pyarrow", "grpc"])
def test_options_plans_and_local_reading_load_nothing_heavy(module: str) -> None:
    names = ("options", "partitioner", "filter_pushdown", "log_source")
    imports = ", ".join(["rt", "rt.spark", *(f"rt.spark.source.{name}" for name in names)])
    code = f"import sys, {imports}; sys.exit({module!r} in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_tests_install_the_extra() -> None:
    extra = PYPROJECT["project"]["optional-dependencies"]["spark"]
    assert [one for one in extra if one not in PYPROJECT["dependency-groups"]["test"]] == []
