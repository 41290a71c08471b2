"""Where values enter a query: from a feed of its engine, or from a window or group of an operator."""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, Literal

from rt.query.observing import Observable, Observer
from rt.query.operator import Operator
from rt.query.reliable import NOTHING

if TYPE_CHECKING:
    from rt.query.artifact import Artifact
    from rt.query.inner import Inner


class InnerTap(Operator[Any, Any]):
    """A subscription to a window or group."""

    __slots__ = ("_inner", "_is_loaded")

    NAME = "inner"

    def __init__(self, inner: Inner) -> None:
        self._inner: Final = inner
        self._is_loaded = False

    def load_state(self, state: Any, version: int, /) -> None:  # noqa: ARG002
        """It was attached when it was saved."""
        self._is_loaded = True

    def on_connect(self) -> None:
        """Attach."""
        self._inner.attach(self, is_loaded=self._is_loaded)

    def on_dispose(self) -> None:
        """Detach."""
        self._inner.detach(self)

    def dispose(self) -> None:
        """End, and let the owner know."""
        if not self._is_disposed:
            super().dispose()
            self._inner.given_up()


class Source(Observable[Any]):
    """The feed of that name, of whatever engine the query runs in: what comes after the query began."""

    def __init__(self, name: str) -> None:
        self.name: Final = name

    def build(self, artifact: Artifact, out: Observer[Any]) -> Operator[Any, Any]:
        """A tap on it."""
        artifact.host.feed(self.name)  # Or it is not there.
        tap = SourceTap(self.name)
        tap.bind(artifact, out)
        return tap


class SourceTap(Operator[Any, Any]):
    """A subscription to a feed: takes what lies behind `after`, the watermark at which it began.

    `order` is its place among the taps of the feed; None until it is attached for the first time.
    """

    __slots__ = ("_name", "after", "order")

    NAME = "source"

    def __init__(self, name: str) -> None:
        self._name: Final = name
        self.after = NOTHING
        self.order: int | None = None

    def on_connect(self) -> None:
        """Attach."""
        self._artifact.host.feed(self._name).attach(self)

    def on_start(self) -> None:
        """Begin behind what the query was begun behind; if the feed has ended, end as soon as time runs."""
        self.after = self._artifact.begun_after(self._name)
        if self._artifact.host.feed(self._name).has_ended:
            self.set_timer(self.now_ns)

    def on_timer(self, key: str, /) -> None:  # noqa: ARG002
        """See `on_start`."""
        end = self._artifact.host.feed(self._name).end
        if isinstance(end, Exception):
            self.fail(end)
        else:
            self.complete()

    def on_dispose(self) -> None:
        """Detach."""
        self._artifact.host.feed(self._name).detach(self)

    def save_state(self) -> list[Any]:
        """The watermark, and the place."""
        return [self.after, self.order]

    def load_state(self, state: Any, version: int, /) -> None:  # noqa: ARG002
        """The same."""
        self.after, self.order = state
        self._artifact.host.feed(self._name).reserve(self.order)

    def crash(self, error: Exception) -> None:
        """Something escaped the query."""
        self._artifact.crash(error)

    def end(self, error: Exception | None) -> None:
        """The feed failed, or has ended."""
        if error is None:
            self._artifact.guard(self.complete)
        else:
            self._artifact.guard(self.fail, error)


class Feed:
    """The values of one source, to every tap of the queries, in the order in which these began.

    That order is saved: who hears of a value first may end or begin others, and a recovery attaches in
    another order.
    """

    def __init__(self, name: str) -> None:
        self.name: Final = name
        self.watermark = NOTHING
        """The id of the last value that every query has processed."""
        self.end: Exception | Literal["completed"] | None = None
        """How it ended."""
        self._taps: dict[int, SourceTap] = {}
        self._in_order: tuple[SourceTap, ...] | None = ()
        self._next_order = 0

    @property
    def has_ended(self) -> bool:
        """Whether nothing comes any more."""
        return self.end is not None

    def attach(self, tap: SourceTap) -> None:
        """Have it hear what comes: behind all others, or in the place that it had."""
        if tap.order is None:
            tap.order = self._next_order
            self._next_order += 1
        self._taps[id(tap)] = tap
        self._in_order = None

    def reserve(self, order: int | None) -> None:
        """Give new taps places behind that one, which was saved."""
        if order is not None:
            self._next_order = max(self._next_order, order + 1)

    def detach(self, tap: SourceTap) -> None:
        """Nothing if it is not attached."""
        if self._taps.pop(id(tap), None) is not None:
            self._in_order = None

    def on_next(self, sequence_id: int, value: Any, /) -> None:
        """Have every query process a value."""
        for tap in self._all():
            if sequence_id > tap.after and not tap._is_disposed:
                try:
                    tap._out.on_next(value)
                except Exception as error:  # noqa: BLE001 - whatever a query raises ends that query only
                    tap.crash(error)
        self.watermark = sequence_id

    def on_error(self, error: Exception, /) -> None:
        """Fail every tap, now and later."""
        self.end = error
        for tap in self._all():
            tap.end(error)

    def on_completed(self) -> None:
        """End every tap, now and later."""
        self.end = "completed"
        for tap in self._all():
            tap.end(None)

    def _all(self) -> tuple[SourceTap, ...]:
        if self._in_order is None:
            self._in_order = tuple(sorted(self._taps.values(), key=attrgetter("order")))
        return self._in_order
