"""Recovers what is stored: the last checkpoint, then the transaction log."""

from __future__ import annotations

import contextlib
import enum
import gc
import logging
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Final

from rt.objects import StateDamaged
from rt.query.checkpoint.catalog import QueryCatalog
from rt.query.checkpoint.factories import Recipe, StoredQuery
from rt.query.checkpoint.stage_table import StageTable
from rt.query.checkpoint.transaction_log import DEFINITION, Change, LogEntry, net_change
from rt.query.core.errors import LogConflict
from rt.query.core.operator_group import OperatorGroup
from rt.query.core.runtime import QueryRuntime

logger = logging.getLogger("rt.query")

_MANY_OBJECTS: Final = 1_000_000


class Mitigation(enum.Enum):
    """What to do with a query that cannot be recovered."""

    IGNORE = "ignore"
    """Do not run it this time; keep its stored state."""
    REMOVE = "remove"
    """Stop it and delete its stored state."""
    REGENERATE = "regenerate"
    """Start it from scratch after the checkpoint."""


OnLoadFailed = Callable[[str, Exception], Mitigation | None]
OnSaveFailed = Callable[[str, Exception], Mitigation | None]


def handler_of(on_save_failed: OnSaveFailed | None) -> Callable[[OperatorGroup, Exception], None]:
    """Return the function that a checkpoint calls for an operator group that cannot be saved."""

    def end_or_raise(group: OperatorGroup, error: Exception) -> None:
        answer = on_save_failed(group.root.id, error) if on_save_failed else None
        if answer is not Mitigation.REMOVE:
            raise error
        group.end(error)

    return end_or_raise


class Recovery:
    """One recovery. Called with the engine's lock held. Does not start sources."""

    def __init__(
        self,
        runtime: QueryRuntime,
        catalog: QueryCatalog,
        stages: StageTable,
        build: Callable[[str, StoredQuery], OperatorGroup],
        start: Callable[[OperatorGroup, dict[str, int] | None], object],
        on_failed: OnLoadFailed | None,
    ) -> None:
        self._runtime: Final = runtime
        self._catalog: Final = catalog
        self._stages: Final = stages
        self._build: Final = build
        self._start: Final = start
        self._on_failed: Final = on_failed
        self._is_new: set[str] = set()
        self._ignored: set[str] = set()

    def run(self) -> None:
        """Load all stages and queries, then start them all. No events happen meanwhile."""
        self._replay()
        stored = sorted(self._catalog.queries.items(), key=lambda each: each[1].order)
        with _collector_paused():
            self._load_stages()
            for query_id, each in stored:
                if query_id not in self._ignored:
                    self._load(query_id, each)
        self._runtime.sweep(self._ignored)
        for group in reversed(self._runtime.stages.values()):  # the readers first, as inside a query
            self._start(group, None)
        for query_id, each in stored:
            if query_id in self._runtime.roots:
                self._start(self._runtime.roots[query_id], each.after if query_id in self._is_new else None)
        logger.info("recovered queries=%d", len(self._runtime.roots))

    def _replay(self) -> None:
        by_key: defaultdict[tuple[str, str], list[LogEntry]] = defaultdict(list)
        for _, entry in self._catalog.log:
            by_key[entry.kind, entry.key].append(entry)
        for (kind, key), entries in by_key.items():
            try:
                change = net_change(entries)
                if change is not None:
                    self._apply(change, entries[-1])
            except (LogConflict, StateDamaged) as error:
                is_removed = self._decide(key, error) is Mitigation.REMOVE
                if kind == DEFINITION:
                    if is_removed:
                        self._catalog.define(key, None)
                elif is_removed:
                    self._remove(key)
                else:
                    self._ignored.add(key)

    def _apply(self, change: Change, last: LogEntry) -> None:
        """Apply the net change of a key. `last`: the last entry of the key, which has the row."""
        key, row, is_definition = last.key, last.row, last.kind == DEFINITION
        is_known = key in (self._catalog.definitions if is_definition else self._catalog.queries)
        if is_known is (change is Change.CREATE):
            raise LogConflict(
                f"the transaction log contradicts the checkpoint: {change.value}",
                where=key,
                hint="Restore the store from a backup.",
            )
        if is_definition:
            self._catalog.define(key, None if row is None else Recipe.decode(row, key))
            return
        if change is not Change.CREATE:
            self._remove(key)
        if row is not None:
            self._catalog.put_query(key, StoredQuery.decode(row, key))
            self._is_new.add(key)

    def _load_stages(self) -> None:
        for name, stage_id, load in self._stages.loads():
            try:
                load()
            except Exception as error:
                match self._decide(stage_id, error):
                    case Mitigation.REGENERATE:
                        self._stages.regenerate(name)
                    case Mitigation.IGNORE if name not in self._stages:
                        self._ignored.add(stage_id)
                    case Mitigation.REMOVE if name not in self._stages:
                        self._catalog.put_stage(name, None)
                        self._runtime.delete_stored(stage_id)
                    case _:
                        raise

    def _load(self, query_id: str, stored: StoredQuery) -> None:
        try:
            self._runtime.roots[query_id] = self._build_and_load(query_id, stored)
        except Exception as error:  # noqa: BLE001 - factories and operators may raise anything
            match self._decide(query_id, error):
                case Mitigation.REMOVE:
                    self._remove(query_id)
                case Mitigation.REGENERATE:
                    self._runtime.delete_stored(query_id)
                    self._is_new.add(query_id)
                    stored.after = {name: row["watermark"] for name, row in self._catalog.sources.items()}
                    stored.counts = {
                        name: row["watermark"] + 1 - row["missing"]
                        for name, row in self._catalog.sources.items()
                    }
                    stored.ended, stored.skipped = None, 0
                    stored.order = self._catalog.next_order()
                    self._catalog.put_query(query_id, stored)
                    self._runtime.roots[query_id] = self._build_and_load(query_id, stored)
                case _:
                    self._ignored.add(query_id)
                    if query_id in self._is_new:
                        stored.is_started = False
                        self._catalog.put_query(query_id, stored)

    def _build_and_load(self, query_id: str, stored: StoredQuery) -> OperatorGroup:
        group = self._build(query_id, stored)
        if not stored.is_started:
            stored.is_started = True
            self._is_new.add(query_id)
            self._catalog.put_query(query_id, stored)
        try:
            if query_id in self._is_new:
                group.open()
                return group
            row = self._runtime.pop_stored(query_id)
            if row is None:
                raise StateDamaged("the state of a query is missing", where=query_id)
            group.load(row)
        except BaseException:
            group.abandon()
            raise
        return group

    def _remove(self, query_id: str) -> None:
        self._catalog.put_query(query_id, None)
        self._runtime.delete_stored(query_id)

    def _decide(self, query_id: str, error: Exception) -> Mitigation:
        """Decide what to do. Raises the error if there is no decision."""
        answer = self._on_failed(query_id, error) if self._on_failed else None
        if answer is None:
            raise error
        logger.warning("recovery_failed id=%s what=%s error=%r", query_id, answer.value, error)
        return answer


@contextlib.contextmanager
def _collector_paused() -> Iterator[None]:
    """Pause Python's garbage collector: a load makes up to millions of objects that stay in memory.

    Otherwise the collector would visit these objects many times. If the load made many objects, the collector
    afterwards treats them as already visited. This is not done if the program has frozen objects of its own,
    because they must stay frozen. It is also not done for few objects, because the check for frozen objects
    would cost more.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if gc.get_count()[0] > _MANY_OBJECTS and not gc.get_freeze_count():
            gc.freeze()
            gc.unfreeze()
        if was_enabled:
            gc.enable()
