"""The copies of sessions on this node: opened when something is to be stored, reported once durable.

One event loop uses it, but for what `Sources` offers the merger's thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Final

from replicator.group_sync import GroupSync
from replicator.items import Chunk, Place, Sealed
from replicator.session_receiver import Marked, SessionReceiver, read_marks
from replicator.session_store import SessionStore, UnfinishedBytes
from rt.errors import DiskFull, RtError
from rt.log.catalog import segment_path
from rt.log.chain import Mark, chain_of_segment
from rt.log.directory import read_header, scans
from rt.log.disk import REAL, Disk, File
from rt.log.frames import SessionScanner
from rt.log.segment import SEGMENT_HEADER_BYTES, Kind, SegmentId, encode_segment_header
from rt.log.table import Identity, TrimReason
from rt.v1 import sequencer_pb2 as pb
from sequencer.board import MARK
from sequencer.data.consumed import consumed_number, consumed_place
from sequencer.data.marks import SegmentMarks, Stretch
from sequencer.orders import OrderBlock
from sequencer.state import Session

OPENINGS_MAX: Final = 4
"""Copies that are opened at once: each waits for the disk some ten times."""

logger = logging.getLogger("sequencer")


class Copy:
    """One session's copy, while this process has it open."""

    def __init__(self, session_id: int, store: SessionStore, disk: Disk) -> None:
        self.session_id = session_id
        self.store = store
        self.announced: dict[int, pb.SessionEnd] = {}
        """By X: where the sender says that it ends."""
        self.finals: dict[int, pb.SessionEnd] = {}
        """By X: all there is of it, now that it is fenced."""
        self.has_stream = False
        """A publisher's stream feeds it."""
        self._disk = disk
        self._lock = threading.Lock()
        """Guards the marks against the merger."""
        self._marks: dict[SegmentId, SegmentMarks] = {}

    @property
    def receiver(self) -> SessionReceiver:
        """The one writer of the directory."""
        return self.store.receiver

    # Marks

    def recover(self, consumed: Place | None) -> None:
        """Read the boundaries of what is here and not merged; all of it is durable."""
        receiver = self.receiver
        recovered = dict(receiver.recovered)
        receiver.recovered = []
        for segment in receiver.writer.table.segments:
            if not segment.is_trimmed and (consumed is None or segment.id >= consumed.segment):
                self.add(segment.id, read_marks(self._disk, receiver.path, segment.id))
        for segment_id, marks in recovered.items():
            self.add(segment_id, marks)

    def add(self, segment: SegmentId, marks: list[Mark]) -> list[Mark]:
        """Boundaries that are durable now; with the segment's beginning, if it was not known."""
        known = self._marks.get(segment)
        if known is None:
            beginning = self._beginning(segment)
            marks = marks if beginning is None else [beginning, *marks]
            known = SegmentMarks()
        with self._lock:
            known.add(marks)
            self._marks[segment] = known
        return marks

    def _beginning(self, segment: SegmentId) -> Mark | None:
        header = read_header(self._disk, self.receiver.path, segment)
        if header is None:
            return None
        chain = chain_of_segment(encode_segment_header(header))
        return Mark(SEGMENT_HEADER_BYTES, header.first, chain, header.created_ns, header.created_ns)

    def stretch(self, segment: SegmentId, start: int, end: int) -> Stretch | None:
        """See `Sources.stretch`."""
        with self._lock:
            marks = self._marks.get(segment)
            if marks is None or marks.end < end:
                return None
            known, begin = marks.stretch(start, end), marks.before(start)
        return known or (None if begin is None else self._read_stretch(segment, begin, start, end))

    def _read_stretch(self, segment: SegmentId, begin: Mark, start: int, end: int) -> Stretch | None:
        """Read boundaries back that were thinned out."""
        header = read_header(self._disk, self.receiver.path, segment)
        if header is None:
            return None
        marks = SegmentMarks()
        marks.add([begin])
        scanner = SessionScanner(
            header, offset=begin.offset, first=begin.number, marks=True, chain=begin.chain
        )
        file = self._disk.open(segment_path(self.receiver.path, segment))
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

    def forget_below(self, place: Place) -> None:
        """Everything before it is merged here."""
        with self._lock:
            for segment in [segment for segment in self._marks if segment < place.segment]:
                del self._marks[segment]
            marks = self._marks.get(place.segment)
            if marks is not None:
                marks.forget_below(place.offset)
        for ends in (self.announced, self.finals):
            for x in [x for x in ends if x < place.x]:
                del ends[x]

    def forget_trimmed(self) -> None:
        """What was let go of is no input any more."""
        for segment in self.receiver.writer.table.segments:
            if segment.is_trimmed:
                with self._lock:
                    self._marks.pop(segment.id, None)

    def reports(self, consumed: Place | None) -> list[pb.SegmentReport]:
        """All that a control process needs to know that knows nothing."""
        found: list[pb.SegmentReport] = []
        for segment, marks in sorted(self._marks.items()):
            if consumed is not None and segment < consumed.segment:
                continue
            packed = b"".join(MARK.pack(*mark[:3]) for mark in marks)
            found.append(self._report(segment, packed))
        for x in {*self.announced, *self.finals} - {one.x for one in found}:
            found.append(self._report(SegmentId(x, 0), b""))
        return found

    def report(self, segment: SegmentId, marks: list[Mark]) -> pb.SegmentReport:
        """What is new."""
        return self._report(segment, b"".join(MARK.pack(*mark[:3]) for mark in marks))

    def _report(self, segment: SegmentId, packed: bytes) -> pb.SegmentReport:
        return pb.SegmentReport(
            session_id=self.session_id,
            x=segment.x,
            y=segment.y,
            marks=packed,
            announced=self.announced.get(segment.x),
            final=self.finals.get(segment.x),
        )

    # Ends

    def end_of(self, x: int) -> pb.SessionEnd:
        """The end of what is here of an X."""
        receiver = self.receiver
        place = receiver.place
        if receiver.active is not None and place is not None and place.x == x:
            return self._end(place, receiver.end)
        sealed = [one for one in receiver.writer.table.segments if one.id.x == x]
        if not sealed:
            return self._end(Place(x, 0, SEGMENT_HEADER_BYTES), 0)
        return self._end(Place(*sealed[-1].id, sealed[-1].size_bytes), sealed[-1].end)

    def _end(self, place: Place, number: int) -> pb.SessionEnd:
        return pb.SessionEnd(
            session_id=self.session_id, x=place.x, y=place.y, offset=place.offset, number=number
        )


class Copies:
    """All copies of this process; the merger's `Sources`."""

    def __init__(
        self,
        directory: str,
        sync: GroupSync,
        pool: Executor,
        *,
        on_report: Callable[[pb.SegmentReport], None],
        on_durable: Callable[[], None],
        on_failed: Callable[[RtError], None],
        is_merged_here: Callable[[int], bool],
        disk: Disk = REAL,
    ) -> None:
        """`is_merged_here`: is what the cluster merged of a session durable in the merged log here?"""
        self._is_merged_here = is_merged_here
        self._directory, self._sync, self._pool, self._disk = directory, sync, pool, disk
        self._on_report, self._on_durable, self._on_failed = on_report, on_durable, on_failed
        self._copies: dict[int, Copy] = {}
        self._opening = asyncio.Semaphore(OPENINGS_MAX)
        self._openings: dict[int, asyncio.Future[Copy]] = {}
        """By session id: what is on its way, whoever waits for it."""
        self._unfinished = UnfinishedBytes()

    def get(self, session_id: int) -> Copy | None:
        """The copy, if it is open."""
        return self._copies.get(session_id)

    def all(self) -> list[Copy]:
        """Every copy that is open."""
        return list(self._copies.values())

    def path(self, session_id: int) -> str:
        """The directory of a session."""
        return os.path.join(self._directory, str(session_id))

    async def open_copy(self, session: Session) -> Copy:
        """Open the copy (made if it is missing); storage errors, `rt.Damaged`.

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

    def _on_opened(self, session_id: int, opening: asyncio.Future[Copy]) -> None:
        del self._openings[session_id]
        if not opening.cancelled():
            opening.exception()  # Who waits for it is told; there may be nobody.

    async def _open_copy(self, session: Session) -> Copy:
        async with self._opening:
            loop = asyncio.get_running_loop()
            consumed = consumed_place(session)
            gone = consumed if self._is_merged_here(session.id) else None
            identity = Identity(Kind.SESSION, session.incarnation, session.name, session.dedup_id)

            def open_receiver() -> SessionReceiver:
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
            store = SessionStore(
                receiver,
                self._sync,
                self._pool,
                on_marks=lambda marks: self._on_marks(session.id, marks),
                on_failed=self._on_failed,
                unfinished=self._unfinished,
            )
            copy = Copy(session.id, store, self._disk)
            await loop.run_in_executor(self._pool, copy.recover, gone)
            self._copies[session.id] = copy
            for report in copy.reports(consumed):
                self._on_report(report)
            self._on_durable()
            return copy

    async def open_aside(self, session: Session, path: str, segment: SegmentId) -> Copy:
        """An empty copy in another directory that begins with `segment`, of which nobody is told; its
        store is the caller's to close.
        """
        identity = Identity(Kind.SESSION, session.incarnation, session.name, session.dedup_id)

        def open_receiver() -> SessionReceiver:
            return SessionReceiver.open(path, identity, disk=self._disk, at=Place(*segment, 0))

        receiver = await asyncio.get_running_loop().run_in_executor(self._pool, open_receiver)
        store = SessionStore(
            receiver,
            self._sync,
            self._pool,
            on_marks=lambda _: None,
            on_failed=self._on_failed,
            unfinished=self._unfinished,
        )
        return Copy(session.id, store, self._disk)

    async def close(self) -> None:
        """Close all; what is not synced is not promised."""
        await asyncio.gather(*self._openings.values(), return_exceptions=True)
        for copy in self.all():
            await copy.store.close()
        self._copies.clear()

    async def take(self, copy: Copy, item: Chunk | Sealed) -> None:
        """Store what a stream or a peer brings."""
        await copy.store.take(item)
        if isinstance(item, Sealed) and item.is_last_of_x:
            place = item.place
            copy.announced[place.x] = pb.SessionEnd(
                session_id=copy.session_id, x=place.x, y=place.y, offset=place.offset, number=item.end
            )
            self._on_report(copy.report(place.segment, []))

    async def skip_merged(self, copy: Copy, session: Session) -> None:
        """What the cluster has merged and this copy lacks is not wanted any more: peers have it merged."""
        consumed = consumed_place(session)
        if consumed is not None:
            await self.skip_to(copy, session, consumed, consumed_number(session))

    async def skip_to(self, copy: Copy, session: Session, place: Place, number: int | None) -> None:
        """Go on at `place`, before which the cluster has merged everything.

        What is here before it is let go of once it is durable in the merged log here, and not earlier: others
        may have lost theirs.
        """
        keep = not self._is_merged_here(session.id)
        await copy.store.run(copy.receiver.skip_to, place, number, keep=keep)
        copy.forget_trimmed()

    async def finish(self, copy: Copy, x: int) -> None:
        """X is fenced: when all that is here of it is durable, report its end."""
        await copy.store.run(lambda: None)
        end = copy.end_of(x)
        place = Place(x, end.y, end.offset)
        told = copy.store.progress
        while told.durable < place and end.number:
            told = await copy.store.next_progress(told)
        copy.finals[x] = end
        self._on_report(copy.report(SegmentId(x, end.y), []))

    async def trim(self, copy: Copy, place: Place) -> None:
        """Everything before `place` is merged here, durably: let whole segments before it go, and memory."""
        copy.forget_below(place)
        table = copy.receiver.writer.table
        if any(one.id < place.segment and not one.is_trimmed for one in table.segments):
            await copy.store.run(copy.receiver.trim, place.segment, TrimReason.MERGED)
        if copy.receiver.uncached_with(place) > 0:
            await asyncio.get_running_loop().run_in_executor(self._pool, copy.receiver.uncache, place)

    def _on_marks(self, session_id: int, marked: list[Marked]) -> None:
        copy = self._copies.get(session_id)
        if copy is None:
            return
        for segment, marks in marked:
            self._on_report(copy.report(segment, copy.add(segment, marks)))
        self._on_durable()

    # For the merger's thread

    def stretch(self, session_id: int, segment: SegmentId, start: int, end: int) -> Stretch | None:
        """See `merger.Sources`."""
        copy = self._copies.get(session_id)
        return None if copy is None else copy.stretch(segment, start, end)

    def open(self, session_id: int, segment: SegmentId) -> File:
        """See `merger.Sources`."""
        return self._disk.open(segment_path(self.path(session_id), segment))

    def on_bad_copy(self, block: OrderBlock, got: int) -> None:
        """See `merger.Sources`."""
        logger.error(
            "bad_session_copy id=%d at=log.%d.%d offset=%d got=%#010x wanted=%#010x",
            *(block.session_id, block.x, block.y, block.end, got, block.chain_end),
        )
