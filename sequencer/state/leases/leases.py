"""The commands about leases, and how they change the replicated state. A lease has one owner at a time.

Pure. Invariants:
- A lease has one owner.
- The token of a granted lease is greater than every token granted before, of any lease. So if two messages
  have different tokens, the message with the greater token comes from the later owner.
- If two nodes are forced to continue apart from each other, they never grant the same token.
- A lease that its owner did not release expires only after the leader saw no renewal for its duration.
- A repeated request to acquire returns the tokens that it was granted, and renews nothing. Once one of its
  leases was released or has expired, the request grants no more leases. A repeated renewal renews again.

No command carries a time. Only the leader measures how long a lease was not renewed, with its own monotonic
clock (`sequencer.leader.lease_expiry`). Its command names the lease's token and its number of renewals when
the measurement started.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from msgspec import Struct

from rt.names import check_lease_name, check_lease_owner, lease_group
from sequencer.state.apply_result import CommandRejected, LeasesExpired, LeasesGranted, Outcome
from sequencer.state.state import LEASES_MAX, LEASES_PER_GROUP_MAX, REQUEST_BYTES, LeaseState, SequencerState

LEASES_PER_COMMAND_MAX: Final = 256
"""Keeps a command's names below about 64 KiB."""
DURATION_MS_MIN: Final = 1_000
"""Several times the duration of a leader change is better. Below 1 s no renewal arrives in time."""
DURATION_MS_MAX: Final = 3_600_000
TOKEN_END: Final = 1 << 63


class HeldLease(NamedTuple):
    """A lease and its token, as the owner knows them."""

    name: str
    token: int


class IdleLease(NamedTuple):
    """A lease that was not renewed, and its number of renewals when the leader started to measure its
    time.
    """

    name: str
    token: int
    renewals: int


class AcquireLeases(Struct, frozen=True):
    """Grant `owner` the leases in `names` that are free. A lease lasts until it is not renewed for
    `duration_ms`.
    """

    request: bytes
    """A random id, the same if the request is repeated."""
    owner: str
    duration_ms: int
    names: tuple[str, ...]

    def __post_init__(self) -> None:
        _check(self.request, self.owner, self.names)
        if not DURATION_MS_MIN <= self.duration_ms <= DURATION_MS_MAX:
            raise ValueError(f"a lease of {self.duration_ms} ms")


class _HeldLeasesCommand(Struct, frozen=True):
    request: bytes
    owner: str
    leases: tuple[HeldLease, ...]

    def __post_init__(self) -> None:
        _check(self.request, self.owner, [one.name for one in self.leases])
        _check_tokens(self.leases)


class RenewLeases(_HeldLeasesCommand, frozen=True):
    """Renew the leases that the owner still holds with these tokens. The others stay as they are."""


class ReleaseLeases(_HeldLeasesCommand, frozen=True):
    """Release the leases that the owner still holds with these tokens. The others stay as they are."""


class ExpireLeases(Struct, frozen=True):
    """End leases for which the leader saw no renewal for their duration."""

    leases: tuple[IdleLease, ...]

    def __post_init__(self) -> None:
        _check_names([one.name for one in self.leases])
        _check_tokens(self.leases)
        if any(not 0 <= one.renewals < TOKEN_END for one in self.leases):
            raise ValueError("a negative number of renewals")

    @property
    def brief(self) -> str:
        """Text for a log line, without the list of names, which may take 64 KiB."""
        return f"ExpireLeases(count={len(self.leases)}, first={self.leases[0].name})"


def _check(request: bytes, owner: str, names: Sequence[str]) -> None:
    if len(request) != REQUEST_BYTES:
        raise ValueError(f"request id of {len(request)} bytes")
    check_lease_owner(owner)
    _check_names(names)


def _check_names(names: Sequence[str]) -> None:
    if not 1 <= len(names) <= LEASES_PER_COMMAND_MAX or len(set(names)) < len(names):
        raise ValueError(f"{len(names)} leases, {len(set(names))} different ones")
    for name in names:
        check_lease_name(name)


def _check_tokens(leases: Sequence[HeldLease] | Sequence[IdleLease]) -> None:
    if any(not 1 <= one.token < TOKEN_END for one in leases):
        raise ValueError("a token that is never granted")


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
    """Count a renewal of each lease that is held, so that the leader starts to measure its time again."""
    held = _held(state, command)
    for name in held:
        lease = state.leases[name]
        state.leases[name] = lease._replace(renewals=lease.renewals + 1)
    tokens = tuple(held.get(one.name, 0) for one in command.leases)
    return LeasesGranted(command.request, tokens, renewed=len(held))


def release(state: SequencerState, command: ReleaseLeases) -> Outcome:
    held = _held(state, command)
    for name in held:
        _release(state, name)
    tokens = tuple(held.get(one.name, 0) for one in command.leases)
    return LeasesGranted(command.request, tokens, released=len(held))


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


def _held(state: SequencerState, command: _HeldLeasesCommand) -> dict[str, int]:
    """The tokens, by name, of the leases that the owner still holds with the tokens of the command."""
    return {
        one.name: one.token
        for one in command.leases
        if (lease := state.leases.get(one.name)) is not None
        and (lease.owner, lease.token) == (command.owner, one.token)
    }


def _token_of(lease: LeaseState | None, command: AcquireLeases) -> int:
    """The token of a lease that this command acquired; 0 if it did not."""
    is_ours = lease is not None and (lease.request, lease.owner) == (command.request, command.owner)
    return lease.token if lease is not None and is_ours else 0


def _free(state: SequencerState, command: AcquireLeases) -> list[str]:
    """The leases that the command may get: none if one of the leases that it was granted was released or has
    expired.
    """
    if command.request in state.released:
        return []
    return [name for name in command.names if name not in state.leases]


def _release(state: SequencerState, name: str) -> None:
    request = state.leases.pop(name).request
    state.tables.on_released(name)
    if request not in state.released:
        state.released.append(request)


def no_room(state: SequencerState, command: AcquireLeases) -> str | None:
    """Why there is no room for the free leases of this command, in total or in a group; None if there is."""
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
