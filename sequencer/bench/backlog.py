"""How fast nodes merge what publishers wrote while they reached no node, and with how much memory.

`backlog`: much data. The publishers open their sessions; the nodes stop while a backlog is written, and start
again. The time is from when the nodes are ready until every node has merged everything. Memory is the peak
resident memory of each process since its start.

`offline_starts`: many short runs. A publisher starts again and again and reaches no node. Then it connects.
The time is from its last start, which includes the start of its process, until every node has merged
everything.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from typing import Final

import rt
from rt.bench.measure import Figure
from rt.bench.processes import MemoryUsage, joint_peak_mb
from rt.errors import DiskFull
from sequencer.bench.stage import PARTS, STREAM, Setup, Stage

GOAL_MB: Final = 250.0
"""Memory of a node."""
_VALUE_BYTES: Final = 1024
_STARTS_GOAL_HZ: Final = 200.0
_OFFLINE_VALUE_BYTES: Final = 128
_SAMPLE_S: Final = 1.0
_FILL_BYTES_PER_S_MIN: Final = 10e6
"""A slower disk is an error."""


def backlog(setup: Setup, *, publishers: int, size_bytes: int) -> Iterator[Figure]:
    _check_space(setup, size_bytes)
    with setup.open() as stage:
        stage.start_publishers(publishers, _VALUE_BYTES)
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
            peaks.sample(stage, time.monotonic())
            return sum(stage.merged())

        stage.wait_for(merged, total, "merging the backlog")
        stage.wait_merged(total)
        lasted_s = time.monotonic() - begun
        peaks.add(stage.memory())
        push_mb = stage.push_peak_mb()
    name = f"{setup.nodes} nodes, {size_bytes / 1e9:g} GB of backlog of {publishers} publishers"
    yield Figure(f"{name}: drained", (size_bytes / 1e6 / lasted_s,), "MB/s")
    yield Figure(f"{name}: most memory of a node, its processes together", (peaks.node_mb,), "MB", GOAL_MB)
    for part in PARTS:
        yield Figure(f"{name}: most memory of a {part} process", (peaks.part_mb(part),), "MB")
    yield Figure(f"{name}: most memory of a push", (push_mb,), "MB")


def offline_starts(setup: Setup, *, starts: int) -> Iterator[Figure]:
    """Have a publisher start `starts` times offline, with one message each, and drain them."""
    with setup.open() as stage:
        for _ in range(starts):
            with rt.Publisher(stage.published_root, STREAM, publisher_id="p0") as publisher:
                publisher.publish(bytes(_OFFLINE_VALUE_BYTES))
        before = stage.progress()
        begun = time.monotonic()
        stage.start_publishers(1, _OFFLINE_VALUE_BYTES)
        stage.wait_merged(starts)
        lasted_s = time.monotonic() - begun
        after, peak_mb = stage.progress(), stage.peak_mb()
    name = f"{setup.nodes} nodes, {starts:,} starts of an offline publisher"
    yield Figure(f"{name}: drained", (starts / lasted_s,), "starts/s", _STARTS_GOAL_HZ)
    for who, used_s in after.cpu_s.items():
        per_start_ms = (used_s - before.cpu_s.get(who, 0.0)) / starts * 1000
        yield Figure(f"{name}: CPU of {who}", (per_start_ms,), "ms/start")
    yield Figure(f"{name}: most memory of a node process", (peak_mb,), "MB")


class Peaks:
    def __init__(self) -> None:
        self._peaks: dict[str, dict[str, MemoryUsage]] = {}
        self._next_s = 0.0

    @property
    def node_mb(self) -> float:
        """Upper bound for a node: its processes need not peak at the same time."""
        return max(joint_peak_mb(parts.values()) for parts in self._peaks.values())

    def part_mb(self, part: str) -> float:
        return max(parts[part].peak_mb for parts in self._peaks.values())

    def sample(self, stage: Stage, now_s: float) -> None:
        """Read the memory from the kernel, at most once a second, because this takes time from the nodes."""
        if now_s >= self._next_s:
            self._next_s = now_s + _SAMPLE_S
            self.add(stage.memory())

    def add(self, found: Mapping[str, Mapping[str, MemoryUsage]]) -> None:
        for node, parts in found.items():
            peaks = self._peaks.setdefault(node, {})
            for part, usage in parts.items():
                peaks[part] = usage.maximum(peaks.get(part, MemoryUsage()))


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
