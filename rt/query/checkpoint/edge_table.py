"""The sources and sinks of an engine, by name. `edge` describes one of them.

Invariants:
- A value is accepted only if no output and no operator is full, and the queries' time has started.
- If the engine reads its own output as a source, a value of this output is also accepted while this output is
  full, or while an earlier output that the engine also reads is full. So if several such outputs are full,
  the last one of them is always read: they never wait for each other.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial
from operator import index
from typing import Any, Final

from rt.errors import InvalidOption
from rt.objects import PersistedQueue
from rt.query.async_calls import AsyncCalls
from rt.query.checkpoint.catalog import QueryCatalog
from rt.query.checkpoint.edge import OutputEdge
from rt.query.checkpoint.input_edge import InputEdge, OnBadTime, OnGap
from rt.query.core.clock import TIME_END_NS, TURN, LateValue, QueryClock, SourceTime, is_worth_logging
from rt.query.core.errors import (
    Backlogged,
    BadTime,
    ClockJump,
    NoSuchQuery,
    QueryExists,
    QueryFailed,
    TimersPending,
    WrongState,
    call_all,
)
from rt.query.core.lifecycle import EventLock
from rt.query.core.reliable import NOTHING, ReliableObservable
from rt.query.core.runtime import QueryRuntime

logger = logging.getLogger("rt.query")

_TURNS_MAX: Final = 100
"""Maximum number of turns of one `run_due`, so that it also returns if timers are always due."""


class EdgeTable:
    """The engine calls the methods with its lock held, unless the docstring of a method says otherwise.

    `on_backlog` is called with the names of the full outputs each time they are checked.
    """

    def __init__(
        self,
        runtime: QueryRuntime,
        catalog: QueryCatalog,
        clock: QueryClock,
        lock: EventLock,
        calls: AsyncCalls,
        on_backlog: Callable[[Collection[str]], object],
    ) -> None:
        self._runtime, self._catalog, self._clock, self._lock = runtime, catalog, clock, lock
        self._calls: Final = calls
        self.inputs: Final[dict[str, InputEdge]] = {}
        self.outputs: Final[dict[str, OutputEdge]] = {}
        self._on_backlog: Final = on_backlog
        self._was_full = False
        """Whether an output was full at the last check."""

    @contextlib.contextmanager
    def add_source(self, name: str, source: ReliableObservable[Any], **options: Any) -> Iterator[InputEdge]:
        """Add an edge. The `with` block subscribes it. If the block raises, the edge is removed again.

        See `QueryEngine.add_source`. Call without the lock.
        """
        edge = self._add_source(name, source, **options)
        try:
            yield edge
        except BaseException:
            self._drop_source(name)
            raise

    def _add_source(
        self,
        name: str,
        source: ReliableObservable[Any],
        *,
        begin: int | None,
        time_of: Callable[[Any], int] | None,
        on_gap: OnGap | None,
        on_bad_time: OnBadTime | None,
        **timing: Any,
    ) -> InputEdge:
        """`timing`: see `SourceTime`."""
        with self._lock:
            if name in self.inputs:
                raise QueryExists("a source has this name", got=repr(name))
            time = self._source_time(name, time_of, timing)
            feed = self._runtime.add_feed(name)
            watermark = NOTHING if begin is None else begin - 1
            new = {
                "watermark": watermark,
                "epoch": None,
                "end": None,
                "missing": watermark + 1,
                "time": None,
            }
            stored = self._catalog.sources.get(name, new)
            feed.watermark, feed.missing = stored["watermark"], stored["missing"]
            match stored["end"]:
                case ["completed"]:
                    feed.end = "completed"
                case ["error", text]:
                    feed.end = QueryFailed(text)
            edge = InputEdge(
                source,
                feed,
                lock=self._lock,
                before=lambda sequence_id, value: self._before_value(sequence_id, value, source, time, name),
                on_gap=on_gap,
                on_bad_time=on_bad_time,
                accepts_any_first=begin is None,
                epoch=stored["epoch"],
            )
            self.inputs[name] = edge
            if time is not None:
                time.feed = feed
                if stored["time"] is not None:
                    time.load(stored["time"])
                self._clock.add_source(time)
            return edge

    def start_sources(self) -> None:
        """Request the values of all sources. Call without the lock."""
        for edge in list(self.inputs.values()):
            edge.start()

    def _drop_source(self, name: str) -> None:
        with self._lock:
            edge = self.inputs.pop(name)
            edge.stop()
            self._runtime.drop_feed(name)
            self._clock.drop_source(name)
        edge.release()

    def add_sink(self, name: str, **options: Any) -> OutputEdge:
        """See `OutputEdge`."""
        if name in self.outputs:
            raise QueryExists("a sink has this name", got=repr(name))
        stored = self._catalog.sinks.get(name)
        made = OutputEdge(self._kept(name), lock=self._lock, saved=stored, **options)
        self.outputs[name] = self._runtime.outputs[name] = made
        return made

    @property
    def kept_values(self) -> dict[str, int]:
        """By sink: the number of kept values. Sinks that were not added in this run are included."""
        stored = [each for each in self._catalog.sinks if each not in self.outputs]
        return {name: len(self._kept(name)) for name in [*self.outputs, *stored]}

    def warn_of_unused(self) -> None:
        """Log the stored sinks that the program did not add: only `drop_sink` deletes them."""
        for name in sorted(set(self._catalog.sinks) - set(self.outputs)):
            logger.warning("sink_not_added name=%s values=%d", name, len(self._kept(name)))

    def require_unused(self, name: str, letters: OutputEdge | None, *, discard: bool) -> None:
        """Raise `NoSuchQuery` or `WrongState` unless the sink can be dropped. `letters`: of dead letters."""
        if name not in self.outputs and name not in self._catalog.sinks:
            raise NoSuchQuery("no sink has this name", got=repr(name), hint="See engine.sinks.")
        users = [query_id for query_id, each in self._catalog.queries.items() if each.sink == name]
        users += [each for each in self._runtime.senders(name) if each not in users]
        if letters is not None and letters is self.outputs.get(name):
            raise WrongState("dead letters go to the sink", where=name, hint="Leave out add_dead_letters.")
        if users:
            raise WrongState("queries send to the sink", where=name, got=users, hint="Stop them first.")
        if sources := self._clock.sources_with(late_output=name):
            hint = "Make another engine whose sources send their late values elsewhere."
            raise WrongState("the sink gets the late values of sources", where=name, got=sources, hint=hint)
        kept = len(self._kept(name))
        if kept and not discard:
            hint = "Deliver them until the consumers acknowledged them, or pass discard=True to lose them."
            raise WrongState("the sink keeps unacknowledged values", where=name, got=kept, hint=hint)

    def drop_sink(self, name: str) -> None:
        """Delete a sink that no query uses, and the values kept for it."""
        self._kept(name)  # makes the queue if it does not exist, so that it can be deleted
        self._runtime.space.delete(_object_id(name))
        self._catalog.drop_sink(name)
        output = self.outputs.pop(name, None)
        self._runtime.outputs.pop(name, None)
        if output is not None:
            output.close()

    def _kept(self, name: str) -> PersistedQueue[Any]:
        return self._runtime.space.get_or_create_queue(_object_id(name))

    @property
    def is_backlogged(self) -> bool:
        """Any thread may read it."""
        return bool(self._full_outputs()) or self._calls.is_full

    def _full_outputs(self) -> list[str]:
        """Return the names of the full outputs, and pass them to `on_backlog`."""
        full = [name for name, each in tuple(self.outputs.items()) if each.is_full]
        self._was_full = bool(full)
        self._on_backlog(full)
        return full

    @property
    def full_operators(self) -> tuple[str, ...]:
        """The operators that can take no more values, as `map_async@<address>`."""
        return self._calls.full

    def sends_immediately(self, sink: str | None) -> bool:
        """Whether the sink has consumers that do not wait for checkpoints.

        The ids they received must be produced again after a recovery. So a query that starts between them is
        started by a checkpoint, not by a log entry: then no earlier value is processed again.
        """
        return sink in self.outputs and self.outputs[sink].release == "now"

    def require_caught_up(self, sinks: Iterable[str | None]) -> None:
        """`WrongState` if a sink has not yet produced again the values that it sent before a crash."""
        replaying = [name for name in sinks if name in self.outputs and self.outputs[name].is_replaying]
        if replaying:
            raise WrongState(
                "an output has not yet produced again what it sent before a crash",
                where=sorted(set(replaying)),
                hint="Continue to feed the sources. If no values come, the store was lost or restored.",
            )

    def deliver(self) -> bool:
        """Send the values that may be sent. Returns whether any was sent.

        Errors are raised after all outputs were served. Call without the lock.
        """
        with self._lock.next():
            outputs = list(self.outputs.values())
        return call_all(partial(_deliver, each) for each in outputs)

    def save_sources(self) -> dict[str, dict[str, Any]]:
        """The rows of the sources."""
        times = self._clock.saved_sources
        return {name: {**edge.save(), "time": times.get(name)} for name, edge in self.inputs.items()}

    def _source_time(
        self, name: str, time_of: Callable[[Any], int] | None, timing: dict[str, Any]
    ) -> SourceTime | None:
        if time_of is None:
            if given := ", ".join(option for option, value in timing.items() if value):
                raise InvalidOption(f"source {name!r}: {given} needs time_of, the time of a value")
            return None
        made = SourceTime(time_of, **timing)
        if made.late_output is not None:
            self._runtime.output(made.late_output)  # Raises if there is none.
        return made

    def acknowledge(self) -> None:
        """Acknowledge the durable values to all sources.

        Errors are raised after all sources were served. Call without the lock.
        """
        with self._lock:
            inputs = list(self.inputs.values())
        call_all(each.acknowledge for each in inputs)

    def run_due(self) -> bool:
        """Process finished calls of `map_async`, and fire due timers unless an output or operator is full.

        Returns whether there was such a call or timer. Call without the lock.
        """
        for turn in range(_TURNS_MAX):
            fired = self._run_turn()
            if fired < TURN:
                return bool(turn or fired)
            self._lock.give_way()
        return True

    def _run_turn(self) -> int:
        with self._lock:
            self._lock.require_intact()
            try:
                found = self._calls.run_finished()
                if not self.is_backlogged and not self._clock.catch_up():
                    return TURN
                return self._clock.run_turn(lambda: self.is_backlogged) or int(found)
            except BaseException:
                self._lock.is_interrupted = True
                raise

    def release(self) -> None:
        """Release the sources, after `close`. Call without any lock: a source may wait for its threads.

        If a source raises, the others are released nevertheless. Call it again to release the remaining
        sources.
        """
        call_all(each.release for each in list(self.inputs.values()))

    def close(self, others: Iterable[Callable[[], object]]) -> None:
        """Call `others` and close all edges, while the lock is held.

        If a call raises, the rest is done nevertheless. Call it again for the remaining ones, as `release`.
        """
        with self._lock.next():
            steps: list[Callable[[], object]] = [each.close for each in self.outputs.values()]
            steps.extend(each.stop for each in self.inputs.values())
            call_all([*others, *steps])

    def _before_value(
        self, sequence_id: int, value: Any, source: object, time: SourceTime | None, name: str
    ) -> bool:
        """Called before each value: refuse it, or set the clock. True: no query must process it."""
        for each in self.outputs.values():
            if each.is_full and self._must_wait(source, each):
                raise Backlogged(
                    "an output is full",
                    where=self._full_outputs(),
                    hint="Its consumer must acknowledge values.",
                )
        if self._was_full:
            self._full_outputs()
        if self._calls.is_full:
            hint = "Raise the concurrency of map_async, or its function is too slow for the source."
            full = list(self._calls.full)
            raise Backlogged(
                "too many calls are in flight", where=full, got=self._calls.open_count, hint=hint
            )
        if time is None and self._clock.has_waiting_queries:
            hint = "It starts with the first value of a source with time_of."
            raise Backlogged("the queries' time has not started", hint=hint)
        now_ns = time_ns = None
        if time is not None:
            try:
                time_ns = index(time.time_of(value))
            except Exception as error:
                raise BadTime(name, sequence_id, value, error) from error
            if not 0 <= time_ns < TIME_END_NS:
                raise BadTime(name, sequence_id, value, time_ns)
            if time.max_jump_ns is not None and time.is_beyond(time_ns):
                self._refuse(value, time_ns, time)
                return True
            now_ns = self._clock.see(time, time_ns)
        try:
            is_done = self._clock.advance(now_ns)
        except BaseException:
            self._lock.is_interrupted = True
            raise
        if not is_done:
            hint = (
                "If this does not end, stop the query that never ends at one time, such as repeat() of of()."
            )
            raise TimersPending("many timers are due before a value", where=f"source {name!r}", hint=hint)
        if time is not None and time_ns is not None:
            self._clock.process(time, time_ns)
        return False

    def _must_wait(self, source: object, full: OutputEdge) -> bool:
        """Whether the values of the source are refused while this output is full."""
        if full is source:
            return False
        order = list(self.outputs.values())
        if not isinstance(source, OutputEdge) or source not in order:
            return True
        is_read = any(each.source is full for each in self.inputs.values())
        return not is_read or order.index(full) > order.index(source)

    def _refuse(self, value: Any, time_ns: int, time: SourceTime) -> None:
        """Send a value that is too far ahead to the late output; `ClockJump` if there is none."""
        name, high_ns, jump_ns = time.feed.name, time.high_ns, time.max_jump_ns
        if time.late_output is None:
            raise ClockJump(
                "the time of a value is too far ahead",
                where=f"source {name!r}",
                got=f"{time_ns} ns",
                expected=f"at most max_jump_s ({jump_ns} ns) after the highest time so far, {high_ns} ns",
                hint="Name a sink with late= to keep such values there, or set a higher max_jump_s.",
            )
        late = LateValue(
            value=value,
            time_ns=time_ns,
            clock_ns=self._clock.now_ns or 0,
            place=f"source {name}",
            reason="max_jump_s",
        )
        self._runtime.output(time.late_output).on_next(late)
        time.refused += 1
        if is_worth_logging(time.refused):
            logger.warning("value_refused source=%s time_ns=%d total=%d", name, time_ns, time.refused)


def _object_id(sink: str) -> str:
    return f"@sink/{sink}"


def _deliver(output: OutputEdge) -> bool:
    with contextlib.suppress(Backlogged):
        return output.deliver()
    return False
