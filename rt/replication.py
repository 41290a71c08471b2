"""The push client of a publisher: a process of its own, and what it reports.

Laws. The process is started with the publisher and again whenever it dies, but not after the cluster has
fenced the session. It outlives the publisher, however that ends: it learns so from the end of its stdin,
sends what is left, and ends by itself. Nobody waits for it, except who asks to.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Literal, TypeAlias

from inotify_simple import INotify, flags

from rt.errors import Closed, Fenced, RtError, Timeout
from rt.helper_process import RESTART_SECONDS_MAX, Restarts, environment
from rt.log.disk import storage_errors
from rt.progress import NO_LEVEL, PROGRESS_FILE, Level, ProgressRecord, PushState, read_progress

if TYPE_CHECKING:
    from rt.net.tls import TLS

logger = logging.getLogger("rt.publisher")

WaitLevel: TypeAlias = Literal["replicated", "merged"]
OnProgress: TypeAlias = Callable[[ProgressRecord], float | None]
"""Called in the supervising thread with what is new; the seconds until it wants to be called again."""

_POLL_SECONDS = 0.02
"""How often to read `.progress` where the system has no inotify instance or watch left."""
_GATHER_SECONDS = 0.01
"""How old what `replicated` and `merged` say may be while nobody waits: each look costs the publisher."""
_LIMITS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOSPC})

_left: list[subprocess.Popen[bytes]] = []
"""Processes that drain for publishers that were closed: kept, so that the system can forget them in time."""


class Replication:
    """Starts and supervises the push client of the session in `directory`; `leave` ends that, not the client.

    Levels count for `incarnation` only. Thread-safe.
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
    ) -> None:
        self._directory = directory
        self._command = [
            *(sys.executable, "-m", "rt", "push", directory, "--stream", stream, "--attached"),
            *("--endpoints", ",".join(endpoints)),
            *("--ca", os.path.abspath(tls.ca), "--cert", os.path.abspath(tls.cert)),
            *("--key", os.path.abspath(tls.key)),
        ]
        self._incarnation = incarnation
        self._on_progress = on_progress
        self._changed = threading.Condition()
        self._is_leaving = False
        self._waiting = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._start_at = 0.0
        self._restarts = Restarts()
        path = os.path.join(directory, PROGRESS_FILE)
        with storage_errors(path, "watching progress"):
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))
            self._inotify = _watch(path)
            self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._record = self._read()
        self._stale_sequence = self._record.sequence
        """The record that was there before: its levels count, its state was another process's."""
        self._thread = threading.Thread(
            target=self._run, name=f"rt-replication-{os.path.basename(directory)}", daemon=True
        )
        self._thread.start()

    @property
    def replicated(self) -> Level:
        """One past the last number that a majority of the nodes has synced."""
        return self._record.replicated

    @property
    def merged(self) -> Level:
        """One past the last number that is merged."""
        return self._record.merged

    @property
    def state(self) -> PushState:
        """What the push client is doing."""
        record = self._record
        return PushState.RUNNING if record.sequence == self._stale_sequence else record.state

    def wait(self, x: int, number: int, level: WaitLevel, timeout: float | None) -> None:
        """Return when `number` of X has come to `level`.

        `rt.Timeout`; `rt.Fenced` if the cluster takes no more of this session, `rt.RtError` if no node takes
        it, `rt.Closed` if `leave` is called meanwhile.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._changed, self._looking_often():
            while not self._has_come(x, number, level):
                self._raise_if_vain()
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    raise Timeout(
                        f"number {number} is not {level} yet",
                        where=self._directory,
                        got=getattr(self._record, level).number,
                        hint="It still may be: wait again, or look at the push client's log.",
                    )
                self._changed.wait(left)

    @contextlib.contextmanager
    def _looking_often(self) -> Iterator[None]:
        """Somebody waits; `_changed` is held."""
        self._waiting += 1
        self._wake()
        try:
            yield
        finally:
            self._waiting -= 1

    def _wake(self) -> None:
        if self._wake_fd >= 0:
            os.eventfd_write(self._wake_fd, 1)

    def leave(self) -> None:
        """The publisher has ended: let the push client drain by itself. Twice is allowed."""
        with self._changed:
            self._is_leaving = True
            self._changed.notify_all()
            self._wake()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def disown(self) -> None:
        """In a forked child: the process is the parent's, and must see the end of the parent, not of us."""
        self._changed = threading.Condition()
        self._is_leaving = True
        process, self._process = self._process, None
        if process is not None:
            if process.stdin is not None:
                process.stdin.close()
            process.returncode = 0  # It is no child of ours to wait for.
        self._release()

    def _has_come(self, x: int, number: int, level: WaitLevel) -> bool:
        reached: Level = self._record.replicated if level == "replicated" else self._record.merged
        return reached.x == x and reached.number > number

    def _raise_if_vain(self) -> None:
        match self.state:
            case PushState.FENCED:
                raise Fenced(
                    "the cluster takes no more of this session",
                    where=self._directory,
                    hint="Another publisher, or another copy of this directory, took over its name.",
                )
            case PushState.REFUSED:
                raise RtError(
                    "no node takes this session",
                    where=self._directory,
                    hint="The push client's log on stderr says why.",
                )
            case PushState.RUNNING:
                pass
        if self._is_leaving:
            raise Closed("the publisher is closed", where=self._directory)

    # The supervising thread

    def _run(self) -> None:
        look_again: float | None = 0.0
        while not self._is_leaving:
            try:
                self._supervise()
                self._sleep(look_again)
                look_again = self._look()
                if not self._waiting:
                    self._gather()
            except Exception:
                logger.exception("replication_failed path=%s", self._directory)
                look_again = RESTART_SECONDS_MAX
                self._start_at = time.monotonic() + RESTART_SECONDS_MAX
                self._pause(RESTART_SECONDS_MAX)
        self._let_go()

    def _supervise(self) -> None:
        """Start the process when it is due; note its death."""
        now = time.monotonic()
        if self._process is not None:
            status = self._process.poll()
            if status is None:
                return
            logger.warning("push_client_ended path=%s exit_status=%d", self._directory, status)
            self._close_stdin(self._process)
            self._process = None
            self._start_at = now + self._restarts.note_end()
        if now >= self._start_at and self.state is not PushState.FENCED:
            self._restarts.note_start()
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                env=environment("push"),
                start_new_session=True,
            )

    def _sleep(self, look_again: float | None) -> None:
        """Until there is progress, the process ends, or something is due."""
        waits = [look_again] if look_again is not None else []
        if self._process is None and self.state is not PushState.FENCED:
            waits.append(self._start_at - time.monotonic())
        if self._inotify is None:
            waits.append(_POLL_SECONDS)
        self._pause(min(waits) if waits else None)

    def _pause(self, seconds: float | None) -> None:
        poll = select.poll()
        poll.register(self._wake_fd, select.POLLIN)
        if self._inotify is not None:
            poll.register(self._inotify.fileno(), select.POLLIN)
        with contextlib.ExitStack() as opened:
            if self._process is not None:
                with contextlib.suppress(ProcessLookupError):
                    fd = os.pidfd_open(self._process.pid)
                    opened.callback(os.close, fd)
                    poll.register(fd, select.POLLIN)
            poll.poll(None if seconds is None else max(0, int(seconds * 1000 + 0.999)))
        if self._inotify is not None:
            self._inotify.read(timeout=0)
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake_fd)

    def _gather(self) -> None:
        """Let more come before the next look, unless somebody begins to wait."""
        poll = select.poll()
        poll.register(self._wake_fd, select.POLLIN)
        poll.poll(_GATHER_SECONDS * 1000)

    def _look(self) -> float | None:
        record = self._read()
        if record != self._record:
            with self._changed:
                self._record = record
                self._changed.notify_all()
        return self._on_progress(record)

    def _read(self) -> ProgressRecord:
        """What `.progress` says of this incarnation; what it said last if it cannot be read now."""
        record = read_progress(self._directory)
        if record is not None and record.incarnation == self._incarnation:
            return record
        return getattr(self, "_record", None) or ProgressRecord(self._incarnation, NO_LEVEL, NO_LEVEL)

    def _let_go(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            self._close_stdin(process)
            _left[:] = [left for left in [*_left, process] if left.poll() is None]
        with self._changed:
            self._release()

    def _close_stdin(self, process: subprocess.Popen[bytes]) -> None:
        if process.stdin is not None:
            with contextlib.suppress(OSError):
                process.stdin.close()

    def _release(self) -> None:
        if self._inotify is not None:
            self._inotify.close()
            self._inotify = None
        fd, self._wake_fd = self._wake_fd, -1
        if fd >= 0:
            os.close(fd)


def _watch(path: str) -> INotify | None:
    inotify: INotify | None = None
    try:
        inotify = INotify(nonblocking=True)
        inotify.add_watch(path, flags.MODIFY)
    except OSError as error:
        if inotify is not None:
            inotify.close()
        if error.errno not in _LIMITS:
            raise
        logger.warning("inotify_exhausted path=%s hint=raise fs.inotify.max_user_watches", path)
        return None
    return inotify
