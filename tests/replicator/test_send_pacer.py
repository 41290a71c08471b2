"""When streams poll for more to send: the pace of `SendPacer`, on a simulated clock."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any

import pytest

from replicator.protocol.messages import LogOffset
from replicator.push.send_pacer import (
    CHECK_SECONDS,
    FULL_BYTES,
    QUIET_SECONDS,
    SMALL_BYTES,
    SMALL_ROUNDS_MIN,
    WAIT_SECONDS_MAX,
    SendPacer,
)


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

    @property
    def pending(self) -> int:
        return sum(not timer.is_cancelled for timer in self._timers)

    def advance(self, seconds: float) -> None:
        until = self.now + seconds
        while self._timers and self._timers[0].at <= until:
            timer = heapq.heappop(self._timers)
            self.now = max(self.now, timer.at)
            if not timer.is_cancelled:
                timer.act()
        self.now = until


class Paced:
    """A `SendPacer`, and the results of its calls."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.looks = 0
        self.sent = 1000
        loop: Any = self.clock
        self.rounds = SendPacer(self._look, lambda _: self.waiting, loop, listen=self._listen)
        self.waiting: int | None = 100
        self.listens = True

    def want(self, *, is_urgent: bool = False) -> None:
        self.rounds.request(is_urgent=is_urgent)

    def send(self, *, round_bytes: int = 1) -> None:
        """Send a round of this size. It is not merged yet."""
        if self.listens:
            self.want()
        self.sent += round_bytes
        self.rounds.record_sent(at(self.sent))

    def merge(self) -> None:
        self.rounds.record_merged(at(self.sent))

    def _look(self) -> None:
        self.looks += 1

    def _listen(self, to_writes: bool) -> None:
        assert to_writes is not self.listens, "told twice"
        self.listens = to_writes


def at(offset: int) -> LogOffset:
    return LogOffset(0, 0, offset)


@pytest.fixture
def paced() -> Paced:
    """A round up to 1,000 is in flight. None of it is known to be merged."""
    made = Paced()
    made.want()
    made.rounds.record_sent(at(1000))
    assert made.looks == 1
    return made


def test_first_request_polls_at_once() -> None:
    paced = Paced()
    paced.want()
    assert paced.looks == 1


def test_small_request_waits_until_round_is_merged(paced: Paced) -> None:
    paced.want()
    paced.want()
    paced.rounds.record_merged(at(999))
    assert paced.looks == 1
    paced.rounds.record_merged(at(1000))
    assert paced.looks == 2


def test_merged_round_starts_no_poll_without_waiting_request(paced: Paced) -> None:
    paced.rounds.record_merged(at(1000))
    assert paced.looks == 1
    paced.want()
    assert paced.looks == 2


@pytest.mark.parametrize("waiting", [FULL_BYTES, None])
def test_full_message_or_new_segment_is_polled_at_once(paced: Paced, waiting: int | None) -> None:
    paced.waiting = waiting
    paced.want()
    assert paced.looks == 2


def test_urgent_request_is_polled_at_once(paced: Paced) -> None:
    paced.want(is_urgent=True)
    assert paced.looks == 2


def test_request_waits_at_most_maximum_time_while_nodes_are_silent(paced: Paced) -> None:
    for _ in range(3):
        before = paced.looks
        paced.want()
        paced.clock.advance(WAIT_SECONDS_MAX * 0.9)
        assert paced.looks == before
        paced.clock.advance(WAIT_SECONDS_MAX * 0.2)
        assert paced.looks == before + 1


def test_merged_offset_moving_backwards_does_not_stop_rounds(paced: Paced) -> None:
    paced.rounds.record_merged(at(1000))
    paced.rounds.record_merged(at(64))
    paced.want()
    paced.clock.advance(WAIT_SECONDS_MAX)
    assert paced.looks == 2


def test_last_round_is_followed_by_exactly_one_quiet_poll(paced: Paced) -> None:
    paced.clock.advance(QUIET_SECONDS / 2)
    paced.rounds.record_merged(at(1000))
    paced.want()
    paced.clock.advance(QUIET_SECONDS * 0.9)
    assert paced.looks == 2
    paced.clock.advance(QUIET_SECONDS * 0.2)
    assert paced.looks == 3
    paced.clock.advance(100)
    assert paced.looks == 3


def test_closed_pacer_polls_no_more(paced: Paced) -> None:
    paced.want()
    paced.rounds.close()
    paced.rounds.record_merged(at(1000))
    paced.clock.advance(100)
    assert paced.looks == 1


@pytest.fixture
def slow(paced: Paced) -> Paced:
    """After a series of small rounds one round is in flight, and nothing listens. `looks` counts polls from
    this moment on.
    """
    paced.waiting = 0
    paced.merge()  # The first small round.
    for _ in range(1, SMALL_ROUNDS_MIN):
        paced.send()
        assert paced.listens
        paced.merge()
    paced.send()
    assert not paced.listens
    paced.looks = 0
    return paced


def test_bytes_written_while_not_listening_are_polled_when_round_is_merged(slow: Paced) -> None:
    slow.waiting = 100
    slow.merge()
    assert (slow.looks, slow.listens) == (1, False)
    slow.send()
    slow.merge()
    assert (slow.looks, slow.listens) == (2, False)


def test_listening_resumes_when_round_is_merged_without_waiting_bytes(slow: Paced) -> None:
    slow.waiting = 0
    slow.merge()
    assert (slow.looks, slow.listens) == (0, True)
    slow.want()
    assert slow.looks == 1


def test_bytes_written_just_before_listening_resumes_are_polled(slow: Paced) -> None:
    looked = iter([0, 100])  # After the merge of the round, and after listening has started.
    slow.rounds._waiting_bytes = lambda _: next(looked)
    slow.merge()
    assert (slow.looks, slow.listens) == (1, True)


@pytest.mark.parametrize("waiting", [FULL_BYTES, None])
def test_full_message_or_new_segment_while_not_listening_waits_for_next_check(
    slow: Paced, waiting: int | None
) -> None:
    slow.clock.advance(3 * CHECK_SECONDS / 2)
    assert (slow.looks, slow.listens) == (0, False)
    slow.waiting = waiting
    slow.clock.advance(CHECK_SECONDS)
    assert (slow.looks, slow.listens) == (1, True)


def test_bytes_written_while_not_listening_wait_at_most_maximum_time(slow: Paced) -> None:
    slow.waiting = 1
    slow.clock.advance(WAIT_SECONDS_MAX * 0.9)
    assert (slow.looks, slow.listens) == (0, False)
    slow.clock.advance(WAIT_SECONDS_MAX * 0.2)
    assert (slow.looks, slow.listens) == (1, True)


def test_timers_stop_while_nodes_are_silent_and_no_bytes_are_written(slow: Paced) -> None:
    slow.waiting = 0
    slow.clock.advance(QUIET_SECONDS + WAIT_SECONDS_MAX)
    assert slow.listens
    assert slow.clock.pending == 0


def test_torn_tail_does_not_keep_pacer_from_listening(slow: Paced) -> None:
    slow.waiting = 100  # A torn tail.
    slow.merge()
    assert (slow.looks, slow.listens) == (1, False)
    slow.clock.advance(2 * CHECK_SECONDS)
    assert (slow.looks, slow.listens) == (2, True)
    slow.clock.advance(QUIET_SECONDS + WAIT_SECONDS_MAX)
    assert slow.clock.pending == 0


def test_request_while_not_listening_waits_until_round_is_merged(slow: Paced) -> None:
    slow.waiting = 0
    slow.want()
    assert slow.looks == 0
    slow.merge()
    assert slow.looks == 1


@pytest.mark.parametrize("large_round", range(SMALL_ROUNDS_MIN + 1))
def test_pacer_keeps_listening_after_one_large_round_among_small_ones(paced: Paced, large_round: int) -> None:
    """One large round among the small ones is enough."""
    paced.send(round_bytes=SMALL_BYTES)
    paced.merge()
    for number in range(SMALL_ROUNDS_MIN + 1):
        paced.send(round_bytes=SMALL_BYTES if number == large_round else 1)
        assert paced.listens
        paced.waiting = 0
        paced.merge()


def test_closed_pacer_runs_no_check(slow: Paced) -> None:
    slow.waiting = FULL_BYTES
    slow.rounds.close()
    slow.clock.advance(100)
    assert slow.looks == 0
