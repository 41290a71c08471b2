"""Consumed ranges: which session bytes durable merge instructions release, each of them once."""

from __future__ import annotations

import pytest
from nodes_bench import Story
from sequencer_core import new_state

from sequencer.sessions import merge_progress as module
from sequencer.sessions.merge_progress import ConsumedRanges, consumed_place
from sequencer.state.write_plan import SessionEnd, WritePlan


@pytest.fixture
def story() -> Story:
    return Story.drawn()


def last_of(plans: list[WritePlan]) -> dict[int, SessionEnd]:
    return {end.session_id: end for plan in plans for end in plan.consumed}


def added(plans: list[WritePlan]) -> ConsumedRanges:
    consumed = ConsumedRanges()
    consumed.start(new_state(), [])
    for plan in plans:
        consumed.add(plan)
    return consumed


def test_drain_returns_session_ends_consumed_by_durable_instructions_once(story):
    for at in range(len(story.plans)):
        consumed = added(story.plans)
        taken = consumed.drain(story.plans[at].instruction)
        assert {end.session_id: end for end in taken} == last_of(story.plans[: at + 1])
        assert len({end.session_id for end in taken}) == len(taken)
        assert consumed.drain(story.plans[at].instruction) == []
        rest = consumed.drain(story.plans[-1].instruction)
        assert {end.session_id: end for end in rest} == last_of(story.plans[at + 1 :])


def test_session_is_durable_from_last_instruction_consuming_it(story):
    consumed = added(story.plans)
    last = {end.session_id: plan.instruction for plan in story.plans for end in plan.consumed}
    for session_id, instruction in last.items():
        assert consumed.is_durable(session_id, instruction)
        assert not consumed.is_durable(session_id, instruction - 1)
    assert consumed.is_durable(max(last) + 1, 0)


def test_sessions_of_received_state_are_released_when_its_instruction_is_durable(story):
    consumed = ConsumedRanges()
    consumed.start(story.state, [])
    merged = [session for session in story.state.sessions.values() if consumed_place(session)]
    assert merged
    assert consumed.drain(story.state.instruction - 1) == []
    assert not any(consumed.is_durable(session.id, story.state.instruction - 1) for session in merged)
    assert {end.session_id for end in consumed.drain(story.state.instruction)} == {one.id for one in merged}


def test_session_end_put_back_is_drained_again_once():
    consumed, end = added([]), SessionEnd(1, 0, 1, 64, 5)
    consumed.put_back(1, end)
    assert consumed.drain(2) == [end]
    assert consumed.drain(3) == []


def test_consumed_ranges_stay_bounded_and_keep_last_end_of_every_session(story, monkeypatch):
    monkeypatch.setattr(module, "CONSUMED_MAX", 4)
    consumed = added(story.plans)
    assert len(consumed._waiting) <= 4
    numbers = [number for number, _ in consumed._waiting]
    assert numbers == sorted(numbers)
    taken = consumed.drain(story.plans[-1].instruction)
    assert {end.session_id: end for end in taken} == last_of(story.plans)
