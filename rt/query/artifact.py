"""What is saved as one row: the operators of a query, or of an inner subscription of one of its operators.

    {"seed": …, "inner": address, "order": n,
     "operators": [[name, version, is disposed, state, timers, inner subscriptions ever opened], …]}

Operators stand in the order in which they are built: each before its sources. They are loaded from the last
to the first, so that windows and groups are there before who subscribed to them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final

from rt.objects import StateDamaged
from rt.query.errors import StateMismatch
from rt.query.inner import Inner
from rt.query.observing import Observable, Observer
from rt.query.rows import encode, plain

if TYPE_CHECKING:
    from rt.query.host import Host
    from rt.query.operator import Operator


class Artifact:
    """Operators with one dirty mark. `id` is a query's, or `<parent>/<operator>.<key>`."""

    __slots__ = (
        "_is_loaded",
        "_operators",
        "_out",
        "_row",
        "_watermarks",
        "begun_ns",
        "host",
        "id",
        "is_dirty",
        "order",
        "root",
        "seed",
    )

    def __init__(
        self, host: Host, artifact_id: str, root: Artifact | None = None, *, begun_ns: int = 0
    ) -> None:
        self.host: Final = host
        self.id: Final = artifact_id
        self.root: Final[Artifact] = root or self
        self.begun_ns: Final = begun_ns
        """Of a query: when it was started."""
        self.seed: Any = None
        self.order = 0
        self.is_dirty = False
        self._operators: list[Operator[Any, Any]] = []
        self._out: Observer[Any]
        self._row: dict[str, Any] | None = None
        self._is_loaded = False
        self._watermarks: dict[str, int] | None = None

    # Making it

    def build(self, observable: Observable[Any], out: Observer[Any]) -> None:
        """Make the operators of `observable`, which will send to `out`."""
        self._out = out
        observable.build(self, out)

    def add(self, operator: Operator[Any, Any]) -> int:
        """Take an operator in; its place."""
        self._operators.append(operator)
        return len(self._operators) - 1

    def new_child(self, index: int, key: str, seed: Any, order: int) -> Artifact:
        """An inner subscription of the operator at `index`."""
        made = Artifact(self.host, f"{self.id}/{index}.{key}", self.root)
        made.seed, made.order = seed, order
        return made

    def load_children(self, index: int) -> Iterator[tuple[str, Artifact]]:
        """The saved inner subscriptions of an operator, oldest first; each still to be built and loaded."""
        found = []
        for key, row in self.host.take_children(f"{self.id}/{index}"):
            made = Artifact(self.host, f"{self.id}/{index}.{key}", self.root)
            made._take(row)
            found.append((key, made))
        return iter(sorted(found, key=lambda each: each[1].order))

    def children(self) -> Iterator[Artifact]:
        """The open inner subscriptions of all its operators."""
        for operator in self._operators:
            yield from operator.children()

    # Its life

    def open(self) -> None:
        """Be new."""
        self.mark()
        for operator in reversed(self._operators):
            operator.on_open()

    def load(self, row: dict[str, Any] | None = None) -> None:
        """Become what was saved. `StateMismatch`, `StateDamaged`, `rt.UnknownVersion`."""
        if row is not None:
            self._take(row)
        assert self._row is not None
        saved, self._row = self._row["operators"], None
        if len(saved) != len(self._operators):
            raise StateMismatch(
                "state of another number of operators",
                where=self.id,
                got=len(saved),
                wanted=len(self._operators),
                hint="The query is built otherwise than when it was saved: start it under another id.",
            )
        self._is_loaded = True
        for operator, each in zip(reversed(self._operators), reversed(saved), strict=True):
            operator.load(each)

    def start(self, watermarks: dict[str, int] | None = None, *, is_new: bool = False) -> None:
        """Begin, or go on. `watermarks`: what a new query begins behind, where that is not now.

        `is_new`: it was not begun before it was saved.
        """
        self._watermarks = watermarks
        for operator in self._operators:
            operator.start(is_loaded=self._is_loaded and not is_new)
        self._watermarks = None

    def begun_after(self, source: str) -> int:
        """The watermark that a tap on `source` begins behind."""
        watermarks = self.root._watermarks or {}  # inner subscriptions of its start begin there as well
        return watermarks.get(source, self.host.feed(source).watermark)

    def dispose(self) -> None:
        """End all operators; the row stays, and says so."""
        for operator in self._operators:
            operator.dispose()

    def forget(self) -> None:
        """End all operators, and have the row deleted."""
        try:
            self.dispose()
        finally:
            self.host.forget(self)

    def abandon(self) -> None:
        """Let go of everything in memory; what is stored stays."""
        for operator in self._operators:
            operator.abandon()

    @property
    def is_finished(self) -> bool:
        """Whether it will never emit anything any more."""
        return all(operator.is_disposed for operator in self._operators)

    # Errors

    def guard(self, call: Callable[..., object], *arguments: Any) -> None:
        """Call something of an operator; what it raises ends the query."""
        try:
            call(*arguments)
        except Exception as error:  # noqa: BLE001 - whatever a query raises ends that query only
            self.crash(error)

    def crash(self, error: Exception) -> None:
        """End the query with an error that no operator handles."""
        root = self.root
        if not root.is_finished:
            root.dispose()
            root._out.on_error(error)

    # Saving

    def mark(self) -> None:
        """Have it in the next checkpoint."""
        if not self.is_dirty:
            self.is_dirty = True
            self.host.mark(self)

    def row(self) -> bytes:
        """Its row, as it is now. `NotSerializable` where an operator holds what cannot be stored."""
        row: dict[str, Any] = {"operators": [operator.save() for operator in self._operators]}
        if self.root is not self:
            row["order"] = self.order
            if isinstance(self.seed, Inner):
                row["inner"] = self.seed.address
            elif self.seed is not None:
                row["seed"] = plain(self.seed)
        return encode(row)

    def saved(self) -> None:
        """A checkpoint with its row is durable."""
        for operator in self._operators:
            operator.saved()

    def _take(self, row: dict[str, Any]) -> None:
        self._row = row
        self.order = row.get("order", 0)
        self.seed = row.get("seed")
        if "inner" in row:
            inner = self.host.inners.get(row["inner"])
            if inner is None:
                raise StateDamaged("a subscription to a window or group that is not", where=self.id)
            self.seed = inner
