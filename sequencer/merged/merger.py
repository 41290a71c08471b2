"""Carries out merge orders: writes headers, and copies ranges of session copies in the kernel.

Laws. Orders are carried out in order, each byte at the place that it names, so carrying one out again changes
nothing. A block is written only when its input is here, durable, and has the chain that the order names, and
only of bytes that are still those that were verified when they came. What comes out is checked against the
order's chain; a difference stops the merger for good. What the cluster trims goes here as soon as it is
sealed here, and nothing else ever does.

A thread of its own works; `begin`, `add`, `trim` and `wake` come from the event loop, `sync` from a thread of
a pool.
"""

from __future__ import annotations

import logging
import os
import threading
from bisect import bisect_left
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final, Protocol

from replicator.protocol.messages import LogOffset
from rt.errors import Closed, Corrupt, DiskFull, Diverged, RtError
from rt.log.disk import REAL, Disk, File, storage_errors
from rt.log.format.checksum import crc32c
from rt.log.format.segment import SEGMENT_HEADER_BYTES, LogKind, SegmentHeader, SegmentId, parse_segment_name
from rt.log.format.segment_table import LogIdentity, SealedSegment, TrimReason
from rt.log.scan.catalog import segment_path
from rt.log.scan.scanner import MergedScanner, Scanner
from rt.log.write.segment_repair import sound_end
from rt.log.write.writer import BatchFrames, CopyRange, LogWriter
from sequencer.ipc.data_reports import MergeProgress
from sequencer.sessions.batch_index import RangeInfo
from sequencer.sessions.fetched_ranges import FetchedRanges
from sequencer.sessions.input_planner import FetchedRange
from sequencer.state.state import ClearedRange, MergedSegment
from sequencer.state.write_plan import BlockWrite, WritePlan

RETRY_S: Final = 0.2
"""How long to wait for space on a full disk before the next try."""
ORDERS_MAX: Final = 1 << 16
"""Orders that wait, for input or for space on the disk: some 100 MB."""
UPCOMING_MAX: Final = 1 << 10
"""Orders whose input is looked for at once."""
FILES_MAX: Final = 256
"""Session copies that stay open between two orders. One order opens up to `commands.RANGES_MAX`."""

logger = logging.getLogger("sequencer")


class ReplicaSource(Protocol):
    """The session copies, as the merger sees them; called from its thread."""

    def stretch(self, session_id: int, segment: SegmentId, start: int, end: int) -> RangeInfo | None:
        """What is known of a range; None if not all of it is here and durable."""

    def open(self, session_id: int, segment: SegmentId) -> File:
        """The segment's file, which the caller closes."""

    def on_bad_copy(self, block: BlockWrite, got: str) -> None:
        """The copy's bytes are not those that the order names, or no longer those that were verified.

        Must have good ones fetched. May be called again while they are not here.
        """


@dataclass(frozen=True, slots=True)
class MissingInput:
    """Input that the merger waits for."""

    session_id: int
    segment: SegmentId
    start: int
    end: int


class Merger:
    """The one writer of a node's merged log."""

    def __init__(
        self,
        path: str,
        identity: LogIdentity,
        sources: ReplicaSource,
        *,
        disk: Disk = REAL,
        on_failed: Callable[[], None] = lambda: None,
        on_written: Callable[[], None] = lambda: None,
        fetched: FetchedRanges | None = None,
    ) -> None:
        """Both are called by the merger's thread: once `failure` is set, and behind each order.

        `fetched` is input that comes from peers, used before that of `sources`.
        """
        assert identity.kind is LogKind.MERGED, identity
        self._fetched = FetchedRanges() if fetched is None else fetched
        self._path, self._identity, self._sources, self._disk = path, identity, sources, disk
        self._on_failed, self._on_written = on_failed, on_written
        self._files_lock = threading.Lock()
        """Held while files are synced, and while they are closed. Taken before `_changed`."""
        self._changed = threading.Condition()
        """Guards what follows."""
        self._orders: deque[WritePlan] = deque()
        self._cleared: ClearedRange | None = None
        """The last hard reset: the segment with which merging began anew may begin at any position here."""
        self._trimmed: Sequence[MergedSegment] = ()
        """What the cluster has trimmed, oldest first."""
        self._files: OrderedDict[tuple[int, SegmentId], File] = OrderedDict()
        """Of session copies; what was merged last comes last."""
        self._segments: dict[int, SegmentId] = {}
        """By session: the segment of which a file is open."""
        self._removed: set[int] = set()
        """Sessions whose copies were removed: their files are to be closed."""
        self._is_closed = False
        self._is_held = False
        self._is_idle = True
        """The thread waits for an order that it may carry out."""
        self._awaits_input = False
        self._inputs = 0
        """So often there was more input; changed by the event loop alone, and looked at without the lock."""
        self.missing: MissingInput | None = None
        self.gap: LogOffset | None = None
        """The first order begins there, above what is here: bytes up to it must come from another node."""
        self.failure: RtError | None = None
        self.damage: Corrupt | None = None
        """The merged log cannot be opened before this is mended; till then the merger is held."""
        self._chain: int | None = None
        self._end: tuple[LogOffset | None, MergeProgress] = (None, MergeProgress(0, 0, 0, 0))
        """Of the state, as of the last `begin`."""
        self.written = MergeProgress(0, 0, 0, 0)
        self.durable = MergeProgress(0, 0, 0, 0)
        self._writer: LogWriter | None = None
        try:
            self._take_up(*self._open())
        except Corrupt as error:
            self.damage, self._is_held = error, True
        self._thread = threading.Thread(target=self._run, name="rt-merger", daemon=True)
        self._thread.start()

    # From the event loop

    @property
    def place(self) -> LogOffset | None:
        """Behind the last whole block here; None while there is no segment."""
        with self._changed:
            return self._place()

    @property
    def position(self) -> int:
        """One past the last position here."""
        with self._changed:
            end = self._writer.end if self._writer is not None else 0
            return end if self._cleared is None else max(end, self._cleared.position)

    def begin(
        self,
        orders: Sequence[WritePlan],
        end: LogOffset | None,
        reached: MergeProgress,
        cleared: ClearedRange | None = None,
    ) -> None:
        """Forget what waits and go on with `orders`, behind which the state's merged log ends at `end`."""
        with self._changed:
            self._end, self._cleared = (end, reached), cleared
            self._orders.clear()
            self._fetched.clear()
            wanted = [one for one in orders if one.instruction > self.written.instruction]
            self._orders.extend(wanted[-ORDERS_MAX:])
            self._look_for_gap()
            self._changed.notify_all()

    def add(self, order: WritePlan) -> None:
        """The next order. Of too many the oldest are forgotten: those bytes must come from another node."""
        with self._changed:
            self._orders.append(order)
            if len(self._orders) > ORDERS_MAX:
                self._orders.popleft()
                self._look_for_gap()
            if self._is_idle:
                self._changed.notify_all()

    def upcoming(self) -> list[WritePlan]:
        """The next orders, as many as one looks at."""
        with self._changed:
            return list(islice(self._orders, UPCOMING_MAX))

    def trim(self, trimmed: Sequence[MergedSegment]) -> None:
        """These are all the segments that the cluster remembers to have trimmed, oldest first."""
        with self._changed:
            self._trimmed = trimmed
            self._changed.notify_all()

    def is_gone(self, damage: Corrupt) -> bool:
        """Whether the cluster has trimmed the segment that is damaged: nobody can mend it, or needs to."""
        segment, trimmed = parse_segment_name(os.path.basename(damage.path)), self._trimmed
        return segment is not None and bool(trimmed) and segment <= trimmed[-1].id

    def wake(self) -> None:
        """There is more input."""
        # Counted before the flag is read, and that is set before the count is compared: one sees the other.
        self._inputs += 1
        if self._awaits_input:
            with self._changed:
                self._changed.notify_all()

    def close_files(self, session_id: int) -> None:
        """A session's copy was removed: its space is free once nobody has its files open."""
        with self._changed:
            self._removed.add(session_id)
            self._changed.notify_all()

    def hold(self) -> None:
        """Let go of the merged log, for another writer; returns when nothing is written any more."""
        with self._changed:
            self._is_held = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._is_idle or self.failure is not None)
        self._release()

    def resume(self) -> None:
        """Take the merged log back, as far as it now goes; if it is damaged, the merger stays held."""
        opened: tuple[LogWriter, int] | None = None
        while opened is None:
            try:
                opened = self._open_kept()  # Reads a whole segment: the event loop must not wait for that.
            except Corrupt as error:
                self.damage = error
                return
            except DiskFull as error:
                logger.warning("merge_blocked error=%r", str(error))
                with self._changed:
                    if self._changed.wait_for(lambda: self._is_closed, RETRY_S):
                        return
        with self._changed:
            self._take_up(*opened)
            self.damage = self.missing = None  # Another writer may have brought what was missing.
            self._is_held = False
            self._look_for_gap()
            self._changed.notify_all()

    def sync(self) -> MergeProgress:
        """Make durable what is written; how far that is. `rt.StorageFailed` is final."""
        with self._files_lock:
            with self._changed:
                written, writer = self.written, self._writer
                if writer is None or written == self.durable:
                    return self.durable
                # Without a segment that grows there is nothing but sealed ones, which are durable.
                point = writer.sync_point() if writer.active is not None else None
            if point is not None:
                writer.sync_to(point)
        with self._changed:
            if written.instruction > self.durable.instruction:
                self.durable = written
            return self.durable

    def close(self) -> None:
        """End the thread and release the files. Does not sync."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join()
        self._release()

    # Opening

    def _open_kept(self) -> tuple[LogWriter, int]:
        """The log, whatever became of what the cluster has trimmed."""
        try:
            return self._open()
        except Corrupt as error:
            if not self.is_gone(error):
                raise
            logger.warning("corrupt_segment_trimmed error=%r", str(error))
            return self._open([_as_sealed(one) for one in self._trimmed])

    def _open(self, gone: Sequence[SealedSegment] = ()) -> tuple[LogWriter, int]:
        """The log, recovered without what is `gone`, and the last instruction that is whole in it."""
        found: list[MergedScanner] = []

        def scanner_for(header: SegmentHeader) -> Scanner:
            found.append(MergedScanner(header))
            return found[-1]

        writer = LogWriter.open(
            self._path, self._identity, disk=self._disk, resume=True, gone=gone, scanner_for=scanner_for
        )
        last = found[-1].last_block if found else None
        # Of the last instruction some blocks may be missing: it is asked for again.
        return writer, max(last.instruction - 1, 0) if last is not None else 0

    def _take_up(self, writer: LogWriter, instruction: int) -> None:
        self._writer = writer
        if instruction >= self.durable.instruction:
            # Of the bytes before it at least those are there that were.
            self.written = self.durable = MergeProgress(instruction, 0, self.durable.total_bytes, writer.end)
        else:
            self.written = self.durable
        self._chain = None

    def _release(self) -> None:
        with self._files_lock, self._changed:
            writer, self._writer = self._writer, None
            if writer is not None:
                writer.close()
        self._close_files()

    def _close_files(self) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()
        self._segments.clear()

    def _close_removed(self, session_ids: set[int]) -> None:
        for session_id in session_ids & self._segments.keys():
            self._files.pop((session_id, self._segments.pop(session_id))).close()

    def _close_idle_files(self) -> None:
        """Close those that were not merged from for the longest time, but for `FILES_MAX`."""
        while len(self._files) > FILES_MAX:
            (session_id, _), file = self._files.popitem(last=False)
            del self._segments[session_id]
            file.close()

    def _place(self) -> LogOffset | None:
        writer = self._writer
        if writer is None or writer.last_id is None:
            return None
        if writer.active is None or writer.is_sealed:
            sealed = writer.table.segments[-1]
            return LogOffset(*sealed.id, sealed.size_bytes)
        return LogOffset(*writer.active.id, writer.offset)

    def _look_for_gap(self) -> None:
        """See whether the first order, or the end of all, follows what is here."""
        here = self._place()
        end, reached = self._end
        # Before any segment has begun there are orders that need no place.
        order = next((one for one in self._orders if one.end_offset), None)
        begin = end if order is None else _begin(order)
        first = reached.position if order is None else order.first_position
        self.gap = begin if begin is not None and not self._reaches(here, begin, first) else None
        is_cleared = end is None and self._cleared is not None
        is_there = here == end or is_cleared
        if not self._orders and is_there and self.written.instruction < reached.instruction:
            self.written, self._chain = reached._replace(chain=0), reached.chain
            if is_cleared:
                self.durable = self.written  # Nothing of it is to be kept.

    def _reaches(self, here: LogOffset | None, begin: LogOffset, first: int) -> bool:
        """Whether what is here goes up to `begin`, which is position `first`."""
        if self._begins_anew(begin.segment) and begin.offset == 0:
            return True
        if here is None:
            return first == 0
        if here >= begin:
            return True
        # A segment may begin where the one before ends: the same position, another place.
        return begin.offset == 0 and self._writer is not None and self._writer.end == first

    def _begins_anew(self, segment: SegmentId) -> bool:
        """Whether nothing before the segment is kept anywhere."""
        return self._cleared is not None and segment == SegmentId(self._cleared.x, 0)

    # The thread

    def _run(self) -> None:
        while True:
            with self._changed:
                self._is_idle = True
                self._changed.notify_all()
                self._changed.wait_for(self._may_work)
                if self._is_closed or self.failure is not None:
                    return
                self._is_idle = False
                order = self._orders[0] if self._may_merge() else None
                removed, self._removed = self._removed, set()
            try:
                self._close_removed(removed)
                self._trim()
                is_done = order is not None and self._carry_out(order)
            except (DiskFull, Corrupt) as error:
                logger.warning("merge_blocked error=%r", str(error))
                self._close_files()
                with self._changed:
                    if isinstance(error, Corrupt) and order is not None:
                        # A copy is not what it was: trimmed, for the cluster is far ahead, or damaged.
                        block = _input_of(order, error.path)
                        self.missing = MissingInput(
                            block.session_id, SegmentId(block.x, block.y), block.start, block.end
                        )
                    self._changed.wait(RETRY_S)
                continue
            except RtError as error:
                self._fail(error)
                return
            except Exception as error:
                logger.critical("merge_failed", exc_info=error)
                self._fail(Closed(f"merging was broken off: {error!r}", where=self._path))
                return
            if is_done:
                assert order is not None
                self._fetched.forget(order)
                with self._changed:
                    if self._orders and self._orders[0] is order:
                        self._orders.popleft()
                self._on_written()

    def _may_work(self) -> bool:
        if self._is_closed or self.failure is not None:
            return True
        return not self._is_held and (self._may_merge() or bool(self._removed) or bool(self._to_trim()))

    def _may_merge(self) -> bool:
        return bool(self._orders) and self.gap is None

    def _must_let_go(self) -> bool:
        return self._is_closed or self._is_held

    def _fail(self, error: RtError) -> None:
        logger.critical("merge_stopped error=%r", str(error))
        with self._changed:
            self.failure = error
            self._is_idle = True
            self._changed.notify_all()
        self._on_failed()

    def _carry_out(self, order: WritePlan) -> bool:
        """Write what is not here yet; False if the order was taken back meanwhile."""
        writer = self._writer
        assert writer is not None
        here = self._place()
        if order.offset < order.end_offset and (here is None or here < _end(order)):
            if not self._write(writer, order):
                return False
            is_new = here is None or here <= _begin(order)
            self._account(order, None if is_new else self._heads_here(order))
        elif not order.blocks or (order.segment == writer.last_id and not _is_trimmed(writer, order.segment)):
            self._account(order, self._heads_here(order))
        else:
            self._reach(order, None)
        return True

    def _write(self, writer: LogWriter, order: WritePlan) -> bool:
        begins = order.offset == 0
        if begins and (writer.active is None or writer.active.id != order.segment or writer.is_sealed):
            if writer.end != order.first_position and not self._begins_anew(order.segment):
                raise self._diverged(order, f"position {writer.end}", f"position {order.first_position}")
            with self._files_lock:
                writer.start(order.segment, first=order.first_position, created_ns=order.sequenced_ns)
        at = order.offset or SEGMENT_HEADER_BYTES
        if writer.active is None or writer.active.id != order.segment or writer.offset < at:
            raise self._diverged(order, f"an end at {self._place()}", f"{order.segment} offset {at}")
        position = order.first_position
        runs: list[BatchFrames] = []
        for block in order.blocks:
            if at >= writer.offset:
                if not runs and at != writer.offset:
                    raise self._diverged(order, f"an end at offset {writer.offset}", f"a block at {at}")
                run = self._run_of(block, position)
                if run is None:
                    return False
                runs.append(run)
            at += block.size_bytes
            position = position + block.message_count
        if at != order.end_offset or position != order.end_position:
            raise self._diverged(order, f"offset {at}", f"offset {order.end_offset}")
        if runs:
            try:
                writer.append(runs)
            except Corrupt as error:
                self._sources.on_bad_copy(_input_of(order, error.path), str(error.got))
                raise
            self._close_idle_files()
        return True

    # Trimming

    def _to_trim(self) -> dict[SegmentId, tuple[TrimReason, int]]:
        """What is kept here of what the cluster has trimmed: for which reason, and when."""
        writer, trimmed = self._writer, self._trimmed
        if writer is None or not trimmed:
            return {}
        segments = writer.table.segments
        found: dict[SegmentId, tuple[TrimReason, int]] = {}
        for segment in segments[bisect_left(segments, True, key=lambda one: not one.is_trimmed) :]:
            is_growing = writer.active is not None and segment.id == writer.active.id
            if segment.id > trimmed[-1].id or is_growing:
                break
            # Of those that nobody remembers any more the oldest that is known speaks.
            known = trimmed[bisect_left(trimmed, segment.id, key=lambda one: one.id)]
            found[segment.id] = (known.reason, known.trimmed_ns)
        return found

    def _trim(self) -> None:
        """Trim what is sealed here; `rt.DiskFull` if there is no space to say so."""
        with self._changed:
            writer, gone = self._writer, self._to_trim()
        if writer is not None and gone:
            with self._files_lock:  # Only now: a sync may be under way.
                writer.trim_each(gone)
            logger.info("merged_log_trimmed segments=%d last=%s", len(gone), max(gone).file_name)

    def _run_of(self, block: BlockWrite, position: int) -> BatchFrames | None:
        """The block as it is written, once its input is here; None if the merger is to stop meanwhile."""
        if block.is_declaration:
            return BatchFrames([block.head], position, 0, 0, is_declaration=True)
        segment = SegmentId(block.x, block.y)
        found = self._wait_for(block, segment)
        if found is None:
            return None
        stretch, fetched = found
        if fetched is None:
            file = self._file(block.session_id, segment)
            content: CopyRange | memoryview = CopyRange(
                file, block.start, block.size, _name_of(block), stretch.content
            )
        else:
            content = fetched.bytes_of(block)
        return BatchFrames(
            [block.head, content],
            position + block.message_count,
            stretch.timestamp_low_ns,
            stretch.timestamp_high_ns,
        )

    def _wait_for(
        self, block: BlockWrite, segment: SegmentId
    ) -> tuple[RangeInfo, FetchedRange | None] | None:
        """The input of a block, of the session's copy if it was not fetched from a peer."""
        told = False
        while True:
            inputs = self._inputs
            fetched = self._fetched.find(block)
            if fetched is not None and (stretch := fetched.stretch(block)) is not None:
                self.missing = None
                return stretch, fetched
            stretch = self._sources.stretch(block.session_id, segment, block.start, block.end)
            if stretch is not None and stretch.chain_end == block.chain_end:
                self.missing = None
                return stretch, None
            if stretch is not None and not told:
                told = True
                self._sources.on_bad_copy(block, f"chain {stretch.chain_end:#010x}")
            self._trim()  # It may be long until there is input.
            with self._changed:
                self.missing = MissingInput(block.session_id, segment, block.start, block.end)
                self._awaits_input = True
                if self._inputs == inputs and not self._must_let_go():
                    self._changed.wait(RETRY_S)
                self._awaits_input = False
                if self._must_let_go():
                    return None

    def _file(self, session_id: int, segment: SegmentId) -> File:
        """Files stay open while their segment is merged: one of each session."""
        file = self._files.get((session_id, segment))
        if file is None:
            known = self._segments.get(session_id)
            if known is not None:
                self._files.pop((session_id, known)).close()
            with storage_errors(f"session copy {session_id}, {segment.file_name}", "opening what is merged"):
                file = self._sources.open(session_id, segment)
            self._files[session_id, segment] = file
            self._segments[session_id] = segment
        self._files.move_to_end((session_id, segment))
        return file

    def _heads_here(self, order: WritePlan) -> list[bytes]:
        """What stands in the active segment where an order, carried out before, put its headers.

        `rt.Corrupt` if those bytes went bad since; other headers that are sound are told by the chain.
        """
        if not order.blocks:
            return []
        path, at = segment_path(self._path, order.segment), order.offset or SEGMENT_HEADER_BYTES
        heads: list[bytes] = []
        with storage_errors(path, "reading merged blocks"):
            file = self._disk.open(path)
            try:
                for block in order.blocks:
                    heads.append(file.pread(len(block.head), at))
                    at += block.size_bytes
            finally:
                file.close()
            if heads != [block.head for block in order.blocks]:
                sound = sound_end(self._disk, self._path, order.segment, order.end_offset)
                if sound < order.end_offset:
                    raise Corrupt("a merged block does not verify any more", path=path, offset=sound)
        return heads

    def _account(self, order: WritePlan, heads: Sequence[bytes] | None) -> None:
        """Compare what the merged log's chain comes to with what the order says.

        `heads` are the headers as they stand in the merged log, None if they were written just now. Where
        the chain before them is not known, they themselves are compared.
        """
        wanted = [block.head for block in order.blocks]
        chain = self._chain
        if chain is None:
            chain = order.chain if heads in (None, wanted) else None
        else:
            for head in wanted if heads is None else heads:
                chain = crc32c(head, chain)
        if chain is None or chain != order.chain:
            got = "other headers of blocks" if chain is None else f"chain {chain:#010x}"
            raise self._diverged(order, got, f"chain {order.chain:#010x}")
        self._reach(order, chain)

    def _reach(self, order: WritePlan, chain: int | None) -> None:
        with self._changed:
            self._chain = chain
            self.written = MergeProgress(order.instruction, chain or 0, order.total_bytes, order.end_position)

    def _diverged(self, order: WritePlan, got: str, wanted: str) -> Diverged:
        return Diverged(
            "this node's merged log is not what the cluster agreed on",
            where=f"{self._path}, instruction {order.instruction}",
            got=got,
            expected=wanted,
            hint="The files are kept for a look. Empty the node's directory to have it built anew.",
        )


def _begin(order: WritePlan) -> LogOffset:
    return LogOffset(*order.segment, order.offset)


def _end(order: WritePlan) -> LogOffset:
    return LogOffset(*order.segment, order.end_offset)


def _is_trimmed(writer: LogWriter, segment: SegmentId) -> bool:
    """Whether the newest segment, which is sealed then, has gone already."""
    last = writer.table.segments[-1] if writer.table.segments else None
    return last is not None and last.id == segment and last.is_trimmed


def _as_sealed(one: MergedSegment) -> SealedSegment:
    """A trimmed segment as the table has it; the times of its messages nobody asks for any more."""
    times = one.created_ns, 0, 0, one.sealed_ns
    return SealedSegment(
        one.id, one.first, one.end, one.size_bytes, *times, trimmed_ns=one.trimmed_ns, reason=one.reason
    )


def _name_of(block: BlockWrite) -> str:
    """The file that a block is copied from, for errors."""
    return f"session {block.session_id}, {SegmentId(block.x, block.y).file_name}"


def _input_of(order: WritePlan, name: str) -> BlockWrite:
    """The block that is copied from the file of that name; the first that is copied, if none is."""
    blocks = [block for block in order.blocks if not block.is_declaration]
    return next((block for block in blocks if _name_of(block) == name), blocks[0])
