"""The sequencer's state as bytes: equal states give equal bytes.

Pure. Most of a large state are records of sessions, which rarely change. Each is encoded once, and they
follow the other fields.
"""

from __future__ import annotations

from collections import deque
from dataclasses import asdict
from typing import Final

from google.protobuf.message import DecodeError

from rt.errors import FormatError, UnknownVersion
from rt.log.format.constants import NEWER_HINT
from rt.log.format.segment import SegmentId
from rt.log.format.segment_table import TrimReason
from rt.v1 import sequencer_pb2 as pb
from sequencer.state.forgotten_sessions import ForgottenSessions
from sequencer.state.state import (
    RELEASED_MAX,
    ActiveRun,
    ClearedRange,
    Configuration,
    ConsumedEnd,
    End,
    ForcedQuorum,
    LastReset,
    LeaseState,
    MergedEnd,
    MergedSegment,
    NodeDisk,
    PendingRequest,
    SequencerState,
    Session,
    SubscriberHold,
)

VERSION: Final = 1


def encode_state(state: SequencerState) -> bytes:
    message = pb.SequencerState(
        version=VERSION,
        cluster=state.cluster,
        configuration=pb.Configure(**asdict(state.configuration)),
        instruction=state.instruction,
        sequenced_ns=state.sequenced_ns,
        position=state.position,
        merged=_encode_merged(state.merged),
        next_session_id=state.next_session_id,
        joins=state.joins,
        decided_ns=state.decided_ns,
        lease_token=state.lease_token,
        let_go=state.released,
        closed=state.closed,
        forgotten=state.forgotten.encode(),
        runs_cut_short=state.runs_cut_short,
    )
    for dedup_id in sorted(state.wanted):
        message.watermarks.add(dedup_id=dedup_id, wanted=state.wanted[dedup_id])
    for segment in state.segments:
        message.segments.add(
            run=segment.id.run,
            roll=segment.id.roll,
            first=segment.first,
            end=segment.end,
            size=segment.size_bytes,
            created_ns=segment.created_ns,
            sealed_ns=segment.sealed_ns,
            trimmed_ns=segment.trimmed_ns,
            reason=segment.reason,
        )
    for node, disk in sorted(state.disks.items()):
        message.disks.add(node=node, disk=disk.id, joined=disk.joined, is_whole=disk.is_whole)
    for name, hold in sorted(state.holds.items()):
        message.holds.add(name=name, position=hold.position, at_ns=hold.at_ns)
    if state.last_reset is not None:
        message.last_reset.CopyFrom(pb.Reset(**state.last_reset._asdict()))
    if state.cleared is not None:
        message.cleared.CopyFrom(pb.Cleared(**state.cleared._asdict()))
    for request, asked in sorted(state.asked.items()):
        message.asked.add(id=request, until_ns=asked.until_ns, command=asked.command)
    if state.force is not None:
        message.force.CopyFrom(pb.Force(**state.force._asdict()))
    for name, lease in sorted(state.leases.items()):
        message.leases.add(name=name, **lease._asdict())
    sessions = (_encoded_session(state, state.sessions[key]) for key in sorted(state.sessions))
    return b"".join([message.SerializeToString(deterministic=True), *sessions])


def decode_state(data: bytes) -> SequencerState:
    """Decode a state; `rt.FormatError`, `rt.UnknownVersion`."""
    try:
        message = pb.SequencerState.FromString(data)
    except DecodeError as error:
        raise FormatError("not a state of the sequencer", got=f"{len(data)} bytes") from error
    if message.version != VERSION:
        got = message.version
        raise UnknownVersion(
            "sequencer state of an unknown version", got=got, expected=VERSION, hint=NEWER_HINT
        )
    try:
        return _decode_state(message)
    except ValueError as error:
        raise FormatError(f"a state of the sequencer says what it cannot: {error}") from error


def _decode_state(message: pb.SequencerState) -> SequencerState:
    state = SequencerState(
        message.cluster,
        Configuration(**{field.name: value for field, value in message.configuration.ListFields()}),
        message.instruction,
        message.sequenced_ns,
        message.position,
        _decode_merged(message.merged),
        {one.id: _decode_session(one) for one in message.sessions},
        {one.dedup_id: one.wanted for one in message.watermarks},
        deque(_decode_segment(one) for one in message.segments),
        message.next_session_id,
        {one.node: NodeDisk(one.disk, one.joined, one.is_whole) for one in message.disks},
        message.joins,
        {one.name: SubscriberHold(one.position, one.at_ns) for one in message.holds},
        _decode_last_reset(message.last_reset) if message.HasField("last_reset") else None,
        _decode_cleared(message.cleared) if message.HasField("cleared") else None,
        {one.id: PendingRequest(one.until_ns, one.command) for one in message.asked},
        message.decided_ns,
        ForcedQuorum(message.force.request, message.force.node) if message.HasField("force") else None,
        {one.name: _decode_lease(one) for one in message.leases},
        message.lease_token,
        deque(message.let_go, RELEASED_MAX),
        dict.fromkeys(message.closed),
        ForgottenSessions.decode(message.forgotten),
        message.runs_cut_short,
    )
    if {*state.closed} != {session.id for session in state.sessions.values() if not session.active_runs}:
        raise ValueError(f"{len(state.closed)} sessions are said to be closed")
    state.index()
    return state


def _decode_last_reset(message: pb.Reset) -> LastReset:
    return LastReset(message.is_hard, message.epoch, message.at_ns, message.request, message.forced_by)


def _decode_cleared(message: pb.Cleared) -> ClearedRange:
    return ClearedRange(message.epoch, message.position, message.session_id, message.run)


def _decode_lease(message: pb.Lease) -> LeaseState:
    return LeaseState(message.owner, message.token, message.duration_ms, message.request, message.renewals)


def _encode_merged(merged: MergedEnd) -> pb.MergedEnd:
    run, roll = merged.segment or (0, 0)
    return pb.MergedEnd(
        has_segment=merged.segment is not None,
        run=run,
        roll=roll,
        offset=merged.offset,
        first=merged.first,
        created_ns=merged.created_ns,
        declared=sorted(merged.declared),
        chain=merged.chain,
        bytes=merged.total_bytes,
        next_run=merged.next_run,
    )


def _decode_merged(message: pb.MergedEnd) -> MergedEnd:
    return MergedEnd(
        SegmentId(message.run, message.roll) if message.has_segment else None,
        message.offset,
        message.first,
        message.created_ns,
        set(message.declared),
        message.chain,
        message.bytes,
        message.next_run,
    )


def _encoded_session(state: SequencerState, session: Session) -> bytes:
    """The session as a field of the state."""
    known = state.encoded.get(session.id)
    if known is None or known[0] is not session:
        field = pb.SequencerState(sessions=[_encode_session(session)])
        known = state.encoded[session.id] = session, field.SerializeToString(deterministic=True)
    return known[1]


def _encode_session(session: Session) -> pb.Session:
    message = pb.Session(
        id=session.id,
        name=session.name,
        incarnation=session.incarnation,
        dedup_id=session.dedup_id or "",
        is_superseded=session.is_superseded,
        last_run=max(session.last_run, 0),
        was_opened=session.last_run >= 0,
        waits_for=session.waits_for,
        fenced_end=session.fenced_end,
        runs_cut_short=session.runs_cut_short,
    )
    for active in session.active_runs:
        roll, offset, number = active.end or (0, 0, 0)
        message.runs.add(
            run=active.run,
            run_id=active.run_id,
            is_fenced=active.is_fenced,
            is_closed=active.end is not None,
            roll=roll,
            offset=offset,
            number=number,
            announced=None if active.announced is None else pb.SessionEnd(**active.announced._asdict()),
        )
    if session.consumed is not None:
        message.has_consumed = True
        message.roll, message.offset, message.number = session.consumed.end
        message.chain = session.consumed.chain
    if session.done is not None:
        message.has_done = True
        message.done_run = session.done[0]
        message.done_roll, message.done_offset, message.done_number = session.done[1]
    return message


def _decode_session(message: pb.Session) -> Session:
    active_runs = (
        ActiveRun(
            one.run,
            one.run_id,
            one.is_fenced,
            End(one.roll, one.offset, one.number) if one.is_closed else None,
            _decode_end(one.announced) if one.HasField("announced") else None,
        )
        for one in message.runs
    )
    consumed = ConsumedEnd(End(message.roll, message.offset, message.number), message.chain)
    done = message.done_run, End(message.done_roll, message.done_offset, message.done_number)
    return Session(
        message.id,
        message.name,
        message.incarnation,
        message.dedup_id or None,
        message.waits_for,
        message.is_superseded,
        message.last_run if message.was_opened else -1,
        tuple(active_runs),
        consumed if message.has_consumed else None,
        done if message.has_done else None,
        message.fenced_end,
        message.runs_cut_short,
    )


def _decode_end(message: pb.SessionEnd) -> End:
    return End(message.roll, message.offset, message.number)


def _decode_segment(message: pb.MergedSegment) -> MergedSegment:
    return MergedSegment(
        SegmentId(message.run, message.roll),
        message.first,
        message.end,
        message.size,
        message.created_ns,
        message.sealed_ns,
        message.trimmed_ns,
        TrimReason(message.reason),
    )
