"""Operators that show what goes by to functions, and change nothing of it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Final

from rt.query.observing import Transform, applied
from rt.query.operator import Operator
from rt.query.operators.asking import FAILED, Asking

logger = logging.getLogger("rt.query")


def do_action(
    on_next: Callable[[Any], object] | None = None,
    on_error: Callable[[Exception], object] | None = None,
    on_completed: Callable[[], object] | None = None,
) -> Transform:
    """The same values, shown to functions before they go on; what these raise is the error.

    After a crash they see again what came behind the last checkpoint. Saves nothing.
    """
    return applied(Do, on_next, on_error, on_completed)


def finally_action(action: Callable[[], object]) -> Transform:
    """The same values; `action` is called when this has ended, in whatever way, before others hear of it.

    Not when the engine is unloaded; again if a crash comes before the next checkpoint. What it raises is
    logged, and changes nothing. Saves nothing.
    """
    return applied(Finally, action)


class Do(Asking[Any, Any]):
    """See `do_action`."""

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
        """Show it."""
        if self._on_next is None or self.ask(self._on_next, value) is not FAILED:
            self.emit(value)

    def on_error(self, error: Exception, /) -> None:
        """Show it."""
        if self._on_error is None or self.ask(self._on_error, error) is not FAILED:
            self.fail(error)

    def on_completed(self) -> None:
        """Tell."""
        if self._on_completed is None or self.ask(self._on_completed) is not FAILED:
            self.complete()


class Finally(Operator[Any, Any]):
    """See `finally_action`."""

    __slots__ = ("_action",)

    NAME = "finally_action"

    def __init__(self, action: Callable[[], object]) -> None:
        self._action: Final = action

    def on_next(self, value: Any, /) -> None:
        """Send it on."""
        self.emit(value)

    def dispose(self) -> None:
        """End, and say so."""
        if not self.is_disposed:
            super().dispose()
            try:
                self._action()
            except (
                Exception
            ):  # a function of the user's: where a query ends, nobody could take an error of it
                logger.exception("finally_action_failed operator=%s", self.address)
