"""What the leader proposes next: merge instructions, and the ends of publishers' lives.

Pure. The law: planned is only what a majority holds durably, in each session's order, with the exact place,
numbers and chain that `apply` will ask for; `apply` decides all the same. Sessions take turns, within byte
caps, so that none starves.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Final

from rt.log.segment import SEGMENT_HEADER_BYTES
from sequencer.apply import Taken, take, waits
from sequencer.board import Board, Mark, SegmentKey
from sequencer.commands import COUNT_MAX, RANGES_MAX, Close, Fence, Merge, Range
from sequencer.orders import SessionEnd
from sequencer.state import BEGIN, End, Session, State

INSTRUCTION_BYTES_MAX: Final = 64 << 20
"""Most bytes of all sessions in one instruction: its order is carried out in a fraction of a second."""


@dataclass(slots=True)
class Speculation:
    """The state as it will be when all that this leader has in flight is applied.

    Dropped when leadership changes, or when an instruction turns out otherwise than planned.
    """

    state: State
    instruction: int = 0
    sequenced_ns: int = 0
    sessions: dict[int, Session] = field(default_factory=dict)
    """Those that instructions in flight change."""
    wanted: dict[str, int] = field(default_factory=dict)
    turn: int = 0
    """The session that is asked first for the next instruction: the one that found the last one full."""

    def __post_init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Nothing is in flight: go on from what is applied."""
        self.instruction, self.sequenced_ns = self.state.instruction, self.state.sequenced_ns
        self.sessions.clear()
        self.wanted.clear()

    def session(self, session_id: int) -> Session:
        """The session as it will be; lives that were opened or closed meanwhile are seen."""
        applied = self.state.sessions[session_id]
        ahead = self.sessions.get(session_id)
        if ahead is None or _last_done(applied) > _last_done(ahead):
            return applied
        lives = tuple(life for life in applied.lives if life.x > _last_done(ahead))
        return replace(applied, lives=lives, consumed=ahead.consumed, done=ahead.done)

    def look(self, one: Range) -> Taken | None:
        """What a range would come to behind all that is planned; None if it would be refused."""
        session = self.session(one.session_id)
        dedup_id = session.dedup_id
        wanted = None if dedup_id is None else self.wanted.get(dedup_id, self.state.wanted.get(dedup_id))
        taken = take(self.state, one, wanted, session=session)
        return None if isinstance(taken, str) else taken

    def take(self, one: Range) -> bool:
        """Plan a range; False if it would be refused."""
        taken = self.look(one)
        if taken is None:
            return False
        self.sessions[one.session_id] = taken.session
        if taken.session.dedup_id is not None and taken.wanted is not None:
            self.wanted[taken.session.dedup_id] = taken.wanted
        return True


def _last_done(session: Session) -> int:
    return -1 if session.done is None else session.done[0]


def plan_merge(speculation: Speculation, board: Board, now_ns: int) -> Merge | None:
    """The next instruction, or None if nothing can be merged now. `speculation` then includes it.

    `now_ns` is the median of the nodes' clocks.
    """
    # Taken in the order of `apply`: a dedup id's watermark may let one pass only after another.
    candidates = sorted(_candidates(speculation, board), key=lambda one: one.session_id)
    ranges = tuple(one for one in candidates if speculation.take(one))
    if not ranges:
        return None
    speculation.instruction += 1
    speculation.sequenced_ns = max(speculation.sequenced_ns + 1, now_ns)
    return Merge(speculation.instruction, speculation.sequenced_ns, ranges)


def _candidates(speculation: Speculation, board: Board) -> list[Range]:
    """What sessions have to merge, each of it acceptable if it came alone; in turns, up to the caps."""
    ids = sorted(session.id for session in speculation.state.sessions.values() if session.lives)
    turn = bisect_left(ids, speculation.turn)
    found: list[Range] = []
    size = 0
    for session_id in ids[turn:] + ids[:turn]:
        if len(found) >= RANGES_MAX or size >= INSTRUCTION_BYTES_MAX:
            speculation.turn = session_id
            break
        if session_id in board.disagreements:
            continue
        one = _next_range(speculation, board, session_id)
        if one is not None and speculation.look(one) is not None:
            found.append(one)
            size += one.end - one.start
    return found


def _next_range(speculation: Speculation, board: Board, session_id: int) -> Range | None:
    session = speculation.session(session_id)
    life = session.life
    if life is None:
        return None
    bytes_max = speculation.state.configuration.session_bytes_max
    for key, begin in _beginnings(session, board):
        number_max = begin.number + COUNT_MAX
        if life.end is not None:
            number_max = min(number_max, life.end.number)
        end = board.furthest(key, begin.offset, bytes_max, number_max)
        if end is not None:
            return Range(
                session_id,
                *key[1:],
                start=begin.offset,
                end=end.offset,
                first=begin.number,
                count=end.number - begin.number,
                chain_start=begin.chain,
                chain_end=end.chain,
            )
    return None


def _beginnings(session: Session, board: Board) -> Iterator[tuple[SegmentKey, Mark]]:
    """Where the session's next range may begin: in the segment being merged, or at the start of the next."""
    life, consumed = session.life, session.consumed
    assert life is not None
    if consumed is None:
        key = SegmentKey(session.id, life.x, BEGIN[0])
        mark = board.mark_at(key, BEGIN[1])
        if mark is not None:
            yield key, mark
        return
    end = consumed.end
    yield SegmentKey(session.id, life.x, end.y), Mark(end.offset, end.number, consumed.chain)
    following = SegmentKey(session.id, life.x, end.y + 1)
    mark = board.mark_at(following, SEGMENT_HEADER_BYTES)
    if mark is not None and mark.number == end.number:
        yield following, mark


def plan_ends(state: State, board: Board) -> list[Fence | Close]:
    """Fences and closes of lives that have a successor.

    A life whose sender may still come is not fenced before a majority has all that the sender says it has:
    what it keeps on its own disk is not given up, however long it is cut off.
    """
    commands: list[Fence | Close] = []
    for session in state.sessions.values():
        life = session.life
        if life is None or life.end is not None or session.id in board.disagreements:
            continue
        if not session.is_superseded and len(session.lives) == 1:
            continue
        if not life.is_fenced:
            if _may_be_fenced(session, life.x, board):
                commands.append(Fence(session.id, life.x))
            continue
        finals = [End(*final[2:]) for final in board.finals(session.id, life.x)]
        if len(finals) >= board.majority and not waits(state, session):
            # A node that was built anew, or trimmed its copy, holds less than what is merged.
            merged = [session.consumed.end] if session.consumed is not None else []
            commands.append(Close(session.id, life.x, *max(merged + finals)))
    return commands


def _may_be_fenced(session: Session, x: int, board: Board) -> bool:
    """Whether a majority has all that the sender still had of it, or no sender will come."""
    if session.is_superseded:
        return True
    announced = board.announced(session.id, x)
    return announced is not None and _has(session, board, announced)


def _has(session: Session, board: Board, end: SessionEnd) -> bool:
    if session.consumed is not None and session.consumed.end.number >= end.number:
        return True
    if (end.y, end.offset) == BEGIN:
        return True
    return board.mark_at(SegmentKey(end.session_id, end.x, end.y), end.offset) is not None
