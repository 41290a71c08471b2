"""The leases that balancers use: a right that one owner has at a time, and that expires unless it is renewed.

Invariants of every provider:
- No two owners count on a lease at the same time. Its owner counts on it until `until_s` by its own clock; no
  other owner gets it before that, unless it was released.
- Each new owner gets a greater token.
- An unknown result is a `TRANSIENT_FAILURE`. The call may have succeeded: then the lease expires by itself,
  or `held` shows it.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Final, NamedTuple, Protocol

from msgspec import Struct

from rt.errors import InvalidOption

QUEUES: Final = "queue/"
"""The prefix of the lease name of a queue. The queue's name follows."""


class LeaseResult(enum.Enum):
    """The result for one lease."""

    OK = "ok"
    TRANSIENT_FAILURE = "transient failure"
    """Unknown, or not possible now: try again."""
    NOT_AVAILABLE = "not available"
    """Another owner holds it."""
    INVALID_TOKEN = "invalid token"  # noqa: S105 - a fencing token is no secret
    """No longer held with that token."""


class OwnedLease(Struct, frozen=True):
    """A lease as its owner knows it."""

    name: str
    token: int
    duration_s: float
    until_s: float
    """Its owner may count on it until then, by the provider's clock, unless it is renewed."""


class LeaseAnswer(NamedTuple):
    """The result for one lease. `lease` is its new state; set with `OK` only."""

    result: LeaseResult
    lease: OwnedLease | None = None


class LeaseHolder(NamedTuple):
    owner: str
    token: int


class LeaseProvider(Protocol):
    """Leases for one owner. Answers are in the order of the request. A call takes a few seconds at most.

    Raises only errors that a retry cannot solve: a certificate without access to these leases, an invalid
    name.
    """

    @property
    def owner(self) -> str:
        """The owner of the leases. Must be unique among running processes."""

    def now_s(self) -> float:
        """Its clock. Must never go back, and should run while the machine sleeps."""

    async def acquire(self, names: Sequence[str], duration_s: float) -> Sequence[LeaseAnswer]:
        """Acquire those that are free. A lease that this owner already holds is not available either."""

    async def renew(self, leases: Sequence[OwnedLease]) -> Sequence[LeaseAnswer]:
        """Extend each lease: it lasts for its duration from now on."""

    async def release(self, leases: Sequence[OwnedLease]) -> Sequence[LeaseResult]:
        """Release each at once. `INVALID_TOKEN`: it was not held; an earlier try may have released it."""

    async def held(self, prefix: str) -> Mapping[str, LeaseHolder] | None:
        """The holders of all leases whose name starts with `prefix`, including this owner. May be slightly
        stale. None if the holders are unknown.
        """

    def reach(self) -> Mapping[str, frozenset[str]]:
        """By queue name: the names of all leases on the queue's cluster except the leases of queues, at the
        last `held`.

        Empty if all queues have one cluster. A cluster that did not answer, or has answered only for a short
        time, is left out.
        """

    def away(self) -> Collection[str]:
        """The names of the queues whose cluster did not answer the last `held`. Their leases cannot be
        acquired now.
        """

    async def close(self) -> None:
        """Close connections. Leases still held expire."""


DRIFT: Final = 0.01
"""The largest relative drift between two clocks. An owner shortens its lease by this share."""


def until_s(asked_s: float, duration_s: float) -> float:
    """The time until which an owner may count on a lease whose acquire or renew call started at `asked_s`."""
    return asked_s + duration_s * (1 - DRIFT)


LEASE_S_MIN: Final = 1.0
LEASE_S_MAX: Final = 3600.0


class LeaseTimes(Struct, frozen=True):
    """The timing of a lease-based balancer, in seconds. A dead host's queues are served again after about
    `lease_s` + `look_s`.
    """

    lease_s: float = 30.0
    """How long a lease lasts without a renewal. It is renewed three times in that period."""
    look_s: float = 2.0
    """The interval between polls of hosts and leases."""
    give_up_s: float = 20.0
    """The time limit for a listener to stop a queue. Must exceed the listener's own limit, `drain_s`."""

    def __post_init__(self) -> None:
        is_possible = LEASE_S_MIN <= self.lease_s <= LEASE_S_MAX and 0 < self.look_s <= self.lease_s
        if not is_possible or not 0 < self.give_up_s < math.inf:
            raise InvalidOption(
                "the times of a balancer do not fit together", got=str(self), hint="See LeaseTimes."
            )

    @property
    def renew_s(self) -> float:
        """The interval between renewals."""
        return self.lease_s / 3

    @property
    def margin_s(self) -> float:
        """The owner no longer counts on a lease this long before its end, so that work can stop in time."""
        return self.lease_s / 10


DEFAULT_TIMES: Final = LeaseTimes()
