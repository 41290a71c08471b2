"""The speed of documented queries with many keys: sessions of users, and the top pages of a window.

The queries are those of docs/queries.md, without decoding and encoding of messages.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator
from typing import Any

from msgspec import Struct

from rt.bench.measure import Figure, milliseconds, timed, wall_and_cpu
from rt.bench.queries import Numbers
from rt.objects import PersistedDictionary, SqliteStore
from rt.query import Factories, Observable, Operator, QueryEngine, Source, VirtualScheduler, applied
from rt.query.core.scheduler import NS_PER_S
from rt.query.operators import count_by, flat_map, select, where, window_with_time

PAGES = 10_000
_CLICKS = 20_000
_START_NS = 1_767_225_600 * NS_PER_S
_GAP_S = 1800.0


class QueryPatternsBench(Struct, frozen=True):
    """Opens sessions of `users` users, with a store in the directory `root`."""

    root: str
    rounds: int
    users: int

    def figures(self) -> Generator[Figure, None, None]:
        yield from self._sessions()
        yield from self._top()

    def _sessions(self) -> Iterator[Figure]:
        path, name = os.path.join(self.root, "sessions.db"), f"sessions of {self.users:,} users"
        with SqliteStore(path) as store:
            engine, source = _engine(store)
            engine.recover()
            engine.start("sessions", "sessions", {}, sink="out")
            opened = timed(lambda: source.send(_click(user, user) for user in range(self.users)))
            yield from wall_and_cpu(
                f"{name}: clicks that open one", [opened], "/s", convert=lambda taken_s: self.users / taken_s
            )
            engine.checkpoint()
            rounds = []
            for number in range(self.rounds):
                source.send([_click(number * 7919 % self.users, self.users + number)])
                rounds.append(timed(engine.checkpoint))
            yield from wall_and_cpu(f"{name}: checkpoint, one click", rounds, "ms", convert=milliseconds)
            engine.unload()
        with SqliteStore(path) as store:
            engine, _ = _engine(store)
            yield from wall_and_cpu(f"{name}: recover", [timed(engine.recover)], "s", convert=float)
            engine.unload()

    def _top(self) -> Iterator[Figure]:
        name = f"top pages of {PAGES:,}"
        with SqliteStore(os.path.join(self.root, "top.db")) as store:
            engine, source = _engine(store)
            engine.recover()
            engine.start("top", "top", {}, sink="out")
            source.send(_click(page, page) for page in range(PAGES))
            clicks, saves = [], []
            for number in range(self.rounds):
                values = [_click((number + 1) * each, PAGES + each) for each in range(_CLICKS)]
                clicks.append(timed(lambda values=values: source.send(values)))  # type: ignore[misc]
                engine.checkpoint()
                source.send(values[:1])
                saves.append(timed(engine.checkpoint))
            yield from wall_and_cpu(
                f"{name}: clicks", clicks, "/s", convert=lambda taken_s: _CLICKS / taken_s
            )
            yield from wall_and_cpu(f"{name}: checkpoint, one click", saves, "ms", convert=milliseconds)
            engine.unload()


class Sessions(Operator[Any, Any]):
    """The pages of each user after a time without clicks."""

    __slots__ = ("_open",)
    NAME = "sessions"

    def on_open(self) -> None:
        self._open: PersistedDictionary[str, list[str]] = self.objects.dictionary("open", keys=str)

    def on_next(self, value: Any, /) -> None:
        user = value["user"]
        self._open[user] = [*self._open.get(user, []), value["page"]]
        self.set_timer(self.now_ns + round(_GAP_S * NS_PER_S), user)

    def on_timer(self, key: str, /) -> None:
        self.emit({"user": key, "pages": self._open.pop(key)})


def _click(number: int, after_us: int) -> dict[str, Any]:
    """A click of a user on a page, some time after the start: all within a minute."""
    at_ns = _START_NS + after_us * 1000
    return {"user": f"user{number}", "page": f"/page/{number % PAGES}", "at_ns": at_ns}


def _engine(store: SqliteStore) -> tuple[QueryEngine, Numbers]:
    factories = Factories()

    @factories("sessions")
    def sessions() -> Observable[Any]:
        return Source("clicks").pipe(applied(Sessions))

    @factories("top")
    def top() -> Observable[Any]:
        def first(counts: dict[str, int]) -> list[tuple[str, int]]:
            return sorted(counts.items(), key=lambda each: (-each[1], each[0]))[:10]

        return Source("clicks").pipe(
            window_with_time(60),
            flat_map(lambda window: window.pipe(count_by(lambda click: click["page"]), select(first))),
            where(bool),
        )

    engine = QueryEngine(store, factories, VirtualScheduler())
    source = Numbers()
    engine.add_source("clicks", source, time_of=lambda click: click["at_ns"])
    engine.add_sink("out")
    return engine, source
