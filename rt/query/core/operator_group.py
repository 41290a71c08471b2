"""A group of operators that is saved as one row: the operators of a query, or of an inner subscription.

    {"seed": …, or "inner": address and "key": … of a window or group, "order": n,
     "feeds": of a query: [sources and stages that only its inner subscriptions have read],
     "operators": [[name, version, is disposed, state, timers, inner subscriptions ever opened], …]}

Operators are in build order: each before its sources. They are loaded from last to first, so that windows and
groups exist before their subscribers.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final, Protocol

from rt.objects import StateDamaged
from rt.query.core.errors import StateMismatch, call_all
from rt.query.core.observable import Observable, Observer
from rt.query.core.operator import operator_of
from rt.query.core.row_json import encode, plain
from rt.query.core.subject import Subject

if TYPE_CHECKING:
    from rt.query.core.operator import Operator
    from rt.query.core.runtime import QueryRuntime


logger = logging.getLogger("rt.query")


class _QueryEnd:
    """Passes on the values of a query, and passes on its end only once."""

    __slots__ = ("is_over", "on_next", "out")

    def __init__(self, out: Observer[Any]) -> None:
        self.out = out
        self.on_next = out.on_next  # an attribute, so that a value needs no additional call
        self.is_over = False

    def on_error(self, error: Exception, /) -> None:
        if not self.is_over:
            self.is_over = True
            self.out.on_error(error)

    def on_completed(self) -> None:
        if not self.is_over:
            self.is_over = True
            self.out.on_completed()


class ErrorHandler(Protocol):
    """The error policy of a query."""

    @property
    def retries(self) -> int:
        """How often a function is called again."""

    @property
    def pause_s(self) -> float:
        """Seconds before each of these calls."""

    def call_again(self, error: Exception, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        """Call a function again after it raised `error`.

        Raises the error of the last call, or `error` if there was no call.
        """

    def skips(self, error: Exception, operator: str, address: str, *, can_skip: bool) -> bool:
        """Whether the current value is left out. If it is, it was reported. False: the query ends with the
        error.

        Raises `StopEngine` if the engine must stop.
        """


class OperatorGroup:
    """Operators with one dirty flag. `id` is the query's, or `<parent>/<operator>.<key>`."""

    __slots__ = (
        "_end",
        "_inner_feeds",
        "_is_loaded",
        "_operators",
        "_row",
        "_watermarks",
        "errors",
        "feeds",
        "id",
        "is_broken",
        "is_dirty",
        "order",
        "rank",
        "root",
        "runtime",
        "seed",
        "started_ns",
    )

    def __init__(
        self,
        runtime: QueryRuntime,
        group_id: str,
        root: OperatorGroup | None = None,
        *,
        started_ns: int = 0,
        rank: int | None = None,
    ) -> None:
        self.runtime: Final = runtime
        self.id: Final = group_id
        self.root: Final[OperatorGroup] = root or self
        self.started_ns: Final = started_ns
        """Of a query: when it was started."""
        self.rank: Final = rank
        """Of a stage: its number. None: a query, or an inner subscription."""
        self.seed: Any = None
        self.order = 0
        self.errors: ErrorHandler | None = None
        """Of a query. None: an error ends it."""
        self.feeds: tuple[str, ...] = ()
        """Of a query or stage: the names of the sources and stages that it has read."""
        self.is_broken = False
        """Of a query: whether an operator could not be disposed. From then on no value is left out."""
        self.is_dirty = False
        self._operators: list[Operator[Any, Any]] = []
        self._end: _QueryEnd | None = None
        self._inner_feeds: tuple[str, ...] = ()
        """The part of `feeds` that its row must hold, because a recovery does not make ended inner
        subscriptions again.
        """
        self._row: dict[str, Any] | None = None
        self._is_loaded = False
        self._watermarks: dict[str, int] | None = None

    def build(self, observable: Observable[Any], out: Observer[Any]) -> None:
        """Make the operators of `observable`. They will send to `out`."""
        if self.root is self:
            out = self._end = _QueryEnd(out)
        observable.build(self, out)

    def note_feed(self, name: str) -> None:
        """Take note that an operator reads a source or stage."""
        root = self.root
        if name not in root.feeds:
            root.feeds += (name,)
            if self is not root:
                root._inner_feeds += (name,)
                root.mark()

    def add(self, operator: Operator[Any, Any]) -> int:
        """Add an operator. Returns its index."""
        self._operators.append(operator)
        return len(self._operators) - 1

    def new_child(self, index: int, key: str, seed: Any, order: int) -> OperatorGroup:
        """The group of an inner subscription of the operator at `index`."""
        made = self._child(index, key)
        made.seed, made.order = seed, order
        return made

    def load_children(self, index: int) -> dict[str, OperatorGroup]:
        """The saved inner subscriptions of an operator, oldest first. The caller builds and loads them."""
        found = {}
        for key, row in self.runtime.pop_children(f"{self.id}/{index}"):
            found[key] = self._child(index, key)
            found[key]._set_row(row)
        return found

    def children(self) -> Iterator[OperatorGroup]:
        for operator in self._operators:
            yield from operator.children()

    def open(self) -> None:
        """Start as a new group, without saved state."""
        self.mark()
        for operator in reversed(self._operators):
            operator.on_open()

    def load(self, row: dict[str, Any] | None = None) -> None:
        """Restore the saved state. `StateMismatch`, `StateDamaged`, `rt.UnknownVersion`."""
        if row is not None:
            self._set_row(row)
        assert self._row is not None
        saved, self._row = self._row["operators"], None
        if len(saved) != len(self._operators):
            what = "wrong number of operators in saved state"
            raise StateMismatch(what, where=self.id, got=len(saved), expected=len(self._operators))
        self._is_loaded = True
        for operator, each in zip(reversed(self._operators), reversed(saved), strict=True):
            operator.load(each)
        if self._end is not None and self.is_finished:
            self._end.is_over = True

    def start(self, watermarks: dict[str, int] | None = None, *, is_new: bool = False) -> None:
        """Start or continue. A new query receives the values after `watermarks`; None: from now on.

        `is_new`: the group was not started before it was saved.
        """
        self._watermarks = watermarks
        scheduler = self.runtime.scheduler
        before, scheduler.is_starting = scheduler.is_starting, self.root is self or scheduler.is_starting
        try:
            for operator in self._operators:
                operator.start(is_loaded=self._is_loaded and not is_new)
        finally:
            scheduler.is_starting = before
        self._watermarks = None

    def start_watermark(self, source: str) -> int:
        """The watermark after which a tap on `source` starts."""
        watermarks = self.root._watermarks or {}  # also for inner subscriptions opened at the start
        return watermarks.get(source, self.runtime.feed(source).watermark)

    def dispose(self) -> None:
        """End all operators, then raise the first error, if any. The row stays and records that they
        ended.
        """
        call_all(operator.dispose for operator in self._operators)

    def delete(self) -> None:
        """End all operators, and delete the row."""
        try:
            self.dispose()
        finally:
            self.runtime.delete(self)

    def abandon(self) -> None:
        """Release everything in memory. The stored row stays."""
        call_all(operator.abandon for operator in self._operators)

    @property
    def output(self) -> Observer[Any]:
        """The observer that receives the values of a query."""
        assert self._end is not None, "the group is not a query's"
        return self._end.out

    @property
    def side_outputs(self) -> set[str]:
        """The outputs of the engine to which its operators send values besides their results.

        The outputs of its inner subscriptions are included.
        """
        names = (getattr(each, "side_output", None) for each in self._operators if not each.is_disposed)
        found = {name for name in names if name is not None}
        return found.union(*(each.side_outputs for each in self.children()))

    @property
    def is_finished(self) -> bool:
        return all(operator.is_disposed for operator in self._operators)

    def guard(self, call: Callable[..., object], *arguments: Any) -> None:
        """Call a function of an operator. An exception ends the query."""
        try:
            call(*arguments)
        except Exception as error:  # noqa: BLE001 - any error of a query ends only that query
            self.end(error)

    def crash(self, error: Exception, observer: Observer[Any]) -> None:
        """Handle an exception of `observer` for a value or a timer like an exception of a user's function."""
        operator = operator_of(observer)
        if operator is None:
            if not self.skips(error, None):
                self.end(error)
        elif operator.is_disposed:
            self.end(error)  # It has ended, so it cannot report the error itself.
        else:
            operator.reject(error)

    def skips(self, error: Exception, operator: Operator[Any, Any] | None) -> bool:
        """Whether the error policy leaves out the current value. `operator` None: the output cannot hold it.

        If an operator after this one handles errors, the error goes to that operator under any policy.
        """
        errors = self.root.errors
        if errors is None or self.root.is_broken:
            return False
        if operator is None:
            return errors.skips(error, "output", self.root.id, can_skip=True)
        after = operator.observer
        while after is not None:
            if after.handles_errors():
                return False
            after = after.observer
        can_skip = operator.is_disposed or operator.can_skip()
        return errors.skips(error, operator.NAME, operator.address, can_skip=can_skip)

    def end(self, error: Exception) -> None:
        """End the query with an error that no operator handled."""
        root = self.root
        if root._end is None or root._end.is_over:
            return
        try:
            root.dispose()
        except Exception as other:  # noqa: BLE001 - the first error is more important
            logger.error("dispose_failed id=%s error=%r", root.id, other)
        root._end.on_error(error)

    def mark(self) -> None:
        """Save the row in the next checkpoint."""
        if not self.is_dirty:
            self.is_dirty = True
            self.runtime.mark(self)

    def row(self) -> bytes:
        """The row as it is now. `NotSerializable` if an operator holds a value that cannot be stored."""
        row: dict[str, Any] = {"operators": [operator.save() for operator in self._operators]}
        if self.root is not self:
            row["order"] = self.order
            if isinstance(self.seed, Subject):
                row["inner"], row["key"] = self.seed.address, plain(self.seed.key)
            elif self.seed is not None:
                row["seed"] = plain(self.seed)
        elif self._inner_feeds:
            row["feeds"] = list(self._inner_feeds)
        return encode(row)

    def _child(self, index: int, key: str) -> OperatorGroup:
        return OperatorGroup(self.runtime, f"{self.id}/{index}.{key}", self.root)

    def _set_row(self, row: dict[str, Any]) -> None:
        self._row = row
        self.order = row.get("order", 0)
        self.seed = row.get("seed")
        self._inner_feeds = tuple(row.get("feeds", ()))
        self.feeds += tuple(each for each in self._inner_feeds if each not in self.feeds)
        if "inner" in row:
            inner = self.runtime.subjects.get(row["inner"])
            if inner is None and "key" not in row:
                raise StateDamaged("the subscribed window or group does not exist", where=self.id)
            # The window or group may have ended while operators on its values continue, for example a delay.
            self.seed = inner or Subject.ended(self.runtime, row["inner"], row["key"])
