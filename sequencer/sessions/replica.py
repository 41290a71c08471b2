"""One session's replica of this node, while this process has it open.

For one event loop, except for the methods that the merger's thread calls.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterable, Iterator
from typing import Final

from replicator.protocol.messages import LogOffset
from replicator.receive.batch_boundaries import read_marks
from replicator.receive.session_receiver import SessionReceiver
from replicator.receive.session_replica import SessionReplicaWriter
from rt.log.disk import Disk, storage_errors
from rt.log.format.running_checksum import CONTENT_START, ChecksummedBoundary, chain_of_segment
from rt.log.format.segment import SEGMENT_HEADER_BYTES, SegmentHeader, SegmentId, encode_segment_header
from rt.log.scan.catalog import segment_path
from rt.log.scan.directory import scans
from rt.log.scan.scanner import SessionScanner
from rt.v1 import sequencer_pb2 as pb
from sequencer.leader.boundary_thinning import thin_out_session
from sequencer.leader.replication_tracker import MARK
from sequencer.sessions.batch_index import BatchIndex, RangeInfo

MARKS_MAX: Final = 1 << 16
"""At most this many of a session's newest boundaries are all kept: 3 MB. Older ones are thinned out."""


class SessionReplica:
    """One session's replica, while this process has it open."""

    def __init__(self, session_id: int, store: SessionReplicaWriter, disk: Disk) -> None:
        self.session_id = session_id
        self.store = store
        self.announced: dict[int, pb.SessionEnd] = {}
        """By run: the end that the publisher announced."""
        self.finals: dict[int, pb.SessionEnd] = {}
        """By run: the end of the bytes here, after the run was fenced."""
        self.has_stream = False
        """Whether a publisher's stream feeds this replica."""
        self.is_followed = False
        """Whether a peer's replica feeds this replica."""
        self.used_s = asyncio.get_running_loop().time()
        self._users = 0
        self._disk = disk
        self._lock = threading.Lock()
        """Guards the boundaries against the merger's thread."""
        self._marks: dict[SegmentId, BatchIndex] = {}
        self._added = 0
        """How many boundaries were added since the last thinning."""

    @property
    def receiver(self) -> SessionReceiver:
        """The only writer of the directory."""
        return self.store.receiver

    # Use

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Keep the replica from being closed as idle."""
        self.start_use()
        try:
            yield
        finally:
            self.end_use()

    def start_use(self) -> None:
        """Keep the replica from being closed as idle, until `end_use` was called as many times as
        `start_use`.
        """
        self._users += 1

    def end_use(self) -> None:
        self._users -= 1
        self.used_s = asyncio.get_running_loop().time()

    @property
    def is_unused(self) -> bool:
        """Whether no operation runs on it, and everything in it is durable."""
        return not self._users and not self.has_stream and self.store.is_idle

    def recover(self, consumed: LogOffset | None) -> None:
        """Read the boundaries of the bytes here that are not merged. All of these bytes are durable."""
        receiver = self.receiver
        recovered = dict(receiver.recovered)
        receiver.recovered = []
        for segment in receiver.writer.table.segments:
            if not segment.is_trimmed and (consumed is None or segment.id >= consumed.segment):
                self.add(segment.id, read_marks(self._disk, receiver.path, segment.id))
        for segment_id, marks in recovered.items():
            self.add(segment_id, marks)

    def read_again(self, segment: SegmentId) -> list[ChecksummedBoundary]:
        """Read the boundaries of a sealed segment. Add and return the boundaries after the last known one."""
        known = self._marks.get(segment)
        table = self.receiver.writer.table
        if known is None or not any(one.id == segment and not one.is_trimmed for one in table.segments):
            return []  # It is merged, or all of it was known when it was written.
        marks = read_marks(self._disk, self.receiver.path, segment)
        new = [one for one in marks if one.offset > known.end]
        return self.add(segment, new) if new and segment in self._marks else []  # Or it is merged by now.

    def add(self, segment: SegmentId, marks: list[ChecksummedBoundary]) -> list[ChecksummedBoundary]:
        """Add durable boundaries, and return them. The start of the segment comes first if it was not
        known.
        """
        known = self._marks.get(segment)
        if known is None:
            beginning = self._beginning(segment)
            marks = marks if beginning is None else [beginning, *marks]
            known = BatchIndex()
        with self._lock:
            known.add(marks)
            self._marks[segment] = known
            self._added += len(marks)
            if self._added > max(MARKS_MAX // 4, len(self._marks)):
                self._added = 0
                thin_out_session(self._marks, MARKS_MAX)
        return marks

    def _beginning(self, segment: SegmentId) -> ChecksummedBoundary | None:
        header = self._header_of(segment)
        if header is None:
            return None
        chain = chain_of_segment(encode_segment_header(header))
        times = header.created_ns, header.created_ns
        return ChecksummedBoundary(SEGMENT_HEADER_BYTES, header.first, chain, *times, CONTENT_START)

    def covers(self, segment: SegmentId, start: int, end: int) -> bool:
        """Whether a range is here and durable."""
        with self._lock:
            marks = self._marks.get(segment)
            return marks is not None and marks.before(start) is not None and marks.end >= end

    def has(self, segment: SegmentId, start: int, end: int, chain_end: int) -> bool:
        """Whether a range is here and durable, with that running checksum at its end.

        If the boundaries there were thinned out, the checksum is not compared.
        """
        with self._lock:
            marks = self._marks.get(segment)
            known = None if marks is None else marks.range_info(start, end)
        return known.chain_end == chain_end if known is not None else self.covers(segment, start, end)

    def _header_of(self, segment: SegmentId) -> SegmentHeader | None:
        """The header of a segment that is here. It is not read from the file, because the process may have no
        file descriptor left.
        """
        writer = self.receiver.writer
        active = writer.active
        if active is not None and active.id == segment:
            return active
        for one in reversed(writer.table.segments):
            if one.id == segment and not one.is_trimmed:
                identity = writer.identity
                return SegmentHeader(
                    identity.kind, one.id, one.first, one.created_ns, identity.origin, one.run_id
                )
        return None

    def range_info(self, segment: SegmentId, start: int, end: int) -> RangeInfo | None:
        """See `merger.ReplicaSource.range_info`."""
        with self._lock:
            marks = self._marks.get(segment)
            if marks is None or marks.end < end:
                return None
            known, begin = marks.range_info(start, end), marks.before(start)
        if known is not None or begin is None:
            return known
        return self._read_thinned(segment, begin, end).range_info(start, end)

    def has_thinned(self, place: LogOffset) -> bool:
        """Whether the boundary at `place` may have been thinned out: later bytes are here."""
        with self._lock:
            marks = self._marks.get(place.segment)
            known = None if marks is None else marks.before(place.offset)
            return marks is not None and known is not None and known.offset < place.offset < marks.end

    def boundary_at(self, place: LogOffset) -> ChecksummedBoundary | None:
        """The boundary at `place`, from the segment's file; None if there is none, or it is merged."""
        with self._lock:
            marks = self._marks.get(place.segment)
            begin = None if marks is None else marks.before(place.offset)
        if begin is None:
            return None
        found = self._read_thinned(place.segment, begin, place.offset).before(place.offset)
        return found if found is not None and found.offset == place.offset else None

    def _read_thinned(self, segment: SegmentId, begin: ChecksummedBoundary, end: int) -> BatchIndex:
        """Read from the segment's file the boundaries from `begin` to `end`, which were thinned out."""
        marks = BatchIndex()
        marks.add([begin])
        header = self._header_of(segment)
        if header is None:
            return marks
        scanner = SessionScanner(
            header,
            offset=begin.offset,
            first=begin.number,
            marks=True,
            chain=begin.chain,
            content=begin.content,
        )
        path = segment_path(self.receiver.path, segment)
        with (
            storage_errors(path, "reading a session replica"),
            contextlib.closing(self._disk.open(path)) as file,
        ):
            for scan in scans(file.pread, scanner):
                marks.add(scan.marks)
                if marks.end >= end:
                    break
        return marks

    @property
    def unmerged(self) -> list[SegmentId]:
        """The segments with input that is not merged durably or not trimmed yet."""
        return sorted(self._marks)

    def prune_before(self, place: LogOffset) -> None:
        """Drop the known boundaries and ends of bytes before `place`: these bytes are merged here."""
        with self._lock:
            for segment in [segment for segment in self._marks if segment < place.segment]:
                del self._marks[segment]
            marks = self._marks.get(place.segment)
            if marks is not None:
                marks.prune_before(place.offset)
        for ends in (self.announced, self.finals):
            for run in [run for run in ends if run < place.run]:
                del ends[run]

    def prune_trimmed(self) -> None:
        for segment in self.receiver.writer.table.segments:
            if segment.is_trimmed:
                with self._lock:
                    self._marks.pop(segment.id, None)

    def reports(self, consumed: LogOffset | None) -> list[pb.SegmentReport]:
        """Everything that a new control process needs to know."""
        found: list[pb.SegmentReport] = []
        for segment, marks in sorted(self._marks.items()):
            if consumed is not None and segment < consumed.segment:
                continue
            found.append(self.report(segment, marks))
        for run in {*self.announced, *self.finals} - {one.run for one in found}:
            found.append(self.report(SegmentId(run, 0), ()))
        return found

    def report(self, segment: SegmentId, marks: Iterable[ChecksummedBoundary]) -> pb.SegmentReport:
        """A report of boundaries that are new."""
        return pb.SegmentReport(
            session_id=self.session_id,
            run=segment.run,
            roll=segment.roll,
            boundaries=b"".join(MARK.pack(*mark[:3]) for mark in marks),
            announced=self.announced.get(segment.run),
            final=self.finals.get(segment.run),
        )

    def end_of(self, run: int) -> pb.SessionEnd:
        receiver = self.receiver
        place = receiver.next_offset
        if receiver.active is not None and place is not None and place.run == run:
            return self._end(place, receiver.end)
        sealed = [one for one in receiver.writer.table.segments if one.id.run == run]
        if not sealed:
            return self._end(LogOffset(run, 0, SEGMENT_HEADER_BYTES), 0)
        return self._end(LogOffset(*sealed[-1].id, sealed[-1].size_bytes), sealed[-1].end)

    def _end(self, place: LogOffset, number: int) -> pb.SessionEnd:
        return pb.SessionEnd(
            session_id=self.session_id,
            run=place.run,
            roll=place.roll,
            offset=place.offset,
            number=number,
            chain=self._chain_at(place),
        )

    def _chain_at(self, place: LogOffset) -> int | None:
        """The running checksum at the end of a segment; None if the segment is trimmed or unknown."""
        receiver = self.receiver
        if receiver.active is not None and receiver.active.id == place.segment:
            return receiver.chain
        marks = self._marks.get(place.segment)
        mark = marks.before(place.offset) if marks is not None else None
        return mark.chain if mark is not None and mark.offset == place.offset else None
