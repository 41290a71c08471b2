"""Publishing: append messages to a session's log files on the local disk.

Laws. A number that was returned is never given to another message. What `flush` returned for is on the
medium. A message that could not be taken takes no number: where the disk is full the call raises
`rt.DiskFull` and works again when there is space; what was taken before stays, in the file or in memory.
After a failed fsync the publisher is dead and must be opened again.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import logging
import operator
import os
import socket
import threading
import weakref
from collections.abc import Iterable, Sequence
from time import monotonic, time_ns
from types import TracebackType
from typing import Literal, Self

import numpy as np

from rt.errors import Closed, DiskFull, MessageTooLarge, RtError, StorageFailed, TopicTooLong
from rt.log.batch import CODECS, Draft, Int64s, encode_batch
from rt.log.checksum import batch_seed
from rt.log.directory import session_directory
from rt.log.disk import REAL, Disk
from rt.log.layout import BATCH_BYTES_MAX, MESSAGE_BYTES_MAX, NUMBER_MAX, TOPIC_BYTES_MAX, TOPICS_MAX, Buffer
from rt.log.segment import SEGMENT_HEADER_BYTES, Kind, SegmentId
from rt.log.table import Identity
from rt.log.writer import LogWriter, SyncPoint
from rt.names import check_name, check_session_name, name_from_host

logger = logging.getLogger("rt.publisher")

FsyncPolicy = Literal["batch", "interval", "never"]

FSYNC_INTERVAL_SECONDS = 0.1
"""With `fsync="interval"`: how long written bytes may wait for their fsync."""
_RETRY_SECONDS = 0.1
"""How often the background thread tries a batch again that found the disk full."""
_MESSAGE_COST_BYTES = 16
"""A message's share of the columns: offset 4, timestamp 8, topic index 2, and padding."""
_BATCH_COST_BYTES = 64
_WRITE_BYTES = 2**20
"""Batches of `publish_many` are written together up to this: the page cache takes large writes faster."""
_TOPIC_COST_BYTES = 8

_open_publishers: weakref.WeakSet[Publisher] = weakref.WeakSet()


class Publisher:
    """One session of a stream: a directory on the local disk, appended to by this object alone.

    The session is called `publisher_id` (default: this host's name) and lives in
    `<path>/<stream>/sessions/<session>`. Opening it again goes on in a new session number X with the next
    message number. Publishers that send the same messages under the same numbers share a `dedup_id`.

    Messages are gathered into batches of up to `batch_bytes`; a batch is written when it is full or
    `linger_ms` old. Segments roll at `roll_bytes`. `fsync` says when written batches are synced beside
    `flush`: after each ("batch"), at least every 100 ms ("interval"), or when a segment is sealed ("never").
    `compression` is None or "zstd".

    Thread-safe. Not usable in a forked child: open one there.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        stream: str,
        *,
        publisher_id: str | None = None,
        dedup_id: str | None = None,
        batch_bytes: int = 256 * 1024,
        linger_ms: float = 1.0,
        roll_bytes: int = 128 * 2**20,
        fsync: FsyncPolicy = "interval",
        compression: Literal["zstd"] | None = None,
        disk: Disk = REAL,
    ) -> None:
        self.stream = check_name(stream, kind="stream")
        self.session = check_session_name(
            name_from_host(socket.gethostname()) if publisher_id is None else publisher_id
        )
        _check_range("batch_bytes", batch_bytes, 4096, BATCH_BYTES_MAX)
        _check_range("linger_ms", linger_ms, 0, 60_000)
        _check_range("roll_bytes", roll_bytes, 4096, 2**40)
        if fsync not in {"batch", "interval", "never"}:
            raise ValueError(f"fsync={fsync!r}: use 'batch', 'interval' or 'never'")
        if compression not in CODECS:
            raise ValueError(f"compression={compression!r}: use None or 'zstd'")
        self.directory = session_directory(path, self.stream, self.session)
        self._batch_bytes = batch_bytes
        self._linger_seconds = linger_ms / 1000
        self._roll_bytes = roll_bytes
        self._fsync = fsync
        self._codec = CODECS[compression]

        self._lock = threading.Lock()
        """Guards everything below, and every call of the writer but `sync_to`."""
        self._syncing = threading.Lock()
        """Held while a sync runs or a segment is sealed. May be taken inside `_lock`, never around it."""
        self._wake = threading.Event()
        self._attention: RtError | None = None
        """Why the next call cannot simply go on: disk full, dead or closed."""
        self._closing = threading.Event()
        self._last_ns = 0
        self._batch_count = 0
        self._unsynced_since = 0.0
        """When the first batch that no sync covers yet was written; 0 if there is none."""
        self._synced: SyncPoint | None = None
        self._is_fresh = True
        self._start_batch()

        identity = Identity(Kind.SESSION, os.urandom(16), self.session, dedup_id)
        self._writer = LogWriter.open(self.directory, identity, disk=disk)
        try:
            self._next = self._writer.end
            self._begin(self._next)
        except BaseException:
            self._writer.close()
            raise
        self._thread = threading.Thread(target=self._run, name=f"rt-publisher-{self.session}", daemon=True)
        self._thread.start()
        _open_publishers.add(self)

    @property
    def next_number(self) -> int:
        """The number the next message will get."""
        return self._next

    def publish(
        self, value: bytes, topic: str = "", timestamp_ns: int | None = None, number: int | None = None
    ) -> int:
        """Take one message; its number.

        `timestamp_ns` (default: now, never below the one before) is in ns since the Unix epoch. `number`
        must be `next_number`; the first message of a dedup session may set it. Durable after `flush`.
        `rt.MessageTooLarge`, `rt.TopicTooLong`, `rt.DiskFull`, `rt.StorageFailed`, `rt.Closed`: nothing was
        taken.
        """
        if type(value) is not bytes:
            value = _as_bytes(value)
        if timestamp_ns is not None:
            timestamp_ns = _checked_stamp(timestamp_ns)
        size = len(value) + _MESSAGE_COST_BYTES
        with self._lock:
            if self._attention is not None or number is not None:
                self._attend(number)
            index = self._topics.get(topic)
            if index is None or self._bytes + size > self._batch_bytes:
                index = self._make_room(topic, size)
            if timestamp_ns is None:
                timestamp_ns = time_ns()
                if timestamp_ns < self._last_ns:
                    timestamp_ns = self._last_ns
                else:
                    self._last_ns = timestamp_ns
            self._timestamps.append(timestamp_ns)
            self._topic_indices.append(index)
            self._values.append(value)
            self._bytes += size
            number = self._next
            self._next = number + 1
            if len(self._values) == 1:
                self._wake.set()
        return number

    def publish_many(
        self, values: Iterable[bytes], topic: str = "", timestamps_ns: Sequence[int] | Int64s | None = None
    ) -> range:
        """Take many messages of one topic; the range of their numbers.

        Much faster than `publish` for each. `timestamps_ns`, if given, has one entry for each value. On
        `rt.DiskFull` its `accepted` says how many of the first values were taken.
        """
        values = values if isinstance(values, list) else list(values)
        if not set(map(type, values)) <= {bytes}:
            values = [_as_bytes(value) for value in values]
        offsets = _offsets(values)
        stamps = None if timestamps_ns is None else _checked_stamps(timestamps_ns, len(values))
        _check_topic(topic)
        with self._lock:
            if self._attention is not None:
                self._attend(None)
            first = self._next
            if values:
                self._take(values, offsets, topic, self._now_for(len(values)) if stamps is None else stamps)
            return range(first, self._next)

    def flush(self) -> None:
        """Return when everything published so far is written and on the medium.

        `rt.DiskFull` if it does not fit (it stays in memory; flush again), `rt.StorageFailed`.
        """
        with self._lock:
            if self._attention is not None:
                self._attend(None)
            self._write_batch()
            point = self._writer.sync_point()
        self._sync(point)

    def close(self) -> None:
        """Flush and release the directory. On `rt.DiskFull` the publisher stays open: make room, close again.

        A dead publisher is released without a flush. Closing twice is allowed.
        """
        if isinstance(self._attention, Closed):
            return
        if not isinstance(self._attention, StorageFailed):
            with contextlib.suppress(StorageFailed):
                self.flush()
        dead = self._attention
        self._abandon()
        if isinstance(dead, StorageFailed):
            raise dead

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    # Taking messages; all below is called with `_lock` held.

    def _attend(self, number: int | None) -> None:
        """Find out whether the call can go on after all; raises if not."""
        if isinstance(self._attention, DiskFull):
            self._write_batch()
            self._attention = None
        elif self._attention is not None:
            raise self._attention
        if number is not None and number != self._next:
            self._renumber(number)

    def _renumber(self, number: int) -> None:
        """Begin a dedup session at the number that its source goes on with."""
        if self._writer.identity.dedup_id is None or not self._is_fresh or self._values:
            raise ValueError(f"number {number} where {self._next} must follow: numbers are dense")
        if not 0 <= number < NUMBER_MAX:
            raise ValueError(f"number {number} is out of range")
        self._begin(number)
        self._next = number

    def _begin(self, first: int) -> None:
        last = self._writer.last_id
        x = 0 if last is None else last.x + 1
        with self._syncing:
            self._writer.start(SegmentId(x, 0), first=first, life=os.urandom(8))

    def _make_room(self, topic: str, size: int) -> int:
        """The topic's index in a batch that has room for it and for a message of `size`."""
        if size > MESSAGE_BYTES_MAX + _MESSAGE_COST_BYTES:
            raise _too_large(size - _MESSAGE_COST_BYTES)
        cost = 0 if topic in self._topics else _check_topic(topic) + _TOPIC_COST_BYTES
        if self._values and (
            self._bytes + size + cost > self._batch_bytes or len(self._topics) == TOPICS_MAX
        ):
            self._write_batch()
            cost = len(topic.encode()) + _TOPIC_COST_BYTES
        index = self._topics.setdefault(topic, len(self._topics))
        self._bytes += cost
        return index

    def _take(self, values: list[bytes], offsets: Int64s, topic: str, stamps: Int64s) -> None:
        """Gather a few values into the batch; lay out many in batches of their own, and gather the rest."""
        count = len(values)
        costs = offsets + np.arange(0, _MESSAGE_COST_BYTES * (count + 1), _MESSAGE_COST_BYTES)
        room = self._batch_bytes - _BATCH_COST_BYTES - _TOPIC_COST_BYTES - TOPIC_BYTES_MAX
        done = 0
        try:
            if self._bytes + int(costs[-1]) > self._batch_bytes:
                self._write_batch()
                while int(costs[-1] - costs[done]) > room:
                    stops = _cut(costs, done, room, min(_WRITE_BYTES, self._roll_bytes))
                    places = itertools.pairwise([done, *stops])
                    drafts = [_draft(values, offsets, topic, stamps, *place) for place in places]
                    self._write(drafts, self._next)
                    self._next += stops[-1] - done
                    done = stops[-1]
            if done < count:
                self._gather(values[done:], topic, stamps[done:], int(costs[-1] - costs[done]))
        except DiskFull as error:
            error.accepted = range(self._next - done, self._next)
            raise

    def _gather(self, values: list[bytes], topic: str, stamps: Int64s, size: int) -> None:
        index = self._make_room(topic, size)
        if not self._values:
            self._wake.set()
        self._values += values
        self._timestamps += stamps.tolist()
        self._topic_indices += [index] * len(values)
        self._bytes += size
        self._next += len(values)

    def _write_batch(self) -> None:
        """Write what is gathered. On `rt.DiskFull` it stays gathered, and the next call tries again."""
        if not self._values:
            return
        draft = Draft(
            b"".join(self._values),
            _offsets(self._values).astype(np.int32),
            np.array(self._timestamps, np.int64),
            min(self._timestamps),
            max(self._timestamps),
            [topic.encode() for topic in self._topics],
            np.array(self._topic_indices, np.uint16) if len(self._topics) > 1 else None,
        )
        self._write([draft], self._next - len(self._values))
        self._start_batch()

    def _write(self, drafts: list[Draft], first: int) -> None:
        """Write batches with one system call; on `rt.DiskFull` none of them is left in the file."""
        try:
            self._roll_before(sum(len(draft.values) for draft in drafts))
            self._writer.append(
                self._encode(drafts, first),
                end=first + sum(draft.message_count for draft in drafts),
                timestamp_low_ns=min(draft.timestamp_low_ns for draft in drafts),
                timestamp_high_ns=max(draft.timestamp_high_ns for draft in drafts),
            )
            if self._fsync == "batch":
                with self._syncing:
                    self._writer.sync()
        except (DiskFull, StorageFailed) as error:
            self._attention = error
            raise
        self._is_fresh = False
        self._attention = None
        if not self._unsynced_since:
            self._unsynced_since = monotonic()
            self._wake.set()

    def _roll_before(self, size: int) -> None:
        offset = self._writer.offset
        if offset > SEGMENT_HEADER_BYTES and offset + size > self._roll_bytes:
            with self._syncing:
                self._writer.roll()

    def _encode(self, drafts: list[Draft], first: int) -> list[Buffer]:
        header, offset = self._writer.active, self._writer.offset
        assert header is not None
        seed = header.seed
        whole: list[Buffer] = []
        for draft in drafts:
            pieces = encode_batch(draft, first=first, seed=batch_seed(seed, offset), codec=self._codec)
            offset += sum(map(len, pieces))
            first += draft.message_count
            whole += pieces
        return whole

    def _start_batch(self) -> None:
        self._values: list[bytes] = []
        self._timestamps: list[int] = []
        self._topic_indices: list[int] = []
        self._topics: dict[str, int] = {}
        self._bytes = _BATCH_COST_BYTES
        self._batch_count += 1

    def _now_for(self, count: int) -> Int64s:
        now_ns = max(time_ns(), self._last_ns)
        self._last_ns = now_ns
        return np.broadcast_to(np.int64(now_ns), (count,))

    # The background thread, and syncing; called without `_lock`.

    def _abandon(self) -> None:
        """Stop and release everything, without a flush."""
        self._closing.set()
        self._wake.set()
        self._thread.join()
        with self._lock, self._syncing:
            self._attention = Closed("the publisher is closed", where=self.directory)
            self._writer.close()
        _open_publishers.discard(self)

    def _run(self) -> None:
        """Write batches that are `linger_ms` old, sync what the policy asks for, try a full disk again."""
        wait: float | None = None
        while not self._closing.is_set():
            self._wake.wait(wait)
            self._wake.clear()
            if self._attention is not None and not isinstance(self._attention, DiskFull):
                wait = None
                continue
            try:
                self._write_when_old()
                wait = self._sync_when_due()
            except DiskFull as error:
                logger.warning("disk_full session=%s path=%s", self.session, error.where)
                wait = _RETRY_SECONDS
            except StorageFailed as error:
                logger.error("storage_failed session=%s reason=%s", self.session, error)

    def _write_when_old(self) -> None:
        seen = self._batch_count
        if not self._values:
            return
        if self._closing.wait(self._linger_seconds):
            return
        with self._lock:
            if seen == self._batch_count:
                self._write_batch()
            elif self._values:
                self._wake.set()

    def _sync_when_due(self) -> float | None:
        """Sync if the interval is over; the seconds until it is, None if there is nothing to sync."""
        if self._fsync != "interval" or not self._unsynced_since:
            return None
        left = self._unsynced_since + FSYNC_INTERVAL_SECONDS - monotonic()
        if left > 0:
            return left
        with self._lock:
            self._unsynced_since = 0.0
            point = self._writer.sync_point()
        self._sync(point)
        return None

    def _sync(self, point: SyncPoint) -> None:
        """Sync up to `point`, unless another sync has covered it; callers that wait share one sync."""
        with self._syncing:
            header = self._writer.active
            if header is None or header.id > point.id:
                return
            covered = self._synced
            if covered is not None and (covered.id, covered.offset) >= (point.id, point.offset):
                return
            try:
                self._writer.sync_to(point)
            except StorageFailed as error:
                self._attention = error
                raise
            self._synced = point


def _as_bytes(value: object) -> bytes:
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    raise TypeError(f"a message's value must be bytes, not {type(value).__name__}: encode it first")


def _offsets(values: list[bytes]) -> Int64s:
    """Where each value starts and the last one ends, once they are joined."""
    offsets = np.zeros(len(values) + 1, np.int64)
    lengths = np.fromiter(map(len, values), np.int64, len(values))
    np.cumsum(lengths, out=offsets[1:])
    if values and lengths.max() > MESSAGE_BYTES_MAX:
        raise _too_large(int(lengths.max()))
    return offsets


def _cut(costs: Int64s, start: int, room: int, most: int) -> list[int]:
    """Where batches of up to `room` end, from message `start` on, until they come to `most` bytes."""
    stops = [start]
    while costs[stops[-1]] - costs[start] < most and costs[-1] - costs[stops[-1]] > room:
        stop = int(costs.searchsorted(costs[stops[-1]] + room, "right")) - 1
        stops.append(max(stop, stops[-1] + 1))
    return stops[1:]


def _draft(values: list[bytes], offsets: Int64s, topic: str, stamps: Int64s, start: int, stop: int) -> Draft:
    """Messages `start` up to `stop` of one topic."""
    own = stamps[start:stop]
    is_one_time = own.strides == (0,)
    return Draft(
        b"".join(values[start:stop]),
        (offsets[start : stop + 1] - offsets[start]).astype(np.int32),
        own,
        int(own[0] if is_one_time else own.min()),
        int(own[0] if is_one_time else own.max()),
        [topic.encode()],
    )


def _check_topic(topic: str) -> int:
    """The bytes of a topic's UTF-8."""
    if not isinstance(topic, str):
        raise TypeError(f"a topic must be str, not {type(topic).__name__}")
    size = len(topic.encode())
    if size > TOPIC_BYTES_MAX:
        raise TopicTooLong(
            "topic too long", got=f"{size} bytes of UTF-8", wanted=f"at most {TOPIC_BYTES_MAX}"
        )
    return size


def _too_large(size: int) -> MessageTooLarge:
    return MessageTooLarge(
        "message too large",
        got=f"{size} bytes",
        wanted=f"at most {MESSAGE_BYTES_MAX}",
        hint="Split the value.",
    )


def _checked_stamp(timestamp_ns: int) -> int:
    stamp = operator.index(timestamp_ns)
    if not -(2**63) <= stamp < 2**63:
        raise ValueError(f"timestamp_ns={stamp} is outside int64: it counts nanoseconds since 1970")
    return stamp


def _checked_stamps(timestamps_ns: Sequence[int] | Int64s, count: int) -> Int64s:
    stamps = np.ascontiguousarray(timestamps_ns)
    if len(stamps) != count:
        raise ValueError(f"{len(stamps)} timestamps for {count} values")
    if count and stamps.dtype.kind not in "iu":
        raise TypeError(f"timestamps_ns must be whole nanoseconds, not {stamps.dtype}")
    if stamps.dtype == np.uint64 and count and stamps.max() >= 2**63:
        raise ValueError("timestamps_ns is outside int64: it counts nanoseconds since 1970")
    return stamps.astype(np.int64)


def _check_range(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise ValueError(f"{name}={value} is out of range: use {low} to {high}")


def _close_all() -> None:
    """At exit: flush what is still open, as far as that is possible."""
    for publisher in list(_open_publishers):
        try:
            publisher.close()
        except RtError as error:
            logger.error("close_at_exit_failed session=%s reason=%s", publisher.session, error)


def _disown_all() -> None:
    """In a forked child: the files belong to the parent, two writers would destroy them."""
    for publisher in list(_open_publishers):
        publisher._lock = threading.Lock()
        publisher._attention = Closed(
            "the publisher belongs to the parent process",
            where=publisher.directory,
            hint="Open one in the child, or start processes by spawn.",
        )
    _open_publishers.clear()


atexit.register(_close_all)
os.register_at_fork(after_in_child=_disown_all)
