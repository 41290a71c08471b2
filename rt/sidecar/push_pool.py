"""The push processes of this process's publishers, and the one thread that supervises them.

The thread also reads the sessions' `.progress` files. If a call waits for a file, the thread reads it at
once. Otherwise it reads together all files that were written within `GATHER_SECONDS`, or within
`UNHEARD_SECONDS` if no function is called with the progress. The thread ends when no process is left, and
starts again with the next publisher.

Invariants:
- There are at most as many processes as processor cores, for any number of publishers.
- A failure of one publisher does not affect the others.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import logging
import os
import select
import threading
import time
from typing import Final, Protocol

from rt.child_process import RESTART_SECONDS_MAX, poll_timeout_ms
from rt.line_protocol import encode_line
from rt.sidecar.progress_file import PROGRESS_FILE
from rt.sidecar.progress_watch import ProgressWatch
from rt.sidecar.protocol import PushReported, PushRequested
from rt.sidecar.push_process import PushProcess, choose

logger = logging.getLogger("rt.client.publisher")

GATHER_SECONDS: Final = 0.01
"""Delay of the progress for a function while no call waits: each read takes time from publishers."""
UNHEARD_SECONDS: Final = 0.1
"""Delay until merged segments are deleted, if nothing else depends on the progress."""
_EXIT_SECONDS: Final = 5.0
"""Longest time that the exit of the interpreter waits until the push processes have their requests."""


class Follower(Protocol):
    """A session with an open publisher. Only the pool's thread calls the methods."""

    @property
    def is_awaited(self) -> bool:
        """Whether a call waits for its progress."""

    @property
    def is_heard(self) -> bool:
        """Whether a function is called with its progress."""

    @property
    def directory(self) -> str: ...

    def poll(self) -> bool:
        """Read `.progress`; return whether it changed. Must be quick: it delays all other sessions."""

    def record_report(self, report: PushReported) -> None:
        """The push process reports the state of the push. Must be quick."""

    def release(self) -> None:
        """The session is not polled any more. Called once."""


class PushPool:
    """Gives sessions to push processes. Thread-safe; one per process."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        """Guards the fields below, except those of the thread."""
        self._requests: list[tuple[PushRequested, Follower] | int] = []
        """Sessions to serve (with their follower) and to finish (by number)."""
        self._numbers = itertools.count(1)
        self._awaiting = 0
        """How many calls wait for progress."""
        self._is_settled = True
        """Whether the push processes have received all requests."""
        self._thread: threading.Thread | None = None
        self._wake_fd = -1
        # Used by the thread only:
        self._processes: list[PushProcess] = []
        self._served_by: dict[int, PushProcess] = {}
        self._followers: dict[int, Follower] = {}
        self._watch = ProgressWatch()
        self._written: set[int] = set()
        """Sessions whose `.progress` must be read."""
        self._poll_written_at = 0.0
        """When to read the written files that no call waits for."""
        self._poll_unwatched_at = 0.0
        """When to read the files that cannot be watched."""

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes if process.pid is not None]

    def new_number(self) -> int:
        """A number for `PushRequested`.

        A caller that knows the number before `start` can finish the session if `start` is interrupted.
        """
        return next(self._numbers)

    def start(self, session: PushRequested, follower: Follower) -> None:
        """Let a push process push a session until it is finished.

        The caller must finish the session even if this call is interrupted. Raises `OSError` if the system
        has no descriptor or thread left, `TypeError` if the session cannot be encoded.
        """
        encode_line(session)  # Raise for a bad request here in its caller, not in the shared thread.
        with self._changed:
            if self._thread is None:
                self._begin()
            self._request((session, follower))

    def finish(self, number: int) -> None:
        """The publisher of a session has ended: push the rest, and stop following it.

        Does nothing if it was not started.
        """
        with self._changed:
            if self._thread is not None:
                self._request(number)

    def start_waiting(self) -> None:
        """A call waits for progress, until `stop_waiting`."""
        with self._changed:
            self._awaiting += 1
            self._wake()

    def stop_waiting(self) -> None:
        with self._changed:
            self._awaiting -= 1

    def settle(self, seconds: float) -> None:
        """Return when the push processes have received all requests, or after `seconds`."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_settled or self._thread is None, seconds)

    def disown(self) -> None:
        """In a forked child, which does not have the thread: release all. The pool must not be used
        afterwards.
        """
        self._watch.close()
        if self._wake_fd >= 0:
            os.close(self._wake_fd)

    # Call the methods below with `_changed` held.

    def _begin(self) -> None:
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="rt-pushing", daemon=True)
        try:
            self._thread.start()
        except BaseException:
            self._end()
            raise

    def _end(self) -> None:
        self._thread = None
        fd, self._wake_fd = self._wake_fd, -1
        os.close(fd)

    def _request(self, what: tuple[PushRequested, Follower] | int) -> None:
        self._requests.append(what)
        self._is_settled = False
        self._wake()

    def _wake(self) -> None:
        if self._wake_fd >= 0:
            os.eventfd_write(self._wake_fd, 1)

    # The thread

    def _run(self) -> None:
        with self._changed:
            if self._thread is not threading.current_thread():
                return  # Its start was interrupted.
        while True:
            try:
                if not self._run_once():
                    return
            except Exception:
                logger.exception("push_loop_failed")
                time.sleep(RESTART_SECONDS_MAX)

    def _run_once(self) -> bool:
        """Do the work that is due, and wait for more. False if the thread must end."""
        self._handle_requests()
        now = time.monotonic()
        for process in self._processes:
            process.step(now)
        self._processes = [process for process in self._processes if not process.is_over]
        self._poll_written(now)
        with self._changed:
            self._is_settled = not self._requests and all(process.is_settled for process in self._processes)
            self._changed.notify_all()
            if not self._requests and not self._processes and not self._followers:
                self._end()
                return False
        self._sleep()
        return True

    def _handle_requests(self) -> None:
        with self._changed:
            asked, self._requests = self._requests, []
        for what in asked:
            if isinstance(what, int):
                self._drop(what)
            else:
                self._add(*what)

    def _add(self, session: PushRequested, follower: Follower) -> None:
        number = session.number
        self._followers[number] = follower
        self._watch.add(number, os.path.join(follower.directory, PROGRESS_FILE))
        self._written.add(number)  # It may have been written before it was watched.
        process = self._served_by[number] = self._process()
        process.serve(session)

    def _process(self) -> PushProcess:
        processes = [process for process in self._processes if not process.is_dismissed]
        at = choose([process.load for process in processes], processes_max=len(os.sched_getaffinity(0)))
        if at == len(processes):
            processes.append(PushProcess(self._report))
            self._processes.append(processes[at])
        return processes[at]

    def _report(self, report: PushReported) -> None:
        if (follower := self._followers.get(report.number)) is not None:
            follower.record_report(report)

    def _drop(self, number: int) -> None:
        if number not in self._followers:
            return
        self._watch.remove(number)
        self._written.discard(number)
        self._followers.pop(number).release()
        self._served_by.pop(number).finish(number)

    def _poll_written(self, now: float) -> None:
        """Read the files that were written, if it is time."""
        self._written |= self._watch.changed()
        is_due = now >= self._poll_written_at
        for number in list(self._written):
            if is_due or self._followers[number].is_awaited:
                self._written.discard(number)
                self._poll_one(number)
                if is_due:
                    self._poll_written_at = now + self._gather_seconds()
        if self._watch.polled and now >= self._poll_unwatched_at:
            are_changed = [self._poll_one(number) for number in self._watch.polled]
            self._watch.pace.record(is_changed=any(are_changed))
            self._poll_unwatched_at = now + self._watch.pace.seconds

    def _gather_seconds(self) -> float:
        is_heard = any(follower.is_heard for follower in self._followers.values())
        return GATHER_SECONDS if is_heard else UNHEARD_SECONDS

    def _poll_one(self, number: int) -> bool:
        follower = self._followers[number]
        try:
            return follower.poll()
        except Exception:
            logger.exception("progress_failed path=%s", follower.directory)
            return False

    def _sleep(self) -> None:
        poll = select.poll()
        poll.register(self._wake_fd, select.POLLIN)
        now = time.monotonic()
        waits = [process.due_in(now) for process in self._processes]
        if self._written or (now < self._poll_written_at and not self._awaiting):
            waits.append(self._poll_written_at - now)
        if self._watch.fileno() >= 0 and (now >= self._poll_written_at or self._awaiting):
            poll.register(self._watch.fileno(), select.POLLIN)
        if self._watch.polled:
            waits.append(self._poll_unwatched_at - now)
        for process in self._processes:
            process.register(poll)
        seconds = min((wait for wait in waits if wait is not None), default=None)
        poll.poll(poll_timeout_ms(seconds))
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake_fd)


_shared = [PushPool()]


def shared() -> PushPool:
    return _shared[0]


def _disown() -> None:
    _shared[0].disown()
    _shared[0] = PushPool()


def _settle() -> None:
    """At exit: wait until the last requests have reached the push processes."""
    _shared[0].settle(_EXIT_SECONDS)


atexit.register(_settle)
os.register_at_fork(after_in_child=_disown)
