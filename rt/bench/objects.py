"""The object space's speed and size in a store: a save after a few edits, independent of object size.

Each round makes ten edits of one object and saves them. The time is that of the save with its synced commit.
Many small objects show the cost of each one: in memory, in the store, to save and to open.
"""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Callable, Generator, Iterator
from typing import Any

from msgspec import Struct

from rt.bench.measure import Figure, Stopwatch, TimeUsed, milliseconds, timed, wall_and_cpu
from rt.bench.store_places import StorePlace
from rt.objects import CheckpointKind, PersistedObjectSpace, Store

EDITS = 10
_GOAL_MS = 5.0


class ObjectsBench(Struct, frozen=True):
    """Saves objects of a hundredth of `items` elements, then of `items`; then many small objects."""

    place: StorePlace
    """Where the stores are made."""
    rounds: int
    items: int

    def figures(self) -> Generator[Figure, None, None]:
        hundredth = max(EDITS, self.items // 100)
        for items in (hundredth, self.items):
            yield from self._large(items)
        yield from self._small(hundredth)

    def _large(self, items: int) -> Iterator[Figure]:
        store_name = f"items_{items}"
        with self.place.open(store_name) as store:
            space = PersistedObjectSpace()
            space.load(store.reader())
            edits = _fill(space, items)
            saves = [timed(lambda: space.checkpoint(store, CheckpointKind.FULL))]
            yield from wall_and_cpu(
                f"{items:,} items: full save", saves, "rows/s", convert=lambda taken_s: 3 * items / taken_s
            )
            for name, edit in edits.items():
                saves = [_save(space, store, edit) for _ in range(self.rounds)]
                what = f"{items:,} items: {name}, save after {EDITS} edits"
                yield from wall_and_cpu(what, saves, "ms", _GOAL_MS, convert=milliseconds)
        yield from self._open(store_name, f"{items:,} items", "a list", lambda space: space.get_list("list"))

    def _small(self, count: int) -> Iterator[Figure]:
        """Many small objects, as standing queries have: the size of one, and saves after some changed."""
        name = f"{count:,} values"
        with self.place.open("small") as store:
            space = PersistedObjectSpace()
            space.load(store.reader())
            tracemalloc.start()
            values = [space.create_value(f"query-{number}", 0, of=int) for number in range(count)]
            space.checkpoint(store)
            size_bytes, _ = tracemalloc.get_traced_memory()
            tracemalloc.stop()
            yield Figure(f"{name}: memory of one", (size_bytes / count,), "B")
            for edits, what in ((count, "each"), (EDITS, str(EDITS)), (1, "1")):
                changed, goal = values[:edits], None if edits == count else _GOAL_MS

                def edit(_: int, changed: list[Any] = changed) -> None:
                    for value in changed:
                        value.value += 1

                saves = [_save(space, store, edit, edits=1) for _ in range(self.rounds)]
                yield from wall_and_cpu(
                    f"{name}: save where {what} changed", saves, "ms", goal, convert=milliseconds
                )
        yield Figure(f"{name}: stored size of one", (self.place.size_bytes("small") / count,), "B")
        yield from self._open(
            "small", name, "all", lambda space: [space.get_value(each) for each in space.ids()]
        )

    def _open(
        self, store_name: str, name: str, what: str, load: Callable[[PersistedObjectSpace], object]
    ) -> Iterator[Figure]:
        stopwatch = Stopwatch()
        with self.place.open(store_name) as store:
            opened = stopwatch.read()
            yield from wall_and_cpu(f"{name}: open, all verified", [opened], "s", convert=float)
            space = PersistedObjectSpace()
            space.load(store.reader())
            loads = [timed(lambda: load(space))]
            yield from wall_and_cpu(f"{name}: load {what}", loads, "s", convert=float)


def _fill(space: PersistedObjectSpace, items: int) -> dict[str, Callable[[int], object]]:
    """Make three objects of `items` elements. Return an edit function for each; its argument is the number of
    the edit.
    """
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


def _save(
    space: PersistedObjectSpace, store: Store, edit: Callable[[int], Any], *, edits: int = EDITS
) -> TimeUsed:
    """Edit, then save. Only the save is measured."""
    for number in range(edits):
        edit(number)
    return timed(lambda: space.checkpoint(store))
