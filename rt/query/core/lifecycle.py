"""The states of an engine, which operations they allow, and the lock of its events.

    new ─ recover ─► recovering ─► running ◄─► checkpointing
                         │            │              │
                         └─ unload ─► unloading ◄────┘ ─► unloaded

Only one checkpoint or recovery runs at a time; another one is refused, never queued. An unload waits for the
running operation. After a failed recovery the engine is unloaded, after a failed checkpoint it runs.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Final

from rt.query.core.errors import WrongState


class EngineState(enum.Enum):
    NEW = "new"
    RECOVERING = "recovering"
    RUNNING = "running"
    CHECKPOINTING = "checkpointing"
    UNLOADING = "unloading"
    UNLOADED = "unloaded"


_USABLE: Final = frozenset({EngineState.RUNNING, EngineState.CHECKPOINTING})


class EngineLifecycle:
    """The state of an engine. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._state = EngineState.NEW
        self._is_unload_requested = False

    @property
    def state(self) -> EngineState:
        return self._state

    def require_usable(self) -> None:
        """`WrongState` unless queries run."""
        if self._state not in _USABLE or self._is_unload_requested:
            raise self._wrong_state("the engine is not running", "running")

    @contextmanager
    def operation(
        self, state: EngineState, allowed_from: EngineState, fails_to: EngineState
    ) -> Iterator[None]:
        """Be in `state` inside the context; then running, or `fails_to` if it raised.

        Raises `WrongState` if the state before is not `allowed_from`.
        """
        with self._changed:
            if self._state is not allowed_from or self._is_unload_requested:
                raise self._wrong_state(f"the engine cannot enter state {state.value}", allowed_from.value)
            self._state = state
        after = fails_to
        try:
            yield
            after = EngineState.RUNNING
        finally:
            with self._changed:
                self._state = after
                self._changed.notify_all()

    def start_unload(self) -> bool:
        """Wait for the running operation. False if the engine is unloaded already; then waits for that."""
        with self._changed:
            if self._is_unload_requested:
                self._changed.wait_for(lambda: self._state is EngineState.UNLOADED)
                return False
            self._is_unload_requested = True
            busy = {EngineState.CHECKPOINTING, EngineState.RECOVERING}
            self._changed.wait_for(lambda: self._state not in busy)
            self._state = EngineState.UNLOADING
            return True

    def finish_unload(self) -> None:
        with self._changed:
            self._state = EngineState.UNLOADED
            self._changed.notify_all()

    def _wrong_state(self, what: str, expected: str) -> WrongState:
        match self._state:
            case EngineState.NEW:
                hint = "Call recover first, also for an empty store."
            case EngineState.UNLOADING | EngineState.UNLOADED:
                hint = "The engine was unloaded: make another one on the same store."
            case _:
                hint = "Wait for the running checkpoint or recovery."
        return WrongState(what, got=self._state.value, expected=expected, hint=hint)


class EventLock:
    """Makes events atomic. Re-entrant. Knows whether the calling thread holds it.

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
