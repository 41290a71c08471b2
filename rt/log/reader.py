"""Reading a log directory: any session or merged one, live or finished, without locks and without network.

Laws. Only batches whose checksums hold are handed out, in order, each message once. A frame that is not whole
yet is waited for; one that is bad where bytes were known to be synced raises `rt.Damaged`. Where the log no
longer has what is wanted, an event says so. Files are read with pread, never mapped: a trim under a mapping
would kill the process.
"""

from __future__ import annotations

import logging
import math
import operator
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from copy import copy
from dataclasses import astuple
from types import TracebackType
from typing import Literal, Self, TypeAlias

import numpy as np
import numpy.typing as npt

from rt.errors import Damaged, Gap, NotALog
from rt.events import BadMessage, BadTail, Event, Reset, SkipForward
from rt.log.batch import BadBatch
from rt.log.catalog import Catalog, Kept, read_catalog, scanner_at, segment_path
from rt.log.columns import Message, MessageBatch, Placed, decode, groups
from rt.log.directory import READ_BYTES, is_log_directory, read_durable_end, read_header, read_identity, scans
from rt.log.disk import REAL, Disk, File, storage_errors
from rt.log.frames import MergedScanner, Scan, Scanner
from rt.log.segment import Kind, SegmentId
from rt.log.skips import read_skips, reason_of
from rt.log.watch import DirectoryWatch

logger = logging.getLogger("rt.log")

Place: TypeAlias = int | Literal["earliest", "latest"]
EventHandler: TypeAlias = Callable[[Event], None]

_RESTORE = "Restore or refetch the file; `rt log verify` lists all damage."
_LOOK_AGAIN_SECONDS = 1.0
"""A follower lists the directory this often even if nothing woke it."""


class LogReader:
    """Messages of one log directory, in columns or one by one.

    `position` is the first one wanted: a position (in a session log: a number), "earliest" (what is kept) or
    "latest" (the end as it is now). With `follow` the reader waits for more at the end, else it stops there.
    `topics`, if given, are the only ones handed out. `on_event` gets the events of `rt.events`; without it,
    missing messages raise `rt.Gap`, and reading on afterwards goes on behind the gap.

    Iterating, `poll` and `batches` draw from the same place and may be mixed. For one thread; `close` may
    come from any.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        position: Place = "earliest",
        follow: bool = False,
        topics: Collection[str] | None = None,
        on_event: EventHandler | None = None,
        disk: Disk = REAL,
    ) -> None:
        self.path = os.path.abspath(os.fspath(path))
        self._disk = disk
        self._topics = None if topics is None else frozenset([topics] if isinstance(topics, str) else topics)
        self._on_event = on_event
        self._closed = False
        self._reading = threading.RLock()
        self._is_busy = False
        self._told_tail: BadTail | None = None
        self._deferred: Exception | None = None
        self._list_again_at = 0.0
        self._file: File | None = None
        self._segment: SegmentId | None = None
        self._x: int | None = None
        """Of the segment that was read last."""
        self._scanner: Scanner
        self._read_bytes = READ_BYTES
        self._buffer: npt.NDArray[np.uint8] = np.empty(0, np.uint8)
        self._groups: deque[Sequence[Placed]] = deque()
        """Batches of `_buffer` that are verified and not decoded yet, to be decoded a group at a time."""
        self._given: MessageBatch | None = None
        self._rows: Iterator[int] = iter(())
        if not is_log_directory(disk, self.path):
            raise NotALog(
                "no log directory", where=self.path, hint="Name a directory that holds log.X.Y files."
            )
        self._watch = DirectoryWatch(self.path) if follow else None
        try:
            with storage_errors(self.path, "opening a log"):
                self.identity = read_identity(disk, self.path)
                self._names = {0: self.identity.name}
                self._position = self._resolve(position)
        except BaseException:
            self.close()
            raise

    @property
    def position(self) -> int:
        """The next position to be handed out: store it, and give it to a later reader."""
        left = operator.length_hint(self._rows)
        if self._given is not None and left:
            return int(self._given.positions[len(self._given) - left])
        return self._position

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def __iter__(self) -> Iterator[Message]:
        """Messages until the end of the log, or for ever with `follow`."""
        while (batch := self.next_batch()) is not None:
            yield from self.one_by_one(batch)

    def batches(self) -> Iterator[MessageBatch]:
        """The same messages in columns, as many at a time as are read together."""
        while (batch := self.next_batch()) is not None:
            yield batch

    def poll(self, max_messages: int = 1000, timeout: float | None = 0.0) -> list[Message]:
        """Up to `max_messages`, waiting up to `timeout` seconds (None: for ever) for the first one."""
        messages: list[Message] = []
        try:
            while len(messages) < max_messages:
                batch = self.next_batch(0.0 if messages else timeout, max_messages - len(messages))
                if batch is None:
                    break
                messages.extend(batch.messages())
        except Exception as error:
            if not messages:
                raise
            self._deferred = error  # First what there is, then what is wrong.
        return messages

    def next_batch(
        self, timeout: float | None = None, max_messages: int | None = None
    ) -> MessageBatch | None:
        """The next messages in columns; None at the end, or after `timeout` seconds with none (`follow`)."""
        batch = self._undelivered()
        if batch is None:
            deferred, self._deferred = self._deferred, None
            if deferred is not None:
                raise deferred
            batch = self._read(timeout)
            if batch is None:
                return None
        if max_messages is not None and len(batch) > max_messages:
            rest = batch.slice(max_messages, len(batch))
            batch = batch.slice(0, max_messages)
            self._given, self._rows = rest, iter(rest.positions.tolist())
        return batch

    def seek(self, position: Place) -> None:
        """Go on reading at `position`, backwards or forwards."""
        self._forget()
        self._x = None
        with storage_errors(self.path, "seeking in a log"):
            self._position = self._resolve(position)

    def position_at(self, timestamp_ns: int) -> int:
        """The first kept position whose timestamp is at or above `timestamp_ns`; the end if there is none."""
        with storage_errors(self.path, "looking for a time"):
            return self._position_at(timestamp_ns)

    def close(self) -> None:
        """Stop, from any thread: another thread's wait ends, and its iteration with it. Twice is allowed."""
        self._closed = True
        deque(self._rows, maxlen=0)
        if (watch := self._watch) is not None:
            watch.wake()
        with self._reading:
            if not self._is_busy:
                self._release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    # Delivery

    def one_by_one(self, batch: MessageBatch) -> Iterator[Message]:
        """The messages of the batch that `next_batch` just gave, so that `position` follows each of them."""
        self._given, self._rows = batch, iter(batch.positions.tolist())
        return batch.messages(self._rows)

    def _undelivered(self) -> MessageBatch | None:
        """What an iteration that was broken off, or a limited poll, left over."""
        given, rows, left = self._given, self._rows, operator.length_hint(self._rows)
        self._given, self._rows = None, iter(())
        deque(rows, maxlen=0)  # An iteration that was broken off must not go on with what is handed out now.
        return given.slice(len(given) - left, len(given)) if given is not None and left else None

    def _forget(self) -> None:
        self._undelivered()
        self._deferred = None
        self._groups.clear()
        self._leave()

    # Reading

    def _read(self, timeout: float | None) -> MessageBatch | None:
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        with self._reading:
            self._is_busy = True
            try:
                with storage_errors(self.path, "reading a log"):
                    return self._read_until(deadline)
            finally:
                self._is_busy = False
                if self._closed:
                    self._release()

    def _read_until(self, deadline: float) -> MessageBatch | None:
        while not self._closed:
            while self._groups:
                if (wanted := self._decode_next()) is not None:
                    return wanted
            if self._advance():
                continue
            left = deadline - time.monotonic()
            if self._watch is None or left <= 0:
                return None
            self._watch.wait(min(left, _LOOK_AGAIN_SECONDS))
        return None

    def _wanted(self, batch: MessageBatch) -> MessageBatch | None:
        """The part of `batch` from the position and of the topics that are wanted; moves the position."""
        end = batch.end
        if batch.positions[0] < self._position:
            batch = batch.slice(int(np.searchsorted(batch.positions, self._position)), len(batch))
        self._position = max(end, self._position)
        if not len(batch):
            return None
        return batch if self._topics is None else batch.with_topics(self._topics)

    def _advance(self) -> bool:
        """Read on; False when there is nothing more for now."""
        if self._file is None and not self._enter():
            return False
        assert self._file is not None
        data = self._pread(self._read_bytes)
        scan = self._scanner.scan(memoryview(data))
        if scan.consumed:
            self._read_bytes = READ_BYTES
            self._look_forward_to(data, scan)
            return True
        if scan.problem is None and scan.needed > len(data) and len(data) == self._read_bytes:
            self._read_bytes = scan.needed
            return True
        return self._at_end(scan, len(data))

    def _pread(self, size: int) -> bytes:
        assert self._file is not None
        with storage_errors(self.path, "reading a segment"):
            return self._file.pread(size, self._scanner.offset)

    def _look_forward_to(self, data: bytes, scan: Scan) -> None:
        if isinstance(self._scanner, MergedScanner):
            self._names = {session_id: found.session for session_id, found in self._scanner.sessions.items()}
        wanted = [b for b in scan.batches if b.first_position + b.header.message_count > self._position]
        self._buffer = np.frombuffer(data, np.uint8)
        self._groups.extend(groups(wanted))

    def _decode_next(self) -> MessageBatch | None:
        """Decode the next group; None if nothing of it is wanted.

        It leaves the queue when it has been decoded, so that a call which is broken off loses nothing. A bad
        batch is decoded for itself, so that it is named and its neighbours are handed out.
        """
        group = self._groups[0]
        try:
            batch = decode(self._buffer, group, self._names)
        except BadBatch as reason:
            self._groups.popleft()
            if len(group) > 1:
                self._groups.extendleft([placed] for placed in reversed(group))
                return None
            self._tell_bad(group[0], str(reason))
            return None
        wanted = None if batch is None else self._wanted(batch)
        self._groups.popleft()
        return wanted

    def _tell_bad(self, placed: Placed, reason: str) -> None:
        start = placed.first_position + placed.skip
        end = placed.first_position + placed.header.message_count
        self._position = max(self._position, end)
        self._tell(BadMessage(start, end, self._segment_path(), placed.offset, reason))

    # From segment to segment

    def _enter(self, *, is_gap: bool = False) -> bool:
        """Open the segment that holds the position; False if there is none yet.

        In a dedup session numbers jump between segments; after a trim (`is_gap`) a jump is told all the same.
        """
        catalog = read_catalog(self._disk, self.path)
        kept = catalog.find(self._position, monotone=self.identity.dedup_id is None)
        if kept is None:
            self._skip_to(catalog, catalog.known_end)
            return False
        if self.identity.dedup_id is not None and not is_gap:
            self._position = max(self._position, kept.first)
        is_at_begin = self._position <= kept.first
        self._skip_to(catalog, kept.first)
        if is_at_begin:
            self._note_reset(kept, catalog.x_before(kept.id) if self._x is None else self._x)
        return self._open(kept, self._position)

    def _open(self, kept: Kept, position: int) -> bool:
        """Open `kept` at `position`; False if it was trimmed meanwhile."""
        path = segment_path(self.path, kept.id)
        try:
            header = kept.header or read_header(self._disk, self.path, kept.id)
            file = self._disk.open(path) if header is not None else None
        except FileNotFoundError:
            header = file = None
        if header is None or file is None:
            if any(again == kept for again in read_catalog(self._disk, self.path).kept):
                raise Damaged("a segment is missing that was not trimmed", path=path, offset=0, hint=_RESTORE)
            return False
        if (header.kind, header.origin) != (self.identity.kind, self.identity.origin):
            file.close()
            raise Damaged("segment of another log", path=path, offset=0, got=header.origin.hex())
        self._leave()
        self._file, self._segment, self._x = file, kept.id, kept.id.x
        self._scanner = scanner_at(self._disk, self.path, header, file, position)
        return True

    def _at_end(self, scan: Scan, got: int) -> bool:
        """The segment gives nothing more now: go to the next one, or find out why; False to wait."""
        assert self._segment is not None
        assert self._file is not None
        if self._file.size() == 0 or not self._file.is_linked():
            return self._trimmed()
        durable = read_durable_end(self._disk, self.path)
        is_newer = (
            durable is not None and durable.id > self._segment and durable.origin == self.identity.origin
        )
        later = self._later(is_last_look=is_newer or self._watch is None)
        if later is None and is_newer and durable is not None:
            path = segment_path(self.path, durable.id)
            raise Damaged("a segment is missing that was synced", path=path, offset=0, hint=_RESTORE)
        known = durable.offset if durable is not None and durable.id == self._segment else 0
        if self._grew(scan, got):
            return True
        if later is None and self._scanner.offset >= known:
            if self._scanner.boundary < self._file.size() and self._watch is None:
                self._bad_tail()
            return False
        if later is not None and self._scanner.boundary == self._file.size():
            return self._open_next(later)
        if self._file.size() == 0:
            return self._trimmed()
        raise Damaged(
            scan.problem or "the segment ends inside a batch",
            path=self._segment_path(),
            offset=self._scanner.boundary,
            hint=_RESTORE,
        )

    def _grew(self, scan: Scan, got: int) -> bool:
        """Whether there is more now, or the same bytes read better: they were being written when read."""
        assert self._file is not None
        if not (scan.problem or scan.needed):
            return self._file.size() > self._scanner.offset + got
        data = self._pread(max(got, scan.needed))
        return copy(self._scanner).scan(memoryview(data)).consumed > 0

    def _later(self, *, is_last_look: bool) -> Kept | None:
        """The next segment, if there is one.

        Two look-ups while nothing happens; a listing where something did, before the reader says that this is
        the end, and for a follower now and then.
        """
        assert self._segment is not None
        x, y = self._segment
        nearby = (SegmentId(x, y + 1), SegmentId(x + 1, 0))
        is_due = is_last_look or time.monotonic() >= self._list_again_at
        if not is_due and all(self._disk.size(segment_path(self.path, near)) is None for near in nearby):
            return None
        self._list_again_at = time.monotonic() + _LOOK_AGAIN_SECONDS
        return read_catalog(self._disk, self.path).after(self._segment)

    def _open_next(self, kept: Kept) -> bool:
        assert self._segment is not None
        end = self._scanner.next
        may_jump = self.identity.dedup_id is not None and kept.id.x != self._segment.x
        if may_jump:
            self._position = kept.first
        elif kept.first > end:
            catalog = read_catalog(self._disk, self.path)
            if self.identity.kind is Kind.FILTERED:
                # What was filtered out behind the last block is not missing, up to the end that was sealed.
                self._position = max(self._position, catalog.sealed_end(self._segment))
            self._skip_to(catalog, kept.first)
        self._note_reset(kept, self._segment.x)
        return self._open(kept, max(self._position, kept.first))

    def _note_reset(self, kept: Kept, earlier_x: int | None) -> None:
        """Tell of it where a merged log begins anew with another X."""
        if self.identity.kind is not Kind.SESSION and earlier_x is not None and earlier_x < kept.id.x:
            self._x = kept.id.x
            self._tell(Reset(kept.first, kept.id.x))

    def _trimmed(self) -> bool:
        """The open segment was trimmed under us: look again for where the position is now."""
        self._leave()
        return self._enter(is_gap=True)

    def make_durable(self) -> None:
        """Sync what was read: a remembered position must not be ahead of the log after a power cut."""
        if self._file is not None:
            with storage_errors(self.path, "syncing a segment"):
                self._file.sync()

    def _skip_to(self, catalog: Catalog, start: int) -> None:
        if start > self._position:
            why = reason_of(read_skips(self._disk, self.path), self._position, start)
            reason = catalog.trim_reason(self._position) if why is None else why
            event = SkipForward(self._position, start, reason.name.lower())
            self._position = start
            self._tell(event)

    def _bad_tail(self) -> None:
        assert self._file is not None
        tail = BadTail(
            self._segment_path(), self._scanner.boundary, max(self._file.size() - self._scanner.boundary, 0)
        )
        if tail != self._told_tail:
            self._told_tail = tail
            self._tell(tail)

    def _tell(self, event: Event) -> None:
        if self._on_event is not None:
            self._on_event(event)
        elif isinstance(event, BadTail):
            logger.warning(
                "bad_tail path=%s offset=%d torn_bytes=%d", event.path, event.offset, event.torn_bytes
            )
        elif isinstance(event, Reset):
            logger.warning("stream_was_reset path=%s position=%d x=%d", self.path, *astuple(event))
        else:
            raise Gap(
                "messages are missing",
                event=event,
                where=self.path,
                got=event,
                hint="Give on_event to be told instead.",
            )

    def _resolve(self, position: Place) -> int:
        if not isinstance(position, str | bool) and hasattr(position, "__index__"):
            return self._checked(operator.index(position))
        catalog = read_catalog(self._disk, self.path)
        if position == "earliest":
            return catalog.start
        if position == "latest":
            return self._log_end(catalog)
        raise ValueError(f"position {position!r} is neither a number nor 'earliest' nor 'latest'")

    def _checked(self, position: int) -> int:
        """A position that is, or may yet be, in the log: a reader beyond the end would wait for ever."""
        if position < 0:
            raise ValueError(f"position {position} is negative")
        catalog = read_catalog(self._disk, self.path)
        if position > catalog.known_end and self.identity.dedup_id is None:
            end = self._log_end(catalog)
            if position > end:
                raise ValueError(f"position {position} is beyond the end, {end}, of {self.path}")
        return position

    def _log_end(self, catalog: Catalog) -> int:
        """One past the last whole message, found from the newest segment's last hop."""
        if not catalog.kept or catalog.kept[-1].end is not None:
            return max(catalog.known_end, catalog.start)
        if not self._open(catalog.kept[-1], 2**62):
            return catalog.known_end
        assert self._file is not None
        for _ in scans(self._file.pread, self._scanner):
            pass
        end = self._scanner.next
        self._leave()
        return end

    def _position_at(self, timestamp_ns: int) -> int:
        catalog = read_catalog(self._disk, self.path)
        sealed = {segment.id: segment for segment in catalog.table.segments} if catalog.table else {}
        end = catalog.known_end
        for kept in catalog.kept:
            known = sealed.get(kept.id)
            if known is not None and known.timestamp_high_ns < timestamp_ns:
                continue
            for batch in self._segment_batches(kept):
                at = np.flatnonzero(batch.timestamps_ns >= timestamp_ns)
                if len(at):
                    return int(batch.positions[at[0]])
                end = max(end, batch.end)
        return end

    def _segment_batches(self, kept: Kept) -> Iterator[MessageBatch]:
        with LogReader(
            self.path, position=kept.first, topics=self._topics, on_event=_ignore, disk=self._disk
        ) as reader:
            for batch in reader.batches():
                if kept.end is not None and batch.positions[0] >= kept.end:
                    return
                yield batch

    def _segment_path(self) -> str:
        return segment_path(self.path, self._segment or SegmentId(0, 0))

    def _release(self) -> None:
        self._leave()
        if self._watch is not None:
            watch, self._watch = self._watch, None
            watch.close()

    def _leave(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file, self._segment = None, None


def _ignore(event: Event) -> None:
    """An event of a look-up is met again, and told, when the messages are read."""
