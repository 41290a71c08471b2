"""Runs in Spark's Python workers: keeps the state and the timer of each key in Spark's state store."""

from __future__ import annotations

from collections.abc import Iterator
from operator import itemgetter
from typing import Any, Final

from pyspark.sql import Row
from pyspark.sql.streaming.stateful_processor import (
    ExpiredTimerInfo,
    StatefulProcessor,
    StatefulProcessorHandle,
    TimerValues,
)

from rt.query.spark.job import SparkJob
from rt.query.spark.key_query import KeyQuery
from rt.query.spark.key_rows import message_of

_NS_PER_MS: Final = 1_000_000
_TIME: Final = 9
"""The column of the event time, after those of the message and its key."""


class KeyProcessor(StatefulProcessor):
    """The state of a key is one row. It has one timer: the next one of its operators."""

    def __init__(self, job: SparkJob) -> None:
        self._job: Final = job

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._plan = self._job.plan()
        self._handle = handle
        self._state = handle.getValueState("operators", "state binary")

    def handleInputRows(  # noqa: N802
        self,
        key: Any,
        rows: Iterator[Row],
        timerValues: TimerValues,  # noqa: N803
    ) -> Iterator[Row]:
        """Process the messages of a key, in the order of their positions: a shuffle does not keep this
        order.
        """
        ordered = sorted(rows, key=itemgetter(0))
        now_ns, first_ns = self._now_ns(timerValues), ordered[0][_TIME]
        if first_ns is not None:
            now_ns = max(now_ns, first_ns - self._job.delay_ns)
        query = self._query(key[0], now_ns)
        query.advance(self._now_ns(timerValues))
        for row in ordered:
            query.process(message_of(row), row[_TIME])
        return self._finish(query, query.timer_ms)

    def handleExpiredTimer(  # noqa: N802
        self,
        key: Any,
        timerValues: TimerValues,  # noqa: N803
        expiredTimerInfo: ExpiredTimerInfo,  # noqa: N803
    ) -> Iterator[Row]:
        """Fire the timers that are due. Spark deletes its own timer after this call."""
        query = self._query(key[0], self._now_ns(timerValues))
        expired_ms = expiredTimerInfo.getExpiryTimeInMs()
        query.advance(self._now_ns(timerValues))
        return self._finish(query, None if query.timer_ms == expired_ms else query.timer_ms)

    def close(self) -> None: ...

    def _query(self, key: str, now_ns: int) -> KeyQuery:
        stored = self._state.get()
        return KeyQuery(self._job, self._plan, key, None if stored is None else bytes(stored[0]), now_ns)

    def _finish(self, query: KeyQuery, timer_ms: int | None) -> Iterator[Row]:
        """Store the state and the timer. `timer_ms`: the timer that Spark has for the key."""
        state = query.save()
        if state is None:
            self._state.clear()
        else:
            self._state.update((state,))
        if timer_ms != query.due_ms:
            if timer_ms is not None:
                self._handle.deleteTimer(timer_ms)
            if query.due_ms is not None:
                self._handle.registerTimer(query.due_ms)
        return (
            Row(value=value, topic=topic, timestamp_ns=time_ns) for value, topic, time_ns in query.results
        )

    def _now_ns(self, times: TimerValues) -> int:
        if self._job.time_of is None:
            return times.getCurrentProcessingTimeInMs() * _NS_PER_MS
        return times.getCurrentWatermarkInMs() * _NS_PER_MS
