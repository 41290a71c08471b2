"""The log of a publisher's session: its runs, batches, segments, and the syncs that callers share."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from time import monotonic, sleep
from typing import Final, Self

from rt.client.publisher_status import SegmentExtent
from rt.client.settings import PublisherSettings
from rt.errors import Closed, DirectoryLocked
from rt.log.disk import Disk
from rt.log.format.batch import CODECS, BatchDraft, encode_batch
from rt.log.format.checksum import batch_seed
from rt.log.format.segment import SEGMENT_HEADER_BYTES, SegmentId
from rt.log.format.segment_table import LogIdentity, TrimReason
from rt.log.write.writer import BatchFrames, LogWriter, SyncPoint
from rt.names import session_owner
from rt.sidecar.silence_file import WrittenLimit, write_silence_limit

FSYNC_INTERVAL_SECONDS: Final = 0.1
"""With `fsync="interval"`: how long written bytes may wait for their fsync."""
CACHED_BYTES: Final = 32 * 2**20
"""This many bytes before the end stay in the page cache for the push; older ones are read from the disk."""
_LOCKED_SECONDS: Final = 2.0
"""How long to retry a locked directory: a child process that the previous publisher just started keeps the
lock until it executes its program.
"""
_LOCKED_AGAIN_SECONDS: Final = 0.01


class SessionLog:
    """A session's directory, opened for one publisher, in which a new run has started.

    The caller holds `lock` for each call, except for `sync_to`, `sync_if_due` and `trim_merged`. `wake` makes
    the background thread call `sync_if_due`. If the log `is_pushed`, it keeps only its end in the page cache.
    """

    def __init__(
        self,
        writer: LogWriter,
        settings: PublisherSettings,
        *,
        lock: threading.Lock,
        wake: Callable[[], None],
        is_pushed: bool,
        disk: Disk,
    ) -> None:
        self.writer = writer
        self._disk = disk
        self.run = 0
        self.run_first = 0
        """The first number of this run."""
        self.batches = 0
        """Batches that were written, and `value_bytes`, the bytes of their values."""
        self.value_bytes = 0
        self._lock = lock
        self._syncing = threading.Lock()
        """Held while a sync runs or a segment is sealed. Lock order: `lock`, then `_syncing`."""
        self._wake = wake
        self._roll_bytes = settings.roll_bytes
        self._fsync = settings.fsync
        self._codec = CODECS[settings.compression]
        self._silence_ms_max = settings.silence_ms_max
        self._is_promise_due = False
        self._is_pushed = is_pushed
        self._is_closed = False
        self._unsynced_since = 0.0
        """When the oldest batch that is not synced was written; 0 if all are synced."""
        self._synced: SyncPoint | None = None

    @classmethod
    def open(
        cls,
        directory: str,
        identity: LogIdentity,
        settings: PublisherSettings,
        *,
        lock: threading.Lock,
        wake: Callable[[], None],
        is_pushed: bool,
        disk: Disk,
    ) -> Self:
        """Open the directory and start a run at its end. Raises as `LogWriter.open`."""
        writer = _open_writer(directory, identity, disk, _LOCKED_SECONDS if is_pushed else 0)
        try:
            log = cls(writer, settings, lock=lock, wake=wake, is_pushed=is_pushed, disk=disk)
            log.start_run(writer.end)
            return log
        except BaseException:
            writer.close()
            raise

    @property
    def end(self) -> int:
        """One past the last number that was written."""
        return self.writer.end

    @property
    def synced(self) -> int:
        """One past the last number of this run that is known to be synced."""
        sealed = self.run_first if self.writer.active is None else self.writer.active.first
        return sealed if self._synced is None else max(sealed, self._synced.end)

    def start_run(self, first: int) -> None:
        """Start the next run with number `first`, and make the promise of `max_silence` again.

        If the promise fails (storage errors), the run is started nevertheless, and `append` makes the promise
        before it writes.
        """
        last = self.writer.last_id
        run = 0 if last is None else last.run + 1
        with self._syncing:
            self.writer.start(SegmentId(run, 0), first=first, run_id=os.urandom(8))
            self._synced = None
        self.run_first, self.run = first, run
        self._is_promise_due = True
        self._promise()

    def _promise(self) -> None:
        limit = self._silence_ms_max
        written = None if limit is None else WrittenLimit(self.run, limit)
        write_silence_limit(self._disk, self.writer.path, written)
        self._is_promise_due = False

    def append(self, drafts: list[BatchDraft], first: int) -> None:
        """Write batches from number `first` on with one system call, in a new segment if this one is full.

        On `rt.DiskFull` the batches that fit stay written; `end` shows which.
        """
        if self._is_promise_due:
            self._promise()
        self._roll_before(sum(len(draft.values) for draft in drafts))
        try:
            self.writer.append(self._frames(drafts, first))
        finally:
            for draft in drafts:
                first += draft.message_count
                if first > self.writer.end:
                    break
                self.batches += 1
                self.value_bytes += len(draft.values)

    def sync(self) -> None:
        """Sync everything. Later calls of `sync_to` find it synced, also after `close`."""
        with self._syncing:
            self.writer.sync()
            self._synced = self.writer.sync_point()

    def schedule_sync(self) -> None:
        """Schedule a sync of the latest writes within the interval."""
        if not self._unsynced_since:
            self._unsynced_since = monotonic()
            self._wake()

    def sync_if_due(self, now: float) -> float | None:
        """Sync if the interval is over. Returns the seconds until it is; None if all is synced."""
        if self._fsync != "interval" or not self._unsynced_since:
            return None
        left = self._unsynced_since + FSYNC_INTERVAL_SECONDS - now
        if left > 0:
            return left
        with self._lock:
            self._unsynced_since = 0.0
            point = self.writer.sync_point()
        self.sync_to(point)
        return None

    def sync_to(self, point: SyncPoint) -> None:
        """Sync up to `point`, unless another sync has covered it. Concurrent callers share one sync."""
        with self._syncing:
            covered = self._synced
            if covered is not None and (covered.id, covered.offset) >= (point.id, point.offset):
                return
            header = self.writer.active
            if header is None:
                raise Closed("the publisher is closed", where=self.writer.path)
            if header.id > point.id:
                return  # The roll synced it.
            self.writer.sync_to(point)
            self._synced = point
            if self._is_pushed:
                self.writer.uncache(point.offset - CACHED_BYTES)

    def trim_merged(self, before: SegmentId) -> None:
        """Trim the segments before `before`, whose messages are merged."""
        with self._lock, self._syncing:
            if not self._is_closed:
                self.writer.trim(before, TrimReason.MERGED)

    def end_promise(self) -> None:
        """End the promise of `max_silence`: the publisher is closed in order, and no more messages are
        expected. Raises storage errors.
        """
        with self._syncing:
            if not self._is_closed:
                write_silence_limit(self._disk, self.writer.path, None)

    def close(self) -> None:
        """Release the directory, without a sync. Calling it twice is allowed."""
        with self._syncing:
            self._is_closed = True
            self.writer.close()

    def disown(self) -> None:
        """In a forked child: release the directory. The parent keeps its lock."""
        self._lock, self._syncing = threading.Lock(), threading.Lock()
        self._is_closed = True
        self.writer.close()

    def extents(self) -> Iterator[SegmentExtent]:
        """The segments that hold bytes, in log order, with what was written to them."""
        for sealed in self.writer.table.segments:
            if not sealed.is_trimmed:
                yield SegmentExtent(sealed.id, sealed.first, sealed.end, sealed.size_bytes)
        if (active := self.writer.active) is not None:
            yield SegmentExtent(active.id, active.first, self.writer.end, self.writer.offset)

    def _roll_before(self, size: int) -> None:
        offset = self.writer.offset
        is_full = offset > SEGMENT_HEADER_BYTES and offset + size > self._roll_bytes
        if is_full or self.writer.is_sealed:
            with self._syncing:
                self.writer.roll()

    def _frames(self, drafts: list[BatchDraft], first: int) -> list[BatchFrames]:
        header, offset = self.writer.active, self.writer.offset
        assert header is not None
        seed = header.seed
        frames = []
        for draft in drafts:
            pieces = encode_batch(draft, first=first, seed=batch_seed(seed, offset), codec=self._codec)
            offset += sum(map(len, pieces))
            first += draft.message_count
            frames.append(BatchFrames(pieces, first, draft.timestamp_low_ns, draft.timestamp_high_ns))
        return frames


def _open_writer(directory: str, identity: LogIdentity, disk: Disk, seconds: float) -> LogWriter:
    """Open the directory. If it is locked, retry for `seconds`."""
    deadline = monotonic() + seconds
    while True:
        try:
            return LogWriter.open(directory, identity, disk=disk)
        except DirectoryLocked as error:
            if monotonic() >= deadline:
                other = f"{session_owner(identity.name)}~2"
                error.hint = (
                    f"Another publisher has the session {identity.name!r} open: stop it, or give each "
                    f"publisher its own name, for example publisher_id={other!r}."
                )
                raise
        sleep(_LOCKED_AGAIN_SECONDS)
