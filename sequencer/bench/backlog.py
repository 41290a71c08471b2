"""How fast nodes merge a backlog of publishers, and with how much memory.

The publishers open their sessions; the nodes stop while a backlog is written, and start again. The time is
from when the nodes are ready until every node has merged everything. Memory is the peak resident memory of
each process since its start.
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
"""A slower disk is an error."""


def backlog(setup: Setup, *, publishers: int, size_bytes: int) -> Iterator[Figure]:
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
    """Peak memory of each process of each node, over its restarts."""

    def __init__(self) -> None:
        self._most: dict[str, dict[str, MemoryUsage]] = {}
        self._again_s = 0.0

    @property
    def node_mb(self) -> float:
        """Upper bound for a node: its processes need not peak at the same time."""
        return max(together_mb(parts.values()) for parts in self._most.values())

    def part_mb(self, part: str) -> float:
        return max(parts[part].peak_mb for parts in self._most.values())

    def look(self, stage: Stage, now_s: float) -> None:
        """Ask the kernel, at most once a second: it takes time from the nodes."""
        if now_s >= self._again_s:
            self._again_s = now_s + _LOOK_S
            self.take(stage.memory())

    def take(self, found: Mapping[str, Mapping[str, MemoryUsage]]) -> None:
        for node, parts in found.items():
            most = self._most.setdefault(node, {})
            for part, one in parts.items():
                most[part] = one.most(most.get(part, MemoryUsage()))


def _check_space(setup: Setup, size_bytes: int) -> None:
    """Raises `rt.DiskFull` unless there is space for the logs of publishers and nodes."""
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
