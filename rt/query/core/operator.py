"""Base of operators: saved state, timers, inner subscriptions, disposal.

Invariants of an operator:
- It emits only while it handles a value, a timer or an inner event: never in `on_open`, `load_state`,
  `on_connect` or `on_start`.
- Its output depends only on its input, its arguments and `now_ns`: not on another clock, randomness, or the
  order of a set.
- It calls `changed()` for every change of its own state.
- `load_state` restores what `save_state` returned.
- It calls users' functions inside `try` and passes their exceptions to `fail`. Any other exception ends the
  query.

Order of calls: `bind`, `add_input`, `on_open`, `load_state` if it was saved, `on_connect`, `on_start` if it
was not saved, events, `dispose`. The base class saves, loads and disposes timers, inner subscriptions and
objects.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from rt.errors import UnknownVersion
from rt.objects import ANY
from rt.query.core.errors import StateMismatch
from rt.query.core.observable import Observable, Observer
from rt.query.core.row_json import plain
from rt.query.core.scoped_objects import ScopedObjects
from rt.query.core.subject import Subject

if TYPE_CHECKING:
    from rt.query.core.operator_group import OperatorGroup
    from rt.query.core.scheduler import Timer

A = TypeVar("A")
B = TypeVar("B")


class Operator(Generic[A, B]):
    """Receives values of A and emits values of B. The module lists its invariants.

    Subclasses have slots, set NAME, name their state in SAVED or override `save_state` and `load_state`, and
    increase VERSION when the format of their saved state changes.
    """

    __slots__ = (
        "_children",
        "_children_made",
        "_group",
        "_index",
        "_inputs",
        "_objects",
        "_out",
        "_timers",
        "is_disposed",
    )

    NAME: ClassVar[str]
    """Stored with the state, for example "take"."""
    VERSION: ClassVar[int] = 1
    IS_TRANSITIONING: ClassVar[bool] = False
    """Whether to start without state, instead of failing, if the state of another operator is stored."""
    SAVED: ClassVar[str | tuple[str, ...] | None] = None
    """What `save_state` returns by default: an attribute, or a list of attributes."""

    def bind(self, group: OperatorGroup, out: Observer[B]) -> None:
        """Join an operator group, and send to `out`."""
        self._group = group
        self._out = out
        self._inputs: tuple[Operator[Any, Any], ...] = ()
        self.is_disposed = False
        self._objects: ScopedObjects | None = None
        self._timers: dict[str, Timer] | None = None
        self._children: dict[str, OperatorGroup] | None = None
        self._children_made = 0
        self._index = group.add(self)

    # Overridden by subclasses

    def on_next(self, value: A, /) -> None:
        """A value of the only source. Operators with no or several sources do not implement it."""
        raise NotImplementedError

    def on_error(self, error: Exception, /) -> None:
        """The only source failed. Default: fail."""
        self.fail(error)

    def on_completed(self) -> None:
        """The only source completed. Default: complete."""
        self.complete()

    def on_inner_next(self, key: str, value: Any, /) -> None:
        """A value of the inner subscription, or of the source, called `key`."""
        raise NotImplementedError

    def on_inner_error(self, key: str, error: Exception, /) -> None:  # noqa: ARG002
        """It failed, and is closed. Default: fail."""
        self.fail(error)

    def on_inner_completed(self, key: str, /) -> None:
        """It completed, and is closed."""
        raise NotImplementedError

    def on_timer(self, key: str, /) -> None:
        """The timer `key` fired and is removed. `now_ns` is its time, or later after a recovery."""
        raise NotImplementedError

    def on_open(self) -> None:
        """Get the objects for large state from `self.objects`. Called once, before `load_state`."""

    def on_connect(self) -> None:
        """Attach to things outside the query; sources only. Called once in every run."""

    def on_start(self) -> None:
        """Set timers and open inner subscriptions. Called once, when the query starts for the first time."""

    def on_dispose(self) -> None:
        """Detach from things outside. The base class ends objects, timers, inner subscriptions and inputs."""

    def on_state_saved(self) -> None:
        """A checkpoint with this operator's state is durable."""

    def save_state(self) -> Any:
        """A small value that JSON restores unchanged (see `rt.objects.ANY`), for `load_state`."""
        saved = self.SAVED
        if saved is None or isinstance(saved, str):
            return saved and getattr(self, saved)
        return [getattr(self, name) for name in saved]

    def load_state(self, state: Any, version: int, /) -> None:  # noqa: ARG002
        """Restore the state that `save_state` of `version`, at most VERSION, returned."""
        saved = self.SAVED
        if isinstance(saved, str):
            setattr(self, saved, state)
        elif saved is not None:
            for name, value in zip(saved, state, strict=True):
                setattr(self, name, value)

    def child(self, key: str, seed: Any, /) -> Observable[Any]:
        """The observable of the inner subscription `key`. Must be the same for the same seed in every run."""
        raise NotImplementedError

    # Used by subclasses

    @property
    def now_ns(self) -> int:
        """The time of the query's clock, in ns since the Unix epoch."""
        group = self._group
        return max(group.runtime.scheduler.now_ns, group.root.started_ns)

    @property
    def objects(self) -> ScopedObjects:
        """Collections in the object space that belong to this operator, for large state."""
        if self._objects is None:
            runtime = self._group.runtime
            self._objects = ScopedObjects(runtime.space, self.address)
        return self._objects

    @property
    def address(self) -> str:
        """The operator's name in its engine, the same in every run."""
        return f"{self._group.id}#{self._index}"

    def changed(self) -> None:
        """Must be called when the result of `save_state` changes."""
        if not self._group.is_dirty:
            self._group.mark()

    def emit(self, value: B) -> None:
        """Send a value. Does nothing if this operator has ended, possibly by the value before."""
        if not self.is_disposed:
            self._out.on_next(value)

    def fail(self, error: Exception) -> None:
        if not self.is_disposed:
            self.dispose()
            self._out.on_error(error)

    def complete(self) -> None:
        """End. Emit pending values before: their state is deleted."""
        if not self.is_disposed:
            self.dispose()
            self._out.on_completed()

    def dispose(self) -> None:
        """End without emitting, with all inputs. Idempotent."""
        if self.is_disposed:
            return
        self.is_disposed = True
        self.changed()
        self.release()
        for key in list(self._children or ()):
            self.close_child(key)
        self.on_dispose()
        if self._objects is not None:
            self._objects.delete_all()
        for source in self._inputs:
            source.leave()

    def leave(self) -> None:
        """The observer no longer listens: end.

        An operator with open windows or groups may continue for them.
        """
        self.dispose()

    def has_input_ended(self, index: int) -> bool:
        """Whether this source has ended or was disposed."""
        return self._inputs[index].is_disposed

    def has_open_input(self) -> bool:
        return any(not source.is_disposed for source in self._inputs)

    def set_timer(self, due_ns: int, key: str = "") -> None:
        """Call `on_timer(key)` at this time; if it is past, after the current event.

        Replaces the timer with this key.
        """
        self.cancel_timer(key)
        self._schedule(key, due_ns, None)
        self.changed()

    def cancel_timer(self, key: str = "") -> None:
        """Does nothing if there is no such timer."""
        timer = self._timers.pop(key, None) if self._timers else None
        if timer is not None:
            timer.cancel()
            self.changed()

    def has_timer(self, key: str = "") -> bool:
        return self._timers is not None and key in self._timers

    def open_child(self, key: str, seed: Any = None) -> None:
        """Subscribe to `child(key, seed)`. Its events call `on_inner_…(key, …)`.

        It is saved as its own row, with the seed: a value that JSON restores unchanged
        (`rt.objects.NotSerializable`), or a window or group that is being handed out. A key must not contain
        "/" or "#", and must not be used again.
        """
        if not isinstance(seed, Subject):
            ANY.check(seed)
        if "/" in key or "#" in key or (self._children and key in self._children):
            raise ValueError(f"an inner subscription needs a new key without '/' and '#', got {key!r}")
        self._children_made += 1
        group = self._group.new_child(self._index, key, seed, self._children_made)
        group.build(self.child(key, seed), Inlet(self, key))
        if self._children is None:
            self._children = {}
        self._children[key] = group
        self.changed()
        group.open()
        group.start()

    def close_child(self, key: str) -> None:
        """Close an inner subscription. Does nothing if there is none."""
        group = self._children.pop(key, None) if self._children else None
        if group is not None:
            group.delete()

    def child_keys(self) -> list[str]:
        """The open inner subscriptions, oldest first."""
        return list(self._children or ())

    def make_inner(self, name: str, key: Any = None) -> Subject:
        """Make a window or group. `name` must never be used again. `load_state` makes it again."""
        return Subject(self._group.runtime, f"{self.address}#{name}", key)

    def hand_out(self, inner: Subject) -> None:
        """Emit a window or group. It can be subscribed to only during this call."""
        with inner.handed_out():
            self.emit(inner)  # type: ignore[arg-type]

    # Called by the operator group

    def add_input(self, source: Operator[Any, A]) -> None:
        """Add a source, which is disposed with this operator."""
        self._inputs = (*self._inputs, source)

    def inlet(self, key: str) -> Observer[Any]:
        return Inlet(self, key)

    def save(self) -> list[Any]:
        """The operator's part of its group's row."""
        timers = [[key, each.due_ns, each.order] for key, each in (self._timers or {}).items()]
        state = None if self.is_disposed else plain(self.save_state())
        return [self.NAME, self.VERSION, int(self.is_disposed), state, timers, self._children_made]

    def load(self, saved: list[Any]) -> None:
        """Restore the saved state and inner subscriptions. Starts nothing."""
        name, version, is_disposed, state, timers, children_made = saved
        self.is_disposed = bool(is_disposed)
        self._children_made = children_made
        if self.is_disposed:
            return
        self.on_open()
        if name != self.NAME:
            if self.IS_TRANSITIONING:
                return
            what = "saved state of another operator"
            raise StateMismatch(what, where=self.address, got=name, expected=self.NAME)
        if version > self.VERSION:
            what = f"saved by a newer operator {self.NAME}"
            raise UnknownVersion(what, where=self.address, got=version, expected=self.VERSION)
        for key, due_ns, order in timers:
            self._schedule(key, due_ns, order)
        self.load_state(state, version)
        self._children = self._group.load_children(self._index) or None
        for key, group in (self._children or {}).items():
            group.build(self.child(key, group.seed), Inlet(self, key))
            group.load()

    def children(self) -> Iterable[OperatorGroup]:
        return (self._children or {}).values()

    def start(self, *, is_loaded: bool) -> None:
        if self.is_disposed:
            return
        self.on_connect()
        for group in list((self._children or {}).values()):
            group.start()
        if not is_loaded:
            self.on_start()

    def release(self) -> None:
        """Cancel the timers. The state stays."""
        timers, self._timers = self._timers, None
        for timer in (timers or {}).values():
            timer.cancel()

    def abandon(self) -> None:
        """Release everything in memory. The stored state stays."""
        self.release()
        for group in (self._children or {}).values():
            group.abandon()
        if not self.is_disposed:
            self.is_disposed = True
            self.on_dispose()

    def saved(self) -> None:
        if not self.is_disposed:
            self.on_state_saved()

    def _schedule(self, key: str, due_ns: int, order: int | None) -> None:
        if self._timers is None:
            self._timers = {}
        self._timers[key] = self._group.runtime.scheduler.at(due_ns, lambda: self._fire(key), order=order)

    def _fire(self, key: str) -> None:
        assert self._timers is not None
        del self._timers[key]
        self.changed()
        self._group.guard(self.on_timer, key)


class Inlet:
    """Receives one of several sources, or an inner subscription."""

    __slots__ = ("_key", "_operator")

    def __init__(self, operator: Operator[Any, Any], key: str) -> None:
        self._operator = operator
        self._key = key

    def on_next(self, value: Any, /) -> None:
        if not self._operator.is_disposed:
            self._operator.on_inner_next(self._key, value)

    def on_error(self, error: Exception, /) -> None:
        self._operator.close_child(self._key)
        if not self._operator.is_disposed:
            self._operator.on_inner_error(self._key, error)

    def on_completed(self) -> None:
        self._operator.close_child(self._key)
        if not self._operator.is_disposed:
            self._operator.on_inner_completed(self._key)
