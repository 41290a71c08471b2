"""Tracks the bytes of each session that instructions consumed, and the part of them that is not durable in
this node's merged log yet.

Pure. Invariant: bytes of a session are released only when the instruction that consumed them is durable here.
If very many instructions wait, the older ones are joined, and their input is released later.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Final

from replicator.protocol.messages import LogOffset
from sequencer.state.state import SequencerState, Session
from sequencer.state.write_plan import SessionEnd, WritePlan

CONSUMED_MAX: Final = 1 << 16
"""Maximum number of instructions, not yet merged durably here, whose consumed ends are kept separately."""


class ConsumedRanges:
    """The bytes of sessions that instructions consumed since the last snapshot of the state."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[int, tuple[SessionEnd, ...]]] = deque()
        """By instruction, ascending: the ends before which input can be released once the instruction is
        durable here.
        """
        self._instructions: dict[int, int] = {}
        """By session id: the last instruction that consumed bytes of it, or a later one."""

    def start(self, state: SequencerState, plans: Iterable[WritePlan]) -> None:
        """Start with a state and the latest plans that led to it."""
        self._waiting.clear()
        self._waiting.extend((one.instruction, one.consumed) for one in plans)
        ends = tuple(_ends_of(state))
        self._waiting.append((state.instruction, ends))
        self._instructions = dict.fromkeys((end.session_id for end in ends), state.instruction)

    def add(self, plan: WritePlan) -> None:
        """Add the next plan. If too many instructions wait, the older half is joined, and counts as the last
        instruction of that half.
        """
        for end in plan.consumed:
            self._instructions[end.session_id] = plan.instruction
        self._waiting.append((plan.instruction, plan.consumed))
        if len(self._waiting) > CONSUMED_MAX:
            furthest: dict[int, SessionEnd] = {}
            instruction = 0
            for _ in range(CONSUMED_MAX // 2):
                instruction, ends = self._waiting.popleft()
                furthest.update((end.session_id, end) for end in ends)
            self._waiting.appendleft((instruction, tuple(furthest.values())))

    def forget(self, session_ids: Iterable[int]) -> None:
        """Drop these sessions, whose records were deleted."""
        for session_id in session_ids:
            self._instructions.pop(session_id, None)

    def is_durable(self, session_id: int, instruction: int) -> bool:
        """Whether all consumed bytes of a session are durable here if `instruction` is durable here."""
        return self._instructions.get(session_id, 0) <= instruction

    def drain(self, instruction: int) -> list[SessionEnd]:
        """Remove and return the ends before which sessions can be released once `instruction` is durable."""
        furthest: dict[int, SessionEnd] = {}
        while self._waiting and self._waiting[0][0] <= instruction:
            for end in self._waiting.popleft()[1]:
                furthest[end.session_id] = end
        return list(furthest.values())

    def put_back(self, instruction: int, end: SessionEnd) -> None:
        """Return an end that could not be released; the next `drain` returns it again."""
        self._waiting.appendleft((instruction, (end,)))


def consumed_place(session: Session) -> LogOffset | None:
    """The offset up to which a session is merged; None if nothing of it is merged."""
    if session.consumed is not None and session.active is not None:
        end = session.consumed.end
        return LogOffset(session.active.run, end.roll, end.offset)
    if session.done is not None:
        run, done = session.done
        return LogOffset(run, done.roll, done.offset)
    return None


def consumed_number(session: Session) -> int | None:
    """The number of the message that must be merged next; None if it is not known."""
    if session.consumed is not None and session.active is not None:
        return session.consumed.end.number
    return session.done[1].number if session.done is not None else None


def _ends_of(state: SequencerState) -> Iterator[SessionEnd]:
    for session in state.sessions.values():
        place = consumed_place(session)
        if place is not None:
            yield SessionEnd(session.id, place.run, place.roll, place.offset, consumed_number(session) or 0)
