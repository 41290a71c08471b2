"""Timers of operators: where few and many are stored, their cost in a checkpoint, their order."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rt.objects import CheckpointKind, MemoryStore
from rt.query import Operator, Source, applied
from rt.query.core.operator_group import OperatorGroup
from rt.query.core.runtime import GROUPS, QueryRuntime
from rt.query.core.scheduler import NS_PER_S, VirtualScheduler
from rt.query.core.timers import IN_ROW_MAX
from rt.testing.queries import MarbleEvent, check_laws, rows_written

IN = Source("in")


class Alarms(Operator[Any, Any]):
    """`(key, seconds)` sets a timer, `(key, None)` cancels it. Emits the keys of timers that fire."""

    __slots__ = ()
    NAME = "alarms"

    def on_next(self, value: Any, /) -> None:
        key, wait_s = value
        if wait_s is None:
            self.cancel_timer(key)
        else:
            self.set_timer(self.now_ns + wait_s * NS_PER_S, key)

    def on_timer(self, key: str, /) -> None:
        self.emit(key)

    def on_completed(self) -> None:
        pass


ALARMS = IN.pipe(applied(Alarms))


def opened(count: int) -> list[MarbleEvent]:
    return [MarbleEvent(at / 1000, "next", (f"user{at}", 5000)) for at in range(count)]


def test_checkpoint_writes_only_changed_timers() -> None:
    for count in (50, 1000):
        for waits in (None, 9000):
            clicks = [MarbleEvent(2, "next", (f"user{at * 7}", waits)) for at in (3, 4)]
            assert rows_written(ALARMS, {"in": [*opened(count), *clicks]}, last=2) <= 4


def test_timers_get_rows_of_their_own_only_above_in_row_limit() -> None:
    for count, objects in ((IN_ROW_MAX, 0), (IN_ROW_MAX + 1, 1)):
        runtime, root = _started(VirtualScheduler())
        for number, event in enumerate(opened(count)):
            runtime.feed("in").on_next(number, event.value)
        assert len(runtime.space.ids()) == objects
        root.dispose()
        assert runtime.space.ids() == []


def test_timers_due_at_the_same_time_fire_in_creation_order_after_crashes() -> None:
    keys = [f"k{number * 7 % 40}" for number in range(40)]
    events = [MarbleEvent(0, "next", (key, 50)) for key in keys]
    # These timers move to the end of the order.
    events += [MarbleEvent(1, "next", (key, 49)) for key in keys[5:20:3]]
    output = check_laws(ALARMS, {"in": events})
    moved = keys[5:20:3]
    assert [each.value for each in output] == [*(key for key in keys if key not in moved), *moved]


_STEPS = st.tuples(
    st.integers(0, 30).map(lambda number: f"k{number}"), st.one_of(st.none(), st.integers(0, 9))
)


@given(st.lists(_STEPS, max_size=60))
@settings(max_examples=25, deadline=None)
def test_saves_and_crashes_do_not_change_timers(steps: list[tuple[str, int | None]]) -> None:
    events = [MarbleEvent(at // 4, "next", step) for at, step in enumerate(steps)]
    due: dict[str, tuple[int, int]] = {}
    expected: list[tuple[int, str]] = []

    def fire(now_s: int) -> None:
        for key, (due_s, _) in sorted(due.items(), key=lambda each: each[1]):
            if due_s <= now_s:
                expected.append((due_s, key))
                del due[key]

    for order, event in enumerate(events):
        fire(int(event.at_s))
        key, wait_s = event.value
        due.pop(key, None)
        if wait_s is not None:
            due[key] = int(event.at_s) + wait_s, order
    fire(1000)
    output = check_laws(ALARMS, {"in": events})
    assert [(int(each.at_s), each.value) for each in output] == expected


def test_timer_keys_can_be_integers_and_tuples() -> None:
    keys = [key for number in range(20) for key in ((number, "a"), number, f"{number}")]
    output = check_laws(ALARMS, {"in": [MarbleEvent(0, "next", (key, 5)) for key in keys]})
    assert [each.value for each in output] == keys


def test_timer_with_unserializable_key_ends_query_without_a_timer() -> None:
    runtime, root = _started(VirtualScheduler())
    for number, event in enumerate([*opened(20), MarbleEvent(1, "next", (object(), 1))]):
        runtime.feed("in").on_next(number, event.value)
    assert root.is_finished
    assert runtime.scheduler.next_due_ns is None


class Moved(Alarms):
    __slots__ = ()
    NAME = "moved"
    IS_TRANSITIONING = True


def test_transitioning_operator_drops_timers_of_replaced_operator() -> None:
    store = MemoryStore()
    runtime, _ = _started(VirtualScheduler(), store)
    for number, event in enumerate(opened(20)):
        runtime.feed("in").on_next(number, event.value)
    writer = store.begin(CheckpointKind.FULL)
    runtime.save(writer)
    writer.commit()
    later = QueryRuntime(VirtualScheduler())
    later.add_feed("in")
    later.load(store.reader())
    root = later.roots["q"] = OperatorGroup(later, "q")
    root.build(IN.pipe(applied(Moved)), _Out())
    row = later.pop_stored("q")
    assert row is not None
    root.load(row)
    later.sweep()
    assert later.scheduler.next_due_ns is None
    assert later.space.ids() == []


@pytest.mark.parametrize("count", [IN_ROW_MAX, 500])
def test_group_row_stays_under_500_bytes_with_many_timers(count: int) -> None:
    store = MemoryStore()
    runtime, _ = _started(VirtualScheduler(), store)
    for number, event in enumerate(opened(count)):
        runtime.feed("in").on_next(number, event.value)
    writer = store.begin(CheckpointKind.FULL)
    runtime.save(writer)
    writer.commit()
    assert len(store.content()[GROUPS]["q"]) < 500


class _Out:
    def on_next(self, value: Any, /) -> None: ...
    def on_error(self, error: Exception, /) -> None: ...
    def on_completed(self) -> None: ...


def _started(
    scheduler: VirtualScheduler, store: MemoryStore | None = None
) -> tuple[QueryRuntime, OperatorGroup]:
    runtime = QueryRuntime(scheduler)
    runtime.add_feed("in")
    runtime.load((store or MemoryStore()).reader())
    root = runtime.roots["q"] = OperatorGroup(runtime, "q")
    root.build(ALARMS, _Out())
    root.open()
    root.start()
    return runtime, root
