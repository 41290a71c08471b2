"""How nodes drain publishers that are far ahead of them: how fast, and with how much memory.

The publishers are known to the cluster; then the nodes are down while a backlog is written, and start again.
What counts is from the moment that the nodes are ready until every node has merged everything. Memory is
what each process of a node, or a push, had resident at most, from its start on.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from typing import Final

from rt.bench.measure import Figure
from rt.errors import DiskFull
from sequencer.bench.stage import PARTS, Setup, Stage
from sequencer.bench.usage import MemoryUsage, together_mb

GOAL_MB: Final = 250.0
"""Of a node."""
_VALUE_BYTES: Final = 1024
_LOOK_S: Final = 1.0
_FILL_BYTES_PER_S_MIN: Final = 10e6
"""A disk that is slower is no place for a benchmark."""


def backlog(setup: Setup, *, publishers: int, size_bytes: int) -> Iterator[Figure]:
    """Write `size_bytes` of values with the nodes down, and drain it."""
    _check_space(setup, size_bytes)
    with setup.open() as stage:
        stage.publishers(publishers, _VALUE_BYTES)
        stage.ask("fill", size_bytes=_VALUE_BYTES)
        stage.wait_for(lambda: min(stage.merged()), 1, "merges for the slowest publisher")
        stage.nodes.stop()
        stage.ask(
            "fill", size_bytes=size_bytes // publishers, timeout_s=120 + size_bytes / _FILL_BYTES_PER_S_MIN
        )
        total = sum(stage.published())
        stage.nodes.start()
        stage.nodes.wait_ready()
        begun, peaks = time.monotonic(), Peaks()

        def merged() -> int:
            peaks.look(stage, time.monotonic())
            return sum(stage.merged())

        stage.wait_for(merged, total, "merging the backlog")
        stage.wait_merged(total)
        lasted_s = time.monotonic() - begun
        peaks.take(stage.memory())
        push_mb = stage.push_peak_mb()
    name = f"{setup.nodes} nodes, {size_bytes / 1e9:g} GB of backlog of {publishers} publishers"
    yield Figure(f"{name}: drained", (size_bytes / 1e6 / lasted_s,), "MB/s")
    yield Figure(f"{name}: most memory of a node, its processes together", (peaks.node_mb,), "MB", GOAL_MB)
    for part in PARTS:
        yield Figure(f"{name}: most memory of a {part} process", (peaks.part_mb(part),), "MB")
    yield Figure(f"{name}: most memory of a push", (push_mb,), "MB")


class Peaks:
    """What each process of each node had of the memory, also those that were started again meanwhile."""

    def __init__(self) -> None:
        self._most: dict[str, dict[str, MemoryUsage]] = {}
        self._again_s = 0.0

    @property
    def node_mb(self) -> float:
        """Of a node: its processes need not have had their most at the same time, so it is less than that."""
        return max(together_mb(parts.values()) for parts in self._most.values())

    def part_mb(self, part: str) -> float:
        """Of the processes that are this part of a node."""
        return max(parts[part].peak_mb for parts in self._most.values())

    def look(self, stage: Stage, now_s: float) -> None:
        """Ask the kernel, but not again at once: it costs time that the nodes could use."""
        if now_s >= self._again_s:
            self._again_s = now_s + _LOOK_S
            self.take(stage.memory())

    def take(self, found: Mapping[str, Mapping[str, MemoryUsage]]) -> None:
        """By node, then by part."""
        for node, parts in found.items():
            most = self._most.setdefault(node, {})
            for part, one in parts.items():
                most[part] = one.most(most.get(part, MemoryUsage()))


def _check_space(setup: Setup, size_bytes: int) -> None:
    """`rt.DiskFull` unless publishers' logs, all merged ones and what is on its way find room."""
    directory = setup.directory or tempfile.gettempdir()
    free, needed = shutil.disk_usage(directory).free, int(size_bytes * (setup.nodes + 1.5))
    if free < needed:
        raise DiskFull(
            "no space for a backlog of that size",
            where=directory,
            got=f"{free / 1e9:.1f} GB free",
            expected=f"{needed / 1e9:.1f} GB",
            hint="Choose a smaller --backlog-gb, or a --directory on a larger disk.",
        )
