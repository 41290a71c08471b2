"""Read only the needed part of a merged segment.

A `Projection` names the needed messages. An excluded block or batch has no needed message. An included one
may also have other messages, which the reader filters out.

Invariants:
- The results are verified as by `MergedScanner`, except values that are not needed: they may even be missing.
- A block or batch is skipped by its verified header. So the scan may end after the bytes it was given. The
  caller continues there, and checks that the file is long enough.
- The scan stops after the last needed position.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from msgspec import Struct

from rt.log.format.batch import BATCH_HEADER_BYTES, BadBatch, BatchHeader
from rt.log.format.block import BLOCK_HEADER_BYTES, BlockHeader
from rt.log.format.checksum import crc32c
from rt.log.format.constants import NUMBER_MAX
from rt.log.read.topic_patterns import TopicPatterns
from rt.log.scan.batch_decoder import topics_of
from rt.log.scan.placed_batches import PlacedRun
from rt.log.scan.scanner import MergedScanner, ScanResult, read_batch
from rt.log.scan.small_batches import find_run


class ProjectingScanner(MergedScanner):
    """Continues where `scanner` is, between two blocks, and reads what `interest` needs from `start` to
    `end`.

    Its scans have `items`, not `batches`: many small batches of a block are one item.
    """

    def __init__(self, scanner: MergedScanner, interest: Projection, start: int, end: int) -> None:
        assert scanner.boundary == scanner.offset
        assert scanner.chain is None
        self.__dict__.update(scanner.__dict__)
        self._interest = interest
        self._start = start
        self._stop = end
        self._passed_columns = 2**32
        self._singly_until = 0
        """Before this offset batches are read one by one: they are too few, or not plain."""
        self._passed: set[int] = set()
        """The start offsets of batches that were read alone and are not needed."""

    def _enter_block(self, data: memoryview, found: ScanResult) -> None:
        if self.next >= self._stop:
            found.needed = BLOCK_HEADER_BYTES  # Nothing more is needed.
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

    def _read_batches(
        self, data: memoryview, found: ScanResult, block: BlockHeader, values: bool, until: int = NUMBER_MAX
    ) -> None:
        if self.offset >= self._singly_until:
            if self._block_first >= self._stop:
                found.needed = BATCH_HEADER_BYTES  # Nothing more is needed.
                return
            if (run := self._read_run(data, found.consumed, block)) is not None:
                found.items.append(run)
                found.consumed = run.end
                if run.log_offset + run.end == self._block_end:
                    self._leave_block(block)
                return
        self._passed.clear()
        try:
            super()._read_batches(data, found, block, values, min(until, self._singly_until))
        finally:
            passed, batches = self._passed, found.batches
            found.items += [placed for placed in batches if placed.start not in passed] if passed else batches
            batches.clear()

    def _read_run(self, data: memoryview, at: int, block: BlockHeader) -> PlacedRun | None:
        """The small batches at `at`, verified together; None if they must be read one by one."""
        interest = self._interest
        base = self.offset - at
        stop = self._block_end - base
        source = block.source_offset + block.length_bytes - stop
        end = min(len(data), stop)
        run, tried = None, end
        if interest.is_of_batches:
            run, tried = find_run(data, at, end, self._seed, source, values=interest.values)
        if run is not None:
            firsts = self._block_first + run.numbers - run.numbers[0]
            next_first = int(firsts[-1] + run.counts[-1])
            is_last = base + run.end == self._block_end
            follows = self._number is None or self._number == run.numbers[0]
            if follows and (next_first == block.end or (next_first < block.end and not is_last)):
                self._block_first, self._number = next_first, int(run.numbers[-1] + run.counts[-1])
                skips = np.clip(block.first_position - firsts, 0, run.counts)
                return PlacedRun(
                    run.starts, run.counts, firsts, skips, block.session_id, block.source_run, base, run.end
                )
        self._singly_until = base + max(tried, at + 1)
        return None

    def _read_batch(
        self, data: memoryview, at: int, end: int, seed: int, values: bool, passed_columns: int | None = None
    ) -> BatchHeader | int:
        """Values are verified if the batch is needed; they may be missing if it is not."""
        if self._block_first >= self._stop:
            return end - at  # Nothing more is needed.
        header = read_batch(data, at, end, seed, False, passed_columns)
        if isinstance(header, int):
            return header
        if not self._wants_batch(data, at, header):
            self._passed.add(at)
            return header
        if not (values and self._interest.values):
            return header
        stop = at + header.total_bytes
        if stop > end:
            return header.total_bytes
        values_at = at + BATCH_HEADER_BYTES + (header.columns_stored + 7 & -8)
        if crc32c(data[values_at:stop], seed) != header.values_checksum:
            raise BadBatch("values fail their checksum")
        return header

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


TIMESTAMP_LOW_NS: Final = -(2**63)
TIMESTAMP_HIGH_NS: Final = 2**63 - 1


class Projection(Struct, frozen=True):
    """Messages of these sessions and topics (None: all), and of these timestamps, both ends included.

    Without `values` the values are neither read nor verified, and are empty in the result.
    """

    values: bool = True
    sessions: frozenset[str] | None = None
    topics: frozenset[str] | TopicPatterns | None = None
    timestamp_low_ns: int = TIMESTAMP_LOW_NS
    timestamp_high_ns: int = TIMESTAMP_HIGH_NS

    @property
    def is_of_batches(self) -> bool:
        """Whether every batch of an included session is needed."""
        is_timeless = (self.timestamp_low_ns, self.timestamp_high_ns) == (TIMESTAMP_LOW_NS, TIMESTAMP_HIGH_NS)
        return is_timeless and self.topics is None

    @property
    def is_nothing(self) -> bool:
        """Whether no message can match."""
        none = frozenset[str]()
        return self.timestamp_low_ns > self.timestamp_high_ns or none in {self.sessions, self.topics}

    def wants_session(self, session: str) -> bool:
        return self.sessions is None or session in self.sessions

    def wants_times(self, low_ns: int, high_ns: int) -> bool:
        return low_ns <= self.timestamp_high_ns and high_ns >= self.timestamp_low_ns

    def wants_topics(self, topics: list[str]) -> bool:
        return self.topics is None or any(topic in self.topics for topic in topics)


EVERYTHING: Final = Projection()
