"""The boundaries of a copy against a list of them, also where they were thinned out."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rt.log.chain import Mark
from sequencer.control import holdings
from sequencer.data import marks as marks_module
from sequencer.data.marks import SegmentMarks, Stretch


def boundaries(rng: random.Random, count: int) -> list[Mark]:
    found = [Mark(64, 0, 1, 5, 5)]
    for number in range(1, count):
        low = rng.randrange(100)
        offset = found[-1].offset + 8 * rng.randrange(1, 20)
        found.append(Mark(offset, number, rng.randrange(2**32), low, low + rng.randrange(9)))
    return found


def dumb_stretch(marks: list[Mark], start: int, end: int) -> Stretch:
    between = [mark for mark in marks if start < mark.offset <= end]
    low, high = (
        min(mark.timestamp_low_ns for mark in between),
        max(mark.timestamp_high_ns for mark in between),
    )
    return Stretch(between[-1].chain, low, high)


@given(st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_all_that_is_told_of_a_segment_is_what_a_list_says(seed):
    rng = random.Random(seed)
    whole = boundaries(rng, rng.randrange(1, 60))
    known, at, below = SegmentMarks(), 0, 0
    while at < len(whole):
        count = rng.randrange(1, 9)
        known.add(whole[max(0, at - rng.randrange(3)) : at + count])  # Some are told twice.
        at = min(len(whole), at + count)
        if rng.random() < 0.2:
            below = max(below, rng.choice(whole[:at]).offset)
            known.forget_below(below)
    kept = [mark for mark in whole if mark.offset >= below]
    assert list(known) == kept
    assert known.end == whole[-1].offset
    for start in kept:
        assert known.before(start.offset + rng.randrange(8)) == start
        for end in kept:
            if start.offset < end.offset:
                assert known.stretch(start.offset, end.offset) == dumb_stretch(whole, *_places(start, end))


def _places(start: Mark, end: Mark) -> tuple[int, int]:
    return start.offset, end.offset


@given(st.integers(0, 2**32))
@settings(max_examples=40, deadline=None)
def test_thinning_keeps_true_stretches_and_what_every_other_node_keeps(seed):
    coarse = 500
    rng = random.Random(seed)
    whole = boundaries(rng, 400)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(marks_module, "MARKS_MAX", 48)
        patch.setattr(marks_module, "COARSE_BYTES", coarse)
        known, at = SegmentMarks(), 0
        while at < len(whole):
            count = rng.randrange(1, 70)
            known.add(whole[at : at + count])
            at += count
    kept = list(known)
    assert len(kept) < 48 + 70 + whole[-1].offset / coarse
    offsets = {mark.offset for mark in kept}
    for mark, behind in pairwise(whole):
        if mark.offset // coarse != behind.offset // coarse:
            assert mark.offset in offsets
    assert known.end == whole[-1].offset
    for start in kept:
        assert known.stretch(start.offset, start.offset + 1) is None
        end = rng.choice(kept)
        if start.offset < end.offset:
            assert known.stretch(start.offset, end.offset) == dumb_stretch(whole, *_places(start, end))


def test_an_offset_that_is_no_boundary_is_not_known():
    known = SegmentMarks()
    assert (known.end, known.before(64), known.stretch(64, 128)) == (0, None, None)
    known.add([Mark(64, 0, 1, 0, 0), Mark(128, 1, 2, 0, 0)])
    assert known.stretch(64, 120) is None
    assert known.stretch(72, 128) is None
    assert known.before(63) is None


def test_reports_and_copies_thin_out_alike():
    assert marks_module.COARSE_BYTES == holdings.COARSE_BYTES
