"""The stages of an engine, for the program: `engine.stages`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Final

from rt.query.checkpoint.checkpointer import Checkpointer
from rt.query.checkpoint.edge_table import EdgeTable
from rt.query.checkpoint.stage_table import StageTable
from rt.query.core.clock import QueryClock
from rt.query.core.lifecycle import EventLock


class Stages:
    """Thread-safe. `exclusive`: a context in which no event and no other write happens."""

    def __init__(
        self,
        table: StageTable,
        clock: QueryClock,
        edges: EdgeTable,
        checkpointer: Checkpointer,
        lock: EventLock,
        exclusive: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._table: Final = table
        self._clock: Final = clock
        self._edges: Final = edges
        self._checkpointer: Final = checkpointer
        self._lock: Final = lock
        self._exclusive: Final = exclusive

    @property
    def ends(self) -> dict[str, str | None]:
        """By stage: None if it runs, "" if it completed, otherwise the error that ended it."""
        with self._lock.next():
            return self._table.ends

    def restart(self, name: str) -> None:
        """Start a stage that has ended again, without state. Durable on return.

        What read the stage ended with it: restart the stages that did, then start the queries again.
        `NoSuchQuery`; `WrongState` if the stage runs. If the checkpoint fails, the stage is started in
        memory, and the next checkpoint makes that durable.
        """
        with self._exclusive():
            self._edges.require_caught_up(self._edges.outputs)
            group = self._table.restart(name)
            self._clock.start(group, None)
            self._checkpointer.mark_uncertain([group.id])
            self._checkpointer.checkpoint()
