"""Encodes and decodes the commands of the Raft log. Pure.

A decoded command is well-formed, even if its sender is hostile. `apply` decides whether it fits the state.
"""

from __future__ import annotations

from typing import Final

from google.protobuf.message import DecodeError

from rt.errors import FormatError, InvalidName, UnknownVersion
from rt.log.format.constants import NEWER_HINT
from rt.message_codec import FieldCodec, MessageCodec, UnionCodec, inlined
from rt.v1 import sequencer_pb2 as pb
from sequencer.state import commands, session_commands
from sequencer.state.commands import Command, Operation, ResetCluster
from sequencer.state.leases import leases, requests, tables
from sequencer.state.operations import membership
from sequencer.state.state import End

VERSION: Final = 1


def encode_command(command: Command) -> bytes:
    message = pb.Command(version=VERSION, **_COMMAND.encode(command))
    return message.SerializeToString(deterministic=True)


def decode_command(data: bytes) -> Command:
    """Decode a command; `rt.FormatError`, or `rt.UnknownVersion` if a newer rt wrote it."""
    try:
        message = pb.Command.FromString(data)
    except DecodeError as error:
        raise FormatError("not a command of the sequencer", got=f"{len(data)} bytes") from error
    if message.version != VERSION:
        got = message.version
        raise UnknownVersion("command of an unknown version", got=got, expected=VERSION, hint=NEWER_HINT)
    kind = message.WhichOneof("kind")
    if kind is None:
        raise UnknownVersion("command of an unknown kind", hint=NEWER_HINT)
    try:
        return _COMMAND.decode(message)
    except (ValueError, InvalidName) as error:
        raise FormatError(f"a command says what it cannot: {error}", got=kind) from error


def decode_operation(data: bytes) -> Operation:
    """Decode an operator's request; see `decode_command`."""
    command = decode_command(data)
    if not isinstance(command, Operation):
        raise FormatError("a command that is not for operators", got=type(command).__name__)
    return command


def reset_of(data: bytes) -> ResetCluster | None:
    """Decode a reset; None if the bytes are another command."""
    try:
        command = decode_command(data) if pb.Command.FromString(data).HasField("reset") else None
    except (DecodeError, FormatError):
        return None
    return command if isinstance(command, ResetCluster) else None


def raised_level(data: bytes) -> int | None:
    """The feature level that a well-formed command raises the cluster to; None if it is another command."""
    message = pb.Command.FromString(data)
    return message.raise_feature_level.level if message.HasField("raise_feature_level") else None


_SEALED_RUN: Final = MessageCodec(
    session_commands.SealedRun, pb.SealedRun, end=inlined(MessageCodec(End, pb.SealedRun))
)
_OPERATION: Final = FieldCodec(
    lambda operation: {"command": encode_command(operation)},
    lambda message: decode_operation(message.command),
)
_COMMAND: Final = UnionCodec[Command](
    pb.Command,
    "kind",
    merge=commands.MergeInstruction,
    open=session_commands.OpenRun,
    open_sealed=MessageCodec(session_commands.OpenSealedRuns, pb.OpenSealed, runs=_SEALED_RUN),
    fence=session_commands.FenceRun,
    close=session_commands.CloseRun,
    roll=commands.Roll,
    configure=commands.Configure,
    join=commands.JoinDisk,
    restore=commands.RestoreDisk,
    trim=commands.TrimSegments,
    hold=commands.HoldPosition,
    release=commands.ReleaseHold,
    reset_group=commands.ResetGroup,
    close_session=session_commands.CloseSession,
    forget=session_commands.Forget,
    limit_silence=session_commands.LimitSilence,
    ask=MessageCodec(commands.SubmitRequest, pb.Ask, operation=_OPERATION),
    decide=commands.DecideRequest,
    raise_feature_level=commands.RaiseFeatureLevel,
    reset=commands.ResetCluster,
    acquire_leases=leases.AcquireLeases,
    renew_leases=leases.RenewLeases,
    release_leases=leases.ReleaseLeases,
    expire_leases=leases.ExpireLeases,
    write_table=MessageCodec(
        tables.WriteTable,
        pb.WriteTable,
        by=inlined(MessageCodec(tables.TablePartId, pb.WriteTable)),
    ),
    delete_table=tables.DeleteTable,
    post_request=requests.PostRequest,
    request_members=membership.RequestMembers,
    cancel_members=membership.CancelMembers,
    settle_members=membership.SettleMembers,
)
