"""Executes merge instructions: writes the headers of blocks and copies ranges of session replicas.

Invariants:
- Plans are executed in order. A plan names the place of each byte, so executing it again changes nothing.
- A block is written only if its input is on this node, durable, and has the checksum that the plan names.
- Input is verified while it is copied. Bytes that changed since they were received are not merged.
- The running checksum of the result must be the plan's. A difference stops the merger for good.
- A segment that the cluster trimmed is trimmed here as soon as it is sealed here. Nothing else is trimmed.

The merger has its own thread. The event loop calls `start`, `add`, `trim` and `wake`; a thread of a pool
calls `sync`.
"""

from __future__ import annotations

import logging
import os
import threading
from bisect import bisect_left
from collections import deque
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
from rt.log.write.segment_repair import valid_end
from rt.log.write.writer import BatchFrames, CopyRange, LogWriter
from sequencer.ipc.data_reports import MergeProgress
from sequencer.merged.replica_files import ReplicaFiles
from sequencer.sessions.batch_index import RangeInfo
from sequencer.sessions.fetched_ranges import FetchedRanges
from sequencer.sessions.input_planner import FetchedRange
from sequencer.state.state import ClearedRange, MergedSegment
from sequencer.state.write_plan import BlockWrite, WritePlan

RETRY_S: Final = 0.2
"""How long to wait for space on a full disk before the next attempt."""
PLANS_MAX: Final = 1 << 16
"""Maximum number of plans that wait for input or disk space: about 100 MB."""
UPCOMING_MAX: Final = 1 << 10
"""Maximum number of plans whose input is requested from peers at the same time."""

logger = logging.getLogger("sequencer")


class ReplicaSource(Protocol):
    """The session replicas. The merger's thread calls these methods."""

    def range_info(self, session_id: int, segment: SegmentId, start: int, end: int) -> RangeInfo | None:
        """The checksums and times of a range; None unless all of it is here and durable."""

    def open(self, session_id: int, segment: SegmentId) -> File:
        """Open the segment's file. The caller closes it."""

    def on_bad_replica(self, block: BlockWrite, got: str) -> None:
        """The replica's bytes are not those that the plan names, or changed since they were verified.

        Must fetch good bytes. May be called again until they are here.
        """


@dataclass(frozen=True, slots=True)
class MissingInput:
    """The range for which the merger waits."""

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
        """`on_failed` is called after `failure` is set, `on_written` after each plan; by the merger's thread.

        Ranges in `fetched`, which come from peers, are used before those of `sources`.
        """
        assert identity.kind is LogKind.MERGED, identity
        self._fetched = FetchedRanges() if fetched is None else fetched
        self._path, self._identity, self._sources, self._disk = path, identity, sources, disk
        self._on_failed, self._on_written = on_failed, on_written
        self._files_lock = threading.Lock()
        """Held while files are synced or closed. Acquired before `_changed`."""
        self._changed = threading.Condition()
        """Guards the fields below."""
        self._orders: deque[WritePlan] = deque()
        self._cleared: ClearedRange | None = None
        """The last hard reset. The first segment after it may start at any position."""
        self._trimmed: Sequence[MergedSegment] = ()
        """All segments that the cluster trimmed, oldest first."""
        self._files = ReplicaFiles(sources.open)
        """Used by the merger's thread only."""
        self._removed: set[int] = set()
        """Sessions whose replicas were removed. Their files must be closed."""
        self._is_closed = False
        self._is_paused = False
        self._is_idle = True
        """The thread waits for a plan that it may execute."""
        self._awaits_input = False
        self._inputs = 0
        """How often input arrived. Only the event loop changes it; it is read without the lock."""
        self.missing: MissingInput | None = None
        self.gap: LogOffset | None = None
        """The first plan starts here, after the end of this log. Bytes up to it must come from a peer."""
        self.failure: RtError | None = None
        self.damage: Corrupt | None = None
        """The merged log cannot be opened until this is repaired. Until then the merger is paused."""
        self._chain: int | None = None
        self._end: tuple[LogOffset | None, MergeProgress] = (None, MergeProgress(0, 0, 0, 0))
        """The end of the state's merged log at the last `start`."""
        self.written = MergeProgress(0, 0, 0, 0)
        self.durable = MergeProgress(0, 0, 0, 0)
        self._writer: LogWriter | None = None
        try:
            self._continue_with(*self._open())
        except Corrupt as error:
            self.damage, self._is_paused = error, True
        self._thread = threading.Thread(target=self._run, name="rt-merger", daemon=True)
        self._thread.start()

    # From the event loop

    @property
    def place(self) -> LogOffset | None:
        """The end of the last whole block; None if there is no segment."""
        with self._changed:
            return self._place()

    @property
    def position(self) -> int:
        """One past the last position of this log."""
        with self._changed:
            end = self._writer.end if self._writer is not None else 0
            return end if self._cleared is None else max(end, self._cleared.position)

    def start(
        self,
        orders: Sequence[WritePlan],
        end: LogOffset | None,
        reached: MergeProgress,
        cleared: ClearedRange | None = None,
    ) -> None:
        """Replace the waiting plans by `orders`. After them the state's merged log ends at `end`."""
        with self._changed:
            self._end, self._cleared = (end, reached), cleared
            self._orders.clear()
            self._fetched.clear()
            new = [one for one in orders if one.instruction > self.written.instruction]
            self._orders.extend(new[-PLANS_MAX:])
            self._find_gap()
            self._changed.notify_all()

    def add(self, order: WritePlan) -> None:
        """Append a plan. If too many wait, the oldest is dropped: its bytes must come from another node."""
        with self._changed:
            self._orders.append(order)
            if len(self._orders) > PLANS_MAX:
                self._fetched.forget(self._orders.popleft())
                self._find_gap()
            if self._is_idle:
                self._changed.notify_all()

    def upcoming(self) -> list[WritePlan]:
        """The next plans, `UPCOMING_MAX` at most."""
        with self._changed:
            return list(islice(self._orders, UPCOMING_MAX))

    def trim(self, trimmed: Sequence[MergedSegment]) -> None:
        """Trim what the cluster trimmed: all segments that its state lists as trimmed, oldest first."""
        with self._changed:
            self._trimmed = trimmed
            self._changed.notify_all()

    def is_trimmed(self, damage: Corrupt) -> bool:
        """Whether the cluster trimmed the corrupt segment, so that it cannot and need not be repaired."""
        segment, trimmed = parse_segment_name(os.path.basename(damage.path)), self._trimmed
        return segment is not None and bool(trimmed) and segment <= trimmed[-1].id

    def wake(self) -> None:
        """Report that more input is durable."""
        # The thread sets the flag before it compares the count, so either it sees the count or we the flag.
        self._inputs += 1
        if self._awaits_input:
            with self._changed:
                self._changed.notify_all()

    def close_files(self, session_id: int) -> None:
        """Close the files of a session whose replica was removed, to free their disk space."""
        with self._changed:
            self._removed.add(session_id)
            self._changed.notify_all()

    def pause(self) -> None:
        """Release the merged log for another writer. Returns when the merger writes nothing more."""
        with self._changed:
            self._is_paused = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._is_idle or self.failure is not None)
        self._release()

    def resume(self) -> None:
        """Open the merged log again, as it is now. If it is corrupt, the merger stays paused."""
        opened: tuple[LogWriter, int] | None = None
        while opened is None:
            try:
                opened = self._open_untrimmed()  # Reads a whole segment, so not on the event loop.
            except Corrupt as error:
                self.damage = error
                return
            except DiskFull as error:
                logger.warning("merge_blocked error=%r", str(error))
                with self._changed:
                    if self._changed.wait_for(lambda: self._is_closed, RETRY_S):
                        return
        with self._changed:
            self._continue_with(*opened)
            self.damage = self.missing = None  # Another writer may have written the missing bytes.
            self._is_paused = False
            self._find_gap()
            self._changed.notify_all()

    def sync(self) -> MergeProgress:
        """Sync what is written and return how far that is. `rt.StorageFailed` is final."""
        with self._files_lock:
            with self._changed:
                written, writer = self.written, self._writer
                if writer is None or written == self.durable:
                    return self.durable
                # Sealed segments are durable already.
                point = writer.sync_point() if writer.active is not None else None
            if point is not None:
                writer.sync_to(point)
        with self._changed:
            if written.instruction > self.durable.instruction:
                self.durable = written
            return self.durable

    def close(self) -> None:
        """End the thread and close the files. Does not sync."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join()
        self._release()

    # Opening

    def _open_untrimmed(self) -> tuple[LogWriter, int]:
        """Open the log without what the cluster trimmed, if that is corrupt."""
        try:
            return self._open()
        except Corrupt as error:
            if not self.is_trimmed(error):
                raise
            logger.warning("corrupt_segment_trimmed error=%r", str(error))
            return self._open([_as_sealed(one) for one in self._trimmed])

    def _open(self, gone: Sequence[SealedSegment] = ()) -> tuple[LogWriter, int]:
        """The log, recovered without the segments in `gone`, and its last complete instruction."""
        found: list[MergedScanner] = []

        def scanner_for(header: SegmentHeader) -> Scanner:
            found.append(MergedScanner(header))
            return found[-1]

        writer = LogWriter.open(
            self._path,
            self._identity,
            disk=self._disk,
            resume=True,
            trimmed_elsewhere=gone,
            scanner_for=scanner_for,
        )
        last = found[-1].last_block if found else None
        # Blocks of the last instruction may be missing, so it is executed again.
        return writer, max(last.instruction - 1, 0) if last is not None else 0

    def _continue_with(self, writer: LogWriter, instruction: int) -> None:
        self._writer = writer
        if instruction >= self.durable.instruction:
            self.written = self.durable = MergeProgress(instruction, 0, self.durable.total_bytes, writer.end)
        else:
            self.written = self.durable
        self._chain = None

    def _release(self) -> None:
        with self._files_lock, self._changed:
            writer, self._writer = self._writer, None
            if writer is not None:
                writer.close()
        self._files.close()

    def _place(self) -> LogOffset | None:
        writer = self._writer
        if writer is None or writer.last_id is None:
            return None
        if writer.active is None or writer.is_sealed:
            sealed = writer.table.segments[-1]
            return LogOffset(*sealed.id, sealed.size_bytes)
        return LogOffset(*writer.active.id, writer.offset)

    def _find_gap(self) -> None:
        """Set `gap` unless the first plan, or the state's end, follows the end of this log."""
        here = self._place()
        end, reached = self._end
        # Plans before the first segment write nothing and have no place.
        order = next((one for one in self._orders if one.end_offset), None)
        begin = end if order is None else _begin(order)
        first = reached.position if order is None else order.first_position
        self.gap = begin if begin is not None and not self._reaches(here, begin, first) else None
        is_cleared = end is None and self._cleared is not None
        is_there = here == end or is_cleared
        if not self._orders and is_there and self.written.instruction < reached.instruction:
            self.written, self._chain = reached._replace(chain=0), reached.chain
            if is_cleared:
                self.durable = self.written  # A hard reset keeps nothing.

    def _reaches(self, here: LogOffset | None, begin: LogOffset, first: int) -> bool:
        """Whether this log contains everything before `begin`, which is position `first`."""
        if self._is_first_after_reset(begin.segment) and begin.offset == 0:
            return True
        if here is None:
            return first == 0
        if here >= begin:
            return True
        # The end of a segment and the start of the next are the same position.
        return begin.offset == 0 and self._writer is not None and self._writer.end == first

    def _is_first_after_reset(self, segment: SegmentId) -> bool:
        """Whether the segment is the first one after a hard reset, so that nothing before it exists."""
        return self._cleared is not None and segment == SegmentId(self._cleared.run, 0)

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
                self._files.close_sessions(removed)
                self._trim()
                is_done = order is not None and self._execute(order)
            except (DiskFull, Corrupt) as error:
                logger.warning("merge_blocked error=%r", str(error))
                self._files.close()
                with self._changed:
                    if isinstance(error, Corrupt) and order is not None:
                        # The replica was trimmed because the cluster is far ahead, or it is corrupt.
                        block = _input_of(order, error.path)
                        self.missing = MissingInput(
                            block.session_id, SegmentId(block.run, block.roll), block.start, block.end
                        )
                    self._changed.wait(RETRY_S)
                continue
            except RtError as error:
                self._fail(error)
                return
            except Exception as error:
                logger.critical("merge_failed", exc_info=error)
                self._fail(Closed(f"the merger was interrupted: {error!r}", where=self._path))
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
        return not self._is_paused and (self._may_merge() or bool(self._removed) or bool(self._to_trim()))

    def _may_merge(self) -> bool:
        return bool(self._orders) and self.gap is None

    def _must_stop(self) -> bool:
        return self._is_closed or self._is_paused

    def _fail(self, error: RtError) -> None:
        logger.critical("merge_stopped error=%r", str(error))
        with self._changed:
            self.failure = error
            self._is_idle = True
            self._changed.notify_all()
        self._on_failed()

    def _execute(self, order: WritePlan) -> bool:
        """Write the blocks that are missing; False if the merger must stop before its input arrived."""
        writer = self._writer
        assert writer is not None
        here = self._place()
        if order.offset < order.end_offset and (here is None or here < _end(order)):
            if not self._write(writer, order):
                return False
            is_new = here is None or here <= _begin(order)
            self._check_headers(order, None if is_new else self._headers_here(order))
        elif not order.blocks or (order.segment == writer.last_id and not _is_trimmed(writer, order.segment)):
            self._check_headers(order, self._headers_here(order))
        else:
            self._advance(order, None)
        return True

    def _write(self, writer: LogWriter, order: WritePlan) -> bool:
        try:
            return self._write_blocks(writer, order)
        finally:
            self._files.close_passed()

    def _write_blocks(self, writer: LogWriter, order: WritePlan) -> bool:
        begins = order.offset == 0
        if begins and (writer.active is None or writer.active.id != order.segment or writer.is_sealed):
            if writer.end != order.first_position and not self._is_first_after_reset(order.segment):
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
                self._sources.on_bad_replica(_input_of(order, error.path), str(error.got))
                raise
            self._files.close_idle()
        return True

    # Trimming

    def _to_trim(self) -> dict[SegmentId, tuple[TrimReason, int]]:
        """The segments here that the cluster trimmed: for which reason, and when."""
        writer, trimmed = self._writer, self._trimmed
        if writer is None or not trimmed:
            return {}
        segments = writer.table.segments
        found: dict[SegmentId, tuple[TrimReason, int]] = {}
        for segment in segments[bisect_left(segments, True, key=lambda one: not one.is_trimmed) :]:
            is_growing = writer.active is not None and segment.id == writer.active.id
            if segment.id > trimmed[-1].id or is_growing:
                break
            # The state forgets old segments. They get the reason and time of the oldest that it lists.
            known = trimmed[bisect_left(trimmed, segment.id, key=lambda one: one.id)]
            found[segment.id] = (known.reason, known.trimmed_ns)
        return found

    def _trim(self) -> None:
        """Trim sealed segments; `rt.DiskFull` if the table cannot be written."""
        with self._changed:
            writer, gone = self._writer, self._to_trim()
        if writer is not None and gone:
            with self._files_lock:  # A sync may be running.
                writer.trim_each(gone)
            logger.info("merged_log_trimmed segments=%d last=%s", len(gone), max(gone).file_name)

    def _run_of(self, block: BlockWrite, position: int) -> BatchFrames | None:
        """Wait for the block's input and return its bytes; None if the merger must stop before."""
        if block.is_declaration:
            return BatchFrames([block.head], position, 0, 0, is_declaration=True)
        segment = SegmentId(block.run, block.roll)
        found = self._wait_for(block, segment)
        if found is None:
            return None
        range_info, fetched = found
        if fetched is None:
            file = self._files.open(block.session_id, segment)
            content: CopyRange | memoryview = CopyRange(
                file, block.start, block.size, _name_of(block), range_info.content
            )
        else:
            content = fetched.bytes_of(block)
        return BatchFrames(
            [block.head, content],
            position + block.message_count,
            range_info.timestamp_low_ns,
            range_info.timestamp_high_ns,
        )

    def _wait_for(
        self, block: BlockWrite, segment: SegmentId
    ) -> tuple[RangeInfo, FetchedRange | None] | None:
        """Wait for the input of a block: fetched from a peer, or in the session's replica; None as above."""
        is_reported = False
        while True:
            inputs = self._inputs
            fetched = self._fetched.find(block)
            if fetched is not None and (range_info := fetched.range_info(block)) is not None:
                self.missing = None
                return range_info, fetched
            range_info = self._sources.range_info(block.session_id, segment, block.start, block.end)
            if range_info is not None and range_info.chain_end == block.chain_end:
                self.missing = None
                return range_info, None
            if range_info is not None and not is_reported:
                is_reported = True
                self._sources.on_bad_replica(block, f"chain {range_info.chain_end:#010x}")
            self._trim()  # Input may take long to arrive.
            with self._changed:
                self.missing = MissingInput(block.session_id, segment, block.start, block.end)
                self._awaits_input = True
                if self._inputs == inputs and not self._must_stop():
                    self._changed.wait(RETRY_S)
                self._awaits_input = False
                if self._must_stop():
                    return None

    def _headers_here(self, order: WritePlan) -> list[bytes]:
        """The headers of blocks in the log where an earlier execution of the plan wrote them.

        `rt.Corrupt` if these bytes are corrupt now. Sound headers of other blocks are returned.
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
                sound = valid_end(self._disk, self._path, order.segment, order.end_offset)
                if sound < order.end_offset:
                    raise Corrupt("a merged block fails its checksum", path=path, offset=sound)
        return heads

    def _check_headers(self, order: WritePlan, heads: Sequence[bytes] | None) -> None:
        """Compare the merged log's running checksum with the plan's.

        `heads` are the headers in the merged log, None if they were just written. If the checksum before them
        is not known, the headers are compared instead.
        """
        expected = [block.head for block in order.blocks]
        chain = self._chain
        if chain is None:
            chain = order.chain if heads in (None, expected) else None
        else:
            for head in expected if heads is None else heads:
                chain = crc32c(head, chain)
        if chain is None or chain != order.chain:
            got = "other headers of blocks" if chain is None else f"running checksum {chain:#010x}"
            raise self._diverged(order, got, f"running checksum {order.chain:#010x}")
        self._advance(order, chain)

    def _advance(self, order: WritePlan, chain: int | None) -> None:
        with self._changed:
            self._chain = chain
            self.written = MergeProgress(order.instruction, chain or 0, order.total_bytes, order.end_position)

    def _diverged(self, order: WritePlan, got: str, expected: str) -> Diverged:
        return Diverged(
            "this node's merged log differs from what the cluster agreed on",
            where=f"{self._path}, instruction {order.instruction}",
            got=got,
            expected=expected,
            hint="Keep the files for analysis, then empty the node's directory: it copies it from peers.",
        )


def _begin(order: WritePlan) -> LogOffset:
    return LogOffset(*order.segment, order.offset)


def _end(order: WritePlan) -> LogOffset:
    return LogOffset(*order.segment, order.end_offset)


def _is_trimmed(writer: LogWriter, segment: SegmentId) -> bool:
    """Whether the segment is the newest one and trimmed."""
    last = writer.table.segments[-1] if writer.table.segments else None
    return last is not None and last.id == segment and last.is_trimmed


def _as_sealed(one: MergedSegment) -> SealedSegment:
    """A trimmed segment as a table entry, without the times of its messages."""
    times = one.created_ns, 0, 0, one.sealed_ns
    return SealedSegment(
        one.id, one.first, one.end, one.size_bytes, *times, trimmed_ns=one.trimmed_ns, reason=one.reason
    )


def _name_of(block: BlockWrite) -> str:
    """The source file of a block, for errors."""
    return f"session {block.session_id}, {SegmentId(block.run, block.roll).file_name}"


def _input_of(order: WritePlan, name: str) -> BlockWrite:
    """The block copied from the file of that name, or else the first copied block."""
    blocks = [block for block in order.blocks if not block.is_declaration]
    return next((block for block in blocks if _name_of(block) == name), blocks[0])
