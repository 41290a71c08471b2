"""The index of batch boundaries of a session replica: lookups, pruning and thinning, against a list."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rt.log.format.running_checksum import ChecksummedBoundary, Checksums
from sequencer.leader import boundary_thinning
from sequencer.sessions.batch_index import BatchIndex, RangeInfo


def boundaries(rng: random.Random, count: int) -> list[ChecksummedBoundary]:
    found = [ChecksummedBoundary(64, 0, 1, 5, 5, 0)]
    for number in range(1, count):
        low = rng.randrange(100)
        offset = found[-1].offset + 8 * rng.randrange(1, 20)
        checksums = rng.randrange(2**32), rng.randrange(2**32)
        found.append(
            ChecksummedBoundary(offset, number, checksums[0], low, low + rng.randrange(9), checksums[1])
        )
    return found


def dumb_stretch(marks: list[ChecksummedBoundary], start: int, end: int) -> RangeInfo:
    between = [mark for mark in marks if start < mark.offset <= end]
    low, high = (
        min(mark.timestamp_low_ns for mark in between),
        max(mark.timestamp_high_ns for mark in between),
    )
    before = next(mark for mark in marks if mark.offset == start)
    return RangeInfo(between[-1].chain, low, high, Checksums(before.content, between[-1].content))


@given(st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_batch_index_matches_plain_list_after_adding_and_pruning(seed):
    rng = random.Random(seed)
    whole = boundaries(rng, rng.randrange(1, 60))
    known, at, below = BatchIndex(), 0, 0
    while at < len(whole):
        count = rng.randrange(1, 9)
        known.add(whole[max(0, at - rng.randrange(3)) : at + count])  # Some are added twice.
        at = min(len(whole), at + count)
        if rng.random() < 0.2:
            below = max(below, rng.choice(whole[:at]).offset)
            known.prune_before(below)
    kept = [mark for mark in whole if mark.offset >= below]
    assert list(known) == kept
    assert known.end == whole[-1].offset
    for start in kept:
        assert known.before(start.offset + rng.randrange(8)) == start
        for end in kept:
            if start.offset < end.offset:
                assert known.range_info(start.offset, end.offset) == dumb_stretch(whole, *_places(start, end))


def _places(start: ChecksummedBoundary, end: ChecksummedBoundary) -> tuple[int, int]:
    return start.offset, end.offset


@given(st.integers(0, 2**32))
@settings(max_examples=40, deadline=None)
def test_thinned_batch_index_has_exact_range_infos_and_keeps_boundaries_common_to_all_nodes(seed):
    coarse = 500
    rng = random.Random(seed)
    whole = boundaries(rng, 400)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(boundary_thinning, "COARSE_BYTES", coarse)
        known, at = BatchIndex(), 0
        while at < len(whole):
            count = rng.randrange(1, 70)
            known.add(whole[at : at + count])
            at += count
            if known.count > 48:
                known.thin_out(known.count - 24)
    kept = list(known)
    assert len(kept) <= 48 + 70 + whole[-1].offset / coarse
    offsets = {mark.offset for mark in kept}
    for mark, behind in pairwise(whole):
        if mark.offset // coarse != behind.offset // coarse:
            assert mark.offset in offsets
    assert known.end == whole[-1].offset
    for start in kept:
        assert known.range_info(start.offset, start.offset + 1) is None
        end = rng.choice(kept)
        if start.offset < end.offset:
            assert known.range_info(start.offset, end.offset) == dumb_stretch(whole, *_places(start, end))


def test_batch_index_returns_none_for_offset_between_boundaries():
    known = BatchIndex()
    assert (known.end, known.before(64), known.range_info(64, 128)) == (0, None, None)
    known.add([ChecksummedBoundary(64, 0, 1, 0, 0, 0), ChecksummedBoundary(128, 1, 2, 0, 0, 9)])
    assert known.range_info(64, 120) is None
    assert known.range_info(72, 128) is None
    assert known.before(63) is None


def test_boundary_before_pruned_offset_that_was_thinned_out_is_kept():
    """The bytes after that offset are read from the file, which starts at a known boundary."""
    whole = boundaries(random.Random(1), 40)
    known = BatchIndex()
    known.add(whole)
    known.thin_out(30)
    assert whole[20].offset not in known.offsets
    known.prune_before(whole[20].offset)
    assert known.before(whole[20].offset) == whole[0]
    known.prune_before(whole[35].offset)
    assert known.before(whole[35].offset) == whole[35]
    assert known.count == 5
