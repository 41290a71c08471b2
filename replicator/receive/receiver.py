"""Receives a log: the only writer of a copy, without network and without asyncio.

Invariants:
- Only whole, verified frames are stored, each at the offset it has at the sender. So a copy is a prefix of
  the log, byte for byte, from the copy's start on.
- Bytes that do not verify or do not follow are refused with an error that names their offset. Earlier bytes
  stay, and the copy can continue at `next_offset`.
- Bytes of an unfinished frame are in memory, bounded by the largest frame allowed.

One thread at a time calls `append` and `seal`; `sync_to` may run in another one.
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
"""A write of this size to the page cache takes less time than a change of threads."""

AnyScanner = TypeVar("AnyScanner", bound=Scanner)


class NotQuick(Exception):
    """A call in an event loop needs a thread. Nothing was changed."""


class Receiver(ABC, Generic[AnyScanner]):
    """Common part of the receivers of sessions and merged logs. Made by `open` of a subclass."""

    def __init__(self, writer: LogWriter, *, frame_bytes_max: int) -> None:
        self.writer = writer
        """Only the receiver calls its methods that change the log. `table` lists the sealed and trimmed
        segments.
        """
        self._scanner: AnyScanner | None = None  # Walks the active segment; None while none is active.
        self._frame_bytes_max = frame_bytes_max
        self._partial = PartialFrame()
        """Bytes after `next_offset` that are no whole frame or segment header yet."""
        self._starting: SegmentId | None = None  # The segment whose header was received in part.
        self._skip_target: SegmentId | None = None
        """The next segment, if set. It need not follow the last segment: the segments between them are not
        needed.
        """
        self._files_lock = threading.Lock()
        """Held while files are closed or synced, so that none is closed while it is synced."""
        self._needed = 0  # Bytes that the scanner needs from its offset on, to verify the next piece.
        self._durable_lock = threading.Lock()
        self._durable = (self.next_offset, self.end)

    @property
    def path(self) -> str:
        return self.writer.path

    @property
    def identity(self) -> LogIdentity:
        return self.writer.identity

    @property
    def next_offset(self) -> LogOffset | None:
        """Where the sender must continue: after the last whole frame of the copy, or at a later segment if
        the segments between are skipped. None if the copy is empty.
        """
        return self._stored_offset() if self._skip_target is None else LogOffset(*self._skip_target, 0)

    def _stored_offset(self) -> LogOffset | None:
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
        """Everything before this offset is on disk: bytes that `open` recovered, and bytes that
        `record_synced` reported.
        """
        return self._durable[0]

    @property
    def durable_end(self) -> int:
        return self._durable[1]

    @property
    def active(self) -> SegmentHeader | None:
        """The segment that grows; None between a seal and the next segment."""
        return None if self._scanner is None else self.writer.active

    @property
    def unfinished_bytes(self) -> int:
        return len(self._partial)

    def is_quick(self, chunk: Chunk) -> bool:
        """Whether `append` is one short write: up to `QUICK_BYTES_MAX`, no new file, no sync."""
        is_active = self.active is not None and self.active.id == chunk.start.segment
        return is_active and len(chunk.data) + len(self._partial) <= QUICK_BYTES_MAX

    def drop_unfinished(self) -> None:
        """The sender starts again at `next_offset`: drop the unfinished frame."""
        self._partial = PartialFrame()
        self._starting = None
        self._needed = 0
        if self._scanner is not None:
            self._scanner = self._rewind(self._scanner)

    def append(self, chunk: Chunk) -> None:
        """Verify and append. When this returns, whole frames can be read, but they are not synced.

        `rt.ProtocolViolation` if the chunk does not follow, `rt.Corrupt` if it does not verify (`offset` is
        in the sender's segment; earlier frames are stored), `rt.BadContents` if no reader could decode it,
        `rt.MessageTooLarge`; storage errors, after which nothing of the chunk counts.
        """
        self._handle_chunk(chunk, is_quick=False)

    def append_if_quick(self, chunk: Chunk) -> bool:
        """`append`, if an event loop may do it; otherwise False, and nothing is stored."""
        if not self.is_quick(chunk):
            return False
        try:
            self._handle_chunk(chunk, is_quick=True)
        except NotQuick:
            return False
        return True

    def _handle_chunk(self, chunk: Chunk, *, is_quick: bool) -> None:
        self.writer.check_usable()
        place = chunk.start
        if self.active is None or self.active.id != place.segment:
            if self._starting is None:
                self._check_start(place)
                self._starting = place.segment
                self._partial, self._needed = PartialFrame(), 0  # Drop the rest of a skipped segment.
            self._check_follows(place, LogOffset(*self._starting, len(self._partial)))
            try:
                chunk = self._handle_header(chunk)
            except BaseException:
                self.drop_unfinished()
                raise
            if not chunk.data:
                return
        assert self._scanner is not None
        self._check_follows(
            chunk.start, chunk.start._replace(offset=self._scanner.boundary + len(self._partial))
        )
        self._handle_frames(chunk, is_quick=is_quick)

    def seal(self, sealed: SegmentSealed) -> None:
        """Seal the segment at its last whole frame; durable on return. A repeated seal does nothing.

        `rt.ProtocolViolation` if the sender's segment has more bytes, or ends at another offset.
        """
        self.writer.check_usable()
        place = self.next_offset
        if place is None or self._starting is not None or place.segment != sealed.end_offset.segment:
            raise violation("a segment is sealed that does not follow", sealed.end_offset, place)
        if self._check_seal(sealed, place) and self._scanner is not None:
            with self._files_lock:
                self._before_seal(sealed)
                self.writer.seal()
                self._scanner = None
            self._became_durable(place, self.end)

    def sync_point(self) -> SyncPoint | None:
        """The end of the stored bytes, for `sync_to`; None if they are known to be durable. Never call it
        during `append`.
        """
        if self._scanner is None or self._durable == (self._stored_offset(), self.end):
            return None
        return self.writer.sync_point()

    def sync_to(self, point: SyncPoint) -> None:
        """Return when all up to `point` is on disk; from any thread. `rt.StorageFailed` ends the receiver."""
        with self._files_lock:
            active = self.writer.active
            if active is None or active.id != point.id or self.writer.is_sealed:
                self.writer.check_usable()
                return  # It was sealed meanwhile: all of it is durable.
            self.writer.sync_to(point)

    def record_synced(self, point: SyncPoint | None) -> None:
        """Record that `sync_to(point)` returned. `point` is None if there was nothing to sync because sealing
        had synced it.
        """
        if point is not None:
            self._became_durable(LogOffset(*point.id, point.offset), point.end)

    def trim(self, before: SegmentId, reason: TrimReason) -> Sequence[SealedSegment]:
        """Trim the sealed segments before `before`. Returns those that were trimmed now."""
        with self._files_lock:
            return self.writer.trim(before, reason)

    def uncacheable_bytes(self, offset: LogOffset) -> int:
        """Number of bytes that `uncache` would drop from the page cache."""
        is_active = self.active is not None and self.active.id == offset.segment
        return self.writer.uncacheable_bytes(offset.offset) if is_active else 0

    def uncache(self, offset: LogOffset) -> None:
        """Drop bytes before `offset` from the page cache: no reader is expected. From any thread."""
        with self._files_lock:
            if self.uncacheable_bytes(offset):
                self.writer.uncache(offset.offset)

    def close(self) -> None:
        """Release files and lock. Does not sync."""
        with self._files_lock:
            self._scanner = None
            self.writer.close()

    # Methods that depend on the kind of log

    @abstractmethod
    def _check_start(self, place: LogOffset) -> None:
        """`rt.ProtocolViolation` unless the segment of `place` may begin now."""

    @abstractmethod
    def _check_header(self, header: SegmentHeader) -> None:
        """`rt.ProtocolViolation` unless the segment that begins is of this log and follows."""

    @abstractmethod
    def _check_seal(self, sealed: SegmentSealed, place: LogOffset) -> bool:
        """Whether to seal now, at `place`. `rt.ProtocolViolation` if the sender's end is wrong."""

    @abstractmethod
    def _new_scanner(self, header: SegmentHeader) -> AnyScanner:
        """A scanner of a segment from its first frame on."""

    @abstractmethod
    def _rewind(self, scanner: AnyScanner) -> AnyScanner:
        """A scanner at the last frame boundary of `scanner`, which may have scanned part of a frame."""

    def _scan(self, scanner: AnyScanner, data: memoryview, *, is_quick: bool) -> ScanResult:  # noqa: ARG002
        """Verify `data`, which starts where the scanner stands, and move the scanner over it.

        With `is_quick` it runs in an event loop, and may raise `NotQuick`.
        """
        return scanner.scan(data)

    @abstractmethod
    def _split_frames(self, scan: ScanResult, data: memoryview, base: int) -> list[BatchFrames]:
        """The whole frames in `data`, which starts at the offset `base` and holds nothing else."""

    def _on_stored(self, scan: ScanResult) -> None:
        """The whole frames that `scan` found were appended."""

    def _became_durable(self, place: LogOffset, end: int) -> None:
        with self._durable_lock:
            known = self._durable[0]
            if known is None or place >= known:
                self._durable = (place, end)

    def _handle_header(self, chunk: Chunk) -> Chunk:
        """Begin the segment once its header is whole. Returns the chunk without the bytes of the header."""
        missing = SEGMENT_HEADER_BYTES - len(self._partial)
        data = memoryview(chunk.data)
        head = bytes(self._partial.view()) + data[:missing]
        rest = Chunk(chunk.start._replace(offset=chunk.start.offset + missing), data[missing:])
        if len(head) < SEGMENT_HEADER_BYTES:
            self._partial = PartialFrame(head)
            return rest
        header = decode_segment_header(head, path=chunk.start.segment.file_name)
        if header.id != chunk.start.segment:
            raise violation("a header of another segment", chunk.start, header.id)
        self._check_header(header)
        self._start_segment(header, head)
        return rest

    def _start_segment(self, header: SegmentHeader, head: bytes) -> None:
        with self._files_lock:
            if self._scanner is not None:
                self._before_seal(None)
                self.writer.seal()
                self._scanner = None
            self._before_start(header)
            self.writer.start(
                header.id,
                first=header.first,
                run_id=header.run_id,
                created_ns=header.created_ns,
                header_bytes=head,
            )
            self._scanner = self._new_scanner(header)
        self._partial, self._starting, self._skip_target = PartialFrame(), None, None
        self._became_durable(LogOffset(*header.id, SEGMENT_HEADER_BYTES), header.first)

    def _before_seal(self, sealed: SegmentSealed | None) -> None:
        """Called before the active segment is sealed: the sender has sealed it, or (None) the rest of it is
        skipped.
        """

    def _before_start(self, header: SegmentHeader) -> None:
        """Called before a segment starts that may not follow the last one. The files are locked."""

    def _handle_frames(self, chunk: Chunk, *, is_quick: bool) -> None:
        scanner = self._scanner
        assert scanner is not None
        held = len(self._partial)
        base = scanner.boundary
        if held:
            self._partial.add(chunk.data, scanner.offset - base + self._needed)
            data = self._partial.view()
        else:
            data = memoryview(chunk.data)
        found = ScanResult()
        if len(data) - (scanner.offset - base) >= self._needed:
            try:
                found = self._append(scanner, data, base, is_quick=is_quick)
            except NotQuick:
                self._partial.cut(held)
                raise
            self._needed = found.needed
        whole = scanner.boundary - base
        if whole or not held:
            total_bytes = scanner.offset - scanner.boundary + min(self._needed, self._frame_bytes_max)
            self._partial = PartialFrame(data[whole:], total_bytes)
        self._check_frame(found, scanner, chunk.start.segment)

    def _append(self, scanner: AnyScanner, data: memoryview, base: int, *, is_quick: bool) -> ScanResult:
        """Verify the new bytes in `data`, which starts at `base`, and store the whole frames in it."""
        before = copy(scanner)
        try:
            found = self._scan(scanner, data[scanner.offset - base :], is_quick=is_quick)
            if runs := self._split_frames(found, data[: scanner.boundary - base], base):
                self.writer.append(runs)
                self._on_stored(found)
        except NotQuick:
            self._scanner = before
            raise
        except BaseException:
            self._scanner = before
            self.drop_unfinished()
            if (stored := self.writer.offset - base) > 0:
                self._scanner.scan(data[:stored])  # On a full disk the frames that fit were stored, and stay.
            raise
        return found

    def _check_frame(self, found: ScanResult, scanner: AnyScanner, segment: SegmentId) -> None:
        """Drop the frame after the last whole one and raise an error, if it is bad or too large."""
        problem, too_large = found.problem, max(self._needed, len(self._partial)) > self._frame_bytes_max
        if problem is None and not too_large:
            return
        needed, offset = max(self._needed, len(self._partial)), scanner.offset
        self.drop_unfinished()
        if found.is_message:
            raise BadContents(
                f"no reader could decode a batch of the sender: {problem}",
                where=LogOffset(*segment, offset),
                hint="Nothing of it was stored. Check whether only rt writes the sender's log.",
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

    def _check_follows(self, place: LogOffset, expected: LogOffset) -> None:
        if place != expected:
            raise violation("bytes that do not follow", place, expected)


def violation(what: str, place: LogOffset | SegmentId, expected: object) -> ProtocolViolation:
    hint = "Connect again: the receiver then names the offset where it continues."
    return ProtocolViolation(what, got=place, expected=expected, hint=hint)
