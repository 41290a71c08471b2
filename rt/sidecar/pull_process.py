"""The pull client of a subscriber: a separate process that fills the copy that the subscriber reads.

Invariants:
- One client fills a directory. Its supervisor holds `pull.lock` there; other subscribers read the same copy
  and wait to take over.
- A client that dies is restarted, except after a permanent error, which is kept for the reader.
- A client ends when its subscriber ends for any reason: it sees the end of its stdin.
"""

from __future__ import annotations

import fcntl
import logging
import os
import select
import threading
import time
import weakref
from collections.abc import Callable
from typing import Final

from rt.child_process import (
    RESTART_SECONDS_MAX,
    ChildProcess,
    RestartBackoff,
    child_environment,
    no_fork,
    poll_timeout_ms,
)
from rt.errors import DirectoryLocked, DiskFull, RtError
from rt.events import CorruptPositions, HoldRefused
from rt.line_protocol import decode_line
from rt.log.disk import REAL, storage_errors
from rt.sidecar.protocol import (
    ErrorReported,
    HoldDenied,
    NodeReached,
    NodesUnreached,
    NoGoodBytes,
    PullReport,
    TimeResolved,
)
from rt.sidecar.pull_settings import PullSettings

logger = logging.getLogger("rt.client.subscriber")

LOCK_FILE: Final = "pull.lock"

_EXIT_MISUSE: Final = 2
_LOCK_SECONDS: Final = 0.2
"""How often to try a lock that another subscriber holds: flock(2) has no timeout."""
_STOP_SECONDS: Final = 5.0
"""How long a process may take to end before it is killed."""

_pullings: weakref.WeakSet[PullSidecar] = weakref.WeakSet()


class PullSidecar:
    """Starts and supervises the pull client of `directory` (created if missing); `stop` ends it.

    `on_change` is called in the supervising thread after a change of `failure`, `log_end`, `found`,
    `is_shared`, `refused` or `corrupt`. Thread-safe.
    """

    def __init__(self, directory: str, settings: PullSettings, *, on_change: Callable[[], None]) -> None:
        self.failure: RtError | None = None
        """The permanent error, after which the copy does not grow."""
        self.log_end: int | None = None
        """The log end when a node was first reached."""
        self.found: TimeResolved | None = None
        """The position of the start time, as found by the first node that was reached."""
        self.is_shared = False
        """Whether another pull client fills the copy."""
        self.unreached: str | None = None
        """Why no node was reached yet; None if a node was reached, or not every node was tried."""
        self.refused: HoldRefused | None = None
        """The nodes retain no data for this subscriber; set until the reader takes it."""
        self.corrupt: CorruptPositions | None = None
        """No node has valid bytes for the next positions; set until the reader takes it."""
        self.directory = directory
        self._settings = settings
        self._on_change = on_change
        self._stopping = threading.Event()
        self._process: ChildProcess | None = None
        self._lock_fd = -1
        self._closing = threading.Lock()
        """Held while another thread uses or closes the wake-up."""
        self._restarts = RestartBackoff()
        with storage_errors(directory, "making a directory for a copy"):
            REAL.make_directory(directory)
            self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(
            target=self._run, name=f"rt-pulling-{os.path.basename(directory)}", daemon=True
        )
        _pullings.add(self)
        self._thread.start()

    def stop(self) -> None:
        """End the client and wait for it. Calling it twice is allowed."""
        self._stopping.set()
        with self._closing:
            if self._wake_fd >= 0:
                os.eventfd_write(self._wake_fd, 1)
        if self._thread is not threading.current_thread():
            self._thread.join()

    def disown(self) -> None:
        """In a forked child: release the copy. The copy and the client belong to the parent."""
        self._closing = threading.Lock()
        self._stopping.set()
        self._release()

    # The supervising thread

    def _run(self) -> None:
        pause = 0.0
        while not self._stopping.is_set() and self.failure is None:
            try:
                self._pause(pause)
                pause = self._try_once()
            except RtError as error:
                logger.error("pull_failed path=%s reason=%s", self.directory, error)
                self._end_process()
                pause = RESTART_SECONDS_MAX
                self._fail(lasting(0, error))
            except Exception:
                logger.exception("pull_failed path=%s", self.directory)
                self._end_process()
                pause = RESTART_SECONDS_MAX
        self._release()

    def _try_once(self) -> float:
        """Run a client to its end, if no other subscriber does. Returns the seconds until the next try."""
        if self._stopping.is_set():
            return 0.0
        if self._lock_fd < 0 and not self._lock():
            self._share(is_shared=True)
            return _LOCK_SECONDS
        self._restarts.record_start(time.monotonic())
        process = self._process = ChildProcess(
            self._settings.command(self.directory),
            is_logged=True,
            is_session=True,
            env=child_environment("pull"),
            pass_fds=(self._lock_fd,),
        )
        failed = self._listen(process)
        status = self._end_process()
        if self._stopping.is_set():
            return 0.0
        logger.warning("pull_client_ended path=%s exit_status=%s", self.directory, status)
        if self._fail(lasting(status, failed, process.last_line)):
            return 0.0
        self._share(is_shared=isinstance(failed, DirectoryLocked))
        return self._restarts.record_end(time.monotonic())

    def _lock(self) -> bool:
        """Take the lock. The client inherits it, so the next client starts only when this one has ended."""
        path = os.path.join(self.directory, LOCK_FILE)
        with storage_errors(path, "locking a copy"), no_fork:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(fd)
                return False
            self._lock_fd = fd
        self._share(is_shared=False)
        return True

    def _fail(self, failure: RtError | None) -> bool:
        """Record a permanent failure, if any. Returns whether there is one."""
        if failure is None:
            return False
        self.failure = failure
        self._on_change()
        return True

    def _share(self, *, is_shared: bool) -> None:
        if self.is_shared != is_shared:
            self.is_shared = is_shared
            self._on_change()

    def _end_process(self) -> int:
        """End the process, if any, and return its exit status."""
        process, self._process = self._process, None
        return 0 if process is None else process.end(_STOP_SECONDS)

    def _listen(self, process: ChildProcess) -> RtError | None:
        """Handle the client's reports until it ends. Returns the error it reported, if any."""
        failed: RtError | None = None
        while process.is_heard:
            self._pause(None, process)
            if self._stopping.is_set():
                break
            for line in process.exchange():
                match decode_line(line, PullReport):
                    case NodeReached(end, found):
                        self.unreached = None
                        self.found = found if self.found is None else self.found
                        self.log_end = end if self.log_end is None else self.log_end
                    case NodesUnreached(why) if self.log_end is None:
                        self.unreached = why
                    case HoldDenied(name, why):
                        self.refused = HoldRefused(name, why)
                    case NoGoodBytes(start, end, why):
                        self.corrupt = CorruptPositions(start, end, why)
                    case ErrorReported() as report:
                        failed = report.error
                        continue
                    case _:
                        continue
                self._on_change()
        return failed

    def _pause(self, seconds: float | None, process: ChildProcess | None = None) -> None:
        """Wait until it is time to stop, `process` has something to report, or `seconds` have passed."""
        poll = select.poll()
        poll.register(self._wake_fd, select.POLLIN)
        if process is not None:
            process.register(poll)
        poll.poll(poll_timeout_ms(seconds))

    def _release(self) -> None:
        with self._closing:
            fds, self._lock_fd, self._wake_fd = (self._lock_fd, self._wake_fd), -1, -1
            for fd in fds:
                if fd >= 0:
                    os.close(fd)


def lasting(exit_status: int, failed: RtError | None, last_line: str = "") -> RtError | None:
    """The error if a client must not be restarted; None if a restart may help.

    `failed` is the error that it reported. A client that was killed or crashed reported none.
    """
    if isinstance(failed, DirectoryLocked | DiskFull):
        return None  # Another client runs there, or the disk is full for now.
    if failed is None and exit_status == _EXIT_MISUSE:
        return RtError("`rt pull` rejected its arguments", got=last_line)
    return failed


def _disown_all() -> None:
    for pulling in list(_pullings):
        try:
            pulling.disown()
        except BaseException as error:  # noqa: BLE001 - the others must be released too
            logger.error("ownership_release_failed path=%s reason=%r", pulling.directory, error)
    _pullings.clear()


os.register_at_fork(after_in_child=_disown_all)
