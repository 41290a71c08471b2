"""The files of the merged log, while the merger has them open."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from bisect import bisect_left
from collections.abc import Sequence
from typing import Final

from replicator.protocol.messages import LogOffset
from rt.errors import Corrupt
from rt.log.disk import Disk, storage_errors
from rt.log.format.segment import SEGMENT_HEADER_BYTES, SegmentId, parse_segment_name
from rt.log.format.segment_table import LogIdentity, SealedSegment, TrimReason
from rt.log.scan.catalog import segment_path
from rt.log.scan.scanner import MergedScanner
from rt.log.write.segment_repair import valid_end
from rt.log.write.writer import LogWriter
from sequencer.state.state import ClearedRange, MergedSegment
from sequencer.state.write_plan import WritePlan

logger = logging.getLogger("sequencer")


class MergedFiles:
    """The writer of the merged log, and what the cluster decided about its segments.

    The merger's lock guards `writer`, `trimmed` and `cleared`.
    """

    def __init__(self, path: str, identity: LogIdentity, disk: Disk) -> None:
        self.path: Final = path
        self.identity: Final = identity
        self._disk = disk
        self.lock = threading.Lock()
        """Held while files are synced, switched, trimmed or closed. Acquired before the merger's lock."""
        self.writer: LogWriter | None = None
        """None while the log is released for another writer."""
        self.trimmed: Sequence[MergedSegment] = ()
        """All segments that the cluster trimmed, oldest first."""
        self.cleared: ClearedRange | None = None
        """The last hard reset. The first segment after it may start at any position."""

    def open(self) -> tuple[LogWriter, int]:
        """Open the log. If a segment that the cluster trimmed is corrupt, open the log without the trimmed
        segments.

        Returns the log's writer, which the caller sets, and the last complete instruction of the log.
        """
        try:
            return self._open()
        except Corrupt as error:
            if not self.is_trimmed(error):
                raise
            logger.warning("corrupt_segment_trimmed error=%r", str(error))
            return self._open([_as_sealed(one) for one in self.trimmed])

    def _open(self, gone: Sequence[SealedSegment] = ()) -> tuple[LogWriter, int]:
        writer = LogWriter.open(
            self.path,
            self.identity,
            disk=self._disk,
            resume=True,
            trimmed_elsewhere=gone,
        )
        walk = writer.recovered.resumed
        last = (
            walk.scanner.last_block if walk is not None and isinstance(walk.scanner, MergedScanner) else None
        )
        # Blocks of the last instruction may be missing, so it is executed again.
        return writer, max(last.instruction - 1, 0) if last is not None else 0

    def close(self) -> None:
        writer, self.writer = self.writer, None
        if writer is not None:
            writer.close()

    # Where the log ends

    @property
    def place(self) -> LogOffset | None:
        """The end of the last whole block; None if there is no segment."""
        writer = self.writer
        if writer is None or writer.last_id is None:
            return None
        if writer.active is None or writer.is_sealed:
            sealed = writer.table.segments[-1]
            return LogOffset(*sealed.id, sealed.size_bytes)
        return LogOffset(*writer.active.id, writer.offset)

    @property
    def position(self) -> int:
        """One past the last position."""
        end = self.writer.end if self.writer is not None else 0
        return end if self.cleared is None else max(end, self.cleared.position)

    def reaches(self, begin: LogOffset, first: int) -> bool:
        """Whether this log contains everything before the offset `begin`, whose position is `first`."""
        if self.is_first_after_reset(begin.segment) and begin.offset == 0:
            return True
        here = self.place
        if here is None:
            return first == 0
        if here >= begin:
            return True
        # The end of a segment and the start of the next are the same position.
        return begin.offset == 0 and self.writer is not None and self.writer.end == first

    def is_first_after_reset(self, segment: SegmentId) -> bool:
        """Whether the segment is the first one after a hard reset, so that nothing before it exists."""
        return self.cleared is not None and segment == SegmentId(self.cleared.run, 0)

    # Reading

    def contains(self, plan: WritePlan) -> bool:
        """Whether the plan's segment is the newest one here and not trimmed."""
        assert self.writer is not None
        if plan.segment != self.writer.last_id:
            return False
        last = self.writer.table.segments[-1] if self.writer.table.segments else None
        return last is None or last.id != plan.segment or not last.is_trimmed

    def heads(self, plan: WritePlan) -> list[bytes]:
        """Read the block headers in the log at the offsets where an earlier execution of the plan wrote them.

        `rt.Corrupt` if these bytes are corrupt now. Valid headers of other blocks are returned.
        """
        if not plan.blocks:
            return []
        path, at = segment_path(self.path, plan.segment), plan.offset or SEGMENT_HEADER_BYTES
        heads: list[bytes] = []
        with storage_errors(path, "reading merged blocks"):
            with contextlib.closing(self._disk.open(path)) as file:
                for block in plan.blocks:
                    heads.append(file.pread(len(block.head), at))
                    at += block.size_bytes
            if heads != [block.head for block in plan.blocks]:
                sound = valid_end(self._disk, self.path, plan.segment, plan.end_offset)
                if sound < plan.end_offset:
                    raise Corrupt("a merged block fails its checksum", path=path, offset=sound)
        return heads

    # Trimming

    def is_trimmed(self, damage: Corrupt) -> bool:
        """Whether the cluster trimmed the corrupt segment, so that it cannot and need not be repaired."""
        segment, trimmed = parse_segment_name(os.path.basename(damage.path)), self.trimmed
        return segment is not None and bool(trimmed) and segment <= trimmed[-1].id

    def to_trim(self) -> dict[SegmentId, tuple[TrimReason, int]]:
        """The sealed segments on this node that the cluster trimmed, with the reason and the time.

        They include segments whose files are still here because the disk was too full to remove them.
        """
        writer, trimmed = self.writer, self.trimmed
        if writer is None or not trimmed:
            return {}
        segments = writer.table.segments
        last = trimmed[-1]
        found = dict.fromkeys(writer.pending_trims, (last.reason, last.trimmed_ns))
        for segment in segments[bisect_left(segments, True, key=lambda one: not one.is_trimmed) :]:
            is_growing = writer.active is not None and segment.id == writer.active.id
            if segment.id > last.id or is_growing:
                break
            # The state does not list old segments any more. They get the reason and time of the oldest listed
            # segment.
            known = trimmed[bisect_left(trimmed, segment.id, key=lambda one: one.id)]
            found[segment.id] = (known.reason, known.trimmed_ns)
        return found


def _as_sealed(one: MergedSegment) -> SealedSegment:
    """A trimmed segment as a table entry, without the times of its messages."""
    times = one.created_ns, 0, 0, one.sealed_ns
    return SealedSegment(
        one.id, one.first, one.end, one.size_bytes, *times, trimmed_ns=one.trimmed_ns, reason=one.reason
    )
