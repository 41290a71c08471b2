"""Queries between a log and a publisher, and a process that runs them until it is killed.

    python query_driver.py LOG STORE COUNT SINK

STORE is a path, or a URL with # and a schema. SINK is JSON: arguments of `rt.Publisher`. Before every step
the process prints the step and its watermark, and reads a line. It ends when the results of COUNT messages
are acknowledged.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import rt
from rt.objects import PostgresStore, SqliteStore
from rt.objects.postgres.address import is_url
from rt.query import Factories, Observable, QueryEngine, Source, VirtualScheduler
from rt.query.checkpoint.edge import Release
from rt.query.core.observable import applied
from rt.query.core.operator import Operator
from rt.query.messages import MessageSink, MessageSource, as_message
from rt.query.operators import buffer_with_count, buffer_with_time_or_count, where
from rt.query.operators import map as mapped
from rt.query.runner import EngineRunner

factories = Factories()

FRAGILE_EVERY = 50
"""One query of the process leaves out every multiple of this number."""


class Shown(Operator[Any, Any]):
    """Emits a function of each value."""

    __slots__ = ("_show",)
    NAME = "shown"

    def __init__(self, show: Any) -> None:
        self._show = show

    def on_next(self, value: Any, /) -> None:
        self.emit(self._show(value))


def _texts() -> Observable[Any]:
    return Source("in").pipe(applied(Shown, lambda message: message.value.decode()))


@factories("pairs")
def pairs(count: int = 2) -> Observable[Any]:
    return _texts().pipe(buffer_with_count(count), applied(Shown, lambda texts: "pair " + " ".join(texts)))


@factories("sevens")
def sevens(seconds: float = 1.5) -> Observable[Any]:
    return _texts().pipe(
        where(lambda text: "7" in text),
        buffer_with_time_or_count(seconds, 3),
        applied(Shown, lambda texts: "sevens " + " ".join(texts)),
    )


@factories("numbers")
def numbers() -> Observable[Any]:
    return _texts().pipe(applied(Shown, int))


@factories("fragile")
def fragile(every: int) -> Observable[Any]:
    """Raises for each number that is divisible by `every`."""
    return Source("in").pipe(mapped(lambda message: 1 // (int(message.value) % every)))


class RunningQueries:
    """A recovered engine with a source, a sink and two queries."""

    def __init__(
        self,
        path: str,
        store: Any,
        sink: dict[str, Any],
        release: Release,
        *,
        log: str = "",
        begin: int | None = 0,
        **source: Any,
    ) -> None:
        self.source = MessageSource(log or path, "s", **source)
        self.engine = QueryEngine(store, factories, VirtualScheduler())
        self.engine.add_source("in", self.source, begin=begin, time_of=lambda message: message.timestamp_ns)
        self.output = self.engine.add_sink("out", release=release, encode=as_message)
        self.engine.recover()
        options = {"stream": "s", "publisher_id": "out", **sink}
        try:
            self.sink = MessageSink(self.output, **options)
        except BaseException:
            self.engine.unload()
            raise
        for name in ("pairs", "sevens"):
            if name not in self.engine.queries:
                self.engine.start(name, name, sink="out")
        self.runner = EngineRunner(self.engine, [self.source], [self.sink], checkpoint_s=0)

    @property
    def watermark(self) -> int:
        """The last position that was processed."""
        return int(self.engine.watermarks["in"])

    def finish(self, count: int) -> None:
        """Run until the output of `count` messages is acknowledged, and close."""
        self.runner.run(lambda: self.watermark >= count - 1 and not len(self.output.buffer))
        self.engine.unload()
        self.sink.close(timeout=0)


def gate(phase: str, queries: RunningQueries) -> None:
    """Print the next step, and wait for a line on stdin."""
    print(phase, queries.watermark, flush=True)  # noqa: T201
    if not sys.stdin.readline():
        sys.exit("stdin was closed")


def gated(queries: RunningQueries) -> None:
    """Wait before every step."""
    pump, checkpoint, acknowledge = queries.source.pump, queries.engine.checkpoint, queries.sink.pump

    def pump_a_few(max_messages: int = 0, timeout: float = 0.0) -> int:
        gate("pump", queries)
        return pump(30, timeout)

    def checkpoint_between() -> None:
        gate("checkpoint", queries)
        checkpoint()
        gate("committed", queries)

    def acknowledge_then() -> None:
        gate("acknowledge", queries)
        acknowledge()

    queries.source.pump = pump_a_few  # type: ignore[method-assign]
    queries.engine.checkpoint = checkpoint_between  # type: ignore[method-assign, assignment]
    queries.sink.pump = acknowledge_then  # type: ignore[method-assign]


def open_store(place: str) -> SqliteStore | PostgresStore:
    """Open a store in a file, or in the schema after the last # of a URL."""
    if not is_url(place):
        return SqliteStore(place)
    url, schema = place.rsplit("#", 1)
    return PostgresStore(url, schema=schema)


def main() -> None:
    log, path, count, sink = sys.argv[1:]
    options = json.loads(sink)
    if "tls" in options:
        options["tls"] = rt.TLS(**options["tls"])
    with open_store(path) as store:
        queries = RunningQueries(log, store, options, "commit")
        if "fragile" not in queries.engine.queries:
            queries.engine.start("fragile", "fragile", {"every": FRAGILE_EVERY})
        gated(queries)
        queries.finish(int(count))


if __name__ == "__main__":
    main()
