"""What an engine stores besides the state of its queries: definitions, queries, sources, sinks, clock, log.

    query/meta      version    3
                    clock      {"now_ns": …}
    query/source    <name>     {"watermark": …, "epoch": null, or that of the source then, "missing": …,
                                "end": null, ["completed"] or ["error", text],
                                "time": null, or [highest time, is idle, late, refused]}
    query/stage     <name>     {"end": as above, "skipped": its number of dead letters,
                                "counts": by source, the number of values before the stage began}
    query/sink      <name>     {"low": …, "consumers": {name: acknowledged}, "end": as above}

The rows of definitions and queries are described in `factories`, those of the log in `transaction_log`. If a
save fails, the next one writes its rows again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from rt.errors import UnknownVersion
from rt.objects import CheckpointKind, StateDamaged, StateReader, StateWriter
from rt.query.checkpoint.factories import DEFINITIONS, QUERIES, Recipe, StoredQuery
from rt.query.checkpoint.transaction_log import LOG, LogEntry, number_key
from rt.query.core.row_json import decode, encode

VERSION: Final = 3
ROOT: Final = "query"
"""The tree of categories that an engine owns."""
META: Final = "query/meta"
SOURCES: Final = "query/source"
STAGES: Final = "query/stage"
SINKS: Final = "query/sink"


class _Flight(NamedTuple):
    written: dict[tuple[str, str], None]
    log: range


class QueryCatalog:
    """Not thread-safe."""

    def __init__(self, reader: StateReader) -> None:
        """Read the store. `StateDamaged`, `rt.UnknownVersion`."""
        version = reader.get(META, "version")
        if version is not None and version != b"%d" % VERSION:
            what, got = "the queries have an unknown version", repr(version[:20])
            hint = "It is of an earlier rt: begin with an empty store."
            if not version.isdigit() or int(version) > VERSION:
                hint = "Use a newer rt."
            raise UnknownVersion(what, where=META, got=got, expected=VERSION, hint=hint)
        self.definitions: dict[str, Recipe] = {
            name: Recipe.decode(data, f"{DEFINITIONS}/{name}") for name, data in reader.rows(DEFINITIONS)
        }
        self.queries: dict[str, StoredQuery] = {
            query_id: StoredQuery.decode(data, f"{QUERIES}/{query_id}")
            for query_id, data in reader.rows(QUERIES)
        }
        self.sources = _rows(reader, SOURCES, "watermark", "epoch", "end", "missing", "time")
        self.stages = _rows(reader, STAGES, "end", "skipped", "counts")
        self.sinks = _rows(reader, SINKS, "low", "consumers", "end")
        self._tables: dict[str, Mapping[str, Any]] = {
            DEFINITIONS: self.definitions,
            QUERIES: self.queries,
            SOURCES: self.sources,
            STAGES: self.stages,
            SINKS: self.sinks,
        }
        clock = reader.get(META, "clock")
        self.now_ns: int | None = decode(clock, META, "now_ns")["now_ns"] if clock is not None else None
        """None: the time of the queries has not started."""
        self.log = _entries(reader)
        self._first_entry = min((number for number, _ in self.log), default=0)
        self._next_entry = max((number + 1 for number, _ in self.log), default=0)
        self._uncertain_entries: list[int] = []
        """Numbers of log entries that may be stored although their commit failed. They must be deleted."""
        self._dirty: dict[tuple[str, str], None] = {}
        self._flight: _Flight | None = None
        self._order = max((each.order + 1 for each in self.queries.values()), default=0)

    def next_order(self) -> int:
        self._order += 1
        return self._order - 1

    def define(self, name: str, recipe: Recipe | None) -> None:
        """Set a definition, or delete it (None)."""
        if recipe is None:
            self.definitions.pop(name, None)
        else:
            self.definitions[name] = recipe
        self._dirty[DEFINITIONS, name] = None

    def put_query(self, query_id: str, stored: StoredQuery | None) -> None:
        """Set a query, or delete it (None)."""
        if stored is None:
            self.queries.pop(query_id, None)
        else:
            self.queries[query_id] = stored
            self._order = max(self._order, stored.order + 1)
        self._dirty[QUERIES, query_id] = None

    def put_stage(self, name: str, row: dict[str, Any] | None) -> None:
        """Set the row of a stage, or delete it (None)."""
        if row is None:
            self.stages.pop(name, None)
        else:
            self.stages[name] = row
        self._dirty[STAGES, name] = None

    def drop_sink(self, name: str) -> None:
        self.sinks.pop(name, None)
        self._dirty[SINKS, name] = None

    def append(self, writer: StateWriter, entries: Sequence[LogEntry]) -> Callable[[bool], None]:
        """Put log entries into a writer. Returns a function to call with the outcome of the commit.

        True: the entries are durable. False: that is unknown; the next commit deletes them, and their numbers
        are not used again.
        """
        start, end = self._next_entry, self._next_entry + len(entries)
        doubtful = list(self._uncertain_entries)
        if doubtful:
            writer.delete_many(LOG, map(number_key, doubtful))
        for number, entry in enumerate(entries, start):
            writer.put(LOG, number_key(number), entry.encode())

        def appended(is_durable: bool) -> None:
            self._next_entry = end
            self._uncertain_entries = [] if is_durable else [*doubtful, *range(start, end)]

        return appended

    def save(
        self, writer: StateWriter, *, sources: dict[str, Any], sinks: dict[str, Any], now_ns: int | None
    ) -> None:
        """Write what changed, or everything. `saved` or `save_failed` must follow, unless this raises."""
        self.sources.update(sources)
        self.sinks.update(sinks)
        self.now_ns = now_ns
        writer.put(META, "clock", encode({"now_ns": now_ns}))
        writer.put(META, "version", b"%d" % VERSION)
        written = self._dirty | dict.fromkeys((SOURCES, name) for name in sources)
        written |= dict.fromkeys((SINKS, name) for name in sinks)
        if writer.kind is CheckpointKind.FULL:
            written |= dict.fromkeys((name, key) for name, rows in self._tables.items() for key in rows)
        for category, key in written:
            row = self._tables[category].get(key)
            if row is None:
                writer.delete_many(category, [key])
            else:
                writer.put(category, key, encode(row) if isinstance(row, dict) else row.encode())
        log = range(self._first_entry, self._next_entry)
        if log and writer.kind is not CheckpointKind.FULL:
            writer.delete_many(LOG, map(number_key, log))
        self._flight = _Flight(written, log)
        self._dirty = {}

    def saved(self) -> None:
        assert self._flight is not None
        self._first_entry = max(self._first_entry, self._flight.log.stop)
        self._uncertain_entries.clear()
        self._flight = None

    def save_failed(self) -> None:
        """The save was not committed, or its outcome is unknown."""
        if self._flight is not None:
            self._dirty = {**self._flight.written, **self._dirty}
            self._flight = None


def _rows(reader: StateReader, category: str, *keys: str) -> dict[str, dict[str, Any]]:
    return {name: decode(data, f"{category}/{name}", *keys) for name, data in reader.rows(category)}


def _entries(reader: StateReader) -> list[tuple[int, LogEntry]]:
    found = []
    for key, data in reader.rows(LOG):
        if not key.isdigit():
            raise StateDamaged("the key of a log entry is not a number", where=f"{LOG}/{key}")
        found.append((int(key), LogEntry.decode(data, f"{LOG}/{key}")))
    return sorted(found, key=lambda each: each[0])
