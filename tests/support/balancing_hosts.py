"""Hosts that end without a word."""

from __future__ import annotations

from rt.streams.balancer.lease_balancer import LeasedBalancer


def kill(balancer: LeasedBalancer) -> None:
    """Nothing of it runs any more; what it holds lapses, and nobody is told."""
    keeping = balancer._keeper
    for task in (balancer._poll_task, keeping._renewals, *keeping._changes):
        if task is not None:
            task.cancel()
    if keeping._timer is not None:
        keeping._timer.cancel()
