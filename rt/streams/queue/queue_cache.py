"""The events of a queue that not every consumer has yet: bounded, with a cursor for each consumer.

    oldest bucket                                newest bucket        not read yet
    [ A B A ][ B C A ][ C C A B ] ... [ A B ]  ^ end
      ^ a cursor points to the next event that its consumer needs, and pins that bucket;
        the cursor of a consumer that has everything is at the end, and pins nothing

Invariants:
- The cache evicts nothing at or after a cursor. When it is full, nothing more is read.
- It holds at most `events_max` events, if no read brings more than `room`, and at most `bytes_max` bytes plus
  one read.
- Whole buckets are evicted, the oldest first.
- Events stay for a while after every consumer has them, for consumers that return.
- It is used by one task at a time, reads no clock and never waits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any, Final

from rt.errors import InvalidOption
from rt.streams.core.event_batch import EventBatch, join
from rt.streams.core.stream_id import SequenceToken, StreamId

BUCKETS: Final = 10
"""The cache has about this many buckets. A cursor in the oldest one belongs to a slow consumer."""
KEPT_BUCKETS: Final = BUCKETS // 2
"""This many buckets stay although no consumer needs them any more."""


class _Bucket:
    """The batches of one or more reads, and the cursors that point into it."""

    __slots__ = ("bytes", "entries", "events", "pins")

    def __init__(self) -> None:
        self.events = 0
        self.bytes = 0
        self.entries: list[_Entry] = []
        self.pins: dict[CacheCursor, None] = {}


class _Entry:
    """A batch in the list of its stream. `size`, `first` and `end` of the batch are computed once.

    `first` and `end` are plain tuples: unlike tokens they cost the garbage collector nothing.
    """

    __slots__ = ("batch", "bucket", "end", "first", "line", "next", "size")

    def __init__(self, batch: EventBatch, bucket: _Bucket, line: _Line) -> None:
        self.batch = batch
        self.bucket = bucket
        self.line = line
        self.next: _Entry | None = None
        self.size = len(batch.events)
        numbers, indexes = batch.sequence_numbers, batch.event_indexes
        self.first = (int(numbers[0]), 0 if indexes is None else int(indexes[0]))
        self.end = (int(numbers[-1]), 1 if indexes is None else int(indexes[-1]) + 1)


class _Line:
    """One stream: its batches, oldest first, and its cursors."""

    __slots__ = ("cursors", "first", "known_from", "last", "short", "stream", "waiting")

    def __init__(self, stream: StreamId, known_from: SequenceToken) -> None:
        self.stream = stream
        self.known_from = known_from
        """Every event of the stream from this token on is in the cache, or not read yet."""
        self.first: _Entry | None = None
        self.last: _Entry | None = None
        self.cursors = 0
        self.waiting: dict[CacheCursor, None] = {}
        """The cursors at the end."""
        self.short: dict[CacheCursor, int] | None = None
        """The number of further events that each of these cursors waits for, before the event that it points
        to is taken.
        """

    def shorten(self, events: int) -> list[CacheCursor]:
        """Record that `events` more events have arrived. Return the cursors that have enough events and no
        longer wait.
        """
        if self.short is None:
            return []
        left = {cursor: count - events for cursor, count in self.short.items()}
        self.short = {cursor: count for cursor, count in left.items() if count > 0} or None
        return [cursor for cursor, count in left.items() if count <= 0]


class CacheCursor:
    """A consumer's position in its stream. `wanted` is the first token that it needs.

    It is *parked* until it is first placed, and after it left the cache. A parked cursor pins nothing and
    gets no events.
    """

    __slots__ = ("_cache", "_entry", "_line", "_offset", "is_closed", "owner", "wanted")

    def __init__(self, cache: QueueCache, line: _Line, owner: Any) -> None:
        self._cache = cache
        self._line = line
        self._entry: _Entry | None = None
        self._offset = 0
        self.owner = owner
        self.is_closed = False
        self.wanted = line.known_from

    @property
    def is_parked(self) -> bool:
        return self._entry is None and self not in self._line.waiting

    @property
    def has_more(self) -> bool:
        """Whether the cache has an event for it."""
        return self._entry is not None

    def place(self, wanted: SequenceToken) -> None:
        """Point to the first event at or after `wanted`, or wait for it. The cache must cover `wanted`."""
        assert self._cache.covers(self._line.stream, wanted), (wanted, self._line.known_from)
        self.park()
        self.wanted = wanted
        entry = self._line.first
        while entry is not None:
            if wanted < entry.end:
                self._stand(entry, entry.batch.place_of(wanted))
                return
            entry = entry.next
        self._line.waiting[self] = None

    def take(self, events_max: int) -> EventBatch | None:
        """The next events, one to `events_max`; None if there are none now. Does not advance."""
        entry = self._entry
        if entry is None:
            return None
        following = entry.next
        if not self._offset and entry.size <= events_max and following is None:
            return entry.batch
        taken = [entry.batch.slice(self._offset, self._offset + events_max)]
        left = events_max - len(taken[0])
        while following is not None and following.size <= left:
            taken.append(following.batch)
            left -= following.size
            following = following.next
        return join(taken)

    def end_of(self, taken: EventBatch) -> SequenceToken:
        """The first token after a batch that `take` returned."""
        entry = self._entry
        return SequenceToken(*entry.end) if entry is not None and taken is entry.batch else taken.end

    def advance(self, wanted: SequenceToken) -> None:
        """Move forward to `wanted`. A parked cursor stays parked."""
        assert wanted >= self.wanted, (wanted, self.wanted)
        self.wanted = wanted
        before, offset = self._entry, self._offset
        if before is None:
            return
        entry = before
        while wanted >= entry.end:
            if entry.next is None:
                del before.bucket.pins[self]
                self._entry = None
                self._line.waiting[self] = None
                return
            entry, offset = entry.next, 0
        self._stand(entry, max(offset, entry.batch.place_of(wanted)))

    def await_more(self, events: int) -> None:
        """Make `QueueCache.add` return this cursor, once, when its stream has `events` more events."""
        if self._line.short is None:
            self._line.short = {}
        self._line.short[self] = events

    def park(self) -> None:
        """Leave the cache and keep the position."""
        self._line.waiting.pop(self, None)
        self.await_no_more()
        if self._entry is not None:
            del self._entry.bucket.pins[self]
            self._entry = None

    def close(self) -> None:
        """May be called twice."""
        self.park()
        if not self.is_closed:
            self.is_closed = True
            self._cache.forget(self._line)

    def meet(self, entry: _Entry) -> bool:
        """Handle a batch that arrived while the cursor waited. Return whether the batch has an event for this
        cursor.
        """
        wanted = self.wanted
        if wanted >= entry.end:
            return False
        entry.bucket.pins[self] = None
        self._entry = entry
        self._offset = 0 if wanted <= entry.first else entry.batch.place_of(wanted)
        return True

    def await_no_more(self) -> None:
        if self._line.short is not None:
            self._line.short.pop(self, None)

    def _stand(self, entry: _Entry, offset: int) -> None:
        before = self._entry
        if before is None or before.bucket is not entry.bucket:
            if before is not None:
                del before.bucket.pins[self]
            entry.bucket.pins[self] = None
        self._entry, self._offset = entry, offset


class QueueCache:
    """The cache of one queue, which is read from `start` on. `InvalidOption` for bounds below ten events."""

    def __init__(
        self,
        start: SequenceToken,
        *,
        events_max: int = 65_536,
        bytes_max: int = 64 * 2**20,
    ) -> None:
        if events_max < BUCKETS or bytes_max < 1:
            raise InvalidOption(
                "the cache is too small",
                got=f"{events_max}, {bytes_max}",
                expected=f"{BUCKETS} events or more",
            )
        self.start = start
        """Every event of any stream from this token on is in the cache, or not read yet."""
        self.end = start
        """The first token that was not read yet."""
        self.events = 0
        self.bytes = 0
        self._events_max = events_max
        self._bytes_max = bytes_max
        self._bucket_events = events_max // BUCKETS
        self._bucket_bytes = max(1, bytes_max // BUCKETS)
        self._buckets: deque[_Bucket] = deque()
        self._lines: dict[StreamId, _Line] = {}

    # Reading

    @property
    def is_under_pressure(self) -> bool:
        """Whether consumers must advance before more is read."""
        return (
            len(self._buckets) >= BUCKETS
            or self.events > self._events_max - self._bucket_events
            or self.bytes >= self._bytes_max
        )

    @property
    def room(self) -> int:
        """How many events may be read now."""
        return 0 if self.is_under_pressure else self._bucket_events

    @property
    def pressure(self) -> float:
        """The share of the cache that consumers still need, 0 to 1."""
        pinned = next((at for at, bucket in enumerate(self._buckets) if bucket.pins), len(self._buckets))
        events = sum(bucket.events for bucket in list(self._buckets)[pinned:])
        size = sum(bucket.bytes for bucket in list(self._buckets)[pinned:])
        return min(1.0, max(events / self._events_max, size / self._bytes_max))

    def add(self, batches: Iterable[EventBatch], end: SequenceToken) -> list[CacheCursor]:
        """Add what one read returned, up to `end`. Returns the cursors that have new events.

        A read brings at most `room` events, unless one message carries more. Events that were read before are
        ignored.
        """
        woken: list[CacheCursor] = []
        start, self.end = self.end, max(self.end, end)
        for batch in batches:
            new: EventBatch | None = batch
            if batch.first < start:  # Some of it was read before.
                new = batch.from_token(start)
            if new is not None:
                woken += self._append(new)
        return woken

    def purge(self) -> int:
        """Evict the oldest unpinned buckets as far as room is needed. Returns the number of evicted
        events.
        """
        before = self.events
        while (
            self._buckets
            and not self._buckets[0].pins
            and (len(self._buckets) > KEPT_BUCKETS or self.is_under_pressure)
        ):
            self._drop(self._buckets.popleft())
        return before - self.events

    # Cursors

    def cursor(self, stream: StreamId, owner: Any) -> CacheCursor:
        """A new parked cursor. The cache only stores `owner`."""
        line = self._line(stream)
        line.cursors += 1
        return CacheCursor(self, line, owner)

    def covers(self, stream: StreamId, wanted: SequenceToken) -> bool:
        """Whether every event of the stream from `wanted` on is here, or not read yet."""
        return wanted >= self.oldest(stream)

    def oldest(self, stream: StreamId) -> SequenceToken:
        """The least token that the cache covers."""
        line = self._lines.get(stream)
        return self.start if line is None else line.known_from

    def low(self) -> SequenceToken:
        """Every consumer with a cursor in the cache has everything before this token."""
        pinned = [cursor.wanted for bucket in self._buckets for cursor in bucket.pins]
        return min(pinned, default=self.end)

    def slow(self) -> list[CacheCursor]:
        """The cursors in the oldest bucket, if the cache is full."""
        return list(self._buckets[0].pins) if self.is_under_pressure and self._buckets else []

    def forget(self, line: _Line) -> None:
        """Record that a cursor of the line was closed."""
        line.cursors -= 1
        self._leave(line)

    # Internals

    def _line(self, stream: StreamId) -> _Line:
        line = self._lines.get(stream)
        if line is None:
            line = self._lines[stream] = _Line(stream, self.start)
        return line

    def _append(self, batch: EventBatch) -> Iterable[CacheCursor]:
        """Add a batch to its stream. Returns the cursors that waited for it."""
        bucket = self._open_bucket()
        line = self._line(batch.stream)
        entry = _Entry(batch, bucket, line)
        bucket.entries.append(entry)
        bucket.events += entry.size
        bucket.bytes += batch.size_bytes
        self.events += entry.size
        self.bytes += batch.size_bytes
        if entry.end > self.end:
            self.end = SequenceToken(*entry.end)
        if line.last is None:
            line.first = entry
        else:
            line.last.next = entry
        line.last = entry
        if not line.waiting:
            return () if line.short is None else line.shorten(entry.size)
        met = [cursor for cursor in line.waiting if cursor.meet(entry)]
        for cursor in met:
            del line.waiting[cursor]
        return met if line.short is None else met + line.shorten(entry.size)

    def _open_bucket(self) -> _Bucket:
        """The newest bucket, or a new one if that is full."""
        newest = self._buckets[-1] if self._buckets else None
        if newest is None or newest.events >= self._bucket_events or newest.bytes >= self._bucket_bytes:
            newest = _Bucket()
            self._buckets.append(newest)
        return newest

    def _drop(self, bucket: _Bucket) -> None:
        self.events -= bucket.events
        self.bytes -= bucket.bytes
        for entry in bucket.entries:
            line, end = entry.line, SequenceToken(*entry.end)
            assert line.first is entry
            line.first = entry.next
            if entry.next is None:
                line.last = None
            line.known_from = end
            self.start = max(self.start, end)
            self._leave(line)

    def _leave(self, line: _Line) -> None:
        """Delete the line if it has neither batches nor cursors."""
        if line.first is None and not line.cursors:
            self._lines.pop(line.stream, None)
