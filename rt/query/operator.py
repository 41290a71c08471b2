"""What operators are made of: state that is saved, timers, inner subscriptions, disposal.

Laws of an operator. It emits only while it handles a value, a timer or an inner event: never in `on_open`,
`load_state`, `on_connect` or `on_start`. What it emits depends on nothing but what came in, its arguments and
`now_ns`: no other clock, no randomness, no order of a set. Every change of its own state is told by
`changed()`. What it saved and loads is what it was. Functions of users are called inside `try`, and their
exceptions go to `fail`; whatever else escapes an operator ends its query with that error.

The life of one: `bind`, `add_input`, `on_open`, perhaps `load_state`, `on_connect`, `on_start` unless it was
loaded, events, `dispose`. Timers, inner subscriptions and objects are saved, loaded and given up by the base
class.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, ClassVar, Final, Generic, TypeVar

from rt.errors import UnknownVersion
from rt.objects import ANY
from rt.query.errors import StateMismatch
from rt.query.inner import Inner
from rt.query.objects import ScopedObjects
from rt.query.observing import Observable, Observer
from rt.query.rows import plain

if TYPE_CHECKING:
    from rt.query.artifact import Artifact
    from rt.query.scheduling import Timer

A = TypeVar("A")
B = TypeVar("B")


class Operator(Generic[A, B]):
    """Takes values of A and emits values of B. See the module for its laws.

    Subclasses are slotted, name themselves in NAME, and count VERSION up when what they save changes.
    """

    __slots__ = (
        "_artifact",
        "_children",
        "_children_made",
        "_index",
        "_inputs",
        "_is_disposed",
        "_objects",
        "_out",
        "_timers",
    )

    _artifact: Artifact
    _out: Observer[B]
    _index: int
    _inputs: tuple[Operator[Any, Any], ...]
    _is_disposed: bool
    _objects: ScopedObjects | None
    _timers: dict[str, Timer] | None
    _children: dict[str, Artifact] | None
    _children_made: int

    NAME: ClassVar[str]
    """Stored with the state, such as "take"."""
    VERSION: ClassVar[int] = 1
    IS_TRANSITIONING: ClassVar[bool] = False
    """Whether it begins without state where that of another operator is stored, instead of failing."""

    # What subclasses say

    def on_next(self, value: A, /) -> None:
        """A value of the only source. Default: an operator with no source, or several."""
        raise NotImplementedError

    def on_error(self, error: Exception, /) -> None:
        """The only source failed. Default: so does this."""
        self.fail(error)

    def on_completed(self) -> None:
        """The only source has ended. Default: so does this."""
        self.complete()

    def on_inner_next(self, key: str, value: Any, /) -> None:
        """A value of the inner subscription, or of the source, called `key`."""
        raise NotImplementedError

    def on_inner_error(self, key: str, error: Exception, /) -> None:  # noqa: ARG002
        """It failed, and is closed. Default: so does this."""
        self.fail(error)

    def on_inner_completed(self, key: str, /) -> None:
        """It has ended, and is closed."""
        raise NotImplementedError

    def on_timer(self, key: str, /) -> None:
        """The timer called `key` fired, and is gone. `now_ns` is its time, or later after a recovery."""
        raise NotImplementedError

    def on_open(self) -> None:
        """Get the objects that hold large state: `self.objects`. Called once, fresh or loaded."""

    def on_connect(self) -> None:
        """Attach to what lies outside of the query; sources only. Called once, fresh or loaded."""

    def on_start(self) -> None:
        """Begin, for the first time in the life of the query: set timers, open inner subscriptions."""

    def on_dispose(self) -> None:
        """Detach from what lies outside. Objects, timers, inner subscriptions, inputs end by themselves."""

    def on_state_saved(self) -> None:
        """A checkpoint that holds this operator's state is durable."""

    def save_state(self) -> Any:
        """What `load_state` needs, of what JSON gives back as it was (see `rt.objects.ANY`); small."""
        return None

    def load_state(self, state: Any, version: int, /) -> None:
        """Become what `save_state` of that version, at most VERSION, said."""

    def child(self, key: str, seed: Any, /) -> Observable[Any]:
        """What the inner subscription `key` subscribes to; the same for the same seed, in every run."""
        raise NotImplementedError

    # What subclasses use

    @property
    def is_disposed(self) -> bool:
        """Whether it has ended."""
        return self._is_disposed

    @property
    def now_ns(self) -> int:
        """The time of the query's clock."""
        artifact = self._artifact
        return max(artifact.host.scheduler.now_ns, artifact.root.begun_ns)

    @property
    def objects(self) -> ScopedObjects:
        """Collections in the object space that belong to this operator, for state that grows."""
        if self._objects is None:
            host = self._artifact.host
            self._objects = ScopedObjects(host.space, self.address)
        return self._objects

    @property
    def address(self) -> str:
        """Names this operator in its engine: the same in every run."""
        return f"{self._artifact.id}#{self._index}"

    def changed(self) -> None:
        """What `save_state` would say differs from what it said."""
        if not self._artifact.is_dirty:
            self._artifact.mark()

    def emit(self, value: B) -> None:
        """Send a value on; nothing if this has ended, maybe by the value emitted before."""
        if not self._is_disposed:
            self._out.on_next(value)

    def fail(self, error: Exception) -> None:
        """End with an error."""
        if not self._is_disposed:
            self.dispose()
            self._out.on_error(error)

    def complete(self) -> None:
        """End. What it holds must have been emitted before: it is given up now."""
        if not self._is_disposed:
            self.dispose()
            self._out.on_completed()

    def dispose(self) -> None:
        """Give up everything, the inputs as well; emits nothing. Twice is as once."""
        if self._is_disposed:
            return
        self._is_disposed = True
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
        """Nobody behind this listens any more: end. Who handed out windows or groups may go on for them."""
        self.dispose()

    def has_input_ended(self, index: int) -> bool:
        """Whether one of several sources has ended, or was given up."""
        return self._inputs[index].is_disposed

    def has_open_input(self) -> bool:
        """Whether one of the sources has not ended."""
        return any(not source.is_disposed for source in self._inputs)

    def dispose_input(self, index: int) -> None:
        """Give up one of several sources."""
        self._inputs[index].leave()

    def set_timer(self, due_ns: int, key: str = "") -> None:
        """Have `on_timer(key)` called at that time; if that is past, as soon as this event is done.

        Replaces the timer of that key.
        """
        self.cancel_timer(key)
        self._arm(key, due_ns, None)
        self.changed()

    def cancel_timer(self, key: str = "") -> None:
        """Nothing if there is none."""
        timer = self._timers.pop(key, None) if self._timers else None
        if timer is not None:
            timer.cancel()
            self.changed()

    def has_timer(self, key: str = "") -> bool:
        """Whether one of that key is set."""
        return bool(self._timers) and key in self._timers  # type: ignore[operator]

    def open_child(self, key: str, seed: Any = None) -> None:
        """Subscribe to `child(key, seed)`: its events come to `on_inner_…(key, …)`.

        It is saved in a row of its own, with the seed: something that JSON gives back as it was, or a window
        or group that is being handed out; `rt.objects.NotSerializable` for others. Keys have no "/" and no
        "#", and are never used again.
        """
        if not isinstance(seed, Inner):
            ANY.check(seed)
        if "/" in key or "#" in key or (self._children and key in self._children):
            raise ValueError(f"{key!r} cannot name an inner subscription")
        self._children_made += 1
        artifact = self._artifact.new_child(self._index, key, seed, self._children_made)
        artifact.build(self.child(key, seed), Inlet(self, key))
        if self._children is None:
            self._children = {}
        self._children[key] = artifact
        self.changed()
        artifact.open()
        artifact.start()

    def close_child(self, key: str) -> None:
        """Give an inner subscription up; nothing if there is none."""
        artifact = self._children.pop(key, None) if self._children else None
        if artifact is not None:
            artifact.forget()

    def has_children(self) -> bool:
        """Whether inner subscriptions are open."""
        return bool(self._children)

    def child_keys(self) -> list[str]:
        """The open inner subscriptions, oldest first."""
        return list(self._children or ())

    def make_inner(self, name: str, key: Any = None) -> Inner:
        """A window or group of this operator; `name` is unique in it for all time. Again in `load_state`."""
        return Inner(self._artifact.host, f"{self.address}#{name}", key)

    def hand_out(self, inner: Inner) -> None:
        """Emit a window or group. Who wants it subscribes now, or never."""
        with inner.handed_out():
            self.emit(inner)  # type: ignore[arg-type]

    # What the artifact does

    def bind(self, artifact: Artifact, out: Observer[B]) -> None:
        """Belong to an artifact, and send to `out`."""
        self._artifact = artifact
        self._out = out
        self._inputs = ()
        self._is_disposed = False
        self._objects = None
        self._timers = None
        self._children = None
        self._children_made = 0
        self._index = artifact.add(self)

    def add_input(self, source: Operator[Any, A]) -> None:
        """Have it disposed with this."""
        self._inputs = (*self._inputs, source)

    def inlet(self, key: str) -> Observer[Any]:
        """What one of several sources sends to."""
        return Inlet(self, key)

    def save(self) -> list[Any]:
        """The operator's part of its artifact's row."""
        timers = [[key, each.due_ns, each.order] for key, each in (self._timers or {}).items()]
        state = None if self._is_disposed else plain(self.save_state())
        return [self.NAME, self.VERSION, int(self._is_disposed), state, timers, self._children_made]

    def load(self, saved: list[Any]) -> None:
        """Become what was saved, with the inner subscriptions; starts nothing."""
        name, version, is_disposed, state, timers, children_made = saved
        self._is_disposed = bool(is_disposed)
        self._children_made = children_made
        if self._is_disposed:
            return
        self.on_open()
        if name != self.NAME:
            if self.IS_TRANSITIONING:
                return
            raise StateMismatch(
                "state of another operator", where=self.address, got=name, wanted=self.NAME, hint=_CHANGED
            )
        if version > self.VERSION:
            raise UnknownVersion(
                f"state of a newer {self.NAME}", where=self.address, got=version, wanted=self.VERSION
            )
        for key, due_ns, order in timers:
            self._arm(key, due_ns, order)
        self.load_state(state, version)
        for key, artifact in self._artifact.load_children(self._index):
            if self._children is None:
                self._children = {}
            self._children[key] = artifact
            artifact.build(self.child(key, artifact.seed), Inlet(self, key))
            artifact.load()

    def children(self) -> Iterable[Artifact]:
        """The open inner subscriptions."""
        return (self._children or {}).values()

    def start(self, *, is_loaded: bool) -> None:
        """Begin, or go on."""
        if self._is_disposed:
            return
        self.on_connect()
        for artifact in list((self._children or {}).values()):
            artifact.start()
        if not is_loaded:
            self.on_start()

    def release(self) -> None:
        """Cancel timers; the state is not touched."""
        timers, self._timers = self._timers, None
        for timer in (timers or {}).values():
            timer.cancel()

    def abandon(self) -> None:
        """Let go of everything in memory: what is stored stays as it is."""
        self.release()
        for artifact in (self._children or {}).values():
            artifact.abandon()
        if not self._is_disposed:
            self._is_disposed = True
            self.on_dispose()

    def saved(self) -> None:
        """A checkpoint with its state is durable."""
        if not self._is_disposed:
            self.on_state_saved()

    def _arm(self, key: str, due_ns: int, order: int | None) -> None:
        if self._timers is None:
            self._timers = {}
        self._timers[key] = self._artifact.host.scheduler.at(due_ns, lambda: self._fire(key), order=order)

    def _fire(self, key: str) -> None:
        assert self._timers is not None
        del self._timers[key]
        self.changed()
        self._artifact.guard(self.on_timer, key)


class Inlet:
    """Where one of several sources, or an inner subscription, arrives."""

    __slots__ = ("_key", "_operator")

    def __init__(self, operator: Operator[Any, Any], key: str) -> None:
        self._operator = operator
        self._key = key

    def on_next(self, value: Any, /) -> None:
        """On to the operator."""
        if not self._operator.is_disposed:
            self._operator.on_inner_next(self._key, value)

    def on_error(self, error: Exception, /) -> None:
        """Close it, and on to the operator."""
        self._operator.close_child(self._key)
        if not self._operator.is_disposed:
            self._operator.on_inner_error(self._key, error)

    def on_completed(self) -> None:
        """Close it, and on to the operator."""
        self._operator.close_child(self._key)
        if not self._operator.is_disposed:
            self._operator.on_inner_completed(self._key)


_CHANGED: Final = "The query is built of other operators than when it was saved: start it under another id."
