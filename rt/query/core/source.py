"""How values enter a query: from a feed of its engine, or from a window or group of an operator.

A value of a source goes to the stages first, in the order in which they were added, and the stages compute
their values. Then each query receives everything that it reads, from the source and from its stages. The
queries follow in the order in which they were started. So a query that reads a stage behaves like a query
that has the operators of the stage itself.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

from rt.query.core.errors import NoSuchQuery, WrongState
from rt.query.core.observable import Observable, Observer
from rt.query.core.operator import Operator
from rt.query.core.reliable import NOTHING
from rt.query.core.scheduler import Scheduler
from rt.query.turns import Turns, order_of, send_all

if TYPE_CHECKING:
    from rt.query.core.operator_group import OperatorGroup
    from rt.query.core.subject import Subject


class _Keys(Enum):
    """An enumeration, because a copy of its member is the same object."""

    EVERY = "every key"


EVERY_KEY: Final = _Keys.EVERY
"""The key of a tap that receives the values of all keys."""


class SubjectTap(Operator[Any, Any]):
    """A subscription to a window or group."""

    __slots__ = ("_inner", "_is_loaded")
    NAME = "inner"

    def __init__(self, inner: Subject) -> None:
        self._inner: Final = inner
        self._is_loaded = False

    def load_state(self, state: Any, version: int, /) -> None:  # noqa: ARG002
        """If there is saved state, the tap was attached."""
        self._is_loaded = True

    def on_connect(self) -> None:
        self._inner.attach(self, is_loaded=self._is_loaded)

    def on_dispose(self) -> None:
        self._inner.detach(self)

    def dispose(self) -> None:
        """End, and notify the owner."""
        if not self.is_disposed:
            super().dispose()
            self._inner.on_tap_disposed()


class Source(Observable[Any]):
    """The values of a source or stage of the engine that arrive after the query started.

    `key`: only those for which the `key_of` of the stage returned this key. They are found by a dictionary,
    so a query costs nothing for other keys.
    """

    def __init__(self, name: str, *, key: Hashable = EVERY_KEY) -> None:
        hash(key)  # raises TypeError here, not later in the engine
        self.name: Final = name
        self.key: Final = key

    def build(self, group: OperatorGroup, out: Observer[Any]) -> Operator[Any, Any]:
        feed = group.runtime.feed(self.name)  # Raises if there is none.
        if self.key is not EVERY_KEY and not feed.has_keys:
            hint = "Read a stage with key_of: engine.add_stage(name, …, key_of=…)."
            raise NoSuchQuery("no keys", where=f"source {self.name!r}", got=f"key {self.key!r}", hint=hint)
        rank = group.root.rank
        if rank is not None and feed.rank >= rank:
            hint = "A stage can read the sources, and the stages that were added before it."
            raise WrongState(
                "a stage reads itself or a later one", where=group.root.id, got=self.name, hint=hint
            )
        group.note_feed(self.name)
        tap = SourceTap(self.name, feed.normal_key(self.key), rank)
        tap.bind(group, out)
        return tap


class ValueTest:
    """A mixin for operators whose `on_next(value)` only means `if test(value): send(value)`.

    A source then calls the two functions itself.
    """

    __slots__ = ()

    def test_and_send(self) -> tuple[Callable[[Any], object], Callable[[Any], object]] | None:
        """The two functions; None if the operator must be called."""
        raise NotImplementedError

    def on_test_failed(self, error: Exception, value: Any, /) -> None:
        """The test raised an error."""
        raise NotImplementedError


class SourceTap(Operator[Any, Any]):
    """A subscription to a feed: receives the values after the watermark `after`.

    `order`: its position among the taps of the engine; None until it is attached. `rank`: the rank of the
    stage that has the tap; None if a query has it.
    """

    __slots__ = ("_is_attached", "_name", "after", "key", "order", "place", "rank")
    NAME = "source"
    SAVED = ("after", "order")

    def __init__(self, name: str, key: Hashable, rank: int | None) -> None:
        self._name: Final = name
        self.key: Final = key
        self.rank: Final = rank
        self.after = NOTHING
        self.order: int | None = None
        self.place: int | None = None
        """Its index in its list of taps."""
        self._is_attached = False

    def on_connect(self) -> None:
        """Attach. If the feed has ended, end at the next timer.

        This includes a recovered tap: the feed may have ended while the query of the tap did not run, or
        during the recovery.
        """
        feed = self._group.runtime.feed(self._name)
        self._is_attached = True
        feed.attach(self)
        if feed.has_ended and not self.has_timer():
            self.set_timer(self.now_ns)

    def on_start(self) -> None:
        self.after = self._group.start_watermark(self._name)

    def on_timer(self, key: str, /) -> None:  # noqa: ARG002
        """End, unless the stage was restarted meanwhile."""
        if self._group.runtime.feed(self._name).has_ended:
            self.end()

    def end(self) -> None:
        """Fail or complete, as the feed did."""
        self._group.runtime.scheduler.event_ns = None
        end = self._group.runtime.feed(self._name).end
        if isinstance(end, Exception):
            self.fail(end)
        else:
            self.complete()

    def on_dispose(self) -> None:
        if self._is_attached:
            self._is_attached = False
            self._group.runtime.feed(self._name).detach(self)

    def load_state(self, state: Any, version: int, /) -> None:
        """Restore the state, but with `after` at most at the watermark of the feed.

        The program may have changed: ids of a source that the query read before have no meaning here.
        """
        super().load_state(state, version)
        feed = self._group.runtime.feed(self._name)
        self.after = min(self.after, feed.watermark)
        feed.reserve(self.order)

    def step(self) -> Step:
        """The functions that the feed calls with a value for this tap."""
        first = self._out
        split = first.test_and_send() if isinstance(first, ValueTest) else None
        return (first.on_next, _ignore, self) if split is None else (*split, self)

    def test_failed(self, error: Exception, value: Any) -> None:
        """The first function of the step raised an error."""
        first = self._out
        try:
            if not isinstance(first, ValueTest) or first.test_and_send() is None:
                raise error
            first.on_test_failed(error, value)
        except Exception as last:  # noqa: BLE001 - any error of a query concerns only that query
            self._group.crash(last, first)


Step: TypeAlias = tuple[Callable[[Any], object], Callable[[Any], object], SourceTap]
"""`test`, `send` and the tap: `if test(value): send(value)`.

If the first operator only tests values, the feed calls its test itself. If most queries do not want a value,
these tests are the cost of the value. Otherwise `test` processes the value, and `send` does nothing.
"""


def _ignore(_: Any) -> None:
    """Nothing is left to do."""


class TapList:
    """Attached taps in their order.

    A tap that is detached while a value is being sent does not receive it. A tap that is attached meanwhile
    receives the next value.
    """

    __slots__ = ("_added", "_detached", "_last_order", "_steps", "after", "count")

    def __init__(self) -> None:
        self.count = 0
        """Number of attached taps."""
        self.after = NOTHING
        """Values with a greater id are for all taps."""
        self._added: dict[SourceTap, None] = {}
        self._steps: list[Step] = []
        self._detached = 0
        """Number of steps whose taps were detached."""
        self._last_order = -1

    def attach(self, tap: SourceTap) -> None:
        self._added[tap] = None
        self.count += 1

    def detach(self, tap: SourceTap) -> None:
        """Detach a tap. A list of steps that is being read does not call it any more either."""
        self._added.pop(tap, None)
        self.count -= 1
        if tap.place is not None:
            self._steps[tap.place] = (_ignore, _ignore, tap)
            self._detached += 1

    def steps(self) -> list[Step]:
        """The steps of the attached taps. Call this before a value is sent, not while it is sent."""
        if self._added or self._detached > len(self._steps) // 2:
            self._update()
        return self._steps

    def _update(self) -> None:
        added = [tap for tap in self._added if not tap.is_disposed]
        self._added = {}
        added.sort(key=order_of)
        is_out_of_order = bool(added) and order_of(added[0]) < self._last_order
        if is_out_of_order or self._detached > len(self._steps) // 2:
            added = sorted([*(tap for _, _, tap in self._steps if not tap.is_disposed), *added], key=order_of)
            self._steps = []
            self._detached = 0
        for place, tap in enumerate(added, len(self._steps)):
            tap.place = place
            self._steps.append(tap.step())
            self.after = max(self.after, tap.after)
        if added:
            self._last_order = order_of(added[-1])


class ValueFeed:
    """The values of one source or stage, sent to the taps of stages, then to those of queries."""

    rank = -1
    """Of a stage: its number. Stages read only feeds of lower rank."""
    has_keys = False
    """Whether taps can read the values of one key."""

    def __init__(self, name: str, turns: Turns | None = None) -> None:
        self.name: Final = name
        self.watermark = NOTHING
        """The id of the last value that every query processed."""
        self.end: Exception | Literal["completed"] | None = None
        self.missing = 0
        """Number of ids up to the watermark that have no value."""
        self.processing: int | None = None
        """The id of the value that the queries process now."""
        self.value: Any = None
        """The value that the queries process now, or the last value."""
        self._turns: Final = turns or Turns(Scheduler())
        self._taps: Final = TapList()
        self._stage_steps: Final[dict[Hashable, dict[SourceTap, Step]]] = {}
        """By key, for the taps of stages."""

    @property
    def count(self) -> int:
        """Number of values that every query processed, in all runs."""
        return self.watermark + 1 - self.missing

    @property
    def has_ended(self) -> bool:
        return self.end is not None

    def attach(self, tap: SourceTap) -> None:
        """Send values to the tap: after all other taps, or at its saved position."""
        if tap.order is None:
            tap.order = self._turns.next_order()
        if tap.rank is None:
            self._taps_of(tap.key).attach(tap)
        else:
            self._stage_steps.setdefault(tap.key, {})[tap] = tap.step()

    def normal_key(self, key: Hashable) -> Hashable:
        """Convert the key of a tap to the form that the keys of values have."""
        return key

    @property
    def has_taps(self) -> bool:
        return bool(self._stage_steps) or any(each.count for each in self._tap_lists())

    def reserve(self, order: int | None) -> None:
        """Place new taps after this saved position."""
        self._turns.reserve(order)

    def detach(self, tap: SourceTap) -> None:
        """Detach a tap, which must be attached."""
        if tap.rank is None:
            self._taps_of(tap.key).detach(tap)
        else:
            steps = self._stage_steps[tap.key]
            del steps[tap]
            if not steps:
                del self._stage_steps[tap.key]

    def on_next(self, sequence_id: int, value: Any, /) -> None:
        """Let every stage and query process the value."""
        if self._stage_steps:
            self._turns.collect(partial(self._share, sequence_id, value))
        else:
            send_all(self._steps(sequence_id), value)
        self.watermark = sequence_id

    def on_error(self, error: Exception, /) -> None:
        """Fail every present and later tap."""
        self._finish(error)

    def on_completed(self) -> None:
        """Complete every present and later tap."""
        self._finish("completed")

    def _share(self, sequence_id: int, value: Any) -> None:
        for step in self._steps_of_stages(EVERY_KEY):
            self._turns.add_for_stage(step, value)
        steps = self._taps.steps()
        if sequence_id > self._taps.after:
            self._turns.add_for_queries(steps, value)
            return
        for step in steps:
            if sequence_id > step[2].after:
                self._turns.add_for_queries([step], value)

    def _steps(self, sequence_id: int) -> Iterable[Step]:
        steps = self._taps.steps()
        if sequence_id > self._taps.after:
            return steps
        # Lazily, because a step may replace a later step.
        return (step for step in steps if sequence_id > step[2].after)

    def _finish(self, end: Exception | Literal["completed"]) -> None:
        self.end = end
        self._turns.collect(self._end_taps)

    def _end_taps(self) -> None:
        for key in self._stage_steps:
            for _, _, tap in self._steps_of_stages(key):
                self._turns.add_for_stage((partial(_end, tap), _ignore, tap), None)
        for taps in self._tap_lists():
            ends: list[Step] = [(partial(_end, tap), _ignore, tap) for _, _, tap in taps.steps()]
            self._turns.add_for_queries([each for each in ends if not each[2].is_disposed], None)

    def _steps_of_stages(self, key: Hashable) -> Iterator[Step]:
        steps = self._stage_steps.get(key)
        return iter(steps.values() if steps else ())

    def _taps_of(self, key: Hashable) -> TapList:  # noqa: ARG002 - a stage has keys
        return self._taps

    def _tap_lists(self) -> list[TapList]:
        return [self._taps]


def _end(tap: SourceTap, _: Any) -> None:
    if not tap.is_disposed:
        tap._group.guard(tap.end)
