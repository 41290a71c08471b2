"""The parameters of a simulation."""

from __future__ import annotations

from typing import Final

from msgspec import Struct, field

from rt.errors import InvalidOption
from rt.streams.balancer.balancers import MATURITY_S
from rt.streams.balancer.lease import LeaseTimes
from rt.streams.balancer.queue_leases import LOOK_S

BALANCERS: Final = ("lease", "ring", "deployment")
LIMITS: Final = {
    "clusters": (2, 5_000),
    "hosts": (2, 1_000),
    "streams": (1, 20_000_000),
    "failures": (0, 10_000),
    "joins": (0, 1_000),
    "clusters_away": (0, 4_999),
    "seed": (0, 2**63 - 1),
}
"""The minimum and maximum of each option. They bound memory and time."""

DRAIN_S: Final = 0.5
"""The longest time that a host takes to stop a queue in order. The time is random."""
LATENCY_S: Final = (0.002, 0.02)
"""The range of the one-way delay of a request to a cluster. The delay is random."""
RESTART_S: Final = 3.0
"""From the end of a process until its host's next process starts."""
CALM_S: Final = 60.0


class SimulationOptions(Struct, frozen=True):
    """`rt.InvalidOption` for values that do not fit together."""

    clusters: int = 1_000
    hosts: int = 200
    streams: int = 1_000_000
    seed: int = 1
    failures: int = 20
    """Hosts that crash or are cut off. Every second one is cut off."""
    joins: int = 10
    clusters_away: int = 10
    rolling_restart: bool = True
    cluster_change: bool = True
    """Add a cluster, then remove it. Hosts learn their clusters at their start, so both changes restart all
    hosts.
    """
    balancer: str = "lease"
    times: LeaseTimes = field(default_factory=LeaseTimes)

    def __post_init__(self) -> None:
        for name, (least, most) in LIMITS.items():
            if not least <= (value := getattr(self, name)) <= most:
                expected = f"{least:,} to {most:,}"
                raise InvalidOption(f"invalid --{name.replace('_', '-')}", got=value, expected=expected)
        if self.balancer not in BALANCERS:
            raise InvalidOption("unknown balancer", got=self.balancer, expected=", ".join(BALANCERS))
        if self.clusters_away >= self.clusters:
            raise InvalidOption(
                "invalid --clusters-away", got=self.clusters_away, expected="fewer than --clusters"
            )

    @property
    def round_s(self) -> float:
        """The longest time from one poll of the leases to the next: the wait, and a slow poll."""
        return self.times.look_s + LOOK_S

    @property
    def serve_again_s(self) -> float:
        """The upper bound of the time until a queue is served again: the time of its lease, and three rounds.
        In the first round a host sees the free lease. Another host may win it; then a host has the wrong
        share, and a second round fixes that. The third round is for a host that must first give up a queue.
        With the balancer `deployment`, hosts may disagree until all hosts are mature: which host should have
        a queue.
        """
        maturity_s = MATURITY_S if self.balancer == "deployment" else 0.0
        return self.times.lease_s + maturity_s + 3 * self.round_s + DRAIN_S
