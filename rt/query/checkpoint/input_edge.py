"""The input edge: where the sequence ids of a source end.

Invariants:
- The watermark is the id of the last value that every query processed completely. It is saved with the
  queries, so after a recovery exactly the unprocessed values come again. Values up to it are dropped.
- The source is called without the engine's lock: it may be an output of another engine, or of this one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from rt.query.core.errors import BadTime, SequenceGap, TimersPending, error_text
from rt.query.core.lifecycle import EventLock
from rt.query.core.reliable import NOTHING, EpochSource, ReliableObservable, ReliableSubscription
from rt.query.core.source import ValueFeed

logger = logging.getLogger("rt.query")

OnGap = Callable[[SequenceGap], object]
OnBadTime = Callable[[BadTime], object]

_TURNS_MAX: Final = 100
"""Maximum number of turns in which a value waits for timers that are due before it. After that its source
must send it again.
"""


class InputEdge:
    """A reliable observer that feeds queries with the values of a source.

    - `before(sequence_id, value)` is called before a value is processed, and may refuse it by raising.
      If it returns true, it took the value, and no query processes it.
    - `on_gap` is called if a dense source left out ids; the edge then continues after the gap. Without it
      `SequenceGap` is raised to the source, and the value is not accepted.
    - `on_bad_time` is called if `before` raised `BadTime`; the value is then skipped and counted. Without it
      `BadTime` is raised to the source, and the value is not accepted.
    - `accepts_any_first`: the first id of the source may be any id.
    - `epoch`: as stored with the watermark. See `EpochSource`.
    """

    def __init__(
        self,
        source: ReliableObservable[Any],
        feed: ValueFeed,
        *,
        lock: EventLock | None = None,
        before: Callable[[int, Any], bool] | None = None,
        on_gap: OnGap | None = None,
        on_bad_time: OnBadTime | None = None,
        accepts_any_first: bool = False,
        epoch: int | None = None,
    ) -> None:
        self.feed: Final = feed
        self._accepts_any_first: Final = accepts_any_first
        self._epoch = epoch
        self._lock: Final = lock or EventLock()
        self._before: Final = before
        self._on_gap: Final = on_gap
        self._on_bad_time: Final = on_bad_time
        self.source: Final = source
        self._is_dense: Final = source.is_dense
        self._subscription: ReliableSubscription | None = None
        self._is_started = False
        self.is_stopped = False
        """Whether the edge accepts no more values."""
        self._is_released = False
        self._to_acknowledge: tuple[int, bool] | None = None
        self._is_acknowledging = False
        self._late_id = NOTHING
        """The id of the last value that was refused because of timers. Such a value is logged only once."""
        self.skipped = 0
        """How many values had no time and were skipped, in this run."""

    def start(self) -> None:
        """Request the values after the watermark. Does nothing if the source has ended, or is not subscribed.

        Call this and `subscribe` without the engine's lock.
        """
        with self._lock:
            subscription = self._subscription
            if subscription is None or self._is_started or self.is_stopped or self.feed.has_ended:
                return
            self._is_started = True
            first = self.feed.watermark + 1
            if isinstance(self.source, EpochSource):
                self.source.epoch = self._epoch  # `save` reads it from the source again.
        subscription.start(first)

    def subscribe(self) -> None:
        """Subscribe to the source. Starts nothing."""
        self._subscription = self.source.subscribe(self)

    def on_next(self, sequence_id: int, value: Any, /) -> None:
        """Let every query process the value. On return the watermark is its id.

        If many timers are due before it, they fire in turns, and other threads may use the engine between
        two turns. After many turns `TimersPending` is raised.
        """
        try:
            with self._lock:
                if self._lock.is_interrupted:
                    self._lock.require_intact()
                self._handle(sequence_id, value)
        except TimersPending:
            self._wait_for_timers(sequence_id, value)

    def _wait_for_timers(self, sequence_id: int, value: Any) -> None:
        for turn in range(_TURNS_MAX):
            self._lock.give_way()
            try:
                with self._lock:
                    self._lock.require_intact()
                    self._handle(sequence_id, value)
            except TimersPending:
                if turn + 1 < _TURNS_MAX:
                    continue
                if self._late_id != sequence_id:
                    self._late_id = sequence_id
                    logger.warning("timers_pending source=%s id=%d", self.feed.name, sequence_id)
                raise
            else:
                return

    def _handle(self, sequence_id: int, value: Any) -> None:
        watermark = self.feed.watermark
        if self.is_stopped or sequence_id <= watermark:
            return
        gap, missing = None, sequence_id - watermark - 1
        is_first = watermark == NOTHING and self._accepts_any_first
        if missing and self._is_dense and not is_first:
            gap = SequenceGap(self.feed.name, watermark + 1, sequence_id)
            if self._on_gap is None:
                raise gap
        has_time, is_taken = True, False
        if self._before is not None:
            try:
                is_taken = self._before(sequence_id, value)
            except BadTime as error:
                if self._on_bad_time is None:
                    raise
                self._on_bad_time(error)
                has_time = False
        if gap is not None and self._on_gap is not None:
            logger.warning("gap source=%s start=%d end=%d", self.feed.name, gap.start, gap.end)
            self._on_gap(gap)
        feed = self.feed
        if missing:
            feed.missing += missing
        if is_taken or not has_time:
            feed.watermark = sequence_id
            self.skipped += not has_time
            return
        feed.value = value
        feed.processing = sequence_id
        try:
            feed.on_next(sequence_id, value)
        except BaseException:
            self._lock.is_interrupted = True
            raise
        finally:
            feed.processing = None

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
        if self._is_started and isinstance(self.source, EpochSource):
            self._epoch = self.source.epoch
        return {
            "watermark": self.feed.watermark,
            "epoch": self._epoch,
            "end": stored,
            "missing": self.feed.missing,
        }

    def saved(self, watermark: int, *, has_ended: bool) -> None:
        """A checkpoint with this watermark is durable: `acknowledge` must follow, without the engine's lock.

        `has_ended`: the edge was stopped before the checkpoint, so release the source.
        """
        self._to_acknowledge = watermark, has_ended

    def acknowledge(self) -> None:
        """Acknowledge the watermark of the last durable checkpoint.

        If another thread is acknowledging now, that thread also acknowledges for this call. If the source
        raises, the next checkpoint acknowledges again.
        """
        while (saved := self._next_acknowledgement()) is not None:
            subscription, watermark, has_ended = saved
            try:
                subscription.acknowledge(watermark)
                if has_ended:
                    self.release()
            finally:
                with self._lock:
                    self._is_acknowledging = False

    def _next_acknowledgement(self) -> tuple[ReliableSubscription, int, bool] | None:
        with self._lock:
            saved, subscription = self._to_acknowledge, self._subscription
            if saved is None or subscription is None or self._is_acknowledging:
                return None
            self._to_acknowledge = None
            if not self._is_started or self._is_released:
                return None
            self._is_acknowledging = True
            return subscription, *saved

    def stop(self) -> None:
        """Accept no more values."""
        self.is_stopped = True

    def release(self) -> None:
        """Dispose the subscription without acknowledging. Call it again if the source raised."""
        if not self._is_released and self._subscription is not None:
            self._subscription.dispose()
        self._is_released = True
