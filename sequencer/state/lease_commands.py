"""The commands about leases, as values. Pure; `sequencer.state.command_codec` encodes them.

No command carries a time. Only the leader measures how long a lease was not renewed, with its own monotonic
clock. Its command names the lease's token and renewals at the time when it started to measure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from rt.names import check_lease_name, check_lease_owner
from sequencer.state.state import REQUEST_BYTES

LEASES_PER_COMMAND_MAX: Final = 256
"""About 64 KiB of names."""
DURATION_MS_MIN: Final = 1_000
"""Several times the duration of a leader change is better. Below 1 s no renewal arrives in time."""
DURATION_MS_MAX: Final = 3_600_000
TOKEN_END: Final = 1 << 63


class HeldLease(NamedTuple):
    """A lease and its token, as the owner knows them."""

    name: str
    token: int


class IdleLease(NamedTuple):
    """A lease that was not renewed, and its number of renewals when its time started."""

    name: str
    token: int
    renewals: int


@dataclass(frozen=True, slots=True)
class AcquireLeases:
    """Grant those of these leases that are free to `owner`, until they are not renewed for `duration_ms`."""

    request: bytes
    """Identifies the request: applied again, it has the leases that it was granted before."""
    owner: str
    duration_ms: int
    names: tuple[str, ...]

    def __post_init__(self) -> None:
        _check(self.request, self.owner, self.names)
        if not DURATION_MS_MIN <= self.duration_ms <= DURATION_MS_MAX:
            raise ValueError(f"a lease of {self.duration_ms} ms")


@dataclass(frozen=True, slots=True)
class RenewLeases:
    """Renew those of these leases that the owner still holds with these tokens."""

    request: bytes
    owner: str
    leases: tuple[HeldLease, ...]

    def __post_init__(self) -> None:
        _check(self.request, self.owner, [one.name for one in self.leases])
        _check_tokens(self.leases)


@dataclass(frozen=True, slots=True)
class ReleaseLeases:
    """Release those of these leases that the owner still holds with these tokens."""

    request: bytes
    owner: str
    leases: tuple[HeldLease, ...]

    def __post_init__(self) -> None:
        _check(self.request, self.owner, [one.name for one in self.leases])
        _check_tokens(self.leases)


@dataclass(frozen=True, slots=True)
class ExpireLeases:
    """End leases that the leader saw without a renewal for their duration."""

    leases: tuple[IdleLease, ...]

    def __post_init__(self) -> None:
        _check_names([one.name for one in self.leases])
        _check_tokens(self.leases)
        if any(not 0 <= one.renewals < TOKEN_END for one in self.leases):
            raise ValueError("a negative number of renewals")

    @property
    def brief(self) -> str:
        """Text for a log line, without the up to 64 KiB of names."""
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
