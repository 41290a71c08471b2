"""Observables of reactivex as sources and as outputs of an engine."""

from __future__ import annotations

from typing import Any

import pytest
import reactivex
from reactivex import operators as rx
from reactivex.subject import Subject

from rt.objects import MemoryStore
from rt.query import Backlogged, Factories, QueryEngine, Source
from rt.query.operators import buffer_with_count
from rt.query.rx import RxSource, to_reactivex

factories = Factories()
factories.add("pairs", lambda: Source("in").pipe(buffer_with_count(2)))


def engine_of(source: RxSource, store: MemoryStore | None = None) -> tuple[QueryEngine, Any]:
    engine = QueryEngine(store or MemoryStore(), factories)
    engine.add_source("in", source)
    output = engine.add_sink("out", limit=5)
    engine.recover()
    if not engine.queries:
        engine.start("q", "pairs", sink="out")
    return engine, output


def test_query_reads_from_and_writes_to_reactivex_observables() -> None:
    source, got = RxSource(reactivex.range(0, 7)), list[Any]()
    engine, output = engine_of(source)
    to_reactivex(output).pipe(rx.map(sum)).subscribe(got.append)
    source.pump()
    engine.deliver()
    assert got == []  # No checkpoint holds it yet.
    engine.checkpoint()
    engine.deliver()
    assert (got, len(output.buffer)) == ([1, 5, 9, 6], 0)
    assert engine.queries == {"q": ""}


def test_observer_and_source_ids_continue_after_engine_restart() -> None:
    subject, got, store = Subject[int](), list[Any](), MemoryStore()
    for run in range(2):
        source = RxSource(subject)
        engine, output = engine_of(source, store)
        to_reactivex(output).subscribe(got.append)
        for number in range(3):
            subject.on_next(10 * run + number)
        source.pump()
        engine.checkpoint()
        engine.deliver()
        engine.checkpoint()
        assert engine.watermarks == {"in": 3 * run + 2}
        engine.unload()
    assert got == [[0, 1], [2, 10], [11, 12]]


def test_observable_values_wait_while_output_is_full() -> None:
    source = RxSource(reactivex.range(0, 20))
    engine, output = engine_of(source)
    got: list[Any] = []
    to_reactivex(output).subscribe(got.append)
    for _ in range(5):
        try:
            source.pump()
        except Backlogged:
            engine.checkpoint()
            engine.deliver()
    engine.checkpoint()
    engine.deliver()
    assert got == [[n, n + 1] for n in range(0, 20, 2)]


def test_observable_over_source_limit_raises_backlogged() -> None:
    subject = Subject[int]()
    source = RxSource(subject, limit=1)
    engine_of(source)
    subject.on_next(1)
    with pytest.raises(Backlogged):
        subject.on_next(2)


def test_observable_error_ends_its_queries() -> None:
    source = RxSource(reactivex.throw(ValueError("no")))
    engine, _ = engine_of(source)
    source.pump()
    assert engine.queries == {"q": "ValueError: no"}
