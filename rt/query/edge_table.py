"""The sources and sinks that an engine was given, by name. `edges` says what one of them does.

The law: a value is taken only where there is room for what it brings about, and where the queries' time has
begun.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, Final

from rt.objects import PersistedQueue
from rt.query.catalog import Catalog
from rt.query.clock import QueryClock
from rt.query.edges import InputEdge, OnGap, OutputEdge, Release, do_all
from rt.query.errors import Backlogged, QueryExists, QueryFailed, WrongState
from rt.query.host import Host
from rt.query.locking import EventLock
from rt.query.reliable import NOTHING, ReliableObservable


class EdgeTable:
    """The engine calls it with its lock held."""

    def __init__(self, host: Host, catalog: Catalog, clock: QueryClock, lock: EventLock) -> None:
        self._host, self._catalog, self._clock, self._lock = host, catalog, clock, lock
        self.inputs: Final[dict[str, InputEdge]] = {}
        self.outputs: Final[dict[str, OutputEdge]] = {}
        self._timed: set[str] = set()
        """The sources whose values say the time."""

    def add_source(
        self,
        name: str,
        source: ReliableObservable[Any],
        *,
        begin: int | None,
        time_of: Callable[[Any], int] | None,
        on_gap: OnGap | None,
    ) -> InputEdge:
        """The edge, not started; see `QueryEngine.add_source`."""
        if name in self.inputs:
            raise QueryExists("a source of that name is there", got=repr(name))
        feed = self._host.add_feed(name)
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
            before=lambda value: self._before(value, source, time_of),
            on_gap=on_gap,
            takes_any_first=begin is None,
        )
        self.inputs[name] = edge
        if time_of is not None:
            self._timed.add(name)
        return edge

    def drop_source(self, name: str) -> None:
        """Take back one that could not be started."""
        edge = self.inputs.pop(name)
        self._timed.discard(name)
        edge.unload()

    def add_sink(
        self, name: str, *, release: Release, limit: int, encode: Callable[[Any], Any] | None
    ) -> OutputEdge:
        """The edge; see `QueryEngine.add_sink`."""
        if name in self.outputs:
            raise QueryExists("a sink of that name is there", got=repr(name))
        held: PersistedQueue[Any] = self._host.space.get_or_create_queue(f"@sink/{name}")
        stored = self._catalog.sinks.get(name)
        made = OutputEdge(held, lock=self._lock, release=release, limit=limit, encode=encode, saved=stored)
        self.outputs[name] = made
        return made

    @property
    def is_backlogged(self) -> bool:
        """Whether an output holds all it may."""
        return any(each.is_full for each in self.outputs.values())

    @property
    def has_timed_ended(self) -> bool:
        """Whether no source is left whose values say the time."""
        return all(self.inputs[each].feed.has_ended for each in self._timed)

    def is_live(self, sink: str | None) -> bool:
        """Whether a sink has consumers that do not wait for checkpoints.

        The ids they saw must come again behind a recovery. So a query that begins among them does so with a
        checkpoint, and not in the log: nothing from before it is ever processed again.
        """
        return sink in self.outputs and self.outputs[sink].release == "now"

    def require_caught_up(self, sinks: Iterable[str | None]) -> None:
        """`WrongState` if a sink has not sent again yet what it sent before a crash."""
        behind = [name for name in sinks if name in self.outputs and self.outputs[name].is_behind]
        if behind:
            raise WrongState(
                "what an output sent at once before a crash is still to come again",
                where=sorted(set(behind)),
                hint="Feed the sources on. Where nothing comes, the store was lost or set back.",
            )

    def deliver(self) -> bool:
        """Send outputs what may be sent; whether anything was. Raises when all were served."""
        return do_all(partial(_deliver, each) for each in self.outputs.values())

    def endings(self) -> Iterator[Callable[[], object]]:
        """What lets go of each."""
        yield from (each.detach for each in self.outputs.values())
        yield from (each.unload for each in self.inputs.values())

    def _before(self, value: Any, source: object, time_of: Callable[[Any], int] | None) -> None:
        """Before each value: refuse it, or bring the clock to it."""
        for each in self.outputs.values():
            if each.is_full and each is not source:  # What is full is no reason not to take from it.
                full = [name for name, each in self.outputs.items() if each.is_full]
                raise Backlogged("an output is full", where=full, hint="Its consumer must acknowledge.")
        if time_of is None and self._clock.is_awaited:
            hint = "It does with the first value of a source with time_of."
            raise Backlogged("the queries' time has not begun", hint=hint)
        now_ns = None if time_of is None else time_of(value)
        try:
            self._clock.advance(now_ns)
        except BaseException:
            self._lock.is_torn = True
            raise


def _deliver(output: OutputEdge) -> bool:
    with contextlib.suppress(Backlogged):
        return output.deliver()
    return False
