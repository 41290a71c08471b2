"""The session replicas of this node: opened when something must be stored, reported once durable.

For one event loop, except for the methods that the merger's thread calls.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from typing import Final

from replicator.protocol.messages import Chunk, LogOffset, SegmentSealed
from replicator.receive.group_commit import GroupCommit
from replicator.receive.session_receiver import BoundaryRecorder, SessionReceiver, read_marks
from replicator.receive.session_replica import SessionReplicaWriter, UnfinishedBytes
from rt.errors import Corrupt, DiskFull, LogNotFound, RtError
from rt.log.disk import REAL, Disk, File, storage_errors
from rt.log.format.running_checksum import CONTENT_START, ChecksummedBoundary, chain_of_segment
from rt.log.format.segment import (
    SEGMENT_HEADER_BYTES,
    LogKind,
    SegmentHeader,
    SegmentId,
    encode_segment_header,
)
from rt.log.format.segment_table import LogIdentity, TrimReason
from rt.log.scan.catalog import segment_path
from rt.log.scan.directory import scans
from rt.log.scan.scanner import SessionScanner
from rt.v1 import sequencer_pb2 as pb
from sequencer.leader.replication_tracker import MARK
from sequencer.sessions.batch_index import BatchIndex, RangeInfo
from sequencer.sessions.merge_progress import consumed_number, consumed_place
from sequencer.state.state import End, Session
from sequencer.state.write_plan import BlockWrite

OPENINGS_MAX: Final = 4
"""Maximum number of replicas opened at the same time: each waits for the disk about ten times."""

logger = logging.getLogger("sequencer")


class SessionReplica:
    """One session's replica, while this process has it open."""

    def __init__(self, session_id: int, store: SessionReplicaWriter, disk: Disk) -> None:
        self.session_id = session_id
        self.store = store
        self.announced: dict[int, pb.SessionEnd] = {}
        """By run: the end that the publisher announced."""
        self.finals: dict[int, pb.SessionEnd] = {}
        """By run: the end of what is here, after it was fenced."""
        self.has_stream = False
        """A publisher's stream feeds it."""
        self.is_followed = False
        """A peer's replica feeds it."""
        self.used_s = asyncio.get_running_loop().time()
        """When it was last used."""
        self._users = 0
        self._disk = disk
        self._lock = threading.Lock()
        """Guards the boundaries against the merger's thread."""
        self._marks: dict[SegmentId, BatchIndex] = {}

    @property
    def receiver(self) -> SessionReceiver:
        """The only writer of the directory."""
        return self.store.receiver

    # Use

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Keep it from being closed as idle."""
        self.start_use()
        try:
            yield
        finally:
            self.end_use()

    def start_use(self) -> None:
        """Keep it from being closed as idle until `end_use` was called as often."""
        self._users += 1

    def end_use(self) -> None:
        self._users -= 1
        self.used_s = asyncio.get_running_loop().time()

    @property
    def is_unused(self) -> bool:
        """Whether no operation runs on it, and everything in it is durable."""
        return not self._users and not self.has_stream and self.store.is_idle

    def recover(self, consumed: LogOffset | None) -> None:
        """Read the boundaries of what is here and not merged. All of it is durable."""
        receiver = self.receiver
        recovered = dict(receiver.recovered)
        receiver.recovered = []
        for segment in receiver.writer.table.segments:
            if not segment.is_trimmed and (consumed is None or segment.id >= consumed.segment):
                self.add(segment.id, read_marks(self._disk, receiver.path, segment.id))
        for segment_id, marks in recovered.items():
            self.add(segment_id, marks)

    def add(self, segment: SegmentId, marks: list[ChecksummedBoundary]) -> list[ChecksummedBoundary]:
        """Add durable boundaries. Returns them, after the segment's start if that was not known."""
        known = self._marks.get(segment)
        if known is None:
            beginning = self._beginning(segment)
            marks = marks if beginning is None else [beginning, *marks]
            known = BatchIndex()
        with self._lock:
            known.add(marks)
            self._marks[segment] = known
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
        """The header of a segment that is here, not read from its file: there may be no descriptor left."""
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
        return known or (None if begin is None else self._read_range_info(segment, begin, start, end))

    def _read_range_info(
        self, segment: SegmentId, begin: ChecksummedBoundary, start: int, end: int
    ) -> RangeInfo | None:
        """Read boundaries from the file that were thinned out."""
        header = self._header_of(segment)
        if header is None:
            return None
        marks = BatchIndex()
        marks.add([begin])
        scanner = SessionScanner(
            header,
            offset=begin.offset,
            first=begin.number,
            marks=True,
            chain=begin.chain,
            content=begin.content,
        )
        path = segment_path(self.receiver.path, segment)
        with storage_errors(path, "reading a session replica"):
            file = self._disk.open(path)
        try:
            for scan in scans(file.pread, scanner):
                marks.add(scan.marks)
                if marks.end >= end:
                    break
        finally:
            file.close()
        return marks.range_info(start, end)

    @property
    def unmerged(self) -> list[SegmentId]:
        """The segments with input that is not merged durably or not trimmed yet."""
        return sorted(self._marks)

    def prune_before(self, place: LogOffset) -> None:
        """Drop what is known of bytes before `place`: they are merged here."""
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
        """Drop the boundaries of trimmed segments."""
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
            packed = b"".join(MARK.pack(*mark[:3]) for mark in marks)
            found.append(self._report(segment, packed))
        for run in {*self.announced, *self.finals} - {one.run for one in found}:
            found.append(self._report(SegmentId(run, 0), b""))
        return found

    def report(self, segment: SegmentId, marks: list[ChecksummedBoundary]) -> pb.SegmentReport:
        """A report of boundaries that are new."""
        return self._report(segment, b"".join(MARK.pack(*mark[:3]) for mark in marks))

    def _report(self, segment: SegmentId, packed: bytes) -> pb.SegmentReport:
        return pb.SegmentReport(
            session_id=self.session_id,
            run=segment.run,
            roll=segment.roll,
            marks=packed,
            announced=self.announced.get(segment.run),
            final=self.finals.get(segment.run),
        )

    def end_of(self, run: int) -> pb.SessionEnd:
        """The end of what is here of a run."""
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


def check_no_link(path: str) -> None:
    """`rt.LogNotFound` if a replica's directory, whose name is easily guessed, is a symbolic link."""
    if os.path.islink(path):
        raise LogNotFound(
            "the directory of a session replica is a symbolic link",
            where=path,
            got=f"a link to {os.readlink(path)}",
            expected="a directory",
            hint="Find out who created the link, and remove it.",
        )


class SessionReplicas:
    """All replicas of this process; the merger's `ReplicaSource`."""

    def __init__(
        self,
        directory: str,
        sync: GroupCommit,
        pool: Executor,
        *,
        on_report: Callable[[pb.SegmentReport], None],
        on_durable: Callable[[], None],
        on_failed: Callable[[RtError], None],
        is_released: Callable[[int], bool],
        on_corrupt: Callable[[Corrupt], None],
        disk: Disk = REAL,
    ) -> None:
        """`is_released(session_id)`: whether everything merged of a session is durable in enough merged logs.

        The merger's thread calls `on_corrupt` if a replica does not hold the bytes that must be merged.
        """
        self._is_released, self._on_corrupt = is_released, on_corrupt
        self._directory, self._sync, self._pool, self._disk = directory, sync, pool, disk
        self._on_report, self._on_durable, self._on_failed = on_report, on_durable, on_failed
        self._replicas: dict[int, SessionReplica] = {}
        self._opening = asyncio.Semaphore(OPENINGS_MAX)
        self._openings: dict[int, asyncio.Future[SessionReplica]] = {}
        """By session id: replicas that are being opened."""
        self._closings: dict[int, asyncio.Future[None]] = {}
        """By session id: replicas that are being closed."""
        self._idle: dict[int, LogOffset] = {}
        """By session id: the end of a replica that was closed as idle. All of it is merged."""
        self.unfinished = UnfinishedBytes()

    def is_released(self, session_id: int) -> bool:
        """Whether what the cluster merged of a session need not be kept."""
        return self._is_released(session_id)

    def get(self, session_id: int) -> SessionReplica | None:
        """The replica, if it is open."""
        return self._replicas.get(session_id)

    def all(self) -> list[SessionReplica]:
        """The replicas that are open."""
        return list(self._replicas.values())

    def connected(self) -> list[int]:
        """The ids of the sessions that a publisher's stream feeds."""
        return [replica.session_id for replica in self._replicas.values() if replica.has_stream]

    def path(self, session_id: int) -> str:
        return os.path.join(self._directory, str(session_id))

    def is_idle(self, session: Session) -> bool:
        """Whether the replica was closed, and holds nothing that the cluster has not merged."""
        end, consumed = self._idle.get(session.id), consumed_place(session)
        return end is not None and consumed is not None and end <= consumed

    def is_busy(self, session_id: int) -> bool:
        """Whether the replica is being opened or closed."""
        return session_id in self._openings or session_id in self._closings

    def start_removal(self, session_id: int) -> bool:
        """Keep the replica closed until `end_removal`; False if it is open or being opened."""
        if session_id in self._replicas or self.is_busy(session_id):
            return False
        self._closings[session_id] = asyncio.get_running_loop().create_future()
        return True

    def end_removal(self, session_id: int) -> None:
        """End `start_removal` and forget the replica."""
        self._idle.pop(session_id, None)
        self._closings.pop(session_id).set_result(None)

    async def close_replica(self, replica: SessionReplica) -> None:
        """Close a replica that is unused. The next `open_replica` opens it again."""
        assert replica.is_unused, replica.session_id
        del self._replicas[replica.session_id]
        if replica.receiver.next_offset is not None:
            self._idle[replica.session_id] = replica.receiver.next_offset
        closing = self._closings[replica.session_id] = asyncio.ensure_future(replica.store.close())
        closing.add_done_callback(lambda _: self._closings.pop(replica.session_id))
        await asyncio.shield(closing)

    async def open_replica(self, session: Session) -> SessionReplica:
        """Open the replica, or create it. Storage errors, `rt.Corrupt`.

        If the caller is cancelled, opening continues, because a thread already holds its lock.
        """
        known = self._replicas.get(session.id)
        if known is not None:
            return known
        opening = self._openings.get(session.id)
        if opening is None:
            opening = self._openings[session.id] = asyncio.ensure_future(self._open_replica(session))
            opening.add_done_callback(lambda opening: self._on_opened(session.id, opening))
        return await asyncio.shield(opening)

    def _on_opened(self, session_id: int, opening: asyncio.Future[SessionReplica]) -> None:
        del self._openings[session_id]
        if not opening.cancelled():
            opening.exception()  # Read it so that asyncio does not log it: the waiting callers get it.

    async def _open_replica(self, session: Session) -> SessionReplica:
        async with self._opening:
            loop = asyncio.get_running_loop()
            if (closing := self._closings.get(session.id)) is not None:
                await asyncio.wait([closing])
            self._idle.pop(session.id, None)
            consumed = consumed_place(session)
            gone = consumed if self._is_released(session.id) else None
            identity = LogIdentity(LogKind.SESSION, session.incarnation, session.name, session.dedup_id)

            def open_receiver() -> SessionReceiver:
                check_no_link(self.path(session.id))
                receiver = SessionReceiver.open(
                    self.path(session.id),
                    identity,
                    disk=self._disk,
                    at=gone,
                    number=consumed_number(session),
                )
                if gone is not None:
                    with contextlib.suppress(DiskFull):  # It is trimmed later.
                        receiver.trim(gone.segment, TrimReason.MERGED)
                return receiver

            receiver = await loop.run_in_executor(self._pool, open_receiver)
            store = SessionReplicaWriter(
                receiver,
                self._sync,
                self._pool,
                on_marks=lambda marks: self._on_marks(session.id, marks),
                on_failed=self._on_failed,
                unfinished=self.unfinished,
            )
            replica = SessionReplica(session.id, store, self._disk)
            await loop.run_in_executor(self._pool, replica.recover, gone)
            self._replicas[session.id] = replica
            for report in replica.reports(consumed):
                self._on_report(report)
            self._on_durable()
            return replica

    async def open_aside(self, session: Session, path: str, segment: SegmentId) -> SessionReplica:
        """Create an empty replica in another directory, starting with `segment`, that is not reported.

        The caller must close its store.
        """
        identity = LogIdentity(LogKind.SESSION, session.incarnation, session.name, session.dedup_id)

        def open_receiver() -> SessionReceiver:
            check_no_link(path)
            return SessionReceiver.open(path, identity, disk=self._disk, at=LogOffset(*segment, 0))

        receiver = await asyncio.get_running_loop().run_in_executor(self._pool, open_receiver)
        store = SessionReplicaWriter(
            receiver,
            self._sync,
            self._pool,
            on_marks=lambda _: None,
            on_failed=self._on_failed,
            unfinished=self.unfinished,
        )
        return SessionReplica(session.id, store, self._disk)

    async def close(self) -> None:
        """Close all replicas. Bytes that are not synced were not reported."""
        await asyncio.gather(*self._openings.values(), *self._closings.values(), return_exceptions=True)
        for replica in self.all():
            await replica.store.close()
        self._replicas.clear()

    async def append(self, replica: SessionReplica, item: Chunk | SegmentSealed) -> None:
        """Store what a stream or a peer sends."""
        await replica.store.append(item)
        if isinstance(item, SegmentSealed) and item.is_last_of_run:
            place = item.end_offset
            self._announce(replica, place.run, End(place.roll, place.offset, item.end))

    def announce(self, replica: SessionReplica, run: int, end: End) -> None:
        """Report that the publisher has nothing of a run after `end`, unless an end is announced."""
        if run not in replica.announced:
            self._announce(replica, run, end)

    def _announce(self, replica: SessionReplica, run: int, end: End) -> None:
        replica.announced[run] = pb.SessionEnd(
            session_id=replica.session_id, run=run, roll=end.roll, offset=end.offset, number=end.number
        )
        self._on_report(replica.report(SegmentId(run, end.roll), []))

    async def skip_merged(self, replica: SessionReplica, session: Session) -> None:
        """Skip the bytes that the cluster has merged and this replica is missing: peers have them merged."""
        consumed = consumed_place(session)
        if consumed is not None:
            await self.skip_to(replica, session, consumed, consumed_number(session))

    async def skip_to(
        self, replica: SessionReplica, session: Session, place: LogOffset, number: int | None
    ) -> None:
        """Continue at `place`, before which the cluster has merged everything.

        Bytes before it are trimmed only when they are durable in the merged logs of this node and of a
        majority: other nodes may have lost theirs, or never had them.
        """
        keep = not self._is_released(session.id)
        await replica.store.call_alone(replica.receiver.skip_to, place, number, keep=keep)
        replica.prune_trimmed()

    async def finish(self, replica: SessionReplica, run: int) -> None:
        """Report the end of a fenced run when everything here of it is durable."""
        with replica.in_use():
            await replica.store.call_alone(lambda: None)
            end = replica.end_of(run)
            place = LogOffset(run, end.roll, end.offset)
            told = replica.store.progress
            while told.durable < place and end.number:
                told = await replica.store.next_progress(told)
            replica.finals[run] = end
            self._on_report(replica.report(SegmentId(run, end.roll), []))

    async def trim(self, replica: SessionReplica, place: LogOffset) -> None:
        """Release everything before `place`, which is merged durably: whole segments, and memory."""
        replica.prune_before(place)
        table = replica.receiver.writer.table
        with replica.in_use():
            if any(one.id < place.segment and not one.is_trimmed for one in table.segments):
                await replica.store.call_alone(replica.receiver.trim, place.segment, TrimReason.MERGED)
            if replica.receiver.uncached_with(place) > 0:
                await asyncio.get_running_loop().run_in_executor(self._pool, replica.receiver.uncache, place)

    def _on_marks(self, session_id: int, marked: list[BoundaryRecorder]) -> None:
        replica = self._replicas.get(session_id)
        if replica is None:
            return
        for segment, marks in marked:
            self._on_report(replica.report(segment, replica.add(segment, marks)))
        self._on_durable()

    # For the merger's thread

    def range_info(self, session_id: int, segment: SegmentId, start: int, end: int) -> RangeInfo | None:
        """See `merger.ReplicaSource`. The merger's thread calls this and the two methods below."""
        replica = self._replicas.get(session_id)
        return None if replica is None else replica.range_info(segment, start, end)

    def open(self, session_id: int, segment: SegmentId) -> File:
        return self._disk.open(segment_path(self.path(session_id), segment))

    def on_bad_replica(self, block: BlockWrite, got: str) -> None:
        self._on_corrupt(
            Corrupt(
                "a session replica holds other bytes than the merge instruction names",
                path=segment_path(self.path(block.session_id), SegmentId(block.run, block.roll)),
                offset=block.start,
                got=got,
                expected=f"whole up to {block.end}",
                hint="The node fetches good bytes from a peer.",
            )
        )
