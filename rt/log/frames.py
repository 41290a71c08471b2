"""Walking a segment: which bytes are whole, verified batches.

Law: a scanner goes from frame to frame by their lengths and stops at the first one that is not whole or does
not verify; it never looks for a magic number further on. What to make of the stop (wait, cut, raise) is the
caller's to decide, with the durable end in hand (`rt.log.recovery`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple, Self

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
from rt.log.chain import Mark, chain_behind, chain_of_segment, merged_chain
from rt.log.checksum import batch_seed, crc32c, segment_seed
from rt.log.columns import Placed, PlacedRun
from rt.log.segment import SEGMENT_HEADER_BYTES, Kind, SegmentHeader, encode_segment_header

_new = tuple.__new__
"""A named tuple from a tuple, at a third of the cost of calling its class; there is one for each batch."""


class PlacedBlock(NamedTuple):
    """A block header that verifies, at its offset in its segment; of a declaration, its content does too."""

    offset: int
    header: BlockHeader


@dataclass(slots=True)
class Scan:
    """What one look at a buffer found.

    `consumed` bytes from the buffer's start are good. Then comes the end of the buffer; or a frame that
    needs `needed` bytes, more than there are; or one that is bad, as `problem` says. `blocks` are those that
    begin in the buffer (merged), `marks` the boundaries behind `batches` (session, if they are asked for).
    `items` are what a scanner that looks at several batches at once gives instead of `batches`.
    """

    batches: list[Placed] = field(default_factory=list)
    consumed: int = 0
    needed: int = 0
    problem: str | None = None
    blocks: list[PlacedBlock] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    items: list[Placed | PlacedRun] = field(default_factory=list)


class _Copied:
    """Has shallow copies that cost a microsecond: receivers make one for each chunk."""

    def __copy__(self) -> Self:
        twin = object.__new__(type(self))
        twin.__dict__.update(self.__dict__)
        return twin


class SessionScanner(_Copied):
    """Walks the batches of one session segment.

    `offset` is where the next batch must start, `next` the number it must have; `boundary` equals `offset`.
    With `marks` each scan carries those behind its batches, and `chain` is the segment's chain at `offset`: a
    scanner that starts behind the first batch is given it.
    """

    def __init__(
        self,
        header: SegmentHeader,
        *,
        offset: int = SEGMENT_HEADER_BYTES,
        first: int | None = None,
        marks: bool = False,
        chain: int | None = None,
    ) -> None:
        self.offset = offset
        self.next = header.first if first is None else first
        self._seed = header.seed
        self._marks = marks
        if marks and chain is None:
            if offset != SEGMENT_HEADER_BYTES:
                raise ValueError(f"marks from offset {offset} on need the chain there")
            chain = chain_of_segment(encode_segment_header(header))
        self.chain = chain

    @property
    def boundary(self) -> int:
        """Where the segment may be cut: behind the last whole frame."""
        return self.offset

    def scan(self, data: memoryview, *, values: bool = True) -> Scan:
        """Walk the batches in `data`, which starts at `offset`; `values=False` leaves values unchecked."""
        found = Scan()
        batches, seed, base, following = found.batches, self._seed, self.offset, self.next
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
                batches.append(_new(Placed, (at, header, first, 0, 0, base + at)))
                following = first + header.message_count
                at += header.total_bytes
        except BadBatch as problem:
            found.problem = str(problem)
        found.consumed = at
        if self._marks:
            self._mark(found, data)
        self.offset, self.next = base + at, following
        return found

    def _mark(self, found: Scan, data: memoryview) -> None:
        chain, note = self.chain, found.marks.append
        assert chain is not None
        for start, header, first, _, _, offset in found.batches:
            _, _, total_bytes, _, _, _, count, _, low_ns, high_ns, *_ = header
            chain = chain_behind(chain, data[start : start + BATCH_HEADER_BYTES])
            note(_new(Mark, (offset + total_bytes, first + count, chain, low_ns, high_ns)))
        self.chain = chain


class MergedScanner(_Copied):
    """Walks the blocks, and the batches in them, of one merged (or filtered) segment.

    `offset` is where the next batch or block must start and `next` the position that must follow; `boundary`
    is the start of the block that is not whole yet. `sessions` are the declarations met; a scanner that
    starts behind the first block is given those of the blocks before it. In a filtered log positions may
    jump forward between blocks.

    With `chain`, the merged chain at `offset`, the chains that blocks state are verified against the headers
    of their batches, and `chain` is the merged chain at `boundary`; else both are left out.
    """

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
        self._dense = header.kind is not Kind.FILTERED
        self._block: BlockHeader | None = None
        self._block_end = 0
        self._block_first = 0
        """The position that the next batch's message 0 has, were it not skipped."""
        self._number: int | None = None
        """The number that must follow in the block; None before its first batch."""
        self._seed = 0
        self._source_chain = 0
        """The chain of the source at `offset`, while a block is open and chains are verified."""
        self._chain_behind = 0
        """The merged chain behind the open block."""

    @property
    def instruction(self) -> int | None:
        """The number of the instruction that the last whole block belongs to; None before the first."""
        return None if self.last_block is None else self.last_block.instruction

    @property
    def reached(self) -> int:
        """One past the last position that was walked, also within a block."""
        return self.next if self._block is None else max(self._block_first, self._block.first_position)

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
                    self._read_batches(data, found, self._block, values)
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
            self._chain_behind = merged_chain(self.chain, data[at : at + BLOCK_HEADER_BYTES])
        self._block = header
        self._block_end = self.boundary + BLOCK_HEADER_BYTES + header.length_bytes
        self._block_first = header.first_position - header.skip
        self._number = None
        incarnation = self.sessions[header.session_id].incarnation
        self._seed = segment_seed(incarnation, header.source_x, header.source_y)

    def _declare(self, data: memoryview, found: Scan, header: BlockHeader) -> None:
        at, whole = found.consumed, BLOCK_HEADER_BYTES + header.length_bytes
        if len(data) - at < whole:
            found.needed = whole
            return
        content = data[at + BLOCK_HEADER_BYTES : at + whole]
        declared = decode_declaration(header, content)
        if self.sessions.setdefault(header.session_id, declared) != declared:
            raise BadBlock(f"session id {header.session_id} stands for two sessions")
        found.blocks.append(_new(PlacedBlock, (self.boundary, header)))
        found.consumed += whole
        self.boundary += whole
        if self.chain is not None:
            self.chain = merged_chain(self.chain, data[at : at + BLOCK_HEADER_BYTES], content)
        self.last_block = header

    def _read_batches(self, data: memoryview, found: Scan, block: BlockHeader, values: bool) -> None:
        at = found.consumed
        base = self.offset - at
        stop = self._block_end - base
        source = block.source_offset + block.length_bytes - stop
        end = min(len(data), stop)
        while at < end:
            header = read_batch(data, at, end, batch_seed(self._seed, source + at), values)
            if isinstance(header, int):
                if header > stop - at:
                    raise BadBatch("a batch reaches beyond its block")
                found.needed = header
                return
            chain = self._chain_at(data, at)
            self._hand_out(found, block, header, at, base, chain)
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
            self.chain = self._chain_behind

    def _chain_at(self, data: memoryview, at: int) -> int:
        """The source's chain behind the batch at `at`, if chains are verified."""
        if self.chain is None:
            return 0
        return chain_behind(self._source_chain, data[at : at + BATCH_HEADER_BYTES])

    def _hand_out(
        self, found: Scan, block: BlockHeader, header: BatchHeader, at: int, base: int, chain: int
    ) -> None:
        number, first, count = header.first, self._block_first, header.message_count
        if number != self._number and self._number is not None:
            raise BadBatch(f"number {number} where {self._number} must follow")
        is_last = base + at + header.total_bytes == self._block_end
        if first + count > block.end or (is_last and first + count != block.end):
            raise BadBlock(f"batches end at position {first + count}, their block says {block.end}")
        if is_last and self.chain is not None and chain != block.chain_end:
            raise BadBlock(
                f"batches lead to the chain {chain:#010x}, their block says {block.chain_end:#010x}"
            )
        skip = min(max(block.first_position - first, 0), count)
        found.batches.append(_new(Placed, (at, header, first, skip, block.session_id, base + at)))
        self._block_first, self._number = first + count, number + count


Scanner = SessionScanner | MergedScanner


def scanner_for(header: SegmentHeader) -> Scanner:
    """The scanner that walks a segment with this header from its start."""
    return SessionScanner(header) if header.kind is Kind.SESSION else MergedScanner(header)


def read_batch(data: memoryview, at: int, end: int, seed: int, values: bool) -> BatchHeader | int:
    """Verify the batch at `at`; the bytes it needs, if `data` does not hold it whole before `end`.

    `BadBatch` if it does not verify. Without `values` their checksum is not looked at.
    """
    if end - at < BATCH_HEADER_BYTES:
        return BATCH_HEADER_BYTES
    fields = HEADER.unpack_from(data, at)
    check_header(fields)
    header = _new(BatchHeader, fields)
    stop = at + header.total_bytes
    if stop > end:
        return header.total_bytes
    values_at = at + BATCH_HEADER_BYTES + (header.columns_stored + 7 & -8)
    if crc32c(data[at + 8 : values_at], seed) != header.checksum:
        raise BadBatch("columns fail their checksum")
    if values and crc32c(data[values_at:stop], seed) != header.values_checksum:
        raise BadBatch("values fail their checksum")
    return header
