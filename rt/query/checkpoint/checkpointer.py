"""Writes what an engine stores: checkpoints of everything, and entries of the transaction log.

A checkpoint collects changes under the engine's lock, between two events, and commits without the lock.
After the commit the edges are notified, and the engine acknowledges the sources when it holds no lock. If the
commit failed, its changes are saved again.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Final

from rt.objects import CheckpointKind, CommitUnknown, StateWriter, Store
from rt.objects.core.store import checked_kind
from rt.query.checkpoint.catalog import ROOT, QueryCatalog
from rt.query.checkpoint.edge_table import EdgeTable
from rt.query.checkpoint.transaction_log import LogEntry
from rt.query.core.clock import QueryClock
from rt.query.core.lifecycle import EventLock
from rt.query.core.operator_group import OperatorGroup
from rt.query.core.runtime import QueryRuntime

logger = logging.getLogger("rt.query")


class Checkpointer:
    """The writer of an engine's store.

    `on_failed` is called for an operator group that cannot be saved. It must raise, or end the query.
    """

    def __init__(
        self,
        store: Store,
        runtime: QueryRuntime,
        catalog: QueryCatalog,
        clock: QueryClock,
        edges: EdgeTable,
        lock: EventLock,
        on_failed: Callable[[OperatorGroup, Exception], object],
    ) -> None:
        self._store: Final = store
        self._runtime: Final = runtime
        self._catalog: Final = catalog
        self._clock: Final = clock
        self._lock: Final = lock
        self._edges: Final = edges
        self._on_failed: Final = on_failed
        self.writing: Final = threading.Lock()
        """Held during every write. Lock order: this lock before the event lock."""
        self.uncertain: Final = runtime.uncertain

    def checkpoint(self, kind: CheckpointKind = CheckpointKind.DIFFERENTIAL) -> None:
        """Return when all changes, or everything, are durable. Call with `writing` held.

        `EdgeTable.acknowledge` must follow, when no lock is held.
        """
        writer = self._store.begin(checked_kind(kind))
        try:
            with self._lock.next():
                edges_saved = self._save(writer)
                uncertain = set(self.uncertain)
                self.uncertain.clear()
        except BaseException:
            writer.rollback()  # It is still open if the wait for the lock was interrupted.
            raise
        try:
            writer.commit()
        except BaseException as error:
            writer.rollback()
            with self._lock.next():
                self._catalog.save_failed()
                self._runtime.save_failed(unknown_outcome=_is_unknown(error))
                self.uncertain.update(uncertain)
            raise
        try:
            with self._lock.next():
                self._catalog.saved()
                self._runtime.saved()
                for saved in edges_saved:
                    saved()
        except BaseException:
            self._lock.is_interrupted = True  # The commit is made, but it is not recorded here.
            raise

    @contextmanager
    def exclusive(self, require_usable: Callable[[], object]) -> Iterator[None]:
        """Hold both locks, and acknowledge the sources afterwards. `require_usable` may raise to refuse.

        If a source raises during the acknowledgement, the error is only logged: the changes are durable.
        """
        require_usable()
        with self.writing, self._lock.next():
            require_usable()
            self._lock.require_intact()
            yield
        try:
            self._edges.acknowledge()
        except Exception:
            logger.exception("acknowledge_failed")

    def close(self) -> None:
        """Wait for the running write, then close all edges, and abandon all queries and stages."""
        with self.writing:
            self._edges.close(each.abandon for each in self._runtime.all_roots)

    def append(self, entries: list[LogEntry]) -> None:
        """Make log entries durable. Call with both locks held."""
        writer = self._store.begin(CheckpointKind.DIFFERENTIAL)
        try:
            appended = self._catalog.append(writer, entries)
        except BaseException:
            writer.rollback()
            raise
        try:
            writer.commit()
        except BaseException as error:
            writer.rollback()
            if _is_unknown(error):
                appended(False)
            raise
        appended(True)

    def mark_uncertain(self, query_ids: Iterable[str]) -> None:
        """The store may not know these queries until the next checkpoint. Call with both locks held.

        After a crash their output could have other ids. So outputs hold new values until that checkpoint,
        also with `release="now"`.
        """
        self.uncertain.update(query_ids)
        for output in self._edges.outputs.values():
            output.hold()

    def _save(self, writer: StateWriter) -> Iterable[Callable[[], None]]:
        """Return functions that notify the edges of the durable state. Call them after the commit."""
        inputs, outputs = self._edges.inputs.items(), self._edges.outputs.items()
        try:
            self._lock.require_intact()
            if writer.kind is CheckpointKind.FULL:
                writer.clear_tree(ROOT)
            self._runtime.prepare(is_full=writer.kind is CheckpointKind.FULL, on_failed=self._on_failed)
            self._catalog.save(
                writer,
                sources=self._edges.save_sources(),
                sinks={name: edge.save() for name, edge in outputs},
                now_ns=self._clock.now_ns,
            )
            self._runtime.save(writer)
        except BaseException:
            writer.rollback()
            self._catalog.save_failed()
            raise
        return [partial(edge.saved, edge.buffer.end, edge.ended_with) for _, edge in outputs] + [
            partial(edge.saved, edge.feed.watermark, has_ended=edge.is_stopped) for _, edge in inputs
        ]


def _is_unknown(error: BaseException) -> bool:
    """Whether the failed commit may have happened."""
    return isinstance(error, CommitUnknown) or not isinstance(error, Exception)
