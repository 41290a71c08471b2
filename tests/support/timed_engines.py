"""An engine with sources of event time. The test sends values in any order and may crash the engine at any
time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rt.objects import MemoryStore
from rt.query import Backlogged, Factories, Observable, QueryEngine, ReliableObserver, VirtualScheduler

SECOND = 10**9

Timed = tuple[float, Any]
"""A time in seconds, and a value."""


def time_of(value: Timed) -> int:
    return round(value[0] * SECOND)


class TimedSource:
    """Sends `values` one by one, when `send` is called."""

    is_dense = True

    def __init__(self, values: Sequence[Timed]) -> None:
        self.values = values
        self.next = 0

    def subscribe(self, observer: ReliableObserver[Any], /) -> TimedSource:
        self.observer = observer
        return self

    def start(self, sequence_id: int, /) -> None:
        self.next = sequence_id

    def acknowledge(self, sequence_id: int, /) -> None:
        pass

    def dispose(self) -> None:
        pass

    def send(self) -> bool:
        """Send the next value, or the completion after the last one. Return whether it was accepted."""
        if self.next == len(self.values):
            self.observer.on_completed()
            return True
        try:
            self.observer.on_next(self.next, self.values[self.next])
        except Backlogged:
            return False
        self.next += 1
        return True

    @property
    def is_at_end(self) -> bool:
        return self.next == len(self.values)


class Collected:
    """A consumer that keeps received values, also across crashes, and acknowledges nothing."""

    def __init__(self) -> None:
        self.by_id: dict[int, Any] = {}

    def on_next(self, sequence_id: int, value: Any, /) -> None:
        assert self.by_id.setdefault(sequence_id, value) == value

    def on_error(self, error: Exception, /) -> None:
        raise error

    def on_completed(self) -> None: ...

    @property
    def values(self) -> list[Any]:
        assert list(self.by_id) == list(range(len(self.by_id)))
        return list(self.by_id.values())


class TimedRun:
    """A run of one query, with the sinks `out` and `late`. `options`: arguments of `add_source`, by
    source.
    """

    def __init__(
        self,
        query: Observable[Any],
        sources: Mapping[str, Sequence[Timed]],
        options: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        self.query = query
        self._values = sources
        self._options = options or {}
        self.out, self.late = Collected(), Collected()
        self._content: Any = None
        self._begin()
        self.engine.start("query", "query", sink="out")

    def _begin(self) -> None:
        self.store = MemoryStore(self._content)
        factories = Factories()
        factories.add("query", lambda: self.query)
        self.engine = QueryEngine(self.store, factories, VirtualScheduler())
        outputs = self.engine.add_sink("out"), self.engine.add_sink("late")
        self.sources = {name: TimedSource(values) for name, values in self._values.items()}
        for name, source in self.sources.items():
            self.engine.add_source(name, source, time_of=time_of, **self._options.get(name, {}))
        self.engine.recover()
        for output, collected in zip(outputs, (self.out, self.late), strict=True):
            output.subscribe(collected).start(0)

    def send(self, name: str) -> bool:
        """Send the next value, or the completion, of a source. Return whether it was accepted."""
        return self.sources[name].send()

    def commit(self) -> None:
        self.engine.run_due()
        self.engine.checkpoint()
        self.engine.deliver()

    def crash(self) -> None:
        """Continue from the last checkpoint in a new engine."""
        self._content = self.store.content()
        self.engine.unload()
        self._begin()

    def finish(self, order: Sequence[str] = (), *, crashes: bool = False) -> list[Any]:
        """Send everything, and return the results.

        The steps in `order` are first: the name of a source, "." for a checkpoint, "!" for a crash. With
        `crashes`, a checkpoint and a crash follow every accepted value.
        """
        for step in order:
            if step == ".":
                self.commit()
            elif step == "!":
                self.crash()
            elif not self.sources[step].is_at_end and self.send(step) and crashes:
                self.commit()
                self.crash()
        while left := [name for name, source in self.sources.items() if not source.is_at_end]:
            for name in left:
                sent = self.send(name)
                if sent and crashes:
                    self.commit()
                    self.crash()
        for name in self.sources:
            self.send(name)
        self.commit()
        assert self.engine.queries == {"query": ""}
        return self.out.values
