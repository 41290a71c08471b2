"""Leases as balancers want them: a right that one owner has at a time, and that lapses unless it is renewed.

Laws of every provider. No two owners count on one lease at a time: whoever got it counts on it until
`until_s` by its own clock, and nobody else gets it before, unless it was released. Whoever gets it next has a
greater token. What is not known to have happened is a `TRANSIENT_FAILURE`: it may have happened, and then the
lease lapses by itself, or `held` shows it.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol


class LeaseResult(enum.Enum):
    """What came of it for one lease."""

    OK = "ok"
    TRANSIENT_FAILURE = "transient failure"
    """Not known, or not now: try again."""
    NOT_AVAILABLE = "not available"
    """Somebody holds it."""
    INVALID_TOKEN = "invalid token"  # noqa: S105 - a fencing token is no secret
    """It is not held by that token, or not any more."""


@dataclass(frozen=True, slots=True)
class Lease:
    """A lease that was got, as its owner knows it."""

    name: str
    token: int
    duration_s: float
    until_s: float
    """So long, by the provider's clock, its owner may count on it; unless it is renewed, no longer."""


class LeaseAnswer(NamedTuple):
    """What came of it; `lease` with `OK` alone, as it is now."""

    result: LeaseResult
    lease: Lease | None = None


class Holder(NamedTuple):
    """Who holds a lease."""

    owner: str
    token: int


class LeaseProvider(Protocol):
    """Leases for one owner. Answers stand in the order of what was asked; a call takes some seconds at most.

    Raises only what asking again does not help: a certificate that is not for these leases, a name that is
    none.
    """

    @property
    def owner(self) -> str:
        """Who holds what it gets: no two processes that live have the same."""

    def now_s(self) -> float:
        """Its clock: it never goes back, and goes on while the machine sleeps if it can."""

    async def acquire(self, names: Sequence[str], duration_s: float) -> Sequence[LeaseAnswer]:
        """Get those that are free. One that this owner holds is not available either."""

    async def renew(self, leases: Sequence[Lease]) -> Sequence[LeaseAnswer]:
        """Have each last its duration from now on."""

    async def release(self, leases: Sequence[Lease]) -> Sequence[LeaseResult]:
        """Let go of each at once. `INVALID_TOKEN`: it was not held; an earlier try may have let it go."""

    async def held(self, prefix: str) -> Mapping[str, Holder] | None:
        """By name, who holds what begins so, this owner too; it may be a moment old. None: not known now."""

    async def close(self) -> None:
        """End what is open; leases that are held lapse."""


DRIFT: Final = 0.01
"""Two clocks that measure a second differ by less: an owner counts on a lease for so much less."""


def until_s(asked_s: float, duration_s: float) -> float:
    """Until when an owner may count on a lease that it began to ask for, or to renew, at `asked_s`."""
    return asked_s + duration_s * (1 - DRIFT)
