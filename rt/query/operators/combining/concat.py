"""Operators that subscribe to one source after the other. The open source is saved as its own row."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import Any, Final

from msgspec import Struct

from rt.query.core.errors import error_text
from rt.query.core.observable import Applied, Observable, Transform
from rt.query.core.operator import Operator
from rt.query.core.scheduler import Duration
from rt.query.operators.user_functions import check_least, check_time, sources_of, time_ns


class Failure(Struct, frozen=True):
    """The stored part of an error: the name of its class, and its text."""

    kind: str
    text: str

    @classmethod
    def of(cls, error: Exception) -> Failure:
        kind, _, text = error_text(error).partition(": ")
        return cls(kind, text)


Handler = Callable[[Failure], Observable[Any]]


def concat(*sources: Observable[Any]) -> Transform:
    """The values of the source. When it completes, those of the first of `sources`, and so on.

    A source of the engine sends only the values that arrive from then on. Saves which source is open.
    """
    sources_of("concat", sources)
    return lambda source: Applied(lambda: Concat((source, *sources)), ())


def catch(handler: Observable[Any] | Handler) -> Transform:
    """The values of the source. When it fails, those of `handler`, or of what `handler(failure)` returns.

    The handler gets what is stored of the error, so that it returns the same after a crash. Saves which
    source is open, and the failure.
    """
    if not isinstance(handler, Observable) and not callable(handler):
        raise TypeError(f"catch: the handler must be an observable or a function, got {handler!r}")
    return lambda source: Applied(lambda: Catch((source, handler)), ())


def retry(retry_count: int | None = None) -> Transform:
    """The values of the source. When it fails, it is subscribed to again.

    `retry_count`: number of subscriptions; None: no limit. A source of the engine sends only the values that
    arrive from then on. Saves the number of subscriptions.
    """
    if retry_count is not None:
        check_least("retry", "retry_count", retry_count, 1)
    return lambda source: Applied(lambda: Retry(source, retry_count), ())


def repeat(repeat_count: int | None = None) -> Transform:
    """The values of the source. When it completes, it is subscribed to again.

    `repeat_count`: number of subscriptions; None: no limit. A source of the engine sends only the values that
    arrive from then on. Saves the number of subscriptions.
    """
    if repeat_count is not None:
        check_least("repeat", "repeat_count", repeat_count, 1)
    return lambda source: Applied(lambda: Repeat(source, repeat_count), ())


def on_error_resume_next(*sources: Observable[Any]) -> Transform:
    """As `concat`, also after a source that fails. Completes after the last. Saves which source is open."""
    sources_of("on_error_resume_next", sources)
    return lambda source: Applied(lambda: OnErrorResumeNext((source, *sources)), ())


def delay_subscription(due: Duration | datetime) -> Transform:
    """The values of the source, subscribed to at a time, or a duration after the start. Saves that time."""
    check_time("delay_subscription", due)
    return lambda source: Applied(lambda: DelaySubscription(source, due), ())


class Chain(Operator[Any, Any]):
    """An operator with one open source. Its key is the number of sources that were opened before it."""

    __slots__ = ()

    def on_start(self) -> None:
        self.open_next()

    def open_next(self, seed: Any = None) -> None:
        self.open_child(str(self._children_made), seed)

    def on_inner_next(self, key: str, value: Any, /) -> None:
        self.emit(value)

    def on_inner_completed(self, key: str, /) -> None:
        self.complete()


class Concat(Chain):
    __slots__ = ("_sources",)
    NAME = "concat"

    def __init__(self, sources: tuple[Observable[Any], ...]) -> None:
        self._sources: Final = sources

    def child(self, key: str, seed: Any, /) -> Observable[Any]:
        return self._sources[int(key)]

    def on_inner_completed(self, key: str, /) -> None:
        if self._children_made < len(self._sources):
            self.open_next()
        else:
            self.complete()


class OnErrorResumeNext(Concat):
    __slots__ = ()
    NAME = "on_error_resume_next"

    def handles_errors(self) -> bool:
        return True

    def on_inner_error(self, key: str, error: Exception, /) -> None:
        self.on_inner_completed(key)


class Catch(Chain):
    """A failure of the first source goes to the second, a failure of the second to the third, and so on."""

    __slots__ = ("_sources",)
    NAME = "catch"

    def __init__(self, sources: tuple[Observable[Any] | Handler, ...]) -> None:
        self._sources: Final = sources

    def child(self, key: str, seed: Any, /) -> Observable[Any]:
        source = self._sources[int(key)]
        return source if isinstance(source, Observable) else source(Failure(*seed))

    def handles_errors(self) -> bool:
        return self._children_made < len(self._sources)

    def on_inner_error(self, key: str, error: Exception, /) -> None:
        if not self.handles_errors():
            self.fail(error)
            return
        try:
            failure = Failure.of(error)
            self.open_next([failure.kind, failure.text])
        except Exception as raised:  # noqa: BLE001 - a user's function
            self.reject(raised)


class Resubscription(Chain):
    """Subscribes to its source up to `times` times; None: no limit."""

    __slots__ = ("_source", "_times")

    def __init__(self, source: Observable[Any], times: int | None = None) -> None:
        self._source: Final = source
        self._times: Final = times

    def child(self, key: str, seed: Any, /) -> Observable[Any]:
        return self._source


class Retry(Resubscription):
    __slots__ = ()
    NAME = "retry"

    def handles_errors(self) -> bool:
        return self._children_made != self._times

    def on_inner_error(self, key: str, error: Exception, /) -> None:
        if not self.handles_errors():
            self.fail(error)
        else:
            self.open_next()


class Repeat(Resubscription):
    __slots__ = ()
    NAME = "repeat"

    def on_inner_completed(self, key: str, /) -> None:
        if self._children_made == self._times:
            self.complete()
        else:
            self.open_next()


class DelaySubscription(Resubscription):
    __slots__ = ("_due",)
    NAME = "delay_subscription"

    def __init__(self, source: Observable[Any], due: Duration | datetime) -> None:
        super().__init__(source)
        self._due: Final = due

    def on_start(self) -> None:
        self.set_timer(time_ns(self._due, self.now_ns))

    def on_timer(self, key: str, /) -> None:
        self.open_next()
