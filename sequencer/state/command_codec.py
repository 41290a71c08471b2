"""Encodes and decodes the commands of the Raft log. Pure.

A decoded command is well-formed, whoever sent it. `apply` decides whether it fits the state.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, assert_never

from google.protobuf.message import DecodeError

from rt.errors import FormatError, InvalidName, UnknownVersion
from rt.log.format.constants import NEWER_HINT
from rt.log.format.segment_table import TrimReason
from rt.v1 import sequencer_pb2 as pb
from sequencer.state.commands import (
    CloseRun,
    CloseSession,
    Command,
    Configure,
    DecideRequest,
    FenceRun,
    Forget,
    HoldPosition,
    JoinDisk,
    MergeInstruction,
    MergeRange,
    OpenRun,
    OpenSealedRuns,
    Operation,
    ReleaseHold,
    ResetCluster,
    RestoreDisk,
    Roll,
    SealedRun,
    SubmitRequest,
    TrimSegments,
)
from sequencer.state.lease_commands import (
    AcquireLeases,
    ExpireLeases,
    HeldLease,
    IdleLease,
    ReleaseLeases,
    RenewLeases,
)
from sequencer.state.state import End

VERSION: Final = 1


def encode_command(command: Command) -> bytes:
    message = pb.Command(version=VERSION)
    match command:
        case MergeInstruction():
            message.merge.number, message.merge.sequenced_ns = command.number, command.sequenced_ns
            message.merge.ranges.extend(_encode_range(one) for one in command.ranges)
        case OpenRun():
            message.open.session, message.open.incarnation = command.session, command.incarnation
            message.open.dedup_id = command.dedup_id or ""
            message.open.run, message.open.run_id = command.run, command.run_id
            message.open.newest = command.newest
        case OpenSealedRuns():
            sealed = message.open_sealed
            sealed.session, sealed.incarnation = command.session, command.incarnation
            sealed.dedup_id, sealed.newest = command.dedup_id or "", command.newest
            for run in command.runs:
                sealed.runs.add(run=run.run, run_id=run.run_id, **run.end._asdict())
        case FenceRun():
            message.fence.session_id, message.fence.run = command.session_id, command.run
            message.fence.later.extend(command.later)
        case CloseRun():
            message.close.CopyFrom(
                pb.Close(
                    session_id=command.session_id,
                    run=command.run,
                    roll=command.roll,
                    offset=command.offset,
                    number=command.number,
                    later=command.later,
                )
            )
            if command.announced is not None:
                message.close.announced.CopyFrom(pb.SessionEnd(**command.announced._asdict()))
        case Roll():
            message.roll.number, message.roll.sequenced_ns = command.number, command.sequenced_ns
            message.roll.run, message.roll.roll = command.run, command.roll
        case Configure():
            message.configure.CopyFrom(pb.Configure(**command.changes))
        case JoinDisk():
            message.join.node, message.join.disk = command.node, command.disk
        case RestoreDisk():
            message.restore.node, message.restore.disk = command.node, command.disk
        case TrimSegments():
            message.trim.up_to = command.up_to
            message.trim.reason, message.trim.trimmed_ns = command.reason, command.trimmed_ns
        case HoldPosition():
            message.hold.name, message.hold.position = command.name, command.position
            message.hold.at_ns = command.at_ns
        case ReleaseHold():
            message.release.name = command.name
        case CloseSession():
            message.close_session.session = command.session
        case Forget():
            message.forget.session_ids.extend(command.session_ids)
        case SubmitRequest():
            message.ask.id, message.ask.until_ns = command.id, command.until_ns
            message.ask.command = encode_command(command.operation)
        case DecideRequest():
            message.decide.id, message.decide.at_ns = command.id, command.at_ns
        case ResetCluster():
            message.reset.is_hard, message.reset.epoch = command.is_hard, command.epoch
            message.reset.at_ns, message.reset.request = command.at_ns, command.request
            message.reset.forced_by = command.forced_by
        case AcquireLeases():
            message.acquire_leases.CopyFrom(
                pb.AcquireLeases(
                    request=command.request,
                    owner=command.owner,
                    duration_ms=command.duration_ms,
                    names=command.names,
                )
            )
        case RenewLeases():
            message.renew_leases.request, message.renew_leases.owner = command.request, command.owner
            message.renew_leases.leases.extend(pb.HeldLease(**one._asdict()) for one in command.leases)
        case ReleaseLeases():
            message.release_leases.request, message.release_leases.owner = command.request, command.owner
            message.release_leases.leases.extend(pb.HeldLease(**one._asdict()) for one in command.leases)
        case ExpireLeases():
            message.expire_leases.leases.extend(pb.IdleLease(**one._asdict()) for one in command.leases)
        case _:
            assert_never(command)
    return message.SerializeToString(deterministic=True)


def decode_command(data: bytes) -> Command:
    """Decode a command; `rt.FormatError`, or `rt.UnknownVersion` if a newer rt wrote it."""
    message = pb.Command()
    try:
        message.ParseFromString(data)
    except DecodeError as error:
        raise FormatError("not a command of the sequencer", got=f"{len(data)} bytes") from error
    if message.version != VERSION:
        got = message.version
        raise UnknownVersion("command of an unknown version", got=got, expected=VERSION, hint=NEWER_HINT)
    kind = message.WhichOneof("kind")
    try:
        match kind:
            case "merge":
                merge = message.merge
                return MergeInstruction(
                    merge.number, merge.sequenced_ns, tuple(map(_decode_range, merge.ranges))
                )
            case "open":
                opened = message.open
                dedup_id = opened.dedup_id or None
                active = opened.run, opened.run_id, opened.newest
                return OpenRun(opened.session, opened.incarnation, dedup_id, *active)
            case "open_sealed":
                ahead = message.open_sealed
                runs = tuple(
                    SealedRun(one.run, one.run_id, End(one.roll, one.offset, one.number))
                    for one in ahead.runs
                )
                return OpenSealedRuns(
                    ahead.session, ahead.incarnation, ahead.dedup_id or None, runs, ahead.newest
                )
            case "fence":
                return FenceRun(message.fence.session_id, message.fence.run, tuple(message.fence.later))
            case "close":
                close = message.close
                end = close.roll, close.offset, close.number
                told = close.announced if close.HasField("announced") else None
                announced = None if told is None else End(told.roll, told.offset, told.number)
                return CloseRun(close.session_id, close.run, *end, tuple(close.later), announced)
            case "roll":
                roll = message.roll
                return Roll(roll.number, roll.run, roll.roll, roll.sequenced_ns)
            case "configure":
                wanted = message.configure
                return Configure(**{field.name: value for field, value in wanted.ListFields()})
            case "join":
                return JoinDisk(message.join.node, message.join.disk)
            case "restore":
                return RestoreDisk(message.restore.node, message.restore.disk)
            case "trim":
                trim = message.trim
                return TrimSegments(trim.up_to, TrimReason(trim.reason), trim.trimmed_ns)
            case "hold":
                hold = message.hold
                return HoldPosition(hold.name, hold.position, hold.at_ns)
            case "release":
                return ReleaseHold(message.release.name)
            case "close_session":
                return CloseSession(message.close_session.session)
            case "forget":
                return Forget(tuple(message.forget.session_ids))
            case "ask":
                return SubmitRequest(
                    message.ask.id, message.ask.until_ns, decode_operation(message.ask.command)
                )
            case "decide":
                return DecideRequest(message.decide.id, message.decide.at_ns)
            case "reset":
                asked = message.reset
                return ResetCluster(asked.is_hard, asked.epoch, asked.at_ns, asked.request, asked.forced_by)
            case "acquire_leases":
                acquire = message.acquire_leases
                return AcquireLeases(
                    acquire.request, acquire.owner, acquire.duration_ms, tuple(acquire.names)
                )
            case "renew_leases":
                renew = message.renew_leases
                return RenewLeases(renew.request, renew.owner, _held_leases(renew.leases))
            case "release_leases":
                free = message.release_leases
                return ReleaseLeases(free.request, free.owner, _held_leases(free.leases))
            case "expire_leases":
                idle = message.expire_leases.leases
                return ExpireLeases(tuple(IdleLease(one.name, one.token, one.renewals) for one in idle))
    except (ValueError, InvalidName) as error:
        raise FormatError(f"a command says what it cannot: {error}", got=kind) from error
    raise UnknownVersion("command of an unknown kind", hint=NEWER_HINT)


def decode_operation(data: bytes) -> Operation:
    """Decode an operator's request; see `decode_command`."""
    command = decode_command(data)
    if not isinstance(command, Configure | TrimSegments | ReleaseHold | CloseSession):
        raise FormatError("a command that is not for operators", got=type(command).__name__)
    return command


def reset_of(data: bytes) -> ResetCluster | None:
    """Decode a reset; None if the bytes are another command."""
    try:
        command = decode_command(data) if pb.Command.FromString(data).HasField("reset") else None
    except (DecodeError, FormatError):
        return None
    return command if isinstance(command, ResetCluster) else None


def _held_leases(leases: Iterable[pb.HeldLease]) -> tuple[HeldLease, ...]:
    return tuple(HeldLease(one.name, one.token) for one in leases)


def _encode_range(one: MergeRange) -> pb.Range:
    return pb.Range(
        session_id=one.session_id,
        run=one.run,
        roll=one.roll,
        start=one.start,
        end=one.end,
        first=one.first,
        count=one.count,
        chain_start=one.chain_start,
        chain_end=one.chain_end,
    )


def _decode_range(one: pb.Range) -> MergeRange:
    return MergeRange(
        one.session_id,
        one.run,
        one.roll,
        one.start,
        one.end,
        one.first,
        one.count,
        one.chain_start,
        one.chain_end,
    )
