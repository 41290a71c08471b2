"""Runs of small batches, verified together: what one message a batch would cost a header's worth of Python
each.

Law: a run holds only batches that `check_header` and both checksums accept, one number after the other. It
never refuses anything: where a batch is not plain, or not good, the run ends, and who walks on batch by
batch says what is wrong.

The checksums of many small batches, verified by computing one.

    for each stretch:  its offset, 8 bytes | the stretch | a bridge, 4 bytes, and 4 zeros

The checksum of a stretch starts from that of its offset, which starts from the segment's seed. A bridge is
chosen so that it leads from the checksum that the stretch should have back to the seed: if all stretches are
good, so is what they are joined to, and its checksum is the seed.

Law: one stretch that fails its checksum is always found out, for every step is one-to-one. Several that fail
go unnoticed together no more often than any checksum of 32 bits lets damage pass.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from rt.log.format.batch import BATCH_HEADER_BYTES, BATCH_MAGIC, Int64s
from rt.log.format.checksum import batch_seed, crc32c
from rt.log.format.constants import NUMBER_MAX, TOPIC_BYTES_MAX

BATCHES_MIN: Final = 16
"""Below it, looking at the batches together costs more than one by one."""
BATCH_BYTES_MAX: Final = 8 * 1024
"""Of larger ones the bytes cost more than the header."""


class BatchRun(NamedTuple):
    """Batches behind each other: their places in a buffer, and of each its messages and its first number.

    The last one ends at `end`.
    """

    starts: Int64s
    counts: Int64s
    numbers: Int64s
    end: int


def find_run(
    data: memoryview, at: int, end: int, seed: int, source: int, *, values: bool
) -> tuple[BatchRun | None, int]:
    """The run of batches that begins at `at`, and up to where it was looked for; None if it is short.

    `seed` is the source segment's, and `source` what a place in `data` is off its offset there. Without
    `values` their checksums are not looked at. `at` is a multiple of 8, and so is the place of `data` in its
    log.
    """
    starts, stop = _hop(data, at, end)
    if len(starts) < BATCHES_MIN:
        return None, stop
    headers = _plain(data, starts)
    if len(headers.ends) >= BATCHES_MIN:
        headers = headers.cut(_count_verified(data, headers, seed, source, values))
    return headers.run if len(headers.ends) >= BATCHES_MIN else None, stop


def _hop(data: memoryview, at: int, end: int) -> tuple[list[int], int]:
    """Where batches start, by their lengths alone, and where a length says something else."""
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
    run: BatchRun
    values_at: Int64s
    ends: Int64s
    checksums: npt.NDArray[np.uint32]
    values_checksums: npt.NDArray[np.uint32]

    def cut(self, count: int) -> _Headers:
        """The first `count` of them."""
        if count == len(self.ends):
            return self
        starts, counts, numbers, _ = self.run
        end = int(self.ends[count - 1]) if count else 0
        return _Headers(
            BatchRun(starts[:count], counts[:count], numbers[:count], end),
            self.values_at[:count],
            self.ends[:count],
            self.checksums[:count],
            self.values_checksums[:count],
        )


def _plain(data: memoryview, places: list[int]) -> _Headers:
    """The headers of the batches, as far as all they say is as it must be and nothing is compressed."""
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
    run = BatchRun(starts, counts, numbers, int(ends[-1]))
    return _Headers(run, starts + values_at, ends, checksums, values_checksums).cut(good)


def _count_verified(data: memoryview, headers: _Headers, seed: int, source: int, values: bool) -> int:
    """How many batches from the first on have good checksums."""
    run, values_at = headers.run, headers.values_at // 8
    offsets = run.starts + source
    stretches = [BatchRuns(run.starts // 8 + 1, values_at, headers.checksums, offsets)]
    if values:
        stretches.append(BatchRuns(values_at, headers.ends // 8, headers.values_checksums, offsets))
    words = np.frombuffer(data[: len(data) & -8], "<u8")
    if all(each.hold(words, seed) for each in stretches):
        return len(offsets)
    good = np.logical_and.reduce([each.held(data, seed) for each in stretches])
    return len(offsets) if good.all() else int(good.argmin())


_POLYNOMIAL: Final = 0x82F63B78
"""That of CRC-32C, its bits reversed."""
_ONES: Final = 0xFFFFFFFF


class BatchRuns(NamedTuple):
    """Bytes with checksums of their own, in an array of words: from `starts` up to `ends`, counted in words.

    Each checksum starts from the `batch_seed` of the offset. None begins with the very first word.
    """

    starts: Int64s
    ends: Int64s
    checksums: npt.NDArray[np.uint32]
    offsets: Int64s

    def hold(self, words: npt.NDArray[np.uint64], seed: int) -> bool:
        """Whether all checksums are right; `seed` is the segment's."""
        sizes = self.ends - self.starts + 2
        behind = np.cumsum(sizes)
        firsts = behind - sizes
        places = np.arange(sizes.sum()) + np.repeat(self.starts - 1 - firsts, sizes)
        joined = words.take(places, mode="clip")  # What is taken on both sides of a stretch is replaced.
        joined[firsts] = self.offsets.view(np.uint64)
        joined[behind - 1] = ~self.checksums ^ np.uint32(_before_zeros(~seed & _ONES))
        return bool(crc32c(joined.data.cast("B"), seed) == seed)

    def held(self, data: memoryview, seed: int) -> npt.NDArray[np.bool_]:
        """Which of the checksums are right."""
        columns = (self.starts * 8, self.ends * 8, self.checksums, self.offsets)
        rows = zip(*(column.tolist() for column in columns), strict=True)
        found = [crc32c(data[start:end], batch_seed(seed, at)) == wanted for start, end, wanted, at in rows]
        return np.array(found, np.bool_)


@lru_cache(maxsize=64)
def _before_zeros(register: int) -> int:
    """What the register of the checksum held before 8 zero bytes led it to `register`."""
    for _ in range(64):
        odd = register >> 31
        register = ((register ^ _POLYNOMIAL * odd) << 1 | odd) & _ONES
    return register
