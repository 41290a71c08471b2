"""Measures the size and the duration of checkpoints, while their rows are written."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from typing import Any, Final
from urllib.parse import unquote

from msgspec import Struct, field
from msgspec.structs import replace

from rt.objects import CheckpointKind, StateReader, StateWriter, Store
from rt.query.checkpoint.catalog import META
from rt.query.core.runtime import GROUPS, OBJECTS


class CheckpointStats(Struct):
    """Statistics since the engine was made. The fields `bytes` to `kind` are of the last checkpoint.

    `bytes`: the size of the values of rows, without keys. `query_bytes`: by query, the size in the last
    checkpoint that wrote rows of the query. A full checkpoint writes the whole state of the query.
    """

    count: int = 0
    failures: int = 0
    seconds_sum: float = 0.0
    bytes_sum: int = 0
    bytes: int = 0
    rows: int = 0
    seconds: float = 0.0
    """From `begin` to the end of the commit."""
    ended_ns: int | None = None
    """In ns since the Unix epoch."""
    kind: str = ""
    query_bytes: dict[str, int] = field(default_factory=dict)


class MeasuredStore:
    """A store whose commits of checkpoints are measured. Transactions that only append to the log are not."""

    def __init__(
        self,
        store: Store,
        clock: Callable[[], float] = time.perf_counter,
        clock_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self._store: Final = store
        self._stats: Final = CheckpointStats()
        self._lock = threading.Lock()
        """Guards `_stats`."""
        self._clock: Final = clock
        self._clock_ns: Final = clock_ns

    @property
    def stats(self) -> CheckpointStats:
        """A copy. From any thread."""
        with self._lock:
            return replace(self._stats, query_bytes=dict(self._stats.query_bytes))

    def reader(self) -> StateReader:
        return self._store.reader()

    def begin(self, kind: CheckpointKind) -> StateWriter:
        writer = self._store.begin(kind)
        try:
            return _MeasuredWriter(writer, self._finish, self._clock())
        except BaseException:
            writer.rollback()  # After an interrupt the caller has no writer to roll back.
            raise

    def close(self) -> None:
        self._store.close()

    def _finish(self, writer: _MeasuredWriter, has_succeeded: bool) -> None:
        if not writer.is_checkpoint:
            return
        with self._lock:
            stats = self._stats
            if not has_succeeded:
                stats.failures += 1
                return
            stats.count += 1
            stats.seconds = self._clock() - writer.started
            stats.seconds_sum += stats.seconds
            stats.rows, stats.bytes = writer.rows, writer.bytes
            stats.bytes_sum += writer.bytes
            stats.ended_ns = self._clock_ns()
            stats.kind = writer.kind.value
            stats.query_bytes.update(writer.query_bytes)
            for each in writer.deleted:
                stats.query_bytes.pop(each, None)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


class _MeasuredWriter:
    def __init__(
        self, writer: StateWriter, on_end: Callable[[_MeasuredWriter, bool], object], started: float
    ) -> None:
        self._writer: Final = writer
        self._on_end: Final = on_end
        self.started: Final = started
        self.rows = 0
        self.bytes = 0
        self.is_checkpoint = False
        self.query_bytes: Counter[str] = Counter()
        self.deleted: list[str] = []

    @property
    def kind(self) -> CheckpointKind:
        return self._writer.kind

    @property
    def store_id(self) -> str:
        return self._writer.store_id

    def reader(self) -> StateReader:
        return self._writer.reader()

    def put(self, category: str, key: str, data: bytes) -> None:
        self._count(category, key, data)
        self._writer.put(category, key, data)

    def put_many(self, category: str, rows: Iterable[tuple[str, bytes]]) -> None:
        self._writer.put_many(category, self._counted(category, rows))

    def delete_many(self, category: str, keys: Iterable[str]) -> None:
        if category == GROUPS:
            keys = list(keys)
            self.deleted += keys
        self._writer.delete_many(category, keys)

    def clear(self, category: str) -> None:
        self._writer.clear(category)

    def clear_tree(self, root: str) -> None:
        self._writer.clear_tree(root)

    def commit(self) -> None:
        try:
            self._writer.commit()
        except BaseException:
            self._on_end(self, False)
            raise
        self._on_end(self, True)

    def rollback(self) -> None:
        self._writer.rollback()

    def _counted(self, category: str, rows: Iterable[tuple[str, bytes]]) -> Iterator[tuple[str, bytes]]:
        for key, data in rows:
            self._count(category, key, data)
            yield key, data

    def _count(self, category: str, key: str, data: bytes) -> None:
        self.rows += 1
        self.bytes += len(data)
        if category == META:
            self.is_checkpoint = True
        elif (query := query_of(category, key)) is not None:
            self.query_bytes[query] += len(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._writer, name)


def query_of(category: str, key: str) -> str | None:
    """The query that owns a row; None if it is not a query's."""
    if category == GROUPS:
        return key.partition("/")[0]
    return _owner(category) if category.startswith(OBJECTS) else None


@lru_cache(4096)
def _owner(category: str) -> str | None:
    """The query of an object's rows. Their category has the object's id, percent-encoded, as one part."""
    for part in category.removeprefix(OBJECTS).split("/"):
        owner, number, _ = unquote(part).partition("#")
        if number and not owner.startswith("@"):
            return owner.partition("/")[0]
    return None
