"""Publish: append messages to a session's log files on the local disk.

Invariants:
- A number that was returned is never given to another message of the same run.
- A crash may lose messages that no flush has covered. The next run then reuses their numbers; readers
  distinguish the runs by `message.run`.
- When `flush` returns, everything published before is on the medium.
- A rejected message takes no number. On a full disk the call raises `rt.DiskFull`, and works again when there
  is space; messages accepted before stay, in the file or in memory.
- After a failed fsync, or a write whose outcome is not known, the publisher must be opened again.
- A signal handler may raise between any two lines of a call. Then the message is accepted whole, or not.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from queue import SimpleQueue
from time import time_ns
from typing import TYPE_CHECKING, Final, Literal, Self

import numpy as np

from rt.client.background import BackgroundTasks, LingerDuty
from rt.client.batch_writer import BatchWriter
from rt.client.fork_safety import open_publishers
from rt.client.local_retention import LocalRetention
from rt.client.publisher_status import PublisherMonitor, PublisherStats, PublisherStatus
from rt.client.replication_problem import ErrorHandler, ReplicationProblem
from rt.client.session_log import SessionLog
from rt.client.settings import FsyncPolicy, PublisherSettings, check_endpoints_tls
from rt.client.wait_handle import WaitHandle, WaitLevel
from rt.errors import DiskFull, InvalidOption, RtError, StorageFailed
from rt.log.disk import REAL, Disk
from rt.log.format.constants import Int64s
from rt.log.format.headers import HeadersInput, checked_headers, headers_of_each
from rt.log.format.segment import LogKind
from rt.log.format.segment_table import LogIdentity
from rt.log.scan.directory import session_directory
from rt.log.write.batcher import (
    MESSAGE_COST_BYTES,
    BulkMessages,
    as_bytes,
    as_values,
    check_size,
    check_topic,
    checked_stamp,
    checked_stamps,
)
from rt.names import check_name, check_session_name, name_from_host
from rt.option_checks import TIMEOUT_SECONDS_MAX, check_path, check_position, check_timeout
from rt.sidecar.progress_file import PublisherProgress

if TYPE_CHECKING:
    from rt.net.tls import TLS

logger = logging.getLogger("rt.client.publisher")

CLOSE_SECONDS: Final = 30.0
"""How long `close` waits by default until the nodes have everything."""
INTERRUPTED_SECONDS: Final = 2.0
"""How long the end of a `with` block waits for that after an exception, such as Ctrl-C."""


class Publisher:
    """One session of a stream: a directory on the local disk that only this object appends to.

    The session is named `publisher_id` (default: this host's name) and is stored in
    `<path>/<stream>/sessions/<session>`. Each opening starts a new run with the next message number.
    Publishers that send the same messages under the same numbers share a `dedup_id`.

    Messages are collected into batches of up to `batch_bytes`, or a 16th more for the rest of a
    `publish_many`. A batch is written when it is full or `linger_ms` old; the first after a pause, at once.
    Segments roll at `roll_bytes`. `fsync` says when batches are synced besides `flush`: after each ("batch"),
    every 100 ms ("interval"), or when a segment is sealed ("never"). `compression` is None or "zstd".

    With `endpoints` ("host:port" of each node) and `tls`, a separate process, shared by publishers, pushes
    the session to the nodes, and to those that join the cluster later. It continues after this process has
    ended, until all is pushed. A sealed segment is deleted `local_persistence` seconds after it was sealed,
    if all its messages are merged. Without endpoints all segments stay.

    Nodes that cannot be reached stop nothing: messages wait on the disk, and `status` says why. What blocks
    replication until somebody fixes it (the nodes refuse the certificate, its role or the stream, belong to
    another cluster, fenced the session, or reject its bytes) is raised, with its type and reason, by the next
    `publish`, `publish_many` or `flush`, and given to `on_error`, once for each problem. The same call may
    then be repeated: messages are accepted and stay on the disk, and are sent when the cause is fixed, for
    example when the certificate file was renewed. `wait` and `close` raise it as long as it lasts. After
    `rt.Fenced` every call raises: open the publisher again. `on_merged` is called with the next number of
    this run to be merged, when it has grown. What it raises is logged. Both are called in threads of their
    own and may call the publisher.

    `max_silence` promises a message at least this often, in seconds. If none comes for longer, as when this
    program was killed, the nodes raise the alarm `publisher-silent` until one comes, the session is opened
    again, or an operator closes it. `close`, or a `with` block without error, ends the promise.

    Thread-safe. Not usable in a forked child: open a new one there. A signal handler must not call it: it may
    have interrupted a call, and would wait for it forever. Raise `SystemExit` there to end the `with` block.
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
        max_silence: float | None = None,
        on_merged: Callable[[int], None] | None = None,
        on_error: ErrorHandler | None = None,
        disk: Disk = REAL,
    ) -> None:
        self.stream = check_name(stream, kind="stream")
        name = name_from_host(socket.gethostname()) if publisher_id is None else publisher_id
        self.session = check_session_name(name)
        settings = PublisherSettings(
            batch_bytes, linger_ms, roll_bytes, fsync, compression, local_persistence, max_silence
        )
        endpoints = check_endpoints_tls(endpoints, tls)
        self.directory = os.path.abspath(session_directory(check_path(path), self.stream, self.session))
        self._batch_bytes = batch_bytes
        self._lock = lock = threading.Lock()
        """Guards the fields below, the writer, and the log."""
        self._wake: SimpleQueue[None] = SimpleQueue()
        """Wakes the background thread. Unlike an Event, an interrupt inside `put` cannot leave it locked."""
        self._last_ns = 0  # The last timestamp taken from the clock: they never decrease.
        self._replication: WaitHandle | None = None
        self._problem = ReplicationProblem(self.directory, on_error)
        wake = partial(self._wake.put, None)
        identity = LogIdentity(LogKind.SESSION, os.urandom(16), self.session, dedup_id)
        log = self._log = SessionLog.open(
            self.directory, identity, settings, lock=lock, wake=wake, is_pushed=bool(endpoints), disk=disk
        )
        try:
            writer = self._writer = BatchWriter(log, settings, lock=lock, wake=wake)
            self._monitor = PublisherMonitor(self._log, self._writer, self._problem, lock)
            trimming = LocalRetention(
                lambda: log.writer.table.segments, settings.persistence_ns, log.trim_merged, wake
            )
            lingering = LingerDuty(linger_ms / 1000, lambda: writer.batch, writer.write_lingering, name)
            self._duties = BackgroundTasks(
                f"rt-publisher-{self.session}",
                [lingering.run, self._log.sync_if_due, trimming.run],
                wake=self._wake,
                is_idle=lambda: self._writer.has_ended,
                on_failed=self._writer.fail,
            )
        except BaseException:
            self._log.close()
            raise
        try:
            if endpoints and tls is not None:
                self._replication = self._monitor.replication = WaitHandle(
                    *(self.directory, self.stream, endpoints, tls),
                    incarnation=self._log.writer.identity.origin,
                    on_progress=trimming.on_progress,
                    problem=self._problem,
                )
                self._replication.start()
                if on_merged is not None:
                    self._replication.watch_merged(on_merged, lambda: self.progress.merged, self.session)
            self._duties.start()
            open_publishers.add(self)
        except BaseException:
            self._abandon()
            raise

    @property
    def next_number(self) -> int:
        """The number of the next message."""
        return self._writer.batch.end

    def publish(
        self,
        value: bytes,
        topic: str = "",
        timestamp_ns: int | None = None,
        number: int | None = None,
        headers: HeadersInput = (),
    ) -> int:
        """Append one message and return its number.

        `timestamp_ns` (default: now, never below the last default) is in ns since 1970. `number` must be
        `next_number`; the first message of a dedup session may set it. `headers` is a mapping, or pairs of a
        key and bytes. Durable after `flush`. Not accepted if it raises: `rt.MessageTooLarge`, `rt.DiskFull`,
        `rt.TopicTooLong`, `rt.InvalidHeader`, `rt.StorageFailed`, `rt.Closed`, or what blocks replication.
        """
        if type(value) is not bytes:
            value = as_bytes(value)
        if timestamp_ns is not None:
            timestamp_ns = checked_stamp(timestamp_ns)
        if number is not None:
            number = check_position(number)
        pairs = checked_headers(headers) if headers else ()
        size = len(value) + MESSAGE_COST_BYTES
        writer = self._writer
        with self._lock:
            if writer.pending_error is not None or number is not None or self._problem.unraised is not None:
                self._check(number)
            batch = writer.batch
            index = batch.topics.get(topic)
            if index is None or pairs or batch.bytes + size > self._batch_bytes:
                check_size(len(value), pairs)
                batch, index = writer.make_room(topic, size, pairs)
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
                batch.bytes += size
                count = len(values)
                if count == 1:
                    writer.start_lingering()
            except BaseException:
                batch.realign()
                self._wake.put(None)  # The batch may begin here: the thread must count its linger time.
                raise
            return batch.first + count - 1

    def publish_many(
        self,
        values: Iterable[bytes],
        topic: str = "",
        timestamps_ns: Sequence[int] | Int64s | None = None,
        headers: HeadersInput | Sequence[HeadersInput] = (),
    ) -> range:
        """Append many messages of one topic and return the range of their numbers.

        Much faster than `publish` for each. `timestamps_ns`, if given, has one entry for each value.
        `headers` are those of all messages, or a sequence with those of each. If it raises `rt.DiskFull`, the
        error's `accepted` are the numbers of the values that were accepted.
        """
        values = as_values(values)
        stamps = None if timestamps_ns is None else checked_stamps(timestamps_ns, len(values))
        check_topic(topic)
        pairs_of_each = headers_of_each(headers, len(values)) if headers and values else []
        for value, pairs in zip(values, pairs_of_each, strict=False):
            check_size(len(value), pairs)
        writer = self._writer
        with self._lock:
            self._check(None)
            first = writer.batch.end
            if stamps is None:
                self._last_ns = max(time_ns(), self._last_ns)
                stamps = np.broadcast_to(np.int64(self._last_ns), (len(values),))
            if pairs_of_each:
                writer.add_each(values, topic, stamps.tolist(), pairs_of_each, first)
            elif values:
                writer.add_values(BulkMessages(values, topic, stamps), first)
            return range(first, writer.batch.end)

    def flush(self) -> None:
        """Return when everything published so far is written and on the medium.

        Raises `rt.DiskFull` (the messages stay in memory; flush again) or `rt.StorageFailed`. What blocks
        replication is raised when all is on the medium.
        """
        with self._lock:
            self._writer.resolve_pending_error(None)
            self._writer.write_batch()
            point = self._log.writer.sync_point()
        try:
            self._log.sync_to(point)
        except StorageFailed as error:
            self._writer.pending_error = error
            raise
        self._problem.raise_once()

    def wait(self, number: int, level: WaitLevel = "merged", timeout: float | None = None) -> None:
        """Return when message `number` is synced by a majority of the nodes ("replicated"), or "merged".

        `timeout` is in seconds; None waits indefinitely. Raises `rt.Timeout` with the reason for each node
        that cannot be reached (the call may be repeated), what blocks replication (`rt.CertificateError`,
        `rt.ClusterMismatch`, `rt.Fenced` if a newer publisher of the name took over, …), `rt.DiskFull` if the
        message does not fit on the local disk, `rt.InvalidOption` for a number that was never published or a
        publisher without endpoints.
        """
        timeout = check_timeout(timeout)
        replication, run = self._check_wait(number, level)
        replication.wait(run, number, level, timeout)

    def _check_wait(self, number: int, level: WaitLevel) -> tuple[WaitHandle, int]:
        """The handle to wait on, and the run of `number`. Raises what `wait` raises without waiting."""
        if level not in ("replicated", "merged"):
            raise InvalidOption(f"level={level!r}: use 'replicated' or 'merged'")
        if self._replication is None:
            raise InvalidOption(
                "cannot wait: a publisher without endpoints does not replicate. Set endpoints."
            )
        with self._lock:
            self._writer.require_published(number)
            return self._replication, self._log.run

    @property
    def progress(self) -> PublisherProgress:
        """The next number of this run to be written, replicated and merged."""
        return self._monitor.progress()

    def status(self) -> PublisherStatus:
        """How replication stands: the state of each node's connection, and what is not replicated yet."""
        return self._monitor.status()

    def stats(self) -> PublisherStats:
        """What was published since the opening, how far it has come, and what waits. Never raises."""
        return self._monitor.stats()

    def close(self, timeout: float | None = CLOSE_SECONDS) -> None:
        """Flush and release the directory. On `rt.DiskFull` it stays open: free space and close again.

        With endpoints, first wait up to `timeout` seconds (None: no limit) until all is replicated. The push
        process continues to push the rest, and the log says how much that is. What blocks replication is
        raised after the release, unless all is replicated. A failed publisher is released without a flush.
        Closing twice is allowed.

        The end of a `with` block closes. If an exception ends the block, it waits at most 2 seconds, and the
        exception remains the one that is raised.
        """
        seconds = check_timeout(timeout)
        if (blocked := self._close(TIMEOUT_SECONDS_MAX if seconds is None else seconds)) is not None:
            raise blocked

    def _close_at_exit(self) -> None:
        """Close at exit, if the program did not close it. Its promise of `max_silence` remains."""
        if (blocked := self._close(0, is_in_order=False)) is not None:
            raise blocked

    def _disown(self) -> None:
        """In a forked child: release everything of the parent's publisher without touching a file."""
        self._lock = self._monitor.lock = threading.Lock()
        self._writer.disown(self._lock)
        self._problem.disown()
        self._log.disown()
        if self._replication is not None:
            self._replication.disown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        is_in_order = not isinstance(error, Exception)  # Ctrl-C and `sys.exit` end the promise too.
        if error is None:
            self.close()
        elif (blocked := self._close(INTERRUPTED_SECONDS, is_in_order=is_in_order)) is not None:
            logger.error("replication_blocked session=%s reason=%s", self.session, blocked)

    def _check(self, number: int | None) -> None:
        """Raise if no message can be accepted, or `number` cannot be the next one. Call with `_lock`."""
        self._writer.resolve_pending_error(number)
        self._problem.raise_once()

    def _close(self, timeout: float, *, is_in_order: bool = True) -> RtError | None:
        """Close. Returns what blocks the replication of the rest. `is_in_order`: `max_silence` ends."""
        try:
            self._writer.finish()
            if is_in_order:
                self._log.end_promise()
            blocked = self._wait_for_nodes(timeout)
        except DiskFull:
            raise
        except BaseException:
            self._abandon()
            raise
        self._abandon()
        return blocked

    def _wait_for_nodes(self, seconds: float) -> RtError | None:
        """Wait until the messages of this run are replicated. Returns what blocks that. Without `_lock`."""
        number = self._writer.batch.end - 1
        if self._replication is None or self._duties.is_stopping or number < self._log.run_first:
            return None
        return self._replication.linger(self._log.run, number, seconds, self.session, self.status)

    def _abandon(self) -> None:
        """Stop and release everything, without a flush."""
        self._duties.stop()
        if self._replication is not None:
            self._replication.leave()
        with self._lock:
            self._writer.close()
            self._log.close()
            self._monitor.since_ns = time_ns()
        open_publishers.discard(self)
