"""The lock that events are whole under."""

from __future__ import annotations

import threading
from types import TracebackType

from rt.query.errors import WrongState


class EventLock:
    """Re-entrant; knows whether the calling thread holds it.

    `is_torn`: an event was broken off half way, by an interrupt, or by what no query is to blame for. What
    queries hold then belongs to no watermark, and must never be saved.
    """

    __slots__ = ("_depth", "_lock", "_owner", "is_torn")

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._owner: int | None = None
        self._depth = 0
        self.is_torn = False

    def __enter__(self) -> None:
        self._lock.acquire()
        self._owner = threading.get_ident()
        self._depth += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is not None and not issubclass(kind, Exception):
            self.is_torn = True
        self._depth -= 1
        if not self._depth:
            self._owner = None
        self._lock.release()

    def require_whole(self) -> None:
        """`WrongState` if it is torn."""
        if self.is_torn:
            raise WrongState(
                "an event was broken off half way: nothing goes on from there",
                hint="Unload the engine, and make another one on the same store: it goes on.",
            )

    @property
    def is_mine(self) -> bool:
        """Whether this thread holds it."""
        return self._owner == threading.get_ident()
