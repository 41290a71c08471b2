"""From the items of a range to its messages, for a reader that keeps nothing. Pure.

Invariants:
- Only verified messages are returned, each position once, in order. Positions that the node no longer has are
  reported before what follows them.
- Only the bytes of one unfinished frame are in memory.
"""

from __future__ import annotations

from collections.abc import Iterator

from replicator.protocol.handshake import PullStart
from replicator.protocol.messages import Chunk, CompleteUpTo, Item, LogOffset, LogTrimmed, SegmentSealed
from rt.errors import ClusterMismatch, Corrupt, MessageTooLarge, ProtocolViolation
from rt.events import BadMessage, SkipForward
from rt.log.format.block import (
    BLOCK_HEADER_BYTES,
    BadBlock,
    Declaration,
    decode_block_header,
    decode_declaration,
)
from rt.log.format.checksum import batch_seed
from rt.log.format.constants import BATCH_BYTES_MAX, MESSAGE_BYTES_MAX
from rt.log.format.segment import SEGMENT_HEADER_BYTES, LogKind, SegmentHeader, decode_segment_header
from rt.log.read.projection import ProjectingScanner, Projection
from rt.log.read.range_reader import decode_range
from rt.log.scan.batch_decoder import UndecodableBatch
from rt.log.scan.message_batch import MessageBatch
from rt.log.scan.scanner import MergedScanner, ScanResult

FRAME_BYTES_MAX = MESSAGE_BYTES_MAX + BATCH_BYTES_MAX

Found = MessageBatch | SkipForward | BadMessage


class RangeStream:
    """The messages from `position` up to `end` that `interest` selects, from the items after `start`.

    `position` is the next one to be returned. `is_filtered`: the node sends a filtered log.
    """

    def __init__(
        self, start: PullStart, position: int, end: int, interest: Projection, *, is_filtered: bool = False
    ) -> None:
        self.position = position
        self._kind = LogKind.FILTERED if is_filtered else LogKind.MERGED
        self._start = start
        self._end = end
        self._interest = interest
        self._reason = "trimmed"
        self._header: SegmentHeader | None = None
        self._first = 0
        """The first position of the segment that the node can send."""
        self._sessions: dict[int, Declaration] = {}
        """The sessions that are declared before the first block. Filled until the first block comes."""
        self._scanner: MergedScanner | None = None
        self._next_offset = start.offset  # Where the next bytes must begin, once the first block has come.
        self._partial = bytearray()
        self._needed = 0
        self._pass_bytes = 0  # The number of next bytes to skip.

    @property
    def is_done(self) -> bool:
        return self.position >= self._end

    def handle(self, item: Item) -> Iterator[Found]:
        """The messages of an item. `rt.Corrupt`, `rt.ProtocolViolation`, `rt.ClusterMismatch`."""
        match item:
            case Chunk():
                yield from self._handle_chunk(item)
            case LogTrimmed(_, _, reason):
                self._reason = reason.name.lower()
            case SegmentSealed(_, end, _, _) | CompleteUpTo(end) if self._kind is LogKind.FILTERED:
                if self._header is None or self._partial or self._pass_bytes:
                    raise ProtocolViolation("an end that comes too early", got=end)
                yield from self._skip_to(self._first)  # Perhaps no message of the segment passes the filter.
                self.position = max(self.position, min(end, self._end))
            case _:
                pass

    def _handle_chunk(self, chunk: Chunk) -> Iterator[Found]:
        data = memoryview(chunk.data)
        if chunk.start.offset == 0:
            self._start_segment(chunk.start, data)
            chunk = Chunk(chunk.start._replace(offset=SEGMENT_HEADER_BYTES), data[SEGMENT_HEADER_BYTES:])
            data = memoryview(chunk.data)
            if not data:
                return
        header = self._header
        if header is None or chunk.start.segment != header.id:
            raise ProtocolViolation("bytes of a segment whose header did not come", got=chunk.start)
        if self._scanner is None:
            if chunk.start < self._start.offset:
                self._declare(header, chunk)
                return
            yield from self._start_blocks(header, chunk.start)
        if chunk.start != self._next_offset:
            raise ProtocolViolation("bytes that do not follow", got=chunk.start, expected=self._next_offset)
        self._next_offset = chunk.end
        yield from self._scan(data)

    def _start_segment(self, place: LogOffset, data: memoryview) -> None:
        header = decode_segment_header(data, path=place.segment.file_name)
        if header.id != place.segment or header.kind is not self._kind:
            raise ProtocolViolation("a header of another segment", got=header.id, expected=place.segment)
        if header.origin != self._start.cluster:
            raise ClusterMismatch(
                "a segment of another cluster", got=header.origin.hex(), expected=self._start.cluster.hex()
            )
        if self._partial or self._pass_bytes:
            raise ProtocolViolation("a segment that ends inside a frame", got=place)
        self._header, self._scanner, self._sessions = header, None, {}
        is_first = header.id == self._start.offset.segment
        self._first = self._start.first if is_first else header.first

    def _declare(self, header: SegmentHeader, chunk: Chunk) -> None:
        try:
            seed = batch_seed(header.seed, chunk.start.offset)
            block = decode_block_header(chunk.data, 0, seed)
            content = memoryview(chunk.data)[BLOCK_HEADER_BYTES:]
            self._sessions[block.session_id] = decode_declaration(block, content)
        except (BadBlock, IndexError) as error:
            raise _damaged(str(error), chunk.start) from error

    def _start_blocks(self, header: SegmentHeader, place: LogOffset) -> Iterator[Found]:
        """Handle the first block of a segment. If it is at the offset of the start, its first position is the
        start's; otherwise it is the position in the segment's header.
        """
        first = header.first
        if place.segment == self._start.offset.segment and place.offset == self._start.offset.offset:
            first = self._start.first
        yield from self._skip_to(first)
        scanner = MergedScanner(header, offset=place.offset, first=first, sessions=self._sessions)
        self._scanner = ProjectingScanner(scanner, self._interest, self.position, self._end)
        self._next_offset = place
        self._needed = 0

    def _skip_to(self, first: int) -> Iterator[Found]:
        if first > self.position:
            resumed = min(first, self._end)
            yield SkipForward(self.position, resumed, self._reason)
            self.position = resumed

    def _scan(self, data: memoryview) -> Iterator[Found]:
        scanner = self._scanner
        assert scanner is not None
        if self._pass_bytes:
            passed = min(self._pass_bytes, len(data))
            self._pass_bytes -= passed
            data = data[passed:]
        if self._partial:
            self._partial += data
            data = memoryview(self._partial)
        if len(data) < self._needed or not data:
            self._partial = self._partial or bytearray(data)
            return
        start = scanner.offset
        scan = scanner.scan(data)
        self._needed = scan.needed
        if scan.needed > FRAME_BYTES_MAX:
            raise MessageTooLarge("a frame above the limit", got=scan.needed, expected=FRAME_BYTES_MAX)
        self._partial = bytearray(data[scan.consumed :])
        self._pass_bytes = max(scan.consumed - len(data), 0)
        yield from self._decode(data, scan, scanner)
        self.position = max(self.position, min(scanner.reached, self._end))
        if scan.problem is not None and not self.is_done:
            raise _damaged(scan.problem, LogOffset(*self._next_offset.segment, start + scan.consumed))

    def _decode(self, data: memoryview, scan: ScanResult, scanner: MergedScanner) -> Iterator[Found]:
        names = {session_id: found.session for session_id, found in scanner.sessions.items()}
        for found in decode_range(data, scan.items, names, self._interest, self.position, self._end):
            if isinstance(found, UndecodableBatch):
                path = self._next_offset.segment.file_name
                yield BadMessage(found.start, found.end, path, found.offset, found.reason)
            else:
                yield found


def _damaged(problem: str, place: LogOffset) -> Corrupt:
    return Corrupt(
        f"a node's bytes do not verify: {problem}",
        path=place.segment.file_name,
        offset=place.offset,
        hint="`rt log verify` on the node shows whether its file is damaged.",
    )
