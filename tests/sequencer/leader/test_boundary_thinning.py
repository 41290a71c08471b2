"""Thinning of batch boundaries: a leader keeps few, and still knows what a majority holds."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sequencer.leader import boundary_thinning
from sequencer.leader import replication_tracker as tracker_module
from sequencer.leader.replication_tracker import BatchBoundary, ReplicationTracker, SegmentKey

NODES = ["n0", "n1", "n2"]
KEYS = [SegmentKey(1, 0, 0), SegmentKey(1, 0, 1), SegmentKey(1, 1, 0)]
KEY = KEYS[0]
MANY = [BatchBoundary(64 + 160 * index, index, index) for index in range(100_001)]


def batches(rng: random.Random, count: int) -> list[BatchBoundary]:
    """The boundaries of a segment with batches of random sizes."""
    found = [BatchBoundary(64, 0, 1)]
    for number in range(1, count):
        found.append(BatchBoundary(found[-1].offset + 8 * rng.randrange(1, 20), number, number * 7))
    return found


@given(st.integers(0, 2**32))
@settings(max_examples=30, deadline=None)
def test_thinned_tracker_names_only_boundaries_that_majority_holds_and_reaches_its_end(seed: int) -> None:
    """Nodes report a session that is not merged, in parts, at different speeds, and again after a restart."""
    rng = random.Random(seed)
    segments = {key: batches(rng, rng.randrange(1, 150)) for key in KEYS}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(boundary_thinning, "FINE_BOUNDARIES_MIN", 30)
        patch.setattr(boundary_thinning, "FINE_BOUNDARIES_MAX", 30)
        patch.setattr(boundary_thinning, "COARSE_BYTES", 1000)
        tracker = ReplicationTracker(3)
        holders: dict[tuple[SegmentKey, BatchBoundary], set[str]] = defaultdict(set)
        reported = dict.fromkeys(NODES, 0)
        reports = [
            (key, marks[at : at + 7]) for key, marks in segments.items() for at in range(0, len(marks), 7)
        ]
        while min(reported.values()) < len(reports):
            node = rng.choice(NODES)
            if rng.random() < 0.02:
                tracker.forget_node(node)
                reported[node] = 0
                for names in holders.values():
                    names.discard(node)
            for key, marks in reports[reported[node] : (reported[node] + rng.randrange(1, 12))]:
                tracker.on_boundaries(node, key, marks)
                for mark in marks:
                    holders[key, mark].add(node)
                reported[node] += 1
            key = rng.choice(KEYS)
            for roll, offset in tracker.tops(1, key.run):
                assert tracker.number_at(SegmentKey(1, key.run, roll), offset) is not None
            found = tracker.furthest(key, rng.choice(segments[key]).offset, rng.randrange(2000))
            assert found is None or len(holders[key, found]) >= 2
    for key, marks in segments.items():
        at = marks[0].offset
        assert tracker.boundary_at(key, at) == marks[0]
        while at < marks[-1].offset:
            end = tracker.furthest(key, at, 2000)
            assert end is not None
            assert end.offset - at <= 2000
            at = end.offset
    count = sum(len(tracker._segments[1][key[1:]].offsets) for key in segments)
    assert tracker._budget._counts == {1: count}
    assert count <= 45 + sum(marks[-1].offset // 1000 + 5 for marks in segments.values())


def test_last_boundary_of_slower_majority_survives_thinning_for_faster_node() -> None:
    """The faster node may be down, and the publisher gone; all that is held must be merged."""
    tracker, key = ReplicationTracker(3), KEY
    for node in ("n1", "n2"):
        tracker.on_boundaries(node, key, MANY[:10])
    tracker.on_boundaries("n0", key, MANY)
    assert tracker.number_at(key, MANY[8].offset) is None, "nothing was thinned"
    assert tracker.furthest(key, 64, 16 << 20) == MANY[9]


def test_boundaries_of_all_sessions_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """None of many sessions is merged. One that came first gives up what is more than its part."""
    for name, value in (("MIN", 8), ("MAX", 400), ("TOTAL", 1000)):
        monkeypatch.setattr(boundary_thinning, f"FINE_BOUNDARIES_{name}", value)
    tracker = ReplicationTracker(3)
    for at in range(0, 1000, 10):
        for session_id in range(30):
            key = SegmentKey(session_id, 0, 0)
            tracker.on_boundaries("n0", key, MANY[at : at + 10])
    counts = [len(segments[0, 0].offsets) for segments in tracker._segments.values()]
    assert max(counts) < 100
    assert sum(counts) <= 2 * 1000
    assert tracker._budget._counts == dict(enumerate(counts))
    for session_id in range(1, 30):
        tracker.forget_session(session_id)
    tracker.prune_before(0, 0, 0, MANY[-1].offset)
    assert (tracker._budget._total, tracker._budget._long) == (0, 0)
    tracker.on_boundaries("n0", KEY, MANY[:300])
    assert len(tracker._segments[1][0, 0].offsets) == 300


def test_thinning_costs_nothing_for_boundaries_that_are_thinned_already(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise a backlog of terabytes would keep the leader from its heartbeats."""
    thinned = list[int]()
    coarse_indices = tracker_module.coarse_indices

    def counted(offsets: Sequence[int], stop: int) -> list[int]:
        thinned.append(stop)
        return coarse_indices(offsets, stop)

    monkeypatch.setattr(tracker_module, "coarse_indices", counted)
    tracker = ReplicationTracker(3)
    for roll in range(40):
        tracker.on_boundaries("n0", SegmentKey(1, 0, roll), MANY[:10_000])
    assert sum(thinned) < 2 * 400_000


def test_boundaries_of_slow_node_that_were_thinned_out_are_added_in_one_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Inserting each into a list of 49,152 newer ones kept the leader busy for half a second per report."""
    inserted = list[int]()
    insort = tracker_module.insort
    monkeypatch.setattr(tracker_module, "insort", lambda a, x: (inserted.append(x), insort(a, x)))
    tracker = ReplicationTracker(3)
    for at in range(0, 100_000, 10_000):
        tracker.on_boundaries("n0", KEY, MANY[at : at + 10_000])
    assert tracker.number_at(KEY, MANY[5000].offset) is None
    tracker.on_boundaries("n1", KEY, MANY[:10_000])
    assert len(inserted) < 100
    segment = tracker._segments[1][KEY[1:]]
    assert segment.offsets == sorted(segment.boundaries)
    assert tracker.top("n1", 1, 0) == (0, MANY[9999].offset)
