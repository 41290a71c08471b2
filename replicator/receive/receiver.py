"""Receiving a log: the one writer of a copy, without network and without asyncio.

Laws. Only what verifies is stored, whole frames at a time, each at the very place it had at the sender; so a
copy is a prefix of the log, byte for byte, from where it began. What is bad, or does not follow, is refused
with an error that names the place; what was good before it stays, and the copy can go on from `place`. What
has come of an unfinished frame is kept in memory, bounded by the largest frame allowed.

One thread at a time gives items; `sync_to` may run in another one beside it.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from copy import copy
from typing import Generic, TypeVar

from replicator.protocol.messages import CHUNK_BYTES_MAX, Chunk, LogOffset, SegmentSealed
from replicator.receive.partial_frame import PartialFrame
from rt.errors import BadContents, Corrupt, MessageTooLarge, ProtocolViolation
from rt.log.format.segment import SEGMENT_HEADER_BYTES, SegmentHeader, SegmentId, decode_segment_header
from rt.log.format.segment_table import LogIdentity, SealedSegment, TrimReason
from rt.log.scan.scanner import Scanner, ScanResult
from rt.log.write.writer import BatchFrames, LogWriter, SyncPoint

QUICK_BYTES_MAX = CHUNK_BYTES_MAX
"""A write of up to this much to the page cache takes less than handing it to another thread and back."""

AnyScanner = TypeVar("AnyScanner", bound=Scanner)


class NotQuick(Exception):
    """What was asked for in an event loop needs a thread; nothing was changed."""


class Receiver(ABC, Generic[AnyScanner]):
    """What copies of session and merged logs have in common. Make one with `open` of its subclass."""

    def __init__(self, writer: LogWriter, *, frame_bytes_max: int) -> None:
        self.writer = writer
        """Its table says what is sealed and trimmed. Nobody else changes anything by it."""
        self._scanner: AnyScanner | None = None
        """Walks the active segment; None while none is active."""
        self._frame_bytes_max = frame_bytes_max
        self._rest = PartialFrame()
        """What came behind `place` and is no whole frame yet, or no whole segment header."""
        self._beginning: SegmentId | None = None
        """The segment whose header has come in part."""
        self._welcome: SegmentId | None = None
        """A segment that may begin although it does not follow: what lies before it is not wanted."""
        self._files = threading.Lock()
        """Held while files are closed or synced, so that none is closed while it is synced."""
        self._needed = 0
        """Bytes from where the scanner stands, without which it cannot go on."""
        self._telling = threading.Lock()
        self._durable = (self.place, self.end)

    @property
    def path(self) -> str:
        """The directory."""
        return self.writer.path

    @property
    def identity(self) -> LogIdentity:
        """What the directory is."""
        return self.writer.identity

    @property
    def place(self) -> LogOffset | None:
        """Behind the last whole frame here, or where a skip leads to; None if nothing is here."""
        return self._stored_place() if self._welcome is None else LogOffset(*self._welcome, 0)

    def _stored_place(self) -> LogOffset | None:
        if self._scanner is not None and self.writer.active is not None:
            return LogOffset(*self.writer.active.id, self._scanner.boundary)
        if self.writer.table.segments:
            last = self.writer.table.segments[-1]
            return LogOffset(*last.id, last.size_bytes)
        return None

    @property
    def end(self) -> int:
        """The number or position that must follow."""
        return self.writer.end

    @property
    def durable(self) -> LogOffset | None:
        """Everything before it is on the medium, as far as `note_synced` was told."""
        return self._durable[0]

    @property
    def durable_end(self) -> int:
        """The number or position at `durable`."""
        return self._durable[1]

    @property
    def active(self) -> SegmentHeader | None:
        """The header of the segment that grows."""
        return None if self._scanner is None else self.writer.active

    @property
    def unfinished_bytes(self) -> int:
        """Bytes in memory that are no whole frame yet."""
        return len(self._rest)

    def is_quick(self, chunk: Chunk) -> bool:
        """Whether taking it is one short write: no more than `QUICK_BYTES_MAX`, no file made, no sync."""
        is_active = self.active is not None and self.active.id == chunk.place.segment
        return is_active and len(chunk.data) + len(self._rest) <= QUICK_BYTES_MAX

    def forget_unfinished(self) -> None:
        """The sender begins anew at `place`: drop what came of an unfinished frame."""
        self._rest = PartialFrame()
        self._beginning = None
        self._needed = 0
        if self._scanner is not None:
            self._scanner = self._rewound(self._scanner)

    def take(self, chunk: Chunk) -> None:
        """Verify and append. What it holds of whole frames can be read when this returns, and is not synced.

        `rt.ProtocolViolation` if it does not follow, `rt.Corrupt` if it does not verify (`offset` says where
        in the sender's segment; what is good before is stored), `rt.BadContents` if no reader could decode
        it, `rt.MessageTooLarge`; storage errors, after which nothing of the chunk counts.
        """
        self._take(chunk, is_quick=False)

    def take_quickly(self, chunk: Chunk) -> bool:
        """`take`, if that may be done in an event loop; False, with nothing taken, if it may not."""
        if not self.is_quick(chunk):
            return False
        try:
            self._take(chunk, is_quick=True)
        except NotQuick:
            return False
        return True

    def _take(self, chunk: Chunk, *, is_quick: bool) -> None:
        self.writer.check_usable()
        place = chunk.place
        if self.active is None or self.active.id != place.segment:
            if self._beginning is None:
                self._check_begins(place)
                self._beginning = place.segment
                self._rest, self._needed = PartialFrame(), 0  # Of a segment whose end is skipped.
            self._check_follows(place, LogOffset(*self._beginning, len(self._rest)))
            try:
                chunk = self._take_header(chunk)
            except BaseException:
                self.forget_unfinished()
                raise
            if not chunk.data:
                return
        assert self._scanner is not None
        self._check_follows(
            chunk.place, chunk.place._replace(offset=self._scanner.boundary + len(self._rest))
        )
        self._take_frames(chunk, is_quick=is_quick)

    def seal(self, sealed: SegmentSealed) -> None:
        """The segment ends at its last frame here; durable on return. Sealing the last one again is nothing.

        `rt.ProtocolViolation` if the sender's segment has more than is here, or ends otherwise.
        """
        self.writer.check_usable()
        place = self.place
        if place is None or self._beginning is not None or place.segment != sealed.place.segment:
            raise violation("a segment is sealed that does not follow", sealed.place, place)
        if self._ends(sealed, place) and self._scanner is not None:
            with self._files:
                self._sealing(sealed)
                self.writer.seal()
                self._scanner = None
            self._became_durable(place, self.end)

    def sync_point(self) -> SyncPoint | None:
        """All that is stored; None if it is known to be durable. For `sync_to`; never beside `take`."""
        if self._scanner is None or self._durable == (self._stored_place(), self.end):
            return None
        return self.writer.sync_point()

    def sync_to(self, point: SyncPoint) -> None:
        """Return when all up to `point` is on the medium; from any thread. `rt.StorageFailed` is final."""
        with self._files:
            active = self.writer.active
            if active is None or active.id != point.id or self.writer.is_sealed:
                self.writer.check_usable()
                return  # It was sealed meanwhile, and is durable whole.
            self.writer.sync_to(point)

    def note_synced(self, point: SyncPoint | None) -> None:
        """`sync_to(point)` returned; None if there was nothing to sync, for sealing had synced it."""
        if point is not None:
            self._became_durable(LogOffset(*point.id, point.offset), point.end)

    def trim(self, before: SegmentId, reason: TrimReason) -> Sequence[SealedSegment]:
        """Trim the sealed segments before `before`; those that were trimmed now."""
        with self._files:
            return self.writer.trim(before, reason)

    def uncached_with(self, place: LogOffset) -> int:
        """How many bytes `uncache(place)` gives up; 0 or less: none yet."""
        is_active = self.active is not None and self.active.id == place.segment
        return self.writer.uncached_with(place.offset) if is_active else 0

    def uncache(self, place: LogOffset) -> None:
        """Nobody is expected to read what is before `place`: keep no memory for it. From any thread."""
        with self._files:
            if self.uncached_with(place) > 0:
                self.writer.uncache(place.offset)

    def close(self) -> None:
        """Release files and lock. Does not sync."""
        with self._files:
            self._scanner = None
            self.writer.close()

    # What a kind of log knows

    @abstractmethod
    def _check_begins(self, place: LogOffset) -> None:
        """`rt.ProtocolViolation` unless the segment of `place` may begin now."""

    @abstractmethod
    def _check_header(self, header: SegmentHeader) -> None:
        """`rt.ProtocolViolation` unless the segment that begins is of this log and follows."""

    @abstractmethod
    def _ends(self, sealed: SegmentSealed, place: LogOffset) -> bool:
        """Whether to seal now, with what is here up to `place`; `rt.ProtocolViolation` if it must not be."""

    @abstractmethod
    def _new_scanner(self, header: SegmentHeader) -> AnyScanner:
        """A scanner of a segment from its first frame on."""

    @abstractmethod
    def _rewound(self, scanner: AnyScanner) -> AnyScanner:
        """A scanner at the boundary of `scanner`, which may be within a frame."""

    def _scan(self, scanner: AnyScanner, data: memoryview, *, is_quick: bool) -> ScanResult:  # noqa: ARG002
        """Verify what is in `data`, which starts where the scanner stands, and move it on behind that.

        With `is_quick` it runs in an event loop, and may raise `NotQuick`.
        """
        return scanner.scan(data)

    @abstractmethod
    def _runs(self, scan: ScanResult, data: memoryview, base: int) -> list[BatchFrames]:
        """The whole frames in `data`, which starts at the offset `base` and holds nothing else."""

    def _stored(self, scan: ScanResult) -> None:
        """What `scan` found of whole frames was appended."""

    # Steps

    def _became_durable(self, place: LogOffset, end: int) -> None:
        with self._telling:
            known = self._durable[0]
            if known is None or place >= known:
                self._durable = (place, end)

    def _take_header(self, chunk: Chunk) -> Chunk:
        """Take bytes of a segment's header, and begin it if that is whole; what is left of the chunk."""
        missing = SEGMENT_HEADER_BYTES - len(self._rest)
        data = memoryview(chunk.data)
        head = bytes(self._rest.view()) + data[:missing]
        rest = Chunk(chunk.place._replace(offset=chunk.place.offset + missing), data[missing:])
        if len(head) < SEGMENT_HEADER_BYTES:
            self._rest = PartialFrame(head)
            return rest
        header = decode_segment_header(head, path=chunk.place.segment.file_name)
        if header.id != chunk.place.segment:
            raise violation("a header of another segment", chunk.place, header.id)
        self._check_header(header)
        self._begin(header, head)
        return rest

    def _begin(self, header: SegmentHeader, head: bytes) -> None:
        with self._files:
            if self._scanner is not None:
                self._sealing(None)
                self.writer.seal()
                self._scanner = None
            self._leave_behind(header)
            self.writer.start(
                header.id,
                first=header.first,
                run_id=header.run_id,
                created_ns=header.created_ns,
                header_bytes=head,
            )
            self._scanner = self._new_scanner(header)
        self._rest, self._beginning, self._welcome = PartialFrame(), None, None
        self._became_durable(LogOffset(*header.id, SEGMENT_HEADER_BYTES), header.first)

    def _sealing(self, sealed: SegmentSealed | None) -> None:
        """The active segment is about to be sealed: as the sender says, or as the rest of it is skipped."""

    def _leave_behind(self, header: SegmentHeader) -> None:
        """What is to be done before a segment begins that does not follow; the files are locked."""

    def _take_frames(self, chunk: Chunk, *, is_quick: bool) -> None:
        scanner = self._scanner
        assert scanner is not None
        held = len(self._rest)
        base = scanner.boundary
        if held:
            self._rest.add(chunk.data, scanner.offset - base + self._needed)
            data = self._rest.view()
        else:
            data = memoryview(chunk.data)
        found = ScanResult()
        if len(data) - (scanner.offset - base) >= self._needed:
            try:
                found = self._append(scanner, data, base, is_quick=is_quick)
            except NotQuick:
                self._rest.cut(held)
                raise
            self._needed = found.needed
        whole = scanner.boundary - base
        if whole or not held:
            total_bytes = scanner.offset - scanner.boundary + min(self._needed, self._frame_bytes_max)
            self._rest = PartialFrame(data[whole:], total_bytes)
        self._check_frame(found, scanner, chunk.place.segment)

    def _append(self, scanner: AnyScanner, data: memoryview, base: int, *, is_quick: bool) -> ScanResult:
        """Verify what is new in `data`, which starts at `base`, and store the whole frames in it."""
        before = copy(scanner)
        try:
            found = self._scan(scanner, data[scanner.offset - base :], is_quick=is_quick)
            if runs := self._runs(found, data[: scanner.boundary - base], base):
                self.writer.append(runs)
                self._stored(found)
        except NotQuick:
            self._scanner = before
            raise
        except BaseException:
            self._scanner = before
            self.forget_unfinished()
            if (stored := self.writer.offset - base) > 0:
                self._scanner.scan(data[:stored])  # On a full disk the runs that fit stay.
            raise
        return found

    def _check_frame(self, found: ScanResult, scanner: AnyScanner, segment: SegmentId) -> None:
        """Raise what is wrong with the frame behind the last whole one, and forget it."""
        problem, too_large = found.problem, max(self._needed, len(self._rest)) > self._frame_bytes_max
        if problem is None and not too_large:
            return
        needed, offset = max(self._needed, len(self._rest)), scanner.offset
        self.forget_unfinished()
        if found.is_message:
            raise BadContents(
                f"no reader could decode a batch of the sender: {problem}",
                where=LogOffset(*segment, offset),
                hint="Nothing of it was stored. Does another program than rt write the sender's log?",
            )
        if problem is not None:
            hint = "Nothing of it was stored. `rt log verify` shows whether the sender's file is damaged."
            raise Corrupt(
                f"the sender's bytes do not verify: {problem}",
                path=segment.file_name,
                offset=offset,
                hint=hint,
            )
        raise MessageTooLarge(
            "a frame above the limit",
            where=LogOffset(*segment, offset),
            got=needed,
            expected=self._frame_bytes_max,
        )

    def _check_follows(self, place: LogOffset, wanted: LogOffset) -> None:
        if place != wanted:
            raise violation("bytes that do not follow", place, wanted)


def violation(what: str, place: LogOffset | SegmentId, wanted: object) -> ProtocolViolation:
    """What a sender did against the order of a log."""
    hint = "Connect again: the receiver says where it goes on."
    return ProtocolViolation(what, got=place, expected=wanted, hint=hint)
