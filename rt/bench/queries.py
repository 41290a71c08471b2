"""The query engine's speed with many standing queries, in an SQLite file.

Each is `where(…)`, `take(…)`, `average()` of one source, and gets every value. A value passes the filter of
one query. CPU time is reported too, as it does not depend on the load of the machine and its disk.
"""

from __future__ import annotations

import os
import tracemalloc
from collections.abc import Generator, Iterable, Iterator
from typing import Any

from rt.bench.measure import Bench, Figure, measured
from rt.objects import CheckpointKind, SqliteStore
from rt.query import Factories, Observable, QueryEngine, Source, Start, VirtualScheduler
from rt.query.core.reliable import ReliableObserver
from rt.query.operators import average, take, where

CHANGED = 10
_NEVER = 1_000_000_000
_FOR_ALL = -1
_VALUES = 50


class _Numbers:
    """A source that sends the values that it is given."""

    is_dense = True

    def __init__(self) -> None:
        self._next = 0
        self._observer: ReliableObserver[int]

    def subscribe(self, observer: ReliableObserver[int], /) -> _Numbers:
        self._observer = observer
        return self

    def start(self, sequence_id: int, /) -> None:
        self._next = sequence_id

    def acknowledge(self, sequence_id: int, /) -> None:
        pass

    def dispose(self) -> None:
        pass

    def send(self, values: Iterable[int]) -> None:
        for value in values:
            self._observer.on_next(self._next, value)
            self._next += 1


class QueriesBench(Bench):
    """Runs `queries` queries."""

    def __init__(self, directory: str | None, *, rounds: int, queries: int) -> None:
        super().__init__(directory, rounds)
        self._count = queries

    def figures(self) -> Generator[Figure, None, None]:
        path = os.path.join(self._root, "queries.db")
        with SqliteStore(path) as store:
            yield from self._standing(store)
        with SqliteStore(path) as store:
            wall, processor = measured(self._engine(store)[0].recover)
            yield Figure(f"{self._count:,} queries: recover", (wall,), "s")
            yield Figure(f"{self._count:,} queries: recover, CPU", (processor,), "s")

    def _engine(self, store: SqliteStore) -> tuple[QueryEngine, _Numbers]:
        factories = Factories()

        @factories("average")
        def standing(key: int) -> Observable[Any]:
            mine = (key, _FOR_ALL)
            return Source("in").pipe(where(lambda value: value in mine), take(_NEVER), average())

        engine = QueryEngine(store, factories, VirtualScheduler())
        source = _Numbers()
        engine.add_source("in", source)
        engine.add_sink("out")
        return engine, source

    def _standing(self, store: SqliteStore) -> Iterator[Figure]:
        engine, source = self._engine(store)
        engine.recover()
        name = f"{self._count:,} queries"
        starts = [Start(f"q{key}", "average", {"key": key}, "out") for key in range(self._count)]
        tracemalloc.start()
        engine.start_many(starts)
        engine.checkpoint()
        taken, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        yield Figure(f"{name}: memory of one", (taken / self._count,), "B")
        for what, values, kind in (
            ("full checkpoint", (), CheckpointKind.FULL),
            ("checkpoint, none changed", (), CheckpointKind.DIFFERENTIAL),
            (f"checkpoint, {CHANGED} changed", range(CHANGED), CheckpointKind.DIFFERENTIAL),
            ("checkpoint, each changed", (_FOR_ALL,), CheckpointKind.DIFFERENTIAL),
        ):
            rounds = []
            for _ in range(self._rounds):
                source.send(values)
                rounds.append(measured(lambda: engine.checkpoint(kind)))  # noqa: B023 - called at once
            wall, processor = zip(*rounds, strict=True)
            yield Figure(f"{name}: {what}", tuple(each * 1000 for each in wall), "ms")
            yield Figure(f"{name}: {what}, CPU", tuple(each * 1000 for each in processor), "ms")
        rounds = [measured(lambda: source.send(range(_VALUES))) for _ in range(self._rounds)]
        wall, processor = zip(*rounds, strict=True)
        yield Figure(f"{name}: values", tuple(_VALUES / each for each in wall), "/s")
        yield Figure(f"{name}: values, CPU", tuple(_VALUES / each for each in processor), "/s")
