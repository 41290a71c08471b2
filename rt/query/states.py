"""The states of an engine, and which operations they allow.

    new ─ recover ─► recovering ─► running ◄─► checkpointing
                         │            │              │
                         └─ unload ─► unloading ◄────┘ ─► unloaded

Checkpoints and recoveries exclude each other: a second one is refused, never queued. An unload waits for the
operation that runs. A failed recovery leaves the engine new, without queries; a failed checkpoint, running.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from rt.query.errors import WrongState


class EngineState(enum.Enum):
    """See the module."""

    NEW = "new"
    RECOVERING = "recovering"
    RUNNING = "running"
    CHECKPOINTING = "checkpointing"
    UNLOADING = "unloading"
    UNLOADED = "unloaded"


_USABLE: Final = frozenset({EngineState.RUNNING, EngineState.CHECKPOINTING})


class StateMachine:
    """Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._state = EngineState.NEW
        self._is_unload_wanted = False

    @property
    def state(self) -> EngineState:
        """As it is now."""
        return self._state

    def require_usable(self) -> None:
        """`WrongState` unless queries run."""
        if self._state not in _USABLE or self._is_unload_wanted:
            raise WrongState(
                "the engine does not run", got=self._state.value, wanted="running", hint=_hint(self._state)
            )

    @contextmanager
    def operation(self, state: EngineState, begin: EngineState, fails_to: EngineState) -> Iterator[None]:
        """In `state` meanwhile; then running, or `fails_to` if it raises. `WrongState` if not in `begin`."""
        with self._changed:
            if self._state is not begin or self._is_unload_wanted:
                raise WrongState(
                    f"the engine cannot be {state.value} now",
                    got=self._state.value,
                    wanted=begin.value,
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

    def begin_unload(self) -> bool:
        """Wait for the operation that runs; False if it is unloaded already, maybe by another thread."""
        with self._changed:
            if self._is_unload_wanted:
                self._changed.wait_for(lambda: self._state is EngineState.UNLOADED)
                return False
            self._is_unload_wanted = True
            busy = {EngineState.CHECKPOINTING, EngineState.RECOVERING}
            self._changed.wait_for(lambda: self._state not in busy)
            self._state = EngineState.UNLOADING
            return True

    def end_unload(self) -> None:
        """It is unloaded."""
        with self._changed:
            self._state = EngineState.UNLOADED
            self._changed.notify_all()


def _hint(state: EngineState) -> str:
    match state:
        case EngineState.NEW:
            return "Call recover first, also for an empty store."
        case EngineState.UNLOADING | EngineState.UNLOADED:
            return "It was unloaded: make another engine on the same store."
        case _:
            return "One checkpoint or recovery at a time: wait for the one that runs."
