"""Runs of small batches, verified together: what one message a batch would cost a header's worth of Python
each.

Law: a run holds only batches that `check_header` and both checksums accept, one number after the other. It
never refuses anything: where a batch is not plain, or not good, the run ends, and who walks on batch by
batch says what is wrong.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from rt.log.batch import BATCH_HEADER_BYTES, BATCH_MAGIC, Int64s
from rt.log.checksum import crc32c
from rt.log.layout import NUMBER_MAX, TOPIC_BYTES_MAX

BATCHES_MIN: Final = 16
"""Below it, looking at the batches together costs more than one by one."""
BATCH_BYTES_MAX: Final = 8 * 1024
"""Of larger ones the bytes cost more than the header."""


class Run(NamedTuple):
    """Batches behind each other: their places in a buffer, and of each its messages and its first number.

    The last one ends at `end`.
    """

    starts: Int64s
    counts: Int64s
    numbers: Int64s
    end: int


def find_run(
    data: memoryview, at: int, end: int, seed: int, source: int, *, values: bool
) -> tuple[Run | None, int]:
    """The run of batches that begins at `at`, and up to where it was looked for; None if it is short.

    `seed` is the source segment's, and `source` what a place in `data` is off its offset there. Without
    `values` their checksums are not looked at. `at` is a multiple of 8, and so is the place of `data` in its
    log.
    """
    starts, stop = _hop(data, at, end)
    if len(starts) < BATCHES_MIN:
        return None, stop
    headers = _plain(data, starts)
    good = _count_verified(data, headers, seed, source, values)
    if good < BATCHES_MIN:
        return None, stop
    return _cut(headers.run, good, headers.ends), stop


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
    run: Run
    values_at: Int64s
    ends: Int64s
    checksums: npt.NDArray[np.uint32]
    values_checksums: npt.NDArray[np.uint32]


def _plain(data: memoryview, places: list[int]) -> _Headers:
    """The headers of the batches, as far as all they say is as it must be and nothing is compressed."""
    words = np.frombuffer(data[: len(data) & -4], "<u4")
    starts = np.array(places, np.int64)
    fields: npt.NDArray[np.uint32] = words[(starts // 4)[:, None] + np.arange(BATCH_HEADER_BYTES // 4)]
    total, columns_in, values_in, columns, values = fields[:, [2, 12, 13, 14, 15]].astype(np.int64).T
    flags, topics = fields[:, 4] & 0xFFFF, (fields[:, 4] >> 16).astype(np.int64)
    counts = fields[:, 5].astype(np.int64)
    numbers = np.ascontiguousarray(fields[:, 6:8]).view("<i8")[:, 0]
    fixed = (4 * counts + 11 & -8) + 8 * counts + 4 * topics + 4
    fixed += np.where(topics > 1, 2 * counts + 7 & -8, 0)
    values_at = BATCH_HEADER_BYTES + (columns_in + 7 & -8)
    is_plain = (
        (fields[:, 0] == BATCH_MAGIC)
        & (total == values_at + (values_in + 7 & -8))
        & (flags == 0)
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
    run = Run(starts, counts, numbers, int(ends[-1]))
    return _Headers(_cut(run, good, ends), starts + values_at, ends, fields[:, 1], fields[:, 3])


def _count_verified(data: memoryview, headers: _Headers, seed: int, source: int, values: bool) -> int:
    """How many batches from the first on have good checksums."""
    run = headers.run
    count = len(run.starts)
    seeds = _seeds(seed, run.starts + source).tolist()
    # Slices of bytes are cheaper than those of a view, by more than copying small batches costs.
    base = int(run.starts[0]) if count else 0
    raw = bytes(data[base : run.end])
    starts, middles = (run.starts + 8 - base).tolist(), (headers.values_at[:count] - base).tolist()
    found = [crc32c(raw[a:b], s) for a, b, s in zip(starts, middles, seeds, strict=True)]
    is_good = np.array(found, np.uint32) == headers.checksums[:count]
    if values:
        ends = (headers.ends[:count] - base).tolist()
        found = [crc32c(raw[a:b], s) for a, b, s in zip(middles, ends, seeds, strict=True)]
        is_good &= np.array(found, np.uint32) == headers.values_checksums[:count]
    return count if is_good.all() else int(is_good.argmin())


def _cut(run: Run, count: int, ends: Int64s) -> Run:
    if count == len(run.starts):
        return run
    return Run(
        run.starts[:count], run.counts[:count], run.numbers[:count], int(ends[count - 1]) if count else 0
    )


def _make_table() -> npt.NDArray[np.uint32]:
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = np.where(table & 1, (table >> 1) ^ np.uint32(0x82F63B78), table >> 1)
    return table


_TABLE: Final = _make_table()
"""CRC-32C of each byte, by its polynomial, bits reversed."""


def _seeds(seed: int, offsets: Int64s) -> npt.NDArray[np.uint32]:
    """`batch_seed(seed, offset)` of each offset."""
    crc = np.full(len(offsets), ~np.uint32(seed), np.uint32)
    for place in range(8):
        byte = (offsets >> 8 * place & 0xFF).astype(np.uint32)
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ (crc >> np.uint32(8))
    return ~crc
