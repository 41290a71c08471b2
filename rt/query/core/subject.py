"""Windows and groups: observables that an operator hands out as values.

A subject's address is the same in every run, so that subscriptions to it can be saved. It sends only to
observers that subscribed while it was handed out.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final

from rt.objects import StateDamaged
from rt.query.core.errors import LateSubscription
from rt.query.core.observable import Observable, Observer

if TYPE_CHECKING:
    from rt.query.core.operator import Operator
    from rt.query.core.operator_group import OperatorGroup
    from rt.query.core.runtime import QueryRuntime


class Subject(Observable[Any]):
    """A window or group. `key` is the group's. Its owner calls `on_next` and the others.

    `on_idle` is called when its last subscription was disposed.
    """

    def __init__(self, runtime: QueryRuntime, address: str, key: Any) -> None:
        self.address: Final = address
        self.key: Final = key
        self._runtime = runtime
        self._taps: list[Operator[Any, Any]] = []
        self._is_open = False
        self.on_idle: Callable[[], object] | None = None
        runtime.subjects[address] = self

    @classmethod
    def ended(cls, runtime: QueryRuntime, address: str, key: Any) -> Subject:
        """A window or group that ended before a recovery: nothing can subscribe to it."""
        made = cls(runtime, address, key)
        made.drop()
        return made

    def build(self, group: OperatorGroup, out: Observer[Any]) -> Operator[Any, Any]:
        from rt.query.core.source import SubjectTap

        tap = SubjectTap(self)
        tap.bind(group, out)
        return tap

    @property
    def has_subscribers(self) -> bool:
        """Whether it has subscribers. If not, it never will."""
        return bool(self._taps)

    @contextlib.contextmanager
    def handed_out(self) -> Iterator[None]:
        """It can be subscribed to inside this context."""
        self._is_open = True
        try:
            yield
        finally:
            self._is_open = False

    def attach(self, tap: Operator[Any, Any], *, is_loaded: bool) -> None:
        """Attach a tap.

        `LateSubscription` unless the window or group is being handed out, or the tap was attached when it was
        saved. `StateDamaged` if the tap was attached, but the window or group has ended without it.
        """
        if is_loaded and self._runtime.subjects.get(self.address) is not self:
            raise StateDamaged("the subscribed window or group does not exist", where=self.address)
        if not self._is_open and not is_loaded:
            raise LateSubscription(
                "subscribed to a window or group after it was handed out",
                where=self.address,
                hint="Subscribe to it immediately, as flat_map does.",
            )
        self._taps.append(tap)

    def detach(self, tap: Operator[Any, Any]) -> None:
        if tap in self._taps:
            self._taps.remove(tap)

    def on_tap_disposed(self) -> None:
        """A tap was disposed, not only released from memory."""
        if not self._taps and self.on_idle is not None:
            self.on_idle()

    def on_next(self, value: Any, /) -> None:
        """Send to all subscribers, in the order of their subscriptions."""
        for tap in tuple(self._taps):
            tap.emit(value)

    def on_error(self, error: Exception, /) -> None:
        """Fail, and remove the subject."""
        self._runtime.subjects.pop(self.address, None)
        for tap in tuple(self._taps):
            tap.fail(error)

    def on_completed(self) -> None:
        """Complete, and remove the subject."""
        self._runtime.subjects.pop(self.address, None)
        for tap in tuple(self._taps):
            tap.complete()

    def drop(self) -> None:
        """Remove the subject without notifying anyone."""
        self._runtime.subjects.pop(self.address, None)
