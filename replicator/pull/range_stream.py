"""From the items of a range to its messages: what a reader that keeps nothing does with what a node sends.

Pure. Laws. Only what verifies is handed out, each position once, in order; positions that the node no longer
has are named before what follows them. What is kept in memory is what came of one unfinished frame.
"""

from __future__ import annotations

from collections.abc import Iterator

from replicator.protocol.handshake import PullStart
from replicator.protocol.messages import Chunk, Item, LogOffset, LogTrimmed
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
from rt.log.read.range_reader import UndecodableBatch, decode_range
from rt.log.scan.message_batch import MessageBatch
from rt.log.scan.scanner import MergedScanner, ScanResult

FRAME_BYTES_MAX = MESSAGE_BYTES_MAX + BATCH_BYTES_MAX

Found = MessageBatch | SkipForward | BadMessage


class RangeStream:
    """The messages from `position` up to `end` that `interest` wants, out of the items behind `start`.

    `position` is the next one to be handed out.
    """

    def __init__(self, start: PullStart, position: int, end: int, interest: Projection) -> None:
        self.position = position
        self._start = start
        self._end = end
        self._interest = interest
        self._reason = "trimmed"
        self._header: SegmentHeader | None = None
        self._sessions: dict[int, Declaration] = {}
        """Declared before the first block, as long as no block has come."""
        self._scanner: MergedScanner | None = None
        self._place = start.place
        """Where the next bytes must begin, once the first block has come."""
        self._rest = bytearray()
        self._needed = 0
        self._pass_bytes = 0
        """Bytes that come next and are not wanted."""

    @property
    def is_done(self) -> bool:
        """Whether nothing more is wanted."""
        return self.position >= self._end

    def take(self, item: Item) -> Iterator[Found]:
        """What an item brings. `rt.Corrupt`, `rt.ProtocolViolation`, `rt.ClusterMismatch`."""
        match item:
            case Chunk():
                yield from self._take(item)
            case LogTrimmed(_, _, reason):
                self._reason = reason.name.lower()
            case _:
                pass

    def _take(self, chunk: Chunk) -> Iterator[Found]:
        data = memoryview(chunk.data)
        if chunk.place.offset == 0:
            self._begin(chunk.place, data)
            chunk = Chunk(chunk.place._replace(offset=SEGMENT_HEADER_BYTES), data[SEGMENT_HEADER_BYTES:])
            data = memoryview(chunk.data)
            if not data:
                return
        header = self._header
        if header is None or chunk.place.segment != header.id:
            raise ProtocolViolation("bytes of a segment whose header did not come", got=chunk.place)
        if self._scanner is None:
            if chunk.place < self._start.place:
                self._declare(header, chunk)
                return
            yield from self._enter(header, chunk.place)
        if chunk.place != self._place:
            raise ProtocolViolation("bytes that do not follow", got=chunk.place, expected=self._place)
        self._place = chunk.end
        yield from self._scan(data)

    def _begin(self, place: LogOffset, data: memoryview) -> None:
        header = decode_segment_header(data, path=place.segment.file_name)
        if header.id != place.segment or header.kind is not LogKind.MERGED:
            raise ProtocolViolation("a header of another segment", got=header.id, expected=place.segment)
        if header.origin != self._start.cluster:
            raise ClusterMismatch(
                "a segment of another cluster", got=header.origin.hex(), expected=self._start.cluster.hex()
            )
        if self._rest or self._pass_bytes:
            raise ProtocolViolation("a segment that ends inside a frame", got=place)
        self._header, self._scanner, self._sessions = header, None, {}

    def _declare(self, header: SegmentHeader, chunk: Chunk) -> None:
        try:
            seed = batch_seed(header.seed, chunk.place.offset)
            block = decode_block_header(chunk.data, 0, seed)
            content = memoryview(chunk.data)[BLOCK_HEADER_BYTES:]
            self._sessions[block.session_id] = decode_declaration(block, content)
        except (BadBlock, IndexError) as error:
            raise _damaged(str(error), chunk.place) from error

    def _enter(self, header: SegmentHeader, place: LogOffset) -> Iterator[Found]:
        """The first block of a segment comes: of the first one at the start's place, of others at its own."""
        first = header.first
        if place.segment == self._start.place.segment and place.offset == self._start.place.offset:
            first = self._start.first
        if first > self.position:
            resumed = min(first, self._end)
            yield SkipForward(self.position, resumed, self._reason)
            self.position = resumed
        scanner = MergedScanner(header, offset=place.offset, first=first, sessions=self._sessions)
        self._scanner = ProjectingScanner(scanner, self._interest, self.position, self._end)
        self._place = place
        self._needed = 0

    def _scan(self, data: memoryview) -> Iterator[Found]:
        scanner = self._scanner
        assert scanner is not None
        if self._pass_bytes:
            passed = min(self._pass_bytes, len(data))
            self._pass_bytes -= passed
            data = data[passed:]
        if self._rest:
            self._rest += data
            data = memoryview(self._rest)
        if len(data) < self._needed or not data:
            self._rest = self._rest or bytearray(data)
            return
        start = scanner.offset
        scan = scanner.scan(data)
        self._needed = scan.needed
        if scan.needed > FRAME_BYTES_MAX:
            raise MessageTooLarge("a frame above the limit", got=scan.needed, expected=FRAME_BYTES_MAX)
        self._rest = bytearray(data[scan.consumed :])
        self._pass_bytes = max(scan.consumed - len(data), 0)
        yield from self._decode(data, scan, scanner)
        self.position = max(self.position, min(scanner.reached, self._end))
        if scan.problem is not None and not self.is_done:
            raise _damaged(scan.problem, LogOffset(*self._place.segment, start + scan.consumed))

    def _decode(self, data: memoryview, scan: ScanResult, scanner: MergedScanner) -> Iterator[Found]:
        names = {session_id: found.session for session_id, found in scanner.sessions.items()}
        for found in decode_range(data, scan.items, names, self._interest, self.position, self._end):
            if isinstance(found, UndecodableBatch):
                path = self._place.segment.file_name
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
