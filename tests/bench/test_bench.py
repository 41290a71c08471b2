"""The log, memory and stream benchmarks report their figures and remove their files."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from rt.bench.log import LogBench
from rt.bench.measure import Figure, ratios
from rt.cli.commands.bench import bench


def test_small_log_run_reports_figures_and_removes_its_files(tmp_path: Path) -> None:
    result = CliRunner().invoke(
        bench, ["log", "--directory", str(tmp_path), "--rounds", "2", "--size-mb", "1", "--json"]
    )
    assert result.exit_code == 0, result.output
    figures = [json.loads(line) for line in result.stdout.splitlines()]
    assert [figure["name"].split(":")[0] for figure in figures].count("128 B") == 5
    assert all(
        figure["rounds"] == 2 and figure["min"] <= figure["median"] <= figure["max"] for figure in figures
    )
    assert all(figure["median"] > 0 for figure in figures)
    assert list(tmp_path.iterdir()) == []


def test_memory_run_reports_growth_in_mb_and_removes_its_files(tmp_path: Path) -> None:
    (figure,) = LogBench(str(tmp_path), rounds=1, size_bytes=2**20).memory_figures(20_000_000)
    assert figure.unit == "MB"
    assert list(tmp_path.iterdir()) == []


def test_figure_reports_median_of_its_rounds() -> None:
    figure = Figure("x", (3.0, 1.0, 200.0), "MB/s", 2.0)
    assert figure.median == 3.0
    assert figure.as_line().split() == ["x", "3.00", "MB/s", "(1.00", "to", "200)", "goal", "2.00"]


def test_ratios_are_computed_round_by_round() -> None:
    assert ratios((1.0, 4.0), (2.0, 2.0)) == (0.5, 2.0)
    with pytest.raises(ValueError, match="zip"):
        ratios((1.0,), (1.0, 2.0))


def test_small_streams_run_reports_16_figures_and_removes_its_files(tmp_path: Path) -> None:
    options = [
        "--directory",
        str(tmp_path),
        "--rounds",
        "1",
        "--events",
        "2000",
        "--streams",
        "20",
        "--core",
        "-1",
        "--json",
    ]
    result = CliRunner().invoke(bench, ["streams", *options])
    assert result.exit_code == 0, result.output
    figures = [json.loads(line) for line in result.stdout.splitlines()]
    assert len(figures) == 16
    assert all(figure["median"] > 0 for figure in figures if "grown" not in figure["name"])
    assert list(tmp_path.iterdir()) == []
