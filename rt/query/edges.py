"""The edges of queries: where ids end, and where they begin again.

Laws. The watermark of an input edge is the id of the last value that every query has processed whole; it is
saved with the queries, so that what comes again behind a recovery is just what they have not seen. Ids up to
it are dropped. An output edge gives ids to what it is sent, keeps it until it is acknowledged, and sends it
to its consumers: at once, or once a checkpoint holds it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Final, Literal, TypeVar

from rt.objects import PersistedQueue
from rt.query.errors import Backlogged, QueryFailed, SequenceGap
from rt.query.locking import EventLock
from rt.query.reliable import NOTHING, RESUME, ReliableObservable, ReliableObserver, ReliableSubscription
from rt.query.replay import ReplayBuffer, check_consumer
from rt.query.taps import Feed

logger = logging.getLogger("rt.query")

T = TypeVar("T")

Release = Literal["commit", "now"]
OnGap = Callable[[SequenceGap], object]


def do_all(calls: Iterable[Callable[[], T]]) -> bool:
    """Call all of them, whatever some of them raise; whether one answered so. Raises the first error then."""
    errors: list[Exception] = []
    found = False
    for call in calls:
        try:
            found = bool(call()) or found
        except Exception as error:  # noqa: BLE001 - raised below
            errors.append(error)
    errors.sort(key=lambda error: isinstance(error, Backlogged))  # It is the least of them.
    for other in errors[1:]:
        logger.error("also_failed error=%r", other)
    if errors:
        raise errors[0]
    return found


class InputEdge:
    """A reliable observer: takes a source's ids off, and feeds queries with its values.

    `before`: called with each value before it is processed; may refuse it by raising. `on_gap`: hears of ids
    that a dense source left out, and it goes on behind them; without it `SequenceGap` is raised to the source
    and nothing is taken. With `takes_any_first` the source begins with its first id, whichever that is.
    """

    def __init__(
        self,
        source: ReliableObservable[Any],
        feed: Feed,
        *,
        lock: EventLock | None = None,
        before: Callable[[Any], object] | None = None,
        on_gap: OnGap | None = None,
        takes_any_first: bool = False,
    ) -> None:
        self.feed: Final = feed
        self._takes_any_first: Final = takes_any_first
        self._lock: Final = lock or EventLock()
        self._before = before
        self._on_gap = on_gap
        self._is_dense = source.is_dense
        self._subscription: ReliableSubscription = source.subscribe(self)
        self._is_started = False
        self._is_stopped = False
        self._is_released = False
        self.duplicates = 0
        """How many values were dropped, as they had been processed."""

    def start(self) -> None:
        """Ask for what lies behind the watermark. Nothing if the source has ended."""
        if not self._is_stopped and not self.feed.has_ended:
            self._is_started = True
            self._subscription.start(self.feed.watermark + 1)

    def on_next(self, sequence_id: int, value: Any, /) -> None:
        """Have it processed by every query; on return the watermark is its id."""
        with self._lock:
            if self._lock.is_torn:
                self._lock.require_whole()
            self._take(sequence_id, value)

    def _take(self, sequence_id: int, value: Any) -> None:
        watermark = self.feed.watermark
        if self._is_stopped:
            return
        if sequence_id <= watermark:
            self.duplicates += 1
            return
        gap = None
        is_first = watermark == NOTHING and self._takes_any_first
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
            self._lock.is_torn = True
            raise

    def on_error(self, error: Exception, /) -> None:
        """Fail every query that taps it, and let the source go when that is durable."""
        with self._lock:
            self._lock.require_whole()
            if not self._is_stopped:
                self._is_stopped = True
                self.feed.on_error(error)

    def on_completed(self) -> None:
        """End it for every query, and let the source go when that is durable."""
        with self._lock:
            self._lock.require_whole()
            if not self._is_stopped:
                self._is_stopped = True
                self.feed.on_completed()

    def save(self) -> dict[str, Any]:
        """Its row."""
        end = self.feed.end
        if isinstance(end, QueryFailed):
            return {"watermark": self.feed.watermark, "end": ["error", end.what]}
        if isinstance(end, Exception):
            return {"watermark": self.feed.watermark, "end": ["error", f"{type(end).__name__}: {end}"]}
        return {"watermark": self.feed.watermark, "end": end and [end]}

    def saved(self, watermark: int, *, has_ended: bool) -> None:
        """A checkpoint with that watermark is durable: acknowledge it.

        `has_ended`: the edge was stopped already when it was made; the source is let go.
        """
        if not self._is_started or self._is_released:
            return
        self._subscription.acknowledge(watermark)
        if has_ended:
            self._release()

    def dispose(self) -> None:
        """Take nothing more. The source is let go by the checkpoint that says so; if never started, now."""
        self._is_stopped = True
        if not self._is_started:
            self._release()

    def unload(self) -> None:
        """Let the source go without a word of what was done."""
        self._is_stopped = True
        self._release()

    @property
    def is_stopped(self) -> bool:
        """Whether it takes nothing any more."""
        return self._is_stopped

    def _release(self) -> None:
        if not self._is_released:
            self._is_released = True
            self._subscription.dispose()


class OutputEdge:
    """An observer that gives ids, and a reliable observable of what it was sent.

    `limit`: with so many values kept it `is_full`, and whoever feeds the queries must wait. What one event
    emits is taken whole, so it may hold that much more. `encode` makes what consumers want of what queries
    emit; what it raises ends the query. Nothing is sent but in `deliver`.
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
            raise ValueError(f"an output that holds at most {limit} values")
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
        """Whether it holds as much as it may."""
        return len(self.buffer) >= self._limit

    # What queries do

    def on_next(self, value: Any, /) -> None:
        """Give it an id, and keep it. It was not taken if this raises: `NotSerializable`, or as `encode`."""
        self.buffer.append(value if self._encode is None else self._encode(value))

    def on_error(self, error: Exception, /) -> None:
        """Consumers hear it behind all values; after a recovery as `QueryFailed`, with its text."""
        self._end = self._end or ["error", f"{type(error).__name__}: {error}"]

    def on_completed(self) -> None:
        """Consumers hear it behind all values."""
        self._end = self._end or ["completed"]

    # What consumers do

    def subscribe(self, observer: ReliableObserver[Any], /, name: str = "") -> ReliableSubscription:
        """A consumer, by a name that is remembered: what it has not acknowledged is kept also while it is
        away, until it is disposed. `QueryExists` while one of that name is there.
        """
        with self._lock:
            check_consumer(self._subscriptions, name)
            self.buffer.join(name)
            made = self._subscriptions[name] = _Subscription(self, name, observer, self._lock)
            return made

    def detach(self) -> None:
        """Forget who is there; what is kept for them stays."""
        self._subscriptions.clear()

    def deliver(self) -> bool:
        """Send what may be sent to whoever has started; whether anything was.

        What a consumer raises comes out of here when all others were served, and what it did not take is
        sent again the next time.
        """
        end = self._durable_end if self.release == "commit" else self._live_end()
        last = self._end if end == self.buffer.end else None
        return do_all(partial(each.send, end, last) for each in list(self._subscriptions.values()))

    # What the engine does

    def save(self) -> dict[str, Any]:
        """What `saved` of the next one is; the values are saved by their queue."""
        return {"low": self.buffer.low, "consumers": self.buffer.consumers, "end": self._end}

    def saved(self, end: int) -> None:
        """A checkpoint that holds all ids below `end` is durable."""
        self._durable_end = max(self._durable_end, end)
        self._held_end = None

    def hold(self) -> None:
        """Send nothing that comes from now on before a checkpoint holds it, whatever `release` says."""
        if self._held_end is None:
            self._held_end = self.buffer.end

    def expect(self, end: int) -> None:
        """A consumer has all ids below `end`, of an earlier life that sent them at once: they come again."""
        with self._lock:
            self._seen_end = max(self._seen_end, end)

    @property
    def is_behind(self) -> bool:
        """Whether what a consumer has is still to come again: no query may begin or end among that."""
        return self.buffer.end < self._seen_end

    def _live_end(self) -> int:
        return self.buffer.end if self._held_end is None else max(self._held_end, self._durable_end)

    def drop(self, name: str) -> None:
        """A consumer is gone for good."""
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
        return self._is_disposed

    def send(self, end: int, last: list[Any] | None) -> bool:
        if self._next is None or self._has_ended or self._is_disposed:
            return False
        sent = False
        if self._next < end:
            # One that acknowledged more than it was sent, in an earlier life, goes on behind that.
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
