"""What merging consumed of sessions, and what of it is not durable in this node's merged log yet.

Pure. The law: a place of a session is let go of only once the instruction that consumed up to it is durable
here. Of very many instructions it is not known one by one what they consumed; then it is let go of later.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Final

from replicator.protocol.messages import LogOffset
from sequencer.state.state import SequencerState, Session
from sequencer.state.write_plan import SessionEnd, WritePlan

CONSUMED_MAX: Final = 1 << 16
"""Instructions, not merged durably here yet, of which it is known one by one what they consumed."""


class ConsumedRanges:
    """What instructions consumed, from the last snapshot of the state on."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[int, tuple[SessionEnd, ...]]] = deque()
        """By instruction, ascending: what can be let go of once it is durable here."""
        self._instructions: dict[int, int] = {}
        """By session id: the last instruction that consumed of it, or a later one."""

    def begin(self, state: SequencerState, orders: Iterable[WritePlan]) -> None:
        """Begin with a state and the orders that led to it, as far as they are kept."""
        self._waiting.clear()
        self._waiting.extend((one.instruction, one.consumed) for one in orders)
        ends = tuple(_ends_of(state))
        self._waiting.append((state.instruction, ends))
        self._instructions = dict.fromkeys((end.session_id for end in ends), state.instruction)

    def add(self, order: WritePlan) -> None:
        """The next order. Of too many the older half counts as its last one."""
        for end in order.consumed:
            self._instructions[end.session_id] = order.instruction
        self._waiting.append((order.instruction, order.consumed))
        if len(self._waiting) > CONSUMED_MAX:
            furthest: dict[int, SessionEnd] = {}
            instruction = 0
            for _ in range(CONSUMED_MAX // 2):
                instruction, ends = self._waiting.popleft()
                furthest.update((end.session_id, end) for end in ends)
            self._waiting.appendleft((instruction, tuple(furthest.values())))

    def forget(self, session_ids: Iterable[int]) -> None:
        """The records of these sessions are gone: nobody asks for them again."""
        for session_id in session_ids:
            self._instructions.pop(session_id, None)

    def is_durable(self, session_id: int, instruction: int) -> bool:
        """Whether what was consumed of a session is durable here, now that `instruction` is."""
        return self._instructions.get(session_id, 0) <= instruction

    def take(self, instruction: int) -> list[SessionEnd]:
        """The ends before which sessions can be let go of, now that `instruction` is durable here."""
        furthest: dict[int, SessionEnd] = {}
        while self._waiting and self._waiting[0][0] <= instruction:
            for end in self._waiting.popleft()[1]:
                furthest[end.session_id] = end
        return list(furthest.values())

    def put_back(self, instruction: int, end: SessionEnd) -> None:
        """What `take` gave for `instruction` could not be let go of: the next one gives it again."""
        self._waiting.appendleft((instruction, (end,)))


def consumed_place(session: Session) -> LogOffset | None:
    """How far a session is merged; None if nothing of it is."""
    if session.consumed is not None and session.life is not None:
        end = session.consumed.end
        return LogOffset(session.life.run, end.roll, end.offset)
    if session.done is not None:
        run, done = session.done
        return LogOffset(run, done.roll, done.offset)
    return None


def consumed_number(session: Session) -> int | None:
    """The number that must be merged next, if that is known."""
    if session.consumed is not None and session.life is not None:
        return session.consumed.end.number
    return session.done[1].number if session.done is not None else None


def _ends_of(state: SequencerState) -> Iterator[SessionEnd]:
    for session in state.sessions.values():
        place = consumed_place(session)
        if place is not None:
            yield SessionEnd(session.id, place.run, place.roll, place.offset, consumed_number(session) or 0)
