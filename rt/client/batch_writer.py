"""Collect a publisher's messages into batches, and write the batches to the log of its session.

Invariants:
- A message gets its number when it is added to the pending batch; a batch that could not be written stays
  pending.
- While a write runs, `pending_error` is set. So a call after an interrupted write finds it set, and first
  checks what is in the file.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from math import inf
from time import monotonic
from typing import Final

from rt.client.session_log import SessionLog
from rt.client.settings import PublisherSettings
from rt.errors import Closed, DiskFull, InvalidOption, RtError, StorageFailed, closed_in_child
from rt.log.format.batch import BatchDraft
from rt.log.format.constants import NUMBER_MAX
from rt.log.format.headers import Headers
from rt.log.write.batcher import (
    MESSAGE_COST_BYTES,
    TOGETHER_BYTES,
    BulkMessages,
    PendingBatch,
    check_topic,
)
from rt.option_checks import check_position

logger = logging.getLogger("rt.client.publisher")

PAUSE_SECONDS_MIN: Final = 0.01
PAUSE_LINGERS: Final = 10
"""After `PAUSE_LINGERS` times `linger_ms` without a write, it is not expected that more messages come soon.
Then a batch does not wait for them.
"""


class BatchWriter:
    """The pending batch of `log`, and the writes of full batches.

    The caller holds `lock` for each call, except for `write_lingering`, `finish` and `fail`. `wake` is called
    when a batch starts to linger.
    """

    def __init__(
        self,
        log: SessionLog,
        settings: PublisherSettings,
        *,
        lock: threading.Lock,
        wake: Callable[[], None],
    ) -> None:
        self.batch = PendingBatch(log.end)
        """The messages that are not written yet. `Publisher.publish` appends to it."""
        self.pending_error: RtError | None = None
        """Why the next call cannot continue: disk full, failed, closed, or an interrupted write."""
        self._log = log
        self._settings = settings
        self._batch_bytes = settings.batch_bytes
        self._lock = lock
        self._wake = wake
        self._written_s = monotonic()
        self._pause_s = max(PAUSE_SECONDS_MIN, PAUSE_LINGERS * settings.linger_ms / 1000)
        if settings.fsync == "batch":
            self._pause_s = inf  # A call that collects a message does not wait for a sync.

    @property
    def has_ended(self) -> bool:
        """Whether nothing more can be written."""
        return isinstance(self.pending_error, Closed | StorageFailed)

    def resolve_pending_error(self, number: int | None) -> None:
        """Clear the pending error if it was resolved; else raise it."""
        if isinstance(self.pending_error, DiskFull) or self.pending_error is _WRITE_INTERRUPTED:
            self._drop_written()
            self.write_batch()
            self.pending_error = None
        elif self.pending_error is not None:
            raise self.pending_error
        if number is not None and number != self.batch.end:
            self._renumber(number)

    def require_published(self, number: int) -> None:
        """Raise `rt.InvalidOption` if `number` was never published. If its message is in the pending batch,
        raise the error that prevents the write of this batch.
        """
        if not 0 <= check_position(number) < self.batch.end:
            raise InvalidOption(f"number {number} was never published: the next one is {self.batch.end}")
        if number >= self.batch.first:
            self.resolve_pending_error(None)

    def make_room(self, topic: str, size: int, headers: Headers = ()) -> tuple[PendingBatch, int]:
        """Return a batch with room for messages that cost `size`, and the index in it of topic and headers.

        Only one message may have `headers`.
        """
        check_topic(topic)
        if not self.batch.has_room(topic, size, self._batch_bytes, headers):
            self.write_batch()
        return self.batch, self.batch.add_topic(topic) | self.batch.add_headers(headers)

    def start_lingering(self) -> None:
        """Handle the first messages of the pending batch. After a pause, write them at once. Otherwise have
        them written when they have lingered.

        If the write fails, they stay pending, because they are accepted. The background thread tries again,
        and the next call raises the error that it finds.
        """
        if monotonic() - self._written_s >= self._pause_s:
            try:
                self.write_batch()
            except Exception:  # noqa: BLE001 - as in the background thread, which reports it
                self._wake()
        else:
            self._wake()

    def add_each(
        self, values: list[bytes], topic: str, stamps: list[int], headers: list[Headers], first: int
    ) -> None:
        """Add values one by one, each with its headers."""
        try:
            for value, stamp, own in zip(values, stamps, headers, strict=True):
                size = len(value) + MESSAGE_COST_BYTES
                batch, index = self.make_room(topic, size, own)
                batch.add_many([value], [stamp], index, size)
            self._wake()
        except BaseException as error:
            self._leave(error, first)
            raise

    def add_values(self, many: BulkMessages, first: int) -> None:
        """Add values to the batch. If they do not fit, fill the batch and write it together with batches of
        the next values; the rest starts another batch.
        """
        together_bytes = min(TOGETHER_BYTES, self._settings.roll_bytes)
        try:
            done = 0
            if self.batch.bytes + many.cost(0) > self._batch_bytes:
                while drafts := many.cut(
                    done, after=self.batch, batch_bytes=self._batch_bytes, together_bytes=together_bytes
                ):
                    self._write(drafts)
                    done = self.batch.first - first
            if done < len(many.values):
                batch, index = self.make_room(many.topic, many.cost(done))
                is_first = not batch.values
                batch.add_many(*many.rest(done), index, many.cost(done))
                if is_first:
                    self.start_lingering()
        except BaseException as error:
            self._leave(error, first)
            raise

    def _leave(self, error: BaseException, first: int) -> None:
        """Have the values written that a failed call has added. It added them from number `first` on, and
        ends with `error`.

        The next call does not know whether these values are the first of the batch.
        """
        if isinstance(error, DiskFull):
            error.accepted = range(first, self.batch.end)
        self._wake()

    def write_batch(self) -> None:
        """Write the pending batch. On `rt.DiskFull` it stays pending, and the next call retries."""
        if self.batch.values:
            self._write([self.batch.draft()])

    def write_lingering(self, batch: PendingBatch) -> None:
        """Write `batch` if it is still the pending one. Call without the lock."""
        with self._lock:
            if batch is self.batch:
                self.resolve_pending_error(None)
                self.write_batch()

    def finish(self) -> None:
        """Write and sync everything, and accept no more. Call without the lock."""
        with self._lock:
            if isinstance(self.pending_error, Closed):
                return  # Closed before, or by another thread. A second release is harmless.
            self.resolve_pending_error(None)
            self.write_batch()
            self._log.sync()
            self.close()

    def close(self) -> None:
        """Accept no more."""
        if not isinstance(self.pending_error, Closed):
            self.pending_error = Closed("the publisher is closed", where=self._log.writer.path)

    def fail(self, error: Exception) -> None:
        """The background thread failed: no call may continue. Call without the lock."""
        session = self._log.writer.identity.name
        if isinstance(error, StorageFailed):
            self.pending_error = error
            logger.error("storage_failed session=%s reason=%s", session, error)
            return
        logger.error("background_failed session=%s", session, exc_info=error)
        self.pending_error = StorageFailed(
            "the background thread failed", got=repr(error), where=self._log.writer.path
        )

    def disown(self, lock: threading.Lock) -> None:
        """In a forked child: accept nothing. Another thread of the parent may hold its lock."""
        self._lock = lock
        self.pending_error = closed_in_child("the publisher", where=self._log.writer.path)

    def _drop_written(self) -> None:
        """Drop from memory the messages that the writer has: a call may have been interrupted just after its
        write.
        """
        self._log.writer.check_usable()
        if self.batch.first != self._log.end:
            self.batch = PendingBatch(self._log.end)

    def _renumber(self, number: int) -> None:
        """Start a dedup session at the number with which its source continues."""
        is_fresh = self._log.end == self._log.run_first and not self.batch.values
        if self._log.writer.identity.dedup_id is None or not is_fresh:
            raise InvalidOption(f"numbers are dense: got {number}, expected {self.batch.end}")
        if not 0 <= number < NUMBER_MAX // 2:
            raise InvalidOption(f"number {number} is out of range: 0 to {NUMBER_MAX // 2 - 1}")
        self.pending_error = _WRITE_INTERRUPTED
        self._log.start_run(number)
        self.batch = PendingBatch(number)
        self.pending_error = None

    def _write(self, drafts: list[BatchDraft]) -> None:
        """Write batches with one system call and start a new one. On `rt.DiskFull`, the batches that fit stay
        written.

        `pending_error` is set until everything is done. After an interruption, the next call sees it and
        checks the contents of the file before it assigns a number.
        """
        self.pending_error = _WRITE_INTERRUPTED
        try:
            self._log.append(drafts, self.batch.first)
            self.batch = PendingBatch(self._log.end)
            if self._settings.fsync == "batch":
                self._log.sync()
        except (DiskFull, StorageFailed) as error:
            self.pending_error = error
            if isinstance(error, DiskFull):
                self._drop_written()
                self._log.schedule_sync()
            raise
        self.pending_error = None
        self._written_s = monotonic()
        self._log.schedule_sync()


_WRITE_INTERRUPTED = RtError("a write was interrupted")
"""The value of `pending_error` during a write. Never raised: the next call resolves it."""
