"""`rt dashboards` writes the monitoring files of the Helm chart, and the wheel contains them."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
from click.testing import CliRunner

from rt.cli.commands.deployment import MONITORING_FILES, dashboards
from rt.cli.main import cli

ROOT = Path(__file__).parents[2]


def test_dashboards_writes_monitoring_files_of_chart(tmp_path: Path) -> None:
    result = CliRunner().invoke(dashboards, ["--out", str(tmp_path / "new")])

    assert (result.exit_code, result.stdout) == (0, "")
    for name, folder in MONITORING_FILES.items():
        assert (tmp_path / "new" / name).read_bytes() == (ROOT / "helm" / folder / name).read_bytes()
    assert CliRunner().invoke(dashboards, ["--out", str(tmp_path / "new")]).exit_code == 0


def test_dashboards_replaces_modified_file_only_with_force(tmp_path: Path) -> None:
    (tmp_path / "rt.json").write_text("mine")

    refused = CliRunner().invoke(cli, ["dashboards", "--out", str(tmp_path)])
    assert (refused.exit_code, "--force" in refused.stderr) == (1, True)
    assert [path.name for path in tmp_path.iterdir()] == ["rt.json"]

    assert CliRunner().invoke(cli, ["dashboards", "--out", str(tmp_path), "--force"]).exit_code == 0
    assert (tmp_path / "rt.json").read_text() != "mine"


@pytest.mark.slow
def test_wheel_contains_dashboard_and_alert_rules(tmp_path: Path) -> None:
    from hatchling.builders.wheel import WheelBuilder

    [wheel] = WheelBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"])

    with zipfile.ZipFile(wheel) as archive:
        for name, folder in MONITORING_FILES.items():
            content = archive.read(f"rt/cli/monitoring/{name}")
            assert content == (ROOT / "helm" / folder / name).read_bytes()
