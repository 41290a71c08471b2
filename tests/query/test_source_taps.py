"""Taps of a source feed: which queries receive a value, in which order, and errors of predicates."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from rt.query import Observable, Source, applied
from rt.query import operators as ops
from rt.query.core.operator_group import OperatorGroup
from rt.query.core.runtime import QueryRuntime
from rt.query.core.scheduler import VirtualScheduler
from rt.query.operators.elements.filter import Where
from rt.testing.queries import check_laws, hot

IN = Source("in")


class World:
    """Queries of one feed. A query records each value that it receives, and then executes the action in
    `acts`.
    """

    def __init__(self, *, tests_first: bool) -> None:
        self.runtime = QueryRuntime(VirtualScheduler())
        self.feed = self.runtime.add_feed("in")
        self.groups: dict[int, OperatorGroup] = {}
        self.got: list[tuple[int, int]] = []
        self.acts: dict[int, Callable[[], object]] = {}
        self.tests_first = tests_first
        self.sent = 0

    def start(self, number: int) -> None:
        group = self.groups[number] = OperatorGroup(self.runtime, f"q{number}")
        group.build(self.query(number), _Null())
        group.open()
        group.start()

    def stop(self, number: int) -> None:
        self.groups.pop(number).delete()

    def query(self, number: int) -> Observable[Any]:
        test = ops.where(lambda value: value % (number % 3 + 1) == 0)
        act = ops.do_action(lambda value: self.receive(number, value))
        return IN.pipe(test, act) if self.tests_first else IN.pipe(ops.map(int), test, act)

    def receive(self, number: int, value: int) -> None:
        self.got.append((number, value))
        if number in self.acts:
            self.acts.pop(number)()

    def send(self) -> None:
        self.feed.on_next(self.sent, self.sent)
        self.sent += 1


class _Null:
    def on_next(self, value: object, /) -> None: ...
    def on_error(self, error: Exception, /) -> None: ...
    def on_completed(self) -> None: ...


@pytest.mark.parametrize("tests_first", [True, False])
def test_value_reaches_running_queries_in_order_of_their_starts(tests_first: bool) -> None:
    draw = random.Random(5)
    for _ in range(30):
        world, running, made = World(tests_first=tests_first), list[int](), 0
        for _ in range(40):
            match draw.randrange(4):
                case 0 | 1:
                    world.start(made)
                    running.append(made)
                    made += 1
                case 2 if running:
                    world.stop(running.pop(draw.randrange(len(running))))
            wanted = [each for each in running if world.sent % (each % 3 + 1) == 0]
            if wanted and draw.random() < 0.5:
                actor, victim = draw.choice(wanted), draw.choice(running)
                world.acts[actor] = lambda world=world, victim=victim, new=made: (  # type: ignore[misc]
                    world.stop(victim),
                    world.start(new),
                )
                running.remove(victim)
                running.append(made)
                made += 1
                if wanted.index(actor) < (wanted.index(victim) if victim in wanted else -1):
                    wanted.remove(victim)
            world.got.clear()
            value = world.sent
            world.send()
            assert world.got == [(each, value) for each in wanted]


def test_tap_detached_by_value_does_not_receive_it() -> None:
    """The first tap's value detaches the second tap of each query."""
    calls: list[int] = []
    watched = IN.pipe(ops.where(lambda value: calls.append(value) or True))  # type: ignore[func-returns-value]
    output = check_laws(ops.merge(watched)(IN).pipe(ops.take(1)), {"in": hot("12|")})
    assert [event.value for event in output if event.kind == "next"] == [1]
    assert calls == []


def test_error_of_where_predicate_can_be_caught() -> None:
    failing = IN.pipe(ops.where(lambda value: 1 // (value - 2) or True), ops.catch(IN))
    output = check_laws(failing, {"in": hot("1234|")})
    assert [event.value for event in output if event.kind == "next"] == [1, 3, 4]


def test_on_next_override_of_where_subclass_is_called() -> None:
    class Doubled(Where[int]):
        __slots__ = ()

        def on_next(self, value: int, /) -> None:
            super().on_next(2 * value)

    output = check_laws(IN.pipe(applied(Doubled, lambda value: value > 2)), {"in": hot("123|")})
    assert [event.value for event in output if event.kind == "next"] == [4, 6]


def test_tap_detached_by_value_does_not_receive_it_while_later_query_waits() -> None:
    """The same happens after a crash: the second query started after values that the source sends again."""
    calls: list[int] = []
    world = World(tests_first=True)
    watched = IN.pipe(ops.where(lambda value: calls.append(value) or True))  # type: ignore[func-returns-value]
    for number, after in enumerate([-1, 5]):
        group = OperatorGroup(world.runtime, f"q{number}")
        group.build(ops.merge(watched)(IN).pipe(ops.take(1)), _Null())
        group.open()
        group.start({"in": after})
    world.send()
    assert calls == []


def test_idle_source_releases_deleted_queries() -> None:
    world, out = World(tests_first=False), _Null()
    group = OperatorGroup(world.runtime, "q")
    group.build(IN, out)
    group.open()
    group.start()
    group.delete()
    known = weakref.ref(out)
    del group, out
    gc.collect()
    assert known() is None


def test_error_of_where_result_without_truth_value_can_be_caught() -> None:
    class Untrue:
        def __bool__(self) -> bool:
            raise ValueError("no truth")

    unclear = IN.pipe(ops.where(lambda value: Untrue() if value == 2 else True))
    output = check_laws(unclear.pipe(ops.catch(IN)), {"in": hot("123|")})
    assert [event.value for event in output if event.kind == "next"] == [1, 3]
