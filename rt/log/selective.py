"""Walking a merged segment past what is not wanted.

Laws. What is handed out is verified as `MergedScanner` does it, but for values that nobody wants: those need
not even be there. Blocks and batches that are not wanted are passed by their headers, which are verified; so
the walk may end behind the bytes it was given, where the caller reads on; whether the file has them is
the caller's to see. Behind the last position that is wanted the walk stands still.
"""

from __future__ import annotations

import numpy as np

from rt.log.batch import BATCH_HEADER_BYTES, HEADER, BadBatch, BatchHeader, check_header
from rt.log.block import BLOCK_HEADER_BYTES, BlockHeader
from rt.log.checksum import batch_seed, crc32c
from rt.log.columns import PlacedRun, topics_of
from rt.log.frames import MergedScanner, Scan
from rt.log.interest import Interest
from rt.log.runs import find_run


class SelectiveScanner(MergedScanner):
    """Goes on where `scanner` stands, between two blocks, for what `interest` wants from `start` to `end`.

    Its scans have `items`, no `batches`: many small batches of a block come as one.
    """

    def __init__(self, scanner: MergedScanner, interest: Interest, start: int, end: int) -> None:
        assert scanner.boundary == scanner.offset
        assert scanner.chain is None
        self.__dict__.update(scanner.__dict__)
        self._interest = interest
        self._start = start
        self._stop = end
        self._singly_until = 0
        """The offset before which batches are not looked at together: they are too few, or not plain."""

    def _enter_block(self, data: memoryview, found: Scan) -> None:
        if self.next >= self._stop:
            found.needed = BLOCK_HEADER_BYTES  # Nothing more is wanted, nor needs to be there.
            return
        super()._enter_block(data, found)
        block = self._block
        if block is not None and not self._wants_block(block):
            found.consumed += block.length_bytes
            self._leave_block(block)

    def _wants_block(self, block: BlockHeader) -> bool:
        return block.end > self._start and self._interest.wants_session(
            self.sessions[block.session_id].session
        )

    def _read_batches(self, data: memoryview, found: Scan, block: BlockHeader, values: bool) -> None:  # noqa: ARG002
        at = found.consumed
        base = self.offset - at
        stop = self._block_end - base
        source = block.source_offset + block.length_bytes - stop
        end = min(len(data), stop)
        while at < end:
            if self._block_first >= self._stop:
                found.needed = BATCH_HEADER_BYTES
                return
            if base + at >= self._singly_until and (
                run := self._read_run(data, at, end, block, base, source)
            ):
                found.items.append(run)
                at = int(run.end)
                found.consumed = at
                continue
            seed = batch_seed(self._seed, source + at)
            header = read_columns(data, at, end, seed)
            wanted = not isinstance(header, int) and self._wants_batch(data, at, header)
            if not isinstance(header, int) and wanted and self._interest.values:
                header = check_values(data, at, end, seed, header)
            if isinstance(header, int):
                if header > stop - at:
                    raise BadBatch("a batch reaches beyond its block")
                found.needed = header
                return
            if at + header.total_bytes > stop:
                raise BadBatch("a batch reaches beyond its block")
            self._hand_out(found, block, header, at, base, 0)
            placed = found.batches.pop()
            if wanted:
                found.items.append(placed)
            at += header.total_bytes
            found.consumed = at
        if at == stop:
            self._leave_block(block)

    def _read_run(
        self, data: memoryview, at: int, end: int, block: BlockHeader, base: int, source: int
    ) -> PlacedRun | None:
        """The small batches at `at`, verified together; None if they must be looked at one by one."""
        interest = self._interest
        run, tried = None, end
        if interest.is_of_batches:
            run, tried = find_run(data, at, end, self._seed, source, values=interest.values)
        if run is not None:
            firsts = self._block_first + run.numbers - run.numbers[0]
            behind = int(firsts[-1] + run.counts[-1])
            is_last = base + run.end == self._block_end
            follows = self._number is None or self._number == run.numbers[0]
            if follows and (behind == block.end or (behind < block.end and not is_last)):
                self._block_first, self._number = behind, int(run.numbers[-1] + run.counts[-1])
                skips = np.clip(block.first_position - firsts, 0, run.counts)
                return PlacedRun(run.starts, run.counts, firsts, skips, block.session_id, base, run.end)
        self._singly_until = base + max(tried, at + 1)
        return None

    def _wants_batch(self, data: memoryview, at: int, header: BatchHeader) -> bool:
        first, interest = self._block_first, self._interest
        if first + header.message_count <= self._start:
            return False
        if not interest.wants_times(header.timestamp_low_ns, header.timestamp_high_ns):
            return False
        if interest.topics is None:
            return True
        topics = topics_of(data, at, header)
        return topics is None or interest.wants_topics(topics)


def read_columns(data: memoryview, at: int, end: int, seed: int) -> BatchHeader | int:
    """Verify header and columns of the batch at `at`; the bytes that takes, if `data` has less before `end`.

    `BadBatch` if they do not verify. Of the values nothing is looked at.
    """
    if end - at < BATCH_HEADER_BYTES:
        return BATCH_HEADER_BYTES
    fields = HEADER.unpack_from(data, at)
    check_header(fields)
    header = BatchHeader(*fields)
    values_at = at + BATCH_HEADER_BYTES + (header.columns_stored + 7 & -8)
    if values_at > end:
        return values_at - at
    if crc32c(data[at + 8 : values_at], seed) != header.checksum:
        raise BadBatch("columns fail their checksum")
    return header


def check_values(data: memoryview, at: int, end: int, seed: int, header: BatchHeader) -> BatchHeader | int:
    """`header`, when the values of its batch verify; the bytes of the batch, if `data` has less of it."""
    stop = at + header.total_bytes
    if stop > end:
        return header.total_bytes
    values_at = at + BATCH_HEADER_BYTES + (header.columns_stored + 7 & -8)
    if crc32c(data[values_at:stop], seed) != header.values_checksum:
        raise BadBatch("values fail their checksum")
    return header
