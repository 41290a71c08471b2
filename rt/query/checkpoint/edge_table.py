"""The sources and sinks of an engine, by name. `edge` describes one of them.

Invariant: a value is accepted only if no output is full and the queries' time has started.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, Final

from rt.objects import PersistedQueue
from rt.query.checkpoint.catalog import QueryCatalog
from rt.query.checkpoint.edge import InputEdge, OnGap, OutputEdge, Release, call_all
from rt.query.core.clock import QueryClock
from rt.query.core.errors import Backlogged, QueryExists, QueryFailed, WrongState
from rt.query.core.lifecycle import EventLock
from rt.query.core.reliable import NOTHING, ReliableObservable
from rt.query.core.runtime import QueryRuntime


class EdgeTable:
    """The engine calls it with its lock held."""

    def __init__(
        self, runtime: QueryRuntime, catalog: QueryCatalog, clock: QueryClock, lock: EventLock
    ) -> None:
        self._runtime, self._catalog, self._clock, self._lock = runtime, catalog, clock, lock
        self.inputs: Final[dict[str, InputEdge]] = {}
        self.outputs: Final[dict[str, OutputEdge]] = {}
        self._timed: set[str] = set()
        """Sources whose values have the time."""

    def add_source(
        self,
        name: str,
        source: ReliableObservable[Any],
        *,
        begin: int | None,
        time_of: Callable[[Any], int] | None,
        on_gap: OnGap | None,
    ) -> InputEdge:
        """Add an edge without starting it. See `QueryEngine.add_source`."""
        if name in self.inputs:
            raise QueryExists("a source has this name", got=repr(name))
        feed = self._runtime.add_feed(name)
        watermark = NOTHING if begin is None else begin - 1
        stored = self._catalog.sources.get(name, {"watermark": watermark, "end": None})
        feed.watermark = stored["watermark"]
        match stored["end"]:
            case ["completed"]:
                feed.end = "completed"
            case ["error", text]:
                feed.end = QueryFailed(text)
        edge = InputEdge(
            source,
            feed,
            lock=self._lock,
            before=lambda value: self._before_value(value, source, time_of),
            on_gap=on_gap,
            accepts_any_first=begin is None,
        )
        self.inputs[name] = edge
        if time_of is not None:
            self._timed.add(name)
        return edge

    def drop_source(self, name: str) -> None:
        """Remove a source that could not be started."""
        edge = self.inputs.pop(name)
        self._timed.discard(name)
        edge.unload()

    def add_sink(
        self, name: str, *, release: Release, limit: int, encode: Callable[[Any], Any] | None
    ) -> OutputEdge:
        if name in self.outputs:
            raise QueryExists("a sink has this name", got=repr(name))
        held: PersistedQueue[Any] = self._runtime.space.get_or_create_queue(f"@sink/{name}")
        stored = self._catalog.sinks.get(name)
        made = OutputEdge(held, lock=self._lock, release=release, limit=limit, encode=encode, saved=stored)
        self.outputs[name] = made
        return made

    @property
    def is_backlogged(self) -> bool:
        return any(each.is_full for each in self.outputs.values())

    @property
    def have_timed_sources_ended(self) -> bool:
        return all(self.inputs[each].feed.has_ended for each in self._timed)

    def sends_immediately(self, sink: str | None) -> bool:
        """Whether the sink has consumers that do not wait for checkpoints.

        The ids they received must be produced again after a recovery. So a query that starts between them is
        started by a checkpoint, not by a log entry: then no earlier value is processed again.
        """
        return sink in self.outputs and self.outputs[sink].release == "now"

    def require_caught_up(self, sinks: Iterable[str | None]) -> None:
        """`WrongState` if a sink has not produced again what it sent before a crash."""
        replaying = [name for name in sinks if name in self.outputs and self.outputs[name].is_replaying]
        if replaying:
            raise WrongState(
                "an output has not yet produced again what it sent before a crash",
                where=sorted(set(replaying)),
                hint="Continue to feed the sources. If no values come, the store was lost or restored.",
            )

    def deliver(self) -> bool:
        """Send what may be sent. Returns whether any was sent. Errors are raised after all were served."""
        return call_all(partial(_deliver, each) for each in self.outputs.values())

    def releases(self) -> Iterator[Callable[[], object]]:
        """Functions that release each edge."""
        yield from (each.detach for each in self.outputs.values())
        yield from (each.unload for each in self.inputs.values())

    def _before_value(self, value: Any, source: object, time_of: Callable[[Any], int] | None) -> None:
        """Called before each value: refuse it, or set the clock to its time."""
        for each in self.outputs.values():
            if each.is_full and each is not source:  # A full output must still be read.
                full = [name for name, each in self.outputs.items() if each.is_full]
                raise Backlogged(
                    "an output is full", where=full, hint="Its consumer must acknowledge values."
                )
        if time_of is None and self._clock.has_waiting_queries:
            hint = "It starts with the first value of a source with time_of."
            raise Backlogged("the queries' time has not started", hint=hint)
        now_ns = None if time_of is None else time_of(value)
        try:
            self._clock.advance(now_ns)
        except BaseException:
            self._lock.is_interrupted = True
            raise


def _deliver(output: OutputEdge) -> bool:
    with contextlib.suppress(Backlogged):
        return output.deliver()
    return False
