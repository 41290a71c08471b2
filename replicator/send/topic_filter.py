"""A filtered log, made from a merged one as it is sent: the batches that hold a wanted topic, and no others.

Laws. Each batch that passes is a block of its own, with its true positions, number of skipped messages and
chains, in a segment of the same X and Y; so the bytes depend on the merged log, the topics and where the
receiver began. A batch with several topics passes whole if one of them is wanted, and so does one with very
many messages: readers look at the single messages. What passed and what did not is told by `CompleteUpTo`.
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
from rt.log.scan.batch_decoder import PlacedBatch
from rt.log.scan.scanner import MergedScanner, PlacedBlock, ScanResult

COLUMNS_BYTES_MAX: Final = 512 * 1024
"""A batch of more columns passes whatever its topics are: a filter keeps no more of a batch in memory."""


class TopicFilter:
    """Which batches hold one of `topics`."""

    def __init__(self, topics: Collection[str]) -> None:
        self._topics = frozenset(topic.encode() for topic in topics)

    def passes(self, header: BatchHeader, batch: memoryview) -> bool:
        """Whether the batch, whose checksums hold, passes. One whose topics cannot be read does.

        Its values need not be there; nor need its columns, if they are above `COLUMNS_BYTES_MAX`.
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
        return not self._topics.isdisjoint(topics)


class FilteredScan:
    """Turns the items of a merged log into those of a filtered one.

    The items begin where `scanner` stands, or with a segment's header if it is None. The receiver has
    everything below position `end`, in filtered segments up to `place` (None: nothing yet).
    """

    def __init__(
        self,
        topics: Collection[str],
        *,
        scanner: MergedScanner | None,
        header: SegmentHeader | None,
        place: LogOffset | None,
        end: int,
    ) -> None:
        assert (scanner is None) == (header is None)
        self._filter = TopicFilter(topics)
        self._scanner = scanner
        self._header = header
        self._place = place
        self._end = end
        """Everything that passes below it was handed out."""
        self._told = end
        self._declared: set[int] = set()
        """Session ids declared in this segment, as far as this object did it."""
        self._rest = bytearray()
        self._needed = 0
        self._chunk_bytes = CHUNK_BYTES_MAX
        self._pass_bytes = 0
        """Bytes that come next and belong to the last batch that was looked at."""
        self._is_passing = False
        """Whether that batch passes."""
        self._block: PlacedBlock | None = None
        self._block_chain = 0
        """The source's chain before the next batch of that block."""

    @property
    def held_bytes(self) -> int:
        """What is kept in memory of a batch whose columns are not whole yet."""
        return len(self._rest)

    def items(self, found: list[Item], *, chunk_bytes: int = CHUNK_BYTES_MAX) -> list[Item]:
        """What becomes of the next items of the merged log; with none, how far that is complete.

        No chunk is larger than `chunk_bytes`.
        """
        self._chunk_bytes = chunk_bytes
        made: list[Item] = []
        for item in found:
            match item:
                case Chunk():
                    self._take(item, made)
                case SegmentSealed():
                    self._seal(item, made)
                case LogTrimmed():
                    made.append(item)
                case _:
                    raise AssertionError(item)
        if not found and self._end > self._told and self._place is not None:
            self._told = self._end
            made.append(CompleteUpTo(self._end))
        return made

    def _take(self, chunk: Chunk, made: list[Item]) -> None:
        data: Buffer = chunk.data
        if chunk.place.offset == 0:
            self._begin(decode_segment_header(data, path=chunk.place.segment.file_name), made)
            data = memoryview(data)[SEGMENT_HEADER_BYTES:]
        scanner = self._scanner
        assert scanner is not None
        if self._pass_bytes:
            passed = memoryview(data)[: self._pass_bytes]
            self._pass_bytes -= len(passed)
            if self._is_passing:
                self._hand_out([passed], made)
            data = memoryview(data)[len(passed) :]
        if self._rest:
            self._rest += data
            data = self._rest
        if len(data) < self._needed or not data:
            self._rest = data if isinstance(data, bytearray) else bytearray(data)
            return
        view = memoryview(data)
        # The sender hands out whole blocks: what is not here yet comes next.
        scan = scanner.scan_columns(view, lambda _: True, columns_bytes_max=COLUMNS_BYTES_MAX)
        if scan.problem is not None:
            raise Corrupt(scan.problem, path=chunk.place.segment.file_name, offset=scanner.offset)
        self._rest, self._needed = bytearray(view[scan.consumed :]), scan.needed
        self._pass_bytes, self._is_passing = max(scan.consumed - len(view), 0), False
        pieces = self._passing(scan, view, scanner)
        self._end = max(self._end, scanner.next)
        self._hand_out(pieces, made)

    def _begin(self, header: SegmentHeader, made: list[Item]) -> None:
        self._scanner, self._header = MergedScanner(header), header
        self._rest, self._needed, self._block = bytearray(), 0, None
        self._pass_bytes = 0
        self._declared.clear()
        self._place = LogOffset(*header.id, 0)
        own = SegmentHeader(LogKind.FILTERED, header.id, header.first, header.created_ns, header.origin)
        self._hand_out([encode_segment_header(own)], made)

    def _seal(self, sealed: SegmentSealed, made: list[Item]) -> None:
        if self._place is None or self._place.segment != sealed.place.segment:
            return  # The receiver never had anything of it.
        self._end = self._told = max(self._end, sealed.end)
        made.append(SegmentSealed(self._place, self._end, sealed.is_last_of_run, sealed.sealed_ns))

    def _passing(self, scan: ScanResult, view: memoryview, scanner: MergedScanner) -> list[Buffer]:
        """The blocks, and declarations before them, that the batches found make."""
        pieces: list[Buffer] = []
        assert self._header is not None
        assert self._place is not None
        at = self._place.offset
        blocks = iter(block for block in scan.blocks if block.header.kind == BlockKind.BATCHES)
        following = next(blocks, None)
        for placed in scan.batches:
            while following is not None and following.offset < placed.offset:
                self._block, self._block_chain = following, following.header.chain_start
                following = next(blocks, None)
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
        if following is not None:
            self._block, self._block_chain = following, following.header.chain_start
        return pieces

    def _is_wanted(self, placed: PlacedBatch, batch: memoryview) -> bool:
        header = placed.header
        is_new = (
            placed.first_position + header.message_count > self._end and placed.skip < header.message_count
        )
        return is_new and self._filter.passes(header, batch)

    def _hand_out(self, pieces: list[Buffer], made: list[Item]) -> None:
        """Chunks of the pieces, one behind the other."""
        assert self._place is not None
        data = memoryview(b"".join(pieces))
        for start in range(0, len(data), self._chunk_bytes):
            chunk = Chunk(self._place, data[start : start + self._chunk_bytes])
            made.append(chunk)
            self._place = chunk.end


def _block_of(placed: PlacedBatch, block: PlacedBlock, chain_start: int, chain_end: int) -> BlockHeader:
    """The header of the block that holds nothing but this batch of `block`."""
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
