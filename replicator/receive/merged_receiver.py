"""Receives a merged log, whole or filtered: the only writer of a subscriber's or node's copy.

Invariants:
- Only whole blocks are stored, after everything in them was verified: offset, running checksums, values.
- Positions follow each other. If the sender trimmed the next positions (`start_at`, `LogTrimmed`), the copy
  continues at a later segment, and its reader detects the gap by the positions.
- In a filtered copy positions may jump; the copy is complete up to `end`.
"""

from __future__ import annotations

from contextlib import closing
from itertools import pairwise
from typing import Final

from msgspec import Struct, field

from replicator.protocol.last_block import block_checksum, last_block_before
from replicator.protocol.messages import CompleteUpTo, LogOffset, LogTrimmed, SegmentSealed
from replicator.receive.receiver import Receiver, violation
from rt.errors import ClusterMismatch, ProtocolViolation
from rt.log.disk import REAL, Disk, storage_errors
from rt.log.format.block import BlockKind
from rt.log.format.constants import BATCH_BYTES_MAX, MESSAGE_BYTES_MAX
from rt.log.format.segment import LogKind, SegmentHeader, SegmentId
from rt.log.format.segment_table import LogIdentity, TrimReason
from rt.log.read.gaps import GapReport, record_skip
from rt.log.scan.catalog import segment_path
from rt.log.scan.directory import read_header
from rt.log.scan.placed_batches import PlacedBatch, TimeRange
from rt.log.scan.scanner import MergedScanner, PlacedBlock, ScanResult, in_order
from rt.log.write.writer import BatchFrames, LogWriter

FRAME_BYTES_MAX: Final = MESSAGE_BYTES_MAX + 2 * BATCH_BYTES_MAX
"""A block holds up to 16 MiB, or one batch that is larger."""

_DECLARATION: Final = int(BlockKind.DECLARATION)


class _Stretch(Struct):
    """A declaration, or the blocks between two. `end` is the position after it."""

    offset: int
    is_declaration: bool
    end: int = 0
    times: TimeRange = field(default_factory=TimeRange)


class MergedReceiver(Receiver[MergedScanner]):
    """Made by `open`. `chain` is the running checksum of the merged log at `next_offset`, if the caller
    passed the checksum at the start. Otherwise its values can be compared only within this object.
    """

    def __init__(self, writer: LogWriter, disk: Disk, *, frame_bytes_max: int) -> None:
        self._disk = disk
        self._chain = 0  # Running checksum at the end of the last segment if none is active.
        self._first: int | None = None
        """The first position that `_skip_target` must have; None if any position from `end` on is allowed."""
        self._is_trimming = True
        self._reason = TrimReason.FOLLOWED  # The reason of the sender's last trim, if reported.
        self._log_start = 0  # The first position that the sender keeps, if reported.
        self._frames: list[PlacedBlock | PlacedBatch] = []
        """The blocks after `next_offset` that have started, and their batches, in order."""
        super().__init__(writer, frame_bytes_max=frame_bytes_max)

    @classmethod
    def open(
        cls,
        path: str,
        identity: LogIdentity,
        *,
        disk: Disk = REAL,
        chain: int = 0,
        follows_trims: bool = True,
        frame_bytes_max: int = FRAME_BYTES_MAX,
    ) -> MergedReceiver:
        """Lock and recover the copy (created if missing); it continues at its end.

        `chain` is the running checksum of the merged log at the start of the copy's newest segment, or at the
        log's start. With `follows_trims`, the copy trims the segments that the sender trims. `rt.Corrupt`,
        `rt.DirectoryLocked`, `rt.ClusterMismatch` (another cluster), storage errors.
        """
        assert identity.kind is not LogKind.SESSION, identity
        writer = LogWriter.open(
            path,
            identity,
            disk=disk,
            resume=True,
            scanner_for=lambda header: MergedScanner(header, chain=chain),
        )
        try:
            walk = None if writer.is_sealed else writer.recovered.resumed
            receiver = cls(writer, disk, frame_bytes_max=frame_bytes_max)
            receiver._is_trimming = follows_trims
            receiver._chain = chain
            if walk is not None:
                assert isinstance(walk.scanner, MergedScanner)
                receiver._scanner = receiver._rewind(walk.scanner)
                receiver._scanner.next = writer.end  # Filtered: it may be complete beyond its last block.
                receiver._finish_skip(walk.header)
            if (place := receiver.next_offset) is not None:
                receiver._became_durable(place, receiver.end)
            return receiver
        except BaseException:
            writer.close()  # It holds the lock.
            raise

    @property
    def chain(self) -> int:
        """The running checksum of the merged log at `next_offset`."""
        known = None if self._scanner is None else self._scanner.chain
        return self._chain if known is None else known

    @property
    def last_checksum(self) -> int:
        """The header checksum of the last block before `next_offset` in its segment; 0 if there is none, or
        it was trimmed.

        If the segment is sealed, the checksum is read from disk, which may raise storage errors.
        """
        scanner, active = self._scanner, self.active
        if scanner is None or active is None:
            return self._sealed_checksum()
        if scanner.last_block is None:
            return 0
        return block_checksum(scanner.last_block, active, scanner.boundary)

    def _sealed_checksum(self) -> int:
        last = self.writer.table.segments[-1] if self.writer.table.segments else None
        if last is None or last.is_trimmed:
            return 0
        with storage_errors(self.path, "reading the last block"):
            header = read_header(self._disk, self.path, last.id)
            if header is None:
                return 0
            with closing(self._disk.open(segment_path(self.path, last.id))) as file:
                return last_block_before(self._disk, self.path, header, file, last.size_bytes).checksum

    def drop_unfinished(self) -> None:
        """As in the base class. The skip is cleared too; `start_at` sets it again."""
        self._skip_target = self._first = None
        super().drop_unfinished()

    def start_at(self, offset: LogOffset, first: int) -> None:
        """The sender goes on from `offset`, which is position `first`.

        If that is not `self.next_offset`, it must be the start of a later segment whose first position is at
        or above `end`: the sender trimmed the positions between, and the copy skips them.
        `rt.ProtocolViolation` otherwise.
        """
        self.drop_unfinished()
        own = self.next_offset
        if offset == own:
            if first != self.end and self.identity.kind is LogKind.MERGED:
                raise violation(f"{offset} is position {first} at the sender", offset, self.end)
            return
        if offset.offset or (own is not None and (offset.segment <= own.segment or first < self.end)):
            raise violation(f"the sender goes on at position {first}", offset, own)
        self._skip_target, self._first = offset.segment, first

    def follow_trim(self, trimmed: LogTrimmed) -> None:
        """The sender has trimmed everything before a segment.

        The copy's own segments before it are trimmed for the same reason, if the copy follows trims.
        """
        self._reason, self._log_start = trimmed.reason or TrimReason.FOLLOWED, trimmed.log_start
        last = self.writer.last_id
        if last is None or trimmed.before > last:
            # Else the copy continues at an even later segment.
            if self._skip_target is None or trimmed.before > self._skip_target:
                self._skip_target, self._first = trimmed.before, None
        elif self._is_trimming:
            self.trim(trimmed.before, self._reason)

    def complete(self, up_to: CompleteUpTo) -> None:
        """Record for a filtered log that below that position only messages that were filtered out are
        missing. Durable with the next sync.
        """
        if self.identity.kind is not LogKind.FILTERED:
            raise ProtocolViolation("the log is not filtered", got=up_to.position)
        if self.active is not None and up_to.position > self.end:
            assert self._scanner is not None
            self.writer.complete_to(up_to.position)
            self._scanner.next = max(self._scanner.next, up_to.position)

    def _check_start(self, place: LogOffset) -> None:
        last = self.writer.last_id
        if self._skip_target is not None:
            is_due = place.segment == self._skip_target
        elif last is None:
            is_due = True
        else:
            follows = place.segment == SegmentId(last.run, last.roll + 1) or (
                place.run > last.run and place.roll == 0
            )
            is_due = self._scanner is None and follows
        if not is_due:
            raise violation("a segment that does not follow", place, self.next_offset)

    def _check_header(self, header: SegmentHeader) -> None:
        identity = self.identity
        if (header.kind, header.origin) != (identity.kind, identity.origin):
            raise ClusterMismatch(
                "a segment of another cluster",
                where=header.id,
                got=f"{header.kind.name} {header.origin.hex()}",
                expected=f"{identity.kind.name} {identity.origin.hex()}",
            )
        is_fresh = self.writer.last_id is None or self._skip_target is not None
        wanted = self.end if self._first is None else self._first
        is_due = header.first >= self.end if is_fresh and self._first is None else header.first == wanted
        if not is_due:
            raise violation(f"{header.id} begins with position {header.first}", header.id, wanted)

    def _check_seal(self, sealed: SegmentSealed, place: LogOffset) -> bool:
        if sealed.end_offset != place or self._partial or not self._ends_at(sealed.end):
            wanted = (
                f"{place}, position {self.end}, {len(self._partial)} bytes of an unfinished block after it"
            )
            raise violation(f"a segment is sealed with end {sealed.end}", sealed.end_offset, wanted)
        return True

    def _before_seal(self, sealed: SegmentSealed | None) -> None:
        self._chain = self.chain
        if sealed is not None and sealed.end > self.end:
            self.writer.complete_to(sealed.end)

    def _ends_at(self, end: int) -> bool:
        return end == self.end or (self.identity.kind is LogKind.FILTERED and end > self.end)

    def _new_scanner(self, header: SegmentHeader) -> MergedScanner:
        self._first = None
        self._frames = []
        return MergedScanner(header, chain=self._chain)

    def _rewind(self, scanner: MergedScanner) -> MergedScanner:
        active = self.writer.active
        assert active is not None
        self._frames = []
        at, first = scanner.boundary, scanner.next
        fresh = MergedScanner(active, offset=at, first=first, sessions=scanner.sessions, chain=scanner.chain)
        fresh.last_block = scanner.last_block
        return fresh

    def _split_frames(self, scan: ScanResult, data: memoryview, base: int) -> list[BatchFrames]:
        """One item for the blocks between two declarations: each of these gets an entry in the index."""
        self._frames += in_order(scan.blocks, scan.batches)
        stop = base + len(data)
        whole = [frame for frame in self._frames if frame.offset < stop]
        del self._frames[: len(whole)]
        stretches: list[_Stretch] = []
        for frame in whole:
            if isinstance(frame, PlacedBatch):
                stretches[-1].times.widen(frame.header.timestamp_low_ns, frame.header.timestamp_high_ns)
                continue
            is_declaration = frame.header.kind == _DECLARATION
            if is_declaration or not stretches or stretches[-1].is_declaration:
                stretches.append(_Stretch(frame.offset, is_declaration))
            stretches[-1].end = frame.header.end
        offsets = [stretch.offset for stretch in stretches] + [stop]
        return [
            BatchFrames(
                [data[start - base : end - base]],
                one.end,
                one.times.low_ns,
                one.times.high_ns,
                one.is_declaration,
            )
            for one, (start, end) in zip(stretches, pairwise(offsets), strict=True)
        ]

    def _before_start(self, header: SegmentHeader) -> None:
        if self._skip_target is None:
            return
        # A new copy has not asked for earlier positions.
        end = header.first if self.writer.last_id is not None else min(header.first, self._log_start)
        if self.end < end:
            record_skip(self._disk, self.path, GapReport(self.end, end, self._reason))
        if self._is_trimming:
            self.writer.trim(header.id, self._reason)

    def _finish_skip(self, active: SegmentHeader) -> None:
        """Finish a skip that a crash interrupted: the segment was started, but earlier segments were not
        trimmed.
        """
        sealed = self.writer.table.segments
        if self._is_trimming and sealed and sealed[-1].end < active.first:
            self.writer.trim(active.id, TrimReason.FOLLOWED)
