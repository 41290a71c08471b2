"""Hosts that end without releasing anything."""

from __future__ import annotations

from rt.streams.balancer.lease_balancer import LeasedBalancer


def kill(balancer: LeasedBalancer) -> None:
    """Stop all tasks of the balancer. Its leases expire, and no listener is notified."""
    keeping = balancer._keeper
    for task in (balancer._poll_task, keeping._renewals, *keeping._changes):
        if task is not None:
            task.cancel()
    if keeping._timer is not None:
        keeping._timer.cancel()
