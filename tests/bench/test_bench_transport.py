"""The transport benchmark runs, reports every figure and removes its files."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from rt.cli.commands.bench import bench
from sequencer.bench import member_changes, speed, stages
from sequencer.bench.stages import STAGES, WriteTimes, lengths_of
from sequencer.bench.transport import PARTS

FEW = [
    *(
        "--seconds",
        "1",
        "--rounds",
        "1",
        "--rate-hz",
        "1000",
        "--failovers",
        "1",
        "--many",
        "3",
        "--publishers",
        "2",
        "--subscribers",
        "2",
        "--value-bytes",
        "1024",
    ),
    *("--backlog-gb", "0.02", "--merging-gb", "0.02", "--starts", "5", "--json"),
]
KINDS = ("control", "data", "publishers", "pushes", "subscribers", "pulls", "all processes")
FAULTS = ("messages lost", "messages repeated", "merged logs that differ")


@pytest.fixture
def root() -> Iterator[Path]:
    """A short path, because a node creates a Unix socket below it."""
    with tempfile.TemporaryDirectory(prefix="rt") as path:
        yield Path(path)


@pytest.fixture(autouse=True)
def _little_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "_WARM_UP_S", 0.2)
    monkeypatch.setattr(stages, "_WARM_UP_S", 0.2)
    monkeypatch.setattr(speed, "LEAD_BYTES", 4 << 20)


def figures(root: Path, *arguments: str) -> dict[str, float]:
    result = CliRunner().invoke(bench, ["transport", *FEW, "--directory", str(root), *arguments])
    assert result.exit_code == 0, f"{result.output}{result.exception}"
    return {figure["name"]: figure["median"] for figure in map(json.loads, result.stdout.splitlines())}


def is_as_it_must_be(name: str, median: float) -> bool:
    if any(fault in name for fault in FAULTS):
        return median == 0
    # In the measured second a subscriber may receive nothing, and a process may get no CPU time.
    # A stage takes no time if the watcher of writes wakes up after the next stage.
    may_be_zero = "subscriber" in name or "CPU of" in name or name.endswith(STAGES)
    return median >= 0 if may_be_zero else median > 0


def test_stage_lengths_of_message_are_never_negative() -> None:
    """If a write is seen after the next write, the stage between them has length 0."""
    assert lengths_of(100, [110, 130, 125, 160]) == [10, 20, 0, 30, 60]


def test_write_times_return_first_log_write_since_publish_time(tmp_path: Path) -> None:
    (tmp_path / "log.0.0").touch()
    (other := tmp_path / "other").mkdir()
    with WriteTimes({"publisher": [str(tmp_path)], "pull": [str(other)]}) as writes:
        begun_ns = time.time_ns()
        (tmp_path / "durable").write_bytes(b"x")  # Not a log file.
        (tmp_path / "log.0.0").write_bytes(b"x")
        end_ns = time.time_ns() + 60 * 10**9
        while (first_ns := writes.first("publisher", begun_ns, end_ns)) == end_ns:
            time.sleep(0.01)
    assert begun_ns < first_ns < time.time_ns()
    assert writes.first("publisher", time.time_ns(), end_ns) == end_ns
    assert writes.first("publisher", begun_ns, begun_ns) == begun_ns
    assert writes.first("subscriber", begun_ns, end_ns) == end_ns
    assert writes.unwritten() == ["pull"]


def test_write_times_take_write_just_before_their_end(tmp_path: Path) -> None:
    with WriteTimes({"publisher": [str(tmp_path)]}) as writes:
        (tmp_path / "log.0.0").write_bytes(b"x")
    assert writes.unwritten() == []


def names(nodes: int) -> dict[str, list[str]]:
    """Return the names of the figures that each part reports with `nodes` nodes."""
    flood, many = f"{nodes} nodes, 2 publishers of 1024 B", f"{nodes} nodes, 3 publishers of 1 KiB"
    half = f"{flood}, at half of that rate: publish to subscriber"
    drip = f"{nodes} nodes, 1 KiB at 1000 messages/s"
    failover = f"{nodes} nodes: leader killed under load"
    backlog = f"{nodes} nodes, 0.02 GB of backlog of 2 publishers"
    starts = f"{nodes} nodes, 5 starts of an offline publisher"
    return {
        "throughput": [
            f"{flood}: merged on a majority",
            f"{flood}: messages",
            f"{flood}: received by the slowest of 2 subscribers",
            *(f"{flood}: CPU of {kind}" for kind in KINDS),
            f"{flood}: most memory of a node process",
            f"{half}, p50",
            f"{half}, p99",
        ],
        "latency": [
            f"{drip}: publish to subscriber, p50",
            f"{drip}: publish to subscriber, p99",
            f"{drip}: rounds",
            *(f"{drip}: CPU of {kind}" for kind in KINDS),
            f"{drip}: context switches",
        ],
        "stages": [f"{nodes} nodes, one message of 1 KiB: {what}" for what in (*STAGES, "all stages")],
        "failover": [
            f"{failover} until messages flow again",
            f"{failover}, the longest of 1",
            f"{failover}: messages lost",
            f"{failover}: messages repeated or out of order",
            f"{failover}: merged logs that differ",
        ],
        "many": [
            f"{many}: merged",
            f"{many}: the slowest against the mean",
            f"{many}: longest time without a merge for one of them",
            f"{many}: most memory of a node process",
            f"{many}: most memory of a push",
        ],
        "members": [
            "a node is started and added, under load",
            "a node is started and added: longest time without a merge",
            "the leader is removed, under load",
            "the leader is removed: longest time without a merge",
            "another node is removed, under load",
            "another node is removed: longest time without a merge",
            "member changes: messages lost",
            "member changes: messages repeated or out of order",
            "member changes: merged logs that differ",
        ],
        "backlog": [
            f"{backlog}: drained",
            f"{backlog}: most memory of a node, its processes together",
            f"{backlog}: most memory of a control process",
            f"{backlog}: most memory of a data process",
            f"{backlog}: most memory of a push",
        ],
        "offline-starts": [
            f"{starts}: drained",
            f"{starts}: CPU of control",
            f"{starts}: CPU of data",
            f"{starts}: CPU of publishers",
            f"{starts}: CPU of pushes",
            f"{starts}: CPU of all processes",
            f"{starts}: most memory of a node process",
        ],
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("part", "nodes"),
    [
        ("throughput", 3),
        ("failover", 3),
        ("failover", 1),
        ("members", 1),
        ("latency", 1),
        ("stages", 1),
        ("many", 1),
        ("backlog", 1),
        ("offline-starts", 1),
    ],
)
def test_each_part_reports_all_figures_and_removes_its_files(
    part: str, nodes: int, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part runs with one node if the count does not matter, because three nodes take three times as long to
    start. The rate is low: a new member must merge faster than others publish, on a busy machine, too.
    """
    monkeypatch.setattr(member_changes, "RATE_MB", 0.5)
    found = figures(root, "--part", part, "--nodes", str(nodes))
    assert list(found) == names(nodes)[part]
    assert {name: median for name, median in found.items() if not is_as_it_must_be(name, median)} == {}
    assert list(root.iterdir()) == []


def test_expected_figures_cover_every_part_of_benchmark() -> None:
    assert {*names(3), "merging"} == set(PARTS)


def test_backlog_larger_than_free_disk_space_is_rejected(root: Path) -> None:
    result = CliRunner().invoke(bench, ["transport", "--part", "backlog", "--backlog-gb", "10000"])
    assert "no space for a backlog" in str(result.exception)


def test_merging_part_reports_all_figures_and_removes_its_files(root: Path) -> None:
    found = figures(root, "--part", "merging", "--merging-gb", "0.005")
    assert len(found) == 5
    assert all(median >= 0 for median in found.values()), found
    assert list(root.iterdir()) == []
