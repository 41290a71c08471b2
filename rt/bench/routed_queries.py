"""The speed of many alerts for symbols: each decodes every message itself, or they share a stage with keys.

The alert is that of docs/queries.md, without the encoding of results.
"""

from __future__ import annotations

import json
import os
from collections.abc import Generator
from functools import partial
from typing import Any

from msgspec import Struct

from rt.bench.measure import Figure, timed, wall_and_cpu
from rt.bench.queries import Numbers
from rt.objects import SqliteStore
from rt.query import Factories, Observable, QueryEngine, Source, Start, VirtualScheduler
from rt.query.operators import distinct_until_changed, select, where

_ROUTED = 20_000
_SCANNED = 100_000
"""Messages of a round: all together, or divided by the number of queries."""


class RoutedQueriesBench(Struct, frozen=True):
    """Runs `queries` alerts, each for a symbol of its own, with a store in the directory `root`."""

    root: str
    rounds: int
    queries: int

    def figures(self) -> Generator[Figure, None, None]:
        few = max(2, _SCANNED // self.queries)
        for kind, what, count in (
            ("alert", "each decodes", few),
            ("shared", "a stage decodes", 20 * few),
            ("routed", "a stage with keys", _ROUTED),
        ):
            with SqliteStore(os.path.join(self.root, f"{kind}.db")) as store:
                engine, source = _engine(store)
                engine.recover()
                starts = [
                    Start(f"q{number}", kind, {"symbol": f"S{number}"}, "out")
                    for number in range(self.queries)
                ]
                engine.start_many(starts)
                rounds = []
                for number in range(self.rounds):
                    values = [_message(7919 * each % self.queries, number % 2) for each in range(count)]
                    rounds.append(timed(partial(source.send, values)))
                    engine.checkpoint()
                name = f"{self.queries:,} alerts, {what}: messages"
                yield from wall_and_cpu(name, rounds, "/s", convert=lambda taken_s, n=count: n / taken_s)  # type: ignore[misc]
                engine.unload()


def _message(number: int, value: int) -> bytes:
    return json.dumps({"symbol": f"S{number}", "value": 99 + 2 * value, "venue": "X"}).encode()


def _engine(store: SqliteStore) -> tuple[QueryEngine, Numbers]:
    factories = Factories()

    def crossings(prices: Observable[Any]) -> Observable[Any]:
        return prices.pipe(
            distinct_until_changed(lambda price: price["value"] > 100),
            where(lambda price: price["value"] > 100),
        )

    def of(symbol: str) -> Any:
        return where(lambda price: price["symbol"] == symbol)

    factories.add("alert", lambda symbol: crossings(Source("in").pipe(select(json.loads), of(symbol))))
    factories.add("shared", lambda symbol: crossings(Source("prices").pipe(of(symbol))))
    factories.add("routed", lambda symbol: crossings(Source("prices", key=symbol)))
    engine, source = QueryEngine(store, factories, VirtualScheduler()), Numbers()
    engine.add_source("in", source)
    prices = Source("in").pipe(select(json.loads))
    engine.add_stage("prices", prices, key_of=lambda price: price["symbol"])
    engine.add_sink("out", limit=10_000_000)
    return engine, source
