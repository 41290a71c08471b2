"""The query benchmark reports all its figures and removes its files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from rt.cli.commands.bench import queries


@pytest.mark.slow
def test_small_run_reports_all_figures_and_removes_its_files(tmp_path: Path) -> None:
    arguments = ["--directory", str(tmp_path), "--rounds", "2", "--queries", "20", "--users", "50", "--json"]
    result = CliRunner().invoke(queries, arguments)
    assert result.exit_code == 0, result.output
    names = [json.loads(line)["name"] for line in result.stdout.splitlines()]
    assert len(names) == 31
    assert "20 queries: checkpoint, each changed, CPU" in names
    assert "20 alerts, a stage with keys: messages" in names
    assert list(tmp_path.iterdir()) == []
