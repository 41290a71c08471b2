"""Background work of a simulated node. It pauses before each change of the disk, while the loop continues.

Law: work has its own thread, but only one thread runs at any time. The loop resumes the work and waits until
the work pauses again. So the seed alone decides how the two interleave.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from disks.wrapped_disk import WrappedDisk, WrappedFile

from rt.log.disk import Disk, File
from rt.log.format.constants import Buffer
from sequencer.raft.storage.worker import Done, Failed, Work


class SteppedWorker:
    """Does one piece of work at a time (`sequencer.raft.storage.worker.BackgroundWorker`).

    `later` schedules a function on the loop's thread some time later, as long as the process runs. `wake` is
    called when there is a result to collect.
    """

    def __init__(self, later: Callable[[Callable[[], None]], None], wake: Callable[[], None]) -> None:
        self._later, self._wake = later, wake
        self._queue: deque[tuple[Work, Done, Failed]] = deque()
        self._finished: deque[Callable[[], None]] = deque()
        self._stepper: _Stepper | None = None

    def run(self, work: Work, done: Done, failed: Failed) -> None:
        """See `Aside`."""
        self._queue.append((work, done, failed))
        if len(self._queue) == 1:
            self._later(self._begin)

    def collect(self) -> None:
        """See `Aside`."""
        while self._finished:
            self._finished.popleft()()

    def close(self) -> None:
        """See `Aside`."""
        self._queue.clear()

    def disk(self, disk: Disk) -> Disk:
        """Return the disk for the work. The loop uses the given disk as before."""
        return _SteppedDisk(disk, self._stand_still)

    def unwind(self) -> None:
        """End the work of an ended process whose disk is off: paused work fails at its next change."""
        self._queue.clear()
        if self._stepper is not None:
            while not self._stepper.step():
                pass

    def _stand_still(self) -> None:
        if self._stepper is not None:
            self._stepper.stand_still()

    def _begin(self) -> None:
        self._stepper = _Stepper(self._queue[0][0])
        self._go_on()

    def _go_on(self) -> None:
        stepper = self._stepper
        assert stepper is not None
        if not stepper.step():
            self._later(self._go_on)
            return
        self._stepper = None
        _, done, failed = self._queue[0]
        if stepper.error is None:
            outcome = partial(done, stepper.result)
        elif isinstance(stepper.error, Exception):
            outcome = partial(failed, stepper.error)
        else:
            raise stepper.error  # The power was cut.
        self._later(partial(self._finish, outcome))

    def _finish(self, outcome: Callable[[], None]) -> None:
        self._finished.append(outcome)
        self._queue.popleft()
        if self._queue:
            self._later(self._begin)
        self._wake()


class _Stepper:
    """A function in its own thread. It runs only while `step` waits for it."""

    def __init__(self, work: Work) -> None:
        self.result: Any = None
        self.error: BaseException | None = None
        self._work = work
        self._is_over = self._is_running = False
        # One thread releases each lock and the other acquires it, in turn, so semaphores are not needed.
        self._may_go, self._stands_still = threading.Lock(), threading.Lock()
        self._may_go.acquire()
        self._stands_still.acquire()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def step(self) -> bool:
        """Run the function until it pauses again. Return whether it has ended."""
        self._is_running = True
        self._may_go.release()
        self._stands_still.acquire()
        self._is_running = False
        if self._is_over:
            self._thread.join()
        return self._is_over

    def stand_still(self) -> None:
        """Pause the function here. If the loop calls this, nothing happens."""
        if self._is_running:
            self._stands_still.release()
            self._may_go.acquire()

    def _run(self) -> None:
        self._may_go.acquire()
        try:
            self.result = self._work()
        except BaseException as error:  # noqa: BLE001  # a power cut too is for the loop's thread
            self.error = error
        self._is_over = True
        self._stands_still.release()


class _SteppedDisk(WrappedDisk):
    """A disk that calls `before` every change."""

    def __init__(self, disk: Disk, before: Callable[[], None]) -> None:
        super().__init__(disk)
        self._before = before

    def wrapped(self, file: File, path: str, *, write: bool) -> File:
        return _SteppedFile(file, self._before)

    def create(self, path: str) -> File:
        self._before()
        return super().create(path)

    def rename(self, source: str, target: str) -> None:
        self._before()
        super().rename(source, target)

    def remove(self, path: str) -> None:
        self._before()
        super().remove(path)

    def sync_directory(self, path: str) -> None:
        self._before()
        super().sync_directory(path)


class _SteppedFile(WrappedFile):
    """A file of such a disk."""

    def __init__(self, file: File, before: Callable[[], None]) -> None:
        super().__init__(file)
        self._before = before

    def pwritev(self, buffers: Sequence[Buffer], offset: int) -> int:
        self._before()
        return super().pwritev(buffers, offset)

    def truncate(self, size: int) -> None:
        self._before()
        super().truncate(size)

    def sync(self) -> None:
        self._before()
        super().sync()
