"""Timers in numbers."""

from __future__ import annotations

from rt.query.core.scheduler import VirtualScheduler


def test_cancelled_timers_are_forgotten_long_before_they_are_due() -> None:
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
