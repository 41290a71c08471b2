"""Taking up what is stored: the last checkpoint, and behind it the transaction log."""

from __future__ import annotations

import enum
import logging
from collections import defaultdict
from collections.abc import Callable
from typing import Final

from rt.objects import StateDamaged
from rt.query.artifact import Artifact
from rt.query.catalog import Catalog
from rt.query.definitions import Recipe, Standing
from rt.query.errors import LogConflict
from rt.query.host import Host
from rt.query.transaction_log import Change, Entry, Outcome, coalesce

logger = logging.getLogger("rt.query")


class Mitigation(enum.Enum):
    """What becomes of a query that cannot be recovered."""

    IGNORE = "ignore"
    """It does not run this time; what is stored of it stays."""
    REMOVE = "remove"
    """It is stopped, and what is stored of it deleted."""
    REGENERATE = "regenerate"
    """It begins anew, behind the checkpoint."""


OnLoadFailed = Callable[[str, Exception], Mitigation | None]


class Recovery:
    """One recovery. Called with the engine's lock held; starts no source."""

    def __init__(
        self,
        host: Host,
        catalog: Catalog,
        build: Callable[[str, Standing], Artifact],
        begin: Callable[[Artifact, dict[str, int] | None], object],
        on_failed: OnLoadFailed | None,
    ) -> None:
        self._host: Final = host
        self._catalog: Final = catalog
        self._build: Final = build
        self._begin: Final = begin
        self._on_failed: Final = on_failed
        self._is_new: set[str] = set()
        self._ignored: set[str] = set()

    def run(self) -> None:
        """Load all, then start all: nothing flows meanwhile."""
        self._replay()
        standing = sorted(self._catalog.standing.items(), key=lambda each: each[1].order)
        for query_id, each in standing:
            if query_id not in self._ignored:
                self._load(query_id, each)
        self._host.sweep(self._ignored)
        for query_id, each in standing:
            if query_id in self._host.roots:
                self._begin(self._host.roots[query_id], each.after if query_id in self._is_new else None)
        logger.info("recovered queries=%d", len(self._host.roots))

    # The log

    def _replay(self) -> None:
        by_key: defaultdict[tuple[str, str], list[Entry]] = defaultdict(list)
        for _, entry in self._catalog.log:
            by_key[entry.kind, entry.key].append(entry)
        for (kind, key), entries in by_key.items():
            try:
                for outcome in coalesce(entries):
                    self._apply(outcome)
            except (LogConflict, StateDamaged) as error:
                is_removed = self._ask(key, error) is Mitigation.REMOVE
                if kind == "definition":
                    if is_removed:
                        self._catalog.define(key, None)
                elif is_removed:
                    self._remove(key)
                else:
                    self._ignored.add(key)

    def _apply(self, outcome: Outcome) -> None:
        if outcome.kind == "definition":
            known: bool = outcome.key in self._catalog.definitions
            self._check(outcome, is_known=known)
            recipe = None if outcome.row is None else Recipe.decode(outcome.row, outcome.key)
            self._catalog.define(outcome.key, recipe)
            return
        self._check(outcome, is_known=outcome.key in self._catalog.standing)
        if outcome.change is not Change.CREATE:
            self._remove(outcome.key)
        if outcome.row is not None:
            self._catalog.stand(outcome.key, Standing.decode(outcome.row, outcome.key))
            self._is_new.add(outcome.key)

    def _check(self, outcome: Outcome, *, is_known: bool) -> None:
        if is_known is (outcome.change is Change.CREATE):
            raise LogConflict(
                f"the transaction log says {outcome.change.value} where the checkpoint says otherwise",
                where=outcome.key,
                hint="Restore the store from a copy.",
            )

    # Queries

    def _load(self, query_id: str, standing: Standing) -> None:
        try:
            self._host.roots[query_id] = self._loaded(query_id, standing)
        except Exception as error:  # noqa: BLE001 - what factories and operators raise is not known
            match self._ask(query_id, error):
                case Mitigation.REMOVE:
                    self._remove(query_id)
                case Mitigation.REGENERATE:
                    self._host.forget_stored(query_id)
                    self._is_new.add(query_id)
                    standing.after = {name: row["watermark"] for name, row in self._catalog.sources.items()}
                    standing.ended = None
                    standing.order = self._catalog.next_order()
                    self._catalog.stand(query_id, standing)
                    self._host.roots[query_id] = self._loaded(query_id, standing)
                case _:
                    self._ignored.add(query_id)
                    if query_id in self._is_new:
                        standing.is_begun = False
                        self._catalog.stand(query_id, standing)

    def _loaded(self, query_id: str, standing: Standing) -> Artifact:
        artifact = self._build(query_id, standing)
        if not standing.is_begun:
            standing.is_begun = True
            self._is_new.add(query_id)
            self._catalog.stand(query_id, standing)
        try:
            if query_id in self._is_new:
                artifact.open()
                return artifact
            row = self._host.take_stored(query_id)
            if row is None:
                raise StateDamaged("the state of a query is missing", where=query_id)
            artifact.load(row)
        except BaseException:
            artifact.abandon()
            raise
        return artifact

    def _remove(self, query_id: str) -> None:
        self._catalog.stand(query_id, None)
        self._host.forget_stored(query_id)

    def _ask(self, query_id: str, error: Exception) -> Mitigation:
        """What to do; raises the error if nobody says."""
        answer = self._on_failed(query_id, error) if self._on_failed else None
        if answer is None:
            raise error
        logger.warning("not_recovered id=%s what=%s error=%r", query_id, answer.value, error)
        return answer
