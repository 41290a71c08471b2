"""What operators share that hand out windows or groups."""

from __future__ import annotations

from typing import Any

from rt.query.inner import Inner
from rt.query.operators.asking import Asking


class HandsOut(Asking[Any, Inner]):
    """An operator that lives as long as anybody listens to it, or to what it has handed out."""

    __slots__ = ("_inners", "_is_left")

    def __init__(self) -> None:
        self._inners: dict[str, Inner] = {}
        self._is_left = False

    def leave(self) -> None:
        """End, if nobody listens to what was handed out; else go on for them, and hand out nothing more."""
        if self.is_disposed or self._is_left:
            return
        self._is_left = True
        self.changed()
        self._end_if_idle()

    def open_inner(self, name: str, key: Any = None) -> Inner | None:
        """Hand out a new one; None if nobody wants any more."""
        if self._is_left:
            return None
        inner = self.reopen_inner(name, key)
        self.hand_out(inner)
        return inner

    def reopen_inner(self, name: str, key: Any = None) -> Inner:
        """One that was handed out before a recovery."""
        inner = self._inners[name] = self.make_inner(name, key)
        inner.on_idle = self._end_if_idle
        return inner

    def close_inner(self, name: str) -> None:
        """It has ended."""
        self._inners.pop(name).on_completed()

    def fail(self, error: Exception) -> None:
        """End with an error, and all that was handed out."""
        for inner in list(self._inners.values()):
            inner.on_error(error)
        if self._is_left:
            self.dispose()
        else:
            super().fail(error)

    def complete(self) -> None:
        """End, and all that was handed out."""
        for inner in list(self._inners.values()):
            inner.on_completed()
        if self._is_left:
            self.dispose()
        else:
            super().complete()

    def dispose(self) -> None:
        """End. Who still listens to what was handed out, as behind a `switch_map`, hears that it is over."""
        if not self.is_disposed:
            super().dispose()
            for inner in list(self._inners.values()):
                inner.on_completed()

    def on_dispose(self) -> None:
        """Nothing that was handed out is there any more."""
        for inner in self._inners.values():
            inner.drop()

    def _end_if_idle(self) -> None:
        if self._is_left and not any(inner.has_subscribers for inner in self._inners.values()):
            self.dispose()
