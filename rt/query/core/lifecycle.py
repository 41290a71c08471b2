"""The states of an engine, which operations they allow, and the lock of its events.

    new ─ recover ─► recovering ─► running ◄─► checkpointing
                         │            │              │
                         └─ unload ─► unloading ◄────┘ ─► unloaded

Only one checkpoint or recovery runs at a time; another one is refused, never queued. An unload waits for the
running operation. After a failed recovery the engine is unloaded, after a failed checkpoint it runs. A failed
unload can be repeated.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from types import TracebackType
from typing import Final

from rt.query.core.errors import EngineStopped, StopEngine, WrongState, error_text


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
        self._is_released = False
        self._operator: int | None = None
        """The thread that runs an operation or unloads."""

    @property
    def state(self) -> EngineState:
        return self._state

    def require_usable(self) -> None:
        """`WrongState` unless queries run."""
        if self._state not in _USABLE or self._is_unload_requested:
            raise self._wrong_state("the engine is not running", "running")

    def require_open(self) -> None:
        """`WrongState` if the engine is unloading or unloaded."""
        if self._state is not EngineState.NEW:
            self.require_usable()

    def require_new(self) -> None:
        """`WrongState` if `recover` was called."""
        if self._state is not EngineState.NEW:
            raise WrongState(
                "too late", got=self._state.value, expected="new", hint="Call it before recover."
            )

    @contextmanager
    def operation(
        self, state: EngineState, allowed_from: EngineState, fails_to: EngineState
    ) -> Iterator[None]:
        """Set the state to `state` inside the context; then to running, or to `fails_to` if the context
        raised.

        Raises `WrongState` if the state before is not `allowed_from`.
        """
        with self._changed:
            if self._state is not allowed_from or self._is_unload_requested:
                raise self._wrong_state(f"the engine cannot enter state {state.value}", allowed_from.value)
            self._state = state
            self._operator = threading.get_ident()
        after = fails_to
        try:
            yield
            after = EngineState.RUNNING
        finally:
            with self._changed:
                self._state = after
                self._operator = None
                self._changed.notify_all()

    def unload(self, release: Callable[[], object]) -> None:
        """Wait for a running operation or unload. Then release everything, unless it was released before.

        If `release` raises, the state is unloaded, and the next call tries again.
        """
        if self._operator == threading.get_ident():
            what = "a source called unload while its engine called it"
            raise WrongState(what, hint="Call it from outside.")
        busy = {EngineState.CHECKPOINTING, EngineState.RECOVERING, EngineState.UNLOADING}
        with self._changed:
            self._is_unload_requested = True
            self._changed.wait_for(lambda: self._state not in busy)
            if self._is_released:
                return
            self._state, self._operator = EngineState.UNLOADING, threading.get_ident()
        try:
            release()
            self._is_released = True
        finally:
            with self._changed:
                self._state, self._operator = EngineState.UNLOADED, None
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

    __slots__ = ("_depth", "_gate", "_lock", "_owner", "is_interrupted")

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._gate = threading.Lock()
        """Held while a thread waits for the lock in `next`."""
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
        if error is not None and isinstance(error, StopEngine) and not self.is_mine:
            raise EngineStopped(
                "the error policy of a query stopped the engine",
                where=error.where,
                got=error_text(error.error),
                hint="Fix the cause, and make another engine on the same store: it reads the value again.",
            ) from error.error

    @contextmanager
    def next(self) -> Iterator[None]:
        """Hold the lock. A thread that waits here gets it before a thread that calls `give_way`."""
        with ExitStack() as held:
            with nullcontext() if self.is_mine else self._gate:
                held.enter_context(self)
            yield

    def give_way(self) -> None:
        """Let threads that wait in `next` have the lock first. Does nothing if this thread holds it."""
        if not self.is_mine:
            with self._gate:
                pass

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
