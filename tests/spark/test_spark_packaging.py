"""Packaging of the Spark source: wheel contents, entry points, extras and lazy imports."""

import subprocess
import sys
import tomllib
from importlib.metadata import entry_points
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_wheel_includes_pyspark_rt_package() -> None:
    assert "pyspark_rt" in PYPROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert (ROOT / "pyspark_rt" / "__init__.py").exists()
    assert (ROOT / "pyspark_rt" / "py.typed").exists()


def test_pyspark_rt_default_source_is_rt_data_source() -> None:
    import pyspark_rt
    from rt.spark.data_source import RtDataSource

    assert pyspark_rt.DefaultSource is RtDataSource
    assert RtDataSource.name() == "rt"


def test_remote_log_is_entry_point_of_rt_logs() -> None:
    (found,) = entry_points(group="rt.logs", name="nodes")
    assert found.load().__name__ == "RemoteLog"


@pytest.mark.parametrize("module", ["pyspark", "pyarrow", "grpc"])
def test_options_planning_and_local_log_modules_do_not_import_heavy_packages(module: str) -> None:
    names = ("options", "partitioner", "filter_pushdown", "log_source")
    imports = ", ".join(["rt", "rt.spark", *(f"rt.spark.source.{name}" for name in names)])
    code = f"import sys, {imports}; sys.exit({module!r} in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_dependency_group_test_includes_spark_extra() -> None:
    extra = PYPROJECT["project"]["optional-dependencies"]["spark"]
    assert [one for one in extra if one not in PYPROJECT["dependency-groups"]["test"]] == []
