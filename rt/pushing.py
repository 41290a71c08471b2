"""The push processes of this process's publishers, and the thread that looks after them all.

Laws. There are at most as many processes as processor cores, whatever the number of publishers. One thread
supervises the processes, and reads what the sessions' `.progress` files say: at once where somebody waits for
it, else what was written within `GATHER_SECONDS` together. What goes wrong with one publisher is its own
matter. The thread ends when no process is left, and begins again with the next publisher.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import select
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Final, Protocol

from rt.helper_process import RESTART_SECONDS_MAX
from rt.progress import PROGRESS_FILE
from rt.progress_watch import ProgressWatch
from rt.push_process import PushProcess, choose
from rt.push_requests import Serve, encode_line

logger = logging.getLogger("rt.publisher")

GATHER_SECONDS: Final = 0.01
"""How old what `replicated` and `merged` say may be while nobody waits: each look costs the publishers."""
_EXIT_SECONDS: Final = 5.0
"""How long the end of the interpreter waits until the push processes know what they are to push."""


class Follower(Protocol):
    """A session whose publisher is here, as the thread knows it, which alone calls what is below."""

    @property
    def is_awaited(self) -> bool:
        """Whether somebody waits for its progress."""

    @property
    def directory(self) -> str:
        """Where it is."""

    def look(self) -> bool:
        """Read `.progress`; whether it says something new. Quick: all others wait meanwhile."""

    def release(self) -> None:
        """It is looked at no more. Called once."""


class Pushing:
    """Has sessions pushed. Thread-safe; one for a process."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        """Guards what follows, up to the thread's own."""
        self._asked: list[tuple[Serve, Follower] | int] = []
        """Sessions to serve, and to finish."""
        self._next_number = 0
        self._awaiting = 0
        """How many wait for progress."""
        self._is_settled = True
        """Whether the push processes have been told of all that was asked for."""
        self._thread: threading.Thread | None = None
        self._wake_fd = -1
        # The thread's own:
        self._processes: list[PushProcess] = []
        self._served_by: dict[int, PushProcess] = {}
        self._followers: dict[int, Follower] = {}
        self._watch = ProgressWatch()
        self._written: set[int] = set()
        """What is to be looked at."""
        self._look_at = 0.0
        """When those are looked at that nobody waits for."""
        self._poll_at = 0.0
        """When those are looked at that cannot be watched."""

    @property
    def pids(self) -> list[int]:
        """Of the push processes that run."""
        return [process.pid for process in self._processes if process.pid is not None]

    def start(self, session: Serve, follower: Follower) -> int:
        """Have a session pushed until it is finished; the number to finish it by, whatever `session` says.

        `OSError` where the system has no descriptor or thread left; `TypeError` if it cannot be told.
        """
        encode_line(session)  # What is wrong with it is the caller's matter, not that of all others.
        with self._changed:
            if self._thread is None:
                self._begin()
            number = self._next_number = self._next_number + 1
            self._ask((replace(session, serve=number), follower))
            return number

    def finish(self, number: int) -> None:
        """The publisher of a session has ended: it is pushed to its end, and followed no more."""
        with self._changed:
            self._ask(number)

    @contextlib.contextmanager
    def awaited(self) -> Iterator[None]:
        """Somebody waits for progress."""
        with self._changed:
            self._awaiting += 1
            self._wake()
        try:
            yield
        finally:
            with self._changed:
                self._awaiting -= 1

    def settle(self, seconds: float) -> None:
        """Return when the push processes know what they are to push, or after `seconds`."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_settled or self._thread is None, seconds)

    def disown(self) -> None:
        """In a forked child, where the thread is not: let go of what is the parent's. Use it no more."""
        for process in self._processes:
            process.disown()
        self._watch.close()
        if self._wake_fd >= 0:
            os.close(self._wake_fd)

    # With `_changed` held

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

    def _ask(self, what: tuple[Serve, Follower] | int) -> None:
        self._asked.append(what)
        self._is_settled = False
        self._wake()

    def _wake(self) -> None:
        if self._wake_fd >= 0:
            os.eventfd_write(self._wake_fd, 1)

    # The thread

    def _run(self) -> None:
        while True:
            try:
                if not self._turn():
                    return
            except Exception:
                logger.exception("pushing_failed")
                time.sleep(RESTART_SECONDS_MAX)

    def _turn(self) -> bool:
        """Do what is due, and wait for more; False at the end."""
        self._take()
        now = time.monotonic()
        for process in self._processes:
            process.step(now)
        self._processes = [process for process in self._processes if not process.is_over]
        self._look(now)
        with self._changed:
            self._is_settled = not self._asked and all(process.is_told for process in self._processes)
            self._changed.notify_all()
            if not self._asked and not self._processes and not self._followers:
                self._end()
                return False
        self._sleep()
        return True

    def _take(self) -> None:
        with self._changed:
            asked, self._asked = self._asked, []
        for what in asked:
            if isinstance(what, int):
                self._drop(what)
            else:
                self._add(*what)

    def _add(self, session: Serve, follower: Follower) -> None:
        number = session.serve
        self._followers[number] = follower
        self._watch.add(number, os.path.join(follower.directory, PROGRESS_FILE))
        self._written.add(number)  # It may have been, before it was watched.
        process = self._served_by[number] = self._process()
        process.serve(session)

    def _process(self) -> PushProcess:
        processes = [process for process in self._processes if not process.is_dismissed]
        at = choose([process.load for process in processes], processes_max=len(os.sched_getaffinity(0)))
        if at == len(processes):
            processes.append(PushProcess())
            self._processes.append(processes[at])
        return processes[at]

    def _drop(self, number: int) -> None:
        self._watch.remove(number)
        self._written.discard(number)
        self._followers.pop(number).release()
        self._served_by.pop(number).finish(number)

    def _look(self, now: float) -> None:
        """Read what was written, where it is time to."""
        self._written |= self._watch.changed()
        is_due = now >= self._look_at
        for number in list(self._written):
            if is_due or self._followers[number].is_awaited:
                self._written.discard(number)
                self._look_at_one(number)
                if is_due:
                    self._look_at = now + GATHER_SECONDS
        if self._watch.polled and now >= self._poll_at:
            looks = [self._look_at_one(number) for number in self._watch.polled]
            self._watch.pace.note(is_changed=any(looks))
            self._poll_at = now + self._watch.pace.seconds

    def _look_at_one(self, number: int) -> bool:
        follower = self._followers[number]
        try:
            return follower.look()
        except Exception:
            logger.exception("progress_failed path=%s", follower.directory)
            return False

    def _sleep(self) -> None:
        """Until there is something to do."""
        poll = select.poll()
        poll.register(self._wake_fd, select.POLLIN)
        now = time.monotonic()
        waits = [process.due_in(now) for process in self._processes]
        if self._written or (now < self._look_at and not self._awaiting):
            waits.append(self._look_at - now)
        if self._watch.fileno() >= 0 and (now >= self._look_at or self._awaiting):
            poll.register(self._watch.fileno(), select.POLLIN)
        if self._watch.polled:
            waits.append(self._poll_at - now)
        for process in self._processes:
            process.register(poll)
        seconds = min((wait for wait in waits if wait is not None), default=None)
        poll.poll(None if seconds is None else max(0, int(seconds * 1000 + 0.999)))
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake_fd)


_shared = [Pushing()]


def shared() -> Pushing:
    """The one of this process."""
    return _shared[0]


def _disown() -> None:
    """In a forked child."""
    _shared[0].disown()
    _shared[0] = Pushing()


def _settle() -> None:
    """At exit: what was asked for last is still on its way to the push processes."""
    _shared[0].settle(_EXIT_SECONDS)


atexit.register(_settle)
os.register_at_fork(after_in_child=_disown)
