"""The pull client of a subscriber: a separate process that fills the copy that the subscriber reads.

Invariants:
- One client fills a directory. Its supervisor holds `pull.lock` there; other subscribers read the same copy
  and wait to take over.
- A client that dies is restarted, except after a permanent error, which is kept for the reader.
- A client ends with its subscriber, however that ends: it sees the end of its stdin.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import select
import subprocess
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Final

from rt.errors import Closed, DirectoryLocked, DiskFull, RtError
from rt.events import CorruptPositions, HoldRefused
from rt.log.disk import REAL, storage_errors
from rt.sidecar.pull_protocol import (
    LINE_BYTES_MAX,
    HoldDenied,
    NodeReached,
    NoGoodBytes,
    PullFailed,
    decode_report,
)
from rt.sidecar.pull_settings import PullSettings
from rt.sidecar.restart_backoff import RESTART_SECONDS_MAX, RestartBackoff, environment

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

    `on_change` is called in the supervising thread after a change of `failure`, `log_end`, `is_shared`,
    `refused` or `corrupt`. Thread-safe.
    """

    def __init__(self, directory: str, settings: PullSettings, *, on_change: Callable[[], None]) -> None:
        self.failure: RtError | None = None
        """The permanent error, after which the copy does not grow."""
        self.log_end: int | None = None
        """The log end when a node was first reached."""
        self.is_shared = False
        """Whether another pull client fills the copy."""
        self.refused: HoldRefused | None = None
        """The nodes hold back no data for this subscriber; set until the reader takes it."""
        self.corrupt: CorruptPositions | None = None
        """No node has valid bytes for the next positions; set until the reader takes it."""
        self._directory = directory
        self._settings = settings
        self._on_change = on_change
        self._stopping = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
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
        self._thread.start()
        _pullings.add(self)

    def stop(self) -> None:
        """End the client and wait for it. Calling it twice is allowed."""
        self._stopping.set()
        with self._closing:
            if self._wake_fd >= 0:
                os.eventfd_write(self._wake_fd, 1)
        if self._thread is not threading.current_thread():
            self._thread.join()

    def disown(self) -> None:
        """In a forked child: the client belongs to the parent, and must see the end of the parent only."""
        self._closing = threading.Lock()
        self._stopping.set()
        self.failure = Closed(
            "the subscriber belongs to the parent process",
            where=self._directory,
            hint="Open one in the child, or start processes by spawn.",
        )
        process, self._process = self._process, None
        if process is not None:
            _close_pipes(process)
            process.returncode = 0  # It is not a child of this process, so do not wait for it.
        self._release()

    # The supervising thread

    def _run(self) -> None:
        pause = 0.0
        while not self._stopping.is_set() and self.failure is None:
            try:
                self._pause(pause)
                pause = self._try_once()
            except Exception as error:
                logger.exception("pull_failed path=%s", self._directory)
                self._end_process()
                pause = RESTART_SECONDS_MAX
                if isinstance(error, RtError):
                    self._fail(lasting(0, error))
        self._release()

    def _try_once(self) -> float:
        """Run a client to its end, if no other subscriber does. Returns the seconds until the next try."""
        if self._stopping.is_set():
            return 0.0
        if self._lock_fd < 0 and not self._lock():
            self._share(is_shared=True)
            return _LOCK_SECONDS
        self._restarts.record_start()
        with self._started() as process:
            failed = self._listen(process)
        if self._stopping.is_set():
            return 0.0
        logger.warning("pull_client_ended path=%s exit_status=%s", self._directory, process.returncode)
        if self._fail(lasting(process.returncode, failed)):
            return 0.0
        self._share(is_shared=isinstance(failed, DirectoryLocked))
        return self._restarts.record_end()

    def _lock(self) -> bool:
        """Take the lock. The client inherits it, so the next client starts only when this one has ended."""
        path = os.path.join(self._directory, LOCK_FILE)
        with storage_errors(path, "locking a copy"):
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

    @contextlib.contextmanager
    def _started(self) -> Iterator[subprocess.Popen[bytes]]:
        process = subprocess.Popen(
            self._settings.command(self._directory),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment("pull"),
            pass_fds=(self._lock_fd,),
            start_new_session=True,
        )
        self._process = process
        try:
            yield process
        finally:
            self._end_process()

    def _end_process(self) -> None:
        """End the process with a signal; kill it if it takes too long."""
        process, self._process = self._process, None
        if process is None:
            return
        _close_pipes(process)
        try:
            process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _listen(self, process: subprocess.Popen[bytes]) -> RtError | None:
        """Handle the client's reports until it ends. Returns the error it reported, if any."""
        assert process.stdout is not None
        failed: RtError | None = None
        rest = b""
        while self._wait_for(process.stdout.fileno()):
            data = os.read(process.stdout.fileno(), LINE_BYTES_MAX)
            if not data:
                break
            *lines, rest = (rest + data).split(b"\n")
            rest = rest[:LINE_BYTES_MAX]
            for line in lines:
                match decode_report(line):
                    case NodeReached(end) if self.log_end is None:
                        self.log_end = end
                        self._on_change()
                    case HoldDenied(name, why):
                        self.refused = HoldRefused(name, why)
                        self._on_change()
                    case NoGoodBytes(start, end, why):
                        self.corrupt = CorruptPositions(start, end, why)
                        self._on_change()
                    case PullFailed(error):
                        failed = error
        return failed

    def _wait_for(self, fd: int) -> bool:
        """Wait until `fd` is readable. False when it is time to stop."""
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        poll.register(self._wake_fd, select.POLLIN)
        poll.poll()
        return not self._stopping.is_set()

    def _pause(self, seconds: float) -> None:
        if seconds:
            poll = select.poll()
            poll.register(self._wake_fd, select.POLLIN)
            poll.poll(int(seconds * 1000 + 0.999))

    def _release(self) -> None:
        with self._closing:
            for fd in (self._lock_fd, self._wake_fd):
                if fd >= 0:
                    os.close(fd)
            self._lock_fd = self._wake_fd = -1


def lasting(exit_status: int, failed: RtError | None) -> RtError | None:
    """The error if a client must not be restarted; None if a restart may help.

    `failed` is the error that it reported. A client that was killed or crashed reported none.
    """
    if isinstance(failed, DirectoryLocked | DiskFull):
        return None  # Another client runs there, or the disk is full for now.
    if failed is None and exit_status == _EXIT_MISUSE:
        return RtError("`rt pull` rejected its arguments", hint="See its stderr for the reason.")
    return failed


def _close_pipes(process: subprocess.Popen[bytes]) -> None:
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()


def _disown_all() -> None:
    for pulling in list(_pullings):
        pulling.disown()
    _pullings.clear()


os.register_at_fork(after_in_child=_disown_all)
