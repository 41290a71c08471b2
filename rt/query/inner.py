"""Windows and groups: observables that an operator hands out as values.

An inner has an address that is the same in every run, so that a subscription to it can be saved. It sends to
whoever subscribed while it was handed out, and to nobody who comes later.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final

from rt.query.errors import LateSubscription
from rt.query.observing import Observable, Observer

if TYPE_CHECKING:
    from rt.query.artifact import Artifact
    from rt.query.host import Host
    from rt.query.operator import Operator


class Inner(Observable[Any]):
    """One window or group. `key` is a group's. Its owner calls `on_next` and the others.

    `on_idle` is called when the last subscription to it was given up.
    """

    def __init__(self, host: Host, address: str, key: Any) -> None:
        self.address: Final = address
        self.key: Final = key
        self._host = host
        self._taps: list[Operator[Any, Any]] = []
        self._is_open = False
        self.on_idle: Callable[[], object] | None = None
        host.inners[address] = self

    def build(self, artifact: Artifact, out: Observer[Any]) -> Operator[Any, Any]:
        """A tap on it."""
        from rt.query.taps import InnerTap

        tap = InnerTap(self)
        tap.bind(artifact, out)
        return tap

    @property
    def has_subscribers(self) -> bool:
        """Whether anybody listens; if not, nobody ever will."""
        return bool(self._taps)

    @contextlib.contextmanager
    def handed_out(self) -> Iterator[None]:
        """While it may be subscribed to."""
        self._is_open = True
        try:
            yield
        finally:
            self._is_open = False

    def attach(self, tap: Operator[Any, Any], *, is_loaded: bool) -> None:
        """`LateSubscription` unless it is being handed out, or the tap was attached when it was saved."""
        if not self._is_open and not is_loaded:
            raise LateSubscription(
                "a window or group must be subscribed to while it is handed out",
                where=self.address,
                hint="Subscribe to it at once, as select_many does.",
            )
        self._taps.append(tap)

    def detach(self, tap: Operator[Any, Any]) -> None:
        """The tap was disposed."""
        if tap in self._taps:
            self._taps.remove(tap)

    def given_up(self) -> None:
        """A tap was disposed, and not only let go of."""
        if not self._taps and self.on_idle is not None:
            self.on_idle()

    def on_next(self, value: Any, /) -> None:
        """To everybody who listens, in the order in which they came."""
        for tap in tuple(self._taps):
            tap.emit(value)

    def on_error(self, error: Exception, /) -> None:
        """It failed, and is gone."""
        self._host.inners.pop(self.address, None)
        for tap in tuple(self._taps):
            tap.fail(error)

    def on_completed(self) -> None:
        """It has ended, and is gone."""
        self._host.inners.pop(self.address, None)
        for tap in tuple(self._taps):
            tap.complete()

    def drop(self) -> None:
        """Nobody wanted it."""
        self._host.inners.pop(self.address, None)
