"""The time that a message spends in each stage, from `publish` to the subscriber. One message is on its way
at a time.

A stage ends with a write to a log file of some process. The kernel reports each write to the watcher
(inotify), so no process of rt does anything for the measurement. The wake-ups of the watcher delay the other
processes a little.
"""

from __future__ import annotations

import contextlib
import statistics
import threading
import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Final, Self

from inotify_simple import INotify, flags

from rt.bench.measure import Figure
from rt.log.scan.directory import merged_directory, session_directory
from sequencer.bench.stage import STREAM, Setup, Stage

RATE_HZ: Final = 10.0
"""Messages a second: each message has passed all stages before the next is published."""
_WARM_UP_S: Final = 3.0
_READ_MS: Final = 200

STAGES: Final = (
    "in the publisher's log",
    "in the session copies of a majority",
    "in the Raft logs of a majority",
    "in a merged log",
    "in the subscriber's copy",
    "received",
)
"""Where a message is at the end of each stage. In a Raft log, this is the instruction that merges the
message.
"""


def stages(setup: Setup, *, seconds: float, rounds: int) -> Iterator[Figure]:
    """The median of each stage, and of all together."""
    with setup.open() as stage:
        stage.start_publishers(1, 1024)
        stage.start_subscribers(1)
        stage.ask("drip", rate_hz=RATE_HZ)
        time.sleep(_WARM_UP_S)
        stage.wait_for(lambda: min(stage.progress().received), 1, "the subscriber receives")
        stage.wait_merged(1)  # Each node has a merged log to watch.
        found = [_medians_ms(stage, seconds) for _ in range(rounds)]
    name = f"{setup.nodes} nodes, one message of 1 KiB"
    for what, each in zip((*STAGES, "all stages"), zip(*found, strict=True), strict=True):
        yield Figure(f"{name}: {what}", each, "ms")


def _medians_ms(stage: Stage, seconds: float) -> list[float]:
    """The median length of each stage, and of all together."""
    (subscriber,) = stage.subscribers
    with WriteTimes(_log_directories(stage)) as writes:
        subscriber.ask("forget")
        time.sleep(seconds)
        stage.wait_for(lambda: len(subscriber.ask("times")["published_ns"]), 1, "messages that are timed")
        times = subscriber.ask("times")
    if places := writes.unwritten():
        raise RuntimeError(f"no write was seen in {', '.join(places)}: the watcher has wrong directories")
    lengths_ns = [
        lengths_of(begun_ns, [*_writes_ns(writes, stage.nodes.names, begun_ns, end_ns), end_ns])
        for begun_ns, end_ns in zip(times["published_ns"], times["received_ns"], strict=True)
    ]
    return [statistics.median(each) / 1e6 for each in zip(*lengths_ns, strict=True)]


def lengths_of(begun_ns: int, ends_ns: Sequence[int]) -> list[int]:
    """The length of each stage, and of all stages together. A stage that ended before its previous stage
    takes no time.
    """
    reached = list(accumulate([begun_ns, *ends_ns], max))
    return [end - begin for begin, end in pairwise(reached)] + [reached[-1] - begun_ns]


def _writes_ns(writes: WriteTimes, nodes: Sequence[str], begun_ns: int, received_ns: int) -> list[int]:
    """When each stage of one message ended, except the last stage."""

    def first(*place: str) -> int:
        return writes.first(" ".join(place), begun_ns, received_ns)

    majority = len(nodes) // 2
    return [
        first("publisher"),
        sorted(first("session", node) for node in nodes)[majority],
        sorted(first("raft", node) for node in nodes)[majority],
        min(first("merged", node) for node in nodes),
        first("subscriber"),
    ]


def _log_directories(stage: Stage) -> dict[str, list[str]]:
    """The directories of log files, by the name of the place that a stage writes to."""
    (name,) = stage.names
    found = {
        "publisher": [session_directory(stage.published_root, STREAM, name)],
        "subscriber": [merged_directory(stage.copy_root(0), STREAM)],
    }
    for node in stage.nodes.names:
        root = stage.nodes.directory(node)
        replicas = Path(session_directory(root, STREAM, ""))
        found[f"session {node}"] = [str(replica) for replica in replicas.glob("*/")]
        found[f"raft {node}"] = [str(root / "raft")]
        found[f"merged {node}"] = [str(stage.nodes.merged_directory(node))]
    return found


class WriteTimes:
    """Notes the time of each write to a file `log.*` of some directories, by the name of their place."""

    def __init__(self, directories: Mapping[str, Sequence[str]]) -> None:
        self._times: dict[str, list[int]] = defaultdict(list)
        self._places: dict[int, str] = {}
        self._inotify = INotify()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._read, daemon=True)
        with contextlib.ExitStack() as failed:
            failed.callback(self._inotify.close)
            for place, paths in directories.items():
                for path in paths:
                    watch = self._inotify.add_watch(path, flags.MODIFY | flags.ONLYDIR)
                    self._places[watch] = place
            failed.pop_all()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stopping.set()
        self._thread.join()
        self._inotify.close()

    def first(self, place: str, begun_ns: int, otherwise_ns: int) -> int:
        """The time of the first write since `begun_ns`; `otherwise_ns` if there is no write before
        `otherwise_ns`.
        """
        times = self._times[place]
        at = bisect_left(times, begun_ns)
        return min(times[at], otherwise_ns) if at < len(times) else otherwise_ns

    def unwritten(self) -> list[str]:
        """The places that had no write. Call it after the watch has ended."""
        return sorted({*self._places.values()} - {place for place, times in self._times.items() if times})

    def _read(self) -> None:
        stopping = False
        while not stopping:
            stopping = self._stopping.is_set()  # The last read takes what was written before the end.
            for event in self._inotify.read(timeout=0 if stopping else _READ_MS):
                if event.name.startswith("log."):
                    self._times[self._places[event.wd]].append(time.time_ns())
