"""Verify many small batches together, because one header at a time in Python is slow for small batches.

The checksums of many byte ranges are verified by computing one checksum, over the joined bytes

    for each range:  its offset, 8 bytes | the range | a bridge, 4 bytes, and 4 zeros

The checksum of a range continues the checksum of its offset, which continues the segment's seed. The bridge
changes the checksum that the range should have back into the seed. So the checksum of the joined bytes equals
the seed if all ranges are good.

Invariants:
- A run has only batches that `check_header` and both checksums accept, with consecutive numbers. It ends
  before a compressed or bad batch; the caller reads that batch alone and reports its problem.
- A single bad range is always detected, because every step is one-to-one. Several bad ranges pass together no
  more often than with any 32-bit checksum.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from rt.log.format.batch import BATCH_HEADER_BYTES, BATCH_MAGIC
from rt.log.format.checksum import batch_seed, crc32c
from rt.log.format.constants import NUMBER_MAX, TOPIC_BYTES_MAX, Int64s

BATCHES_MIN: Final = 16
"""Below this number, verifying batches together costs more than verifying them one by one."""
BATCH_BYTES_MAX: Final = 8 * 1024
"""The bytes of larger batches cost more than their headers."""


class BatchRun(NamedTuple):
    """Consecutive batches: offsets in a buffer, message counts, first numbers. The last batch ends at
    `end`.
    """

    starts: Int64s
    counts: Int64s
    numbers: Int64s
    end: int


def find_run(
    data: memoryview, at: int, end: int, seed: int, source: int, *, values: bool
) -> tuple[BatchRun | None, int]:
    """The run of batches at `at`, or None if it is too short; and the offset in `data` up to which it was
    searched.

    `seed` is the seed of the source segment. An offset in `data` plus `source` is the offset in that segment.
    Without `values`, the checksums of the values are not verified. `at`, and the offset of `data` in its log,
    are multiples of 8.
    """
    starts, stop = _hop(data, at, end)
    if len(starts) < BATCHES_MIN:
        return None, stop
    headers = _plain(data, starts)
    if len(headers.ends) >= BATCHES_MIN:
        headers = headers.cut(_count_verified(data, headers, seed, source, values))
    if len(headers.ends) < BATCHES_MIN:
        return None, stop
    return BatchRun(headers.starts, headers.counts, headers.numbers, int(headers.ends[-1])), stop


def _hop(data: memoryview, at: int, end: int) -> tuple[list[int], int]:
    """The offsets at which batches start, found by their lengths only, and the first offset that has no small
    batch.
    """
    starts: list[int] = []
    found, words = starts.append, data[: len(data) & -4].cast("I")
    last = end - BATCH_HEADER_BYTES
    while at <= last:
        total = words[at + 8 >> 2]
        if total & 7 or not BATCH_HEADER_BYTES <= total <= BATCH_BYTES_MAX:
            break
        found(at)
        at += total
    if at > end:
        at = starts.pop()
    return starts, at


class _Headers(NamedTuple):
    """Columns with one entry per batch: the offsets of its start, of its values and of its end, and fields of
    its header.
    """

    starts: Int64s
    values_at: Int64s
    ends: Int64s
    counts: Int64s
    numbers: Int64s
    checksums: npt.NDArray[np.uint32]
    values_checksums: npt.NDArray[np.uint32]

    def cut(self, count: int) -> _Headers:
        return self if count == len(self.ends) else _Headers._make(column[:count] for column in self)


def _plain(data: memoryview, places: list[int]) -> _Headers:
    """The headers of the batches before the first compressed or invalid one."""
    words = np.frombuffer(data[: len(data) & -4], "<u4")
    starts = np.array(places, np.int64)
    at = starts // 4
    magic, checksums, values_checksums, flags = (words[at + place] for place in (0, 1, 3, 4))
    total, counts, columns_in, values_in, columns, values = (
        words[at + place].astype(np.int64) for place in (2, 5, 12, 13, 14, 15)
    )
    topics = (flags >> 16).astype(np.int64)
    numbers = words[at + 6] + (words[at + 7].astype(np.int64) << 32)
    fixed = (4 * counts + 11 & -8) + 8 * counts + 4 * topics + 4
    fixed += np.where(topics > 1, 2 * counts + 7 & -8, 0)
    values_at = BATCH_HEADER_BYTES + (columns_in + 7 & -8)
    is_plain = (
        (magic == BATCH_MAGIC)
        & (total == values_at + (values_in + 7 & -8))
        & (flags & 0xFFFF == 0)
        & (columns_in == columns)
        & (values_in == values)
        & (topics >= 1)
        & (topics <= counts)
        & (numbers >= 0)
        & (numbers <= NUMBER_MAX - counts)
        & (fixed <= columns)
        & (columns <= fixed + TOPIC_BYTES_MAX * topics)
    )
    is_plain[1:] &= numbers[1:] == numbers[:-1] + counts[:-1]
    good = len(places) if is_plain.all() else int(is_plain.argmin())
    ends = starts + total
    return _Headers(starts, starts + values_at, ends, counts, numbers, checksums, values_checksums).cut(good)


def _count_verified(data: memoryview, headers: _Headers, seed: int, source: int, values: bool) -> int:
    """The number of batches before the first one with a bad checksum."""
    starts, values_at = headers.starts, headers.values_at // 8
    offsets = starts + source
    ranges = [ChecksummedRanges(starts // 8 + 1, values_at, headers.checksums, offsets)]
    if values:
        ranges.append(ChecksummedRanges(values_at, headers.ends // 8, headers.values_checksums, offsets))
    words = np.frombuffer(data[: len(data) & -8], "<u8")
    if all(each.are_valid(words, seed) for each in ranges):
        return len(offsets)
    good = np.logical_and.reduce([each.which_are_valid(data, seed) for each in ranges])
    return len(offsets) if good.all() else int(good.argmin())


_POLYNOMIAL: Final = 0x82F63B78
"""The polynomial of CRC-32C with reversed bits."""
_ONES: Final = 0xFFFFFFFF


class ChecksummedRanges(NamedTuple):
    """Byte ranges of an array, from `starts` to `ends` in words of 8 bytes, and their checksums.

    Each checksum starts from the `batch_seed` of the offset. No range starts at the first word.
    """

    starts: Int64s
    ends: Int64s
    checksums: npt.NDArray[np.uint32]
    offsets: Int64s

    def are_valid(self, words: npt.NDArray[np.uint64], seed: int) -> bool:
        """Whether all checksums are right; `seed` is the segment's."""
        sizes = self.ends - self.starts + 2
        ends = np.cumsum(sizes)
        firsts = ends - sizes
        places = np.arange(sizes.sum()) + np.repeat(self.starts - 1 - firsts, sizes)
        joined = words.take(places, mode="clip")  # The words before and after each range are replaced below.
        joined[firsts] = self.offsets.view(np.uint64)
        joined[ends - 1] = ~self.checksums ^ np.uint32(_before_zeros(~seed & _ONES))
        return bool(crc32c(joined.data.cast("B"), seed) == seed)

    def which_are_valid(self, data: memoryview, seed: int) -> npt.NDArray[np.bool_]:
        columns = (self.starts * 8, self.ends * 8, self.checksums, self.offsets)
        rows = zip(*(column.tolist() for column in columns), strict=True)
        found = [crc32c(data[start:end], batch_seed(seed, at)) == own for start, end, own, at in rows]
        return np.array(found, np.bool_)


@lru_cache(maxsize=64)
def _before_zeros(register: int) -> int:
    """The checksum register before the 8 zero bytes that changed it to `register`."""
    for _ in range(64):
        odd = register >> 31
        register = ((register ^ _POLYNOMIAL * odd) << 1 | odd) & _ONES
    return register
