"""What an engine knows besides the state of its queries: definitions, queries, sources, sinks, clock, log.

    query/meta      version    1
                    clock      {"now_ns": …}
    query/source    <name>     {"watermark": …, "end": null, or ["completed"], or ["error", text]}
    query/sink      <name>     {"low": …, "consumers": {name: acknowledged}, "end": as above}

and what `definitions` and `transaction_log` say. As with artifacts, what a save took counts as changed again
if its commit fails.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

from rt.errors import UnknownVersion
from rt.objects import CheckpointKind, StateDamaged, StateReader, StateWriter
from rt.query.definitions import DEFINITIONS, QUERIES, Recipe, Standing, decode
from rt.query.rows import encode
from rt.query.transaction_log import LOG, Entry, number_key

VERSION: Final = 1
META: Final = "query/meta"
SOURCES: Final = "query/source"
SINKS: Final = "query/sink"


class _Flight(NamedTuple):
    taken: dict[tuple[str, str], None]
    log: range


class Catalog:
    """See the module. Not thread-safe."""

    def __init__(self, reader: StateReader) -> None:
        """Read what is stored. `StateDamaged`, `rt.UnknownVersion`."""
        _check_version(reader)
        self.definitions: dict[str, Recipe] = {
            name: Recipe.decode(data, f"{DEFINITIONS}/{name}") for name, data in reader.rows(DEFINITIONS)
        }
        self.standing: dict[str, Standing] = {
            query_id: Standing.decode(data, f"{QUERIES}/{query_id}")
            for query_id, data in reader.rows(QUERIES)
        }
        self.sources = _rows(reader, SOURCES)
        self.sinks = _rows(reader, SINKS)
        clock = reader.get(META, "clock")
        self.now_ns: int | None = decode(clock, META)["now_ns"] if clock is not None else None
        """None: the time of the queries has not begun."""
        self.log = _entries(reader)
        self._first_entry = min((number for number, _ in self.log), default=0)
        self._next_entry = max((number + 1 for number, _ in self.log), default=0)
        self._doubtful: list[int] = []
        """Entries that may be stored, and must not be: the outcome of their commit is not known."""
        self._dirty: dict[tuple[str, str], None] = {}
        self._flight: _Flight | None = None
        self._order = max((each.order + 1 for each in self.standing.values()), default=0)

    def next_order(self) -> int:
        """The place of a new query."""
        self._order += 1
        return self._order - 1

    # Changes

    def define(self, name: str, recipe: Recipe | None) -> None:
        """A definition, new or gone (None)."""
        if recipe is None:
            self.definitions.pop(name, None)
        else:
            self.definitions[name] = recipe
        self._dirty[DEFINITIONS, name] = None

    def stand(self, query_id: str, standing: Standing | None) -> None:
        """A query, new, changed or gone (None)."""
        if standing is None:
            self.standing.pop(query_id, None)
        else:
            self.standing[query_id] = standing
            self._order = max(self._order, standing.order + 1)
        self._dirty[QUERIES, query_id] = None

    def append(self, writer: StateWriter, entries: Sequence[Entry]) -> Callable[[bool], None]:
        """Put entries into a writer. What is returned is called when that is durable, with True; with False
        where that is not known: the next commit takes them away again, and their numbers are not used again.
        """
        begin, end = self._next_entry, self._next_entry + len(entries)
        doubtful = list(self._doubtful)
        if doubtful:
            writer.delete_many(LOG, map(number_key, doubtful))
        for number, entry in enumerate(entries, begin):
            writer.put(LOG, number_key(number), entry.encode())

        def appended(is_durable: bool) -> None:
            self._next_entry = end
            self._doubtful = [] if is_durable else [*doubtful, *range(begin, end)]

        return appended

    # Saving

    def save(
        self, writer: StateWriter, *, sources: dict[str, Any], sinks: dict[str, Any], now_ns: int | None
    ) -> None:
        """Put what changed, or everything; `saved` or `save_failed` must follow, unless this raises."""
        self.sources.update(sources)
        self.sinks.update(sinks)
        self.now_ns = now_ns
        always = [(SOURCES, name) for name in sources] + [(SINKS, name) for name in sinks]
        taken = {**self._dirty, **dict.fromkeys([*always, (META, "clock"), (META, "version")])}
        if writer.kind is CheckpointKind.FULL:
            taken |= dict.fromkeys((DEFINITIONS, name) for name in self.definitions)
            taken |= dict.fromkeys((QUERIES, query_id) for query_id in self.standing)
            taken |= dict.fromkeys((SOURCES, name) for name in self.sources)
            taken |= dict.fromkeys((SINKS, name) for name in self.sinks)
        for category, key in taken:
            row = self._row(category, key)
            if row is None:
                writer.delete_many(category, [key])
            else:
                writer.put(category, key, row)
        log = range(self._first_entry, self._next_entry)
        if log and writer.kind is not CheckpointKind.FULL:
            writer.delete_many(LOG, map(number_key, log))
        self._flight = _Flight(taken, log)
        self._dirty = {}

    def saved(self) -> None:
        """The save is durable."""
        assert self._flight is not None
        self._first_entry = max(self._first_entry, self._flight.log.stop)
        self._doubtful.clear()
        self._flight = None

    def save_failed(self) -> None:
        """It was not committed, or that is not known."""
        if self._flight is not None:
            self._dirty = {**self._flight.taken, **self._dirty}
            self._flight = None

    def _row(self, category: str, key: str) -> bytes | None:
        match category:
            case "query/definition":
                recipe = self.definitions.get(key)
                return recipe.encode() if recipe else None
            case "query/query":
                standing = self.standing.get(key)
                return standing.encode() if standing else None
            case "query/source":
                return encode(self.sources[key])
            case "query/sink":
                return encode(self.sinks[key])
            case _:
                return encode({"now_ns": self.now_ns}) if key == "clock" else b"%d" % VERSION


def _check_version(reader: StateReader) -> None:
    said = reader.get(META, "version")
    if said is not None and said != b"%d" % VERSION:
        raise UnknownVersion(
            "queries of another version",
            where=META,
            got=repr(said[:20]),
            wanted=VERSION,
            hint="Use a newer rt.",
        )


def _rows(reader: StateReader, category: str) -> dict[str, dict[str, Any]]:
    return {name: decode(data, f"{category}/{name}") for name, data in reader.rows(category)}


def _entries(reader: StateReader) -> list[tuple[int, Entry]]:
    found = []
    for key, data in reader.rows(LOG):
        if not key.isdigit():
            raise StateDamaged("an entry of the log has no number", where=f"{LOG}/{key}")
        found.append((int(key), Entry.decode(data, f"{LOG}/{key}")))
    return sorted(found, key=lambda each: each[0])
