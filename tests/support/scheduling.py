"""How the workers of pytest-xdist share the tests: one by one, but what shares a cluster stays together."""

from __future__ import annotations

from typing import Final

from xdist.scheduler import LoadScopeScheduling

SHARED: Final = (
    "tests/cluster/test_archiving.py",
    "tests/cluster/test_clock_jumps.py",
    "tests/cluster/test_cluster_resets.py",
    "tests/cluster/test_damage_everywhere.py",
    "tests/cluster/test_heartbeats.py",
    "tests/cluster/test_hostile_memory.py",
    "tests/cluster/test_power_cuts.py",
    "tests/cluster/test_rolling_upgrade.py",
    "tests/cluster/test_stack_chaos.py",
    "tests/cluster/test_stream_requests.py",
    "tests/cluster/",
    "tests/helm/test_helm_boot.py",
    "tests/rest/test_rest_page.py",
    "tests/spark/",
)
"""Whose tests share a cluster of real nodes, Spark, or a browser's page: of two workers each would start one,
and keep it to its end. The first match counts: the modules above `tests/cluster/` have nodes of their own."""


class Scheduling(LoadScopeScheduling):
    """The largest group first, then each test by itself in the order of collection."""

    def _split_scope(self, nodeid: str) -> str:
        return next((shared for shared in SHARED if nodeid.startswith(shared)), nodeid)
