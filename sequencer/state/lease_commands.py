"""The commands about leases, as values. Pure; as bytes they are in `sequencer.state.command_codec`.

None of them carries a time: how long a lease was not renewed only the leader measures, by its own clock that
never goes back, and it says so with what it saw when it began to measure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from rt.names import check_lease_name, check_lease_owner
from sequencer.state.state import REQUEST_BYTES

LEASES_PER_COMMAND_MAX: Final = 256
"""Some 64 KiB of names."""
DURATION_MS_MIN: Final = 1_000
"""Several times what a change of leader takes would be better; below, no renewal comes in time."""
DURATION_MS_MAX: Final = 3_600_000
TOKEN_END: Final = 1 << 63


class HeldLease(NamedTuple):
    """A lease as its owner knows it."""

    name: str
    token: int


class IdleLease(NamedTuple):
    """A lease that was not renewed, and how often it was when its time began."""

    name: str
    token: int
    renewals: int


@dataclass(frozen=True, slots=True)
class AcquireLeases:
    """Of these leases those that are free go to `owner`, until they are not renewed for `duration_ms`."""

    request: bytes
    """Names the request: those that it got it has got when it is applied again."""
    owner: str
    duration_ms: int
    names: tuple[str, ...]

    def __post_init__(self) -> None:
        _check(self.request, self.owner, self.names)
        if not DURATION_MS_MIN <= self.duration_ms <= DURATION_MS_MAX:
            raise ValueError(f"a lease of {self.duration_ms} ms")


@dataclass(frozen=True, slots=True)
class RenewLeases:
    """Of these leases those that are still the owner's by these tokens last anew."""

    request: bytes
    owner: str
    leases: tuple[HeldLease, ...]

    def __post_init__(self) -> None:
        _check(self.request, self.owner, [one.name for one in self.leases])
        _check_tokens(self.leases)


@dataclass(frozen=True, slots=True)
class ReleaseLeases:
    """Of these leases those that are still the owner's by these tokens are free."""

    request: bytes
    owner: str
    leases: tuple[HeldLease, ...]

    def __post_init__(self) -> None:
        _check(self.request, self.owner, [one.name for one in self.leases])
        _check_tokens(self.leases)


@dataclass(frozen=True, slots=True)
class ExpireLeases:
    """The leader saw each of these for as long as it lasts without a renewal."""

    leases: tuple[IdleLease, ...]

    def __post_init__(self) -> None:
        _check_names([one.name for one in self.leases])
        _check_tokens(self.leases)
        if any(not 0 <= one.renewals < TOKEN_END for one in self.leases):
            raise ValueError("a lease renewed less than never")

    @property
    def brief(self) -> str:
        """For a line of the log: not all of the names, which are some 64 KiB at most."""
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
        raise ValueError("a token that is never given")
