"""How the workers of pytest-xdist share the tests.

Tests that share a cluster run on one worker. So do the tests of a module without slow tests, which share its
fixtures. The tests of a module with slow tests are distributed one by one.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any, Final

import pytest
from xdist.scheduler import LoadScopeScheduling

SHARED: Final = (
    "tests/cluster/",
    "tests/spark/",
    "tests/cluster/test_hostile_memory.py",
    "tests/cluster/test_stack_chaos.py",
    "tests/cluster/test_rolling_upgrade.py",
    "tests/cluster/test_stream_requests.py",
    "tests/cluster/test_cluster_resets.py",
    "tests/cluster/test_corruption_everywhere.py",
    "tests/helm/test_helm_boot.py",
    "tests/cluster/test_cluster_retention.py",
    "tests/cluster/test_clock_jumps.py",
    "tests/cluster/test_heartbeats.py",
    "tests/cluster/test_power_cuts.py",
    "tests/rest/test_rest_page.py",
)
"""Modules whose tests share a cluster of real nodes, Spark, or a browser's page: on two workers, each worker
would start its own and keep it to the end. The longest match counts: listed modules of `tests/cluster/` have
their own nodes. The longest-running group is first.
"""


def shared_by(nodeid: str) -> str | None:
    return max((shared for shared in SHARED if nodeid.startswith(shared)), key=len, default=None)


def start_order(nodeid: str, *, is_slow: bool) -> tuple[int, bool]:
    """Shared groups start first, then slow tests: at the end no worker has a long test left."""
    shared = shared_by(nodeid)
    return len(SHARED) if shared is None else SHARED.index(shared), not is_slow


class Scheduling(LoadScopeScheduling):
    """Groups of tests in the order of collection."""

    def __init__(self, config: pytest.Config, log: Any) -> None:
        config.option.loadscopereorder = False
        super().__init__(config, log)

    @cached_property
    def _with_slow_tests(self) -> frozenset[str]:
        """The paths of the modules that have slow tests, as in test ids."""
        root = self.config.rootpath
        modules = (root / "tests").rglob("test_*.py")
        return frozenset(str(one.relative_to(root)) for one in modules if "mark.slow" in one.read_text())

    def _split_scope(self, nodeid: str) -> str:
        module, _, _ = nodeid.partition("::")
        return shared_by(nodeid) or (nodeid if module in self._with_slow_tests else module)
