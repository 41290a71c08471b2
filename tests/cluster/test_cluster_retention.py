"""Size retention on every node and following copy, and on a node that was down meanwhile."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from faults import WAIT_S

import rt
from rt.log.check.status import read_status
from rt.log.disk import REAL
from rt.log.format.segment import SegmentId
from rt.log.format.segment_table import TrimReason
from rt.log.scan.directory import merged_directory, read_table
from sequencer.localcluster.nodes import LocalCluster

pytestmark = pytest.mark.slow

ROLL_BYTES, LIMIT_BYTES = 32 << 10, 128 << 10
VALUE, STEP = b"x" * 1000, 50
Trimmed = dict[SegmentId, tuple[TrimReason, int]]


@pytest.fixture
def nodes() -> Iterator[LocalCluster]:
    root = Path(tempfile.mkdtemp(prefix="rt", dir="/tmp"))  # Unix sockets need a short path.
    flags = ["--roll-bytes", str(ROLL_BYTES), "--retention-bytes", "128Ki"]
    try:
        with LocalCluster(root, flags=flags) as nodes:
            nodes.start()
            nodes.wait_ready()
            yield nodes
    finally:
        shutil.rmtree(root)


def trimmed(path: Path) -> Trimmed:
    """Return the trimmed segments according to the table of a log."""
    table = read_table(REAL, str(path))
    return {one.id: (one.reason, one.trimmed_ns) for one in table.segments if one.is_trimmed} if table else {}


def kept_bytes(path: Path) -> int:
    """Return the size of the untrimmed segments of a log."""
    return sum(segment.size_bytes for segment in read_status(path).kept)


def test_size_retention_trims_all_nodes_following_copies_and_restarted_node(
    nodes: LocalCluster, tmp_path: Path
) -> None:
    tls = nodes.certificate("subscriber", "sub")
    logs = {name: nodes.merged_directory(name) for name in nodes.names}
    position = 0

    def publish(steps: int) -> None:
        """Publish in steps that are smaller than the kept size. Each step is merged and read before the next
        one starts.
        """
        nonlocal position
        for _ in range(steps):
            publisher.publish_many([VALUE] * STEP)
            publisher.flush()
            position += STEP
            publisher.wait(position - 1, "merged", timeout=WAIT_S)
            for subscriber in (following, own):
                assert take(subscriber, STEP) == STEP

    def wait_trimmed(*names: str) -> Trimmed:
        """Wait until these logs are within the limit and have the same start. After that, no more is
        trimmed.
        """

        def is_trimmed() -> bool:
            is_little = all(kept_bytes(logs[name]) <= LIMIT_BYTES for name in names)
            return is_little and len({read_start(logs[name]) for name in names}) == 1

        nodes.wait(is_trimmed, f"{names} to trim: {[trimmed(logs[name]) for name in names]}")
        return trimmed(logs[names[0]])

    with (
        rt.Publisher(
            tmp_path,
            "s",
            publisher_id="feed",
            endpoints=nodes.endpoints,
            tls=nodes.certificate("publisher", "feed"),
        ) as publisher,
        rt.Subscriber(
            tmp_path / "follow", "s", endpoints=nodes.endpoints, tls=tls, connect_timeout=None
        ) as following,
        rt.Subscriber(
            tmp_path / "own", "s", endpoints=nodes.endpoints, tls=tls, connect_timeout=None, retention="own"
        ) as own,
    ):
        publish(1)
        nodes.wait_merged(position)
        before = read_start(logs["n3"])
        nodes.kill("n3")

        publish(8)
        gone = wait_trimmed("n1", "n2")
        assert len(gone) > 5
        assert {reason for reason, _ in gone.values()} == {TrimReason.SIZE}
        assert trimmed(logs["n2"]) == gone
        assert read_start(logs["n3"]) == before

        nodes.start("n3")
        nodes.wait_merged(position, "n3")
        assert trimmed(logs["n3"]).items() <= wait_trimmed(*nodes.names).items()
        publish(3)
        nodes.wait_merged(position)
        gone = wait_trimmed(*nodes.names)
        assert gone == trimmed(logs["n2"])
        assert trimmed(logs["n3"]).items() <= gone.items()

        copies = [Path(merged_directory(tmp_path / name, "s")) for name in ("follow", "own")]
        nodes.wait(lambda: read_start(copies[0]) == read_start(logs["n1"]), "the copy to be trimmed")
        assert read_start(copies[1]) == 0
        comparison = nodes.compare(*copies)
        assert comparison.differences == ()
        assert {log.end for log in comparison.logs} == {position}


def read_start(path: Path) -> int:
    """The first position that a log keeps."""
    return read_status(path).start


def take(subscriber: rt.Subscriber, count: int) -> int:
    """Take `count` messages; return their number."""
    taken = 0
    while taken < count:
        taken += len(subscriber.poll(count - taken, timeout=WAIT_S))
    return taken
