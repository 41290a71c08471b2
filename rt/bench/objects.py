"""The object space's speed, in an SQLite file: the cost of a save after a few edits, independent of object
size.

Each round makes ten edits of one object and saves them. The time is that of the save with its synced commit.
"""

from __future__ import annotations

import os
import random
import tracemalloc
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Any

from rt.bench.measure import Figure, Stopwatch, TimeUsed, milliseconds, seconds, timed, wall_and_cpu
from rt.objects import CheckpointKind, PersistedObjectSpace, SqliteStore

EDITS = 10
_GOAL_MS = 5.0


@dataclass(frozen=True, slots=True)
class ObjectsBench:
    """Saves objects of a hundredth of `items` elements, then of `items`; then many small objects."""

    root: str
    """Directory of the SQLite files."""
    rounds: int
    items: int

    def figures(self) -> Generator[Figure, None, None]:
        hundredth = max(EDITS, self.items // 100)
        for items in (hundredth, self.items):
            yield from self._large(items)
        yield from self._small(hundredth)

    def _large(self, items: int) -> Iterator[Figure]:
        path = os.path.join(self.root, f"{items}.db")
        with SqliteStore(path) as store:
            space = PersistedObjectSpace()
            space.load(store.reader())
            edits = _fill(space, items)
            taken_s = seconds(lambda: space.checkpoint(store, CheckpointKind.FULL))
            yield Figure(f"{items:,} items: full save", (3 * items / taken_s,), "rows/s")
            for name, edit in edits.items():
                saves = [_save(space, store, edit) for _ in range(self.rounds)]
                what = f"{items:,} items: {name}, save after {EDITS} edits"
                yield from wall_and_cpu(what, saves, "ms", _GOAL_MS, convert=milliseconds)
        yield from _open(path, items)

    def _small(self, count: int) -> Iterator[Figure]:
        """Many small objects, as standing queries have: the size of one, and a save after all changed."""
        with SqliteStore(os.path.join(self.root, "small.db")) as store:
            space = PersistedObjectSpace()
            space.load(store.reader())
            tracemalloc.start()
            values = [space.create_value(f"query-{number}", 0, of=int) for number in range(count)]
            space.checkpoint(store)
            size_bytes, _ = tracemalloc.get_traced_memory()
            tracemalloc.stop()
            yield Figure(f"{count:,} values: memory of one", (size_bytes / count,), "B")
            for changed, what, goal in ((values, "each", None), (values[:EDITS], str(EDITS), _GOAL_MS)):
                rounds = []
                for number in range(1, self.rounds + 1):
                    for value in changed:
                        value.value += number
                    rounds.append(milliseconds(seconds(lambda: space.checkpoint(store))))
                yield Figure(f"{count:,} values: save where {what} changed", tuple(rounds), "ms", goal)


def _open(path: str, items: int) -> Iterator[Figure]:
    stopwatch = Stopwatch()
    with SqliteStore(path) as store:
        yield Figure(f"{items:,} items: open, all verified", (stopwatch.read().wall_s,), "s")
        space = PersistedObjectSpace()
        space.load(store.reader())
        yield Figure(f"{items:,} items: load a list", (seconds(lambda: space.get_list("list")),), "s")


def _fill(space: PersistedObjectSpace, items: int) -> dict[str, Callable[[int], object]]:
    """Make three objects of `items` elements. Returns an edit of each, which gets its number."""
    draw = random.Random(7)
    values = space.create_list("list", of=int)
    values.extend(range(items))
    queue = space.create_queue("queue", of=int)
    queue.extend(range(items))
    mapping = space.create_dictionary("dictionary", keys=int, values=str)
    for key in range(items):
        mapping[key] = "value"

    def edit_list(number: int) -> None:
        if number % 2:
            values[draw.randrange(items)] = number
        else:
            values.append(number)

    def edit_queue(number: int) -> None:
        if number % 2:
            queue.dequeue()
        else:
            queue.enqueue(number)

    def edit_dictionary(number: int) -> None:
        if number % 2:
            mapping[draw.randrange(items)] = "other"
        else:
            mapping[items + number] = "new"

    return {"list": edit_list, "queue": edit_queue, "dictionary": edit_dictionary}


def _save(space: PersistedObjectSpace, store: SqliteStore, edit: Callable[[int], Any]) -> TimeUsed:
    """Edit, then save. Only the save is measured."""
    for number in range(EDITS):
        edit(number)
    return timed(lambda: space.checkpoint(store))
