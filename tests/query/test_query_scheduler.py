"""The schedulers of queries."""

from __future__ import annotations

from rt.query.core.scheduler import RealScheduler, VirtualScheduler


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


def test_a_clock_that_is_set_back_does_not_move() -> None:
    now, fired = [10], list[int]()
    scheduler = RealScheduler(lambda: now[0])
    scheduler.at(12, lambda: fired.append(scheduler.now_ns))
    now[0] = 5
    assert (scheduler.now_ns, scheduler.run_due(), fired) == (10, False, [])
    now[0] = 13
    assert (scheduler.run_due(), scheduler.run_due(), fired) == (True, False, [13])
