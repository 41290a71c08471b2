"""Applies the error policies of queries."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any, Final

from rt.log_limit import LogLimit
from rt.objects import StateDamaged
from rt.query.checkpoint.catalog import QueryCatalog
from rt.query.checkpoint.checkpointer import Checkpointer
from rt.query.checkpoint.error_policy import ErrorPolicy
from rt.query.checkpoint.stage_table import stage_of
from rt.query.core.errors import StopEngine, ValueChanged
from rt.query.monitoring.dead_letters import DeadLetters

logger = logging.getLogger("rt.query")

_LOG_EVERY_S: Final = 10.0
_NEVER_SKIPPED: Final = (MemoryError, StateDamaged, ValueChanged)
"""Errors that concern more than the value."""


class ErrorHandlers:
    """Makes the error handlers of an engine's queries. `default`: the policy of a query that has none."""

    def __init__(
        self, default: ErrorPolicy, letters: DeadLetters, catalog: QueryCatalog, checkpointer: Checkpointer
    ) -> None:
        self.default: Final = default
        self.letters: Final = letters
        self._catalog: Final = catalog
        self._checkpointer: Final = checkpointer
        self._log = LogLimit(_LOG_EVERY_S)

    def handler(self, query_id: str, policy: ErrorPolicy | None) -> QueryErrorHandler:
        return QueryErrorHandler(self, query_id, policy or self.default)

    def skip(self, query_id: str, operator: str, address: str, error: Exception) -> bool:
        """Keep a dead letter and count it. False if that failed."""
        try:
            letter = self.letters.add(query_id, operator, address, error)
        except Exception:
            logger.exception("dead_letter_failed query=%s operator=%s error=%r", query_id, address, error)
            return False
        stored = self._catalog.queries.get(query_id)
        if stored is not None:
            stored.skipped += 1
            self._catalog.put_query(query_id, stored)
        elif (name := stage_of(query_id)) is not None and (row := self._catalog.stages.get(name)) is not None:
            self._catalog.put_stage(name, {**row, "skipped": row["skipped"] + 1})
        # A log entry that stops the query would lose the letter, because its values are not processed again.
        self._checkpointer.uncertain.add(query_id)
        if (left_out := self._log.admit(time.monotonic())) is not None:
            logger.warning(
                "value_skipped query=%s operator=%s source=%s id=%s error=%r not_logged=%d",
                query_id,
                f"{operator}@{address}",
                letter.source,
                letter.sequence_id,
                letter.error,
                left_out,
            )
        return True


class QueryErrorHandler:
    """An `ErrorHandler` of one query."""

    __slots__ = ("_handlers", "_policy", "_query_id")

    def __init__(self, handlers: ErrorHandlers, query_id: str, policy: ErrorPolicy) -> None:
        self._handlers: Final = handlers
        self._query_id: Final = query_id
        self._policy: Final = policy

    @property
    def retries(self) -> int:
        return self._policy.retries

    @property
    def pause_s(self) -> float:
        return self._policy.pause_s

    def call_again(self, error: Exception, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        """Blocks the engine between the calls."""
        last = error
        for _ in range(self._policy.retries):
            if self._policy.pause_s:
                threading.Event().wait(self._policy.pause_s)
            try:
                return function(*arguments)
            except Exception as raised:  # noqa: BLE001 - a user's function
                last = raised
        raise last

    def skips(self, error: Exception, operator: str, address: str, *, can_skip: bool) -> bool:
        match self._policy.then:
            case "stop-engine":
                raise StopEngine(error, where=f"query {self._query_id!r}, operator {operator} ({address})")
            case "skip" if can_skip and not isinstance(error, _NEVER_SKIPPED):
                return self._handlers.skip(self._query_id, operator, address, error)
            case _:
                return False
