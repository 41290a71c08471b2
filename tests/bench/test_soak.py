"""A short soak of real processes, run by its command: its figures and the files it removes."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest
from chaos.soak_cli import soak
from chaos.soak_faults import Kind, draw_faults
from click.testing import CliRunner

pytestmark = pytest.mark.slow

SEED, SECONDS = 12, 6.0
KINDS: tuple[Kind, ...] = ("kill_data", "cut", "kill_publisher", "kill_subscriber", "configure")


def test_short_soak_breaks_no_promise_reports_its_figures_and_removes_its_files() -> None:
    faults = list(draw_faults(SEED, SECONDS, nodes=3, publishers=2, subscribers=4, kinds=KINDS))
    with tempfile.TemporaryDirectory(prefix="rt", dir="/tmp") as root:  # Unix sockets need a short path.
        arguments = [
            "--directory",
            root,
            "--seconds",
            str(SECONDS),
            "--seed",
            str(SEED),
            "--publishers",
            "2",
            "--json",
        ]
        arguments += [word for kind in KINDS for word in ("--fault", kind)]
        result = CliRunner().invoke(soak, arguments)
        assert result.exception is None, result.exception
        assert list(Path(root).iterdir()) == []
    told = {figure["name"]: figure["median"] for figure in map(json.loads, result.stdout.splitlines())}
    assert told["soak: promises broken"] == 0
    assert told["soak: messages merged"] > 0
    done = told["soak: faults"] + told["soak: faults left out, their victim being busy"]
    assert 0 < done <= len(faults)
    assert f"seed {SEED}" in result.stderr
