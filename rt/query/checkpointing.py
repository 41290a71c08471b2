"""Writing what an engine knows: checkpoints of everything, and entries of the transaction log.

A checkpoint gathers under the engine's lock, between two events, and commits without it; what it held is told
to the edges when it is durable, and counts as changed again when it failed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Final, NamedTuple

from rt.objects import CheckpointKind, CommitUnknown, StateWriter, Store
from rt.query.artifact import Artifact
from rt.query.catalog import Catalog
from rt.query.clock import QueryClock
from rt.query.edges import InputEdge, OutputEdge
from rt.query.host import Host
from rt.query.locking import EventLock
from rt.query.transaction_log import Entry


class _Held(NamedTuple):
    """What a checkpoint says of the edges."""

    inputs: list[tuple[InputEdge, int, bool]]
    """Each with its watermark, and whether it has ended."""
    outputs: list[tuple[OutputEdge, int]]
    """Each with its end."""


class Checkpoints:
    """What writes into the store of an engine. `edges` says its inputs and outputs by name, as they are now.

    `on_failed` hears of an artifact that cannot be saved: it raises, or ends the query.
    """

    def __init__(
        self,
        store: Store,
        host: Host,
        catalog: Catalog,
        clock: QueryClock,
        lock: EventLock,
        edges: tuple[dict[str, InputEdge], dict[str, OutputEdge]],
        on_failed: Callable[[Artifact, Exception], object],
    ) -> None:
        self._store: Final = store
        self._host: Final = host
        self._catalog: Final = catalog
        self._clock: Final = clock
        self._lock: Final = lock
        self._inputs, self._outputs = edges
        self._on_failed: Final = on_failed
        self.writing: Final = threading.Lock()
        """Held while anything is written. May be held when the event lock is taken, never the other way
        round."""
        self.unsettled: Final[set[str]] = set()
        """Queries that were to begin or end with a checkpoint, which failed: the store may know them or not,
        so that no entry of the log can be right. The next checkpoint settles them."""

    def checkpoint(self, kind: CheckpointKind = CheckpointKind.DIFFERENTIAL) -> None:
        """Return when everything that changed, or everything, is durable. Called with `writing` held."""
        writer = self._store.begin(kind)
        with self._lock:
            held = self._save(writer)
        try:
            writer.commit()
        except BaseException as error:
            with self._lock:
                self._catalog.save_failed()
                self._host.save_failed(unknown_outcome=_is_unknown(error))
            raise
        with self._lock:
            self._saved(held)

    def append(self, entries: list[Entry]) -> None:
        """Make entries of the log durable. Called with both locks held."""
        writer = self._store.begin(CheckpointKind.DIFFERENTIAL)
        try:
            appended = self._catalog.append(writer, entries)
        except BaseException:
            writer.rollback()
            raise
        try:
            writer.commit()
        except BaseException as error:
            if _is_unknown(error):
                appended(False)
            raise
        appended(True)

    def unsettle(self, query_ids: Iterable[str]) -> None:
        """Until the next checkpoint the store may not know what became of them. Called with both locks held.

        What outputs get meanwhile may have other ids behind a crash: it waits, even where it need not else.
        """
        self.unsettled.update(query_ids)
        for output in self._outputs.values():
            output.hold()

    def _save(self, writer: StateWriter) -> _Held:
        inputs, outputs = self._inputs.items(), self._outputs.items()
        try:
            self._lock.require_whole()
            self._host.prepare(is_full=writer.kind is CheckpointKind.FULL, on_failed=self._on_failed)
            self._catalog.save(
                writer,
                sources={name: edge.save() for name, edge in inputs},
                sinks={name: edge.save() for name, edge in outputs},
                now_ns=self._clock.now_ns,
            )
            self._host.save(writer)
        except BaseException:
            writer.rollback()
            self._catalog.save_failed()
            raise
        return _Held(
            [(edge, edge.feed.watermark, edge.is_stopped) for _, edge in inputs],
            [(edge, edge.buffer.end) for _, edge in outputs],
        )

    def _saved(self, held: _Held) -> None:
        self._catalog.saved()
        self.unsettled.clear()
        self._host.saved()
        for output, end in held.outputs:
            output.saved(end)
        for source, watermark, has_ended in held.inputs:
            source.saved(watermark, has_ended=has_ended)


def _is_unknown(error: BaseException) -> bool:
    """Whether a commit that raised this may have happened."""
    return isinstance(error, CommitUnknown) or not isinstance(error, Exception)
