"""Leases: rights that one owner has at a time, replicated by the consensus.

Pure. Invariants:
- A lease has one owner.
- The token of a granted lease is greater than every token granted before, of any lease. So of two messages
  the one with the greater token comes from the later owner.
- If two nodes are forced to continue apart from each other, no token is granted by both.
- A lease that its owner did not release expires only after the leader saw no renewal for its duration.
- A repeated request grants nothing new. It only renews its leases again. If they were released in the
  meantime, it grants nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from rt.names import lease_group
from sequencer.state.apply_result import CommandRejected, LeasesExpired, LeasesGranted, Outcome
from sequencer.state.lease_commands import AcquireLeases, ExpireLeases, HeldLease, ReleaseLeases, RenewLeases
from sequencer.state.state import LEASES_MAX, LEASES_PER_GROUP_MAX, LeaseState, SequencerState


def acquire(state: SequencerState, command: AcquireLeases) -> Outcome:
    """Grant the leases that are free; nothing if there is no room for all of them."""
    why = no_room(state, command)
    if why is not None:
        return CommandRejected(why)
    free = _free(state, command)
    for name in free:
        state.lease_token += 1
        state.leases[name] = LeaseState(
            command.owner, state.lease_token, command.duration_ms, command.request, 0
        )
    tokens = tuple(_token_of(state.leases.get(name), command) for name in command.names)
    return LeasesGranted(command.request, tokens, granted=len(free))


def renew(state: SequencerState, command: RenewLeases) -> Outcome:
    """Restart the time of the leases that are held."""
    held = [_is_held(state, command.owner, one) for one in command.leases]
    for one, is_held in zip(command.leases, held, strict=True):
        if is_held:
            lease = state.leases[one.name]
            state.leases[one.name] = lease._replace(renewals=lease.renewals + 1)
    return LeasesGranted(command.request, _tokens(command.leases, held), renewed=sum(held))


def release(state: SequencerState, command: ReleaseLeases) -> Outcome:
    """Release the leases that are held."""
    held = [_is_held(state, command.owner, one) for one in command.leases]
    for one, is_held in zip(command.leases, held, strict=True):
        if is_held:
            _release(state, one.name)
    return LeasesGranted(command.request, _tokens(command.leases, held), released=sum(held))


def expire(state: SequencerState, command: ExpireLeases) -> Outcome:
    """Release the leases that were neither renewed nor released since."""
    over = [
        one.name
        for one in command.leases
        if (lease := state.leases.get(one.name)) is not None
        and (lease.token, lease.renewals) == (one.token, one.renewals)
    ]
    if not over:
        return CommandRejected("those leases were renewed, released or free")
    for name in over:
        _release(state, name)
    return LeasesExpired(tuple(over))


def _is_held(state: SequencerState, owner: str, held: HeldLease) -> bool:
    lease = state.leases.get(held.name)
    return lease is not None and (lease.owner, lease.token) == (owner, held.token)


def _tokens(leases: Sequence[HeldLease], held: Sequence[bool]) -> tuple[int, ...]:
    return tuple(one.token if is_held else 0 for one, is_held in zip(leases, held, strict=True))


def _token_of(lease: LeaseState | None, command: AcquireLeases) -> int:
    """The token of a lease that this command acquired; 0 if it did not."""
    is_ours = lease is not None and (lease.request, lease.owner) == (command.request, command.owner)
    return lease.token if lease is not None and is_ours else 0


def _free(state: SequencerState, command: AcquireLeases) -> list[str]:
    """The leases that it may get: none if the request is repeated after its leases were released."""
    if command.request in state.released:
        return []
    return [name for name in command.names if name not in state.leases]


def _release(state: SequencerState, name: str) -> None:
    request = state.leases.pop(name).request
    if request not in state.released:
        state.released.append(request)


def no_room(state: SequencerState, command: AcquireLeases) -> str | None:
    """Why the free leases of this command are too many, in total or of one group; None if they are not."""
    free = _free(state, command)
    if len(state.leases) + len(free) > LEASES_MAX:
        return f"{LEASES_MAX} leases are held at most, and {len(free)} more are asked for"
    for group in sorted({lease_group(name) for name in free}):
        more = sum(lease_group(name) == group for name in free)
        held = sum(name.startswith(f"{group}/") for name in state.leases)
        if held + more > LEASES_PER_GROUP_MAX:
            most = f"{LEASES_PER_GROUP_MAX} leases of group {group} are held at most"
            return f"{most}, and {more} more are asked for"
    return None
