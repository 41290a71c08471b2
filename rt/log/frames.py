"""Walking a segment: which bytes are whole, verified batches.

Law: a scanner goes from frame to frame by their lengths and stops at the first one that is not whole or does
not verify; it never looks for a magic number further on. What to make of the stop (wait, cut, raise) is the
caller's to decide, with the durable end in hand (`rt.log.recovery`).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from rt.log.batch import BATCH_HEADER_BYTES, HEADER, BadBatch, BatchHeader, check_header
from rt.log.block import (
    BLOCK_HEADER_BYTES,
    BadBlock,
    BlockHeader,
    BlockKind,
    Declaration,
    decode_block_header,
    decode_declaration,
)
from rt.log.checksum import batch_seed, crc32c, segment_seed
from rt.log.columns import Placed
from rt.log.layout import padded
from rt.log.segment import SEGMENT_HEADER_BYTES, Kind, SegmentHeader


@dataclass(slots=True)
class Scan:
    """What one look at a buffer found.

    `consumed` bytes from the buffer's start are good. Then comes the end of the buffer; or a frame that needs
    `needed` bytes, more than there are; or one that is bad, as `problem` says.
    """

    batches: list[Placed] = field(default_factory=list)
    consumed: int = 0
    needed: int = 0
    problem: str | None = None


class SessionScanner:
    """Walks the batches of one session segment.

    `offset` is where the next batch must start, `next` the number it must have; `boundary` equals `offset`.
    """

    def __init__(
        self, header: SegmentHeader, *, offset: int = SEGMENT_HEADER_BYTES, first: int | None = None
    ) -> None:
        self.offset = offset
        self.next = header.first if first is None else first
        self._seed = header.seed

    @property
    def boundary(self) -> int:
        """Where the segment may be cut: behind the last whole frame."""
        return self.offset

    def scan(self, data: memoryview, *, values: bool = True) -> Scan:
        """Walk the batches in `data`, which starts at `offset`; `values=False` leaves values unchecked."""
        found = Scan()
        at, end = 0, len(data)
        while at < end:
            try:
                header = read_batch(data, at, end, batch_seed(self._seed, self.offset + at), values=values)
                if isinstance(header, int):
                    found.needed = header
                    break
                if header.first != self.next:
                    raise BadBatch(f"number {header.first} where {self.next} must follow")
            except BadBatch as problem:
                found.problem = str(problem)
                break
            found.batches.append(Placed(at, header, header.first, 0, 0, self.offset + at))
            self.next = header.first + header.message_count
            at += header.total_bytes
        found.consumed = at
        self.offset += at
        return found


class MergedScanner:
    """Walks the blocks, and the batches in them, of one merged (or filtered) segment.

    `offset` is where the next batch or block must start and `next` the position that must follow; `boundary`
    is the start of the block that is not whole yet. `sessions` are the declarations met; a scanner that
    starts behind the first block is given those of the blocks before it. In a filtered log positions may
    jump forward between blocks.
    """

    def __init__(
        self,
        header: SegmentHeader,
        *,
        offset: int = SEGMENT_HEADER_BYTES,
        first: int | None = None,
        sessions: dict[int, Declaration] | None = None,
    ) -> None:
        self.offset = offset
        self.next = header.first if first is None else first
        self.boundary = offset
        self.sessions = dict(sessions or {})
        self.last_block: BlockHeader | None = None
        self._dense = header.kind is not Kind.FILTERED
        self._block: BlockHeader | None = None
        self._block_end = 0
        self._block_first = 0
        self._seed = 0

    def scan(self, data: memoryview, *, values: bool = True) -> Scan:
        """Walk the blocks in `data`, which starts at `offset`; `values=False` leaves values unchecked."""
        found = Scan()
        end = len(data)
        start = self.offset
        while found.consumed < end and not found.needed:
            try:
                if self._block is None:
                    self._enter_block(data, found)
                else:
                    self._read_batches(data, found, self._block, values=values)
            except (BadBatch, BadBlock) as problem:
                found.problem = str(problem)
                break
            finally:
                self.offset = start + found.consumed
        return found

    def _enter_block(self, data: memoryview, found: Scan) -> None:
        at = found.consumed
        if len(data) - at < BLOCK_HEADER_BYTES:
            found.needed = BLOCK_HEADER_BYTES
            return
        header = decode_block_header(data, at)
        if header.first_position != self.next and (self._dense or header.first_position < self.next):
            raise BadBlock(f"position {header.first_position} where {self.next} must follow")
        if header.kind == BlockKind.DECLARATION:
            whole = BLOCK_HEADER_BYTES + header.length_bytes
            if len(data) - at < whole:
                found.needed = whole
                return
            self.sessions[header.session_id] = decode_declaration(
                header, data[at + BLOCK_HEADER_BYTES : at + whole]
            )
            found.consumed += whole
            self.boundary += whole
            self.last_block = header
            return
        if header.session_id not in self.sessions:
            raise BadBlock(f"session id {header.session_id} is not declared")
        if header.length_bytes == 0:
            raise BadBlock("a block without a batch")
        found.consumed += BLOCK_HEADER_BYTES
        self._block = header
        self._block_end = self.boundary + BLOCK_HEADER_BYTES + header.length_bytes
        self._block_first = header.first_position - header.skip
        incarnation = self.sessions[header.session_id].incarnation
        self._seed = segment_seed(incarnation, header.source_x, header.source_y)

    def _read_batches(self, data: memoryview, found: Scan, block: BlockHeader, *, values: bool) -> None:
        at = found.consumed
        base = self.offset - at
        left = self._block_end - self.offset
        end = min(len(data), at + left)
        source = block.source_offset + block.length_bytes - left
        while at < end:
            header = read_batch(data, at, end, batch_seed(self._seed, source), values=values)
            if isinstance(header, int):
                if header > self._block_end - (base + at):
                    raise BadBatch("a batch reaches beyond its block")
                found.needed = header
                return
            self._place(found, header, block, start=at, offset=base + at)
            at += header.total_bytes
            source += header.total_bytes
            found.consumed = at
        if base + at == self._block_end:
            self.next = block.end
            self.boundary = self._block_end
            self.last_block = block
            self._block = None

    def _place(
        self, found: Scan, header: BatchHeader, block: BlockHeader, *, start: int, offset: int
    ) -> None:
        end = self._block_first + header.message_count
        is_last = offset + header.total_bytes == self._block_end
        if end > block.end or (is_last and end != block.end):
            raise BadBlock(f"batches end at position {end}, their block says {block.end}")
        skip = min(max(block.first_position - self._block_first, 0), header.message_count)
        found.batches.append(Placed(start, header, self._block_first, skip, block.session_id, offset))
        self._block_first = end


Scanner = SessionScanner | MergedScanner


def scanner_for(header: SegmentHeader) -> Scanner:
    """The scanner that walks a segment with this header from its start."""
    return SessionScanner(header) if header.kind is Kind.SESSION else MergedScanner(header)


def read_batch(data: memoryview, at: int, end: int, seed: int, *, values: bool) -> BatchHeader | int:
    """Verify the batch at `at`; the bytes it needs, if `data` does not hold it whole before `end`.

    `BadBatch` if it does not verify. Without `values` their checksum is not looked at.
    """
    if end - at < BATCH_HEADER_BYTES:
        return BATCH_HEADER_BYTES
    header = BatchHeader._make(HEADER.unpack_from(data, at))
    check_header(header)
    if end - at < header.total_bytes:
        return header.total_bytes
    values_at = at + BATCH_HEADER_BYTES + padded(header.columns_stored)
    if crc32c(data[at + 8 : values_at], seed) != header.checksum:
        raise BadBatch("columns fail their checksum")
    if values and crc32c(data[values_at : at + header.total_bytes], seed) != header.values_checksum:
        raise BadBatch("values fail their checksum")
    return header
