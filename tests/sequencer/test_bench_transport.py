"""The benchmark of the transport runs, gives every figure, and leaves nothing behind."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from rt.cli.bench import bench
from sequencer.bench import speed
from sequencer.bench.transport import PARTS

FEW = [
    *("--seconds", "1", "--failovers", "1", "--many", "3", "--publishers", "2", "--value-bytes", "1024"),
    *("--backlog-gb", "0.02", "--merging-gb", "0.02", "--json"),
]
FAULTS = ("messages lost", "messages repeated", "merged logs that differ")


@pytest.fixture
def root() -> Iterator[Path]:
    """A short path: a node has a Unix socket below it."""
    with tempfile.TemporaryDirectory(prefix="rt") as path:
        yield Path(path)


@pytest.fixture(autouse=True)
def _little_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "_WARM_UP_S", 0.2)


def figures(root: Path, *arguments: str) -> dict[str, float]:
    result = CliRunner().invoke(bench, ["transport", *FEW, "--dir", str(root), *arguments])
    assert result.exit_code == 0, f"{result.output}{result.exception}"
    return {figure["name"]: figure["median"] for figure in map(json.loads, result.stdout.splitlines())}


def is_as_it_must_be(name: str, median: float) -> bool:
    if any(fault in name for fault in FAULTS):
        return median == 0
    # In the second that counts here a subscriber may get nothing, and a process not have its turn.
    return median >= 0 if "subscriber" in name or "CPU of" in name else median > 0


FLOOD, MANY = "3 nodes, 2 publishers of 1024 B", "3 nodes, 3 publishers of 1 KiB"
DRIP = "3 nodes, 1 KiB at 1000 messages/s: publish to subscriber"
FAILOVER = "3 nodes: leader killed under load"
BACKLOG = "3 nodes, 0.02 GB of backlog of 2 publishers"
NAMES = {
    "throughput": [
        f"{FLOOD}: merged on a majority",
        f"{FLOOD}: messages",
        f"{FLOOD}: received by a subscriber",
        f"{FLOOD}: CPU of control",
        f"{FLOOD}: CPU of data",
        f"{FLOOD}: CPU of publishers",
        f"{FLOOD}: CPU of pushes",
        f"{FLOOD}: CPU of the subscriber",
        f"{FLOOD}: CPU of its pull",
        f"{FLOOD}: CPU of all processes",
        f"{FLOOD}: most memory of a node process",
    ],
    "latency": [f"{DRIP}, p50", f"{DRIP}, p99"],
    "failover": [
        f"{FAILOVER} until messages flow again",
        f"{FAILOVER}, the longest of 1",
        f"{FAILOVER}: messages lost",
        f"{FAILOVER}: messages repeated or out of order",
        f"{FAILOVER}: merged logs that differ",
    ],
    "many": [
        f"{MANY}: merged",
        f"{MANY}: the slowest against the mean",
        f"{MANY}: longest time without a merge for one of them",
        f"{MANY}: most memory of a node process",
        f"{MANY}: most memory of a push",
    ],
    "backlog": [
        f"{BACKLOG}: drained",
        f"{BACKLOG}: most memory of a node, its processes together",
        f"{BACKLOG}: most memory of a control process",
        f"{BACKLOG}: most memory of a data process",
        f"{BACKLOG}: most memory of a push",
    ],
}
"""What each part with three nodes gives."""


@pytest.mark.slow
@pytest.mark.parametrize("part", NAMES)
def test_three_nodes_give_every_figure_of_a_part_and_remove_their_files(part: str, root: Path) -> None:
    found = figures(root, "--part", part)
    assert list(found) == NAMES[part]
    assert {name: median for name, median in found.items() if not is_as_it_must_be(name, median)} == {}
    assert list(root.iterdir()) == []


@pytest.mark.slow
def test_one_node_that_is_killed_comes_back_by_itself_and_loses_nothing(root: Path) -> None:
    found = figures(root, "--nodes", "1", "--part", "failover")
    assert len(found) == len(NAMES["failover"])
    assert all(is_as_it_must_be(*figure) for figure in found.items()), found
    assert list(root.iterdir()) == []


def test_every_part_is_tested() -> None:
    assert {*NAMES, "merging"} == set(PARTS)


def test_a_backlog_that_does_not_fit_on_the_disk_is_refused_before_anything_starts(root: Path) -> None:
    result = CliRunner().invoke(bench, ["transport", "--part", "backlog", "--backlog-gb", "10000"])
    assert "no space for a backlog" in str(result.exception)


def test_merging_alone_gives_every_figure_and_removes_its_files(root: Path) -> None:
    found = figures(root, "--part", "merging", "--merging-gb", "0.005")
    assert len(found) == 5
    assert all(median >= 0 for median in found.values()), found
    assert list(root.iterdir()) == []
