"""A filtered log, made from a merged log while it is sent: only the batches that may hold a selected topic.

Invariants:
- No batch with a selected topic is left out. A batch passes as a whole or not at all; readers filter its
  messages. So messages of other topics pass too: if the batch also has other topics, or if its columns are
  too large or cannot be read.
- Each batch that passes becomes a block of its own, with its true positions, skipped messages and running
  checksums, in a segment of the same name. So the bytes depend only on the merged log, the topics and the
  receiver's start.
- The receiver learns up to which position it has everything, also if nothing passes (`CompleteUpTo`).
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from replicator.protocol.column_check import BadColumns, columns_of, dictionary_of, topics_in
from replicator.protocol.messages import (
    CHUNK_BYTES_MAX,
    Chunk,
    CompleteUpTo,
    Item,
    LogOffset,
    LogTrimmed,
    SegmentSealed,
)
from rt.errors import Corrupt
from rt.log.format.batch import BATCH_HEADER_BYTES, BatchHeader
from rt.log.format.block import (
    BLOCK_HEADER_BYTES,
    BlockHeader,
    BlockKind,
    encode_block_header,
    encode_declaration,
)
from rt.log.format.checksum import batch_seed
from rt.log.format.constants import Buffer
from rt.log.format.running_checksum import chain_after
from rt.log.format.segment import (
    SEGMENT_HEADER_BYTES,
    LogKind,
    SegmentHeader,
    decode_segment_header,
    encode_segment_header,
)
from rt.log.read.topic_patterns import TopicPatterns
from rt.log.scan.placed_batches import PlacedBatch
from rt.log.scan.scanner import MergedScanner, PlacedBlock, ScanResult, in_order

COLUMNS_BYTES_MAX: Final = 512 * 1024
"""A batch with larger columns passes with any topics: no more bytes of a batch are kept in memory."""


class TopicFilter:
    def __init__(self, topics: Collection[str]) -> None:
        self._topics = TopicPatterns(topics)
        self._names = frozenset(name.encode() for name in self._topics.names)

    def passes(self, header: BatchHeader, batch: memoryview) -> bool:
        """Whether `batch` may hold a selected topic. It must have valid checksums.

        `batch` may end before the values, and before the columns if they are above `COLUMNS_BYTES_MAX`.
        """
        if header.columns_stored > COLUMNS_BYTES_MAX:
            return True
        try:
            columns = columns_of(header, batch)
            if columns is None:
                return True
            topics = topics_in(dictionary_of(header, columns), header.topic_count)
        except BadColumns:
            return True
        if not self._names.isdisjoint(topics):
            return True
        return self._topics.has_wildcards and any(topic.decode() in self._topics for topic in topics)


class FilteredScan:
    """Turns the items of a merged log into those of a filtered one, for one receiver.

    The items start at the scanner's offset, or with a segment's header if `scanner` is None. `header` is the
    header of the scanner's segment. The receiver has everything below position `end`, in filtered segments up
    to `offset` (None: nothing yet).
    """

    def __init__(
        self,
        topics: Collection[str],
        *,
        scanner: MergedScanner | None,
        header: SegmentHeader | None,
        offset: LogOffset | None,
        end: int,
    ) -> None:
        assert (scanner is None) == (header is None)
        self._filter = TopicFilter(topics)
        self._scanner = scanner
        self._header = header
        self._next_offset = offset
        self._end = end  # Everything below it that passes was returned.
        self._reported_end = end  # The last `_end` that the receiver learns from the items so far.
        self._declared: set[int] = set()  # Session ids that this object declared in this segment.
        self._partial = bytearray()  # The start of a header or batch that is not decided yet.
        self._needed = 0  # How many bytes of it the scanner needs.
        self._chunk_bytes = CHUNK_BYTES_MAX
        self._pass_bytes = 0  # The number of next bytes that belong to the last decided batch.
        self._is_passing = False  # Whether that batch passes.
        self._block: PlacedBlock | None = None
        self._block_chain = 0  # The source's running checksum before the next batch of that block.

    @classmethod
    def within(
        cls, topics: Collection[str], scanner: MergedScanner, header: SegmentHeader, end: int
    ) -> tuple[Chunk, FilteredScan]:
        """Return a scan for a receiver that has nothing and starts in the middle of a segment, at position
        `end`.

        `scanner` must be at that position. Also return the header of the filtered segment, to be sent first.
        """
        segment = Chunk(LogOffset(*header.id, 0), encode_segment_header(_filtered(header)))
        return segment, cls(topics, scanner=scanner, header=header, offset=segment.end, end=end)

    def items(self, found: list[Item], *, chunk_bytes: int = CHUNK_BYTES_MAX) -> list[Item]:
        """Filter the next items of the merged log. If nothing passes, return the position up to which it is
        complete.
        """
        self._chunk_bytes = chunk_bytes
        made: list[Item] = []
        for item in found:
            match item:
                case Chunk():
                    self._handle_chunk(item, made)
                case SegmentSealed():
                    self._handle_sealed(item, made)
                case LogTrimmed():
                    made.append(item)
                case _:
                    raise AssertionError(item)
        if not made and self._end > self._reported_end and self._next_offset is not None:
            made.append(self.complete())
        return made

    def complete(self) -> CompleteUpTo:
        """The position up to which the items so far hold everything that passes. The last batch that passes
        must be whole.
        """
        self._reported_end = self._end
        return CompleteUpTo(self._end)

    def _handle_chunk(self, chunk: Chunk, made: list[Item]) -> None:
        data: Buffer = chunk.data
        if chunk.start.offset == 0:
            self._start_segment(decode_segment_header(data, path=chunk.start.segment.file_name), made)
            data = memoryview(data)[SEGMENT_HEADER_BYTES:]
        scanner = self._scanner
        assert scanner is not None
        if self._pass_bytes:
            passed = memoryview(data)[: self._pass_bytes]
            self._pass_bytes -= len(passed)
            if self._is_passing:
                self._emit([passed], made)
            data = memoryview(data)[len(passed) :]
        if self._partial:
            self._partial += data
            data = self._partial
        if len(data) < self._needed or not data:
            self._partial = data if isinstance(data, bytearray) else bytearray(data)
            return
        view = memoryview(data)
        # A sender sends whole blocks, in chunks. So the rest of a block that is incomplete at the end of this
        # chunk comes next.
        scan = scanner.scan_columns(view, lambda _: True, columns_bytes_max=COLUMNS_BYTES_MAX)
        if scan.problem is not None:
            raise Corrupt(scan.problem, path=chunk.start.segment.file_name, offset=scanner.offset)
        self._partial, self._needed = bytearray(view[scan.consumed :]), scan.needed
        self._pass_bytes, self._is_passing = max(scan.consumed - len(view), 0), False
        pieces = self._passing(scan, view, scanner)
        self._end = max(self._end, scanner.next)
        self._emit(pieces, made)

    def _start_segment(self, header: SegmentHeader, made: list[Item]) -> None:
        self._scanner, self._header = MergedScanner(header), header
        self._partial, self._needed, self._block = bytearray(), 0, None
        self._pass_bytes = 0
        self._declared.clear()
        self._next_offset = LogOffset(*header.id, 0)
        self._emit([encode_segment_header(_filtered(header))], made)

    def _handle_sealed(self, sealed: SegmentSealed, made: list[Item]) -> None:
        if self._next_offset is None or self._next_offset.segment != sealed.end_offset.segment:
            return  # The receiver has nothing of this segment.
        self._end = self._reported_end = max(self._end, sealed.end)
        made.append(SegmentSealed(self._next_offset, self._end, sealed.is_last_of_run, sealed.sealed_ns))

    def _passing(self, scan: ScanResult, view: memoryview, scanner: MergedScanner) -> list[Buffer]:
        """The blocks of the batches that pass, and the declarations before them."""
        pieces: list[Buffer] = []
        assert self._header is not None
        assert self._next_offset is not None
        at = self._next_offset.offset
        for placed in in_order(scan.blocks, scan.batches):
            if isinstance(placed, PlacedBlock):
                if placed.header.kind == BlockKind.BATCHES:
                    self._block, self._block_chain = placed, placed.header.chain_start
                continue
            assert self._block is not None
            batch = view[placed.start : placed.start + placed.header.total_bytes]
            chain = self._block_chain
            self._block_chain = chain_after(chain, batch[:BATCH_HEADER_BYTES])
            self._is_passing = self._is_wanted(placed, batch)
            if not self._is_passing:
                continue
            header = _block_of(placed, self._block, chain, self._block_chain)
            if header.session_id not in self._declared:
                self._declared.add(header.session_id)
                declaration = scanner.sessions[header.session_id]
                pieces.append(encode_declaration(header, declaration, batch_seed(self._header.seed, at)))
                at += len(pieces[-1])
            pieces += (encode_block_header(header, batch_seed(self._header.seed, at)), batch)
            at += BLOCK_HEADER_BYTES + len(batch)
        return pieces

    def _is_wanted(self, placed: PlacedBatch, batch: memoryview) -> bool:
        header = placed.header
        is_new = (
            placed.first_position + header.message_count > self._end and placed.skip < header.message_count
        )
        return is_new and self._filter.passes(header, batch)

    def _emit(self, pieces: list[Buffer], made: list[Item]) -> None:
        assert self._next_offset is not None
        data = memoryview(b"".join(pieces))
        for start in range(0, len(data), self._chunk_bytes):
            chunk = Chunk(self._next_offset, data[start : start + self._chunk_bytes])
            made.append(chunk)
            self._next_offset = chunk.end


def _filtered(header: SegmentHeader) -> SegmentHeader:
    return SegmentHeader(LogKind.FILTERED, header.id, header.first, header.created_ns, header.origin)


def _block_of(placed: PlacedBatch, block: PlacedBlock, chain_start: int, chain_end: int) -> BlockHeader:
    """The header of a new block that holds only this batch of `block`."""
    source = block.header.source_offset + placed.offset - block.offset - BLOCK_HEADER_BYTES
    return block.header._replace(
        skip=placed.skip,
        source_offset=source,
        length_bytes=placed.header.total_bytes,
        first_position=placed.first_position + placed.skip,
        message_count=placed.header.message_count - placed.skip,
        chain_start=chain_start,
        chain_end=chain_end,
    )
