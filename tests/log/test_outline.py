"""The outline of a log: waypoints at block starts around a range, at a given stride."""

import os
from pathlib import Path

import pytest
from merged_logs import Feeds

from rt.log.disk import REAL
from rt.log.read.outline import Waypoint, outline


@pytest.fixture(scope="module")
def feeds(tmp_path_factory: pytest.TempPathFactory) -> Feeds:
    """Two segments, 6 MB and 3 MB, of 100 messages a MB."""
    made = Feeds(tmp_path_factory.mktemp("outline"))
    for count in (60, 30):
        for _ in range(count):
            made.publish("a", [os.urandom(10_000) for _ in range(10)], "t", [1] * 10)
        made.merge(block_bytes=2**18)
        made.roll()
    yield made
    made.close()


def test_waypoints_rise_from_start_to_end_of_log(feeds: Feeds) -> None:
    waypoints = list(outline(REAL, feeds.path, 0, 900))
    assert waypoints[0] == Waypoint(0, 0)
    assert [waypoint.position for waypoint in waypoints] == sorted(
        {waypoint.position for waypoint in waypoints}
    )
    assert [waypoint.log_bytes for waypoint in waypoints] == sorted(
        {waypoint.log_bytes for waypoint in waypoints}
    )
    assert waypoints[-1].position == 900
    assert 9_000_000 < waypoints[-1].log_bytes < 9_100_000
    assert 8 <= len(waypoints) <= 12
    assert 600 in {waypoint.position for waypoint in waypoints}


def test_outline_of_range_has_only_waypoints_around_range(feeds: Feeds) -> None:
    whole = list(outline(REAL, feeds.path, 0, 900))
    part = list(outline(REAL, feeds.path, 350, 420))
    assert part[0].position <= 350 < part[1].position
    assert part[-1].position >= 420 > part[-2].position
    assert {waypoint.position for waypoint in part} <= {waypoint.position for waypoint in whole}
    assert len(list(outline(REAL, feeds.path, 650, 900))) < 6


def test_larger_stride_yields_fewer_waypoints(feeds: Feeds) -> None:
    assert [waypoint.position for waypoint in outline(REAL, feeds.path, 0, 900, stride_bytes=2**30)] == [
        0,
        600,
        900,
    ]


def test_missing_index_file_leaves_only_first_and_last_waypoint(tmp_path: Path) -> None:
    feeds = Feeds(tmp_path)
    for _ in range(30):
        feeds.publish("a", [os.urandom(100_000)], "t", [1])
    feeds.merge()
    os.unlink(f"{feeds.path}/index.0.0")
    waypoints = list(outline(REAL, feeds.path, 0, 30))
    assert [waypoint.position for waypoint in waypoints] == [0, 30]
    feeds.close()
