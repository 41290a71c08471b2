"""The speed of the whole transport: real nodes, publishers and a subscriber, each in processes of their own.

Everything is synced before it is acknowledged; every hop is mutual TLS on the loopback. Throughput is what
a majority of the nodes has merged within the time that counts; the publishers never run further ahead than
`LEAD_BYTES` of what is merged, so it is sustained. Latency is from the call of `publish` to the hands of the
subscriber, on the machine's one clock.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias, get_args

import numpy as np

from rt.bench.measure import Figure
from sequencer.testing.leftovers import nothing_left
from sequencer.testing.nodes import Nodes
from sequencer.testing.processes import Process

Part: TypeAlias = Literal["throughput", "latency", "failover", "many"]
PARTS: Final[tuple[Part, ...]] = get_args(Part)

LEAD_BYTES: Final = 64 << 20
GOALS: Final = {1024: 120.0, 128: 51.2}
"""MB/s of value bytes; at 128 bytes 400,000 messages/s."""
_WARM_UP_S: Final = 3.0
_LOOK_S: Final = 0.1
_TICKS: Final = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class TransportBench:
    """One run below `directory`: `publishers` send `value_bytes` each to `nodes` nodes for `seconds`."""

    directory: str | None
    nodes: int = 3
    publishers: int = 4
    value_bytes: Sequence[int] = (1024, 128)
    seconds: float = 30.0
    rate_hz: float = 1000.0
    failovers: int = 20
    many: int = 200
    parts: Sequence[Part] = PARTS

    def run(self, on_figure: Callable[[Figure], None]) -> None:
        """Measure; hand out each figure as it is known, and leave nothing behind."""
        measures: dict[Part, Callable[[], Iterator[Figure]]] = {
            "throughput": self._throughput,
            "latency": self._latency,
            "failover": self._failover,
            "many": self._many,
        }
        for part in self.parts:
            for figure in measures[part]():
                on_figure(figure)

    def _throughput(self) -> Iterator[Figure]:
        for value_bytes in self.value_bytes:
            with self._stage() as stage:
                stage.publishers(self.publishers, value_bytes)
                stage.subscriber()
                stage.ask("flood", lead_bytes=LEAD_BYTES // self.publishers)
                time.sleep(_WARM_UP_S)
                before, begun = stage.standing(), time.monotonic()
                time.sleep(self.seconds)
                after, lasted_s = stage.standing(), time.monotonic() - begun
                mb = (after.majority - before.majority) * value_bytes / 1e6
                name = f"{self.nodes} nodes, {self.publishers} publishers of {value_bytes} B"
                goal = GOALS.get(value_bytes)
                yield Figure(f"{name}: merged on a majority", (mb / lasted_s,), "MB/s", goal)
                rate = mb / lasted_s / value_bytes * 1e6
                yield Figure(f"{name}: messages", (rate,), "messages/s")
                received = (after.received - before.received) * value_bytes / 1e6
                yield Figure(f"{name}: received by a subscriber", (received / lasted_s,), "MB/s")
                for who in after.cpu_s:
                    cpu_s = after.cpu_s[who] - before.cpu_s[who]
                    yield Figure(f"{name}: CPU of {who}", (cpu_s / max(mb, 1e-9) * 1000,), "s/GB")
                yield Figure(f"{name}: most memory of a node process", (stage.peak_mb(),), "MB")

    def _latency(self) -> Iterator[Figure]:
        with self._stage() as stage:
            stage.publishers(1, 1024)
            stage.subscriber()
            stage.ask("drip", rate_hz=self.rate_hz)
            time.sleep(_WARM_UP_S)
            stage.subscribed.ask("forget")
            time.sleep(self.seconds)
            took_ns: list[int] = []
            while not took_ns:  # On a busy machine the first may take longer than that.
                stage.nodes.check_alive()
                time.sleep(_LOOK_S)
                took_ns = stage.subscribed.ask("latencies")["ns"]
            latencies_ms = np.array(took_ns) / 1e6
            name = f"{self.nodes} nodes, 1 KiB at {self.rate_hz:g} messages/s: publish to subscriber"
            for percent, goal in ((50, 5.0), (99, 25.0)):
                yield Figure(
                    f"{name}, p{percent}", (float(np.percentile(latencies_ms, percent)),), "ms", goal
                )

    def _failover(self) -> Iterator[Figure]:
        with self._stage() as stage:
            stage.publishers(self.publishers, 1024)
            stage.ask("flood", lead_bytes=LEAD_BYTES // self.publishers, rate_mb=5.0)
            time.sleep(_WARM_UP_S)
            gaps = [stage.kill_leader() for _ in range(self.failovers)]
            name = f"{self.nodes} nodes: leader killed under load until merges go on"
            yield Figure(name, (statistics.median(gaps),), "s", 2.0)
            yield Figure(f"{name}, the longest of {len(gaps)}", (max(gaps),), "s")

    def _many(self) -> Iterator[Figure]:
        with self._stage() as stage:
            stage.publishers(self.many, 1024)
            stage.ask("flood", lead_bytes=LEAD_BYTES // self.many)
            time.sleep(2 * _WARM_UP_S)
            before, begun = stage.merged(), time.monotonic()
            time.sleep(self.seconds)
            merged = [after - first for after, first in zip(stage.merged(), before, strict=True)]
            lasted_s = time.monotonic() - begun
            name = f"{self.nodes} nodes, {self.many} publishers of 1 KiB"
            yield Figure(f"{name}: merged", (sum(merged) * 1024 / 1e6 / lasted_s,), "MB/s")
            least = min(merged) / max(statistics.mean(merged), 1e-9)
            yield Figure(f"{name}: the slowest against the mean", (least,), "x")
            yield Figure(f"{name}: most memory of a node process", (stage.peak_mb(),), "MB")

    @contextlib.contextmanager
    def _stage(self) -> Iterator[Stage]:
        with (
            tempfile.TemporaryDirectory(prefix="rt", dir=self.directory) as root,
            nothing_left(),
            Nodes(Path(root), self.nodes, stream="bench") as nodes,
            contextlib.ExitStack() as opened,
        ):
            nodes.start()
            nodes.wait_ready()
            yield Stage(Path(root), nodes, opened)


@dataclass(frozen=True, slots=True)
class Standing:
    """How far everything is at one moment."""

    majority: int
    """The position that a majority of the nodes has merged."""
    received: int
    """Messages that the subscriber has had."""
    cpu_s: dict[str, float]
    """Processor time used, by kind of process."""


class Stage:
    """A cluster, its publishers and its subscriber."""

    def __init__(self, root: Path, nodes: Nodes, opened: contextlib.ExitStack) -> None:
        self.nodes = nodes
        self._root, self._opened = root, opened
        self._publishers: list[Process] = []
        self._subscribed: Process | None = None

    @property
    def subscribed(self) -> Process:
        """The subscriber's process."""
        assert self._subscribed is not None
        return self._subscribed

    def publishers(self, count: int, value_bytes: int) -> None:
        """Start publishers; one process holds up to 25 of them."""
        for first in range(0, count, 25):
            names = [f"p{number}" for number in range(first, min(first + 25, count))]
            tls = [self.nodes.certificate("publisher", name) for name in names]
            settings = {
                "kind": "publishers",
                "root": str(self._root / "published"),
                "names": names,
                "tls": [[str(one.ca), str(one.cert), str(one.key)] for one in tls],
                "endpoints": self.nodes.endpoints,
                "value_bytes": value_bytes,
            }
            self._publishers.append(self._child(settings, "publishers"))

    def subscriber(self) -> None:
        """Start a subscriber that reads everything."""
        tls = self.nodes.certificate("subscriber", "reader")
        settings = {
            "kind": "subscriber",
            "root": str(self._root / "subscribed"),
            "tls": [str(tls.ca), str(tls.cert), str(tls.key)],
            "endpoints": self.nodes.endpoints,
        }
        self._subscribed = self._child(settings, "subscriber")

    def ask(self, do: str, **arguments: float) -> None:
        """Have all publishers do something."""
        for process in self._publishers:
            process.ask(do, timeout_s=120.0, **arguments)

    def merged(self) -> list[int]:
        """Messages of each publisher that are merged."""
        return [count for process in self._publishers for count in process.ask("merged")["counts"]]

    def standing(self) -> Standing:
        """How far everything is."""
        ends = sorted(self.nodes.merged_position(name) for name in self.nodes.names)
        received = int(self._subscribed.ask("received")["count"]) if self._subscribed is not None else 0
        cpu_s = {
            "the nodes": sum(_cpu_s(pid) for name in self.nodes.names for pid in self.nodes.pids(name)),
            "publishers and pushes": sum(_tree_cpu_s(process.pid) for process in self._publishers),
        }
        if self._subscribed is not None:
            cpu_s["the subscriber and its pull"] = _tree_cpu_s(self._subscribed.pid)
        return Standing(ends[(len(ends) - 1) // 2], received, cpu_s)

    def kill_leader(self) -> float:
        """Kill the node that leads; seconds until more is merged. It is started again."""
        nodes = self.nodes
        leader = nodes.wait_ready()
        others = [name for name in nodes.names if name != leader]
        before = sum(self.merged())
        begun = time.monotonic()
        nodes.kill(leader)
        nodes.wait(lambda: sum(self.merged()) > before + 1000, "merges to go on")
        gap = time.monotonic() - begun
        nodes.start(leader)
        end = max(nodes.merged_position(name) for name in others)
        nodes.wait_merged(end, leader)
        return gap

    def peak_mb(self) -> float:
        """The most memory that a process of a node ever had."""
        pids = [pid for name in self.nodes.names for pid in self.nodes.pids(name)]
        return max(_peak_kb(pid) for pid in pids) * 1024 / 1e6

    def _child(self, settings: Mapping[str, Any], name: str) -> Process:
        stderr = self._root / f"{name}.{len(self._publishers)}.log"
        process = Process("sequencer.bench.traffic", settings, stderr)
        self._opened.callback(process.kill)
        process.ask("begun", timeout_s=120.0)
        return process


def _cpu_s(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:15])) / _TICKS


def _tree_cpu_s(pid: int) -> float:
    """Of a process and of those that it started."""
    with contextlib.suppress(OSError):
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return _cpu_s(pid) + sum(_tree_cpu_s(int(child)) for child in children)
    return 0.0


def _peak_kb(pid: int) -> int:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1])
    return 0
