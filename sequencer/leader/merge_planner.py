"""Plans the merge instruction that the leader proposes next.

Pure. Invariants:
- Only bytes that a majority holds durably are planned, in each session's order, with the exact offsets,
  numbers and running checksum that `apply` will check. Nevertheless `apply` decides.
- Sessions take turns within byte limits, so that none starves.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from typing import Final

from msgspec import Struct, field
from msgspec.structs import replace

from rt.log.format.segment import SEGMENT_HEADER_BYTES, SegmentId
from sequencer.leader.replication_tracker import BatchBoundary, ReplicationTracker, SegmentKey
from sequencer.state.apply_result import Forgotten, Outcome, RangesMerged, RunClosed, RunOpened
from sequencer.state.commands import COUNT_MAX, RANGES_MAX, MergeInstruction, MergeRange, Roll
from sequencer.state.merge import ResolvedRange, resolve_range
from sequencer.state.state import BEGIN, SequencerState, Session

INSTRUCTION_BYTES_MAX: Final = 64 << 20
"""Maximum number of bytes of all sessions in one instruction: it is merged in a fraction of a second."""
SESSION_RANGES_MAX: Final = 128
"""Maximum number of ranges of one session in one instruction: successive runs with few messages each."""


class Speculation(Struct):
    """The state as it will be after everything that this leader has in flight is applied.

    Dropped when the leader changes, or when the result of an instruction is not as planned.
    """

    state: SequencerState
    instruction: int = 0
    sequenced_ns: int = 0
    sessions: dict[int, Session] = field(default_factory=dict)
    """Sessions that instructions in flight change."""
    wanted: dict[str, int] = field(default_factory=dict)
    pending: set[int] = field(default_factory=set)
    """Sessions that may have something to merge. The others were checked and have not changed since."""
    turn: int = 0
    """The first session of the next instruction: the session for which the last instruction had no room."""

    def __post_init__(self) -> None:
        self.pending.update(session.id for session in self.state.sessions.values() if session.active_runs)
        self.reconcile()

    def reconcile(self) -> None:
        """Continue from the applied state: nothing is in flight, and all results were as planned."""
        self.instruction, self.sequenced_ns = self.state.instruction, self.state.sequenced_ns
        self.sessions.clear()
        self.wanted.clear()

    def reset(self) -> None:
        """Continue from the applied state: nothing is in flight, and proposals may have been lost."""
        self.pending.update(self.sessions)
        self.reconcile()

    def on_applied(self, outcome: Outcome) -> None:
        """Record the sessions in which a command makes something ready to be merged."""
        match outcome:
            case RunOpened(session_id) | RunClosed(session_id):
                self.pending.add(session_id)
            case Forgotten(session_ids):
                self.pending.difference_update(session_ids)
                for session_id in session_ids:
                    self.sessions.pop(session_id, None)
            case RangesMerged(plan):
                for end in plan.consumed:
                    # The range was not planned here, or the next run of the session may have messages.
                    if (
                        end.session_id not in self.sessions
                        or self.state.sessions[end.session_id].consumed is None
                    ):
                        self.pending.add(end.session_id)

    def session(self, session_id: int) -> Session:
        """The session as it will be, including runs that were opened or closed meanwhile."""
        applied = self.state.sessions[session_id]
        ahead = self.sessions.get(session_id)
        if ahead is None or _last_done(applied) > _last_done(ahead):
            return applied
        if applied.active_runs is ahead.active_runs:
            return ahead
        active_runs = tuple(active for active in applied.active_runs if active.run > _last_done(ahead))
        return replace(applied, active_runs=active_runs, consumed=ahead.consumed, done=ahead.done)

    def resolve(self, one: MergeRange, earlier: ResolvedRange | None = None) -> ResolvedRange | None:
        """Resolve a range after everything that is planned; None if it would be rejected.

        `earlier`: the session's range before it, if that is not planned yet.
        """
        session = self.session(one.session_id) if earlier is None else earlier.session
        dedup_id = session.dedup_id
        wanted = None if dedup_id is None else self.wanted.get(dedup_id, self.state.wanted.get(dedup_id))
        if earlier is not None and earlier.wanted is not None:
            wanted = earlier.wanted
        taken = resolve_range(self.state, one, wanted, session=session)
        return None if isinstance(taken, str) else taken

    def add(self, taken: ResolvedRange) -> bool:
        """Plan a resolved range; False if it would be rejected after what was planned since."""
        dedup_id = taken.session.dedup_id
        if dedup_id is not None:
            again = self.resolve(taken.one)
            if again is None:
                return False
            taken = again
            if taken.wanted is not None:
                self.wanted[dedup_id] = taken.wanted
        self.sessions[taken.one.session_id] = taken.session
        return True


def _last_done(session: Session) -> int:
    return -1 if session.done is None else session.done[0]


def plan_merge(speculation: Speculation, tracker: ReplicationTracker, now_ns: int) -> MergeInstruction | None:
    """The next instruction, or None if nothing can be merged now. `speculation` then includes it.

    `now_ns` is the median of the nodes' clocks. The cost grows with the number of pending sessions.
    """
    # In the order of `apply`: because of a dedup id's watermark, a range may be accepted only after another
    # one.
    candidates = sorted(_candidates(speculation, tracker), key=lambda taken: taken.one.session_id)
    ranges = tuple(taken.one for taken in candidates if speculation.add(taken))
    if not ranges:
        return None
    for one in ranges:
        if _next_range(speculation, tracker, speculation.session(one.session_id)) is None:
            speculation.pending.discard(one.session_id)
    return MergeInstruction(*_next_instruction(speculation, now_ns), ranges)


def plan_roll(speculation: Speculation, segment: SegmentId, now_ns: int) -> Roll:
    """The instruction that seals a merged segment. `speculation` then includes it."""
    number, sequenced_ns = _next_instruction(speculation, now_ns)
    return Roll(number, *segment, sequenced_ns)


def _next_instruction(speculation: Speculation, now_ns: int) -> tuple[int, int]:
    """The number and the sequencing time of the next instruction."""
    speculation.instruction += 1
    speculation.sequenced_ns = max(speculation.sequenced_ns + 1, now_ns)
    return speculation.instruction, speculation.sequenced_ns


def _candidates(speculation: Speculation, tracker: ReplicationTracker) -> list[ResolvedRange]:
    """The ranges that sessions have to merge, in turns, up to the limits. Each range would be accepted alone.

    A session without anything to merge is not pending any more. A session that must wait for another session
    stays pending.
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
        one = None if session_id in tracker.disagreements else _next_range(speculation, tracker, session)
        if one is None:
            idle.append(session_id)
            continue
        for taken in _taken(speculation, tracker, one, RANGES_MAX - len(found)):
            found.append(taken)
            size += taken.one.end - taken.one.start
    if idle:
        # A new set, because iterating one that was large stays slow.
        speculation.pending = speculation.pending.difference(idle)
    return found


def _taken(
    speculation: Speculation, tracker: ReplicationTracker, one: MergeRange, ranges_max: int
) -> Iterator[ResolvedRange]:
    """The ranges that a session has to merge, starting with `one`: one range of each run, up to the session's
    limit.
    """
    taken: ResolvedRange | None = None
    left = speculation.state.configuration.session_bytes_max
    for _ in range(min(SESSION_RANGES_MAX, ranges_max)):
        taken = speculation.resolve(one, taken)
        if taken is None:
            return
        yield taken
        left -= one.end - one.start
        following = _next_range(speculation, tracker, taken.session)
        if following is None or following.run == one.run or following.end - following.start > left:
            return
        one = following


def _next_range(speculation: Speculation, tracker: ReplicationTracker, session: Session) -> MergeRange | None:
    active = session.active
    if active is None:
        return None
    bytes_max = speculation.state.configuration.session_bytes_max
    for key, begin in _beginnings(session, tracker):
        number_max = begin.number + COUNT_MAX
        if active.end is not None:
            number_max = min(number_max, active.end.number)
        end = tracker.furthest(key, begin.offset, bytes_max, number_max)
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


def _beginnings(session: Session, tracker: ReplicationTracker) -> Iterator[tuple[SegmentKey, BatchBoundary]]:
    """Where the session's next range may start: in the segment being merged, or in the one after it."""
    active, consumed = session.active, session.consumed
    assert active is not None
    if consumed is None:
        key = SegmentKey(session.id, active.run, BEGIN[0])
        boundary = tracker.boundary_at(key, BEGIN[1])
        if boundary is not None:
            yield key, boundary
        return
    end = consumed.end
    yield SegmentKey(session.id, active.run, end.roll), BatchBoundary(end.offset, end.number, consumed.chain)
    following = SegmentKey(session.id, active.run, end.roll + 1)
    boundary = tracker.boundary_at(following, SEGMENT_HEADER_BYTES)
    if boundary is not None and boundary.number == end.number:
        yield following, boundary
