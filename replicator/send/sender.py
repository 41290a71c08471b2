"""Following a log directory and handing out what a receiver has not got: items, in log order.

Laws. What is handed out continues what was handed out before, without gap or repeat, whatever the directory's
writer does meanwhile: rolls, trims, dies, comes back. Bytes that are not good yet are waited for; those that
were known to be good and are not raise `rt.Corrupt`. Each session number's life comes before its first bytes,
and a segment's seal behind its last. A trim is told, in a merged log, before the first item that follows it.

No network, no threads, no clock: an event loop waits for `fileno` and asks for `items`.
"""

from __future__ import annotations

import os
from dataclasses import replace
from types import TracebackType
from typing import Self

from replicator.protocol.messages import (
    CHUNK_BYTES_MAX,
    Chunk,
    Item,
    LogOffset,
    LogTrimmed,
    Run,
    SegmentSealed,
)
from replicator.send.directory_watch import LogWatch
from replicator.send.read_cache import ReadCache
from replicator.send.segment_reader import SegmentReader
from replicator.send.source_view import SourceView
from rt.errors import Corrupt, Diverged, RtError
from rt.log.disk import REAL, Disk, storage_errors
from rt.log.format.segment import LogKind, SegmentId
from rt.log.format.segment_table import LogIdentity, SealedSegment
from rt.log.scan.catalog import segment_path
from rt.log.scan.directory import read_durable_end

_RESTORE = "Restore or refetch the file; `rt log verify` lists all damage."


class Sender:
    """The items of the log in `path` from `start` on; None: from the oldest that is kept.

    `start` is where the receiver's whole batches or blocks end. It may lie beyond what is here: nothing is
    handed out before the log has grown to it. If it lies in what is trimmed, the oldest that is kept comes
    next, and the receiver judges. `rt.Diverged` if it lies inside of something.

    With `watch` off there is no `fileno`, and the caller knows when to ask. Senders of one session directory
    may share their reads. For one thread.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        start: LogOffset | None,
        *,
        disk: Disk = REAL,
        watch: bool = True,
        shared: ReadCache | None = None,
    ) -> None:
        self.path = os.path.abspath(os.fspath(path))
        self._disk = disk
        self._shared = shared
        self._reader: SegmentReader | None = None
        self._wanted = start or LogOffset(0, 0, 0)
        """Without a reader: where the next one begins, or in a later segment."""
        self._sealed: SegmentSealed | None = None
        """What was last told to be sealed."""
        self._chunk_bytes = CHUNK_BYTES_MAX
        self._announced_run: int | None = None
        self._trimmed: LogTrimmed | None = None
        # Set before the first look, so that no change is missed.
        self._watch = LogWatch(self.path) if watch else None
        try:
            with storage_errors(self.path, "opening a log to send it"):
                self._view = SourceView(disk, self.path)
        except BaseException:
            self.close()
            raise

    @property
    def identity(self) -> LogIdentity:
        """What the directory is."""
        return self._view.identity

    @property
    def place(self) -> LogOffset:
        """Where the next chunk begins, if its segment goes on."""
        return self._reader.place if self._reader else self._wanted

    @property
    def is_inside_frame(self) -> bool:
        """Whether what was handed out last ends inside a batch or block: the next chunks complete it."""
        return self._reader is not None and self._reader.is_inside_frame

    def fileno(self) -> int:
        """Readable when there may be new items (-1: ask every
        `replicator.send.directory_watch.POLL_SECONDS`).
        """
        return self._watch.fileno() if self._watch else -1

    def items(self, bytes_max: int = CHUNK_BYTES_MAX, *, chunk_bytes: int = CHUNK_BYTES_MAX) -> list[Item]:
        """What there is now, until its chunks hold `bytes_max` or up to a chunk more; nothing: wait.

        No chunk is larger than `chunk_bytes`.

        Never blocks but for the disk. `rt.Corrupt`, `rt.Diverged`, `rt.LogNotFound`, storage errors; what was
        handed out before stays good, and what precedes the trouble comes before it is raised.
        """
        if self._watch:
            self._watch.drain()
        found: list[Item] = []
        self._chunk_bytes = chunk_bytes
        try:
            with storage_errors(self.path, "reading a log to send it"):
                self._collect(found, bytes_max)
        except RtError:
            if not found:
                raise
            # The next call meets it again.
        return found

    def close(self) -> None:
        """Release the files. Twice is allowed."""
        if self._reader:
            self._reader.close()
            self._reader = None
        if self._watch:
            self._watch.close()
            self._watch = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _collect(self, found: list[Item], left: int) -> None:
        while left > 0:
            chunks: list[Chunk] = []
            if self._reader:
                self._reader.chunk_bytes = self._chunk_bytes
                chunks = self._reader.take(left)
            found += chunks
            left -= sum(len(chunk.data) for chunk in chunks)
            if left > 0 and not self._advance(found):
                break

    def _advance(self, found: list[Item]) -> bool:
        """The open segment gives nothing more: find out what comes next; False if nothing does now."""
        self._look(found)
        if self._reader is None:
            return self._enter(found)
        return self._at_end(self._reader, found)

    def _look(self, found: list[Item]) -> bool:
        """Whether the table changed; what it says of a merged log's trims is told at once."""
        if not self._view.look():
            return False
        if self.identity.kind is not LogKind.SESSION:
            trimmed = self._view.trimmed()
            if trimmed is not None and (self._trimmed is None or trimmed.before > self._trimmed.before):
                self._trimmed = trimmed
                found.append(trimmed)
        return True

    # From segment to segment

    def _enter(self, found: list[Item]) -> bool:
        """Open the segment that is wanted, or the next one behind it; False if it is not here yet."""
        entry = self._view.sealed(self._wanted.segment)
        if entry is not None and self._is_behind(entry):
            self._tell_life(entry.id.run, entry.run_id, found)
            self._leave(entry, found)
            return True
        segment = self._view.at_or_after(self._wanted.segment)
        if segment is None:
            return False
        offset = self._wanted.offset if segment == self._wanted.segment else 0
        try:
            reader = SegmentReader.open(
                self._disk, self.path, segment, self.identity, offset=offset, shared=self._shared
            )
        except FileNotFoundError as error:
            return self._look_again(segment, found, error)
        if reader is None:
            return False
        self._tell_last_of_run(segment, found)
        self._tell_life(segment.run, reader.header.run_id, found)
        self._reader = reader
        return True

    def _is_behind(self, entry: SealedSegment) -> bool:
        """Whether the place that is wanted is the end of a sealed segment, or behind it.

        A receiver has more than there is here where this host lost power: what it holds stays good.
        """
        if self._wanted.offset <= entry.size_bytes:
            return entry.is_trimmed and self._wanted.offset == entry.size_bytes > 0
        if self.identity.kind is not LogKind.SESSION:
            raise Diverged(
                "the receiver has more of a sealed segment than it holds",
                where=segment_path(self.path, entry.id),
                got=self._wanted.offset,
                expected=entry.size_bytes,
            )
        return True

    def _at_end(self, reader: SegmentReader, found: list[Item]) -> bool:
        """What table and durable end say of a segment that gave nothing more before they were read."""
        entry = self._view.sealed(reader.header.id)
        durable = 0 if entry is not None or reader.problem is None else self._durable_offset(reader.header.id)
        more: list[Chunk] = (
            reader.take(1, is_fresh=True) if entry is not None or reader.problem is not None else []
        )
        if more:
            found += more
            return True
        end = durable if entry is None else entry.size_bytes
        is_trimmed = entry is not None and entry.is_trimmed
        if reader.is_gone or (is_trimmed and reader.place.offset < end):
            self._reader = None
            self._wanted = reader.place
            reader.close()
            return self._look_again(reader.header.id, found)
        if reader.place.offset < end:
            raise Corrupt(
                reader.problem or "the segment ends inside a batch",
                path=reader.path,
                offset=reader.place.offset,
                hint=_RESTORE,
            )
        if entry is None:
            return False
        self._reader = None
        reader.close()
        self._leave(entry, found)
        return True

    def _leave(self, entry: SealedSegment, found: list[Item]) -> None:
        """A sealed segment is handed out whole: say so, and go on behind it."""
        run, roll = entry.id
        later = self._view.at_or_after(SegmentId(run, roll + 1))
        self._sealed = SegmentSealed(
            LogOffset(run, roll, entry.size_bytes),
            entry.end,
            later is not None and later.run > run,
            entry.sealed_ns,
        )
        found.append(self._sealed)
        self._wanted = LogOffset(run, roll + 1, 0)

    def _tell_last_of_run(self, segment: SegmentId, found: list[Item]) -> None:
        """Say again that a segment is sealed if only now it is known to be the last of its X."""
        sealed = self._sealed
        if sealed is not None and not sealed.is_last_of_run and segment.run > sealed.place.run:
            self._sealed = replace(sealed, is_last_of_run=True)
            found.append(self._sealed)

    def _tell_life(self, run: int, life: bytes, found: list[Item]) -> None:
        if self.identity.kind is LogKind.SESSION and run != self._announced_run:
            self._announced_run = run
            found.append(Run(run, life))

    def _look_again(self, segment: SegmentId, found: list[Item], error: OSError | None = None) -> bool:
        """A segment has gone: the table says so by now, or it is damage."""
        if self._look(found) or self._view.is_trimmed(segment):
            return True
        raise Corrupt(
            "a segment is missing that was not trimmed",
            path=segment_path(self.path, segment),
            offset=0,
            hint=_RESTORE,
        ) from error

    def _durable_offset(self, segment: SegmentId) -> int:
        durable = read_durable_end(self._disk, self.path)
        is_of_it = durable is not None and (durable.id, durable.origin) == (segment, self.identity.origin)
        return durable.offset if durable is not None and is_of_it else 0
