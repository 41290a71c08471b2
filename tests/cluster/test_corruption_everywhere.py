"""A record that is corrupt on every node: alarm, event for readers, and trim by an operator."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from operator_calls import told

import rt
from rt.events import CorruptPositions, Event, SkipForward
from rt.log.disk import REAL
from rt.log.format.block import BlockKind
from rt.log.format.segment import SegmentId
from rt.log.scan.catalog import read_catalog
from rt.log.scan.directory import read_header, scans
from rt.log.scan.scanner import MergedScanner
from sequencer.localcluster.nodes import LocalCluster

pytestmark = pytest.mark.slow


@pytest.fixture(params=[1, 3])
def nodes(request: pytest.FixtureRequest) -> Iterator[LocalCluster]:
    root = Path(tempfile.mkdtemp(prefix="rt", dir="/tmp"))  # Unix sockets need a short path.
    try:
        with LocalCluster(root, request.param) as nodes:
            nodes.start()
            nodes.wait_ready()
            yield nodes
    finally:
        shutil.rmtree(root)


def alarms(nodes: LocalCluster) -> dict[str, dict[str, str]]:
    """Return the alarms of each node by name."""
    return {one["name"]: one for one in told(nodes, "/status")["alarms"]}


def publish(nodes: LocalCluster, root: Path, count: int) -> None:
    """Publish and merge ten messages at a time, so that each ten form one block."""
    options: dict[str, Any] = {"endpoints": nodes.endpoints, "tls": nodes.certificate("publisher", "feed")}
    with rt.Publisher(root, "s", publisher_id="feed", **options) as publisher:
        for _ in range(0, count, 10):
            numbers = publisher.publish_many([os.urandom(1000) for _ in range(10)])
            publisher.wait(numbers[-1], "merged", timeout=180)


def roll(nodes: LocalCluster, root: Path, end: int) -> None:
    """Make the cluster seal the active merged segment, which ends at `end`."""
    told(nodes, "/configuration", {"rollBytes": 4096})
    publish(nodes, root, 10)
    nodes.wait_merged(end + 10)
    told(nodes, "/configuration", {"rollBytes": 2**30})


def middle_batch(path: Path, segment: SegmentId) -> tuple[int, int]:
    """Return the offset of a batch in the middle of a merged segment, and the first position of its block."""
    header = read_header(REAL, str(path), segment)
    assert header is not None
    file = REAL.open(str(path / segment.file_name))
    scanner = MergedScanner(header)
    blocks = [block for scan in scans(file.pread, scanner) for block in scan.blocks]
    batches = [block for block in blocks if block.header.kind == BlockKind.BATCHES]
    file.close()
    placed = batches[len(batches) // 2]
    return placed.offset, placed.header.first_position


@pytest.mark.parametrize("at", [40, 3000], ids=["header", "values, which a sender does not verify"])
def test_record_corrupt_on_all_nodes_is_reported_and_skipped_after_operator_trim(
    nodes: LocalCluster, tmp_path: Path, at: int
) -> None:
    publish(nodes, tmp_path, 60)
    nodes.wait_merged(60)
    roll(nodes, tmp_path, 60)
    directories = [nodes.merged_directory(name) for name in nodes.names]
    first = read_catalog(REAL, str(directories[0])).kept[0]
    assert first.end is not None
    offset, start = middle_batch(directories[0], first.id)
    assert 0 < start < first.end
    for directory in directories:
        with (directory / first.id.file_name).open("r+b") as file:
            (byte,) = os.pread(file.fileno(), 1, offset + at)
            os.pwrite(file.fileno(), bytes([byte ^ 1]), offset + at)

    events: list[Event] = []
    tls = nodes.certificate("subscriber", "sub")
    with rt.Subscriber(
        tmp_path / "sub",
        "s",
        endpoints=nodes.endpoints,
        tls=tls,
        connect_timeout=None,
        on_event=events.append,
    ) as sub:
        positions: list[int] = []

        def has_read(position: int) -> bool:
            positions.extend(message.position for message in sub.poll(timeout=0.1))
            return positions[-1:] == [position]

        def is_told() -> bool:
            return has_read(start - 1) and any(
                isinstance(one, CorruptPositions) and one.end for one in events
            )

        nodes.wait(is_told, "the event")
        assert positions == [*range(start)]
        told_of = [(one.start, one.end) for one in events if isinstance(one, CorruptPositions)]
        assert told_of[-1] == (start, first.end)
        assert set(told_of) <= {(start, first.end), (start, None)}
        nodes.wait(
            lambda: alarms(nodes).get("segment-corrupt", {}).get("severity") == "critical", "the alarm"
        )
        text = alarms(nodes)["segment-corrupt"]["text"]
        assert f"positions {first.first} to {first.end - 1}" in text
        assert f'POST /trim {{"position": {first.end}}}' in text

        told(nodes, "/trim", {"position": first.end})
        nodes.wait(lambda: has_read(69), "what lies behind")
        assert positions == [*range(start), *range(first.end, 70)]
        assert events[-1] == SkipForward(start, first.end, "request")
        nodes.wait(lambda: "segment-corrupt" not in alarms(nodes), "the alarm to end")
