"""Replication progress of one publisher's session, and waiting for it.

Push processes, shared by the publishers of this process (`rt.sidecar.push_pool`), push the session from the
publisher's start until the cluster fences it. They outlive the publisher, however it ends, and send the rest.
No call waits for them except `wait`.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

from rt.client.publisher_status import PublisherStatus, ReplicationState, reasons, state_of
from rt.client.replication_problem import ReplicationProblem
from rt.errors import Closed, Fenced, RtError, Timeout, UnknownVersion
from rt.log.disk import storage_errors
from rt.sidecar import push_pool
from rt.sidecar.cluster_file import read_cluster
from rt.sidecar.progress_file import (
    NO_LEVEL,
    PROGRESS_BYTES,
    PROGRESS_FILE,
    Level,
    ProgressRecord,
    decode_progress,
    read_progress,
)
from rt.sidecar.protocol import PUSH_LOG, EndpointStatus, PushReported, PushRequested

if TYPE_CHECKING:
    from rt.net.tls import TLS

logger = logging.getLogger("rt.client.publisher")

WaitLevel: TypeAlias = Literal["replicated", "merged"]
OnProgress: TypeAlias = Callable[[ProgressRecord], None]
"""Called with each new record, from any thread, but by only one thread at a time. It must not block."""

SILENT_SECONDS: Final = 2.0
"""How long `linger` waits before it logs what it waits for."""
LEFT_HINT: Final = (
    "It stays on the disk. The push process sends it; if that is stopped, the next publisher of the "
    "directory or `rt push` does."
)


class WaitHandle:
    """Has the session in `directory` pushed, from `start` on. After `leave`, the push continues until the
    rest is sent.

    Levels count for `incarnation` only. The error that blocks the push is recorded in `problem`. Thread-safe.
    """

    def __init__(
        self,
        directory: str,
        stream: str,
        endpoints: Sequence[str],
        tls: TLS,
        *,
        incarnation: bytes,
        on_progress: OnProgress,
        problem: ReplicationProblem,
    ) -> None:
        self.directory = directory
        self._log = os.path.join(directory, PUSH_LOG)
        self._incarnation = incarnation
        self._on_progress = on_progress
        self._problem = problem
        self.endpoints = tuple(EndpointStatus(endpoint, is_connected=False) for endpoint in endpoints)
        """The connection to each node, as the push process reported it last."""
        self._members = 0
        self.since_ns = time.time_ns()
        """When the state of the replication changed last."""
        self.disconnects = 0
        """Connections that were reported as lost."""
        self._changed = threading.Condition()
        self._waiting = 0
        self._listeners: tuple[Callable[[], None], ...] = ()
        self._notifier: MergeNotifier | None = None
        self._is_leaving = False
        self._record = ProgressRecord(incarnation, NO_LEVEL, NO_LEVEL)
        self._reading = threading.Lock()
        """Held while the file is read and its record is stored, so that no older record is stored after it.
        Lock order: this, then `_changed`.
        """
        self._data = b""
        """The record that was read last."""
        self._fd = -1
        self._pushing = push_pool.shared()
        self._number = self._pushing.new_number()
        files = (os.path.abspath(file) for file in (tls.ca, tls.cert, tls.key))
        self._request = PushRequested(self._number, directory, stream, tuple(endpoints), *files)

    def start(self) -> None:
        """Have the session pushed until `leave`. `leave` must be called even if this raises or is
        interrupted.
        """
        path = os.path.join(self.directory, PROGRESS_FILE)
        with storage_errors(path, "watching progress"):
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                self._read_first()
                self._pushing.start(self._request, self)
            except BaseException:
                self.release()  # The thread of the pool may read it already.
                raise
        self._on_progress(self._record)

    @property
    def replicated(self) -> Level:
        """One past the last number that a majority of the nodes has synced."""
        return self._record.replicated

    @property
    def merged(self) -> Level:
        """One past the last number that is merged."""
        return self._record.merged

    @property
    def is_leaving(self) -> bool:
        """Whether the publisher was closed."""
        return self._is_leaving

    @property
    def state(self) -> ReplicationState:
        return state_of(self._problem.error, self.endpoints, self._members)

    def wait(self, run: int, number: int, level: WaitLevel, timeout: float | None) -> None:
        """Return when `number` of run `run` has reached `level`.

        Raises `rt.Timeout`, `rt.Fenced` if the cluster rejects this session, the error that blocks its push
        otherwise, `rt.Closed` if `leave` is called meanwhile.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        self.start_waiting()
        try:
            with self._changed:
                self._wait(run, number, level, deadline)
        finally:
            self.stop_waiting()

    def start_waiting(self) -> None:
        """Read the progress as soon as it is written, until `stop_waiting`."""
        with self._changed:
            self._waiting += 1
        self._pushing.start_waiting()

    def stop_waiting(self) -> None:
        self._pushing.stop_waiting()
        with self._changed:
            self._waiting -= 1

    def listen(self, on_changed: Callable[[], None]) -> None:
        """Call `on_changed` now and after each change, in any thread. It must not block or raise."""
        with self._changed:
            self._listeners += (on_changed,)
        on_changed()

    def watch_merged(self, on_merged: Callable[[int], None], merged: Callable[[], int], session: str) -> None:
        """Have `on_merged` called until `leave`: see `MergeNotifier`."""
        self._notifier = MergeNotifier(on_merged, merged, session)
        self.listen(self._notifier.changed)

    def linger(
        self, run: int, number: int, seconds: float, session: str, status: Callable[[], PublisherStatus]
    ) -> RtError | None:
        """Wait up to `seconds` until `number` is replicated. If it is not, the push process sends the rest.

        Return the error that blocks its replication. Log what the call waits for, and what it leaves to the
        push process.
        """
        try:
            silent = min(seconds, SILENT_SECONDS)
            try:
                self.wait(run, number, "replicated", silent)
            except Timeout as error:
                if seconds <= silent:
                    raise
                logger.warning("closing_waits session=%s seconds=%g reason=%r", session, seconds, str(error))
                self.wait(run, number, "replicated", seconds - silent)
        except Closed:
            return None
        except Timeout as error:
            if seconds > 0:
                _log_left(session, status(), error)
        except RtError as error:
            return error
        except BaseException as error:
            _log_left(session, status(), error)
            raise
        return None

    def _wait(self, run: int, number: int, level: WaitLevel, deadline: float | None) -> None:
        while not self.has_come(run, number, level):
            self.raise_if_vain()
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                raise self.timed_out(number, level)
            self._changed.wait(left)

    def timed_out(self, number: int, level: WaitLevel) -> Timeout:
        """The error of a wait that timed out."""
        why = reasons(self.endpoints)
        return Timeout(
            f"timed out: number {number} is not {level} yet",
            where=self.directory,
            got=getattr(self._record, level).number,
            hint=(f"{why}. " if why else "")
            + "It may still be: wait again."
            + (f" {self._log} says more." if os.path.exists(self._log) else ""),
        )

    def leave(self) -> None:
        """Stop waiting; the push process continues with the rest. Calling it twice is allowed."""
        with self._changed:
            if self._is_leaving:
                return
            self._is_leaving = True
            self._notify()
        self._pushing.finish(self._number)
        if self._notifier is not None:
            self._notifier.stop()

    def disown(self) -> None:
        """In a forked child: the push processes belong to the parent."""
        self._changed, self._reading = threading.Condition(), threading.Lock()
        self._pushing = push_pool.shared()
        if not self._is_leaving:
            self._is_leaving = True
            self.release()

    def has_come(self, run: int, number: int, level: WaitLevel) -> bool:
        """Whether `number`, of run `run` or of an earlier run, has reached `level`. Runs reach a level in
        their order.
        """
        reached: Level = self._record.replicated if level == "replicated" else self._record.merged
        return reached.run > run or (reached.run == run and reached.number > number)

    def raise_if_vain(self) -> None:
        """Raise the error that prevents further replication."""
        self._problem.raise_always()
        if self._is_leaving:
            raise Closed("the publisher is closed", where=self.directory)

    # Called by `rt.sidecar.push_pool`, in its thread

    @property
    def is_awaited(self) -> bool:
        return self._waiting > 0

    @property
    def is_heard(self) -> bool:
        return bool(self._listeners)

    def poll(self) -> bool:
        """Read `.progress`. Returns whether it changed. In any thread."""
        with self._reading:
            return self._fd >= 0 and self._poll()

    def _read_first(self) -> None:
        """Read the existing record. It counts only if it is of the cluster to which the session is pushed."""
        self._data = os.pread(self._fd, PROGRESS_BYTES, 0)
        record = read_progress(self.directory)
        if record is not None and record.is_of(self._incarnation, read_cluster(self.directory).id):
            self._note(record)

    def _poll(self) -> bool:
        data = os.pread(self._fd, PROGRESS_BYTES, 0)
        if data == self._data:
            return False
        try:
            record = decode_progress(data)
        except UnknownVersion as error:
            logger.warning("progress_not_read path=%s reason=%s", self.directory, error)
            record = None
        if self._note(record):
            self._on_progress(self._record)
        self._data = data  # Set last: after an interrupted call it is read and reported again.
        return True

    def record_report(self, report: PushReported) -> None:
        """Record a report of the push process."""
        if self._is_leaving:
            return
        error = report.error
        if isinstance(error, Fenced):
            error = _fenced(self.directory, str(error))
        with self._changed:
            state, connected = self.state, {one.endpoint for one in self.endpoints if one.is_connected}
            self.endpoints, self._members = report.endpoints or self.endpoints, report.members
            self.disconnects += len(connected - {one.endpoint for one in self.endpoints if one.is_connected})
            self._problem.record(error)
            if self.state != state:
                self.since_ns = time.time_ns()
            self._notify()

    def release(self) -> None:
        with self._reading:
            fd, self._fd = self._fd, -1
            if fd >= 0:
                os.close(fd)

    def _note(self, record: ProgressRecord | None) -> bool:
        """Record the progress, if it is of this incarnation. Returns whether it is."""
        if record is None or record.incarnation != self._incarnation:
            return False
        with self._changed:
            self._record = record
            self._notify()
        return True

    def _notify(self) -> None:
        """Call with `_changed` held."""
        self._changed.notify_all()
        for listener in self._listeners:
            listener()


class MergeNotifier:
    """Calls `on_merged` with the next number to be merged, when it has grown, in a daemon thread of its own.

    `merged` returns that number. Changes during a call are reported together, by the next call.
    """

    def __init__(self, on_merged: Callable[[int], None], merged: Callable[[], int], session: str) -> None:
        self._on_merged, self._merged, self._session = on_merged, merged, session
        self._told = merged()
        self._wake: SimpleQueue[bool] = SimpleQueue()
        threading.Thread(target=self._run, name=f"rt-publisher-merged-{session}", daemon=True).start()

    def changed(self) -> None:
        """From any thread; never blocks."""
        self._wake.put(True)

    def stop(self) -> None:
        """Have the thread report what is merged by now, and then end. Does not wait for that."""
        self._wake.put(False)

    def _run(self) -> None:
        while True:
            goes_on = self._wake.get()
            if (merged := self._merged()) > self._told:
                self._told = merged
                try:
                    self._on_merged(merged)
                except Exception:
                    logger.exception("handler_failed session=%s", self._session)
            if not goes_on:
                return


def _log_left(session: str, status: PublisherStatus, error: BaseException) -> None:
    reason = reasons(status.endpoints) or str(error) or type(error).__name__
    logger.warning(
        "handed_to_push_process session=%s unsent_messages=%d unsent_bytes=%d push_pids=%s reason=%s hint=%r",
        session,
        status.unsent_messages,
        status.unsent_bytes,
        push_pool.shared().pids,
        reason,
        LEFT_HINT,
    )


def _fenced(directory: str, got: str) -> Fenced:
    return Fenced(
        "the cluster rejects further data of this session",
        where=directory,
        got=got,
        hint="Another publisher, or another copy of this directory, took over its name; or an operator reset "
        "the cluster: then open it again. If this directory was restored from a copy, begin a new one.",
    )
