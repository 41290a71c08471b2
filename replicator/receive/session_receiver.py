"""Receives a session: the only writer of a session replica.

Invariants:
- Only bytes of the started run are accepted, in segments with its run id, in the publisher's order. A segment
  starts after the previous one is sealed. A run starts after the sender has sealed the last segment of the
  previous run. Segments may be skipped if they are merged (`skip_to`).
- Replicas of one session have the same bytes on all nodes.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Final, NamedTuple

from replicator.protocol.column_check import QUICK_BYTES_MAX as EXPANDED_BYTES_MAX
from replicator.protocol.column_check import BadColumns, check_columns, expanded_bytes
from replicator.protocol.handshake import NOWHERE
from replicator.protocol.messages import LogOffset, Run, SegmentSealed, WholeRun
from replicator.receive.batch_boundaries import SegmentBoundaries
from replicator.receive.receiver import NotQuick, Receiver, violation
from rt.errors import ClusterMismatch, Fenced
from rt.log.disk import REAL, Disk
from rt.log.format.constants import MESSAGE_BYTES_MAX
from rt.log.format.segment import (
    SEGMENT_HEADER_BYTES,
    LogKind,
    SegmentHeader,
    SegmentId,
    decode_segment_header,
)
from rt.log.format.segment_table import LogIdentity, TrimReason
from rt.log.scan.recovery_scan import RecoveryScan
from rt.log.scan.scanner import ScanResult, SessionScanner
from rt.log.write.writer import BatchFrames, LogWriter, SyncPoint, WholeSegment

_ONE_MESSAGE_BYTES: Final = 4096
"""The most bytes that a batch of one message needs besides its value: headers, padding, the longest topic."""
FRAME_BYTES_MAX: Final = MESSAGE_BYTES_MAX + _ONE_MESSAGE_BYTES

_LARGE_CHECKS: Final = threading.BoundedSemaphore(2)
"""Held while a large compressed batch is checked. A check uses up to 26 MiB; two keep two cores busy."""


class _Merged(NamedTuple):
    """Everything before `offset` is merged; `number` is the next number to merge, if it is known."""

    offset: LogOffset
    number: int | None
    keep: bool = False  # Do not trim the earlier segments yet.


class SyncedBatches(NamedTuple):
    """What is on disk after a sync."""

    boundaries: list[SegmentBoundaries]
    """The boundaries that were not returned before. All of them are before `durable`."""
    durable: LogOffset | None
    end: int
    """The number that follows at `durable`."""


class SessionReceiver(Receiver[SessionScanner]):
    """Made by `open`. `recovered`: the batch boundaries of the segment that was active at that time, all
    durable.
    """

    def __init__(self, writer: LogWriter, *, frame_bytes_max: int) -> None:
        self.recovered: list[SegmentBoundaries] = []
        self._unsynced: deque[SegmentBoundaries] = deque()
        """The boundaries of each append. `on_synced` may remove the oldest while another thread appends."""
        self._run: Run | None = None
        self._ended: SegmentId | None = None  # The last segment of its run, as the sender reported.
        self._merged = _Merged(NOWHERE, None)
        self._is_jump = False  # The segment that begins was accepted because everything before it is merged.
        super().__init__(writer, frame_bytes_max=frame_bytes_max)

    @classmethod
    def open(
        cls,
        path: str,
        identity: LogIdentity,
        *,
        disk: Disk = REAL,
        at: LogOffset | None = None,
        number: int | None = None,
        frame_bytes_max: int = FRAME_BYTES_MAX,
    ) -> SessionReceiver:
        """Lock and recover the replica (created if missing); it continues at its end.

        Everything before `at` is merged. So the segments before it are trimmed if one of them is incomplete.
        `number` comes next: see `skip_to`. `rt.Corrupt`, `rt.DirectoryLocked`, `rt.ClusterMismatch` (another
        incarnation), storage errors.
        """
        assert identity.kind is LogKind.SESSION, identity
        writer = LogWriter.open(
            path,
            identity,
            disk=disk,
            resume=True,
            needed_from=None if at is None else at.segment,
            scanner_for=_marking_scanner,
        )
        try:
            receiver = cls(writer, frame_bytes_max=frame_bytes_max)
            receiver._resume(None if writer.is_sealed else writer.recovered.resumed)
            if at is not None:
                receiver.skip_to(at, number)
        except BaseException:
            writer.close()
            raise
        return receiver

    @property
    def chain(self) -> int | None:
        """The running checksum of the segment at `next_offset`; None while no segment is active."""
        return None if self._scanner is None else self._scanner.chain

    @property
    def run(self) -> Run | None:
        return self._run

    def start_run(self, run: Run) -> None:
        """Accept only segments of this run from now on.

        `rt.Fenced` if the replica holds a later run, or one with this number and another id.
        """
        last = self.writer.last_id
        if last is not None and run.number < last.run:
            raise Fenced(
                "a run that a later one has followed", where=self.path, got=run.number, expected=last.run
            )
        known = self._run_id_of(run.number)
        if known is not None and known != run.run_id:
            raise Fenced(
                f"another run with the number {run.number}",
                where=self.path,
                got=run.run_id.hex(),
                expected=known.hex(),
                hint="Two publishers share a session directory, or copies of it: use one directory for each.",
            )
        self._run = run

    def may_append_whole(self, run: WholeRun) -> bool:
        """Whether this whole run comes next, and no segment is active or started."""
        is_free = self._scanner is None and self._starting is None and self._skip_target is None
        return is_free and self._is_due(run.items[1].start)

    def append_whole(self, runs: Sequence[WholeRun]) -> None:
        """`start_run`, `append` and `seal` for runs that follow each other; durable on return, all or none.

        `may_append_whole` must be true for the first run. Raises the errors of these three methods.
        """
        self.writer.check_usable()
        known, self._is_jump = self._run, False
        segments: list[WholeSegment] = []
        marks: list[SegmentBoundaries] = []
        try:
            for run in runs:
                self.start_run(run.run)
                segment, found = self._checked(run)
                segments.append(segment)
                marks.append(found)
        except BaseException:
            self._run = known
            raise
        with self._files_lock:
            self.writer.add_whole(segments)
        self._ended = segments[-1].header.id
        self._unsynced.extend(one for one in marks if one.marks)
        self._became_durable(runs[-1].end_offset, self.end)

    def _checked(self, run: WholeRun) -> tuple[WholeSegment, SegmentBoundaries]:
        """The segment of a whole run, verified as `append` does, and its batch boundaries."""
        data = memoryview(run.data)
        header = decode_segment_header(bytes(data[:SEGMENT_HEADER_BYTES]), path=run.segment.file_name)
        if header.id != run.segment:
            raise violation("a header of another segment", run.segment, header.id)
        self._check_header(header)
        scanner = self._new_scanner(header)
        found = self._scan(scanner, data[SEGMENT_HEADER_BYTES:], is_quick=False)
        self._check_frame(found, scanner, header.id)
        if (scanner.boundary, scanner.next) != (len(data), run.end):
            expected = f"{LogOffset(*header.id, scanner.boundary)}, number {scanner.next}"
            raise violation(f"a whole run ends with number {run.end}", run.end_offset, expected)
        low_ns = min((mark.timestamp_low_ns for mark in found.marks), default=0)
        high_ns = max((mark.timestamp_high_ns for mark in found.marks), default=0)
        whole = WholeSegment(header, data, run.end, (low_ns, high_ns))
        return whole, SegmentBoundaries(header.id, found.marks)

    @property
    def has_ended(self) -> bool:
        """Whether the sender sealed the last segment as the last one of its run."""
        return self._scanner is None and self._ended is not None and self._ended == self.writer.last_id

    def skip_to(self, at: LogOffset, number: int | None = None, *, keep: bool = False) -> None:
        """Everything before `at` is merged: a replica that ends in an earlier segment continues at the start
        of the segment of `at`.

        Earlier segments are trimmed unless `keep`. `number` must be merged next. If it is given, the sender
        may also continue at a later segment of that run, if that segment starts with `number`: the sender may
        have trimmed the segments between. Do not call it during `append`. Repeat it while merging continues.
        """
        if at >= self._merged.offset:
            self._merged = _Merged(at, number, keep)
        place = self.next_offset
        if place is not None and place.segment >= at.segment:
            return
        self.drop_unfinished()
        with self._files_lock:
            if self._scanner is not None:
                self.writer.seal()
                self._scanner = None
            if not keep:
                self.writer.trim(at.segment, TrimReason.MERGED)
        if (stored := self._stored_offset()) is not None:
            self._became_durable(stored, self.end)
        self._skip_target = at.segment

    def on_synced(self, point: SyncPoint | None) -> SyncedBatches:
        """Call `record_synced`. Return what became durable, also in segments that were sealed since.

        Another thread may seal a segment meanwhile. The next call returns the boundaries that this makes
        durable.
        """
        self.record_synced(point)
        durable, end = self._durable
        ready: list[SegmentBoundaries] = []
        while self._unsynced and durable is not None:
            segment, marks = self._unsynced[0]
            if LogOffset(*segment, marks[-1].offset) > durable:
                break
            ready.append(self._unsynced.popleft())
        return SyncedBatches(ready, durable, end)

    def _check_start(self, place: LogOffset) -> None:
        if self._run is None or place.run != self._run.number:
            raise violation(
                "bytes of a run that was not announced", place, self._run and f"run {self._run.number}"
            )
        self._is_jump = not self._is_due(place) and self._is_merged_before(place.segment)
        if not self._is_jump and not self._is_due(place):
            raise violation("a segment that does not follow", place, self.next_offset)

    def _is_due(self, place: LogOffset) -> bool:
        """Whether the segment of `place` is the target of a skip, or follows the last one."""
        last = self.writer.last_id
        if self._skip_target is not None or last is None:
            return self._skip_target in {None, place.segment}
        if self._scanner is not None:
            return False
        if place.run == last.run:
            return place.roll == last.roll + 1 and self._ended != last
        return place.run > last.run and place.roll == 0 and self._ended == last

    def _is_merged_before(self, segment: SegmentId) -> bool:
        """Whether everything before the segment may be merged; `_check_header` compares its first number."""
        merged = self._merged
        return (
            merged.number is not None and merged.offset.run == segment.run and merged.offset.segment < segment
        )

    def _check_header(self, header: SegmentHeader) -> None:
        if header.kind is not LogKind.SESSION or header.origin != self.identity.origin:
            raise ClusterMismatch(
                "a segment of another session, or another incarnation of it",
                where=header.id,
                got=header.origin.hex(),
                expected=self.identity.origin.hex(),
            )
        assert self._run is not None
        if header.run_id != self._run.run_id:
            raise violation(
                f"{header.id} has the run id {header.run_id.hex()}", header.id, self._run.run_id.hex()
            )
        last = self.writer.last_id
        follows = last is not None and last.run == header.id.run and self._skip_target is None
        expected = self._merged.number if self._is_jump else self.end
        if (self._is_jump or follows) and header.first != expected:
            raise violation(f"{header.id} begins with number {header.first}", header.id, expected)

    def _check_seal(self, sealed: SegmentSealed, place: LogOffset) -> bool:
        """If a publisher lost unsynced bytes, its run ends before the end of the replica, which keeps them.

        Such a seal counts when it is repeated as the last seal of its run. Until then nothing is sealed.
        """
        is_whole = sealed.end_offset == place and not self._partial and sealed.end == self.end
        offset = sealed.end_offset.offset
        is_shorter = SEGMENT_HEADER_BYTES <= offset < place.offset and offset % 8 == 0
        is_shorter = is_shorter and sealed.end <= self.end
        if not is_whole and not is_shorter:
            unfinished = f"{len(self._partial)} bytes of an unfinished batch after it"
            expected = f"{place}, number {self.end}, {unfinished}"
            raise violation(f"a segment is sealed with end {sealed.end}", sealed.end_offset, expected)
        if sealed.is_last_of_run:
            self._ended = place.segment
        return is_whole or sealed.is_last_of_run

    def _before_start(self, header: SegmentHeader) -> None:
        if self._is_jump and not self._merged.keep:
            self.writer.trim(header.id, TrimReason.MERGED)

    def _new_scanner(self, header: SegmentHeader) -> SessionScanner:
        return _marking_scanner(header)

    def _rewind(self, scanner: SessionScanner) -> SessionScanner:
        return scanner  # It stops only at boundaries.

    def _scan(self, scanner: SessionScanner, data: memoryview, *, is_quick: bool) -> ScanResult:
        """As the base class. Also verifies that every reader can decode each batch."""
        start, number, chain, content = scanner.offset, scanner.next, scanner.chain, scanner.content
        found = scanner.scan(data)
        if is_quick and sum(expanded_bytes(placed.header) for placed in found.batches) > EXPANDED_BYTES_MAX:
            raise NotQuick
        for placed in found.batches:
            is_large = expanded_bytes(placed.header) > EXPANDED_BYTES_MAX
            try:
                with _LARGE_CHECKS if is_large else nullcontext():
                    check_columns(
                        placed.header, data[placed.start : placed.start + placed.header.total_bytes]
                    )
            except BadColumns as problem:
                scanner.offset, scanner.next, scanner.chain, scanner.content = start, number, chain, content
                found = scanner.scan(data[: placed.start])
                found.problem, found.is_message = str(problem), True
                break
        return found

    def _split_frames(self, scan: ScanResult, data: memoryview, base: int) -> list[BatchFrames]:  # noqa: ARG002
        if not scan.batches:
            return []
        active, scanner = self.active, self._scanner
        assert active is not None
        assert scanner is not None
        low_ns = min(mark.timestamp_low_ns for mark in scan.marks)
        high_ns = max(mark.timestamp_high_ns for mark in scan.marks)
        return [BatchFrames([data], scanner.next, low_ns, high_ns)]

    def _on_stored(self, scan: ScanResult) -> None:
        active = self.active
        assert active is not None
        if scan.marks:
            self._unsynced.append(SegmentBoundaries(active.id, scan.marks))

    def _resume(self, walk: RecoveryScan | None) -> None:
        if walk is not None:
            assert isinstance(walk.scanner, SessionScanner)
            self._scanner = walk.scanner
            self.recovered = [SegmentBoundaries(walk.header.id, walk.marks)]
            walk.marks = []  # The writer keeps the walk: the boundaries may be many.
        if (place := self.next_offset) is not None:
            self._became_durable(place, self.end)

    def _run_id_of(self, number: int) -> bytes | None:
        """The id of run `number`, from the active segment or the last sealed one."""
        if self.active is not None and self.active.id.run == number:
            return self.active.run_id
        sealed = self.writer.table.segments
        return sealed[-1].run_id if sealed and sealed[-1].id.run == number else None


def _marking_scanner(header: SegmentHeader) -> SessionScanner:
    return SessionScanner(header, marks=True)
