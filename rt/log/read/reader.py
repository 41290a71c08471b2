"""Reading a log directory: any session or merged one, live or finished, without locks and without network.

Invariants:
- Only batches with valid checksums are returned, in order, each message once.
- Files are read with pread, never mapped: a trim under a mapping would kill the process.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from itertools import chain
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt

from rt.events import BadMessage
from rt.log.disk import REAL, Disk, storage_errors
from rt.log.format.batch import BadBatch
from rt.log.read.row_delivery import RowDelivery
from rt.log.read.segment_cursor import LOOK_AGAIN_SECONDS, EventHandler, EventSink, SegmentCursor
from rt.log.read.start_position import Place, StartTime, check_epoch, check_place
from rt.log.read.time_search import search_time
from rt.log.read.topic_patterns import check_topics
from rt.log.read.watch import DirectoryWatch
from rt.log.scan.batch_decoder import decode
from rt.log.scan.directory import check_log_directory, read_identity
from rt.log.scan.message_batch import Message, MessageBatch
from rt.log.scan.placed_batches import PlacedBatch, groups
from rt.log.scan.scanner import ScanResult
from rt.option_checks import check_count, check_path, check_time, check_timeout

__all__ = ["EventHandler", "LogReader", "Place"]


class LogReader:
    """Messages of one log directory, in columns or one by one.

    `position` is the first to read: a position (in a session log: a number), "earliest" (the log start),
    "latest" (the current log end), or a datetime with a timezone: the first message, of any topic, with that
    timestamp or a later one. If there is none yet, all that comes before the first one is passed over. With
    `follow` the reader waits at the end for more; else it stops there.
    `topics`, if given, are the only ones returned: names, and patterns with `*`, `?` and `[…]`. `on_event`
    receives the events of `rt.events`. Without it, missing messages raise `rt.Gap`, and the next read
    continues after the gap. `epoch`: that of an earlier reader of a merged log, stored with `position`. If a
    forced reset replaced messages before the position since, reading raises `rt.Diverged`.

    Iterating, `poll` and `batches` share one position and may be mixed. For one thread; `close` may be called
    from any.
    """

    _may_be_ahead = False
    """Whether the reader waits for a position after the end. A subclass sets it before it opens."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        position: Place = "earliest",
        follow: bool = False,
        topics: Collection[str] | None = None,
        on_event: EventHandler | None = None,
        epoch: int | None = None,
        disk: Disk = REAL,
    ) -> None:
        epoch = check_epoch(epoch, position)
        self.path = os.path.abspath(check_path(path))
        self._disk = disk
        self._topics = None if topics is None else check_topics(topics)
        self._closed = False
        self._reading = threading.RLock()
        self._is_busy = False
        self._deferred: Exception | None = None
        self.passed = 0
        """Every message before this position was returned, or is of another topic. Any thread may read it."""
        self._start_ns: int | None = None
        """All messages before the first one with this timestamp or a later one are skipped."""
        self._buffer: npt.NDArray[np.uint8] = np.empty(0, np.uint8)
        self._groups: deque[Sequence[PlacedBatch]] = deque()
        """Batches of `_buffer` that are verified but not decoded; decoded a group at a time."""
        self._delivery = RowDelivery()
        check_log_directory(disk, self.path)
        with storage_errors(self.path, "opening a log"):
            self.identity = read_identity(disk, self.path)
        self._events = EventSink(self.path, on_event)
        self._walk = SegmentCursor(disk, self.path, self.identity, self._events, waits=follow)
        self._watch = DirectoryWatch(self.path) if follow else None
        try:
            with storage_errors(self.path, "opening a log"):
                self._go_to(position, epoch)
        except BaseException:
            self.close()
            raise

    @property
    def position(self) -> int:
        """The position of the next message: store it, and pass it to a later reader."""
        position = self._delivery.position
        return self._walk.position if position is None else position

    @property
    def epoch(self) -> int | None:
        """The number of an epoch in which `position` is right; None if nothing was read yet, and in a session
        log. Store it with the position.
        """
        return self._walk.epoch

    @property
    def is_closed(self) -> bool:
        return self._closed

    def __iter__(self) -> Iterator[Message]:
        """Iterate over messages until the end of the log; with `follow`, until `close`."""
        return chain.from_iterable(map(self.one_by_one, self.batches()))

    def batches(self) -> Iterator[MessageBatch]:
        """Iterate over the same messages in columns, as many at a time as are read together."""
        while (batch := self.next_batch()) is not None:
            yield batch

    def poll(self, max_messages: int = 1000, timeout: float | None = 0.0) -> list[Message]:
        """Up to `max_messages`, waiting up to `timeout` seconds (None: no limit) for the first one."""
        messages: list[Message] = []
        check_count(max_messages, name="max_messages")
        timeout = check_timeout(timeout)
        try:
            while len(messages) < max_messages:
                batch = self.next_batch(0.0 if messages else timeout)
                if batch is None:
                    break
                self._move(batch, messages, max_messages)
        except Exception as error:
            if not messages:
                raise
            self._deferred = error  # Return what was read, and raise at the next call.
        return messages

    def next_batch(
        self, timeout: float | None = None, max_messages: int | None = None
    ) -> MessageBatch | None:
        """The next messages in columns; None at the end, or (`follow`) after `timeout` seconds."""
        timeout = check_timeout(timeout)
        if max_messages is not None:
            check_count(max_messages, name="max_messages", least=1)
        batch = self._delivery.take_rest()  # The rest of an interrupted iteration or a limited poll.
        if batch is None:
            deferred, self._deferred = self._deferred, None
            if deferred is not None:
                raise deferred
            batch = self._read(timeout)
            if batch is None:
                return None
        return batch if max_messages is None else self._limit(batch, max_messages)

    def _limit(self, batch: MessageBatch, max_messages: int) -> MessageBatch:
        """The first messages of the batch that was just read. The next read returns the rest."""
        if len(batch) > max_messages:
            self._delivery.keep(batch.slice(max_messages, len(batch)))
            batch = batch.slice(0, max_messages)
        return batch

    def seek(self, position: Place) -> None:
        """Continue at `position`, which may be earlier or later."""
        self._forget()
        with storage_errors(self.path, "seeking in a log"):
            self._go_to(position)

    def position_at(self, timestamp_ns: int) -> int:
        """The first retained position with timestamp >= `timestamp_ns`, of any topic; the end if there is
        none.
        """
        check_time(timestamp_ns, name="timestamp_ns")
        with storage_errors(self.path, "looking for a time"):
            found = search_time(self._disk, self.path, self.identity, timestamp_ns)
        if found.damage is not None:
            raise found.damage
        return found.position

    def close(self) -> None:
        """Stop, from any thread: another thread's wait and iteration end. Closing twice is allowed."""
        self._closed = True
        if (rest := self._delivery.take_rest()) is not None:
            self._drop(rest)
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
        """The messages of the batch that `next_batch` just returned; `position` follows each of them."""
        return self._delivery.start(batch)

    def _move(self, batch: MessageBatch, messages: list[Message], max_messages: int) -> None:
        """Move messages of `batch` to `messages`, until it has `max_messages`. The next read returns the
        rest, also messages for which there is no memory.
        """
        before = len(messages)
        try:
            messages.extend(batch.slice(0, max_messages - before).messages())
        finally:
            moved = len(messages) - before
            if moved < len(batch):
                self._delivery.keep(batch.slice(moved, len(batch)))

    def _drop(self, rest: MessageBatch) -> None:
        """Set the position back to the start of `rest`, the messages that were read last: they will not be
        delivered.
        """
        self._walk.position = int(rest.positions[0])

    def _forget(self) -> None:
        if (rest := self._delivery.take_rest()) is not None:
            self._drop(rest)
        self._deferred = None
        self._groups.clear()
        self._walk.leave()

    # Reading

    def _go_to(self, place: Place, epoch: int | None = None) -> None:
        place = check_place(place)
        self._walk.go_to(place, may_be_ahead=self._may_be_ahead, epoch=epoch)
        self._start_ns = place.timestamp_ns if isinstance(place, StartTime) else None

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
                if (selected := self._decode_next()) is not None:
                    return selected
            if self._advance():
                continue
            self.passed = self._walk.position
            left = deadline - time.monotonic()
            if self._watch is None or left <= 0:
                return None
            self._watch.wait(min(left, LOOK_AGAIN_SECONDS))
        return None

    def _advance(self) -> bool:
        """Read on. False if there is nothing more for now."""
        return self._walk.advance(self._queue_scanned)

    def _select(self, batch: MessageBatch) -> MessageBatch | None:
        """The part of `batch` that is at or after the position and of the selected topics. Moves the
        position.
        """
        end = batch.end
        position = self._walk.position
        if batch.positions[0] < position:
            batch = batch.slice(int(np.searchsorted(batch.positions, position)), len(batch))
        if self._start_ns is not None:
            batch = self._from_start_time(batch, self._start_ns)
        self._walk.position = max(end, position)
        if not len(batch):
            return None
        return batch if self._topics is None else batch.with_topics(self._topics)

    def _from_start_time(self, batch: MessageBatch, start_ns: int) -> MessageBatch:
        """The part of `batch` from the first message of that time on. Moves the position there."""
        at = np.flatnonzero(batch.timestamps_ns >= start_ns)
        if not len(at):
            return batch.slice(0, 0)
        self._walk.position = int(batch.positions[at[0]])
        self._start_ns = None
        return batch.slice(int(at[0]), len(batch))

    def _queue_scanned(self, data: bytes, scan: ScanResult) -> None:
        position = self._walk.position
        selected = [b for b in scan.batches if b.first_position + b.header.message_count > position]
        self._buffer = np.frombuffer(data, np.uint8)
        self._groups.extend(groups(selected))

    def _decode_next(self) -> MessageBatch | None:
        """Decode the next group; None if no message of it is selected.

        The group leaves the queue after it was decoded, so an interrupted call loses nothing. A bad batch is
        decoded alone, so that it is reported and its neighbours are returned.
        """
        group = self._groups[0]
        try:
            batch = decode(self._buffer, group, self._walk.names)
        except BadBatch as reason:
            self._groups.popleft()
            if len(group) > 1:
                self._groups.extendleft([placed] for placed in reversed(group))
                return None
            self._emit_bad_message(group[0], str(reason))
            return None
        selected = None if batch is None else self._select(batch)
        self._groups.popleft()
        return selected

    def _emit_bad_message(self, placed: PlacedBatch, reason: str) -> None:
        start = placed.first_position + placed.skip
        end = placed.first_position + placed.header.message_count
        self._walk.position = max(self._walk.position, end)
        self._events.emit(BadMessage(start, end, self._walk.segment_path, placed.offset, reason))

    def make_durable(self) -> None:
        """Sync what was read: after a power cut a stored position must not be after the log end."""
        self._walk.sync()

    def _release(self) -> None:
        self._walk.leave()
        if self._watch is not None:
            watch, self._watch = self._watch, None
            watch.close()
