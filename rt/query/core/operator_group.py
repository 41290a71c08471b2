"""A group of operators that is saved as one row: those of a query, or of an inner subscription.

    {"seed": …, "inner": address, "order": n,
     "operators": [[name, version, is disposed, state, timers, inner subscriptions ever opened], …]}

Operators are in build order: each before its sources. They are loaded from last to first, so that windows and
groups exist before their subscribers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final

from rt.objects import StateDamaged
from rt.query.core.errors import StateMismatch
from rt.query.core.observable import Observable, Observer
from rt.query.core.row_json import encode, plain
from rt.query.core.subject import Subject

if TYPE_CHECKING:
    from rt.query.core.operator import Operator
    from rt.query.core.runtime import QueryRuntime


class OperatorGroup:
    """Operators with one dirty flag. `id` is the query's, or `<parent>/<operator>.<key>`."""

    __slots__ = (
        "_is_loaded",
        "_operators",
        "_out",
        "_row",
        "_watermarks",
        "id",
        "is_dirty",
        "order",
        "root",
        "runtime",
        "seed",
        "started_ns",
    )

    def __init__(
        self, runtime: QueryRuntime, group_id: str, root: OperatorGroup | None = None, *, started_ns: int = 0
    ) -> None:
        self.runtime: Final = runtime
        self.id: Final = group_id
        self.root: Final[OperatorGroup] = root or self
        self.started_ns: Final = started_ns
        """Of a query: when it was started."""
        self.seed: Any = None
        self.order = 0
        self.is_dirty = False
        self._operators: list[Operator[Any, Any]] = []
        self._out: Observer[Any]
        self._row: dict[str, Any] | None = None
        self._is_loaded = False
        self._watermarks: dict[str, int] | None = None

    def build(self, observable: Observable[Any], out: Observer[Any]) -> None:
        """Make the operators of `observable`. They will send to `out`."""
        self._out = out
        observable.build(self, out)

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

    def start(self, watermarks: dict[str, int] | None = None, *, is_new: bool = False) -> None:
        """Start or continue. A new query receives the values after `watermarks`; None: from now on.

        `is_new`: the group was not started before it was saved.
        """
        self._watermarks = watermarks
        for operator in self._operators:
            operator.start(is_loaded=self._is_loaded and not is_new)
        self._watermarks = None

    def start_watermark(self, source: str) -> int:
        """The watermark after which a tap on `source` starts."""
        watermarks = self.root._watermarks or {}  # also for inner subscriptions opened at the start
        return watermarks.get(source, self.runtime.feed(source).watermark)

    def dispose(self) -> None:
        """End all operators. The row stays and records that."""
        for operator in self._operators:
            operator.dispose()

    def delete(self) -> None:
        """End all operators, and delete the row."""
        try:
            self.dispose()
        finally:
            self.runtime.delete(self)

    def abandon(self) -> None:
        """Release everything in memory. The stored row stays."""
        for operator in self._operators:
            operator.abandon()

    @property
    def is_finished(self) -> bool:
        return all(operator.is_disposed for operator in self._operators)

    def guard(self, call: Callable[..., object], *arguments: Any) -> None:
        """Call a function of an operator. An exception ends the query."""
        try:
            call(*arguments)
        except Exception as error:  # noqa: BLE001 - any error of a query ends only that query
            self.crash(error)

    def crash(self, error: Exception) -> None:
        """End the query with an error that no operator handled."""
        root = self.root
        if not root.is_finished:
            root.dispose()
            root._out.on_error(error)

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
                row["inner"] = self.seed.address
            elif self.seed is not None:
                row["seed"] = plain(self.seed)
        return encode(row)

    def saved(self) -> None:
        """A checkpoint with this row is durable."""
        for operator in self._operators:
            operator.saved()

    def _child(self, index: int, key: str) -> OperatorGroup:
        return OperatorGroup(self.runtime, f"{self.id}/{index}.{key}", self.root)

    def _set_row(self, row: dict[str, Any]) -> None:
        self._row = row
        self.order = row.get("order", 0)
        self.seed = row.get("seed")
        if "inner" in row:
            inner = self.runtime.subjects.get(row["inner"])
            if inner is None:
                raise StateDamaged("the subscribed window or group does not exist", where=self.id)
            self.seed = inner
