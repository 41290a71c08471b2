"""One publisher's session on its way to the nodes: how far it is, and waiting for that.

Laws. Push processes, which the publishers of this process share (`rt.pushing`), push it from the publisher's
start on, until the cluster has fenced it. They outlive the publisher, however that ends, and send what is
left. Nobody waits for them, except who asks to.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal, TypeAlias

from rt import pushing
from rt.errors import Closed, Fenced, RtError, Timeout, UnknownVersion
from rt.log.disk import storage_errors
from rt.progress import (
    NO_LEVEL,
    PROGRESS_BYTES,
    PROGRESS_FILE,
    Level,
    ProgressRecord,
    PushState,
    decode_progress,
    read_progress,
)
from rt.push_requests import Serve

if TYPE_CHECKING:
    from rt.net.tls import TLS

logger = logging.getLogger("rt.publisher")

WaitLevel: TypeAlias = Literal["replicated", "merged"]
OnProgress: TypeAlias = Callable[[ProgressRecord], None]
"""Called with what is new, in the thread that looks for all publishers of the process: it must not wait."""


class Replication:
    """Has the session in `directory` pushed, until `leave`; what is there then is pushed to its end.

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
        self.directory = directory
        self._incarnation = incarnation
        self._on_progress = on_progress
        self._changed = threading.Condition()
        self._waiting = 0
        self._is_leaving = False
        self._record = ProgressRecord(incarnation, NO_LEVEL, NO_LEVEL)
        self._data = b""
        """The record as it was last read."""
        path = os.path.join(directory, PROGRESS_FILE)
        files = (os.path.abspath(file) for file in (tls.ca, tls.cert, tls.key))
        with storage_errors(path, "watching progress"):
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                self._note(read_progress(directory))
                self._stale_sequence = self._record.sequence
                self._pushing = pushing.shared()
                self._number = self._pushing.start(
                    Serve(0, directory, stream, tuple(endpoints), *map(os.fspath, files)), self
                )
            except BaseException:
                os.close(self._fd)
                raise
        on_progress(self._record)

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
        # Of a record that was there before the levels count; its state was another client's.
        return PushState.RUNNING if record.sequence == self._stale_sequence else record.state

    def wait(self, x: int, number: int, level: WaitLevel, timeout: float | None) -> None:
        """Return when `number` of X has come to `level`.

        `rt.Timeout`; `rt.Fenced` if the cluster takes no more of this session, `rt.RtError` if no node takes
        it, `rt.Closed` if `leave` is called meanwhile.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            self._waiting += 1
        try:
            with self._pushing.awaited(), self._changed:
                self._wait(x, number, level, deadline)
        finally:
            with self._changed:
                self._waiting -= 1

    def _wait(self, x: int, number: int, level: WaitLevel, deadline: float | None) -> None:
        while not self._has_come(x, number, level):
            self._raise_if_vain()
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                raise Timeout(
                    f"number {number} is not {level} yet",
                    where=self.directory,
                    got=getattr(self._record, level).number,
                    hint="It still may be: wait again, or look at the push client's log.",
                )
            self._changed.wait(left)

    def leave(self) -> None:
        """The publisher has ended: nothing is waited for any more, the rest is pushed. Twice is allowed."""
        with self._changed:
            if self._is_leaving:
                return
            self._is_leaving = True
            self._changed.notify_all()
        self._pushing.finish(self._number)

    def disown(self) -> None:
        """In a forked child: what pushes is the parent's."""
        self._changed, self._pushing = threading.Condition(), pushing.shared()
        if not self._is_leaving:
            self._is_leaving = True
            self.release()

    def _has_come(self, x: int, number: int, level: WaitLevel) -> bool:
        reached: Level = self._record.replicated if level == "replicated" else self._record.merged
        return reached.x == x and reached.number > number

    def _raise_if_vain(self) -> None:
        match self.state:
            case PushState.FENCED:
                raise Fenced(
                    "the cluster takes no more of this session",
                    where=self.directory,
                    hint="Another publisher, or another copy of this directory, took over its name; or an "
                    "operator reset the cluster: then open it again.",
                )
            case PushState.REFUSED:
                raise RtError(
                    "no node takes this session",
                    where=self.directory,
                    hint="The push client's log on stderr says why.",
                )
            case PushState.RUNNING:
                pass
        if self._is_leaving:
            raise Closed("the publisher is closed", where=self.directory)

    # Called by `rt.pushing`, in its thread

    @property
    def is_awaited(self) -> bool:
        """Whether somebody waits."""
        return self._waiting > 0

    def look(self) -> bool:
        """Read `.progress`; whether it says something new."""
        data = os.pread(self._fd, PROGRESS_BYTES, 0)
        if data == self._data:
            return False
        self._data = data
        try:
            record = decode_progress(data)
        except UnknownVersion as error:
            logger.warning("progress_not_read path=%s reason=%s", self.directory, error)
            return False
        if self._note(record):
            self._on_progress(self._record)
        return True

    def release(self) -> None:
        """Close the file."""
        os.close(self._fd)

    def _note(self, record: ProgressRecord | None) -> bool:
        """Take what `.progress` says of this incarnation, if it does; whether that is new."""
        if record is None or record.incarnation != self._incarnation or record == self._record:
            return False
        with self._changed:
            self._record = record
            self._changed.notify_all()
        return True
