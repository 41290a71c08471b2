"""The benchmark of the transport runs, gives every figure, and leaves nothing behind."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from rt.cli.bench import bench

FEW = ["--seconds", "1", "--failovers", "1", "--many", "3", "--publishers", "2", "--value-bytes", "1024"]


@pytest.fixture
def root() -> Iterator[Path]:
    """A short path: a node has a Unix socket below it."""
    with tempfile.TemporaryDirectory(prefix="rt") as path:
        yield Path(path)


@pytest.mark.slow
def test_three_nodes_give_every_figure_and_remove_their_files(root: Path) -> None:
    result = CliRunner().invoke(bench, ["transport", *FEW, "--json", "--dir", str(root)])
    assert result.exit_code == 0, f"{result.output}{result.exception}"
    found = {figure["name"]: figure["median"] for figure in map(json.loads, result.stdout.splitlines())}
    flood, many = "3 nodes, 2 publishers of 1024 B", "3 nodes, 3 publishers of 1 KiB"
    drip = "3 nodes, 1 KiB at 1000 messages/s: publish to subscriber"
    failover = "3 nodes: leader killed under load until merges go on"
    assert list(found) == [
        f"{flood}: merged on a majority",
        f"{flood}: messages",
        f"{flood}: received by a subscriber",
        f"{flood}: CPU of the nodes",
        f"{flood}: CPU of publishers and pushes",
        f"{flood}: CPU of the subscriber and its pull",
        f"{flood}: most memory of a node process",
        f"{drip}, p50",
        f"{drip}, p99",
        failover,
        f"{failover}, the longest of 1",
        f"{many}: merged",
        f"{many}: the slowest against the mean",
        f"{many}: most memory of a node process",
    ]
    assert all(median > 0 for median in found.values()), found
    assert list(root.iterdir()) == []
