"""Observables of reactivex in and out of an engine; needs the extra rx.

    RxSource(observable)      for `add_source`: what an observable emits, numbered; `pump` it
    to_reactivex(output)      an observable of what an output edge sends

An observable of reactivex keeps nothing: what it emitted and no checkpoint holds is lost with the process.
Within a process a source keeps what is not acknowledged. What goes out is acknowledged when the observer's
`on_next` has returned, so that after a crash its last values may come again.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING, Any, Final

from rt.errors import RtError
from rt.query.edges import OutputEdge
from rt.query.errors import Backlogged, NotInBuffer, QueryExists
from rt.query.reliable import NOTHING, RESUME, ReliableObserver, ReliableSubscription

if TYPE_CHECKING:
    from collections.abc import Callable

    from reactivex import Observable
    from reactivex.abc import DisposableBase, ObserverBase, SchedulerBase


class RxSource:
    """What an observable emits from `start` on, from any thread; handed on by `pump`, in one.

    `limit`: with so many values that were not handed on, the observable's `on_next` raises `Backlogged`.
    """

    is_dense: Final = True

    def __init__(self, observable: Observable[Any], *, limit: int = 100_000) -> None:
        self._observable: Final = observable
        self._limit: Final = limit
        self._observer: ReliableObserver[Any] | None = None
        self._disposable: DisposableBase | None = None
        self._lock = threading.Lock()
        """Guards the three below."""
        self._kept: deque[Any] = deque()
        self._low = 0
        self._end: Callable[[ReliableObserver[Any]], None] | None = None
        self._next = 0

    def subscribe(self, observer: ReliableObserver[Any], /) -> RxSource:
        """`QueryExists` for a second one."""
        if self._observer is not None:
            raise QueryExists("the source has an observer", hint="Make another source for each.")
        self._observer = observer
        return self

    def start(self, sequence_id: int, /) -> None:
        """Subscribe to the observable; its first value gets that id. Again: from what is kept."""
        if self._disposable is None:
            self._low = self._next = max(0, sequence_id)
            self._disposable = self._observable.subscribe(
                self._take, self._finish, lambda: self._finish(None)
            )
            return
        with self._lock:
            wanted = self._low if sequence_id == RESUME else sequence_id
            if not self._low <= wanted <= self._low + len(self._kept):
                raise NotInBuffer("an observable keeps nothing", got=wanted, wanted=f"{self._low} or more")
            self._next = wanted

    def acknowledge(self, sequence_id: int, /) -> None:
        """Forget the values up to that id."""
        with self._lock:
            while self._kept and self._low <= sequence_id and self._low < self._next:
                self._kept.popleft()
                self._low += 1

    def dispose(self) -> None:
        """Unsubscribe."""
        if self._disposable is not None:
            self._disposable.dispose()

    def pump(self, max_messages: int = 1000, timeout: float = 0.0) -> int:  # noqa: ARG002 - as MessageSource
        """Hand on what came, up to so many values; how many. What was not taken comes again."""
        if self._observer is None:
            return 0
        taken, end = 0, None
        while taken < max_messages:
            with self._lock:
                index = self._next - self._low
                if index >= len(self._kept):
                    end, self._end = self._end, None
                    break
                value = self._kept[index]
            self._observer.on_next(self._next, value)
            self._next += 1
            taken += 1
        else:
            return taken
        if end is not None:
            end(self._observer)
        return taken

    def _take(self, value: Any) -> None:
        with self._lock:
            if self._low + len(self._kept) - self._next >= self._limit:
                raise Backlogged("an observable is faster than its queries", got=len(self._kept))
            self._kept.append(value)

    def _finish(self, error: Exception | None) -> None:
        with self._lock:
            if error is None:
                self._end = lambda observer: observer.on_completed()
            else:
                self._end = lambda observer: observer.on_error(error)


def to_reactivex(output: OutputEdge, name: str = "reactivex") -> Observable[Any]:
    """What `output` sends, to one subscriber at a time, in the thread that calls `deliver`.

    It goes on behind what the consumer called `name` acknowledged. Disposing of the subscription gives that
    place up.
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
