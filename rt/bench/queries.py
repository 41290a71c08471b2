"""The query engine's speed with many standing queries, in an SQLite file.

Each query is `where(…)`, `take(…)`, `average()` of one source, and gets every value. A value passes the
filter of one query.
"""

from __future__ import annotations

import os
import tracemalloc
from collections.abc import Generator, Iterable, Iterator
from functools import partial
from typing import Any

from msgspec import Struct

from rt.bench.measure import Figure, milliseconds, timed, wall_and_cpu
from rt.objects import CheckpointKind, SqliteStore
from rt.query import Factories, Observable, QueryEngine, Source, Start, VirtualScheduler
from rt.query.core.reliable import ReliableObserver
from rt.query.operators import average, take, where

CHANGED = 10
_NEVER = 1_000_000_000
_FOR_ALL = -1
_VALUES = 50


class Numbers:
    """A source that sends the values that `send` gets."""

    is_dense = True

    def __init__(self) -> None:
        self._next = 0
        self._observer: ReliableObserver[Any]

    def subscribe(self, observer: ReliableObserver[Any], /) -> Numbers:
        self._observer = observer
        return self

    def start(self, sequence_id: int, /) -> None:
        self._next = sequence_id

    def acknowledge(self, sequence_id: int, /) -> None:
        pass

    def dispose(self) -> None:
        pass

    def send(self, values: Iterable[Any]) -> None:
        for value in values:
            self._observer.on_next(self._next, value)
            self._next += 1


class QueriesBench(Struct, frozen=True):
    """Runs `queries` queries, with a store in the directory `root`."""

    root: str
    rounds: int
    queries: int

    def figures(self) -> Generator[Figure, None, None]:
        path, name = os.path.join(self.root, "queries.db"), f"{self.queries:,} queries"
        with SqliteStore(path) as store:
            yield from self._standing(store, name)
        with SqliteStore(path) as store:
            yield from wall_and_cpu(
                f"{name}: recover", [timed(_engine(store)[0].recover)], "s", convert=float
            )

    def _standing(self, store: SqliteStore, name: str) -> Iterator[Figure]:
        engine, source = _engine(store)
        engine.recover()
        starts = [Start(f"q{key}", "average", {"key": key}, "out") for key in range(self.queries)]
        tracemalloc.start()
        engine.start_many(starts)
        engine.checkpoint()
        size_bytes, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        yield Figure(f"{name}: memory of one", (size_bytes / self.queries,), "B")
        for what, values, kind in (
            ("full checkpoint", (), CheckpointKind.FULL),
            ("checkpoint, none changed", (), CheckpointKind.DIFFERENTIAL),
            (f"checkpoint, {CHANGED} changed", range(CHANGED), CheckpointKind.DIFFERENTIAL),
            ("checkpoint, each changed", (_FOR_ALL,), CheckpointKind.DIFFERENTIAL),
        ):
            rounds = []
            for _ in range(self.rounds):
                source.send(values)
                rounds.append(timed(partial(engine.checkpoint, kind)))
            yield from wall_and_cpu(f"{name}: {what}", rounds, "ms", convert=milliseconds)
        rounds = [timed(lambda: source.send(range(_VALUES))) for _ in range(self.rounds)]
        yield from wall_and_cpu(f"{name}: values", rounds, "/s", convert=lambda taken_s: _VALUES / taken_s)
        yield from wall_and_cpu(
            f"{name}: a value and query", rounds, "ns", convert=lambda s: s * 1e9 / _VALUES / self.queries
        )


def _engine(store: SqliteStore) -> tuple[QueryEngine, Numbers]:
    factories = Factories()

    @factories("average")
    def standing(key: int) -> Observable[Any]:
        accepted = (key, _FOR_ALL)
        return Source("in").pipe(where(lambda value: value in accepted), take(_NEVER), average())

    engine = QueryEngine(store, factories, VirtualScheduler())
    source = Numbers()
    engine.add_source("in", source)
    engine.add_sink("out")
    return engine, source
