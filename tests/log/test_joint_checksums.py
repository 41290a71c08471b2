"""Joint checksum verification: many ranges verify together exactly when each is valid alone."""

import random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from rt.log.format.checksum import batch_seed, crc32c
from rt.log.scan.small_batches import ChecksummedRanges


@given(
    sizes=st.lists(st.integers(0, 20), min_size=1, max_size=60),
    seed=st.integers(0, 2**32 - 1),
    offset=st.integers(0, 2**61),
    damaged=st.sets(st.integers(0, 59), max_size=3),
)
@settings(max_examples=60)
def test_joint_check_passes_exactly_when_each_range_is_valid(
    sizes: list[int], seed: int, offset: int, damaged: set[int]
) -> None:
    draw = random.Random(seed)
    data = bytearray(draw.randbytes(8 * (1 + sum(sizes))))
    ends = 1 + np.cumsum(sizes)
    starts, offsets = ends - sizes, offset + 8 * ends
    places = list(zip((8 * starts).tolist(), (8 * ends).tolist(), offsets.tolist(), strict=True))
    checksums = np.array([crc32c(data[a:b], batch_seed(seed, at)) for a, b, at in places], np.uint32)
    is_good = [True] * len(sizes)
    for place in damaged:
        if place < len(sizes):
            is_good[place] = False
            start, end, _ = places[place]
            if start < end:
                data[draw.randrange(start, end)] ^= draw.randint(1, 255)
            else:
                checksums[place] ^= np.uint32(draw.randint(1, 2**32 - 1))
    ranges = ChecksummedRanges(starts, ends, checksums, offsets)
    assert ranges.are_valid(np.frombuffer(bytes(data), "<u8"), seed) == all(is_good)
    assert ranges.which_are_valid(memoryview(bytes(data)), seed).tolist() == is_good


def test_joint_check_fails_with_another_offset_or_seed() -> None:
    count, seed = 500, 77
    data = random.Random(1).randbytes(8 * (1 + 4 * count))
    starts = 1 + 4 * np.arange(count)
    offsets = 8 * starts
    checksums = [crc32c(data[8 * a : 8 * a + 32], batch_seed(seed, 8 * a)) for a in starts.tolist()]
    ranges = ChecksummedRanges(starts, starts + 4, np.array(checksums, np.uint32), offsets)
    words = np.frombuffer(data, "<u8")
    assert ranges.are_valid(words, seed)
    assert not ranges._replace(offsets=offsets + 4096).are_valid(words, seed)
    assert not ranges.are_valid(words, seed ^ 1)
