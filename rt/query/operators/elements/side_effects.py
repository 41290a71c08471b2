"""Operators that call functions, and do not change the values."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Final

from rt.query.core.observable import Transform, applied
from rt.query.core.operator import Operator
from rt.query.operators.user_functions import FAILED, UserFunctionOperator

logger = logging.getLogger("rt.query")


def do_action(
    on_next: Callable[[Any], object] | None = None,
    on_error: Callable[[Exception], object] | None = None,
    on_completed: Callable[[], object] | None = None,
) -> Transform:
    """The same values. The functions are called before an event is sent on.

    An exception of a function is the operator's error. After a crash they are called again for values after
    the last checkpoint. Saves nothing.
    """
    return applied(Do, on_next, on_error, on_completed)


def finally_action(action: Callable[[], object]) -> Transform:
    """The same values. `action` is called at the end, whatever its cause, before the end is sent on.

    It is not called when the engine unloads. After a crash it may be called again, for an end after the last
    checkpoint. Its exceptions are only logged. Saves nothing.
    """
    return applied(Finally, action)


class Do(UserFunctionOperator[Any, Any]):
    __slots__ = ("_on_completed", "_on_error", "_on_next")
    NAME = "do_action"

    def __init__(
        self,
        on_next: Callable[[Any], object] | None,
        on_error: Callable[[Exception], object] | None,
        on_completed: Callable[[], object] | None,
    ) -> None:
        self._on_next: Final = on_next
        self._on_error: Final = on_error
        self._on_completed: Final = on_completed

    def on_next(self, value: Any, /) -> None:
        if self._on_next is None or self.call(self._on_next, value) is not FAILED:
            self.emit(value)

    def on_error(self, error: Exception, /) -> None:
        if self._on_error is None or self.call(self._on_error, error) is not FAILED:
            self.fail(error)

    def on_completed(self) -> None:
        if self._on_completed is None or self.call(self._on_completed) is not FAILED:
            self.complete()


class Finally(Operator[Any, Any]):
    __slots__ = ("_action",)
    NAME = "finally_action"

    def __init__(self, action: Callable[[], object]) -> None:
        self._action: Final = action

    def on_next(self, value: Any, /) -> None:
        self.emit(value)

    def dispose(self) -> None:
        if not self.is_disposed:
            try:
                super().dispose()
            finally:
                self._act()

    def _act(self) -> None:
        try:
            self._action()
        except Exception:  # a user's function; an ended query cannot report its error
            logger.exception("finally_action_failed operator=%s", self.address)
