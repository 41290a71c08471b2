"""Exactly-once delivery of late values of queries that start and stop."""

from __future__ import annotations

import pytest
from query_engines import FailingStore, Numbers, Sink

from rt.query import RESUME, Factories, QueryEngine, Source, VirtualScheduler, WrongState
from rt.query import operators as ops
from rt.query.checkpoint.edge import Release

IN = Source("in")
TIMES = [0, 10, 20, 3, 30, 31]
"""The fourth is late for a window of 4 seconds."""


class LateWorld:
    """Queries with windows that send late values to a sink. The queries have no other sink."""

    def __init__(self, before: LateWorld | None = None, release: Release = "commit") -> None:
        factories = Factories()
        window = ops.tumbling_window(4, ops.Fold.count(), late="late")
        factories.add("window", lambda take: IN.pipe(ops.take(take), window))
        factories.add("inner", lambda take: IN.pipe(ops.take(1), ops.flat_map(lambda _: IN.pipe(window))))
        self.sink = before.sink if before else Sink()
        self.source = Numbers(before.source.acknowledged if before else -1)
        self.store = FailingStore(before.store.content() if before else None)
        self.engine = QueryEngine(self.store, factories, VirtualScheduler())
        self.engine.add_source("in", self.source, time_of=lambda number: TIMES[number] * 10**9)
        output = self.engine.add_sink("late", encode=lambda late: late["value"], release=release)
        self.engine.recover()
        output.expect(len(self.sink.values))
        output.subscribe(self.sink).start(RESUME)


@pytest.mark.parametrize("of", ["window", "inner"])
@pytest.mark.parametrize("take", [9, 4])
@pytest.mark.parametrize("replaced", [False, True])
def test_late_value_of_stopped_or_replaced_query_survives_crash(of: str, take: int, replaced: bool) -> None:
    """The query has no sink of its own, or has ended. An entry in the log would be enough if it had sent no
    late value.
    """
    world = LateWorld()
    world.engine.start("q", of, {"take": take})
    world.source.pump(2)
    world.engine.checkpoint()
    world.source.pump(4)
    if replaced and world.engine.queries["q"] is not None:
        world.engine.start("q", "window", {"take": 1})
    else:
        world.engine.stop("q")
    world = LateWorld(world)
    world.source.pump(5)
    world.engine.checkpoint()
    world.engine.deliver()
    assert world.sink.values == [3]
    world.engine.unload()


@pytest.mark.parametrize("of", ["window", "inner"])
def test_queries_cannot_start_or_stop_until_late_output_has_caught_up(of: str) -> None:
    """Otherwise new values would reuse ids that the consumer already has, and the consumer would skip
    them.
    """
    world = LateWorld(release="now")
    world.engine.start("q", of, {"take": 9})
    world.source.pump(4)
    world.engine.deliver()
    assert world.sink.values == [3]
    world = LateWorld(world, release="now")
    world.source.pump(2)
    for change in (
        lambda: world.engine.stop("q"),
        lambda: world.engine.start("r", "window", {"take": 9}),
    ):
        with pytest.raises(WrongState, match="not yet produced again"):
            change()
    world.source.pump(4)
    world.engine.start("r", "window", {"take": 9})
    world.engine.stop("q")
    world.engine.unload()
