"""The balancers. All serve a queue under its lease; they differ in which host should have it.

| balancer | which host serves a queue | what moves when a host joins or leaves |
|---|---|---|
| `RingBalancer` | the host whose part of the ring it lies in | the queues in that host's parts |
| `DeploymentBalancer`, static | best fit over all configured hosts | nothing: a dead host's queues wait |
| `DeploymentBalancer` | best fit over the present and mature hosts | that host's queues, once |
| `LeaseBalancer` | any; each host as many as the others, or one more | what keeps the shares even |
"""

from __future__ import annotations

import random
from collections.abc import Collection
from typing import Final

from rt.errors import InvalidOption
from rt.names import check_lease_owner
from rt.streams.balancer.assignment_policy import (
    MaturePolicy,
    RingPolicy,
    SharePolicy,
    StaticPolicy,
    best_fit,
)
from rt.streams.balancer.lease import DEFAULT_TIMES, LeaseProvider, LeaseTimes
from rt.streams.balancer.lease_balancer import LeasedBalancer

__all__ = ["DeploymentBalancer", "LeaseBalancer", "LeaseTimes", "RingBalancer", "best_fit"]

MATURITY_S: Final = 120.0


class RingBalancer(LeasedBalancer):
    """A consistent-hash ring of hosts and queues."""

    def __init__(
        self, leases: LeaseProvider, *, host: str | None = None, times: LeaseTimes = DEFAULT_TIMES
    ) -> None:
        super().__init__(leases, RingPolicy(), host=host, times=times)


class DeploymentBalancer(LeasedBalancer):
    """Best fit over a configured set of hosts. `rt.InvalidOption` if this host is not one of them."""

    def __init__(
        self,
        leases: LeaseProvider,
        hosts: Collection[str],
        *,
        static: bool = False,
        host: str | None = None,
        maturity_s: float = MATURITY_S,
        times: LeaseTimes = DEFAULT_TIMES,
    ) -> None:
        """With `static` an absent host keeps its queues, which are then not served. `maturity_s`: see
        `rt.streams.balancer.assignment_policy.MaturePolicy`.
        """
        for one in hosts:
            check_lease_owner(one)
        if (host or leases.owner) not in hosts:
            wanted = ", ".join(sorted(hosts))[:200]
            raise InvalidOption(
                "this host is not in the list of hosts", got=host or leases.owner, expected=f"one of {wanted}"
            )
        if not maturity_s >= 0:
            raise InvalidOption("maturity_s is not a valid time", where="maturity_s", got=maturity_s)
        policy = StaticPolicy(hosts) if static else MaturePolicy(hosts, maturity_s)
        super().__init__(leases, policy, host=host, times=times)


class LeaseBalancer(LeasedBalancer):
    """Any set of hosts shares the queues evenly. Hosts may join and leave at any time."""

    def __init__(
        self,
        leases: LeaseProvider,
        *,
        host: str | None = None,
        times: LeaseTimes = DEFAULT_TIMES,
        rng: random.Random | None = None,
    ) -> None:
        super().__init__(leases, SharePolicy(rng), host=host, times=times)
