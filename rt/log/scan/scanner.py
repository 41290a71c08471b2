"""Scan a segment for complete, verified batches.

A scanner goes from frame to frame by their lengths and stops at the first one that is incomplete or bad. It
never searches for a later magic number. The caller decides what the stop means (wait, cut, raise), with the
durable end (`rt.log.write.recovery_checks`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from copy import copy
from typing import NamedTuple, Self

from msgspec import Struct, field

from rt.log.format.batch import BATCH_HEADER_BYTES, HEADER, BadBatch, BatchHeader, check_header
from rt.log.format.block import (
    BLOCK_HEADER_BYTES,
    BadBlock,
    BlockHeader,
    BlockKind,
    Declaration,
    decode_block_header,
    decode_declaration,
)
from rt.log.format.checksum import batch_seed, crc32c, segment_seed
from rt.log.format.constants import NUMBER_MAX
from rt.log.format.running_checksum import (
    CONTENT_START,
    ChecksummedBoundary,
    chain_after,
    chain_of_segment,
    merged_chain,
)
from rt.log.format.segment import SEGMENT_HEADER_BYTES, LogKind, SegmentHeader, encode_segment_header
from rt.log.scan.placed_batches import PlacedBatch, PlacedRun

_new = tuple.__new__
"""Makes a named tuple from a tuple, at a third of the cost of its class; there is one per batch."""


class PlacedBlock(NamedTuple):
    """A verified block header at its offset in its segment. A declaration's content is verified too."""

    offset: int
    header: BlockHeader


class ScanResult(Struct):
    """The result of scanning a buffer.

    The first `consumed` bytes are good. After them the buffer ends, or a frame follows that is incomplete
    (`needed` is its size) or bad (`problem` is the reason). `blocks` are the blocks that start in the buffer
    (merged logs). `marks` are the boundaries after each of `batches` (session logs, if requested). A scanner
    that verifies several batches at once returns `items` instead of `batches`. `is_message`: the problem is
    in a batch with valid checksums; only receivers check for such problems.
    """

    batches: list[PlacedBatch] = field(default_factory=list)
    consumed: int = 0
    needed: int = 0
    problem: str | None = None
    blocks: list[PlacedBlock] = field(default_factory=list)
    marks: list[ChecksummedBoundary] = field(default_factory=list)
    items: list[PlacedBatch | PlacedRun] = field(default_factory=list)
    is_message: bool = False


def read_batch(
    data: memoryview, at: int, end: int, seed: int, values: bool, passed_columns: int | None = None
) -> BatchHeader | int:
    """Verify the batch at `at`. Returns the number of bytes that the batch needs if it is incomplete before
    `end`.

    Raises `BadBatch` if the batch does not verify. Without `values`, the checksum of the values is not
    verified. With `passed_columns`, the values may be missing. Columns larger than `passed_columns` may be
    missing too; then they are not verified.
    """
    if end - at < BATCH_HEADER_BYTES:
        return BATCH_HEADER_BYTES
    fields = HEADER.unpack_from(data, at)
    check_header(fields)
    header = _new(BatchHeader, fields)
    stop = at + header.total_bytes
    values_at = at + BATCH_HEADER_BYTES + (header.columns_stored + 7 & -8)
    if stop > end and passed_columns is not None and header.columns_stored > passed_columns:
        return header
    if stop > end and (passed_columns is None or values_at > end):
        return (stop if passed_columns is None else values_at) - at
    if crc32c(data[at + 8 : values_at], seed) != header.checksum:
        raise BadBatch("columns fail their checksum")
    if values and crc32c(data[values_at:stop], seed) != header.values_checksum:
        raise BadBatch("values fail their checksum")
    return header


def in_order(
    blocks: Iterable[PlacedBlock], batches: Iterable[PlacedBatch]
) -> Iterator[PlacedBlock | PlacedBatch]:
    """The blocks and batches of a scan, ordered by offset: each block before its batches."""
    waiting = deque(blocks)
    for batch in batches:
        while waiting and waiting[0].offset < batch.offset:
            yield waiting.popleft()
        yield batch
    yield from waiting


class _CopiedBlock:
    """Makes shallow copies cheap (a microsecond): receivers make one for each chunk."""

    def __copy__(self) -> Self:
        twin = object.__new__(type(self))
        twin.__dict__.update(self.__dict__)
        return twin


class SessionScanner(_CopiedBlock):
    """Scans the batches of one session segment.

    The next batch must start at `offset` with number `next`. With `marks`, each scan has the boundaries after
    its batches. `chain` and `content` are then the segment's running checksum and content checksum at
    `offset`. A scanner that starts after the first batch needs both.
    """

    def __init__(
        self,
        header: SegmentHeader,
        *,
        offset: int = SEGMENT_HEADER_BYTES,
        first: int | None = None,
        marks: bool = False,
        chain: int | None = None,
        content: int = CONTENT_START,
    ) -> None:
        self.offset = offset
        self.next = header.first if first is None else first
        self._seed = header.seed
        self._run = header.id.run
        self._marks = marks
        if marks and chain is None:
            if offset != SEGMENT_HEADER_BYTES:
                raise ValueError(f"marks from offset {offset} on: the chain there is missing")
            chain = chain_of_segment(encode_segment_header(header))
        self.chain = chain
        self.content = content

    @property
    def boundary(self) -> int:
        """Where the segment may be cut: after the last complete frame."""
        return self.offset

    def scan(self, data: memoryview, *, values: bool = True) -> ScanResult:
        """Scan the batches in `data`, which starts at `offset`; `values=False` leaves values unchecked."""
        found = ScanResult()
        batches, seed, base, following = found.batches, self._seed, self.offset, self.next
        run = self._run
        at, end = 0, len(data)
        try:
            while at < end:
                header = read_batch(data, at, end, batch_seed(seed, base + at), values)
                if isinstance(header, int):
                    found.needed = header
                    break
                first = header.first
                if first != following:
                    raise BadBatch(f"number {first} where {following} must follow")
                batches.append(_new(PlacedBatch, (at, header, first, 0, 0, run, base + at)))
                following = first + header.message_count
                at += header.total_bytes
        except BadBatch as problem:
            found.problem = str(problem)
        found.consumed = at
        if self._marks:
            self._mark(found, data)
        self.offset, self.next = base + at, following
        return found

    def _mark(self, found: ScanResult, data: memoryview) -> None:
        chain, content, add = self.chain, self.content, found.marks.append
        assert chain is not None
        for start, header, first, _, _, _, offset in found.batches:
            _, _, total_bytes, _, _, _, count, _, low_ns, high_ns, *_ = header
            chain = chain_after(chain, data[start : start + BATCH_HEADER_BYTES])
            content = crc32c(data[start : start + total_bytes], content)
            add(
                _new(
                    ChecksummedBoundary,
                    (offset + total_bytes, first + count, chain, low_ns, high_ns, content),
                )
            )
        self.chain, self.content = chain, content


class MergedScanner(_CopiedBlock):
    """Scans the blocks, and their batches, of one merged (or filtered) segment.

    The next batch or block must start at `offset`, and the next position is `next`; `boundary` is the start
    of the incomplete block. `sessions` are the declarations so far; a scanner that starts after the first
    block needs the earlier declarations. In a filtered log positions may jump forward between blocks.

    `chain` is the merged running checksum at `offset`. If it is given, the running checksums in blocks are
    verified against the headers of their batches, and `chain` becomes the merged running checksum at
    `boundary`.
    """

    _read_batch = staticmethod(read_batch)

    def __init__(
        self,
        header: SegmentHeader,
        *,
        offset: int = SEGMENT_HEADER_BYTES,
        first: int | None = None,
        sessions: dict[int, Declaration] | None = None,
        chain: int | None = None,
    ) -> None:
        self.chain = chain
        self.offset = offset
        self.next = header.first if first is None else first
        self.boundary = offset
        self.sessions = dict(sessions or {})
        self.last_block: BlockHeader | None = None
        self._place = header.seed
        self._dense = header.kind is not LogKind.FILTERED
        self._block: BlockHeader | None = None
        self._block_end = 0
        self._block_first = 0
        """The position of the next batch's message 0, as if it was not skipped."""
        self._number: int | None = None
        """The next number in the block; None before its first batch."""
        self._seed = 0
        self._source_chain = 0
        """The source's running checksum at `offset`, while a block is open and running checksums are
        verified.
        """
        self._chain_after = 0
        """The merged running checksum after the open block."""
        self._passed_columns: int | None = None
        """In `scan_columns`: the values of the last batch may be missing, and its columns too if they are
        above this size.
        """

    @property
    def reached(self) -> int:
        """One past the last scanned position, also within a block."""
        return self.next if self._block is None else max(self._block_first, self._block.first_position)

    def scan_columns(
        self, data: memoryview, reaches: Callable[[int], bool], *, columns_bytes_max: int = 2**32
    ) -> ScanResult:
        """Scan as `scan` does, but without values. They may be missing from `data`, so the scan may end after
        the end of `data`.

        `reaches(offset)` returns whether the segment is at least that long, so that an incomplete batch is
        not skipped. A batch with stored columns above `columns_bytes_max` is skipped by its header only; the
        caller has verified it before.
        """
        before = copy(self)
        self._passed_columns = columns_bytes_max
        found = self.scan(data, values=False)
        self._passed_columns = None
        if found.consumed > len(data) and not reaches(self.offset):
            self.__dict__.update(before.__dict__)
            found = self.scan(data, values=False)
        return found

    def scan(self, data: memoryview, *, values: bool = True) -> ScanResult:
        """Scan the blocks in `data`, which starts at `offset`; `values=False` leaves values unchecked."""
        found = ScanResult()
        end = len(data)
        start = self.offset
        while found.consumed < end and not found.needed:
            try:
                if self._block is None:
                    self._enter_block(data, found)
                else:
                    self._read_batches(data, found, self._block, values)
            except (BadBatch, BadBlock) as problem:
                found.problem = str(problem)
                break
            finally:
                self.offset = start + found.consumed
        return found

    def _enter_block(self, data: memoryview, found: ScanResult) -> None:
        at = found.consumed
        if len(data) - at < BLOCK_HEADER_BYTES:
            found.needed = BLOCK_HEADER_BYTES
            return
        header = decode_block_header(data, at, batch_seed(self._place, self.boundary))
        if header.first_position != self.next and (self._dense or header.first_position < self.next):
            raise BadBlock(f"position {header.first_position} where {self.next} must follow")
        if header.kind == BlockKind.DECLARATION:
            self._declare(data, found, header)
            return
        if header.session_id not in self.sessions:
            raise BadBlock(f"session id {header.session_id} is not declared")
        if header.length_bytes == 0:
            raise BadBlock("a block without a batch")
        found.blocks.append(_new(PlacedBlock, (self.boundary, header)))
        found.consumed += BLOCK_HEADER_BYTES
        if self.chain is not None:
            self._source_chain = header.chain_start
            self._chain_after = merged_chain(self.chain, data[at : at + BLOCK_HEADER_BYTES])
        self._block = header
        self._block_end = self.boundary + BLOCK_HEADER_BYTES + header.length_bytes
        self._block_first = header.first_position - header.skip
        self._number = None
        incarnation = self.sessions[header.session_id].incarnation
        self._seed = segment_seed(incarnation, header.source_run, header.source_roll)

    def _declare(self, data: memoryview, found: ScanResult, header: BlockHeader) -> None:
        at, whole = found.consumed, BLOCK_HEADER_BYTES + header.length_bytes
        if len(data) - at < whole:
            found.needed = whole
            return
        content = data[at + BLOCK_HEADER_BYTES : at + whole]
        declared = decode_declaration(header, content)
        if self.sessions.setdefault(header.session_id, declared) != declared:
            raise BadBlock(f"session id {header.session_id} is declared for two sessions")
        found.blocks.append(_new(PlacedBlock, (self.boundary, header)))
        found.consumed += whole
        self.boundary += whole
        if self.chain is not None:
            self.chain = merged_chain(self.chain, data[at : at + BLOCK_HEADER_BYTES], content)
        self.last_block = header

    def _read_batches(
        self, data: memoryview, found: ScanResult, block: BlockHeader, values: bool, until: int = NUMBER_MAX
    ) -> None:
        """Read the batches of the open block that start before the offset `until`."""
        at, read = found.consumed, self._read_batch
        base = self.offset - at
        stop = self._block_end - base
        source = block.source_offset + block.length_bytes - stop
        end = min(len(data), stop)
        last = min(end, until - base)
        while at < last:
            seed = batch_seed(self._seed, source + at)
            header = read(data, at, end, seed, values, self._passed_columns)
            needed = header if isinstance(header, int) else header.total_bytes
            if needed > stop - at:
                raise BadBatch("a batch ends after its block")
            if isinstance(header, int):
                found.needed = header
                return
            chain = 0
            if self.chain is not None:
                chain = chain_after(self._source_chain, data[at : at + BATCH_HEADER_BYTES])
            self._add(found, block, header, at, base, chain)
            self._source_chain = chain
            at += header.total_bytes
            found.consumed = at
        if at == stop:
            self._leave_block(block)

    def _leave_block(self, block: BlockHeader) -> None:
        self.next = block.end
        self.boundary = self._block_end
        self.last_block = block
        self._block = None
        if self.chain is not None:
            self.chain = self._chain_after

    def _add(
        self, found: ScanResult, block: BlockHeader, header: BatchHeader, at: int, base: int, chain: int
    ) -> None:
        number, first, count = header.first, self._block_first, header.message_count
        if number != self._number and self._number is not None:
            raise BadBatch(f"number {number} where {self._number} must follow")
        is_last = base + at + header.total_bytes == self._block_end
        if first + count > block.end or (is_last and first + count != block.end):
            raise BadBlock(f"batches end at position {first + count}, their block at {block.end}")
        if is_last and self.chain is not None and chain != block.chain_end:
            raise BadBlock(
                f"batches lead to the chain {chain:#010x}, their block has {block.chain_end:#010x}"
            )
        skip = min(max(block.first_position - first, 0), count)
        placed = (at, header, first, skip, block.session_id, block.source_run, base + at)
        found.batches.append(_new(PlacedBatch, placed))
        self._block_first, self._number = first + count, number + count


Scanner = SessionScanner | MergedScanner


def scanner_for(header: SegmentHeader) -> Scanner:
    return SessionScanner(header) if header.kind is LogKind.SESSION else MergedScanner(header)
