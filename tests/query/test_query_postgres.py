"""Engines with state on a PostgreSQL server: takeover by another engine, and server failures."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from postgres_server import PostgresServer
from query_engines import Numbers, Sink

import rt
from rt.objects import CommitUnknown, PostgresStore, StoreUnavailable
from rt.query import Factories, Observable, QueryEngine, Source
from rt.query.core.reliable import RESUME
from rt.query.operators import scan

factories = Factories()


@factories("sums")
def sums() -> Observable[int]:
    return Source("in").pipe(scan(lambda total, value: total + value, 0))


class Process:
    """A process with an engine. All processes have the same consumer."""

    def __init__(self, store: PostgresStore, sink: Sink, acknowledged: int = -1) -> None:
        self.store = store
        self.source = Numbers(acknowledged)
        self.engine = QueryEngine(store, factories)
        self.engine.add_source("in", self.source)
        self.output = self.engine.add_sink("out", release="commit")
        self.engine.recover()
        self.subscription = self.output.subscribe(sink)
        self.subscription.start(RESUME)
        if "q" not in self.engine.queries:
            self.engine.start("q", "sums", sink="out")

    def work(self, end: int) -> None:
        """Process the numbers below `end`, save, and deliver the results."""
        self.source.pump(end)
        self.engine.checkpoint()
        self.engine.deliver()


def expected(end: int) -> list[int]:
    return [number * (number + 1) // 2 for number in range(end)]


@pytest.fixture
def schema(tmp_path: Path) -> str:
    return PostgresServer.schema(tmp_path)


@pytest.fixture
def server() -> Iterator[PostgresServer]:
    from postgres_server import missing

    if (why := missing()) is not None:
        pytest.skip(why)
    made = PostgresServer()
    yield made
    made.close()


def test_engine_continues_after_fencing_its_predecessor(postgres: PostgresServer, schema: str) -> None:
    sink = Sink()
    with PostgresStore(postgres.url, schema=schema, fence=1) as first_store:
        first = Process(first_store, sink)
        first.work(10)
        first.source.pump(15)  # not saved, so the next process handles them again
        with PostgresStore(postgres.url, schema=schema, fence=2) as second_store:
            second = Process(second_store, sink, first.source.acknowledged)
            second.work(20)
            assert sink.values == expected(20)
            first.source.pump(30)
            for _ in range(2):
                with pytest.raises(rt.Fenced):
                    first.engine.checkpoint()
                first.engine.deliver()
            assert sink.values == expected(20)
            first.engine.unload()
            second.work(25)
            second.engine.unload()
    assert sink.values == expected(25)


def test_engine_continues_after_its_server_is_killed(server: PostgresServer, schema: str) -> None:
    sink = Sink()
    with PostgresStore(server.url, schema=schema, timeout_s=5, connect_timeout_s=5) as store:
        process = Process(store, sink)
        for start in range(0, 30, 10):
            process.work(start + 5)
            server.kill()
            process.source.pump(start + 10)
            with pytest.raises((StoreUnavailable, CommitUnknown)):
                process.engine.checkpoint()
            server.start()
        process.work(30)
        process.engine.unload()
    assert sink.values == expected(30)
    with PostgresStore(server.url, schema=schema) as store:
        process = Process(store, sink, process.source.acknowledged)
        process.work(35)
        process.engine.unload()
    assert sink.values == expected(35)
