"""A test kit for queries: sources in virtual time, recorded output, and checks of the operators' invariants.

    hot("-a-b|")       what a source of the engine sends: `Source("in")` in the query
    cold("-a-b|")      an observable that starts from scratch for every subscription
    run(query, …)      the output, and when
    check_laws(…)      the same, after saves, failed saves and crashes at every event
    until(…)           to await in a function of `map_async`

A marble stands for one second: "-" nothing, a letter or digit a value, "|" the end, "#" an error.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any, Final, Literal

from msgspec import Struct

from rt.errors import InvalidOption
from rt.objects import CheckpointKind, MemoryStore, Serializers
from rt.query.core.observable import Observable, Observer
from rt.query.core.operator import Operator
from rt.query.core.operator_group import OperatorGroup
from rt.query.core.runtime import QueryRuntime, Watch
from rt.query.core.scheduler import NS_PER_S, VirtualScheduler
from rt.query.mutation_check import MutationCheck
from rt.testing.virtual_calls import VirtualCalls, until

__all__ = ["MarbleError", "MarbleEvent", "check_laws", "cold", "hot", "rows_written", "run", "until"]

UNTIL_S: Final = 1000.0
QUERY_ID: Final = "query"
_MARBLES: Final = re.compile(r"[-a-zA-Z0-9|#]*")
AT_ONCE_MAX: Final = 100_000
"""If this many timers fire at the same time, the query counts as a query without end."""


class MarbleEvent(Struct, frozen=True):
    """Something that a source sends, or a query emits."""

    at_s: float
    kind: Literal["next", "error", "completed"]
    value: Any = None
    time_s: float | None = None
    """The time of a value, if a source sends it with another time than `at_s`. Operators read it as
    `event_ns`.
    """

    @property
    def at_ns(self) -> int:
        return round(self.at_s * NS_PER_S)


class MarbleError(Exception): ...


def hot(marbles: str, values: Mapping[str, Any] | None = None) -> list[MarbleEvent]:
    """Events at whole seconds, from 0. `values` maps letters to values (default: the letter, or an int).

    Spaces are ignored. `rt.InvalidOption` for characters that are not marbles.
    """
    events = []
    text = marbles.replace(" ", "")
    if _MARBLES.fullmatch(text) is None:
        expected = "letters, digits, '-', '|' and '#'"
        raise InvalidOption("not marbles", got=repr(marbles)[:200], expected=expected)
    for second, mark in enumerate(text):
        if mark == "|":
            events.append(MarbleEvent(second, "completed"))
        elif mark == "#":
            events.append(MarbleEvent(second, "error", MarbleError("#")))
        elif mark != "-":
            plain = int(mark) if mark.isdigit() else mark
            events.append(MarbleEvent(second, "next", plain if values is None else values[mark]))
    return events


def cold(marbles: str | Sequence[MarbleEvent], values: Mapping[str, Any] | None = None) -> Observable[Any]:
    """An observable that sends these events, with times relative to each subscription."""
    return _ColdObservable(hot(marbles, values) if isinstance(marbles, str) else list(marbles))


def run(
    query: Observable[Any],
    sources: Mapping[str, Sequence[MarbleEvent]] | None = None,
    *,
    until_s: float = UNTIL_S,
    serializers: Serializers | None = None,
    sinks: Sequence[str] = (),
) -> list[MarbleEvent]:
    """The output of the query, without saves or crashes.

    The output includes the values that the query sends to other outputs of the engine, such as late values.
    `sinks`: the names of these outputs.
    """
    rig = _Rig(query, sources or {}, until_s, serializers, sinks)
    rig.start()
    while rig.step():
        pass
    return rig.output


def check_laws(
    query: Observable[Any],
    sources: Mapping[str, Sequence[MarbleEvent]] | None = None,
    *,
    until_s: float = UNTIL_S,
    serializers: Serializers | None = None,
    sinks: Sequence[str] = (),
) -> list[MarbleEvent]:
    """Return the output of the query, as `run` does. `AssertionError` if saves or crashes change it.

    The query runs without interruption; with a save after every event, where some saves fail; from each of
    these saves to the end; and with a crash after every event. After the query has ended, none of its objects
    may be left. No operator may change a value that it received or emitted.
    """
    check = MutationCheck()
    watched = _Rig(query, sources or {}, until_s, serializers, sinks, watch=check.watch)
    watched.start()
    expected = watched.finish()
    assert not check.found, str(check.found[0])

    def rig(of: _Rig | None = None, content: Any = None) -> _Rig:
        made = _Rig(query, sources or {}, until_s, serializers, sinks, content)
        if of is not None:
            made.go_on_from(of)
        return made

    saved = rig()
    saved.start()
    for number in count():
        content = saved.save(number)
        from_here = rig(saved, content)
        _same("a run from the checkpoint after event", number, from_here.finish(), expected)
        if not saved.step():
            break
    _same("a run with saves, event", number, saved.output, expected)
    crashed = rig()
    crashed.start()
    for number in count():
        crashed = rig(crashed, crashed.save(number))
        if not crashed.step():
            break
    _same("a run with crashes, event", number, crashed.output, expected)
    for each in (saved, crashed):
        assert not (each.is_finished and each.runtime.space.ids()), (
            f"objects are left: {each.runtime.space.ids()}"
        )
    return expected


def rows_written(query: Observable[Any], sources: Mapping[str, Sequence[MarbleEvent]], last: int) -> int:
    """How many rows a differential checkpoint writes or deletes for the last `last` events of the run."""
    rig = _Rig(query, sources, UNTIL_S)
    rig.start()
    total = sum(map(len, sources.values()))
    while rig.taken < total - last and rig.step():
        pass
    before = rig.save(0)
    while rig.step():
        pass
    after = rig.save(0)
    return sum(
        before.get(category, {}).get(key) != after.get(category, {}).get(key)
        for category in {*before, *after}
        for key in {*before.get(category, {}), *after.get(category, {})}
    )


class _Rig:
    """A runtime with one query, its sources, and a store in memory."""

    def __init__(
        self,
        query: Observable[Any],
        sources: Mapping[str, Sequence[MarbleEvent]],
        until_s: float,
        serializers: Serializers | None = None,
        sinks: Sequence[str] = (),
        content: Any = None,
        watch: Watch | None = None,
    ) -> None:
        self._until_ns = round(until_s * NS_PER_S)
        self._events = sorted(
            ((event.at_ns, name, event) for name, events in sources.items() for event in events),
            key=lambda each: each[0],
        )
        self._scheduler = VirtualScheduler()
        self._query = query
        self._store = MemoryStore(content)
        self._fired = 0
        """How many timers fired at the present time."""
        self.taken = 0
        self.output: list[MarbleEvent] = []
        calls = VirtualCalls(self._scheduler)
        self.runtime: Final = QueryRuntime(self._scheduler, serializers, watch=watch, calls=calls)
        for name in sources:
            self.runtime.add_feed(name)
        for name in sinks:
            self.runtime.outputs[name] = _Recorder(self)
        self.runtime.load(self._store.reader())
        self._root = OperatorGroup(self.runtime, QUERY_ID)
        self.runtime.roots[QUERY_ID] = self._root

    @property
    def is_finished(self) -> bool:
        return self._root.is_finished

    def start(self) -> None:
        self._root.build(self._query, _Recorder(self))
        self._root.open()
        self._root.start()

    def go_on_from(self, other: _Rig) -> None:
        """Continue from the store of another rig that crashed."""
        self.taken = other.taken
        self.output = list(other.output)
        self._scheduler.restore(other._scheduler.now_ns)
        for name in {name for _, name, _ in self._events}:
            feed, before = self.runtime.feed(name), other.runtime.feed(name)
            feed.watermark, feed.end = before.watermark, before.end
        row = self.runtime.pop_stored(QUERY_ID)
        assert row is not None
        self._root.build(self._query, _Recorder(self))
        self._root.load(row)
        self.runtime.sweep()
        self._root.start()

    def step(self) -> bool:
        """Run the next timer or event. False if there is none."""
        due_ns, event = self._scheduler.next_due_ns, None
        if self.taken < len(self._events):
            event = self._events[self.taken]
            self._scheduler.expect(event[0])
        if due_ns is not None and (event is None or due_ns <= event[0]):
            if due_ns > self._until_ns:
                return False
            self._fired = self._fired + 1 if due_ns <= self._scheduler.now_ns else 0
            assert self._fired < AT_ONCE_MAX, f"the query does not end at {due_ns / NS_PER_S} s"
            self._scheduler.restore(due_ns)
            return self._scheduler.run_due()
        if event is None:
            return False
        at_ns, name, what = event
        self._scheduler.restore(at_ns)
        self.taken += 1
        feed = self.runtime.feed(name)
        match what.kind:
            case "next":
                time_s = what.time_s
                self._scheduler.event_ns = None if time_s is None else round(time_s * NS_PER_S)
                feed.on_next(self.taken, what.value)
            case "error":
                feed.on_error(what.value)
            case "completed":
                feed.on_completed()
        return True

    def finish(self) -> list[MarbleEvent]:
        while self.step():
            pass
        return self.output

    def save(self, number: int) -> dict[str, dict[str, bytes]]:
        """Save a checkpoint. For some numbers, first save a checkpoint that fails or seems to fail. Return
        the content of the store.
        """
        if number % 3:
            writer = self._store.begin(CheckpointKind.DIFFERENTIAL)
            self.runtime.save(writer)
            if number % 3 == 1:
                writer.rollback()
            else:
                writer.commit()
            self.runtime.save_failed(unknown_outcome=number % 6 > 2)
        is_full = number % 7 == 6
        writer = self._store.begin(CheckpointKind.FULL if is_full else CheckpointKind.DIFFERENTIAL)
        self.runtime.save(writer)
        writer.commit()
        self.runtime.saved()
        return self._store.content()

    def record(self, kind: Literal["next", "error", "completed"], value: Any = None) -> None:
        assert not (self.output and self.output[-1].kind != "next"), "something after the end"
        self.output.append(MarbleEvent(self._scheduler.now_ns / NS_PER_S, kind, value))


class _Recorder:
    def __init__(self, rig: _Rig) -> None:
        self._rig = rig

    def on_next(self, value: Any, /) -> None:
        self._rig.record("next", value)

    def on_error(self, error: Exception, /) -> None:
        self._rig.record("error", error)

    def on_completed(self) -> None:
        self._rig.record("completed")


class _ColdObservable(Observable[Any]):
    def __init__(self, events: Sequence[MarbleEvent]) -> None:
        self._events = events

    def build(self, group: OperatorGroup, out: Observer[Any]) -> Operator[Any, Any]:
        made = _Cold(self._events)
        made.bind(group, out)
        return made


class _Cold(Operator[Any, Any]):
    __slots__ = ("_events", "_next", "_start_ns")

    NAME = "cold"

    def __init__(self, events: Sequence[MarbleEvent]) -> None:
        self._events = events
        self._next = 0
        self._start_ns = 0

    def on_start(self) -> None:
        self._start_ns = self.now_ns
        self._wait()

    def on_timer(self, key: str, /) -> None:  # noqa: ARG002
        event = self._events[self._next]
        self._next += 1
        self.changed()
        match event.kind:
            case "next":
                self._wait()
                self.emit(event.value)
            case "error":
                self.fail(event.value)
            case "completed":
                self.complete()

    def save_state(self) -> list[int]:
        return [self._next, self._start_ns]

    def load_state(self, state: Any, version: int, /) -> None:  # noqa: ARG002
        self._next, self._start_ns = state

    def _wait(self) -> None:
        if self._next < len(self._events):
            self.set_timer(self._start_ns + self._events[self._next].at_ns)


def _same(what: str, number: int, got: list[MarbleEvent], expected: list[MarbleEvent]) -> None:
    plain = [list(map(_comparable, each)) for each in (got, expected)]
    assert plain[0] == plain[1], f"{what} {number}: got {got}, expected {expected}"


def _comparable(event: MarbleEvent) -> tuple[object, ...]:
    value = repr(event.value) if event.kind == "error" else event.value
    return event.at_s, event.kind, value
