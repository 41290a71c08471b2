"""The states of an engine, and which operations they allow.

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
            raise WrongState(
                "the engine is not running",
                got=self._state.value,
                expected="running",
                hint=_hint(self._state),
            )

    @contextmanager
    def operation(
        self, state: EngineState, allowed_from: EngineState, fails_to: EngineState
    ) -> Iterator[None]:
        """Be in `state` inside the context; then running, or `fails_to` if it raised.

        Raises `WrongState` if the state before is not `allowed_from`.
        """
        with self._changed:
            if self._state is not allowed_from or self._is_unload_requested:
                raise WrongState(
                    f"the engine cannot enter state {state.value}",
                    got=self._state.value,
                    expected=allowed_from.value,
                    hint=_hint(self._state),
                )
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


def _hint(state: EngineState) -> str:
    match state:
        case EngineState.NEW:
            return "Call recover first, also for an empty store."
        case EngineState.UNLOADING | EngineState.UNLOADED:
            return "The engine was unloaded: make another one on the same store."
        case _:
            return "Wait for the running checkpoint or recovery."
