"""When streams look for more: the pace of `replicator.push.send_pacer`, on a clock of the test's own."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any

import pytest

from replicator.protocol.messages import LogOffset
from replicator.push.send_pacer import FULL_BYTES, QUIET_SECONDS, WAIT_SECONDS_MAX, SendPacer


class _Timer:
    def __init__(self, at: float, act: Callable[[], None]) -> None:
        self.at, self.act, self.is_cancelled = at, act, False

    def cancel(self) -> None:
        self.is_cancelled = True

    def __lt__(self, other: _Timer) -> bool:
        return self.at < other.at


class Clock:
    """The part of an event loop that `SendPacer` uses."""

    def __init__(self) -> None:
        self.now = 0.0
        self._timers: list[_Timer] = []

    def time(self) -> float:
        return self.now

    def call_at(self, at: float, act: Callable[[], None]) -> _Timer:
        timer = _Timer(at, act)
        heapq.heappush(self._timers, timer)
        return timer

    def call_later(self, delay: float, act: Callable[[], None]) -> _Timer:
        return self.call_at(self.now + delay, act)

    def advance(self, seconds: float) -> None:
        until = self.now + seconds
        while self._timers and self._timers[0].at <= until:
            timer = heapq.heappop(self._timers)
            self.now = max(self.now, timer.at)
            if not timer.is_cancelled:
                timer.act()
        self.now = until


class Paced:
    """`SendPacer` and what they made of what happened."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.looks = 0
        loop: Any = self.clock
        self.rounds = SendPacer(self._look, lambda _: self.waiting, loop)
        self.waiting: int | None = 100

    def want(self, *, is_urgent: bool = False) -> None:
        self.rounds.request(is_urgent=is_urgent)

    def _look(self) -> None:
        self.looks += 1


def at(offset: int) -> LogOffset:
    return LogOffset(0, 0, offset)


@pytest.fixture
def paced() -> Paced:
    """A round is on its way: up to 1,000, of which nothing is known to be merged."""
    made = Paced()
    made.want()
    made.rounds.record_sent(at(1000))
    assert made.looks == 1
    return made


def test_the_first_change_is_looked_at_at_once() -> None:
    paced = Paced()
    paced.want()
    assert paced.looks == 1


def test_what_is_little_waits_until_the_round_is_merged(paced: Paced) -> None:
    paced.want()
    paced.want()
    paced.rounds.record_merged(at(999))
    assert paced.looks == 1
    paced.rounds.record_merged(at(1000))
    assert paced.looks == 2


def test_a_round_that_is_merged_begins_no_other_if_nothing_waits(paced: Paced) -> None:
    paced.rounds.record_merged(at(1000))
    assert paced.looks == 1
    paced.want()
    assert paced.looks == 2


@pytest.mark.parametrize("waiting", [FULL_BYTES, None])
def test_what_fills_a_message_or_is_in_another_segment_does_not_wait(
    paced: Paced, waiting: int | None
) -> None:
    paced.waiting = waiting
    paced.want()
    assert paced.looks == 2


def test_what_is_urgent_does_not_wait(paced: Paced) -> None:
    paced.want(is_urgent=True)
    assert paced.looks == 2


def test_nothing_waits_longer_than_its_bound_where_the_nodes_are_silent(paced: Paced) -> None:
    for _ in range(3):
        before = paced.looks
        paced.want()
        paced.clock.advance(WAIT_SECONDS_MAX * 0.9)
        assert paced.looks == before
        paced.clock.advance(WAIT_SECONDS_MAX * 0.2)
        assert paced.looks == before + 1


def test_nodes_that_lost_what_they_had_do_not_stop_the_rounds(paced: Paced) -> None:
    paced.rounds.record_merged(at(1000))
    paced.rounds.record_merged(at(64))
    paced.want()
    paced.clock.advance(WAIT_SECONDS_MAX)
    assert paced.looks == 2


def test_behind_the_last_round_there_is_one_more_look_and_no_other(paced: Paced) -> None:
    paced.clock.advance(QUIET_SECONDS / 2)
    paced.rounds.record_merged(at(1000))
    paced.want()
    paced.clock.advance(QUIET_SECONDS * 0.9)
    assert paced.looks == 2
    paced.clock.advance(QUIET_SECONDS * 0.2)
    assert paced.looks == 3
    paced.clock.advance(100)
    assert paced.looks == 3


def test_behind_close_nothing_is_looked_at(paced: Paced) -> None:
    paced.want()
    paced.rounds.close()
    paced.rounds.record_merged(at(1000))
    paced.clock.advance(100)
    assert paced.looks == 1
