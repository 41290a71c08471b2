"""The object space's speed, in an SQLite file: the cost of a save after a few edits, independent of object
size.

Each round makes ten edits of one object and saves them. The time is that of the save with its synced commit.
CPU time is reported too, as it does not depend on the load of the machine and its disk.
"""

from __future__ import annotations

import os
import random
import time
import tracemalloc
from collections.abc import Callable, Generator, Iterator
from typing import Any

from rt.bench.measure import Bench, Figure, measured, seconds
from rt.objects import CheckpointKind, PersistedObjectSpace, SqliteStore

EDITS = 10
_GOAL_MS = 5.0


class ObjectsBench(Bench):
    """Saves objects of `items` elements, then of a hundredth of them, and many small objects."""

    def __init__(self, directory: str | None, *, rounds: int, items: int) -> None:
        super().__init__(directory, rounds)
        self._items = items
        self._hundredth = max(EDITS, items // 100)
        self._draw = random.Random(7)

    def figures(self) -> Generator[Figure, None, None]:
        for items in (self._hundredth, self._items):
            yield from self._large(items)
        yield from self._small()

    def _large(self, items: int) -> Iterator[Figure]:
        path = os.path.join(self._root, f"{items}.db")
        with SqliteStore(path) as store:
            space = PersistedObjectSpace()
            space.load(store.reader())
            edits = self._filled(space, items)
            taken = seconds(lambda: space.checkpoint(store, CheckpointKind.FULL))
            yield Figure(f"{items:,} items: full save", (3 * items / taken,), "rows/s")
            for name, edit in edits.items():
                saves = [self._save(space, store, edit) for _ in range(self._rounds)]
                wall, processor = zip(*saves, strict=True)
                what = f"{items:,} items: {name}, save after {EDITS} edits"
                yield Figure(what, wall, "ms", _GOAL_MS)
                yield Figure(f"{what}, CPU", processor, "ms", _GOAL_MS)
        yield from self._open(path, items)

    def _open(self, path: str, items: int) -> Iterator[Figure]:
        start = time.perf_counter()
        with SqliteStore(path) as store:
            yield Figure(f"{items:,} items: open, all verified", (time.perf_counter() - start,), "s")
            space = PersistedObjectSpace()
            space.load(store.reader())
            yield Figure(f"{items:,} items: load a list", (seconds(lambda: space.get_list("list")),), "s")

    def _filled(self, space: PersistedObjectSpace, items: int) -> dict[str, Callable[[int], object]]:
        """Three objects of `items` elements, and an edit of each."""
        listed = space.create_list("list", of=int)
        listed.extend(range(items))
        queue = space.create_queue("queue", of=int)
        queue.extend(range(items))
        held = space.create_dictionary("dictionary", keys=int, values=str)
        for key in range(items):
            held[key] = "value"

        def edit_list(number: int) -> None:
            if number % 2:
                listed[self._draw.randrange(items)] = number
            else:
                listed.append(number)

        def edit_queue(number: int) -> None:
            if number % 2:
                queue.dequeue()
            else:
                queue.enqueue(number)

        def edit_dictionary(number: int) -> None:
            if number % 2:
                held[self._draw.randrange(items)] = "other"
            else:
                held[items + number] = "new"

        return {"list": edit_list, "queue": edit_queue, "dictionary": edit_dictionary}

    def _save(
        self, space: PersistedObjectSpace, store: SqliteStore, edit: Callable[[int], Any]
    ) -> tuple[float, float]:
        """Edit, then save. Returns milliseconds of wall-clock and CPU time."""
        for number in range(EDITS):
            edit(number)
        wall, processor = measured(lambda: space.checkpoint(store))
        return wall * 1000, processor * 1000

    def _small(self) -> Iterator[Figure]:
        """Many small objects, as standing queries have: the size of one, and a save after all changed."""
        count = self._hundredth
        with SqliteStore(os.path.join(self._root, "small.db")) as store:
            space = PersistedObjectSpace()
            space.load(store.reader())
            tracemalloc.start()
            values = [space.create_value(f"query-{number}", 0, of=int) for number in range(count)]
            space.checkpoint(store)
            taken, _ = tracemalloc.get_traced_memory()
            tracemalloc.stop()
            yield Figure(f"{count:,} values: memory of one", (taken / count,), "B")
            rounds = []
            for number in range(self._rounds):
                for value in values:
                    value.value = number
                rounds.append(seconds(lambda: space.checkpoint(store)) * 1000)
            yield Figure(f"{count:,} values: save where each changed", tuple(rounds), "ms")
            rounds = []
            for number in range(self._rounds):
                for value in values[:EDITS]:
                    value.value = -number
                rounds.append(seconds(lambda: space.checkpoint(store)) * 1000)
            yield Figure(f"{count:,} values: save where {EDITS} changed", tuple(rounds), "ms", _GOAL_MS)
