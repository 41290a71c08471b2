"""The problem that blocks the replication of a publisher, and the calls that raise it.

A problem starts when the push reports an error that a retry does not fix. It ends when a node accepts the
session again. Messages are published nevertheless: they stay on the disk, and the push continues to retry.

Invariants:
- The next call that publishes or flushes raises a problem, once, so that a program that continues loses no
  message. After a final error, each such call raises it. Waiting raises it as long as it lasts.
- `on_error` is called once for each problem, in a thread of its own.
"""

from __future__ import annotations

import copy
import logging
import threading
from collections.abc import Callable
from typing import Final, TypeAlias

from rt.errors import Fenced, LogNotFound, RtError

logger = logging.getLogger("rt.client.publisher")

ErrorHandler: TypeAlias = Callable[[RtError], None]

_FINAL: Final = (Fenced, LogNotFound)
"""Errors after which nothing more of this run is ever replicated."""


class ReplicationProblem:
    """The problem of the session in `directory`, if there is one. Thread-safe."""

    def __init__(self, directory: str, on_error: ErrorHandler | None) -> None:
        self.error: RtError | None = None
        """What blocks replication now."""
        self.unraised: RtError | None = None
        """What the next call must raise."""
        self.last: RtError | None = None
        """The latest problem, even if it has ended; `count` is the number of problems that started."""
        self.count = 0
        self._directory = directory
        self._on_error = on_error
        self._lock = threading.Lock()

    def record(self, error: RtError | None) -> None:
        """Record the error that blocks the push now; None if nothing blocks it. Never blocks."""
        with self._lock:
            if isinstance(self.error, _FINAL):
                return
            if error is None:
                self.error = self.unraised = None
                return
            if self.error is not None and (type(error), error.what) == (type(self.error), self.error.what):
                return
            # In this order: a thread that sees, without the lock, that replication is blocked also has
            # something to raise.
            self.last = self.unraised = self.error = self._with_hint(error)
            self.count += 1
        if self._on_error is not None:
            name = f"rt-publisher-error-{type(error).__name__}"
            threading.Thread(target=self._notify, args=(self.error,), name=name, daemon=True).start()

    def raise_once(self) -> None:
        """Raise the problem unless a call has raised it. A final one is raised each time."""
        if (error := self.unraised) is not None:
            self.mark_raised()
            raise copy.copy(error)

    def raise_always(self) -> None:
        """Raise the problem as long as it lasts."""
        if (error := self.error) is not None:
            self.mark_raised()
            raise copy.copy(error)

    def mark_raised(self) -> None:
        if not isinstance(self.unraised, _FINAL):
            self.unraised = None

    def disown(self) -> None:
        """In a forked child: another thread of the parent may hold the lock."""
        self._lock = threading.Lock()

    def _notify(self, error: RtError) -> None:
        assert self._on_error is not None
        try:
            self._on_error(error)
        except Exception:
            logger.exception("error_handler_failed path=%s", self._directory)

    def _with_hint(self, error: RtError) -> RtError:
        error = copy.copy(error)
        kept = f"What was published stays in {self._directory}"
        if isinstance(error, _FINAL):
            kept += ", but is not accepted any more."
        else:
            kept += ". Once the cause is fixed it is sent, by this publisher, the next one or `rt push`."
        error.hint = f"{error.hint} {kept}" if error.hint else kept
        return error
