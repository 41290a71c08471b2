"""The lock that makes events atomic."""

from __future__ import annotations

import threading
from types import TracebackType

from rt.query.core.errors import WrongState


class EventLock:
    """Re-entrant. Knows whether the calling thread holds it.

    `is_interrupted`: an event was interrupted. The queries' state then matches no watermark; do not save it.
    """

    __slots__ = ("_depth", "_lock", "_owner", "is_interrupted")

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._owner: int | None = None
        self._depth = 0
        self.is_interrupted = False

    def __enter__(self) -> None:
        self._lock.acquire()
        self._owner = threading.get_ident()
        self._depth += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is not None and not issubclass(kind, Exception):
            self.is_interrupted = True
        self._depth -= 1
        if not self._depth:
            self._owner = None
        self._lock.release()

    def require_intact(self) -> None:
        """`WrongState` if an event was interrupted."""
        if self.is_interrupted:
            raise WrongState(
                "an event was interrupted, so the engine cannot continue",
                hint="Unload the engine, and make another one on the same store.",
            )

    @property
    def is_mine(self) -> bool:
        return self._owner == threading.get_ident()
