"""The durable Raft log: entries, term and vote of one node, in segment files.

Invariants:
- Changes are queued. `sync` makes all of them durable as one group, with one write and one fsync. After a
  crash the whole group counts, or nothing of it.
- `synced` is never above the last entry for which an fsync has returned. A failed fsync is final.
- Everything that recovery accepted is on the medium when `open` returns. `log_format` describes the bytes;
  `log_recovery` handles what a crash left.

An fsync after a write that grows the file waits for the file system's journal; after an overwrite it does
not. So segments are filled with zeros in advance: the newest one when it is opened, the next one as a spare
file that another thread makes (`prepare_spare`). Without these zeros the log is only slower.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Sequence
from typing import NamedTuple

from rt.errors import Closed, DiskFull
from rt.log.disk import REAL, Disk, File, storage_errors
from rt.log.format.constants import Buffer
from rt.log.whole_files import open_whole
from rt.log.write.failure_latch import FailureLatch
from sequencer.raft.model.messages import ID_BYTES, NOWHERE, LogIndex, RaftEntry
from sequencer.raft.storage.log_entries import Entries
from sequencer.raft.storage.log_format import (
    GROUP_HEADER_BYTES,
    SEGMENT_HEADER_BYTES,
    SYNCED_END_FILE,
    VOTE_BYTES_MAX,
    RaftSegmentHeader,
    RecordKind,
    SyncedEnd,
    add_record,
    encode_group_header,
    encode_segment_header,
    encode_synced_end,
)
from sequencer.raft.storage.log_recovery import Replay, recover_log, segment_numbers
from sequencer.raft.storage.preallocation import SpareSegment

SEGMENT_BYTES = 8 << 20
"""When a segment has reached this size, the log continues in the next segment."""


class TornTailCut(NamedTuple):
    """A torn tail that recovery cut. It was not known to be synced."""

    path: str
    offset: int
    torn_bytes: int


class DurableLog(Entries):
    """The log of one node. Open it with `DurableLog.open`. One thread uses it, under the node's lock.

    A queued change is visible at once. After `rt.StorageFailed` every change and sync raises it.
    """

    def __init__(
        self,
        disk: Disk,
        directory: str,
        replay: Replay,
        synced: SyncedEnd,
        segment_bytes: int,
        fill_bytes: int,
    ) -> None:
        super().__init__(replay.entries.base, replay.entries.entries(replay.entries.base.index + 1))
        self.directory = directory
        self.term = replay.term
        self.voted_for = replay.voted_for
        self.synced = self.last
        """`last` as of the last sync, or below it. Truncation lowers it at once."""
        self.cut: TornTailCut | None = None
        """The torn tail that recovery cut, for the log messages of the node."""
        self._disk = disk
        self._spare_disk = disk  # The simulation replaces it.
        self._segment_bytes = segment_bytes
        self._fill_bytes = fill_bytes
        self._spare: SpareSegment | None = None
        self._header = replay.header
        self._seed = replay.header.seed
        self._name = replay.header.file_name
        self._offset = replay.end
        self._group = replay.group
        oldest = replay.header.number - len(replay.bases) + 1
        self._segments = list(enumerate(replay.bases, oldest))  # number and base of each, the active one last
        self._queued: list[bytes] = []
        self._synced_end = synced
        self._latch = FailureLatch(directory)
        self._is_closed = False
        self._file: File = disk.open(os.path.join(directory, self._name), write=True)
        self._synced_end_file: File = disk.open(os.path.join(directory, SYNCED_END_FILE), write=True)
        if replay.torn_bytes:
            path = os.path.join(directory, self._name)
            self.cut = TornTailCut(path, replay.end, replay.torn_bytes)

    @classmethod
    def open(
        cls,
        directory: str,
        *,
        disk: Disk = REAL,
        create_at: LogIndex | None = None,
        segment_bytes: int = SEGMENT_BYTES,
        fill_bytes: int = 0,
        new_id: Callable[[], bytes] = lambda: os.urandom(ID_BYTES),
    ) -> DurableLog:
        """Open the log in a directory that the caller has locked, and make everything that recovery accepted
        durable.

        If there never was a log, a new log starts after `create_at`. If `create_at` is None, `rt.LogNotFound`
        is raised instead. `base` may be higher than a compaction left it, so the caller compares it with its
        snapshot. Segments are filled up to `fill_bytes`, which is best equal to `segment_bytes`. If it is 0,
        they grow. Raises `rt.Corrupt` or `rt.UnknownVersion`, which leave the files as they are, and storage
        errors.
        """
        with storage_errors(directory, "opening the Raft log"):
            replay, synced = recover_log(disk, directory, create_at, new_id, fill_bytes)
            return cls(disk, directory, replay, synced, segment_bytes, fill_bytes)

    @property
    def is_dirty(self) -> bool:
        return bool(self._queued)

    # Changes, queued

    def set_term(self, term: int, voted_for: str | None) -> None:
        """Record the term, or the vote in it. A term never falls, and a vote in it never changes."""
        self._check_usable()
        assert term >= self.term, (term, self.term)
        if term == self.term:
            if voted_for == self.voted_for:
                return
            assert self.voted_for is None, (term, self.voted_for, voted_for)
        vote = b"" if voted_for is None else voted_for.encode()
        assert voted_for is None or 0 < len(vote) <= VOTE_BYTES_MAX, voted_for
        add_record(self._queued, RecordKind.TERM, 0, term, vote)
        self.term, self.voted_for = term, voted_for

    def append(self, entry: RaftEntry) -> None:
        self._check_usable()
        super().append(entry)
        add_record(self._queued, RecordKind.ENTRY, entry.index, entry.term, entry.content)

    def truncate(self, index: int) -> None:
        """Drop the entries from `index` on. `index` is after `base`."""
        self._check_usable()
        before = self.last
        super().truncate(index)
        last = self.last
        if last != before:
            add_record(self._queued, RecordKind.TRUNCATE, last.index, last.term)
            self.synced = min(self.synced, last)

    def reset(self, base: LogIndex) -> None:
        """Drop all entries and continue after `base`, which a durable snapshot covers."""
        self._check_usable()
        super().reset(base)
        add_record(self._queued, RecordKind.RESET, base.index, base.term)
        self.synced = NOWHERE

    # Durability

    def sync(self) -> bool:
        """Make everything queued durable. Returns False if nothing was queued.

        `rt.DiskFull`: everything stays queued, and a later sync may succeed. `rt.StorageFailed` is final.
        """
        self._check_usable()
        if not self._queued:
            return False
        with self._latch.guarded(self._name, "syncing the Raft log"):
            payload = b"".join(self._queued)
            header = encode_group_header(self._seed, self._group, self._offset, payload)
            self._write((header, payload), GROUP_HEADER_BYTES + len(payload))
            self._sync_file()
            self._offset += GROUP_HEADER_BYTES + len(payload)
            self._group += 1
            self._queued.clear()
            self.synced = self.last
            if self._offset >= self._segment_bytes:
                with contextlib.suppress(DiskFull):  # Nothing is lost: the next sync tries again.
                    self._start_segment()
        return True

    def roll(self) -> None:
        """Sync and continue in a new segment, so that `compact` may remove the older ones. Raises like
        `sync`.
        """
        self.sync()
        if self._offset > SEGMENT_HEADER_BYTES:
            self._start_segment()

    def prepare_spare(self) -> Callable[[], None] | None:
        """Return a function that makes the file of the next segment, for any thread. None if it is not needed
        yet.

        The file is needed once the segment is half full, unless a spare exists or is being made. If the
        function fails, the log continues without a spare, and a later call returns a new function. Stop the
        thread before closing the log.
        """
        if not self._is_usable or not self._fill_bytes or 2 * self._offset < self._segment_bytes:
            return None
        if self._spare is not None and not self._spare.has_failed:
            return None
        self._spare = SpareSegment(self._spare_disk, self.directory, self._fill_bytes)
        return self._spare.prepare

    def compact(self, keep_from: int) -> None:
        """Remove segments that contain only entries below `keep_from`. A durable snapshot must cover them.

        Also removes segments that an earlier compaction left. May be repeated after `rt.DiskFull`, which some
        file systems raise even here.
        """
        self._check_usable()
        assert keep_from <= self.last.index + 1, (keep_from, self.last)
        if keep_from <= self.base.index:
            return
        # A segment's header summarizes everything before it, even after later truncations and resets.
        covered = (number for number, base in reversed(self._segments) if base.index < keep_from)
        first = next(covered, self._segments[0][0])
        with self._latch.guarded("log.*", "compacting the Raft log"):
            self._remove_segments(first)
            self._segments = [segment for segment in self._segments if segment[0] >= first]
            base = self._segments[0][1].index
            if base > self.base.index:
                term = self.term_at(base)
                assert term is not None, (base, self.base, self.last)
                self.drop_through(LogIndex(base, term))

    def close(self) -> None:
        """Release the files, and remove the spare. Nothing is synced. Idempotent."""
        self._is_closed = True
        self._file.close()
        self._synced_end_file.close()
        if self._spare is not None:
            self._spare.drop()
            self._spare = None

    # Steps

    def _write(self, buffers: Sequence[Buffer], size: int) -> None:
        """Write the complete group at the end of the file, or nothing."""
        try:
            written = self._file.pwritev(buffers, self._offset)
            while written < size:
                rest = memoryview(b"".join(buffers))[written:]
                count = self._file.pwritev((rest,), self._offset + written)
                if count == 0:
                    raise OSError(errno.ENOSPC, "nothing more could be written")
                written += count
        except OSError as error:
            failed = self._latch.failed(error, self._name, "writing to the Raft log")
            if isinstance(failed, DiskFull):
                try:
                    self._file.truncate(self._offset)
                except OSError as second:
                    doing = "truncating an incomplete group"
                    raise self._latch.failed(second, self._name, doing, is_final=True) from second
            raise failed from error

    def _sync_file(self) -> None:
        try:
            if not self._file.is_linked():
                raise FileNotFoundError(errno.ENOENT, "the segment was removed under its writer")
            self._file.sync()
        except OSError as error:
            raise self._latch.failed(error, self._name, "syncing the Raft log", is_final=True) from error

    def record_synced_end(self) -> None:
        """Write the end of the synced log to a separate file, if the end changed.

        Recovery needs it to distinguish a torn last group from a corrupt last group. For every other group,
        the next group proves that it was synced. The value is a lower bound, so it is not synced, and a
        failed write leaves the older value.
        """
        header, known = self._header, self._synced_end
        if (known.segment, known.offset) == (header.number, self._offset) or not self._is_usable:
            return
        end = SyncedEnd(known.sequence + 1, header.number, self._offset, self._group - 1, header.log)
        with contextlib.suppress(OSError):
            self._synced_end_file.pwritev((encode_synced_end(end),), end.file_offset)
            self._synced_end = end

    def _start_segment(self) -> None:
        """Continue in the next segment. Its header and name are durable before anything is written to it."""
        assert not self._queued, "a header summarizes synced changes"
        number = self._header.number + 1
        header = RaftSegmentHeader(
            number, self._header.log, self.last, self.term, self.voted_for, self._group
        )
        path = os.path.join(self.directory, header.file_name)
        with self._latch.guarded(header.file_name, "beginning a segment of the Raft log"):
            file = self._make_segment(path, encode_segment_header(header))
        self._file.close()
        self._file, self._name = file, header.file_name
        self._header, self._seed, self._offset = header, header.seed, SEGMENT_HEADER_BYTES
        self._segments.append((number, header.base))

    def _make_segment(self, path: str, header: bytes) -> File:
        """The file of a new segment: the spare if there is one, else a new file."""
        spare = self._spare
        if spare is not None and spare.file is not None:
            self._spare = None
            return spare.promote(path, header)
        return open_whole(self._disk, path, header)

    def _remove_segments(self, first: int) -> None:
        for number in segment_numbers(self._disk, self.directory):
            if number < first:
                with contextlib.suppress(FileNotFoundError):
                    self._disk.remove(os.path.join(self.directory, f"log.{number}"))

    @property
    def _is_usable(self) -> bool:
        return not self._is_closed and not self._latch.has_failed

    def _check_usable(self) -> None:
        self._latch.check()
        if self._is_closed:
            raise Closed("the Raft log is closed", where=self.directory)
