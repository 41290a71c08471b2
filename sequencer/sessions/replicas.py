"""The copies of sessions on this node: opened when something is to be stored, reported once durable.

One event loop uses it, but for what `Sources` offers the merger's thread.
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
from sequencer.state.state import Session
from sequencer.state.write_plan import BlockWrite

OPENINGS_MAX: Final = 4
"""Copies that are opened at once: each waits for the disk some ten times."""

logger = logging.getLogger("sequencer")


class SessionReplica:
    """One session's copy, while this process has it open."""

    def __init__(self, session_id: int, store: SessionReplicaWriter, disk: Disk) -> None:
        self.session_id = session_id
        self.store = store
        self.announced: dict[int, pb.SessionEnd] = {}
        """By X: where the sender says that it ends."""
        self.finals: dict[int, pb.SessionEnd] = {}
        """By X: all there is of it, now that it is fenced."""
        self.has_stream = False
        """A publisher's stream feeds it."""
        self.is_followed = False
        """A peer's copy does."""
        self.used_s = asyncio.get_running_loop().time()
        """When it was last used."""
        self._users = 0
        self._disk = disk
        self._lock = threading.Lock()
        """Guards the marks against the merger."""
        self._marks: dict[SegmentId, BatchIndex] = {}

    @property
    def receiver(self) -> SessionReceiver:
        """The one writer of the directory."""
        return self.store.receiver

    # Use

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Within, nobody closes it as idle."""
        self.begin_use()
        try:
            yield
        finally:
            self.end_use()

    def begin_use(self) -> None:
        """Nobody closes it as idle before `end_use` was called as often."""
        self._users += 1

    def end_use(self) -> None:
        """See `begin_use`."""
        self._users -= 1
        self.used_s = asyncio.get_running_loop().time()

    @property
    def is_unused(self) -> bool:
        """Whether nothing is done to it, and all that it holds is durable."""
        return not self._users and not self.has_stream and self.store.is_idle

    # Marks

    def recover(self, consumed: LogOffset | None) -> None:
        """Read the boundaries of what is here and not merged; all of it is durable."""
        receiver = self.receiver
        recovered = dict(receiver.recovered)
        receiver.recovered = []
        for segment in receiver.writer.table.segments:
            if not segment.is_trimmed and (consumed is None or segment.id >= consumed.segment):
                self.add(segment.id, read_marks(self._disk, receiver.path, segment.id))
        for segment_id, marks in recovered.items():
            self.add(segment_id, marks)

    def add(self, segment: SegmentId, marks: list[ChecksummedBoundary]) -> list[ChecksummedBoundary]:
        """Boundaries that are durable now; with the segment's beginning, if it was not known."""
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
        """Whether a range is here, durable."""
        with self._lock:
            marks = self._marks.get(segment)
            return marks is not None and marks.before(start) is not None and marks.end >= end

    def has(self, segment: SegmentId, start: int, end: int, chain_end: int) -> bool:
        """Whether a range is here, durable, with that chain at its end.

        If the marks there were thinned out, the chain is not looked at.
        """
        with self._lock:
            marks = self._marks.get(segment)
            known = None if marks is None else marks.stretch(start, end)
        return known.chain_end == chain_end if known is not None else self.covers(segment, start, end)

    def _header_of(self, segment: SegmentId) -> SegmentHeader | None:
        """The header of a segment that is here, without its file: there may be no descriptor left."""
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

    def stretch(self, segment: SegmentId, start: int, end: int) -> RangeInfo | None:
        """See `Sources.stretch`."""
        with self._lock:
            marks = self._marks.get(segment)
            if marks is None or marks.end < end:
                return None
            known, begin = marks.stretch(start, end), marks.before(start)
        return known or (None if begin is None else self._read_stretch(segment, begin, start, end))

    def _read_stretch(
        self, segment: SegmentId, begin: ChecksummedBoundary, start: int, end: int
    ) -> RangeInfo | None:
        """Read boundaries back that were thinned out."""
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
        with storage_errors(path, "reading a session copy"):
            file = self._disk.open(path)
        try:
            for scan in scans(file.pread, scanner):
                marks.add(scan.marks)
                if marks.end >= end:
                    break
        finally:
            file.close()
        return marks.stretch(start, end)

    @property
    def unmerged(self) -> list[SegmentId]:
        """The segments that hold what is not merged durably here, or not yet let go of."""
        return sorted(self._marks)

    def forget_below(self, place: LogOffset) -> None:
        """Everything before it is merged here."""
        with self._lock:
            for segment in [segment for segment in self._marks if segment < place.segment]:
                del self._marks[segment]
            marks = self._marks.get(place.segment)
            if marks is not None:
                marks.forget_below(place.offset)
        for ends in (self.announced, self.finals):
            for x in [x for x in ends if x < place.run]:
                del ends[x]

    def forget_trimmed(self) -> None:
        """What was let go of is no input any more."""
        for segment in self.receiver.writer.table.segments:
            if segment.is_trimmed:
                with self._lock:
                    self._marks.pop(segment.id, None)

    def reports(self, consumed: LogOffset | None) -> list[pb.SegmentReport]:
        """All that a control process needs to know that knows nothing."""
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
        """What is new."""
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

    # Ends

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
        """The chain at the end of a segment; None if nothing of it is here, or nothing is known any more."""
        receiver = self.receiver
        if receiver.active is not None and receiver.active.id == place.segment:
            return receiver.chain
        marks = self._marks.get(place.segment)
        mark = marks.before(place.offset) if marks is not None else None
        return mark.chain if mark is not None and mark.offset == place.offset else None


def check_no_link(path: str) -> None:
    """`rt.LogNotFound` if the directory of a copy, whose name is easily guessed, is a link to elsewhere."""
    if os.path.islink(path):
        raise LogNotFound(
            "the directory of a session copy is a symbolic link",
            where=path,
            got=f"a link to {os.readlink(path)}",
            expected="a directory of the node's own",
            hint="Find out who made the link, and remove it.",
        )


class SessionReplicas:
    """All copies of this process; the merger's `Sources`."""

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
        on_damaged: Callable[[Corrupt], None],
        disk: Disk = REAL,
    ) -> None:
        """`is_released`: is what the cluster merged of a session durable in enough merged logs?

        `on_damaged` is called by the merger's thread: a copy does not hold the bytes that are to be merged.
        """
        self._is_released, self._on_damaged = is_released, on_damaged
        self._directory, self._sync, self._pool, self._disk = directory, sync, pool, disk
        self._on_report, self._on_durable, self._on_failed = on_report, on_durable, on_failed
        self._copies: dict[int, SessionReplica] = {}
        self._opening = asyncio.Semaphore(OPENINGS_MAX)
        self._openings: dict[int, asyncio.Future[SessionReplica]] = {}
        """By session id: what is on its way, whoever waits for it."""
        self._closings: dict[int, asyncio.Future[None]] = {}
        """By session id: copies that are being closed."""
        self._idle: dict[int, LogOffset] = {}
        """By session id: up to where a copy goes that was closed as idle. All of it is merged."""
        self.unfinished = UnfinishedBytes()

    def is_released(self, session_id: int) -> bool:
        """Whether what the cluster merged of a session need not be kept."""
        return self._is_released(session_id)

    def get(self, session_id: int) -> SessionReplica | None:
        """The copy, if it is open."""
        return self._copies.get(session_id)

    def all(self) -> list[SessionReplica]:
        """Every copy that is open."""
        return list(self._copies.values())

    def connected(self) -> list[int]:
        """The ids of the sessions that a publisher's stream feeds."""
        return [copy.session_id for copy in self._copies.values() if copy.has_stream]

    def path(self, session_id: int) -> str:
        """The directory of a session."""
        return os.path.join(self._directory, str(session_id))

    def is_idle(self, session: Session) -> bool:
        """Whether the copy was closed, and holds nothing that the cluster has not merged."""
        end, consumed = self._idle.get(session.id), consumed_place(session)
        return end is not None and consumed is not None and end <= consumed

    def is_busy(self, session_id: int) -> bool:
        """Whether the copy is being opened or closed."""
        return session_id in self._openings or session_id in self._closings

    def begin_removal(self, session_id: int) -> bool:
        """Keep the copy closed until `end_removal`; False if it is open, or is being opened."""
        if session_id in self._copies or self.is_busy(session_id):
            return False
        self._closings[session_id] = asyncio.get_running_loop().create_future()
        return True

    def end_removal(self, session_id: int) -> None:
        """See `begin_removal`. Nothing is known of the copy any more."""
        self._idle.pop(session_id, None)
        self._closings.pop(session_id).set_result(None)

    async def close_copy(self, copy: SessionReplica) -> None:
        """Close a copy that is unused; the next `open_copy` opens it again."""
        assert copy.is_unused, copy.session_id
        del self._copies[copy.session_id]
        if copy.receiver.next_offset is not None:
            self._idle[copy.session_id] = copy.receiver.next_offset
        closing = self._closings[copy.session_id] = asyncio.ensure_future(copy.store.close())
        closing.add_done_callback(lambda _: self._closings.pop(copy.session_id))
        await asyncio.shield(closing)

    async def open_copy(self, session: Session) -> SessionReplica:
        """Open the copy (made if it is missing); storage errors, `rt.Corrupt`.

        Whoever is cancelled meanwhile leaves it to become open: a thread has its lock already.
        """
        known = self._copies.get(session.id)
        if known is not None:
            return known
        opening = self._openings.get(session.id)
        if opening is None:
            opening = self._openings[session.id] = asyncio.ensure_future(self._open_copy(session))
            opening.add_done_callback(lambda opening: self._on_opened(session.id, opening))
        return await asyncio.shield(opening)

    def _on_opened(self, session_id: int, opening: asyncio.Future[SessionReplica]) -> None:
        del self._openings[session_id]
        if not opening.cancelled():
            opening.exception()  # Who waits for it is told; there may be nobody.

    async def _open_copy(self, session: Session) -> SessionReplica:
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
                    with contextlib.suppress(DiskFull):  # It is let go of later.
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
            copy = SessionReplica(session.id, store, self._disk)
            await loop.run_in_executor(self._pool, copy.recover, gone)
            self._copies[session.id] = copy
            for report in copy.reports(consumed):
                self._on_report(report)
            self._on_durable()
            return copy

    async def open_aside(self, session: Session, path: str, segment: SegmentId) -> SessionReplica:
        """An empty copy in another directory that begins with `segment`, of which nobody is told; its
        store is the caller's to close.
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
        """Close all; what is not synced is not promised."""
        await asyncio.gather(*self._openings.values(), *self._closings.values(), return_exceptions=True)
        for copy in self.all():
            await copy.store.close()
        self._copies.clear()

    async def take(self, copy: SessionReplica, item: Chunk | SegmentSealed) -> None:
        """Store what a stream or a peer brings."""
        await copy.store.append(item)
        if isinstance(item, SegmentSealed) and item.is_last_of_run:
            place = item.end_offset
            copy.announced[place.run] = pb.SessionEnd(
                session_id=copy.session_id,
                run=place.run,
                roll=place.roll,
                offset=place.offset,
                number=item.end,
            )
            self._on_report(copy.report(place.segment, []))

    async def skip_merged(self, copy: SessionReplica, session: Session) -> None:
        """What the cluster has merged and this copy lacks is not wanted any more: peers have it merged."""
        consumed = consumed_place(session)
        if consumed is not None:
            await self.skip_to(copy, session, consumed, consumed_number(session))

    async def skip_to(
        self, copy: SessionReplica, session: Session, place: LogOffset, number: int | None
    ) -> None:
        """Go on at `place`, before which the cluster has merged everything.

        What is here before it is let go of once it is durable in the merged logs of this node and of a
        majority, and not earlier: others may have lost theirs, or never had it.
        """
        keep = not self._is_released(session.id)
        await copy.store.call_alone(copy.receiver.skip_to, place, number, keep=keep)
        copy.forget_trimmed()

    async def finish(self, copy: SessionReplica, run: int) -> None:
        """X is fenced: when all that is here of it is durable, report its end."""
        with copy.in_use():
            await copy.store.call_alone(lambda: None)
            end = copy.end_of(run)
            place = LogOffset(run, end.roll, end.offset)
            told = copy.store.progress
            while told.durable < place and end.number:
                told = await copy.store.next_progress(told)
            copy.finals[run] = end
            self._on_report(copy.report(SegmentId(run, end.roll), []))

    async def trim(self, copy: SessionReplica, place: LogOffset) -> None:
        """Everything before `place` is merged durably: let whole segments before it go, and memory."""
        copy.forget_below(place)
        table = copy.receiver.writer.table
        with copy.in_use():
            if any(one.id < place.segment and not one.is_trimmed for one in table.segments):
                await copy.store.call_alone(copy.receiver.trim, place.segment, TrimReason.MERGED)
            if copy.receiver.uncached_with(place) > 0:
                await asyncio.get_running_loop().run_in_executor(self._pool, copy.receiver.uncache, place)

    def _on_marks(self, session_id: int, marked: list[BoundaryRecorder]) -> None:
        copy = self._copies.get(session_id)
        if copy is None:
            return
        for segment, marks in marked:
            self._on_report(copy.report(segment, copy.add(segment, marks)))
        self._on_durable()

    # For the merger's thread

    def stretch(self, session_id: int, segment: SegmentId, start: int, end: int) -> RangeInfo | None:
        """See `merger.Sources`."""
        copy = self._copies.get(session_id)
        return None if copy is None else copy.stretch(segment, start, end)

    def open(self, session_id: int, segment: SegmentId) -> File:
        """See `merger.Sources`."""
        return self._disk.open(segment_path(self.path(session_id), segment))

    def on_bad_copy(self, block: BlockWrite, got: str) -> None:
        """See `merger.Sources`."""
        self._on_damaged(
            Corrupt(
                "a session replica holds other bytes than the merge instruction names",
                path=segment_path(self.path(block.session_id), SegmentId(block.run, block.roll)),
                offset=block.start,
                got=got,
                expected=f"whole up to {block.end}",
                hint="The node fetches good bytes from another one.",
            )
        )
