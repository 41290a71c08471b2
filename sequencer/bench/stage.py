"""A cluster with publishers and subscribers, all as processes, for one measurement.

Invariants:
- Nothing is left at the end. After a failure one file keeps the logs of all processes; the error names it.
- A wait fails only if there is no progress for `STILL_S`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

from msgspec import Struct

from rt.bench.processes import MemoryUsage, ProcessTable, context_switches, memory
from rt.errors import RtError, Timeout
from rt.net.rest_client import ask, check
from sequencer.localcluster.clients import client_settings
from sequencer.localcluster.nodes import LocalCluster, Part
from sequencer.localcluster.processes import Process, nothing_left

STREAM: Final = "bench"
PARTS: Final[tuple[Part, ...]] = ("control", "data")
"""The processes of a node below its supervisor."""
STILL_S: Final = 60.0
"""A wait without progress for this long fails."""
_TOGETHER: Final = 50
"""Maximum number of publishers in one process."""
_ASK_S: Final = 120.0
_POLL_S: Final = 0.1
_LOG_BYTES_MAX: Final = 1 << 20
"""Size of the end of each log that is kept after a failure."""


class ClusterProgress(Struct, frozen=True):
    majority: int
    """Position up to which a majority of the nodes has merged."""
    received: tuple[int, ...]
    """Messages that each subscriber has received."""
    rounds: int
    """Merge instructions that are committed."""
    cpu_s: dict[str, float]
    """CPU time by kind of process."""
    switches: int
    """Context switches of all processes that run."""


class Stage:
    """A cluster, its publishers and its subscribers. `opened` ends the processes that the stage starts."""

    def __init__(self, root: Path, nodes: LocalCluster, opened: contextlib.ExitStack) -> None:
        self.nodes = nodes
        self.names: list[str] = []
        """The names of the publishers, which are also the names of their sessions."""
        self._root, self._opened = root, opened
        self._publishers: list[Process] = []
        self.subscribers: list[Process] = []

    @property
    def published_root(self) -> Path:
        """The directory below which each publisher has its session."""
        return self._root / "published"

    def copy_root(self, number: int) -> Path:
        """The directory below which the subscriber of that number has its copy of the merged log."""
        return self._root / f"reader{number}"

    def start_publishers(self, count: int, value_bytes: int) -> None:
        """Start publishers. They publish nothing yet."""
        for first in range(0, count, _TOGETHER):
            names = [f"p{number}" for number in range(first, min(first + _TOGETHER, count))]
            each = [client_settings(self.nodes, "publisher", name, self.published_root) for name in names]
            settings = {"publishers": each, "value_bytes": value_bytes}
            self._publishers.append(self._start_child(settings, "publishers"))
            self.names += names

    def start_subscribers(self, count: int) -> None:
        """Start subscribers, each with a copy of its own. They read everything."""
        for number in range(count):
            root = self.copy_root(number)
            settings = client_settings(self.nodes, "subscriber", root.name, root)
            self.subscribers.append(self._start_child({"subscriber": settings}, root.name))

    # Publishing

    def ask(self, do: str, *, timeout_s: float = _ASK_S, **arguments: float) -> list[int]:
        """Request something of all publishers at once. Returns their counts, in the order of `names`."""
        for process in self._publishers:
            process.post(do, **arguments)
        answers = [process.answer(timeout_s) for process in self._publishers]
        return [count for answer in answers for count in answer.get("counts", [])]

    def merged(self) -> list[int]:
        return self.ask("merged")

    def published(self) -> list[int]:
        return self.ask("published")

    def stop(self) -> dict[str, int]:
        return dict(zip(self.names, self.ask("stop"), strict=True))

    # Measuring

    def progress(self) -> ClusterProgress:
        ends = sorted(map(self.nodes.merged_position, self.nodes.names))
        received = tuple(int(one.ask("received")["count"]) for one in self.subscribers)
        table = ProcessTable()
        switches = sum(map(context_switches, self._pids(table)))
        return ClusterProgress(
            ends[(len(ends) - 1) // 2], received, self._rounds(), self._cpu_s(table), switches
        )

    def memory(self) -> dict[str, dict[str, MemoryUsage]]:
        """Memory of each process of each running node, by node and part."""
        found: dict[str, dict[str, MemoryUsage]] = {}
        for name in self.nodes.running:
            found[name] = {"supervisor": memory(self.nodes.pids(name)[0])}
            for part in PARTS:
                for pid in self.nodes.pids(name, part):
                    found[name][part] = memory(pid)
        return found

    def peak_mb(self) -> float:
        """Peak memory of the largest process of a node."""
        return max(one.peak_mb for parts in self.memory().values() for one in parts.values())

    def push_peak_mb(self) -> float:
        """Peak memory of the largest push process."""
        table = ProcessTable()
        return max(memory(push).peak_mb for one in self._publishers for push in table.children(one.pid))

    # Waiting

    def wait_for(self, count: Callable[[], float], end: int, what: str) -> None:
        """Wait until `count()` reaches `end`. `rt.Timeout`: no progress; `ProcessEnded`: a node ended."""
        best, since = -1.0, time.monotonic()
        while (now := count()) < end:
            self.nodes.check_alive()
            if now > best:
                best, since = now, time.monotonic()
            elif time.monotonic() - since > STILL_S:
                raise Timeout(f"{what}: no more for {STILL_S:g} s", got=f"{best:,}", expected=f"{end:,}")
            time.sleep(_POLL_S)

    def wait_merged(self, end: int, *names: str) -> None:
        """Wait until the merged logs of these nodes (default: all) contain all positions below `end`."""
        for name in names or self.nodes.names:
            self.wait_for(partial(self.nodes.merged_position, name), end, f"{name} merges")

    def rest(self, target: str, body: object = None) -> Any:
        """The answer of a running node to a GET request, or to a POST request if there is a body."""
        tls = self.nodes.certificate("operator", "bench")
        endpoints = [f"127.0.0.1:{self.nodes.data_ports[name]}" for name in self.nodes.running]
        method, data = ("GET", None) if body is None else ("POST", json.dumps(body).encode())
        return json.loads(check(asyncio.run(ask(endpoints, tls, method, target, data))).body)

    def _rounds(self) -> int:
        return int(self.rest("/status")["committed"]["instruction"])

    def _pids(self, table: ProcessTable) -> Iterator[int]:
        """All processes that take part."""
        for name in self.nodes.names:
            for part in PARTS:
                yield from self.nodes.pids(name, part)
        for process in (*self._publishers, *self.subscribers):
            yield process.pid
            yield from table.children(process.pid)

    def _cpu_s(self, table: ProcessTable) -> dict[str, float]:
        nodes = self.nodes
        publishers = [process.pid for process in self._publishers]
        used: dict[str, float] = {
            part: sum(table.cpu_s(pid) for name in nodes.names for pid in nodes.pids(name, part))
            for part in PARTS
        }
        used["publishers"] = sum(map(table.cpu_s, publishers))
        used["pushes"] = sum(map(table.descendants_cpu_s, publishers))
        if readers := [process.pid for process in self.subscribers]:
            used["subscribers"] = sum(map(table.cpu_s, readers))
            used["pulls"] = sum(map(table.descendants_cpu_s, readers))
        supervisors_s = sum(table.cpu_s(nodes.pids(name)[0]) for name in nodes.names)
        return used | {"all processes": sum(used.values()) + supervisors_s}

    def _start_child(self, settings: Mapping[str, Any], name: str) -> Process:
        stderr = self._root / f"{name}.{len(self._publishers)}.log"
        process = Process("sequencer.bench.traffic", settings, stderr)
        self._opened.callback(process.kill)
        process.ask("begun", timeout_s=_ASK_S)
        return process


class Setup(Struct, frozen=True):
    """Settings of a stage: `nodes` nodes in `directory` (default: the system's temporary directory)."""

    directory: str | None
    nodes: int

    @contextlib.contextmanager
    def open(self, *, spare: int = 0) -> Iterator[Stage]:
        """A stage whose nodes are ready. Leaving it ends everything. `spare` more nodes are not started."""
        with (
            tempfile.TemporaryDirectory(prefix="rt", dir=self.directory) as root,
            logs_kept(Path(root), self.directory),
            nothing_left(),
            LocalCluster(Path(root), self.nodes + spare, stream=STREAM, begin=self.nodes) as nodes,
            contextlib.ExitStack() as opened,
        ):
            nodes.start(*nodes.first)
            nodes.wait_ready()
            yield Stage(Path(root), nodes, opened)


@contextlib.contextmanager
def logs_kept(root: Path, directory: str | None) -> Iterator[None]:
    """Shorten an `rt.RtError` to one line that names a file in `directory` with all logs of `root`."""
    try:
        yield
    except RtError as error:
        lines = str(error.got).splitlines()
        if len(lines) > 1:
            # `got` has the status and the end of the log of each node, or of the node that ended.
            error.got = None if isinstance(error, Timeout) else f"{lines[0]} ... {lines[-1]}"
        error.hint = f"The logs of all processes are in {_keep_logs(root, directory)}"
        raise


def _keep_logs(root: Path, directory: str | None) -> str:
    with tempfile.NamedTemporaryFile(
        "wb", prefix="rt-bench-", suffix=".log", dir=directory, delete=False
    ) as kept:
        for log in sorted(root.glob("*.log")):
            kept.write(f"==> {log.name} <==\n".encode())
            with log.open("rb") as file:
                file.seek(max(0, log.stat().st_size - _LOG_BYTES_MAX))
                kept.write(file.read() + b"\n")
        return kept.name
