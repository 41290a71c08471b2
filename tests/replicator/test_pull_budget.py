"""The memory budget of all pulls: never exceeded, shared fairly, released; no pull waits indefinitely."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from replicator.protocol.messages import CHUNK_BYTES_MAX, PULLED_CHUNK_BYTES_MAX
from replicator.pull.memory_budget import (
    CHUNK_BYTES_MIN,
    PULL_BYTES_MAX,
    READ_BYTES_MAX,
    STALLED_S,
    BudgetGrant,
    BudgetHold,
    PullBudget,
    grant_of,
)
from rt.errors import Overloaded

SIZES = (CHUNK_BYTES_MAX, PULLED_CHUNK_BYTES_MAX)


@given(st.integers(8 * CHUNK_BYTES_MIN, 2**30), st.integers(1, READ_BYTES_MAX), st.sampled_from(SIZES))
def test_grant_stays_within_its_share_and_allows_a_read(
    share: int, wanted: int, chunk_bytes_max: int
) -> None:
    grant = grant_of(share, wanted, chunk_bytes_max)
    assert grant.bytes <= share
    assert 0 < grant.read_bytes <= wanted
    assert CHUNK_BYTES_MIN <= grant.chunk_bytes <= chunk_bytes_max
    assert grant.copies_bytes * 8 <= max(share, 16 * CHUNK_BYTES_MIN)


@pytest.mark.parametrize("size", SIZES)
def test_single_pull_gets_maximum_read_and_chunk_sizes(size: int) -> None:
    assert grant_of(PULL_BYTES_MAX, READ_BYTES_MAX, size) == BudgetGrant(READ_BYTES_MAX, size)


@pytest.mark.parametrize("chunk_bytes_max", SIZES)
@pytest.mark.parametrize("count", [16, 100, 400, 1000])
def test_stalled_and_stopped_pulls_leave_budget_for_one_more(count: int, chunk_bytes_max: int) -> None:
    """Each pull arrives alone, stalls with its first chunk, and is stopped."""

    async def main() -> None:
        budget = PullBudget(per_identity_max=count + 1, now=lambda: 0.0)
        for _ in range(count):
            hold = budget.enter("hostile", chunk_bytes_max=chunk_bytes_max)
            grant = budget.try_acquire(hold, READ_BYTES_MAX)
            assert grant is not None
            hold.begin_sending(grant.chunk_bytes)
            hold.stop()
        good = budget.enter("good", chunk_bytes_max=chunk_bytes_max)
        assert budget.try_acquire(good, READ_BYTES_MAX) is not None

    asyncio.run(main())


def test_pull_count_per_identity_is_limited_and_slots_are_released() -> None:
    budget = PullBudget(per_identity_max=2)
    holds = [budget.enter("a"), budget.enter("a"), budget.enter("b")]
    with pytest.raises(Overloaded, match="too many pulls of one certificate"):
        budget.enter("a")
    assert budget.enter("a", 3) is not None
    holds[0].leave()
    holds[0].leave()
    with pytest.raises(Overloaded):
        budget.enter("a")
    holds[1].leave()
    budget.enter("a")
    assert budget.counts == {"a": 2, "b": 1}


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def run_soon(loop: asyncio.AbstractEventLoop) -> None:
    """Let all ready tasks run."""
    for _ in range(6):
        loop.run_until_complete(asyncio.sleep(0))


class Budgets(RuleBasedStateMachine):
    """Pulls enter, acquire, send, stall and leave, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.clock = Clock()
        self.budget = PullBudget(8 * 2**20, per_identity_max=12, now=self.clock)
        self.holds: list[BudgetHold] = []
        self.granted: dict[BudgetHold, BudgetGrant] = {}
        self.waiting: dict[BudgetHold, asyncio.Task[BudgetGrant]] = {}

    def settle(self) -> None:
        run_soon(self.loop)
        for hold, task in list(self.waiting.items()):
            if task.done():
                del self.waiting[hold]
                self.granted[hold] = task.result()
                assert task.result().bytes == hold.bytes
        for hold in [hold for hold in self.holds if hold.ended.is_set()]:
            self.go(hold)

    @rule(identity=st.sampled_from(["a", "b"]))
    def come(self, identity: str) -> None:
        with contextlib.suppress(Overloaded):
            self.holds.append(self.budget.enter(identity))

    @precondition(lambda self: self.idle())
    @rule(data=st.data(), wanted=st.sampled_from([1, 100_000, READ_BYTES_MAX]))
    def take(self, data: st.DataObject, wanted: int) -> None:
        hold = data.draw(st.sampled_from(self.idle()))
        self.waiting[hold] = self.loop.create_task(self.budget.acquire(hold, wanted))
        self.settle()

    def idle(self) -> list[BudgetHold]:
        return [hold for hold in self.holds if hold not in self.granted and hold not in self.waiting]

    @precondition(lambda self: self.granted)
    @rule(data=st.data(), part=st.integers(0, 8))
    def send(self, data: st.DataObject, part: int) -> None:
        hold = data.draw(st.sampled_from(list(self.granted)))
        grant = self.granted[hold]
        hold.begin_sending(grant.chunk_bytes)
        if part == 8:
            return  # The pull stalls.
        hold.end_sending(grant.chunk_bytes)
        if part:
            hold.keep(0)
            del self.granted[hold]
        self.settle()

    @precondition(lambda self: self.holds)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        self.go(data.draw(st.sampled_from(self.holds)))

    def go(self, hold: BudgetHold) -> None:
        self.holds.remove(hold)
        self.granted.pop(hold, None)
        task = self.waiting.pop(hold, None)
        if task is not None:
            task.cancel()
        run_soon(self.loop)
        hold.stop()
        hold.leave()
        run_soon(self.loop)

    @invariant()
    def is_within_the_budget(self) -> None:
        assert 0 <= self.budget.used_bytes <= self.budget.bytes_max
        assert self.budget.used_bytes == sum(hold.bytes for hold in self.holds)
        assert sum(self.budget.counts.values()) == len(self.holds)

    def teardown(self) -> None:
        for hold in list(self.holds):
            self.go(hold)
        assert self.budget.used_bytes == 0
        assert not self.budget.counts
        assert not self.budget._active
        assert not self.budget._waiting
        self.loop.close()


TestBudgets = Budgets.TestCase


@settings(max_examples=40)
@given(st.lists(st.integers(1, READ_BYTES_MAX), min_size=1, max_size=40), st.integers(0, 5))
def test_waiting_pull_is_served_while_all_others_never_read(sizes: list[int], good: int) -> None:
    async def main() -> None:
        clock = Clock()
        budget = PullBudget(8 * 2**20, per_identity_max=100, now=clock)

        async def never_read(hold: BudgetHold, wanted: int) -> None:
            try:
                grant = await budget.acquire(hold, wanted)
                hold.begin_sending(grant.chunk_bytes)
                await hold.wait_ended()
            except Overloaded:
                pass
            finally:
                hold.stop()  # gRPC keeps the chunk, so the pull does not leave.

        hostile = [asyncio.create_task(never_read(budget.enter("x"), size)) for size in sizes]
        served = 0
        pulls = [budget.enter("good") for _ in range(good + 1)]

        async def read(hold: BudgetHold) -> None:
            nonlocal served
            for _ in range(3):
                await budget.acquire(hold, READ_BYTES_MAX)
                await asyncio.sleep(0)
                hold.keep(0)
                served += 1

        readers = [asyncio.create_task(read(hold)) for hold in pulls]
        while not all(reader.done() for reader in readers):
            clock.now_s += STALLED_S
            for hold in [hold for line in budget._waiting.values() for hold in line]:
                assert hold.bytes == 0
                hold.turn.set()  # As its timeout would.
            await asyncio.sleep(0)
            assert clock.now_s < 2000 * STALLED_S
        assert served == 3 * len(pulls)
        for task in hostile:
            task.cancel()
        await asyncio.gather(*hostile, return_exceptions=True)

    asyncio.run(main())
