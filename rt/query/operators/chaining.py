"""Operators that subscribe to one source behind the other: each is a row of its own while it is open."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from rt.query.errors import QueryFailed
from rt.query.observing import Applied, Observable, Transform
from rt.query.operator import Operator
from rt.query.operators.asking import check_time, sources_of, time_ns
from rt.query.scheduling import Duration


@dataclass(frozen=True, slots=True)
class Failure:
    """What is kept of an error: the name of its class, and its text."""

    kind: str
    text: str

    @classmethod
    def of(cls, error: Exception) -> Failure:
        """What is kept of `error`: the same after a crash, when a source tells what it remembers of it."""
        if isinstance(error, QueryFailed):
            kind, _, text = error.what.partition(": ")
            return cls(kind, text)
        return cls(type(error).__name__, str(error))


Handler = Callable[[Failure], Observable[Any]]


def concat(*sources: Observable[Any]) -> Transform:
    """The values of this; when it completes, those of the first of `sources`, and so on.

    Of a source of the engine, what comes from then on. Saves which one is open.
    """
    sources_of("concat", sources)
    return lambda source: chained((source, *sources))


def catch(handler: Observable[Any] | Handler) -> Transform:
    """The values of this; when it fails, those of `handler`, or of what it answers to the failure.

    A handler is told what can be kept of an error, so that it answers the same after a crash. Saves which is
    open, and the failure.
    """
    if not isinstance(handler, Observable) and not callable(handler):
        raise TypeError(f"catch({handler!r}): it is neither an observable nor a function")
    return lambda source: caught((source, handler))


def retry(retry_count: int | None = None) -> Transform:
    """The values of this, which is subscribed to anew when it fails.

    `retry_count` times in all, or always. Of a source of the engine, what comes
    from then on. Saves how often it was tried.
    """
    if retry_count is not None and retry_count < 1:
        raise ValueError(f"retry({retry_count})")
    return lambda source: Applied(lambda: Retry(source, retry_count), ())


def repeat(repeat_count: int | None = None) -> Transform:
    """The values of this, which is subscribed to anew when it completes.

    `repeat_count` times in all, or always. Of a source of the engine, what comes
    from then on. Saves how often it was subscribed to.
    """
    if repeat_count is not None and repeat_count < 1:
        raise ValueError(f"repeat({repeat_count})")
    return lambda source: Applied(lambda: Repeat(source, repeat_count), ())


def delay_subscription(due: Duration | datetime) -> Transform:
    """The values of this, subscribed to at a time, or a duration from the start. Saves when that is."""
    check_time("delay_subscription", due)
    return lambda source: Applied(lambda: DelaySubscription(source, due), ())


def chained(sources: tuple[Observable[Any], ...]) -> Observable[Any]:
    """See `concat`."""
    return Applied(lambda: Concat(sources), ())


def caught(sources: tuple[Observable[Any] | Handler, ...]) -> Observable[Any]:
    """See `catch`; a second failure goes to a second handler, and so on."""
    return Applied(lambda: Catch(sources), ())


class Chain(Operator[Any, Any]):
    """An operator with one source open at a time. The key of each says how many were before."""

    __slots__ = ()

    def on_start(self) -> None:
        """With the first."""
        self.open_next()

    def open_next(self, seed: Any = None) -> None:
        """Subscribe to the next."""
        self.open_child(str(self._children_made), seed)

    def on_inner_next(self, key: str, value: Any, /) -> None:  # noqa: ARG002
        """Send it on."""
        self.emit(value)

    def on_inner_completed(self, key: str, /) -> None:  # noqa: ARG002
        """End."""
        self.complete()


class Concat(Chain):
    """See `concat`."""

    __slots__ = ("_sources",)

    NAME = "concat"

    def __init__(self, sources: tuple[Observable[Any], ...]) -> None:
        self._sources: Final = sources

    def child(self, key: str, seed: Any, /) -> Observable[Any]:  # noqa: ARG002
        """One after the other."""
        return self._sources[int(key)]

    def on_inner_completed(self, key: str, /) -> None:  # noqa: ARG002
        """On to the next one."""
        if self._children_made < len(self._sources):
            self.open_next()
        else:
            self.complete()


class Catch(Chain):
    """See `catch`."""

    __slots__ = ("_sources",)

    NAME = "catch"

    def __init__(self, sources: tuple[Observable[Any] | Handler, ...]) -> None:
        self._sources: Final = sources

    def child(self, key: str, seed: Any, /) -> Observable[Any]:
        """The source, or what handles its failure."""
        source = self._sources[int(key)]
        return source if isinstance(source, Observable) else source(Failure(*seed))

    def on_inner_error(self, key: str, error: Exception, /) -> None:  # noqa: ARG002
        """On to the next one."""
        if self._children_made == len(self._sources):
            self.fail(error)
            return
        try:
            failure = Failure.of(error)
            self.open_next([failure.kind, failure.text])
        except Exception as raised:  # noqa: BLE001 - a function of the user's
            self.fail(raised)


class Retry(Chain):
    """See `retry`."""

    __slots__ = ("_source", "_times")

    NAME = "retry"

    def __init__(self, source: Observable[Any], times: int | None) -> None:
        self._source: Final = source
        self._times: Final = times

    def child(self, key: str, seed: Any, /) -> Observable[Any]:  # noqa: ARG002
        """Always the same."""
        return self._source

    def on_inner_error(self, key: str, error: Exception, /) -> None:  # noqa: ARG002
        """Once more, or not."""
        if self._children_made == self._times:
            self.fail(error)
        else:
            self.open_next()


class Repeat(Chain):
    """See `repeat`."""

    __slots__ = ("_source", "_times")

    NAME = "repeat"

    def __init__(self, source: Observable[Any], times: int | None) -> None:
        self._source: Final = source
        self._times: Final = times

    def child(self, key: str, seed: Any, /) -> Observable[Any]:  # noqa: ARG002
        """Always the same."""
        return self._source

    def on_inner_completed(self, key: str, /) -> None:  # noqa: ARG002
        """Once more, or not."""
        if self._children_made == self._times:
            self.complete()
        else:
            self.open_next()


class DelaySubscription(Chain):
    """See `delay_subscription`."""

    __slots__ = ("_due", "_source")

    NAME = "delay_subscription"

    def __init__(self, source: Observable[Any], due: Duration | datetime) -> None:
        self._source: Final = source
        self._due: Final = due

    def child(self, key: str, seed: Any, /) -> Observable[Any]:  # noqa: ARG002
        """The only one."""
        return self._source

    def on_start(self) -> None:
        """Later."""
        self.set_timer(time_ns(self._due, self.now_ns))

    def on_timer(self, key: str, /) -> None:  # noqa: ARG002
        """Now."""
        self.open_next()
