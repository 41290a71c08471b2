"""Verify a log directory: every byte of every segment that is not trimmed, live or finished, without a lock.

Invariants:
- All damage is reported: a bad frame ends the check of its segment, and the next segment is still checked.
- The synced size is read before the bytes are read again, and trims are checked afterwards. So a writer at
  work is never reported as damage.
- In a live log, the bytes that existed at the start are verified.
- A batch that no reader can decode, because it was published in that state, is reported, but is not damage.
"""

from __future__ import annotations

import os

from rt.errors import FormatError
from rt.log.check.directory_view import DirectoryView, Progress, text_of
from rt.log.check.report import Problem, Report, SegmentReport, Severity
from rt.log.check.segment_check import SegmentCheck
from rt.log.check.status import SegmentState
from rt.log.disk import REAL, Disk, File, storage_errors
from rt.log.format.index import index_file_name
from rt.log.format.segment import SEGMENT_HEADER_BYTES, LogKind, SegmentHeader, SegmentId
from rt.log.format.segment_table import SealedSegment
from rt.log.scan.catalog import segment_path
from rt.log.scan.directory import check_log_directory, list_segments, read_header
from rt.log.scan.lineage import SourceLineage
from rt.log.scan.scanner import ScanResult

__all__ = ["Problem", "Progress", "Report", "SegmentReport", "Severity", "verify"]


def verify(path: str | os.PathLike[str], *, disk: Disk = REAL, on_progress: Progress | None = None) -> Report:
    """Verify one log directory; problems are in the report. Raises `rt.LogNotFound` if there is none."""
    directory = os.path.abspath(os.fspath(path))
    check_log_directory(disk, directory)
    with storage_errors(directory, "verifying a log directory"):
        view = DirectoryView(directory, disk, on_progress)
        chain = _Chain(view)
        reports = [_Segment(view, chain, segment).report() for segment in view.segments]
        view.check_durable()
    found = tuple(report for report in reports if report is not None)
    return Report(directory, view.identity, view.durable, found, tuple(view.problems))


class _Chain:
    """The state after the segments checked so far: the last segment, its end, its sources."""

    def __init__(self, view: DirectoryView) -> None:
        self.sources = SourceLineage()
        self._identity = view.identity
        self._last: SegmentId | None = None
        self._end: int | None = None
        self._is_trimmed = False

    def link(self, segment: SegmentId, first: int) -> tuple[Severity, str] | None:
        """The problem if `segment`, which starts at `first`, comes next; None if there is none.

        Numbers are dense within a run. In a publisher's own directory they also continue from run to run. But
        a copy may have closed a run before its publisher did, and a dedup session starts where its source
        continues. After a trimmed segment, a copy may skip messages that its source has trimmed.
        """
        last, end = self._last, self._end
        if last is None or self._identity is None:
            return None
        may_skip = self._is_trimmed and (end is None or first >= end)
        if segment.roll != (last.roll + 1 if segment.run == last.run else 0):
            severity = Severity.NOTE if may_skip else Severity.DAMAGE
            return severity, f"{segment} follows {last}: one between them is missing"
        is_free = self._identity.kind is LogKind.FILTERED or (
            segment.run != last.run and self._identity.dedup_id is not None
        )
        if end is None or first == end or is_free:
            return None
        is_own = segment.run == last.run or self._identity.kind is not LogKind.SESSION
        severity = Severity.DAMAGE if is_own and not may_skip else Severity.NOTE
        return severity, f"starts at {first} where {end} must follow"

    def advance(self, segment: SegmentId, end: int | None, *, is_trimmed: bool = False) -> None:
        """Record that `segment` was checked; it ends at `end`, None if unknown.

        A trimmed one was not scanned to its end, so the state of its sources is unknown.
        """
        self._last, self._end, self._is_trimmed = segment, end, is_trimmed
        if is_trimmed:
            self.sources.reset()


class _Segment:
    """One segment of a directory. Problems are reported when found, and dropped if it was trimmed."""

    def __init__(self, view: DirectoryView, chain: _Chain, segment: SegmentId) -> None:
        self._view = view
        self._chain = chain
        self._id = segment
        self._path = segment_path(view.path, segment)
        self._listed = view.listed.get(segment)
        self._problems: list[Problem] = []

    def report(self) -> SegmentReport | None:
        """Check it; None if it vanished, as trimmed segments do."""
        if self._listed is not None and self._listed.is_trimmed:
            return self._trimmed(self._listed)
        header, file = self._open()
        if header is None or file is None:
            return self._without_header()
        try:
            return self._with_header(header, file)
        finally:
            file.close()

    def _open(self) -> tuple[SegmentHeader | None, File | None]:
        try:
            header = read_header(self._view.disk, self._view.path, self._id)
            return header, None if header is None else self._view.disk.open(self._path)
        except FormatError as error:
            self._report(0, text_of(error))
        except FileNotFoundError:
            pass
        except OSError as error:
            self._report(0, f"cannot be read: {error}")
        return None, None

    def _trimmed(self, entry: SealedSegment) -> SegmentReport:
        self._link(entry.first)
        self._chain.advance(self._id, entry.end, is_trimmed=True)
        return self._result(SegmentState.TRIMMED, entry.first, entry.end, entry.size_bytes)

    def _without_header(self) -> SegmentReport | None:
        """The file is missing or empty, or its header does not verify."""
        entry, is_gone = self._view.current_status(self._id)
        if is_gone:
            self._problems.clear()
            self._chain.sources.reset()
            return None if entry is None else self._trimmed(entry)
        size = self._view.disk.size(self._path)
        if not self._problems:
            self._report(0, "missing" if size is None else "emptied, but not by trimming")
        first, end = (entry.first, entry.end) if entry else (0, 0)
        self._chain.advance(self._id, entry.end if entry else None)
        self._chain.sources.reset()
        return self._result(self._state, first, end, size or 0)

    def _with_header(self, header: SegmentHeader, file: File) -> SegmentReport | None:
        size = file.size()
        self._check_header(header)
        index, bad = self._view.read_index(header)
        name = self._view.identity.name if self._view.identity else ""
        check = SegmentCheck(
            file,
            header,
            name=name,
            sources=self._chain.sources,
            index=index,
            report_damage=self._report,
            report_undecodable=self._report_undecodable,
        )
        try:
            self._walk(check, file, size)
        except OSError as error:
            self._report(check.scanner.offset, f"cannot be read: {error}")
        if self._is_damaged and self._view.current_status(self._id)[1]:
            return self._without_header()
        if self._listed is not None and not self._is_damaged:
            self._check_listed(self._listed, check, size)
        self._report_index(header, bad, "fails its checksum")
        self._report_index(header, check.unmatched_entries(), "points to no such frame")
        if self._is_damaged:
            self._chain.sources.reset()
        end = check.scanner.next if not self._is_damaged else self._listed.end if self._listed else None
        self._chain.advance(self._id, end)
        totals = check.totals
        return self._result(
            self._state, header.first, check.scanner.next, size, totals.message_count, totals.batch_count
        )

    def _result(
        self, state: SegmentState, first: int, end: int, size: int, messages: int = 0, batches: int = 0
    ) -> SegmentReport:
        return SegmentReport(self._id, state, first, end, messages, batches, size, tuple(self._problems))

    # Frames

    def _walk(self, check: SegmentCheck, file: File, size: int) -> None:
        """Scan the existing frames, and decide what their end means."""
        goal = max(size, self._known_whole(file))
        while True:
            scan = ScanResult()
            for scan in check.walk(goal):
                self._view.advance(scan.consumed)
            if check.scanner.boundary >= goal:
                return
            whole = self._known_whole(file)
            if not check.can_go_on(scan):
                self._judge(check, scan, whole, file.size())
                return

    def _known_whole(self, file: File) -> int:
        """The offset up to which frames must verify: the sealed end, or the durable end of the segment that
        grows.
        """
        entry = self._listed or self._view.current_status(self._id)[0]
        if entry is not None:
            return entry.size_bytes
        if any(later > self._id for later in list_segments(self._view.disk, self._view.path)):
            return file.size()
        return max(self._view.synced_end(self._id), SEGMENT_HEADER_BYTES)

    def _judge(self, check: SegmentCheck, scan: ScanResult, whole: int, size: int) -> None:
        scanner = check.scanner
        what = scan.problem or ("cut short" if size > scanner.boundary else "cut off")
        if scanner.boundary < whole:
            self._report(scanner.offset, f"{what}; it was complete up to {whole}")
        elif size > scanner.boundary:
            torn = size - scanner.boundary
            self._report(scanner.boundary, f"{what}: {torn} bytes torn, or being written", Severity.NOTE)

    # Headers, table, index

    def _check_header(self, header: SegmentHeader) -> None:
        identity, listed = self._view.identity, self._listed
        if identity is not None and (header.kind, header.origin) != (identity.kind, identity.origin):
            self._report(0, f"segment of another log: {header.kind.name.lower()} of {header.origin.hex()}")
        if listed is not None:
            expected = (listed.first, listed.created_ns, listed.run_id)
            if (header.first, header.created_ns, header.run_id) != expected:
                self._report(0, "the header differs from its entry in the segments table")
        elif self._view.table is not None and not self._view.is_newest(self._id):
            self._report(0, "sealed, but the segments table does not list it")
        self._link(header.first)

    def _check_listed(self, listed: SealedSegment, check: SegmentCheck, size: int) -> None:
        totals = check.totals
        if size != listed.size_bytes:
            self._report(listed.size_bytes, f"{size} bytes, but sealed at {listed.size_bytes}")
        elif check.scanner.next != listed.end and not self._is_completed(check.scanner.next, listed.end):
            self._report(0, f"ends at {check.scanner.next}, expected {listed.end} from the segments table")
        elif totals.batch_count and not (
            listed.timestamp_low_ns <= totals.times.low_ns
            and totals.times.high_ns <= listed.timestamp_high_ns
        ):
            self._report(0, "messages outside the time range in the segments table")

    def _is_completed(self, walked: int, end: int) -> bool:
        """Whether a filter may have left out the positions after the last block."""
        identity = self._view.identity
        return identity is not None and identity.kind is LogKind.FILTERED and walked < end

    def _report_index(self, header: SegmentHeader, places: list[int], what: str) -> None:
        path = os.path.join(self._view.path, index_file_name(header.id))
        self._problems += [Problem(Severity.NOTE, f"an entry {what}", path, place) for place in places]

    def _link(self, first: int) -> None:
        problem = self._chain.link(self._id, first)
        if problem is not None:
            self._report(0, problem[1], problem[0])

    def _report(self, offset: int, what: str, severity: Severity = Severity.DAMAGE) -> None:
        self._problems.append(Problem(severity, what, self._path, offset))

    def _report_undecodable(self, offset: int, what: str) -> None:
        self._report(offset, what, Severity.BAD_MESSAGE)

    @property
    def _state(self) -> SegmentState:
        return SegmentState.ACTIVE if self._view.is_newest(self._id) else SegmentState.SEALED

    @property
    def _is_damaged(self) -> bool:
        return any(problem.severity is Severity.DAMAGE for problem in self._problems)
