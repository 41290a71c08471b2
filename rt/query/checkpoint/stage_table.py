"""Stages: operators that queries share, for example to decode each message once.

    source ─► stage: its operators ─► key of the value ─► the queries that read this key, or all keys

    query/stage     <name>     {"end": …, "skipped": …, "counts": …}: see `catalog`

The program makes a stage, as it makes a source. The state and the end of the stage are stored. The stage is
saved as the operator group `stage@<name>`, whose last operator is `StageOutput`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Final, NamedTuple, TypedDict

from rt.names import check_name
from rt.objects import StateDamaged
from rt.query.checkpoint.catalog import QueryCatalog
from rt.query.checkpoint.checkpointer import Checkpointer
from rt.query.checkpoint.edge_table import EdgeTable
from rt.query.checkpoint.error_policy import ErrorPolicy, OnError
from rt.query.checkpoint.stage_feed import KeyOf, StageFeed, StageOutput
from rt.query.core.clock import QueryClock
from rt.query.core.errors import NoSuchQuery, QueryExists, QueryFailed, WrongState, error_text
from rt.query.core.lifecycle import EventLock
from rt.query.core.observable import Observable, applied
from rt.query.core.operator_group import ErrorHandler, OperatorGroup
from rt.query.core.runtime import QueryRuntime

logger = logging.getLogger("rt.query")

StageSource = Observable[Any] | Callable[[], Observable[Any]]
"""The operators of a stage, or a function that returns them."""


class StageOptions(TypedDict, total=False):
    """Options of `QueryEngine.add_stage`.

    `key_of(value)` returns a hashable key. It is called once for each value. `Source(name, key=…)` reads the
    values with one key, and costs nothing for values with other keys. `on_error`: the error policy of the
    stage and of `key_of`. Default: the policy of the engine. A value that the stage leaves out is a dead
    letter of `stage@<name>`.
    """

    key_of: KeyOf | None
    on_error: OnError | ErrorPolicy | None


Handler = Callable[[str, ErrorPolicy | None], ErrorHandler]

_ID: Final = "stage@"

"""Prefix of the id of a stage. No name of a query has an @."""


def stage_of(group_id: str) -> str | None:
    """The name of the stage with this group id. None if it is not the id of a stage."""
    return group_id.removeprefix(_ID) if group_id.startswith(_ID) else None


class _Stage(NamedTuple):
    observable: Observable[Any]
    key_of: KeyOf | None
    policy: ErrorPolicy | None
    feed: StageFeed


class StageTable:
    """The stages of an engine. Called with its lock held.

    `handler(id, policy)` makes the error handler of a stage.
    """

    def __init__(self, runtime: QueryRuntime, catalog: QueryCatalog, handler: Handler) -> None:
        self._runtime, self._catalog = runtime, catalog
        self._handler: Final = handler
        self._stages: Final[dict[str, _Stage]] = {}

    def __contains__(self, name: object) -> bool:
        return name in self._stages

    def add(
        self,
        name: str,
        stage: StageSource,
        *,
        key_of: KeyOf | None = None,
        on_error: OnError | ErrorPolicy | None = None,
    ) -> None:
        """Make a stage without starting it. See `QueryEngine.add_stage`."""
        check_name(name, kind="stage")
        observable = stage if isinstance(stage, Observable) else stage()
        if not isinstance(observable, Observable):
            raise TypeError(f"stage {name!r} must be an Observable, got {observable!r}")
        if self._runtime.has_feed(name):
            raise QueryExists("a source or stage has this name", got=repr(name))
        policy = None if on_error is None else ErrorPolicy.of(on_error)
        rank, has_keys = len(self._stages), key_of is not None
        feed = StageFeed(name, self._runtime.turns, rank=rank, has_keys=has_keys)
        made = _Stage(observable, key_of, policy, feed)
        self._build(name, made)
        self._stages[name] = made

    def loads(self) -> Iterator[tuple[str, str, Callable[[], object]]]:
        """Yield the name and the id of each stage, and a function that restores it, or raises.

        Stored stages that were not added are included.
        """
        for name in self._stages:
            yield name, _ID + name, partial(self._load, name)
        for name in set(self._catalog.stages) - set(self._stages):
            yield name, _ID + name, partial(self._refuse, name)

    @property
    def ends(self) -> dict[str, str | None]:
        """By stage: None if it runs, "" if it completed, otherwise the error that ended it."""
        return {name: self._ended(name) for name in self._stages}

    def restart(self, name: str) -> OperatorGroup:
        """Make an ended stage again, without starting it.

        `NoSuchQuery`; `WrongState` if the stage has not ended.
        """
        if name not in self._stages:
            raise NoSuchQuery("no stage has this name", got=repr(name), hint="See engine.stages.ends.")
        if self._ended(name) is None:
            raise WrongState("the stage has not ended", where=_ID + name, hint="See engine.stages.ends.")
        self.regenerate(name)
        return self._runtime.stages[_ID + name]

    def _ended(self, name: str) -> str | None:
        end = self._stages[name].feed.end
        return error_text(end) if isinstance(end, Exception) else None if end is None else ""

    def regenerate(self, name: str) -> None:
        """Forget the saved state of a stage, and let it start again. `NoSuchQuery` if it was not added."""
        if name not in self._stages:
            self._refuse(name)
        self._runtime.stages[_ID + name].abandon()
        self._runtime.delete_stored(_ID + name)
        self._catalog.put_stage(name, None)
        self._build(name, self._stages[name])
        self._load(name)

    def _refuse(self, name: str) -> None:
        hint = "Add it before recover, or let on_load_failed return Mitigation.REMOVE: its state is deleted."
        raise NoSuchQuery("a stored stage was not added", got=repr(name), where=_ID + name, hint=hint)

    def _build(self, name: str, stage: _Stage) -> None:
        feed = stage.feed
        group = OperatorGroup(self._runtime, _ID + name, rank=feed.rank)
        group.errors = self._handler(group.id, stage.policy)
        end = _StageEnd(feed, self._catalog)
        group.build(applied(StageOutput, feed, stage.key_of)(stage.observable), end)
        feed.end = None  # It may have ended before.
        self._runtime.add_stage(group, feed)

    def _load(self, name: str) -> None:
        group, feed = self._runtime.stages[_ID + name], self._runtime.feed(name)
        stored = self._catalog.stages.get(name)
        if stored is None:
            counts = self._runtime.source_counts
            self._catalog.put_stage(name, {"end": None, "skipped": 0, "counts": counts})
            group.open()
            return
        row = self._runtime.pop_stored(group.id)
        if row is None:
            raise StateDamaged("the state of a stage is missing", where=group.id)
        match stored["end"]:
            case ["completed"]:
                feed.end = "completed"
            case ["error", text]:
                feed.end = QueryFailed(text)
        group.load(row)


class _StageEnd:
    """Stores the end of a stage, and ends the queries and stages that read it."""

    def __init__(self, feed: StageFeed, catalog: QueryCatalog) -> None:
        self._feed: Final = feed
        self._catalog: Final = catalog

    def on_next(self, value: Any, /) -> None:
        """Do nothing: `StageOutput` sends the values."""

    def on_error(self, error: Exception, /) -> None:
        logger.warning("stage_failed name=%s error=%r", self._feed.name, error_text(error))
        self._store(["error", error_text(error)])
        self._feed.on_error(error)

    def on_completed(self) -> None:
        self._store(["completed"])
        self._feed.on_completed()

    def _store(self, end: list[str]) -> None:
        row = self._catalog.stages.get(self._feed.name, {"skipped": 0, "counts": {}})
        self._catalog.put_stage(self._feed.name, {**row, "end": end})


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
        """Restart a stage that has ended, without state. Durable on return.

        The queries and stages that read the stage ended with it. Restart these stages, then start the queries
        again. `NoSuchQuery`; `WrongState` if the stage runs. If the checkpoint fails, the stage is started in
        memory, and the next checkpoint makes the start durable.
        """
        with self._exclusive():
            self._edges.require_caught_up(self._edges.outputs)
            group = self._table.restart(name)
            self._clock.start(group, None)
            self._checkpointer.mark_uncertain([group.id])
            self._checkpointer.checkpoint()
