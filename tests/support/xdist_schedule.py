"""How the workers of pytest-xdist share the tests.

What shares a cluster stays together, and so does a module of quick tests, which shares its fixtures. The
tests of a module with slow ones go one by one.
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
"""Whose tests share a cluster of real nodes, Spark, or a browser's page: of two workers each would start one,
and keep it to its end. The longest match counts: modules of `tests/cluster/` that are listed have nodes of
their own. What takes longest is first."""


def shared_by(nodeid: str) -> str | None:
    return max((shared for shared in SHARED if nodeid.startswith(shared)), key=len, default=None)


def start_order(nodeid: str, *, is_slow: bool) -> tuple[int, bool]:
    """What is shared starts first, then the slow tests: at the end no worker has a long one left."""
    shared = shared_by(nodeid)
    return len(SHARED) if shared is None else SHARED.index(shared), not is_slow


class Scheduling(LoadScopeScheduling):
    """Groups of tests in the order of collection."""

    def __init__(self, config: pytest.Config, log: Any) -> None:
        config.option.loadscopereorder = False
        super().__init__(config, log)

    @cached_property
    def _with_slow_tests(self) -> frozenset[str]:
        """The modules that have slow tests, as they begin a test's id."""
        root = self.config.rootpath
        modules = (root / "tests").rglob("test_*.py")
        return frozenset(str(one.relative_to(root)) for one in modules if "mark.slow" in one.read_text())

    def _split_scope(self, nodeid: str) -> str:
        module, _, _ = nodeid.partition("::")
        return shared_by(nodeid) or (nodeid if module in self._with_slow_tests else module)
