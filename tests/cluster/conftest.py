"""One cluster of real nodes for all tests here. Each test leaves it intact, or the next one repairs it.

One worker of pytest-xdist runs all of them: see support/xdist_schedule.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from chaos.wired_nodes import CLIENTS, WiredNodes
from faults import Faults
from whole_cluster import whole_cluster


@pytest.fixture(scope="package")
def cluster() -> Iterator[WiredNodes]:
    with whole_cluster() as nodes:
        yield nodes


@pytest.fixture
def faults(cluster: WiredNodes, tmp_path: Path) -> Iterator[Faults]:
    """Yield the cluster after a restart of missing nodes. Its earlier log lines do not count."""
    missing = [name for name in cluster.names if name not in cluster.running]
    if missing:
        cluster.start(*missing)
        cluster.wait_ready()
        cluster.wait_merged(max(map(cluster.merged_position, cluster.names)))
    yield Faults(cluster, tmp_path)
    for name in cluster.running:
        cluster.resume(name)
    for end in [*cluster.names, CLIENTS]:
        cluster.heal(end)
