"""Publish: append messages to a session's log files on the local disk.

Invariants:
- A number that was returned is never given to another message of the same run.
- A crash may lose messages that no flush has covered. The next run then reuses their numbers; readers
  distinguish the runs by `message.run`.
- When `flush` returns, everything published before is on the medium.
- A rejected message takes no number. On a full disk the call raises `rt.DiskFull`, and works again when there
  is space; messages accepted before stay, in the file or in memory.
- After a failed fsync or an interrupted write that cannot be resolved, the publisher must be opened again.
"""

from __future__ import annotations

import logging
import operator
import os
import socket
import threading
from collections.abc import Iterable, Sequence
from queue import SimpleQueue
from time import time_ns
from types import TracebackType
from typing import TYPE_CHECKING, Literal, Self

import numpy as np

from rt.client.background import BackgroundTasks, LingerDuty
from rt.client.fork_safety import open_publishers
from rt.client.local_retention import LocalRetention
from rt.client.publisher_settings import FsyncPolicy, PublisherSettings
from rt.client.session_log import SessionLog
from rt.client.wait_handle import WaitHandle, WaitLevel
from rt.errors import Closed, DiskFull, RtError, StorageFailed
from rt.log.disk import REAL, Disk
from rt.log.format.batch import BatchDraft, Int64s
from rt.log.format.constants import NUMBER_MAX
from rt.log.format.segment import LogKind
from rt.log.format.segment_table import LogIdentity
from rt.log.scan.directory import session_directory
from rt.log.write.batcher import (
    MESSAGE_COST_BYTES,
    TOGETHER_BYTES,
    BulkMessages,
    PendingBatch,
    as_bytes,
    check_size,
    check_topic,
    checked_stamp,
    checked_stamps,
)
from rt.names import check_name, check_session_name, name_from_host
from rt.sidecar.progress_file import PublisherProgress

if TYPE_CHECKING:
    from rt.net.tls import TLS

logger = logging.getLogger("rt.client.publisher")


class Publisher:
    """One session of a stream: a directory on the local disk that only this object appends to.

    The session is named `publisher_id` (default: this host's name) and is stored in
    `<path>/<stream>/sessions/<session>`. Each opening starts a new run with the next message number.
    Publishers that send the same messages under the same numbers share a `dedup_id`.

    Messages are collected into batches of up to `batch_bytes`. A batch is written when it is full or
    `linger_ms` old. Segments roll at `roll_bytes`. `fsync` says when written batches are synced besides
    `flush`: after each ("batch"), at least every 100 ms ("interval"), or when a segment is sealed ("never").
    `compression` is None or "zstd".

    With `endpoints` ("host:port" of each node) and `tls`, a separate process, shared by publishers, pushes
    the session to the nodes. It continues after this process has ended, until all is pushed. A sealed segment
    is deleted `local_persistence` seconds after it was sealed, if all its messages are merged. Without
    endpoints all segments stay.

    Thread-safe. Not usable in a forked child: open a new one there.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        stream: str,
        *,
        publisher_id: str | None = None,
        dedup_id: str | None = None,
        endpoints: Sequence[str] = (),
        tls: TLS | None = None,
        batch_bytes: int = 256 * 1024,
        linger_ms: float = 1.0,
        roll_bytes: int = 128 * 2**20,
        fsync: FsyncPolicy = "interval",
        compression: Literal["zstd"] | None = None,
        local_persistence: float = 0.0,
        disk: Disk = REAL,
    ) -> None:
        self.stream = check_name(stream, kind="stream")
        self.session = check_session_name(
            name_from_host(socket.gethostname()) if publisher_id is None else publisher_id
        )
        settings = PublisherSettings(
            batch_bytes, linger_ms, roll_bytes, fsync, compression, local_persistence
        )
        if isinstance(endpoints, str):
            raise ValueError(f"endpoints={endpoints!r}: expected a sequence of 'host:port'")  # noqa: TRY004
        if endpoints and tls is None:
            raise ValueError("endpoints without tls: nodes require a client certificate. Set tls.")
        self.directory = os.path.abspath(session_directory(path, self.stream, self.session))
        self._settings = settings
        self._batch_bytes = batch_bytes

        self._lock = threading.Lock()
        """Guards the fields below, and the log."""
        self._wake: SimpleQueue[None] = SimpleQueue()
        """Wakes the background thread. Unlike an Event, an interrupt inside `put` cannot leave it locked."""
        self._pending_error: RtError | None = None
        """Why the next call cannot continue: disk full, failed, closed, or an interrupted write."""
        self._last_ns = 0
        self._replication: WaitHandle | None = None
        self._log = SessionLog.open(
            self.directory,
            LogIdentity(LogKind.SESSION, os.urandom(16), self.session, dedup_id),
            settings,
            lock=self._lock,
            wake=lambda: self._wake.put(None),
            is_pushed=bool(endpoints),
            disk=disk,
        )
        self._batch = PendingBatch(self._log.end)
        trimming = LocalRetention(
            lambda: self._log.writer.table.segments,
            settings.persistence_ns,
            self._log.trim_merged,
            lambda: self._wake.put(None),
        )
        lingering = LingerDuty(linger_ms / 1000, lambda: self._batch, self._write_lingering, self.session)
        self._duties = BackgroundTasks(
            f"rt-publisher-{self.session}",
            [lingering.run, self._log.sync_if_due, trimming.run],
            wake=self._wake,
            is_idle=lambda: isinstance(self._pending_error, Closed | StorageFailed),
            on_failed=self._on_duty_failed,
        )
        try:
            if endpoints and tls is not None:
                self._replication = WaitHandle(
                    self.directory,
                    self.stream,
                    endpoints,
                    tls,
                    incarnation=self._log.writer.identity.origin,
                    on_progress=trimming.on_progress,
                )
            self._duties.start()
        except BaseException:
            self._log.close()
            if self._replication is not None:
                self._replication.leave()
            raise
        open_publishers.add(self)

    @property
    def next_number(self) -> int:
        """The number of the next message."""
        return self._batch.end

    def publish(
        self, value: bytes, topic: str = "", timestamp_ns: int | None = None, number: int | None = None
    ) -> int:
        """Append one message and return its number.

        `timestamp_ns` (default: now, never below the last default) is in ns since the Unix epoch. `number`
        must be `next_number`; the first message of a dedup session may set it. Durable after `flush`. Raises
        `rt.MessageTooLarge`, `rt.TopicTooLong`, `rt.DiskFull`, `rt.StorageFailed` or `rt.Closed`; then the
        message was not accepted.
        """
        if type(value) is not bytes:
            value = as_bytes(value)
        if timestamp_ns is not None:
            timestamp_ns = checked_stamp(timestamp_ns)
        if number is not None:
            number = operator.index(number)
        size = len(value) + MESSAGE_COST_BYTES
        with self._lock:
            if self._pending_error is not None or number is not None:
                self._resolve_pending_error(number)
            batch = self._batch
            index = batch.topics.get(topic)
            if index is None or batch.bytes + size > self._batch_bytes:
                check_size(len(value))
                batch, index = self._make_room(topic, size)
            if timestamp_ns is None:
                timestamp_ns = time_ns()
                if timestamp_ns < self._last_ns:
                    timestamp_ns = self._last_ns
                else:
                    self._last_ns = timestamp_ns
            values = batch.values
            try:
                batch.indices.append(index)
                batch.stamps.append(timestamp_ns)
                values.append(value)
            except BaseException:
                batch.realign()
                raise
            batch.bytes += size
            count = len(values)
            if count == 1:
                self._wake.put(None)
            return batch.first + count - 1

    def publish_many(
        self, values: Iterable[bytes], topic: str = "", timestamps_ns: Sequence[int] | Int64s | None = None
    ) -> range:
        """Append many messages of one topic and return the range of their numbers.

        Much faster than `publish` for each. `timestamps_ns`, if given, has one entry for each value. If it
        raises `rt.DiskFull`, the error's `accepted` are the numbers of the values that were accepted.
        """
        values = values if isinstance(values, list) else list(values)
        if not set(map(type, values)) <= {bytes}:
            values = [as_bytes(value) for value in values]
        stamps = None if timestamps_ns is None else checked_stamps(timestamps_ns, len(values))
        check_topic(topic)
        with self._lock:
            if self._pending_error is not None:
                self._resolve_pending_error(None)
            first = self._batch.end
            if stamps is None:
                self._last_ns = max(time_ns(), self._last_ns)
                stamps = np.broadcast_to(np.int64(self._last_ns), (len(values),))
            if values:
                self._add_values(BulkMessages(values, topic, stamps), first)
            return range(first, self._batch.end)

    def flush(self) -> None:
        """Return when everything published so far is written and on the medium.

        Raises `rt.DiskFull` (the messages stay in memory; flush again) or `rt.StorageFailed`.
        """
        with self._lock:
            if self._pending_error is not None:
                self._resolve_pending_error(None)
            self._write_batch()
            point = self._log.writer.sync_point()
        try:
            self._log.sync_to(point)
        except StorageFailed as error:
            self._pending_error = error
            raise

    def wait(self, number: int, level: WaitLevel = "merged", timeout: float | None = None) -> None:
        """Return when message `number` is synced by a majority of the nodes ("replicated"), or "merged".

        `timeout` is in seconds; None waits indefinitely. Raises `rt.Timeout` (the call may be repeated),
        `rt.Fenced` if a newer publisher of the name took over, `rt.DiskFull` if the message does not fit on
        the local disk, `ValueError` for a number that was never published or a publisher without endpoints.
        """
        if level not in {"replicated", "merged"}:
            raise ValueError(f"level={level!r}: use 'replicated' or 'merged'")
        if self._replication is None:
            raise ValueError("cannot wait: a publisher without endpoints does not replicate. Set endpoints.")
        with self._lock:
            if not 0 <= number < self._batch.end:
                raise ValueError(f"number {number} was never published: the next one is {self._batch.end}")
            if number >= self._batch.first and self._pending_error is not None:
                self._resolve_pending_error(None)
            run = self._log.run
        self._replication.wait(run, number, level, timeout)

    @property
    def progress(self) -> PublisherProgress:
        """The next number of this run to be written, replicated and merged."""
        with self._lock:
            first, written, run = self._log.run_first, self._batch.first, self._log.run
        levels = (self._replication.replicated, self._replication.merged) if self._replication else ()
        numbers = [max(level.number, first) if level.run == run else first for level in levels]
        return PublisherProgress(written, *(numbers or (first, first)))

    def close(self, linger: float = 30.0) -> None:
        """Flush and release the directory. On `rt.DiskFull` it stays open: free space and close again.

        With endpoints, first wait up to `linger` seconds until all is replicated. The push process continues
        to push the rest. A failed publisher is released without a flush. Closing twice is allowed.
        """
        try:
            self._finish()
            self._linger(linger)
        except DiskFull:
            raise
        except BaseException:
            self._abandon()
            raise
        self._abandon()

    def disown(self) -> None:
        """In a forked child: release everything without touching a file."""
        self._lock = threading.Lock()
        self._pending_error = Closed(
            "the publisher belongs to the parent process",
            where=self.directory,
            hint="Open one in the child, or start processes by spawn.",
        )
        self._log.disown()
        if self._replication is not None:
            self._replication.disown()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    # Accepting messages. Call the methods below with `_lock` held.

    def _finish(self) -> None:
        """Write and sync everything, and accept no more."""
        with self._lock:
            if isinstance(self._pending_error, Closed):
                return  # Closed before, or by another thread. A second release is harmless.
            if self._pending_error is not None:
                self._resolve_pending_error(None)
            self._write_batch()
            self._log.finish()
            self._pending_error = Closed("the publisher is closed", where=self.directory)

    def _linger(self, seconds: float) -> None:
        """Wait until the messages of this run are replicated. Call without `_lock`."""
        is_empty = self._batch.end == self._log.run_first
        if self._replication is not None and not self._duties.is_stopping and not is_empty and seconds > 0:
            self._replication.linger(self._log.run, self._batch.end - 1, seconds, self.session)

    def _resolve_pending_error(self, number: int | None) -> None:
        """Clear the pending error if it was resolved; else raise it."""
        if isinstance(self._pending_error, DiskFull) or self._pending_error is _WRITE_INTERRUPTED:
            self._drop_written()
            self._write_batch()
            self._pending_error = None
        elif self._pending_error is not None:
            raise self._pending_error
        if number is not None and number != self._batch.end:
            self._renumber(number)

    def _drop_written(self) -> None:
        """Drop from memory what the writer has: a call may have been interrupted just after its write."""
        self._log.writer.check_usable()
        if self._batch.first != self._log.end:
            self._batch = PendingBatch(self._log.end)

    def _renumber(self, number: int) -> None:
        """Start a dedup session at the number with which its source continues."""
        is_fresh = self._log.end == self._log.run_first and not self._batch.values
        if self._log.writer.identity.dedup_id is None or not is_fresh:
            raise ValueError(f"numbers are dense: got {number}, expected {self._batch.end}")
        if not 0 <= number < NUMBER_MAX // 2:
            raise ValueError(f"number {number} is out of range: 0 to {NUMBER_MAX // 2 - 1}")
        self._pending_error = _WRITE_INTERRUPTED
        self._log.start_run(number)
        self._batch = PendingBatch(number)
        self._pending_error = None

    def _make_room(self, topic: str, size: int) -> tuple[PendingBatch, int]:
        """Return a batch with room for messages of `topic` that cost `size`, and the topic's index in it."""
        check_topic(topic)
        if not self._batch.has_room(topic, size, self._batch_bytes):
            self._write_batch()
        return self._batch, self._batch.add_topic(topic)

    def _add_values(self, many: BulkMessages, first: int) -> None:
        """Add a few values to the batch. Write many in batches of their own, and add the rest."""
        try:
            done = 0
            if self._batch.bytes + many.cost(0) > self._batch_bytes:
                self._write_batch()
                together_bytes = min(TOGETHER_BYTES, self._settings.roll_bytes)
                while drafts := many.cut(done, batch_bytes=self._batch_bytes, together_bytes=together_bytes):
                    self._write(drafts)
                    done = self._batch.first - first
            if done < len(many.values):
                batch, index = self._make_room(many.topic, many.cost(done))
                batch.add_many(*many.rest(done), index, many.cost(done))
                self._wake.put(None)
        except DiskFull as error:
            error.accepted = range(first, self._batch.end)
            raise

    def _write_batch(self) -> None:
        """Write the pending batch. On `rt.DiskFull` it stays pending, and the next call retries."""
        if self._batch.values:
            self._write([self._batch.draft()])

    def _write(self, drafts: list[BatchDraft]) -> None:
        """Write batches with one system call and start a new one. On `rt.DiskFull`, those that fit stay.

        `_pending_error` is set until all is done. After an interruption, the next call sees it and checks
        what is in the file before it assigns a number.
        """
        self._pending_error = _WRITE_INTERRUPTED
        try:
            self._log.append(drafts, self._batch.first)
            self._batch = PendingBatch(self._log.end)
            if self._settings.fsync == "batch":
                self._log.sync()
        except (DiskFull, StorageFailed) as error:
            self._pending_error = error
            if isinstance(error, DiskFull):
                self._drop_written()
                self._log.schedule_sync()
            raise
        self._pending_error = None
        self._log.schedule_sync()

    # The background thread. Call the methods below without `_lock`.

    def _abandon(self) -> None:
        """Stop and release everything, without a flush."""
        self._duties.stop()
        if self._replication is not None:
            self._replication.leave()
        with self._lock:
            if not isinstance(self._pending_error, Closed):
                self._pending_error = Closed("the publisher is closed", where=self.directory)
            self._log.close()
        open_publishers.discard(self)

    def _on_duty_failed(self, error: Exception) -> None:
        if isinstance(error, StorageFailed):
            self._pending_error = error
            logger.error("storage_failed session=%s reason=%s", self.session, error)
            return
        logger.error("background_failed session=%s", self.session, exc_info=error)
        self._pending_error = StorageFailed(
            "the background thread failed", got=repr(error), where=self.directory
        )

    def _write_lingering(self, batch: PendingBatch) -> None:
        with self._lock:
            if batch is self._batch:
                if self._pending_error is not None:
                    self._resolve_pending_error(None)
                self._write_batch()


_WRITE_INTERRUPTED = RtError("a write was interrupted")
"""The value of `_pending_error` during a write. Never raised: the next call resolves it."""
