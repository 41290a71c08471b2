"""Applies committed commands to the state.

Pure, total, and equal on every node. A command that is stale or impossible changes nothing and returns why,
except that a decided request of an operator is recorded. A feature level that this program does not know
raises `rt.UnknownVersion`, which stops the node. Invariants:
- Positions are dense, and a message is merged once, in its session's order.
- All bytes of a merged file follow from the commands and the state alone.
"""

from __future__ import annotations

from typing import assert_never

from msgspec.structs import replace

from sequencer.state.apply_result import (
    CommandRejected,
    ConfigurationChanged,
    DiskJoined,
    DiskRestored,
    FeatureLevelRaised,
    Outcome,
    RequestLapsed,
)
from sequencer.state.commands import (
    Command,
    Configure,
    DecideRequest,
    HoldPosition,
    JoinDisk,
    MergeInstruction,
    RaiseFeatureLevel,
    ReleaseHold,
    ResetCluster,
    ResetGroup,
    RestoreDisk,
    Roll,
    SubmitRequest,
    TrimSegments,
)
from sequencer.state.feature_level import check_known
from sequencer.state.leases import leases, requests, tables
from sequencer.state.leases.leases import AcquireLeases, ExpireLeases, ReleaseLeases, RenewLeases
from sequencer.state.leases.requests import PostRequest
from sequencer.state.leases.tables import DeleteTable, WriteTable
from sequencer.state.merge import merge, roll
from sequencer.state.operations.membership import (
    CancelMembers,
    RequestMembers,
    SettleMembers,
    cancel_members,
    request_members,
    settle_members,
)
from sequencer.state.operations.operator_requests import ask, decide
from sequencer.state.operations.resets import reset
from sequencer.state.retention import hold, release, reset_group, trim
from sequencer.state.run_lifecycle import (
    close_run,
    close_session,
    fence_run,
    forget_sessions,
    limit_silence,
    open_run,
    open_sealed_runs,
)
from sequencer.state.session_commands import (
    CloseRun,
    CloseSession,
    FenceRun,
    Forget,
    LimitSilence,
    OpenRun,
    OpenSealedRuns,
)
from sequencer.state.state import NodeDisk, SequencerState


def apply(state: SequencerState, command: Command) -> Outcome:
    """Apply a command, or return why it is rejected."""
    match command:
        case MergeInstruction():
            return merge(state, command)
        case OpenRun():
            return open_run(state, command)
        case OpenSealedRuns():
            return open_sealed_runs(state, command)
        case FenceRun():
            return fence_run(state, command)
        case CloseRun():
            return close_run(state, command)
        case CloseSession():
            return close_session(state, command)
        case LimitSilence():
            return limit_silence(state, command)
        case Forget():
            return forget_sessions(state, command)
        case Roll():
            return roll(state, command)
        case Configure():
            return _configure(state, command)
        case RaiseFeatureLevel():
            return _raise_feature_level(state, command)
        case JoinDisk():
            return _join(state, command)
        case RestoreDisk():
            return _restore(state, command)
        case TrimSegments():
            return trim(state, command)
        case HoldPosition():
            return hold(state, command)
        case ReleaseHold():
            return release(state, command)
        case ResetGroup():
            return reset_group(state, command)
        case AcquireLeases():
            return leases.acquire(state, command)
        case RenewLeases():
            return leases.renew(state, command)
        case ReleaseLeases():
            return leases.release(state, command)
        case ExpireLeases():
            return leases.expire(state, command)
        case WriteTable():
            return tables.write_table(state, command)
        case DeleteTable():
            return tables.delete_table(state, command)
        case PostRequest():
            return requests.post_request(state, command)
        case RequestMembers():
            return request_members(state, command)
        case CancelMembers():
            return cancel_members(state, command)
        case SettleMembers():
            return settle_members(state, command)
        case SubmitRequest():
            return ask(state, command)
        case DecideRequest():
            decided = decide(state, command)
            return decided if isinstance(decided, CommandRejected | RequestLapsed) else apply(state, decided)
        case ResetCluster():
            return reset(state, command)
    assert_never(command)


# Configuration


def _configure(state: SequencerState, command: Configure) -> Outcome:
    state.configuration = replace(state.configuration, **command.changes)
    return ConfigurationChanged()


def _raise_feature_level(state: SequencerState, command: RaiseFeatureLevel) -> Outcome:
    if command.level <= state.feature_level:
        return CommandRejected(f"the cluster has feature level {state.feature_level}")
    state.feature_level = check_known(command.level)
    return FeatureLevelRaised(command.level)


# Disks


def _join(state: SequencerState, command: JoinDisk) -> Outcome:
    known = state.disks.get(command.node)
    if known is not None and known.id == command.disk:
        return CommandRejected(f"the disk of {command.node} has joined")
    state.joins += 1
    # No bytes were lost if this is the member's first disk, or if nothing was open or merged before it
    # joined.
    is_whole = known is None or not (state.instruction or state.open_count)
    state.disks[command.node] = NodeDisk(command.disk, state.joins, is_whole, command.address)
    return DiskJoined(command.node)


def _restore(state: SequencerState, command: RestoreDisk) -> Outcome:
    known = state.disks.get(command.node)
    if known is None or known.id != command.disk or known.is_whole:
        return CommandRejected(f"that disk of {command.node} {'is whole' if known else 'has not joined'}")
    state.disks[command.node] = known._replace(is_whole=True)
    return DiskRestored(command.node)
