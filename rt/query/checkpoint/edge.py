"""The output edge: where the sequence ids of results start. `input_edge` is its counterpart.

Invariants:
- An output numbers its values, keeps them until they are acknowledged, and sends them to its consumers:
  immediately, or when a checkpoint holds them.
- Consumers are called without the engine's lock: they may be sources of another engine, or of this one. A
  consumer is called by one thread at a time.

Output is exactly-once if a sink accepts each id once. With `release="commit"` this always holds. With
`release="now"`, which does not wait for a checkpoint, it holds under two conditions: the output depends only
on the values of one source (with `time_of` and a `VirtualScheduler`), and the output knows which values its
consumer received before the restart (`OutputEdge.expect`). No query starts or stops until those values were
produced again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Literal

from rt.objects import PersistedQueue
from rt.option_checks import check_count
from rt.query.checkpoint.replay_buffer import ReplayBuffer
from rt.query.core.errors import QueryExists, QueryFailed, WrongState, call_all, error_text
from rt.query.core.lifecycle import EventLock
from rt.query.core.reliable import RESUME, ReliableObserver, ReliableSubscription

Release = Literal["commit", "now"]
End = list[Any]
"""The end of the values, as stored: ["completed"], or ["error", text]."""


class OutputEdge:
    """An observer that numbers the values it receives, and a reliable observable of them.

    With `limit` kept values it `is_full`, and the engine's sources must wait. All values of one event are
    accepted, so it may exceed the limit by that. `encode` turns a query's value into a consumer's. The error
    policy of the query handles its errors. Values are sent only by `deliver`.

    `ends_with_query`: it serves one query at a time, and consumers hear the end of that query. Otherwise it
    has no end, because queries may be started at any time.
    """

    is_dense: Final = True

    def __init__(
        self,
        held: PersistedQueue[Any],
        *,
        lock: EventLock | None = None,
        release: Release = "commit",
        limit: int = 100_000,
        encode: Callable[[Any], Any] | None = None,
        ends_with_query: bool = False,
        saved: dict[str, Any] | None = None,
    ) -> None:
        saved = saved or {"low": 0, "consumers": {}, "end": None}
        self.buffer: Final[ReplayBuffer[Any]] = ReplayBuffer(
            held, low=saved["low"], acknowledged=saved["consumers"]
        )
        self._lock: Final = lock or EventLock()
        self.ended_with: End | None = saved["end"]
        self._durable: tuple[int, End | None] = self.buffer.end, self.ended_with
        """The end of the buffer, and the end of the values, as of the last durable checkpoint."""
        self.release: Final = release
        self.ends_with_query: Final = ends_with_query
        self.limit: Final = check_count(limit, name="limit", least=1)
        self._encode: Final = encode
        self._held_end: int | None = None
        self._seen_end = 0
        self._subscriptions: dict[str, _Subscription] = {}
        self._is_closed = False

    @property
    def end(self) -> int:
        """The id of the next value."""
        return self.buffer.end

    @property
    def is_full(self) -> bool:
        return len(self.buffer) >= self.limit

    def on_next(self, value: Any, /) -> None:
        """Number and keep the value.

        The value is not accepted if this raises `NotSerializable` or an error of `encode`.
        """
        self.buffer.append(value if self._encode is None else self._encode(value))

    def on_error(self, error: Exception, /) -> None:
        """Keep the error as the end. Consumers receive it after all values.

        After a recovery it is a `QueryFailed` with the same text.
        """
        self.ended_with = self.ended_with or ["error", error_text(error)]

    def on_completed(self) -> None:
        """Keep the completion as the end. Consumers receive it after all values."""
        self.ended_with = self.ended_with or ["completed"]

    def reopen(self) -> None:
        """Remove the end: more values will come. A consumer that received the end may start again."""
        self.ended_with = None
        self._durable = self._durable[0], None

    def subscribe(self, observer: ReliableObserver[Any], /, name: str = "") -> ReliableSubscription:
        """Subscribe a consumer. Its name is stored, and its unacknowledged values are kept until disposal.

        Raises `QueryExists` if a consumer with this name is subscribed, `WrongState` after an unload.
        """
        with self._lock:
            self.require_open()
            if name in self._subscriptions:
                hint = "Dispose its subscription first."
                raise QueryExists("a consumer has this name", got=repr(name), hint=hint)
            self.buffer.join(name)
            made = self._subscriptions[name] = _Subscription(self, name, observer, self._lock)
            return made

    def close(self) -> None:
        """End all subscriptions, and accept no more. The values kept for them stay."""
        self._is_closed = True
        for each in self._subscriptions.values():
            each.is_over = True
        self._subscriptions.clear()

    def require_open(self) -> None:
        """`WrongState` after an unload, because nothing would be sent."""
        if self._is_closed:
            hint = "Subscribe to the output of the engine that runs now."
            raise WrongState("the engine of this output was unloaded, or the output dropped", hint=hint)

    def deliver(self) -> bool:
        """Send the values that may be sent to all started consumers. Returns whether any was sent.

        An error of a consumer is raised after all consumers were served. Values that the consumer refused are
        sent again. If another thread is sending to a consumer, this call skips that consumer. Call without
        the engine's lock.
        """
        with self._lock.next():
            subscriptions = list(self._subscriptions.values())
        return call_all(each.send for each in subscriptions)

    def sendable(self, start: int) -> tuple[int, list[Any], End | None]:
        """The first id, from `start` on, that can be sent, all values that may be sent now, and the end if it
        follows them.
        """
        durable, durable_end = self._durable
        if self.release == "commit" or self._held_end is not None:
            end, last = max(durable, self._held_end or 0), durable_end
        else:
            end, last = self.buffer.end, self.ended_with
        if start >= end:
            return start, [], last if end == self.buffer.end else None
        start = max(start, self.buffer.low)  # The consumer may have acknowledged more in an earlier run.
        return start, self.buffer.read(start, end), last if end == self.buffer.end else None

    def save(self) -> dict[str, Any]:
        """The row of the sink, the `saved` argument of the next run. The values are saved by their queue."""
        return {"low": self.buffer.low, "consumers": self.buffer.consumers, "end": self.ended_with}

    def saved(self, end: int, last: End | None = None) -> None:
        """A checkpoint with all ids below `end`, and `last` as the end of the values, is durable."""
        self._durable = max(self._durable[0], end), last if last is self.ended_with else None
        self._held_end = None

    def hold(self) -> None:
        """Send later values only when a checkpoint holds them, even with `release="now"`."""
        if self._held_end is None and self.release == "now":
            self._held_end = self.buffer.end

    def expect(self, end: int) -> None:
        """A consumer received all ids below `end` from an earlier run: they will be produced again."""
        with self._lock:
            self._seen_end = max(self._seen_end, end)

    @property
    def is_replaying(self) -> bool:
        """Whether some values that a consumer received before the restart are not yet produced again.

        Until then no query may start or stop.
        """
        return self.buffer.end < self._seen_end

    def drop(self, name: str) -> None:
        """Remove a consumer and the values kept for it."""
        self._subscriptions.pop(name, None)
        self.buffer.leave(name)


class _Place:
    """The id that is sent next.

    Each `start` makes a new `_Place`, so that sending does not continue at an older one.
    """

    __slots__ = ("has_ended", "next")

    def __init__(self, first: int) -> None:
        self.next = first
        self.has_ended = False


class _Subscription:
    def __init__(self, edge: OutputEdge, name: str, observer: ReliableObserver[Any], lock: EventLock) -> None:
        self._lock = lock
        self._edge = edge
        self._name = name
        self._observer = observer
        self._place: _Place | None = None
        self._is_sending = False
        self.is_over = False
        """Whether it was disposed, possibly by its observer, or the engine was unloaded."""

    def start(self, sequence_id: int, /) -> None:
        with self._lock:
            self._edge.require_open()
            buffer = self._edge.buffer
            start = buffer.resume(self._name) if sequence_id == RESUME else sequence_id
            buffer.check_start(start)
            self._place = _Place(start)

    def acknowledge(self, sequence_id: int, /) -> None:
        with self._lock:
            if not self.is_over:
                self._edge.buffer.acknowledge(self._name, sequence_id)

    def dispose(self) -> None:
        with self._lock:
            if not self.is_over:
                self.is_over = True
                self._edge.drop(self._name)

    def send(self) -> bool:
        """Send the values and the end, if they may be sent. Returns whether anything was sent."""
        with self._lock.next():
            place = self._place
            if place is None or place.has_ended or self._is_sending or self.is_over:
                return False
            place.next, values, last = self._edge.sendable(place.next)
            if not values and last is None:
                return False
            self._is_sending = True
        try:
            return self._send(place, values, last)
        finally:
            self._is_sending = False

    def _send(self, place: _Place, values: list[Any], last: End | None) -> bool:
        sent = False
        for value in values:
            if self._place is not place or self.is_over:
                return sent
            self._observer.on_next(place.next, value)
            place.next += 1
            sent = True
        if last is None or self._place is not place or self.is_over:
            return sent
        match last:
            case ["error", text]:
                self._observer.on_error(QueryFailed(text))
            case _:
                self._observer.on_completed()
        place.has_ended = True
        return True


class QueryOutput:
    """Receives the values and the end of a query. `count`: number of values in this run of the engine."""

    __slots__ = ("_on_end", "_sink", "count")

    def __init__(self, sink: OutputEdge | None, on_end: Callable[[Exception | None], object]) -> None:
        self._sink = sink
        self._on_end = on_end
        self.count = 0

    def on_next(self, value: Any, /) -> None:
        if self._sink is not None:
            self._sink.on_next(value)
        self.count += 1

    def on_error(self, error: Exception, /) -> None:
        self._on_end(error)

    def on_completed(self) -> None:
        self._on_end(None)
