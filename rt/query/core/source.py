"""How values enter a query: from a feed of its engine, or from a window or group of an operator."""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, Literal

from rt.query.core.observable import Observable, Observer
from rt.query.core.operator import Operator
from rt.query.core.reliable import NOTHING

if TYPE_CHECKING:
    from rt.query.core.operator_group import OperatorGroup
    from rt.query.core.subject import Subject


class SubjectTap(Operator[Any, Any]):
    """A subscription to a window or group."""

    __slots__ = ("_inner", "_is_loaded")
    NAME = "inner"

    def __init__(self, inner: Subject) -> None:
        self._inner: Final = inner
        self._is_loaded = False

    def load_state(self, state: Any, version: int, /) -> None:  # noqa: ARG002
        """Saved state means: it was attached."""
        self._is_loaded = True

    def on_connect(self) -> None:
        self._inner.attach(self, is_loaded=self._is_loaded)

    def on_dispose(self) -> None:
        self._inner.detach(self)

    def dispose(self) -> None:
        """End, and notify the owner."""
        if not self.is_disposed:
            super().dispose()
            self._inner.on_tap_disposed()


class Source(Observable[Any]):
    """The values of the engine's feed `name` that arrive after the query started."""

    def __init__(self, name: str) -> None:
        self.name: Final = name

    def build(self, group: OperatorGroup, out: Observer[Any]) -> Operator[Any, Any]:
        group.runtime.feed(self.name)  # Raises if there is none.
        tap = SourceTap(self.name)
        tap.bind(group, out)
        return tap


class SourceTap(Operator[Any, Any]):
    """A subscription to a feed: receives the values after the watermark `after`.

    `order` is its place among the taps of the feed; None until it is attached.
    """

    __slots__ = ("_name", "after", "order")
    NAME = "source"
    SAVED = ("after", "order")

    def __init__(self, name: str) -> None:
        self._name: Final = name
        self.after = NOTHING
        self.order: int | None = None

    def on_connect(self) -> None:
        self._group.runtime.feed(self._name).attach(self)

    def on_start(self) -> None:
        """Set the watermark. If the feed has ended, end at the next timer."""
        self.after = self._group.start_watermark(self._name)
        if self._group.runtime.feed(self._name).has_ended:
            self.set_timer(self.now_ns)

    def on_timer(self, key: str, /) -> None:  # noqa: ARG002
        self.end()

    def end(self) -> None:
        """Fail or complete, as the feed did."""
        end = self._group.runtime.feed(self._name).end
        if isinstance(end, Exception):
            self.fail(end)
        else:
            self.complete()

    def on_dispose(self) -> None:
        self._group.runtime.feed(self._name).detach(self)

    def load_state(self, state: Any, version: int, /) -> None:
        super().load_state(state, version)
        self._group.runtime.feed(self._name).reserve(self.order)


class ValueFeed:
    """The values of one source, sent to the taps of all queries in the order in which these started.

    The order is saved, because a query may start or end others, and a recovery attaches taps in another
    order.
    """

    def __init__(self, name: str) -> None:
        self.name: Final = name
        self.watermark = NOTHING
        """The id of the last value that every query processed."""
        self.end: Exception | Literal["completed"] | None = None
        self._taps: dict[int, SourceTap] = {}
        self._in_order: tuple[SourceTap, ...] | None = ()
        self._next_order = 0

    @property
    def has_ended(self) -> bool:
        return self.end is not None

    def attach(self, tap: SourceTap) -> None:
        """Send values to the tap: after all others, or at its saved place."""
        if tap.order is None:
            tap.order = self._next_order
            self._next_order += 1
        self._taps[id(tap)] = tap
        self._in_order = None

    def reserve(self, order: int | None) -> None:
        """Place new taps after this saved place."""
        if order is not None:
            self._next_order = max(self._next_order, order + 1)

    def detach(self, tap: SourceTap) -> None:
        """Does nothing if the tap is not attached."""
        if self._taps.pop(id(tap), None) is not None:
            self._in_order = None

    def on_next(self, sequence_id: int, value: Any, /) -> None:
        """Let every query process the value."""
        for tap in self._all():
            if sequence_id > tap.after and not tap.is_disposed:
                try:
                    tap._out.on_next(value)
                except Exception as error:  # noqa: BLE001 - any error of a query ends only that query
                    tap._group.crash(error)
        self.watermark = sequence_id

    def on_error(self, error: Exception, /) -> None:
        """Fail every present and later tap."""
        self._finish(error)

    def on_completed(self) -> None:
        """Complete every present and later tap."""
        self._finish("completed")

    def _finish(self, end: Exception | Literal["completed"]) -> None:
        self.end = end
        for tap in self._all():
            tap._group.guard(tap.end)

    def _all(self) -> tuple[SourceTap, ...]:
        if self._in_order is None:
            self._in_order = tuple(sorted(self._taps.values(), key=attrgetter("order")))
        return self._in_order
