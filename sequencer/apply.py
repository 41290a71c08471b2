"""What a committed command does to the state.

Pure, total and the same on every node: a command that is stale or cannot be changes nothing and says why.
The law: positions are dense, a message is merged once and in its session's order, and whatever a merged file
holds follows from the command and the state alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TypeAlias, assert_never

from rt.log.block import BLOCK_HEADER_BYTES, BlockHeader, BlockKind, Declaration, encode_block_header
from rt.log.block import encode_declaration as encode_declaration_block
from rt.log.checksum import batch_seed, crc32c, segment_seed
from rt.log.layout import VERSION
from rt.log.segment import SEGMENT_HEADER_BYTES, SegmentId
from sequencer.commands import Close, Command, Configure, Fence, Join, Merge, Open, Range, Restore, Roll
from sequencer.orders import MergeOrder, OrderBlock, SessionEnd
from sequencer.state import (
    BEGIN,
    LIVES_MAX,
    Consumed,
    End,
    Life,
    MergedEnd,
    MergedSegment,
    NodeDisk,
    Session,
    State,
)


@dataclass(frozen=True, slots=True)
class Merged:
    """An instruction was merged."""

    order: MergeOrder


@dataclass(frozen=True, slots=True)
class Opened:
    """A life is open: its bytes are welcome."""

    session_id: int
    x: int


@dataclass(frozen=True, slots=True)
class Fenced:
    """No node takes a further byte of that X."""

    session_id: int
    x: int


@dataclass(frozen=True, slots=True)
class Closed:
    """The X ends there."""

    session_id: int
    x: int
    end: End


@dataclass(frozen=True, slots=True)
class Joined:
    """A disk of session copies counts from now on, in place of the node's last one."""

    node: str


@dataclass(frozen=True, slots=True)
class Restored:
    """The disk of that node has a say about the ends of lives again."""

    node: str


@dataclass(frozen=True, slots=True)
class Changed:
    """Configuration, or that a roll is wanted."""


@dataclass(frozen=True, slots=True)
class Refused:
    """Nothing was changed. `is_fenced`: for good, because another life or incarnation took over."""

    why: str
    is_fenced: bool = False


Outcome: TypeAlias = Merged | Opened | Fenced | Closed | Joined | Restored | Changed | Refused


def apply(state: State, command: Command) -> Outcome:
    """Do what the command says, or say why not."""
    match command:
        case Merge():
            return _merge(state, command)
        case Open():
            return _open(state, command)
        case Fence():
            return _fence(state, command)
        case Close():
            return _close(state, command)
        case Roll():
            return _roll(state, command)
        case Configure():
            return _configure(state, command)
        case Join():
            return _join(state, command)
        case Restore():
            return _restore(state, command)
    assert_never(command)


# Lives


def _open(state: State, command: Open) -> Outcome:
    newest = state.session_of(command.session)
    if newest is not None and newest.incarnation == command.incarnation:
        return _open_life(state, newest, command)
    if any(
        (one.name, one.incarnation) == (command.session, command.incarnation)
        for one in state.sessions.values()
    ):
        return Refused("a newer incarnation of the session was opened", is_fenced=True)
    if command.newest != (0 if newest is None else newest.id):
        # It was on its way while another directory took over, which may be the newer one.
        return Refused(f"another incarnation than session {command.newest} is the newest")
    waits_for = 0
    if newest is not None:
        waits_for = newest.id
        state.sessions[newest.id] = replace(newest, is_superseded=True)
    session = Session(
        state.next_session_id, command.session, command.incarnation, command.dedup_id, waits_for=waits_for
    )
    state.next_session_id += 1
    state.by_name[session.name] = session.id
    return _add_life(state, session, command)


def _open_life(state: State, session: Session, command: Open) -> Outcome:
    if session.dedup_id != command.dedup_id:
        return Refused(f"the session's dedup id is {session.dedup_id}, not {command.dedup_id}")
    known = session.life_of(command.x)
    if known is not None:
        if known.life == command.life:
            return Opened(session.id, command.x)
        return Refused(f"session number {command.x} is open with another life", is_fenced=True)
    if command.x <= session.last_x:
        why = f"session number {command.x} is over: {session.last_x} was opened"
        return Refused(why, is_fenced=True)
    if len(session.lives) >= LIVES_MAX:
        return Refused(f"{LIVES_MAX} lives of the session wait to be merged")
    return _add_life(state, session, command)


def _add_life(state: State, session: Session, command: Open) -> Outcome:
    life = Life(command.x, command.life)
    state.sessions[session.id] = replace(session, last_x=command.x, lives=(*session.lives, life))
    return Opened(session.id, command.x)


def _fence(state: State, command: Fence) -> Outcome:
    session = state.sessions.get(command.session_id)
    life = session.life_of(command.x) if session is not None else None
    if session is None or life is None:
        return Refused(f"session {command.session_id} has no session number {command.x} to fence")
    state.sessions[session.id] = session.with_life(replace(life, is_fenced=True))
    return Fenced(session.id, life.x)


def _close(state: State, command: Close) -> Outcome:
    session = state.sessions.get(command.session_id)
    life = session.life if session is not None else None
    if session is None or life is None or life.x != command.x:
        return Refused(f"session number {command.x} of session {command.session_id} is not what is merged")
    end = End(command.y, command.offset, command.number)
    # An end that is lost everywhere is followed by a nearer one: see `sequencer.ends`.
    if not life.is_fenced or (life.end is not None and end[:2] >= life.end[:2]):
        return Refused(f"session number {command.x} is {'closed' if life.is_fenced else 'not fenced'}")
    if waits(state, session):
        return Refused(f"an older incarnation, session {session.waits_for}, is not merged whole")
    if session.consumed is not None:
        done = session.consumed.end
        if end.number < done.number or end[:2] < done[:2]:
            return Refused(f"session number {command.x} is merged beyond {end}, up to {done}")
        if end.number > done.number and end[:2] == done[:2]:
            return Refused(f"session number {command.x} has no messages between {done} and {end}")
    state.sessions[session.id] = _advanced(session.with_life(replace(life, end=end)))
    return Closed(session.id, command.x, end)


def _advanced(session: Session) -> Session:
    """Go on with the next life if the present one is closed and merged whole."""
    life = session.life
    if life is None or life.end is None:
        return session
    consumed = session.consumed
    is_whole = life.end[:2] == BEGIN if consumed is None else consumed.end.number == life.end.number
    if not is_whole:
        return session
    return replace(session, lives=session.lives[1:], consumed=None, done=(life.x, life.end))


# Configuration


def _roll(state: State, command: Roll) -> Outcome:
    merged = state.merged
    if merged.segment != (command.x, command.y) or merged.offset <= SEGMENT_HEADER_BYTES:
        return Refused(f"log.{command.x}.{command.y} is not the growing merged segment, or is empty")
    merged.is_roll_wanted = True
    return Changed()


def _configure(state: State, command: Configure) -> Outcome:
    now = state.configuration
    state.configuration = replace(
        now,
        roll_bytes=_changed(now.roll_bytes, command.roll_bytes),
        roll_minutes=_changed(now.roll_minutes, command.roll_minutes),
        session_bytes_max=_changed(now.session_bytes_max, command.session_bytes_max),
    )
    return Changed()


def _changed(now: int, wanted: int | None) -> int:
    return now if wanted is None else wanted


# Disks


def _join(state: State, command: Join) -> Outcome:
    known = state.disks.get(command.node)
    if known is not None and known.id == command.disk:
        return Refused(f"the disk of {command.node} has joined")
    state.joins += 1
    # The first one of a node forgot nothing; what is closed is fetched up to its end, whoever lost it.
    is_whole = known is None or not any(session.lives for session in state.sessions.values())
    state.disks[command.node] = NodeDisk(command.disk, state.joins, is_whole)
    return Joined(command.node)


def _restore(state: State, command: Restore) -> Outcome:
    known = state.disks.get(command.node)
    if known is None or known.id != command.disk or known.is_whole:
        return Refused(f"that disk of {command.node} {'is whole' if known else 'has not joined'}")
    state.disks[command.node] = known._replace(is_whole=True)
    return Restored(command.node)


# Merging


@dataclass(frozen=True, slots=True)
class Taken:
    """What merging a range takes of it: `count` messages, behind the first `skip`. `session` afterwards."""

    one: Range
    session: Session
    skip: int
    count: int
    wanted: int | None
    """The dedup session's next id afterwards."""


def take(state: State, one: Range, wanted: int | None, *, session: Session | None = None) -> Taken | str:
    """What a range comes to; or why it cannot be merged now. `wanted`: the dedup id's watermark, if any.

    `session` stands in for the state's, where a leader looks ahead.
    """
    if session is None:
        session = state.sessions.get(one.session_id)
    if session is None or session.life is None:
        return f"session {one.session_id} has nothing open"
    why = _misplaced(state, session, session.life, one)
    if why is not None:
        return f"session {session.id}: {why}"
    skip = 0
    if session.dedup_id is not None:
        wanted = one.first if wanted is None else wanted
        if one.first > wanted:
            return f"session {session.id}: dedup id {one.first} where {wanted} is wanted"
        skip = min(wanted - one.first, one.count)
        wanted = max(wanted, one.end_number)
    end = End(one.y, one.end, one.end_number)
    return Taken(
        one,
        _advanced(replace(session, consumed=Consumed(end, one.chain_end))),
        skip,
        one.count - skip,
        wanted if session.dedup_id is not None else None,
    )


def waits(state: State, session: Session) -> bool:
    """Whether an older incarnation of the name is not merged whole.

    To look at the one before is enough: as it had to wait in its turn, it ends after those before it.
    """
    return bool(session.waits_for) and bool(state.sessions[session.waits_for].lives)


def _misplaced(state: State, session: Session, life: Life, one: Range) -> str | None:
    if waits(state, session):
        return f"an older incarnation, session {session.waits_for}, is not merged whole"
    if one.x != life.x:
        return f"session number {one.x} where {life.x} is merged"
    consumed = session.consumed
    if consumed is None:
        if (one.y, one.start) != BEGIN:
            return f"offset {one.start} of segment {one.y} where session number {one.x} must begin"
    else:
        done = consumed.end
        is_next = (one.y, one.start, one.chain_start) == (done.y, done.offset, consumed.chain)
        is_next_segment = (one.y, one.start) == (done.y + 1, SEGMENT_HEADER_BYTES)
        if not (is_next or is_next_segment) or one.first != done.number:
            return f"a range from {one.y}.{one.start}, number {one.first}, where {done} must follow"
    if life.end is not None and (one.end_number > life.end.number or (one.y, one.end) > life.end[:2]):
        return f"a range up to {one.end_number} beyond the end {life.end}"
    return None


def _merge(state: State, merge: Merge) -> Outcome:
    if merge.number != state.instruction + 1:
        return Refused(f"instruction {merge.number} where {state.instruction + 1} must follow")
    if merge.sequenced_ns <= state.sequenced_ns:
        return Refused(f"instruction {merge.number} is not later than the one before")
    taken: list[Taken] = []
    wanted = dict[str, int]()
    for one in merge.ranges:
        session = state.sessions.get(one.session_id)
        dedup_id = session.dedup_id if session is not None else None
        known = None if dedup_id is None else wanted.get(dedup_id, state.wanted.get(dedup_id))
        result = take(state, one, known)
        if isinstance(result, str):
            return Refused(result)
        if dedup_id is not None and result.wanted is not None:
            wanted[dedup_id] = result.wanted
        taken.append(result)
    state.instruction, state.sequenced_ns = merge.number, merge.sequenced_ns
    state.wanted.update(wanted)
    order = _order(state, merge, taken)
    for result in taken:
        state.sessions[result.session.id] = result.session
    return Merged(order)


def _order(state: State, merge: Merge, taken: list[Taken]) -> MergeOrder:
    merged, first_position = state.merged, state.position
    writes = any(result.count for result in taken)
    begins = writes and (merged.segment is None or _is_full(state))
    if begins:
        merged = _begin_segment(state, merge.sequenced_ns)
    offset = 0 if begins else merged.offset
    blocks = tuple(_blocks(state, merge, taken))
    return MergeOrder(
        merge.number,
        merge.sequenced_ns,
        merged.segment or SegmentId(0, 0),
        offset,
        first_position,
        state.position,
        blocks,
        merged.chain,
        merged.total_bytes,
        merged.offset,
        tuple(
            SessionEnd(one.session_id, one.x, one.y, one.end, one.end_number)
            for one in (result.one for result in taken)
        ),
    )


def _is_full(state: State) -> bool:
    merged = state.merged
    if merged.offset <= SEGMENT_HEADER_BYTES:
        return False
    return merged.is_roll_wanted or merged.offset >= state.configuration.roll_bytes


def _begin_segment(state: State, sequenced_ns: int) -> MergedEnd:
    merged, last = state.merged, state.merged.segment
    if last is not None:
        state.segments.append(
            MergedSegment(last, merged.first, state.position, merged.offset, merged.created_ns, sequenced_ns)
        )
    state.merged = MergedEnd(
        segment=SegmentId(0, 0) if last is None else SegmentId(last.x, last.y + 1),
        first=state.position,
        created_ns=sequenced_ns,
        chain=merged.chain,
        total_bytes=merged.total_bytes + SEGMENT_HEADER_BYTES,
    )
    return state.merged


def _blocks(state: State, merge: Merge, taken: list[Taken]) -> Iterator[OrderBlock]:
    merged = state.merged
    assert merged.segment is not None or not any(result.count for result in taken)
    seed = segment_seed(state.cluster, *merged.segment) if merged.segment is not None else 0
    index = 0
    for result in taken:
        if not result.count:
            continue
        one, session = result.one, result.session
        header = BlockHeader(
            version=VERSION,
            kind=BlockKind.BATCHES,
            instruction_index=index,
            instruction=merge.number,
            session_id=session.id,
            source_x=one.x,
            source_y=one.y,
            skip=result.skip,
            source_offset=one.start,
            length_bytes=one.end - one.start,
            first_position=state.position,
            message_count=result.count,
            sequenced_ns=merge.sequenced_ns,
            chain_start=one.chain_start,
            chain_end=one.chain_end,
        )
        if session.id not in merged.declared:
            merged.declared.add(session.id)
            who = Declaration(session.name, session.incarnation, session.dedup_id)
            head = encode_declaration_block(header, who, batch_seed(seed, merged.offset))
            yield _written(merged, OrderBlock(head, is_declaration=True))
            index += 1
            header = header._replace(instruction_index=index)
        head = encode_block_header(header, batch_seed(seed, merged.offset))
        assert len(head) == BLOCK_HEADER_BYTES
        yield _written(
            merged,
            OrderBlock(
                head,
                session_id=session.id,
                x=one.x,
                y=one.y,
                start=one.start,
                end=one.end,
                chain_end=one.chain_end,
                message_count=result.count,
            ),
        )
        index += 1
        state.position += result.count


def _written(merged: MergedEnd, block: OrderBlock) -> OrderBlock:
    merged.offset += block.size_bytes
    merged.total_bytes += block.size_bytes
    merged.chain = crc32c(block.head, merged.chain)
    return block
