"""The balancers there are: all of them serve a queue under its lease, and differ in who is to have it.

| balancer | who is to serve a queue | what moves when a host comes or goes |
|---|---|---|
| `RingBalancer` | in whose part of the ring it lies | what lies in that host's parts |
| `DeploymentBalancer`, static | best fit over all hosts that are configured | nothing: a dead host's wait |
| `DeploymentBalancer` | the same over those that are there, and mature | what is that host's, once |
| `LeaseBalancer` | who got it; each host as many as the others, or one more | what makes that so |
"""

from __future__ import annotations

import random
from collections.abc import Collection
from typing import Final

from rt.errors import InvalidOption
from rt.names import check_lease_owner
from rt.streams.lease_times import DEFAULT_TIMES, LeaseTimes
from rt.streams.leased_balancer import LeasedBalancer
from rt.streams.leasing import LeaseProvider
from rt.streams.placing import best_fit
from rt.streams.policies import MaturePolicy, RingPolicy, SharePolicy, StaticPolicy

__all__ = ["DeploymentBalancer", "LeaseBalancer", "LeaseTimes", "RingBalancer", "best_fit"]

MATURITY_S: Final = 120.0


class RingBalancer(LeasedBalancer):
    """A consistent ring: hosts have places on it as queues have."""

    def __init__(
        self, leases: LeaseProvider, *, host: str | None = None, times: LeaseTimes = DEFAULT_TIMES
    ) -> None:
        super().__init__(leases, RingPolicy(), host=host, times=times)


class DeploymentBalancer(LeasedBalancer):
    """Best fit over hosts that are known beforehand, of which this is one (`rt.InvalidOption` if not)."""

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
        """`static`: a host that is away keeps its queues, which nobody serves. `maturity_s`: see
        `rt.streams.policies.MaturePolicy`.
        """
        for one in hosts:
            check_lease_owner(one)
        if (host or leases.owner) not in hosts:
            wanted = ", ".join(sorted(hosts))[:200]
            raise InvalidOption(
                "not a host of the deployment", got=host or leases.owner, wanted=f"one of {wanted}"
            )
        if not maturity_s >= 0:
            raise InvalidOption("not a time", where="maturity_s", got=maturity_s)
        policy = StaticPolicy(hosts) if static else MaturePolicy(hosts, maturity_s)
        super().__init__(leases, policy, host=host, times=times)


class LeaseBalancer(LeasedBalancer):
    """Hosts that come and go as they like share the queues evenly."""

    def __init__(
        self,
        leases: LeaseProvider,
        *,
        host: str | None = None,
        times: LeaseTimes = DEFAULT_TIMES,
        rng: random.Random | None = None,
    ) -> None:
        super().__init__(leases, SharePolicy(rng), host=host, times=times)
