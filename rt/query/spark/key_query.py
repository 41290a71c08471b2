"""The query of one key: loaded from its state, run on messages and times, and saved again.

Invariant: the emitted results depend only on the state, the messages and the times. So a micro-batch that is
repeated has the same results.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

from rt.objects import CheckpointKind, MemoryStore
from rt.query.core.errors import QueryFailed, error_text
from rt.query.core.operator_group import OperatorGroup
from rt.query.core.scheduler import VirtualScheduler
from rt.query.operators.event_time.event_windows import EventWindows
from rt.query.operators.inner.groups import GroupByUntil
from rt.query.operators.keyed import GroupBy, ScanBy
from rt.query.spark.keyed_plan import KEYED, KeyRuntime
from rt.query.spark.state_row import decode_state, encode_state

if TYPE_CHECKING:
    from rt.log.scan.message_batch import Message
    from rt.query.spark.job import SparkJob
    from rt.query.spark.keyed_plan import KeyedPlan

Result = tuple[bytes, str, int]
"""Value, topic, and time in ns."""

QUERY_ID: Final = "query"
_CLOCK: Final = "query/clock"
"""The category of one row: the time of the key's clock, and when its timer in Spark is due, in ms."""


class KeyQuery:
    """`now_ns`: the time when the key starts, if it has no `state`."""

    def __init__(self, job: SparkJob, plan: KeyedPlan, key: str, state: bytes | None, now_ns: int) -> None:
        content = {} if state is None else decode_state(state)
        clock: list[Any] = json.loads(content.pop(_CLOCK)["clock"]) if content else [now_ns, None]
        self.timer_ms: Final[int | None] = clock[1]
        """The due time of the key's timer in Spark, according to the key's state."""
        self.results: list[Result] = []
        self._job: Final = job
        self._key: Final = key
        self._error: Exception | None = None
        self._store: Final = MemoryStore(content)
        self._scheduler: Final = VirtualScheduler(clock[0], ticks_max=job.ticks_max)
        runtime = self._runtime = KeyRuntime(self._scheduler)
        self._feed: Final = runtime.feed(plan.source)
        runtime.outputs.update(dict.fromkeys(job.late_outputs, _Encoded(self)))
        runtime.load(self._store.reader())
        root = self._root = OperatorGroup(runtime, QUERY_ID)
        runtime.roots[QUERY_ID] = root
        root.build(job.query, _Encoded(self))
        row = runtime.pop_stored(QUERY_ID)
        if row is None:
            root.open()
        else:
            root.load(row)
            runtime.sweep()
        root.start()
        self._check()

    @property
    def now_ns(self) -> int:
        return self._scheduler.now_ns

    def process(self, message: Message, time_ns: int | None) -> None:
        """Advance to the time of a message, and process it. `time_ns`: None if messages have no times."""
        if time_ns is not None:
            self.advance(max(self.now_ns, time_ns - self._job.delay_ns))
        self._scheduler.event_ns = time_ns
        self._feed.on_next(message.position, message)
        self._scheduler.event_ns = None
        self._check()

    def advance(self, now_ns: int) -> None:
        """Fire the timers that are due at this time. The clock never goes back."""
        self._scheduler.advance_to(now_ns)
        self._check()

    def save(self) -> bytes | None:
        """Return the state; None if the key has no state left. Then `due_ms` is None too."""
        self.advance(self.now_ns)  # timers that the last message made due at once
        if self.due_ms is None and self._is_empty():
            return None
        writer = self._store.begin(CheckpointKind.DIFFERENTIAL)
        self._runtime.save(writer)
        writer.commit()
        self._runtime.saved()
        clock = json.dumps([self.now_ns, self.due_ms]).encode()
        return encode_state({_CLOCK: {"clock": clock}, **self._store.content()})

    @property
    def due_ms(self) -> int | None:
        """When Spark must call again: the first ms at which a timer is due."""
        due_ns = self._scheduler.next_due_ns
        return None if due_ns is None else -(-due_ns // 1_000_000)

    def _is_empty(self) -> bool:
        """Whether all groups have ended, so that the next message of the key may start a new query."""
        if any(True for _ in self._root.children()):
            return False
        return not any(_held(each) for each in self._root._operators if isinstance(each, KEYED))

    def _check(self) -> None:
        """Raise the error that ended the query."""
        if self._error is not None:
            hint = "Nothing of the micro-batch is stored: fix the query, and start the job again."
            raise QueryFailed(error_text(self._error), where=f"key {self._key}", hint=hint) from self._error

    def take(self, value: Any) -> None:
        data, topic, time_ns = self._job.encode(value)
        self.results.append((data, topic, self.now_ns if time_ns is None else time_ns))

    def fail(self, error: Exception) -> None:
        self._error = self._error or error


class _Encoded:
    """Receives the values that the query emits."""

    def __init__(self, query: KeyQuery) -> None:
        self._query: Final = query
        self.on_next = query.take

    def on_error(self, error: Exception, /) -> None:
        self._query.fail(error)

    def on_completed(self) -> None: ...


def _held(operator: Any) -> int:
    """The number of keys or windows that the operator holds. Here it holds at most one key."""
    match operator:
        case GroupBy():
            return len(operator._names) + operator._is_unsubscribed
        case GroupByUntil():
            return len(operator._numbers) + operator._is_unsubscribed
        case ScanBy():
            return len(operator._results)
        case EventWindows():
            return len(operator._windows)
    raise AssertionError(operator)
