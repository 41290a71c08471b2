"""Base of operators: saved state, timers, inner subscriptions, disposal.

Invariants of an operator:
- It emits only while it handles a value, a timer or an inner event: never in `on_open`, `load_state`,
  `on_connect` or `on_start`.
- Its output depends only on its input, its arguments and `now_ns`: not on another clock, randomness, or the
  order of a set.
- It never changes a value that it received or emitted: values are shared, not copied.
- It calls `changed()` for every change of its own state.
- `load_state` restores what `save_state` returned.
- Its `on_dispose` may run when other operators of the query have already ended. If it raises, the query ends.
- It calls users' functions inside `try` and passes their exceptions to `reject`, before it changes its state.
  If an operator itself raises for a value, this is handled as if a user's function had raised. An exception
  at its start or at the end of its source ends the query.
- After `reject`, the operator either is in the state as if the value had not arrived, or has failed.

Order of calls: `bind`, `add_input`, `on_open`, `load_state` if it was saved, `on_connect`, `on_start` if it
was not saved, events, `dispose`. The base class saves, loads and disposes timers, inner subscriptions and
objects.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from rt.errors import UnknownVersion
from rt.objects import ANY
from rt.query.core.errors import StateMismatch, call_all, raise_first
from rt.query.core.observable import Inlet, Observable, Observer, Watched
from rt.query.core.row_json import plain
from rt.query.core.scoped_objects import ScopedObjects
from rt.query.core.subject import Subject
from rt.query.core.timers import OBJECT, OperatorTimers

if TYPE_CHECKING:
    from rt.query.core.operator_group import OperatorGroup

logger = logging.getLogger("rt.query")

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
        self._inputs: tuple[Operator[Any, Any], ...] = ()
        self.is_disposed = False
        self._objects: ScopedObjects | None = None
        self._timers: OperatorTimers | None = None
        self._children: dict[str, OperatorGroup] | None = None
        self._children_made = 0
        self._index = group.add(self)
        watch = group.runtime.watch
        self._out = out if watch is None else watch(self, out)

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
        """A value of the inner subscription, or of the source, with the key `key`."""
        raise NotImplementedError

    def on_inner_error(self, key: str, error: Exception, /) -> None:  # noqa: ARG002
        """The inner subscription or source `key` failed, and is closed. Default: fail."""
        self.fail(error)

    def on_inner_completed(self, key: str, /) -> None:
        """The inner subscription or source `key` completed, and is closed."""
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

    def save_state(self) -> Any:
        """A small value that JSON restores unchanged (see `rt.objects.ANY`), for `load_state`."""
        saved = self.SAVED
        if saved is None or isinstance(saved, str):
            return saved and getattr(self, saved)
        return [getattr(self, name) for name in saved]

    def load_state(self, state: Any, version: int, /) -> None:  # noqa: ARG002
        """Restore the state that `save_state` returned in version `version`, which is at most VERSION."""
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
    def event_ns(self) -> int:
        """The time of the value that is processed. In timers, and without `time_of`, it is `now_ns`."""
        return self._group.runtime.scheduler.event_time(self.now_ns)

    @property
    def objects(self) -> ScopedObjects:
        """Collections in the object space that belong to this operator, for large state."""
        if self._objects is None:
            self._objects = ScopedObjects(self._group.runtime.space, self.address)
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
        """Send a value. Does nothing if this operator has ended, possibly because of the previous value."""
        if not self.is_disposed:
            try:
                self._out.on_next(value)
            except Exception as error:  # noqa: BLE001 - any error of an operator concerns only its query
                self._group.crash(error, self._out)

    def reject(self, error: Exception) -> None:
        """A user's function raised: leave the value out, or fail, as the query's error policy says."""
        if not self._group.skips(error, self):
            self.fail(error)

    def can_skip(self) -> bool:
        """Whether it can leave out the current value: it still gets others, or an end."""
        return bool(self._children or self._timers) or self.has_open_input()

    def handles_errors(self) -> bool:
        """Whether an error of its source or inner subscription is not passed on to its observer."""
        return False

    @property
    def observer(self) -> Operator[Any, Any] | None:
        """The operator that receives the values of this one. None: the query's output receives them."""
        return operator_of(self._out)

    def fail(self, error: Exception) -> None:
        if not self.is_disposed:
            try:
                self.dispose()
            except Exception as other:  # noqa: BLE001 - the first error is more important
                logger.error("dispose_failed operator=%s error=%r", self.address, other)
            self._out.on_error(error)

    def complete(self) -> None:
        """End. Emit pending values before this call, because their state is deleted."""
        if not self.is_disposed:
            self.dispose()
            self._out.on_completed()

    def dispose(self) -> None:
        """End this operator and all its inputs, without emitting. Idempotent.

        If an `on_dispose` raises, the rest ends nevertheless. Then the error is raised, and ends the query.
        """
        if self.is_disposed:
            return
        self.is_disposed = True
        self.changed()
        self.release()
        steps: list[Callable[[], object]] = [partial(self.close_child, key) for key in self._children or ()]
        steps.append(self.on_dispose)
        if self._objects is not None:
            steps.append(self._objects.delete_all)
        steps.extend(source.leave for source in self._inputs)
        errors = []
        for step in steps:  # not `call_all`, because this recurses along the query
            try:
                step()
            except Exception as error:  # noqa: BLE001 - raised below
                errors.append(error)
                self._group.root.is_broken = True
        raise_first(errors)

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

        Replaces the timer with this key. A checkpoint costs what changed, with any number of timers.
        """
        if self._timers is None:
            self._timers = OperatorTimers(self)
        self._timers.set(key, due_ns)

    def cancel_timer(self, key: str = "") -> None:
        """Does nothing if there is no such timer."""
        if self._timers is not None:
            self._timers.cancel(key)

    def has_timer(self, key: str = "") -> bool:
        return self._timers is not None and key in self._timers

    def skip_ns(self, due_ns: int, every_ns: int) -> int:
        """When to set the timer of a tick at `due_ns` that has nothing to do: there, or ticks later.

        It is later if the clock jumps over many ticks. A value before then must set the timer to `due_ns`.
        """
        return self._group.runtime.scheduler.skip_ns(due_ns, every_ns)

    def open_child(self, key: str, seed: Any = None) -> None:
        """Subscribe to `child(key, seed)`. Its events call `on_inner_…(key, …)`.

        It is saved as its own row, with the seed: a value that JSON restores unchanged
        (`rt.objects.NotSerializable`), or a window or group that is being handed out. A key must not contain
        "/" or "#", and must not be used again. If this raises, nothing was opened.
        """
        if not isinstance(seed, Subject):
            ANY.check(seed)
        if "/" in key or "#" in key or (self._children and key in self._children):
            raise ValueError(f"an inner subscription needs a new key without '/' and '#', got {key!r}")
        group = self._group.new_child(self._index, key, seed, self._children_made + 1)
        group.build(self.child(key, seed), Inlet(self, key))
        self._children_made += 1
        if self._children is None:
            self._children = {}
        self._children[key] = group
        self.changed()
        try:
            group.open()
            group.start()
        except Exception:
            self.close_child(key)
            raise

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
        timers = self._timers.save() if self._timers else []
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
                self.objects.delete(OBJECT)
                return
            what = "saved state of another operator"
            raise StateMismatch(what, where=self.address, got=name, expected=self.NAME)
        if version > self.VERSION:
            what = f"saved by a newer operator {self.NAME}"
            hint = "Use a newer rt."
            raise UnknownVersion(what, where=self.address, got=version, expected=self.VERSION, hint=hint)
        self._timers = OperatorTimers.load(self, timers)
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
        if timers is not None:
            timers.release()

    def abandon(self) -> None:
        """Release everything in memory. The stored state stays."""
        self.release()
        steps: list[Callable[[], object]] = [group.abandon for group in (self._children or {}).values()]
        if not self.is_disposed:
            self.is_disposed = True
            steps.append(self.on_dispose)
        call_all(steps)


def operator_of(observer: Observer[Any] | None) -> Operator[Any, Any] | None:
    """The operator that handles the values sent to `observer`. None if `observer` belongs to no operator."""
    while isinstance(observer, Watched):
        observer = observer.out
    if isinstance(observer, Inlet):
        return observer.operator
    return observer if isinstance(observer, Operator) else None
