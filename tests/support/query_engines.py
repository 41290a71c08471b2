"""A source, a consumer and a store whose failures a test chooses, for engines of queries."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rt.errors import DiskFull
from rt.objects import CheckpointKind, MemoryStore
from rt.query import ReliableObserver


class Numbers:
    """A source: the value of id n is n. Sends only in `pump`. `fails`: a method that raises `DiskFull`."""

    is_dense = True

    def __init__(self, acknowledged: int = -1, fails: str = "") -> None:
        self.next = -1
        self.acknowledged = acknowledged
        self.fails = fails
        self.is_disposed = False

    def subscribe(self, observer: ReliableObserver[int], /) -> Numbers:
        self.observer = observer
        return self

    def start(self, sequence_id: int, /) -> None:
        self._fail("start")
        assert sequence_id > self.acknowledged, "an acknowledged value was requested"
        self.next = sequence_id

    def acknowledge(self, sequence_id: int, /) -> None:
        self._fail("acknowledge")
        self.acknowledged = max(self.acknowledged, sequence_id)

    def dispose(self) -> None:
        self._fail("dispose")
        self.is_disposed = True

    def pump(self, end: int) -> None:
        """Send the numbers below `end`."""
        assert self.next >= 0, "not started"
        while self.next < end:
            self.observer.on_next(self.next, self.next)
            self.next += 1

    def _fail(self, method: str) -> None:
        if self.fails == method:
            raise DiskFull(method)


class Sink:
    """A consumer. Accepts each id once; a repeated id must have the same value. `error` is raised once."""

    def __init__(self, error: Exception | None = None) -> None:
        self.values: list[Any] = []
        self.ends = 0
        self.error = error

    def on_next(self, sequence_id: int, value: Any, /) -> None:
        self._fail()
        if sequence_id == len(self.values):
            self.values.append(value)
        assert self.values[sequence_id] == value, sequence_id

    def on_error(self, error: Exception, /) -> None:
        raise AssertionError(error)

    def on_completed(self) -> None:
        self._fail()
        self.ends += 1

    def _fail(self) -> None:
        error, self.error = self.error, None
        if error is not None:
            raise error


Fault = tuple[BaseException, bool]
"""The error of a commit, and whether the commit happens nevertheless."""


class FailingStore(MemoryStore):
    """A store whose commits fail as `draw` decides."""

    def __init__(self, content: Any = None) -> None:
        super().__init__(content)
        self.draw: Callable[[], Fault | None] = lambda: None

    def fail_once(self, error: BaseException, *, happens: bool = False) -> None:
        faults = [None, (error, happens)]
        self.draw = lambda: faults.pop() if faults else None

    def begin(self, kind: CheckpointKind) -> Any:
        writer = super().begin(kind)
        fault = self.draw()
        if fault is not None:
            commit = writer.commit

            def fail() -> None:
                (commit if fault[1] else writer.rollback)()
                raise fault[0]

            writer.commit = fail  # type: ignore[method-assign]
        return writer
