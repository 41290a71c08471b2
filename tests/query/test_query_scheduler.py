"""The real and virtual schedulers of queries: order of timers, clock jumps, restored timers."""

from __future__ import annotations

from functools import partial

import pytest

from rt.errors import InvalidOption
from rt.query.core.scheduler import NS_PER_S, RealScheduler, VirtualScheduler


def test_cancelled_timers_are_removed_before_they_are_due() -> None:
    scheduler = VirtualScheduler()
    fired: list[int] = []
    for due in range(1000):
        scheduler.at(due, lambda due=due: fired.append(due))  # type: ignore[misc]
        scheduler.at(10**18 - due, lambda: fired.append(-1)).cancel()
    assert len(scheduler._heap) < 2100
    for due in range(20_000):
        scheduler.at(10**18 + due, lambda: fired.append(-1)).cancel()
    assert len(scheduler._heap) < 2100
    scheduler.advance_to(2 * 10**18)
    assert fired == list(range(1000))


def test_time_advances_steadily_after_clock_is_set_back_until_clock_catches_up() -> None:
    system, steady, fired = [10], [500], list[int]()
    scheduler = RealScheduler(lambda: system[0], lambda: steady[0])
    scheduler.at(12, lambda: fired.append(scheduler.now_ns))
    system[0] = 5
    assert (scheduler.now_ns, scheduler.run_due(), fired) == (10, False, [])
    system[0], steady[0] = 6, 501
    assert (scheduler.run_due(), scheduler.now_ns) == (False, 11)
    system[0], steady[0] = 7, 502
    assert (scheduler.run_due(), scheduler.run_due(), fired) == (True, False, [12])
    system[0], steady[0] = 30, 503
    assert scheduler.now_ns == 30
    system[0], steady[0] = 20, 600  # set back again: time counts from this moment
    assert [scheduler.now_ns, scheduler.now_ns] == [30, 30]
    system[0], steady[0] = 21, 601
    assert scheduler.now_ns == 31


def test_restored_time_ahead_of_the_clock_keeps_advancing(caplog: pytest.LogCaptureFixture) -> None:
    year_ns = 365 * 86400 * NS_PER_S
    system, steady, fired = [year_ns], [500], list[int]()
    scheduler = RealScheduler(lambda: system[0], lambda: steady[0])
    scheduler.restore(2 * year_ns)
    scheduler.at(scheduler.now_ns + NS_PER_S, lambda: fired.append(scheduler.now_ns))
    assert not scheduler.run_due()
    system[0], steady[0] = year_ns + NS_PER_S, 500 + NS_PER_S
    assert (scheduler.run_due(), fired) == (True, [2 * year_ns + NS_PER_S])
    assert [each.getMessage() for each in caplog.records] == ["clock_ahead seconds=31536000.0"]


def test_timers_of_starting_query_fire_after_other_timers_set_at_the_same_time() -> None:
    fired: list[str] = []

    def timers(scheduler: VirtualScheduler, *names: str) -> None:
        for name in names:
            scheduler.is_starting = name.startswith("start")
            scheduler.at(9, lambda name=name: fired.append(name), set_ns=4)  # type: ignore[misc]
        scheduler.is_starting = False

    for names in (("early", "start1", "start2", "late"), ("start1", "start2", "early", "late")):
        scheduler = VirtualScheduler()
        timers(scheduler, *names)
        scheduler.at(9, lambda: fired.append("before"), set_ns=3)
        scheduler.advance_to(9)
        assert fired == ["before", "early", "late", "start1", "start2"]
        fired.clear()


def test_restored_timers_fire_in_their_order_before_new_timers() -> None:
    fired: list[int] = []
    first = VirtualScheduler()
    saved = [(first.at(9, int, set_ns=5), number) for number in range(5)]
    second = VirtualScheduler(5)
    second.restore_timers(
        (partial(fired.append, number), timer.due_ns, *timer.order) for timer, number in reversed(saved)
    )
    second.at(9, lambda: fired.append(9))
    second.restore_timers([(lambda: fired.append(0), saved[0][0].due_ns, *saved[0][0].order)])
    second.advance_to(9)
    assert fired == [0, 0, 1, 2, 3, 4, 9]


def test_clock_jump_keeps_only_last_ticks_max_ticks() -> None:
    scheduler, seen = VirtualScheduler(ticks_max=3), list[int]()

    def tick() -> None:
        seen.append(scheduler.now_ns)
        scheduler.at(scheduler.skip_ns(scheduler.now_ns + 10, 10), tick)

    scheduler.at(10, tick)
    for now_ns in (25, 10_000_000_007, 10_000_000_035):
        scheduler.advance_to(now_ns)
    end = 10_000_000_000
    assert seen == [10, 20, 30, end - 30, end - 20, end - 10, end, end + 10, end + 20, end + 30]
    with pytest.raises(InvalidOption):
        VirtualScheduler(ticks_max=0)


def test_timers_restored_one_by_one_fire_in_same_order_as_timers_restored_at_once() -> None:
    times = [(number * 37) % 101 for number in range(101)]
    fired: list[list[int]] = []
    for size in (1, 101):
        scheduler, seen = VirtualScheduler(), list[int]()
        saved = [(partial(seen.append, due_ns), due_ns, 0, number) for number, due_ns in enumerate(times)]
        for at in range(0, len(saved), size):
            scheduler.restore_timers(saved[at : at + size])
        scheduler.at(50, partial(seen.append, -1))
        scheduler.advance_to(101)
        fired.append(seen)
    assert fired[0] == fired[1] == [*range(51), -1, *range(51, 101)]
