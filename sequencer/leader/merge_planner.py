"""Which merge instruction the leader proposes next.

Pure. The law: planned is only what a majority holds durably, in each session's order, with the exact place,
numbers and chain that `apply` will ask for; `apply` decides all the same. Sessions take turns, within byte
caps, so that none starves.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Final

from rt.log.format.segment import SEGMENT_HEADER_BYTES, SegmentId
from sequencer.leader.replication_tracker import BatchBoundary, ReplicationTracker, SegmentKey
from sequencer.state.apply_result import Forgotten, Outcome, RangesMerged, RunClosed, RunOpened
from sequencer.state.commands import COUNT_MAX, RANGES_MAX, MergeInstruction, MergeRange, Roll
from sequencer.state.merge_range import ResolvedRange, take
from sequencer.state.state import BEGIN, SequencerState, Session

INSTRUCTION_BYTES_MAX: Final = 64 << 20
"""Most bytes of all sessions in one instruction: its order is carried out in a fraction of a second."""
SESSION_RANGES_MAX: Final = 128
"""Most ranges of one session in one instruction: starts that brought little, one behind the other."""


@dataclass(slots=True)
class Speculation:
    """The state as it will be when all that this leader has in flight is applied.

    Dropped when leadership changes, or when an instruction turns out otherwise than planned.
    """

    state: SequencerState
    instruction: int = 0
    sequenced_ns: int = 0
    sessions: dict[int, Session] = field(default_factory=dict)
    """Those that instructions in flight change."""
    wanted: dict[str, int] = field(default_factory=dict)
    pending: set[int] = field(default_factory=set)
    """Sessions that may have something to merge: the others were looked at, and nothing is new of them."""
    turn: int = 0
    """The session that is asked first for the next instruction: the one that found the last one full."""

    def __post_init__(self) -> None:
        self.pending.update(session.id for session in self.state.sessions.values() if session.lives)
        self.settle()

    def settle(self) -> None:
        """Nothing is in flight, and what was came out as planned: go on from what is applied."""
        self.instruction, self.sequenced_ns = self.state.instruction, self.state.sequenced_ns
        self.sessions.clear()
        self.wanted.clear()

    def reset(self) -> None:
        """Nothing is in flight, and what was may be lost: go on from what is applied."""
        self.pending.update(self.sessions)
        self.settle()

    def on_applied(self, outcome: Outcome) -> None:
        """Take note of which sessions a command gives something to merge."""
        match outcome:
            case RunOpened(session_id) | RunClosed(session_id):
                self.pending.add(session_id)
            case Forgotten(session_ids):
                self.pending.difference_update(session_ids)
                for session_id in session_ids:
                    self.sessions.pop(session_id, None)
            case RangesMerged(order):
                for end in order.consumed:
                    # Not planned here, or it goes on with the next life, whose messages may be there.
                    if (
                        end.session_id not in self.sessions
                        or self.state.sessions[end.session_id].consumed is None
                    ):
                        self.pending.add(end.session_id)

    def session(self, session_id: int) -> Session:
        """The session as it will be; lives that were opened or closed meanwhile are seen."""
        applied = self.state.sessions[session_id]
        ahead = self.sessions.get(session_id)
        if ahead is None or _last_done(applied) > _last_done(ahead):
            return applied
        if applied.lives is ahead.lives:
            return ahead
        lives = tuple(life for life in applied.lives if life.run > _last_done(ahead))
        return replace(applied, lives=lives, consumed=ahead.consumed, done=ahead.done)

    def look(self, one: MergeRange, earlier: ResolvedRange | None = None) -> ResolvedRange | None:
        """What a range would come to behind all that is planned; None if it would be refused.

        `earlier`: the session's range that comes before it, and is not planned yet.
        """
        session = self.session(one.session_id) if earlier is None else earlier.session
        dedup_id = session.dedup_id
        wanted = None if dedup_id is None else self.wanted.get(dedup_id, self.state.wanted.get(dedup_id))
        if earlier is not None and earlier.wanted is not None:
            wanted = earlier.wanted
        taken = take(self.state, one, wanted, session=session)
        return None if isinstance(taken, str) else taken

    def take(self, taken: ResolvedRange) -> bool:
        """Plan what was looked at; False if it would be refused behind what was planned since."""
        dedup_id = taken.session.dedup_id
        if dedup_id is not None:
            again = self.look(taken.one)
            if again is None:
                return False
            taken = again
            if taken.wanted is not None:
                self.wanted[dedup_id] = taken.wanted
        self.sessions[taken.one.session_id] = taken.session
        return True


def _last_done(session: Session) -> int:
    return -1 if session.done is None else session.done[0]


def plan_merge(speculation: Speculation, board: ReplicationTracker, now_ns: int) -> MergeInstruction | None:
    """The next instruction, or None if nothing can be merged now. `speculation` then includes it.

    `now_ns` is the median of the nodes' clocks. The cost is that of the sessions that are pending.
    """
    # Taken in the order of `apply`: a dedup id's watermark may let one pass only after another.
    candidates = sorted(_candidates(speculation, board), key=lambda taken: taken.one.session_id)
    ranges = tuple(taken.one for taken in candidates if speculation.take(taken))
    if not ranges:
        return None
    for one in ranges:
        if _next_range(speculation, board, speculation.session(one.session_id)) is None:
            speculation.pending.discard(one.session_id)
    return MergeInstruction(*_next_instruction(speculation, now_ns), ranges)


def plan_roll(speculation: Speculation, segment: SegmentId, now_ns: int) -> Roll:
    """The instruction that seals a merged segment, behind all that is planned; `speculation` then has it."""
    number, sequenced_ns = _next_instruction(speculation, now_ns)
    return Roll(number, *segment, sequenced_ns)


def _next_instruction(speculation: Speculation, now_ns: int) -> tuple[int, int]:
    """Its number, and its sequencing time."""
    speculation.instruction += 1
    speculation.sequenced_ns = max(speculation.sequenced_ns + 1, now_ns)
    return speculation.instruction, speculation.sequenced_ns


def _candidates(speculation: Speculation, board: ReplicationTracker) -> list[ResolvedRange]:
    """What sessions have to merge, each of it acceptable if it came alone; in turns, up to the caps.

    A session that has nothing is pending no more; one that must wait for another stays.
    """
    ids = sorted(speculation.pending)
    turn = bisect_left(ids, speculation.turn)
    found: list[ResolvedRange] = []
    idle: list[int] = []
    size = 0
    for session_id in ids[turn:] + ids[:turn]:
        if len(found) >= RANGES_MAX or size >= INSTRUCTION_BYTES_MAX:
            speculation.turn = session_id
            break
        session = speculation.session(session_id)
        one = None if session_id in board.disagreements else _next_range(speculation, board, session)
        if one is None:
            idle.append(session_id)
            continue
        for taken in _taken(speculation, board, one, RANGES_MAX - len(found)):
            found.append(taken)
            size += taken.one.end - taken.one.start
    if idle:
        speculation.pending = speculation.pending.difference(idle)  # A set that was large stays slow.
    return found


def _taken(
    speculation: Speculation, board: ReplicationTracker, one: MergeRange, ranges_max: int
) -> Iterator[ResolvedRange]:
    """What a session has to merge from `one` on: a range of each run, up to the session's cap."""
    taken: ResolvedRange | None = None
    left = speculation.state.configuration.session_bytes_max
    for _ in range(min(SESSION_RANGES_MAX, ranges_max)):
        taken = speculation.look(one, taken)
        if taken is None:
            return
        yield taken
        left -= one.end - one.start
        following = _next_range(speculation, board, taken.session)
        if following is None or following.run == one.run or following.end - following.start > left:
            return
        one = following


def _next_range(speculation: Speculation, board: ReplicationTracker, session: Session) -> MergeRange | None:
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
            return MergeRange(
                session.id,
                *key[1:],
                start=begin.offset,
                end=end.offset,
                first=begin.number,
                count=end.number - begin.number,
                chain_start=begin.chain,
                chain_end=end.chain,
            )
    return None


def _beginnings(session: Session, board: ReplicationTracker) -> Iterator[tuple[SegmentKey, BatchBoundary]]:
    """Where the session's next range may begin: in the segment being merged, or at the start of the next."""
    life, consumed = session.life, session.consumed
    assert life is not None
    if consumed is None:
        key = SegmentKey(session.id, life.run, BEGIN[0])
        mark = board.mark_at(key, BEGIN[1])
        if mark is not None:
            yield key, mark
        return
    end = consumed.end
    yield SegmentKey(session.id, life.run, end.roll), BatchBoundary(end.offset, end.number, consumed.chain)
    following = SegmentKey(session.id, life.run, end.roll + 1)
    mark = board.mark_at(following, SEGMENT_HEADER_BYTES)
    if mark is not None and mark.number == end.number:
        yield following, mark
