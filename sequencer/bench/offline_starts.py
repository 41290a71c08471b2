"""How fast nodes drain the starts of a publisher that was offline: many short runs, one after the other.

A publisher starts again and again with no node to reach; then it connects. What counts is from its last
start, that of its process included, until every node has merged all of it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Final

import rt
from rt.bench.measure import Figure
from sequencer.bench.stage import STREAM, Setup

GOAL_HZ: Final = 200.0
_VALUE_BYTES: Final = 128


def offline_starts(setup: Setup, *, starts: int) -> Iterator[Figure]:
    """Have a publisher start `starts` times offline, with one message each, and drain them."""
    with setup.open() as stage:
        for _ in range(starts):
            with rt.Publisher(stage.published_root, STREAM, publisher_id="p0") as publisher:
                publisher.publish(bytes(_VALUE_BYTES))
        before = stage.standing()
        begun = time.monotonic()
        stage.publishers(1, _VALUE_BYTES)
        stage.wait_merged(starts)
        lasted_s = time.monotonic() - begun
        after, peak_mb = stage.standing(), stage.peak_mb()
    name = f"{setup.nodes} nodes, {starts:,} starts of an offline publisher"
    yield Figure(f"{name}: drained", (starts / lasted_s,), "starts/s", GOAL_HZ)
    for who, used_s in after.cpu_s.items():
        per_start_ms = (used_s - before.cpu_s.get(who, 0.0)) / starts * 1000
        yield Figure(f"{name}: CPU of {who}", (per_start_ms,), "ms/start")
    yield Figure(f"{name}: most memory of a node process", (peak_mb,), "MB")
