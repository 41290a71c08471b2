"""Observables of reactivex as sources and outputs of an engine. Needs the extra `rx`.

    RxSource(observable)      for `add_source`: the observable's values, numbered; call `pump`
    to_reactivex(output)      an observable of the values of an output edge

A reactivex observable keeps no values. When the process ends, values that are in no checkpoint are lost.
While the process runs, the source keeps unacknowledged values. An output value is acknowledged when the
observer's `on_next` has returned, so the last values may be sent again after a crash.
"""

from __future__ import annotations

import threading
from collections import deque
from operator import methodcaller
from typing import TYPE_CHECKING, Any, Final

from rt.errors import RtError
from rt.query.checkpoint.edge import OutputEdge
from rt.query.core.errors import Backlogged, NotInBuffer, QueryExists
from rt.query.core.reliable import NOTHING, RESUME, ReliableObserver, ReliableSubscription

if TYPE_CHECKING:
    from collections.abc import Callable

    from reactivex import Observable
    from reactivex.abc import DisposableBase, ObserverBase, SchedulerBase


class RxSource:
    """The values that an observable emits after `start`, on any thread. `pump` sends them, on one thread.

    `limit`: the observable's `on_next` raises `Backlogged` if this number of values is not sent yet.
    """

    is_dense: Final = True

    def __init__(self, observable: Observable[Any], *, limit: int = 100_000) -> None:
        self._observable: Final = observable
        self._limit: Final = limit
        self._observer: ReliableObserver[Any] | None = None
        self._disposable: DisposableBase | None = None
        self._lock = threading.Lock()
        """Guards `_kept`, `_low` and `_end`."""
        self._kept: deque[Any] = deque()
        self._low = 0
        self._end: Callable[[ReliableObserver[Any]], None] | None = None
        self._next = 0

    def subscribe(self, observer: ReliableObserver[Any], /) -> RxSource:
        """`QueryExists` if there is an observer."""
        if self._observer is not None:
            raise QueryExists("the source has an observer", hint="Make a source for each observer.")
        self._observer = observer
        return self

    def start(self, sequence_id: int, /) -> None:
        """Subscribe to the observable; its first value gets this id. Later calls rewind to a kept value."""
        if self._disposable is None:
            self._low = self._next = max(0, sequence_id)
            self._disposable = self._observable.subscribe(
                self._append, self._finish, lambda: self._finish(None)
            )
            return
        with self._lock:
            first = self._low if sequence_id == RESUME else sequence_id
            if not self._low <= first <= self._low + len(self._kept):
                raise NotInBuffer("the value is not kept", got=first, expected=f"{self._low} or more")
            self._next = first

    def acknowledge(self, sequence_id: int, /) -> None:
        """Drop the values up to this id."""
        with self._lock:
            while self._kept and self._low <= sequence_id and self._low < self._next:
                self._kept.popleft()
                self._low += 1

    @property
    def end(self) -> int:
        """The id of the next value that the observable emits."""
        with self._lock:
            return self._low + len(self._kept)

    def dispose(self) -> None:
        if self._disposable is not None:
            self._disposable.dispose()

    def pump(self, max_messages: int = 1000, timeout: float = 0.0) -> int:  # noqa: ARG002 - as MessageSource
        """Send up to `max_messages` values. Returns how many were accepted; a refused one is sent again.

        `timeout` is ignored.
        """
        if self._observer is None:
            return 0
        accepted, end = 0, None
        while accepted < max_messages:
            with self._lock:
                index = self._next - self._low
                if index >= len(self._kept):
                    end, self._end = self._end, None
                    break
                value = self._kept[index]
            self._observer.on_next(self._next, value)
            self._next += 1
            accepted += 1
        else:
            return accepted
        if end is not None:
            end(self._observer)
        return accepted

    def _append(self, value: Any) -> None:
        with self._lock:
            if self._low + len(self._kept) - self._next >= self._limit:
                raise Backlogged(
                    "the observable is faster than its queries",
                    got=len(self._kept),
                    hint="Call pump more often.",
                )
            self._kept.append(value)

    def _finish(self, error: Exception | None) -> None:
        with self._lock:
            self._end = methodcaller("on_completed") if error is None else methodcaller("on_error", error)


def to_reactivex(output: OutputEdge, name: str = "reactivex") -> Observable[Any]:
    """The values of `output`, for one subscriber at a time, on the thread that calls `deliver`.

    It completes or fails only if the output was added with `ends_with_query`.

    Continues after the last value that the consumer `name` acknowledged. Disposing the subscription removes
    the consumer.
    """
    try:
        import reactivex
        from reactivex.disposable import Disposable
    except ModuleNotFoundError as error:
        raise RtError("reactivex is not installed", hint="pip install 'rt-transport[rx]'") from error

    def subscribe(observer: ObserverBase[Any], scheduler: SchedulerBase | None = None) -> DisposableBase:  # noqa: ARG001
        forward = _Forward(observer)
        forward.subscription = output.subscribe(forward, name)
        forward.subscription.start(RESUME)
        return Disposable(forward.subscription.dispose)

    return reactivex.create(subscribe)


class _Forward:
    subscription: ReliableSubscription

    def __init__(self, observer: ObserverBase[Any]) -> None:
        self._observer = observer
        self._last = NOTHING

    def on_next(self, sequence_id: int, value: Any, /) -> None:
        self._observer.on_next(value)
        self.subscription.acknowledge(sequence_id)

    def on_error(self, error: Exception, /) -> None:
        self._observer.on_error(error)

    def on_completed(self) -> None:
        self._observer.on_completed()
