"""The edges of queries: sequence ids end at inputs and start again at outputs.

Invariants:
- The watermark of an input is the id of the last value that every query processed completely. It is saved
  with the queries, so after a recovery exactly the unprocessed values come again. Values up to it are
  dropped.
- An output numbers its values, keeps them until they are acknowledged, and sends them to its consumers: at
  once, or when a checkpoint holds them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Final, Literal, TypeVar

from rt.errors import InvalidOption
from rt.objects import PersistedQueue
from rt.query.checkpoint.replay_buffer import ReplayBuffer
from rt.query.core.errors import Backlogged, QueryExists, QueryFailed, SequenceGap, error_text
from rt.query.core.lifecycle import EventLock
from rt.query.core.reliable import NOTHING, RESUME, ReliableObservable, ReliableObserver, ReliableSubscription
from rt.query.core.source import ValueFeed

logger = logging.getLogger("rt.query")

T = TypeVar("T")

Release = Literal["commit", "now"]
OnGap = Callable[[SequenceGap], object]


def call_all(calls: Iterable[Callable[[], T]]) -> bool:
    """Call all, also if some raise; then raise the first error. Returns whether a call returned true."""
    errors: list[Exception] = []
    found = False
    for call in calls:
        try:
            found = bool(call()) or found
        except Exception as error:  # noqa: BLE001 - raised below
            errors.append(error)
    errors.sort(key=lambda error: isinstance(error, Backlogged))  # Other errors are more important.
    for other in errors[1:]:
        logger.error("also_failed error=%r", other)
    if errors:
        raise errors[0]
    return found


class InputEdge:
    """A reliable observer that feeds queries with the values of a source.

    - `before(value)` is called before a value is processed, and may refuse it by raising.
    - `on_gap` is called if a dense source left out ids; the edge then continues after the gap. Without it
      `SequenceGap` is raised to the source, and the value is not accepted.
    - `accepts_any_first`: the first id of the source may be any id.
    """

    def __init__(
        self,
        source: ReliableObservable[Any],
        feed: ValueFeed,
        *,
        lock: EventLock | None = None,
        before: Callable[[Any], object] | None = None,
        on_gap: OnGap | None = None,
        accepts_any_first: bool = False,
    ) -> None:
        self.feed: Final = feed
        self._accepts_any_first: Final = accepts_any_first
        self._lock: Final = lock or EventLock()
        self._before = before
        self._on_gap = on_gap
        self._is_dense = source.is_dense
        self._subscription: ReliableSubscription = source.subscribe(self)
        self._is_started = False
        self.is_stopped = False
        """Whether the edge accepts no more values."""
        self._is_released = False

    def start(self) -> None:
        """Request the values after the watermark. Does nothing if the source has ended."""
        if not self.is_stopped and not self.feed.has_ended:
            self._is_started = True
            self._subscription.start(self.feed.watermark + 1)

    def on_next(self, sequence_id: int, value: Any, /) -> None:
        """Let every query process the value. On return the watermark is its id."""
        with self._lock:
            if self._lock.is_interrupted:
                self._lock.require_intact()
            self._handle(sequence_id, value)

    def _handle(self, sequence_id: int, value: Any) -> None:
        watermark = self.feed.watermark
        if self.is_stopped or sequence_id <= watermark:
            return
        gap = None
        is_first = watermark == NOTHING and self._accepts_any_first
        if self._is_dense and sequence_id != watermark + 1 and not is_first:
            gap = SequenceGap(self.feed.name, watermark + 1, sequence_id)
            if self._on_gap is None:
                raise gap
        if self._before is not None:
            self._before(value)
        if gap is not None and self._on_gap is not None:
            logger.warning("gap source=%s start=%d end=%d", self.feed.name, gap.start, gap.end)
            self._on_gap(gap)
        try:
            self.feed.on_next(sequence_id, value)
        except BaseException:
            self._lock.is_interrupted = True
            raise

    def on_error(self, error: Exception, /) -> None:
        """Fail every query that reads the source. The source is released when that is durable."""
        self._end(partial(self.feed.on_error, error))

    def on_completed(self) -> None:
        """Complete the source for every query. It is released when that is durable."""
        self._end(self.feed.on_completed)

    def _end(self, notify: Callable[[], None]) -> None:
        with self._lock:
            self._lock.require_intact()
            if not self.is_stopped:
                self.is_stopped = True
                notify()

    def save(self) -> dict[str, Any]:
        end = self.feed.end
        stored = ["error", error_text(end)] if isinstance(end, Exception) else end and [end]
        return {"watermark": self.feed.watermark, "end": stored}

    def saved(self, watermark: int, *, has_ended: bool) -> None:
        """Acknowledge the watermark of a durable checkpoint.

        `has_ended`: the edge was stopped before the checkpoint, so release the source.
        """
        if not self._is_started or self._is_released:
            return
        self._subscription.acknowledge(watermark)
        if has_ended:
            self._release()

    def unload(self) -> None:
        """Accept no more values, and release the source without acknowledging."""
        self.is_stopped = True
        self._release()

    def _release(self) -> None:
        if not self._is_released:
            self._is_released = True
            self._subscription.dispose()


class OutputEdge:
    """An observer that numbers the values it receives, and a reliable observable of them.

    With `limit` kept values it `is_full`, and the engine's sources must wait. All values of one event are
    accepted, so it may exceed the limit by that. `encode` turns a query's value into a consumer's; an error
    of it ends the query. Values are sent only by `deliver`.
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
        saved: dict[str, Any] | None = None,
    ) -> None:
        if limit < 1:
            raise InvalidOption(f"the limit of an output must be 1 or more, got {limit}")
        saved = saved or {"low": 0, "consumers": {}, "end": None}
        self.buffer: Final[ReplayBuffer[Any]] = ReplayBuffer(
            held, low=saved["low"], acknowledged=saved["consumers"]
        )
        self._lock: Final = lock or EventLock()
        self._end: list[Any] | None = saved["end"]
        self.release: Final = release
        self._limit: Final = limit
        self._encode: Final = encode
        self._durable_end = self.buffer.end
        self._held_end: int | None = None
        self._seen_end = 0
        self._subscriptions: dict[str, _Subscription] = {}

    @property
    def is_full(self) -> bool:
        return len(self.buffer) >= self._limit

    def on_next(self, value: Any, /) -> None:
        """Number and keep the value.

        Not accepted if this raises: `NotSerializable`, or an error of `encode`.
        """
        self.buffer.append(value if self._encode is None else self._encode(value))

    def on_error(self, error: Exception, /) -> None:
        """Sent to consumers after all values. After a recovery it is a `QueryFailed` with the same text."""
        self._end = self._end or ["error", error_text(error)]

    def on_completed(self) -> None:
        """Sent to consumers after all values."""
        self._end = self._end or ["completed"]

    def subscribe(self, observer: ReliableObserver[Any], /, name: str = "") -> ReliableSubscription:
        """Subscribe a consumer. Its name is stored, and unacknowledged values are kept until it is disposed.

        Raises `QueryExists` if a consumer with this name is subscribed.
        """
        with self._lock:
            if name in self._subscriptions:
                hint = "Dispose its subscription first."
                raise QueryExists("a consumer has this name", got=repr(name), hint=hint)
            self.buffer.join(name)
            made = self._subscriptions[name] = _Subscription(self, name, observer, self._lock)
            return made

    def detach(self) -> None:
        """Remove all subscriptions. The values kept for them stay."""
        self._subscriptions.clear()

    def deliver(self) -> bool:
        """Send the values that may be sent to all started consumers. Returns whether any was sent.

        An error of a consumer is raised after all were served. Values that it refused are sent again.
        """
        end = self._durable_end if self.release == "commit" else self._immediate_end()
        last = self._end if end == self.buffer.end else None
        return call_all(partial(each.send, end, last) for each in list(self._subscriptions.values()))

    def save(self) -> dict[str, Any]:
        """The row of the sink, the `saved` argument of the next run. The values are saved by their queue."""
        return {"low": self.buffer.low, "consumers": self.buffer.consumers, "end": self._end}

    def saved(self, end: int) -> None:
        """A checkpoint with all ids below `end` is durable."""
        self._durable_end = max(self._durable_end, end)
        self._held_end = None

    def hold(self) -> None:
        """Send later values only when a checkpoint holds them, whatever `release` says."""
        if self._held_end is None:
            self._held_end = self.buffer.end

    def expect(self, end: int) -> None:
        """A consumer received all ids below `end` from an earlier run: they will be produced again."""
        with self._lock:
            self._seen_end = max(self._seen_end, end)

    @property
    def is_replaying(self) -> bool:
        """Whether values that a consumer received are still to be produced again.

        No query may start or stop then.
        """
        return self.buffer.end < self._seen_end

    def _immediate_end(self) -> int:
        return self.buffer.end if self._held_end is None else max(self._held_end, self._durable_end)

    def drop(self, name: str) -> None:
        """Remove a consumer and the values kept for it."""
        self._subscriptions.pop(name, None)
        self.buffer.leave(name)


class _Subscription:
    def __init__(self, edge: OutputEdge, name: str, observer: ReliableObserver[Any], lock: EventLock) -> None:
        self._lock = lock
        self._edge = edge
        self._name = name
        self._observer = observer
        self._next: int | None = None
        self._has_ended = False
        self._is_disposed = False

    def start(self, sequence_id: int, /) -> None:
        with self._lock:
            buffer = self._edge.buffer
            start = buffer.resume(self._name) if sequence_id == RESUME else sequence_id
            buffer.check_start(start)
            self._next = start

    def acknowledge(self, sequence_id: int, /) -> None:
        with self._lock:
            if not self._is_disposed:
                self._edge.buffer.acknowledge(self._name, sequence_id)

    def dispose(self) -> None:
        with self._lock:
            if not self._is_disposed:
                self._is_disposed = True
                self._edge.drop(self._name)

    def _is_over(self) -> bool:
        """Whether it was disposed, possibly by `on_next` of its observer."""
        return self._is_disposed

    def send(self, end: int, last: list[Any] | None) -> bool:
        if self._next is None or self._has_ended or self._is_over():
            return False
        sent = False
        if self._next < end:
            # The consumer may have acknowledged more values in an earlier run.
            self._next = max(self._next, self._edge.buffer.low)
            for value in self._edge.buffer.read(self._next, end):
                self._observer.on_next(self._next, value)
                self._next += 1
                sent = True
                if self._is_over():
                    return True
        if last is not None and self._next >= end:
            match last:
                case ["error", text]:
                    self._observer.on_error(QueryFailed(text))
                case _:
                    self._observer.on_completed()
            self._has_ended = True
            return True
        return sent
