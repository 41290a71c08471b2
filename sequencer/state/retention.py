"""Applies trims and holds: which part of the merged log is kept, and for which subscribers.

Pure. Invariants:
- A trim removes a prefix of the sealed segments, never the active one.
- A trim for age or size removes only what the policy and the holds allow when it is applied.
- A hold only moves forward, unless an operator resets the positions of a group that has no members.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice, takewhile

from archiver.policy import RetentionPolicy
from archiver.retention import plan_expiry
from rt.log.format.segment_table import TRIMMED_ENTRIES_MAX, TrimReason
from rt.names import session_owner
from sequencer.state import commands
from sequencer.state.apply_result import (
    CommandRejected,
    GroupReset,
    HoldMoved,
    HoldReleased,
    Outcome,
    SegmentsTrimmed,
)
from sequencer.state.configuration import Configuration
from sequencer.state.state import HOLDS_MAX, HOLDS_PER_NAME_MAX, MergedSegment, SequencerState, SubscriberHold


def trim(state: SequencerState, command: commands.TrimSegments) -> Outcome:
    """Trim sealed segments. Entries of segments that were trimmed long ago are dropped.

    An operator's trim of segments that are already trimmed succeeds.
    """
    if command.up_to > state.position:
        return CommandRejected(
            f"position {command.up_to} is beyond the merged log, which ends at {state.position}"
        )
    known = sum(1 for _ in takewhile(lambda one: one.is_trimmed, state.segments))
    kept = list(islice(state.segments, known, None))
    gone = [one for one in kept[: _count_allowed(state, kept, command)] if one.end <= command.up_to]
    if not gone and command.reason is not TrimReason.REQUEST:
        return CommandRejected(f"nothing up to {command.up_to} may be trimmed by {command.reason.name} now")
    for at, one in enumerate(gone, start=known):
        state.segments[at] = one.trimmed(command.reason, command.trimmed_ns)
    for _ in range(known + len(gone) - TRIMMED_ENTRIES_MAX):
        state.segments.popleft()
    return SegmentsTrimmed(
        command.reason,
        command.trimmed_ns,
        state.log_start,
        len(gone),
        sum(one.size_bytes for one in gone),
        tuple(name for name, one in sorted(state.holds.items()) if one.position < state.log_start),
    )


def _count_allowed(
    state: SequencerState, kept: Sequence[MergedSegment], command: commands.TrimSegments
) -> int:
    """The number of sealed segments that may be trimmed for that reason."""
    match command.reason:
        case TrimReason.TIME | TrimReason.SIZE:
            clocks, holds = [command.trimmed_ns], held_positions(state)
            policy = policy_of(state.configuration)
            found = plan_expiry(kept, state.merged.offset, policy, clocks, holds, members=1)
            return found.by_time if command.reason is TrimReason.TIME else found.by_size
        case TrimReason.DISK:  # Only the proposer knows the disks.
            return len(kept) if state.configuration.retention_disk_percent else 0
        case _:
            return len(kept)


def policy_of(said: Configuration) -> RetentionPolicy:
    return RetentionPolicy(
        said.retention_minutes, said.retention_bytes, said.retention_disk_percent, said.hold_bytes_max
    )


def held_positions(state: SequencerState) -> dict[str, int]:
    """By name of the subscriber: the first position that it still needs."""
    return {name: hold.position for name, hold in state.holds.items()}


def hold(state: SequencerState, command: commands.HoldPosition) -> Outcome:
    """Move a subscriber's hold forward."""
    known = state.holds.get(command.name)
    if known is None and len(state.holds) >= HOLDS_MAX:
        return CommandRejected(f"{HOLDS_MAX} subscribers hold data back, and {command.name} is one more")
    owner = session_owner(command.name)
    if known is None and command.name != owner:
        count = sum(name.startswith(f"{owner}~") for name in state.holds)
        if count >= HOLDS_PER_NAME_MAX:
            return CommandRejected(f"{owner} has {count} positions of groups, and {command.name} is one more")
    if known is not None and command.position < known.position:
        return CommandRejected(
            f"{command.name} has acknowledged up to {known.position}, not {command.position}"
        )
    if command.position > state.position:
        return CommandRejected(f"position {command.position} of {command.name} is beyond {state.position}")
    at_ns = command.at_ns if known is None else max(known.at_ns, command.at_ns)
    state.holds[command.name] = SubscriberHold(command.position, at_ns)
    return HoldMoved(command.name, command.position)


def release(state: SequencerState, command: commands.ReleaseHold) -> Outcome:
    """Remove a subscriber's hold."""
    if state.holds.pop(command.name, None) is None:
        return CommandRejected(f"{command.name} holds nothing back")
    return HoldReleased(command.name)


def reset_group(state: SequencerState, command: commands.ResetGroup) -> Outcome:
    """Move all positions of a group, or delete them. No position is moved below the first one that is kept.

    The leases of members are in the same state, so no member can start unnoticed.
    """
    group = command.group
    names = tuple(sorted(name for name in state.holds if name.startswith(f"{group}~")))
    if not names:
        return CommandRejected(f"the cluster has no positions of group {group}")
    members = sorted({one.owner for name, one in state.leases.items() if name.startswith(f"{group}/")})
    if members:
        return CommandRejected(f"group {group} has members: {', '.join(members)}"[:500])
    if command.is_deletion:
        for name in names:
            del state.holds[name]
        return GroupReset(names, None)
    if command.position > state.position:
        return CommandRejected(f"position {command.position} is beyond the merged log, {state.position}")
    position = max(command.position, state.log_start)
    for name in names:
        at_ns = max(state.holds[name].at_ns, command.at_ns)
        state.holds[name] = SubscriberHold(position, at_ns)
    return GroupReset(names, position)
