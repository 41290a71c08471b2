"""Merged logs for tests: `MergedLogBuilder` merges session directories like a node, on command.

Invariant: the bytes depend only on the clock, the sessions' bytes and the calls of `merge`, `merge_all` and
`roll`. Two logs with the same inputs are byte-identical, on any disk.

>>> import tempfile
>>> from rt.client.publisher import Publisher
>>> root = tempfile.TemporaryDirectory()
>>> with Publisher(root.name, "s", publisher_id="feed") as publisher:
...     publisher.publish_many([b"a", b"b", b"c"])
range(0, 3)
>>> merged = MergedLogBuilder(f"{root.name}/merged", cluster_id=bytes(16), stream="s")
>>> merged.merge_all([publisher.directory])
range(0, 3)
>>> merged.close()
>>> root.cleanup()
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Self, TypeAlias

from msgspec import Struct, field

from rt.errors import InvalidOption
from rt.log.disk import REAL, Disk
from rt.log.format.block import BlockHeader, BlockKind, Declaration, encode_block_header, encode_declaration
from rt.log.format.checksum import batch_seed
from rt.log.format.constants import VERSION
from rt.log.format.running_checksum import ChecksummedBoundary, chain_of_segment
from rt.log.format.segment import SEGMENT_HEADER_BYTES, LogKind, SegmentId, encode_segment_header
from rt.log.format.segment_table import LogIdentity, TrimReason
from rt.log.scan.catalog import segment_path
from rt.log.scan.directory import list_segments, read_header, read_identity, scans
from rt.log.scan.scanner import SessionScanner
from rt.log.write.writer import BatchFrames, LogWriter

StrPath: TypeAlias = str | os.PathLike[str]

BLOCK_BYTES = 64 * 1024
_EPOCH_NS = 1_700_000_000_000_000_000


def even_clock() -> int:
    """A constant clock: sequencing times then rise by 1 ns per instruction."""
    return _EPOCH_NS


class _Session(Struct):
    """One incarnation that is merged: its identity, and how far it has been consumed."""

    id: int
    declaration: Declaration
    segment: SegmentId | None = None
    offset: int = SEGMENT_HEADER_BYTES
    declared_in: set[SegmentId] = field(default_factory=set)


class _Batch(NamedTuple):
    """A batch of a session: its offset, its first number, the running checksum before it, the boundary after
    it.
    """

    offset: int
    first: int
    chain: int
    mark: ChecksummedBoundary


class _Turn(NamedTuple):
    """A range of a session's batches that becomes one block."""

    segment: SegmentId
    batches: list[_Batch]


class MergedLogBuilder:
    """The only writer of a merged log directory, which must be new.

    `clock` returns the time of each instruction; sequencing times rise in any case. `writer` is the log's
    `LogWriter`, for anything else.
    """

    def __init__(
        self,
        path: StrPath,
        *,
        cluster_id: bytes,
        stream: str,
        run: int = 0,
        disk: Disk = REAL,
        clock: Callable[[], int] = even_clock,
    ) -> None:
        self.path = os.path.abspath(os.fspath(path))
        self._disk = disk
        self._clock = clock
        self._instruction = 0
        self._sequenced_ns = 0
        self._sessions: dict[bytes, _Session] = {}
        self._wanted: dict[str, int] = {}
        self._is_closed = False
        self.writer = LogWriter.open(
            self.path, LogIdentity(LogKind.MERGED, cluster_id, stream), disk=disk, clock=clock
        )
        if self.writer.last_id is not None:
            self.writer.close()
            raise InvalidOption(f"{self.path} already holds a log")
        self.writer.start(SegmentId(run, 0), first=0, created_ns=self._now())

    @property
    def position(self) -> int:
        return self.writer.end

    def merge(
        self,
        session: StrPath,
        start: int | None = None,
        end: int | None = None,
        *,
        segment: SegmentId | None = None,
        skip: int | None = None,
    ) -> range:
        """Merge the bytes from `start` to `end` of a session's segment as one block. Return the positions of
        the messages.

        The default is the part of the next segment that is not merged. `start` and `end` must be batch
        boundaries. `skip` messages at the start are left out; None: the messages already merged for the
        session's dedup id. If no message of a range is left, the range is consumed without a block.
        """
        source = self._source(session)
        segment, start = self._next_range(source, session, segment, start)
        batches = [batch for batch in self._batches(session, segment) if batch.offset >= start]
        if end is not None:
            batches = [batch for batch in batches if batch.offset < end]
        if not batches or batches[0].offset != start or end not in {None, _end(batches)}:
            raise InvalidOption(
                f"the range {start} to {end} does not end between batches: {segment} of {os.fspath(session)}"
            )
        return self._merge(source, session, segment, batches, skip)

    def merge_all(self, sessions: Sequence[StrPath], *, block_bytes: int = BLOCK_BYTES) -> range:
        """Merge all unmerged messages of the sessions, in turns of up to `block_bytes` each.

        A turn takes at least one batch. A dedup session waits until its next number is expected.
        """
        if len({self._source(session).id for session in sessions}) < len(sessions):
            raise InvalidOption(
                "a session is named twice",
                got=", ".join(str(os.fspath(session)) for session in sessions)[:500],
            )
        first = self.position
        turns = [self._turns(session, block_bytes) for session in sessions]
        waiting = [next(turn, None) for turn in turns]
        while any(waiting):
            moved = False
            for index, turn in enumerate(waiting):
                source = self._source(sessions[index])
                if turn is None or self._is_early(source, turn.batches):
                    continue
                self._merge(source, sessions[index], turn.segment, turn.batches, None)
                waiting[index] = next(turns[index], None)
                moved = True
            if not moved:
                break
        return range(first, self.position)

    def roll(self, run: int | None = None) -> None:
        """Seal the active segment. Start the next segment, or the first segment of another run."""
        last = self.writer.last_id
        assert last is not None
        segment = SegmentId(last.run, last.roll + 1) if run is None else SegmentId(run, 0)
        self.writer.start(segment, first=self.position, created_ns=self._now())

    def trim(self, before: SegmentId, reason: TrimReason = TrimReason.TIME) -> None:
        """Trim the sealed segments before `before`."""
        self.writer.trim(before, reason)

    def sync(self) -> None:
        """Make the merged messages durable."""
        self.writer.sync()

    def close(self) -> None:
        """Make the merged messages durable, and release the directory. Closing twice is allowed."""
        if not self._is_closed:
            self._is_closed = True
            self.sync()
            self.writer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Sources

    def _source(self, session: StrPath) -> _Session:
        identity = read_identity(self._disk, os.fspath(session))
        if identity.kind is not LogKind.SESSION:
            raise InvalidOption(f"{os.fspath(session)} is not a session")
        known = self._sessions.get(identity.origin)
        if known is None:
            declaration = Declaration(identity.name, identity.origin, identity.dedup_id)
            known = self._sessions[identity.origin] = _Session(len(self._sessions) + 1, declaration)
        return known

    def _next_range(
        self, source: _Session, session: StrPath, segment: SegmentId | None, start: int | None
    ) -> tuple[SegmentId, int]:
        if segment is None:
            for found in self._segments(session):
                if source.segment is None or found >= source.segment:
                    at = source.offset if found == source.segment else SEGMENT_HEADER_BYTES
                    if start is not None or any(
                        batch.offset >= at for batch in self._batches(session, found)
                    ):
                        return found, at if start is None else start
            raise InvalidOption(f"nothing is left to merge in {os.fspath(session)}")
        if start is None:
            start = source.offset if source.segment == segment else SEGMENT_HEADER_BYTES
        return segment, start

    def _segments(self, session: StrPath) -> list[SegmentId]:
        path = os.fspath(session)
        return [
            found for found in list_segments(self._disk, path) if self._disk.size(segment_path(path, found))
        ]

    def _batches(self, session: StrPath, segment: SegmentId) -> list[_Batch]:
        path = os.fspath(session)
        header = read_header(self._disk, path, segment)
        if header is None:
            return []
        with contextlib.closing(self._disk.open(segment_path(path, segment))) as file:
            scanned = list(scans(file.pread, SessionScanner(header, marks=True)))
        batches = itertools.chain.from_iterable(scan.batches for scan in scanned)
        marks = list(itertools.chain.from_iterable(scan.marks for scan in scanned))
        chains = [chain_of_segment(encode_segment_header(header)), *(mark.chain for mark in marks)]
        return [
            _Batch(batch.offset, batch.header.first, chain, mark)
            for batch, chain, mark in zip(batches, chains, marks, strict=False)
        ]

    def _turns(self, session: StrPath, block_bytes: int) -> Iterator[_Turn]:
        source = self._source(session)
        after = (source.segment or SegmentId(0, 0), source.offset)
        for segment in self._segments(session):
            run: list[_Batch] = []
            for batch in self._batches(session, segment):
                if (segment, batch.offset) < after:
                    continue
                if run and batch.mark.offset - run[0].offset > block_bytes:
                    yield _Turn(segment, run)
                    run = []
                run.append(batch)
            if run:
                yield _Turn(segment, run)

    # Merging

    def _is_early(self, source: _Session, batches: list[_Batch]) -> bool:
        dedup_id = source.declaration.dedup_id
        return dedup_id is not None and batches[0].first > self._wanted.get(dedup_id, 2**62)

    def _merge(
        self, source: _Session, session: StrPath, segment: SegmentId, batches: list[_Batch], skip: int | None
    ) -> range:
        first, end = batches[0].first, batches[-1].mark.number
        dedup_id = source.declaration.dedup_id
        if skip is None:
            wanted = first if dedup_id is None else self._wanted.get(dedup_id, first)
            skip = min(max(wanted - first, 0), end - first)
        elif not 0 <= skip <= end - first:
            raise InvalidOption("invalid skip", got=skip, expected=f"0 to {end - first} messages")
        self._instruction += 1
        source.segment, source.offset = segment, _end(batches)
        count = end - first - skip
        if dedup_id is not None:
            self._wanted[dedup_id] = max(self._wanted.get(dedup_id, 0), end)
        if count == 0:
            return range(self.position, self.position)
        header = BlockHeader(
            version=VERSION,
            kind=BlockKind.BATCHES,
            instruction_index=0,
            instruction=self._instruction,
            session_id=source.id,
            source_run=segment.run,
            source_roll=segment.roll,
            skip=skip,
            source_offset=batches[0].offset,
            length_bytes=_end(batches) - batches[0].offset,
            first_position=self.position,
            message_count=count,
            sequenced_ns=self._now(),
            chain_start=batches[0].chain,
            chain_end=batches[-1].mark.chain,
        )
        self._declare(source, header)
        self._append(header, self._bytes(session, segment, header), batches)
        return range(header.first_position, header.end)

    def _declare(self, source: _Session, header: BlockHeader) -> None:
        last = self.writer.last_id
        assert last is not None
        if last in source.declared_in:
            return
        source.declared_in.add(last)
        block = encode_declaration(
            header._replace(source_offset=0, source_run=0, source_roll=0), source.declaration, self._seed
        )
        self.writer.append([BatchFrames([block], self.position, 0, 0, is_declaration=True)])

    def _append(self, header: BlockHeader, content: bytes, batches: list[_Batch]) -> None:
        low_ns = min(batch.mark.timestamp_low_ns for batch in batches)
        high_ns = max(batch.mark.timestamp_high_ns for batch in batches)
        block = [encode_block_header(header, self._seed), content]
        self.writer.append([BatchFrames(block, header.end, low_ns, high_ns)])

    @property
    def _seed(self) -> int:
        assert self.writer.active is not None
        return batch_seed(self.writer.active.seed, self.writer.offset)

    def _bytes(self, session: StrPath, segment: SegmentId, header: BlockHeader) -> bytes:
        with contextlib.closing(self._disk.open(segment_path(os.fspath(session), segment))) as file:
            return file.pread(header.length_bytes, header.source_offset)

    def _now(self) -> int:
        self._sequenced_ns = max(self._sequenced_ns + 1, self._clock())
        return self._sequenced_ns


def _end(batches: list[_Batch]) -> int:
    return batches[-1].mark.offset
