"""The replication tracker against a simple reference model, and the number of its lookups."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rt.errors import FormatError
from rt.log.format.constants import NUMBER_MAX
from sequencer.leader import boundary_thinning
from sequencer.leader.replication_tracker import (
    BatchBoundary,
    ReplicationTracker,
    SegmentKey,
    pack_boundaries,
    unpack_boundaries,
)
from sequencer.state.write_plan import SessionEnd

NODES = ["n0", "n1", "n2", "n3", "n4"]
KEYS = [SegmentKey(1, 0, 0), SegmentKey(1, 0, 1), SegmentKey(1, 1, 0), SegmentKey(2, 0, 0)]
OFFSETS = [64, 72, 80, 128, 512]


def mark(offset: int, *, forged: bool = False) -> BatchBoundary:
    return BatchBoundary(offset, offset // 8, offset ^ 0xFFFF if forged else offset)


class DumbBoard:
    """A simple model: a list of all reports, which every query scans completely."""

    def __init__(self, members: int) -> None:
        self.members = members
        self.said: list[tuple[str, SegmentKey, BatchBoundary]] = []
        self.announced: dict[tuple[int, int], SessionEnd] = {}
        self.finals: dict[tuple[int, int, str], SessionEnd] = {}

    def first_said(self, key: SegmentKey, offset: int) -> BatchBoundary | None:
        return next((one for _, k, one in self.said if k == key and one.offset == offset), None)

    def nodes(self, key: SegmentKey, one: BatchBoundary) -> set[str]:
        return {node for node, k, said in self.said if (k, said) == (key, one)}

    def on_boundaries(self, node: str, key: SegmentKey, marks: list[BatchBoundary]) -> set[int]:
        """Record reported boundaries. Return the sessions that differ."""
        differ = set()
        for one in marks:
            known = self.first_said(key, one.offset)
            if known is not None and known != one:
                differ.add(key.session_id)
            else:
                self.said.append((node, key, one))
        return differ

    def held(self, key: SegmentKey) -> list[BatchBoundary]:
        """The boundaries that a majority has, in order."""
        marks = {said for _, k, said in self.said if k == key}
        return sorted(one for one in marks if len(self.nodes(key, one)) * 2 > self.members)

    def furthest(self, key: SegmentKey, start: int, bytes_max: int, number_max: int) -> BatchBoundary | None:
        ahead = [one for one in self.held(key) if one.offset > start and one.number <= number_max]
        near = [one for one in ahead if one.offset <= start + bytes_max]
        return near[-1] if near else ahead[0] if ahead else None

    def forget_node(self, node: str) -> None:
        self.said = [one for one in self.said if one[0] != node]
        self.finals = {key: end for key, end in self.finals.items() if key[2] != node}

    def prune_before(self, session_id: int, run: int, roll: int, offset: int) -> None:
        self.said = [
            (node, key, one)
            for node, key, one in self.said
            if key.session_id != session_id or (*key[1:], one.offset) >= (run, roll, offset)
        ]
        self.announced = {k: end for k, end in self.announced.items() if k[0] != session_id or k[1] >= run}
        self.finals = {k: end for k, end in self.finals.items() if k[0] != session_id or k[1] >= run}


MARKS = st.lists(st.sampled_from(OFFSETS), unique=True) | st.just(OFFSETS)
ENDS = st.builds(
    SessionEnd, st.sampled_from([1, 2]), st.sampled_from([0, 1]), st.just(0), st.sampled_from(OFFSETS)
)
STEPS = st.one_of(
    st.tuples(
        st.just("marks"), st.sampled_from(NODES), st.sampled_from(KEYS), MARKS, st.sampled_from([0] * 9 + [1])
    ),
    st.tuples(st.just("node"), st.sampled_from(NODES)),
    st.tuples(st.just("below"), st.sampled_from(KEYS), st.sampled_from([*OFFSETS, 65, 1000])),
    st.tuples(
        st.sampled_from(["announced", "final"]),
        st.sampled_from(NODES),
        st.sampled_from(KEYS),
        st.sampled_from(OFFSETS),
    ),
)


@given(st.sampled_from([1, 3, 5]), st.lists(STEPS, max_size=40))
@settings(max_examples=100)
def test_tracker_matches_simple_reference_model(members: int, steps: list[Any]) -> None:
    tracker, dumb = ReplicationTracker(members), DumbBoard(members)
    differ: set[int] = set()
    for step in steps:
        match step:
            case ("marks", node, key, offsets, forged):
                if NODES.index(node) >= members:
                    continue
                marks = [mark(offset, forged=bool(forged)) for offset in offsets]
                tracker.on_boundaries(node, key, marks)
                differ |= dumb.on_boundaries(node, key, marks)
            case ("node", node):
                tracker.forget_node(node)
                dumb.forget_node(node)
            case ("below", key, offset):
                tracker.prune_before(*key, offset)
                dumb.prune_before(*key, offset)
            case ("announced", _, key, offset):
                end = SessionEnd(*key, offset, offset // 8)
                tracker.on_announced(end)
                dumb.announced[key[:2]] = end
            case ("final", node, key, offset):
                end = SessionEnd(*key, offset, offset // 8)
                tracker.on_final(node, end, None)
                dumb.finals[key[0], key[1], node] = end
        assert set(tracker.disagreements) == differ
    for key in KEYS:
        check(tracker, dumb, key)


def check(tracker: ReplicationTracker, dumb: DumbBoard, key: SegmentKey) -> None:
    held = {one.offset: one for one in dumb.held(key)}
    for offset in [*OFFSETS, 0, 8, 1000]:
        assert tracker.boundary_at(key, offset) == held.get(offset)
        for bytes_max in (1, 8, 100, 10_000):
            for number_max in (9, 40, NUMBER_MAX):
                assert tracker.furthest(key, offset, bytes_max, number_max) == dumb.furthest(
                    key, offset, bytes_max, number_max
                )
    assert tracker.announced(*key[:2]) == dumb.announced.get(key[:2])
    finals = [end for known, end in dumb.finals.items() if known[:2] == key[:2]]
    assert sorted(tracker.finals(*key[:2]).values()) == sorted(finals)


def test_disagreement_names_nodes_and_their_boundaries() -> None:
    tracker = ReplicationTracker(3)
    key = KEYS[0]
    for node in ("n0", "n1"):
        tracker.on_boundaries(node, key, [mark(64), mark(128)])
    tracker.on_boundaries("n2", key, [mark(64), mark(128, forged=True), mark(256)])
    found = tracker.disagreements[1]
    assert (found.key, found.offset, found.node, found.others) == (key, 128, "n2", ("n0", "n1"))
    assert (found.got, found.wanted) == (mark(128, forged=True), mark(128))
    tracker.on_boundaries("n2", KEYS[0], [mark(64, forged=True)])
    assert tracker.disagreements == {1: found}


def test_prune_before_forgets_boundaries_below_offset_and_keeps_offset_itself() -> None:
    tracker = ReplicationTracker(3)
    for key in KEYS:
        for node in ("n0", "n1"):
            tracker.on_boundaries(node, key, [mark(64), mark(128), mark(256)])
    tracker.prune_before(1, 0, 1, 128)
    known = {
        key: [offset for offset in (64, 128, 256) if tracker.boundary_at(key, offset) is not None]
        for key in KEYS
    }
    assert list(known.values()) == [[], [128, 256], [64, 128, 256], [64, 128, 256]]


def test_majority_agreeing_only_on_offset_does_not_count() -> None:
    tracker = ReplicationTracker(3)
    for node, one in (
        ("n0", BatchBoundary(128, 5, 1)),
        ("n1", BatchBoundary(128, 5, 2)),
        ("n2", BatchBoundary(128, 6, 1)),
    ):
        tracker.on_boundaries(node, KEYS[0], [one])
    assert tracker.boundary_at(KEYS[0], 128) is None
    assert tracker.furthest(KEYS[0], 64, 1000) is None


@pytest.mark.parametrize(("members", "needed"), [(1, 1), (2, 2), (3, 2), (4, 3), (5, 3), (7, 4)])
def test_majority_is_more_than_half_of_members(members: int, needed: int) -> None:
    tracker = ReplicationTracker(members)
    for count in range(1, members + 1):
        tracker.on_boundaries(f"n{count}", KEYS[0], [mark(128)])
        assert (tracker.boundary_at(KEYS[0], 128) is not None) == (count >= needed)


# Packed batch boundaries


@given(st.sets(st.integers(0, 2**62)), st.data())
def test_boundaries_survive_packing_and_unpacking(offsets: set[int], data: st.DataObject) -> None:
    marks = [
        BatchBoundary(one, data.draw(st.integers(0, 2**62)), data.draw(st.integers(0, 2**32 - 1)))
        for one in sorted(offsets)
    ]
    assert unpack_boundaries(pack_boundaries(marks)) == marks


@given(st.binary(max_size=100))
def test_random_bytes_unpack_to_boundaries_or_raise_format_error(data: bytes) -> None:
    try:
        marks = unpack_boundaries(data)
    except FormatError:
        return
    assert pack_boundaries(marks) == data


@pytest.mark.parametrize("offsets", [(128, 64), (64, 64)], ids=["falling", "equal"])
def test_unordered_or_truncated_boundaries_raise_format_error(offsets: tuple[int, int]) -> None:
    with pytest.raises(FormatError, match="do not ascend"):
        unpack_boundaries(pack_boundaries(mark(offset) for offset in offsets))
    with pytest.raises(FormatError, match="truncated"):
        unpack_boundaries(pack_boundaries([mark(64)])[:-1])


# Costs


class Counting(dict[int, Any]):
    """A dictionary that counts its lookups."""

    looks = 0

    def __getitem__(self, key: int) -> Any:
        Counting.looks += 1
        return super().__getitem__(key)

    def get(self, key: int, default: Any = None) -> Any:
        Counting.looks += 1
        return super().get(key, default)

    def items(self) -> Any:
        raise AssertionError("all boundaries were gone through")

    def __iter__(self) -> Iterator[int]:
        raise AssertionError("all boundaries were gone through")


MANY = [BatchBoundary(64 + 160 * index, index, index) for index in range(100_001)]


@pytest.fixture
def _no_thinning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(boundary_thinning, "FINE_BOUNDARIES_MAX", len(MANY))


@pytest.mark.usefixtures("_no_thinning")
@pytest.mark.parametrize("others", [0, 1, 50_000, 100_000])
def test_furthest_of_100000_boundaries_is_found_in_few_lookups(others: int) -> None:
    """One node has all boundaries of a segment. The other nodes have its first `others` batches."""
    tracker, key = ReplicationTracker(3), KEYS[0]
    tracker.on_boundaries("n0", key, MANY)
    for node in ("n1", "n2"):
        tracker.on_boundaries(node, key, MANY[: others + 1])
    count_looks(tracker, key)
    found = tracker.furthest(key, 64, 16 << 20)
    assert found == (MANY[others] if others else None)
    assert tracker.furthest(key, 64, 16_000) == (MANY[min(others, 100)] if others else None)
    assert Counting.looks <= 4


def test_boundaries_of_forgotten_node_are_not_searched() -> None:
    tracker, key = ReplicationTracker(3), KEYS[0]
    for node in ("n0", "n1"):
        tracker.on_boundaries(node, key, MANY[:10_000])
    tracker.forget_node("n1")
    tracker.on_boundaries("n1", key, MANY[:10])
    count_looks(tracker, key)
    assert tracker.furthest(key, 64, 16 << 20) == MANY[9]
    assert Counting.looks <= 4


def count_looks(tracker: ReplicationTracker, key: SegmentKey) -> None:
    segment = tracker._segment(key)
    assert segment is not None
    Counting.looks = 0
    segment.boundaries = Counting(segment.boundaries)
