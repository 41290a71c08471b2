"""The Raft benchmark runs, reports every figure and removes its files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from rt.cli.commands.bench import bench

FEW = ["--rounds", "1", "--seconds", "0.3", "--failovers", "2", "--catch-up-mb", "3", "--snapshot-ms", "100"]


def figures(*arguments: str) -> dict[str, dict[str, float]]:
    result = CliRunner().invoke(bench, ["raft", *FEW, "--json", *arguments])
    assert result.exit_code == 0, (result.output, result.exception)
    return {figure["name"]: figure for figure in map(json.loads, result.stdout.splitlines())}


@pytest.mark.slow
def test_three_nodes_report_all_figures_and_remove_their_files(tmp_path: Path) -> None:
    found = figures("--directory", str(tmp_path))
    assert list(found) == [
        "3 nodes: 200 B, one in flight, p50",
        "3 nodes: 200 B, one in flight, p99",
        "3 nodes: 200 B, 64 in flight",
        "3 nodes: 200 B, 1024 in flight",
        "3 nodes: 16 KiB, 64 in flight",
        "3 nodes: 200 B, 64 in flight, CPU of the leader",
        "3 nodes: 200 B, 64 in flight, CPU of a follower",
        "3 nodes: 200 B, one in flight on a follower, p50",
        "3 nodes: idle, CPU of the leader",
        "3 nodes: idle, CPU of a follower",
        "3 nodes: 0.5 MiB of state, a snapshot every 0.1 s, p99",
        "3 nodes: 0.5 MiB of state, no snapshots, p99",
        "3 nodes: leader killed, next commit at a follower",
        "3 nodes: leader killed, next commit at a follower, p90",
        "3 nodes: leader paused, next commit at a follower",
        "3 nodes: leader paused, next commit at a follower, p90",
        "3 nodes: leader hands over, next commit at a follower",
        "3 nodes: leader hands over, next commit at a follower, p90",
        "3 nodes: caught up by a snapshot of 3 MB, from the start",
        "3 nodes: caught up by a snapshot of 3 MB, once it is open",
        "1 node: 200 B, one in flight, p50",
    ]
    assert all(
        figure["median"] > 0 or "CPU of a" in name or "idle" in name for name, figure in found.items()
    ), found
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_single_node_reports_its_figures_and_removes_its_files(tmp_path: Path) -> None:
    found = figures("--directory", str(tmp_path), "--nodes", "1", "--part", "speed", "--part", "failover")
    assert len(found) == 6
    assert all(figure["median"] > 0 for figure in found.values())
    assert list(tmp_path.iterdir()) == []


def test_raft_benchmark_is_listed_in_bench_help() -> None:
    result = CliRunner().invoke(bench, ["--help"])
    assert "raft" in result.stdout
    assert "not available" not in result.stdout
