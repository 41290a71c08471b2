"""`rt bench soak`: a cluster, publishers and subscribers under random faults, and a verdict at the end.

Rules: The seed decides the kinds and times of the faults, not the scheduling of the processes. The verdict
comes after everything is healed and idle. If a soak finds a problem, it keeps all directories, logs and
notes. Otherwise it deletes them.
"""

from __future__ import annotations

import heapq
import itertools
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Collection, Generator, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from chaos.soak_acts import HOLD_LIMIT_BYTES, LIMIT_BYTES, ROLL_BYTES, Acts
from chaos.soak_cast import SoakPublisher, SoakSubscriber
from chaos.soak_faults import KINDS, Kind, draw_faults
from chaos.soak_judge import MemorySample, growth, judge, judge_disk, judge_memory
from chaos.soak_notes import Run, Skipped
from chaos.wired_nodes import CLIENTS, WiredNodes
from rt.bench.measure import Figure
from rt.bench.processes import memory, read_stat
from rt.errors import Diverged, RtError, Timeout
from sequencer.localcluster.nodes import Part, differences
from sequencer.localcluster.processes import ProcessEnded, nothing_left

STREAM: Final = "soak"
_RATE_HZ: Final = 150.0
"""Rate of each publisher. A soak tests faults, not speed."""
_LOOK_S: Final = 0.05
_SAMPLE_S: Final = 1.0
_REST_S: Final = 180.0
"""Longest wait after the last fault until everything is merged on all nodes."""
_PARTS: Final[tuple[Part, ...]] = ("control", "data")
_TOLD_MAX: Final = 20


@dataclass(frozen=True, slots=True)
class Soak:
    """One run of `seconds`, with `nodes` nodes and `publishers` publishers below `directory`."""

    directory: str | None
    seed: int
    seconds: float = 60.0
    nodes: int = 3
    publishers: int = 3
    kinds: Collection[Kind] = KINDS

    def figures(self) -> Generator[Figure, None, None]:
        """Run and judge. Raise `rt.Diverged` if a promise was broken, `rt.Timeout` if it never comes to rest.

        The error reports the seed and the directory that is kept.
        """
        root = Path(tempfile.mkdtemp(prefix="rt", dir=self.directory))
        try:
            with nothing_left(), WiredNodes(root, self.nodes, stream=STREAM) as nodes:
                yield from Play(self, nodes).figures()
        except RtError as error:
            error.hint = f"The seed is {self.seed}; logs, notes and directories are in {root}"
            raise
        shutil.rmtree(root)


class Play:
    """Everything between the start of the nodes and the verdict."""

    def __init__(self, soak: Soak, nodes: WiredNodes) -> None:
        self._soak, self._nodes = soak, nodes
        self._publishers = [SoakPublisher(nodes, f"p{at}", _RATE_HZ) for at in range(1, soak.publishers + 1)]
        self._subscribers = [
            SoakSubscriber(nodes, "named", is_named=True),
            SoakSubscriber(nodes, "follows"),
            SoakSubscriber(nodes, "stops"),
            SoakSubscriber(nodes, "own", retention="own"),
        ]
        self._acts = Acts(nodes, self._publishers, self._subscribers, soak.seed)
        self._memory: dict[str, list[MemorySample]] = {}
        self._kept: dict[str, int] = {}
        self._journal = nodes.root / "faults.log"
        self._begun = self._sample_at = time.monotonic()

    def figures(self) -> Iterator[Figure]:
        """Run all phases and yield the figures. Raise `rt.Diverged` after the figures if a promise was
        broken.
        """
        self._begin()
        self._play()
        self._heal()
        end = self._rest()
        broken = list(self._verdict(end))
        yield from self._told(end)
        yield Figure("soak: promises broken", (len(broken),), "", 0)
        if broken:
            for sentence in broken:
                self._note(f"broken: {sentence}")
            raise Diverged("promises were broken", got="; ".join(broken[:_TOLD_MAX]))

    # The run

    def _begin(self) -> None:
        nodes = self._nodes
        nodes.start()
        nodes.wait_ready()
        nodes.wait(lambda: self._acts.configure(ROLL_BYTES[1], LIMIT_BYTES[1]), "the configuration")
        for part in [*self._subscribers, *self._publishers]:
            part.start()
        for part in [*self._subscribers, *self._publishers]:
            part.ask("begun")
        nodes.wait(lambda: min(one.position for one in self._subscribers) > 0, "messages to flow")
        self._begun = time.monotonic()

    def _play(self) -> None:
        soak, order = self._soak, itertools.count()
        faults = list(
            draw_faults(
                soak.seed,
                soak.seconds,
                nodes=soak.nodes,
                publishers=soak.publishers,
                subscribers=len(self._subscribers),
                kinds=soak.kinds,
            )
        )
        undoing: list[tuple[float, int, str, Callable[[], None]]] = []
        while (now_s := time.monotonic() - self._begun) < soak.seconds:
            self._check()
            self._sample(now_s)
            while undoing and undoing[0][0] <= now_s:
                _, _, what, undo = heapq.heappop(undoing)
                self._note(f"undo {what}")
                undo()
            if faults and faults[0].at_s <= now_s:
                fault = faults.pop(0)
                undo_it = self._acts.begin(fault)
                self._note(f"{'left out' if undo_it is None else 'did'} {fault}")
                if undo_it is not None:
                    # The time counts from now, because the fault itself may have taken a while.
                    until_s = time.monotonic() - self._begun + fault.lasts_s
                    heapq.heappush(undoing, (until_s, next(order), str(fault), undo_it))
            time.sleep(_LOOK_S)
        while undoing:
            heapq.heappop(undoing)[3]()

    def _heal(self) -> None:
        self._note("heals")
        nodes = self._nodes
        for end in [*nodes.names, CLIENTS]:
            nodes.heal(end)
        nodes.wait_ready(timeout_s=_REST_S)

    def _rest(self) -> int:
        """Wait until everything is merged, read and trimmed as configured. Return the end of the merged
        log.
        """
        nodes = self._nodes
        for publisher in self._publishers:
            publisher.ask("finish")
        for publisher in self._publishers:
            self._wait(partial(_is_merged, publisher), f"what {publisher.name} published to be merged")
        for publisher in self._publishers:
            publisher.close(0)
        end = max(map(nodes.merged_position, nodes.names))
        self._note(f"all is merged, up to {end}")
        self._wait(lambda: min(map(nodes.merged_position, nodes.names)) >= end, "all nodes to have merged it")
        for subscriber in self._subscribers:
            self._wait(partial(_has_read, subscriber, end), f"{subscriber.name} to have read it")
        self._note("all is read")
        self._wait(self._is_trimmed, "the log to be trimmed as configured")
        for subscriber in self._subscribers:
            subscriber.close()
        return max(map(nodes.merged_position, nodes.names))

    def _is_trimmed(self) -> bool:
        bound = self._configured_bytes() + max(ROLL_BYTES)
        return all(kept_bytes(self._nodes.merged_directory(name)) <= bound for name in self._nodes.names)

    def _configured_bytes(self) -> int:
        answer = self._acts.asked("/configuration")
        if answer is None or answer.status != 200:
            return 0
        return int(json.loads(answer.body)["retentionBytes"])

    def _wait(self, is_met: Callable[[], object], what: str) -> None:
        deadline = time.monotonic() + _REST_S
        while not is_met():
            self._check()
            self._sample(time.monotonic() - self._begun)
            if time.monotonic() > deadline:
                raise Timeout(f"waited {_REST_S:g} s for {what}")
            time.sleep(_LOOK_S)

    def _check(self) -> None:
        """Raise `ProcessEnded` if a process ended without a fault."""
        self._nodes.check_alive()
        for part in [*self._publishers, *self._subscribers]:
            if part.process is not None and part.process.status is not None:
                raise ProcessEnded(
                    "a process ended by itself", where=part.name, got=part.process.last_words(500)
                )

    # Measuring

    def _sample(self, now_s: float) -> None:
        if time.monotonic() < self._sample_at:
            return
        self._sample_at = time.monotonic() + _SAMPLE_S
        for name in self._nodes.names:
            kept = kept_bytes(self._nodes.merged_directory(name))
            self._kept[name] = max(kept, self._kept.get(name, 0))
        for name in self._nodes.running:
            for part in _PARTS:
                for pid in self._nodes.pids(name, part):
                    sample = MemorySample((now_s, _age_s(pid), memory(pid).anonymous_mb))
                    self._memory.setdefault(f"{name} {part}", []).append(sample)

    def _verdict(self, end: int) -> Iterator[str]:
        nodes, soak = self._nodes, self._soak
        published = [life for one in self._publishers for life in one.published]
        received = [life for one in self._subscribers for life in one.received]
        yield from judge(published, received, end)
        # A copy with its own retention has gaps where its subscriber skipped. The nodes' logs have none.
        whole = [one.copy for one in self._subscribers if one.is_trimmed_as_nodes or not one.has_skipped]
        yield from differences(nodes.compare(*whole), end)
        yield from judge_memory(self._memory, soak.seconds)
        bound = max(LIMIT_BYTES) + HOLD_LIMIT_BYTES + max(ROLL_BYTES)
        yield from judge_disk(self._kept, bound, "the merged log")
        reset = self._acts.asked("/reset-status")
        if reset is None or reset.status != 200 or json.loads(reset.body)["state"] == "failed":
            yield f"a reset did not come to its end: {reset}"

    def _told(self, end: int) -> Iterator[Figure]:
        done, left_out = self._acts.done, self._acts.left_out
        yield Figure("soak: messages merged", (end,), "messages")
        yield Figure("soak: faults", (done.total(),), "")
        yield Figure("soak: faults left out, their victim being busy", (left_out.total(),), "")
        for kind in KINDS:
            if done[kind]:
                yield Figure(f"soak: {kind}", (done[kind],), "times")
        lives = [life for one in self._subscribers for life in one.received]
        items = [item for life in lives for item in life.items]
        yield Figure(
            "soak: messages read by subscribers",
            (sum(item.count for item in items if isinstance(item, Run)),),
            "messages",
        )
        yield Figure("soak: skips forward", (sum(isinstance(item, Skipped) for item in items),), "")
        for process, samples in sorted(self._memory.items()):
            most = max(mb for _, _, mb in samples)
            yield Figure(f"soak: most memory of {process}, its own", (most,), "MB")
            if (medians := growth(samples, self._soak.seconds)) is not None:
                yield Figure(f"soak: growth of {process} in the last third", (medians[1] - medians[0],), "MB")
        yield Figure(
            "soak: most bytes of a merged log", tuple(size / 1e6 for size in self._kept.values()), "MB"
        )

    def _note(self, text: str) -> None:
        with self._journal.open("a") as file:
            file.write(f"{time.monotonic() - self._begun:.1f} {text}\n")


def _age_s(pid: int) -> float:
    stat = read_stat(pid)
    return 0.0 if stat is None else time.clock_gettime(time.CLOCK_BOOTTIME) - stat.started_s


def _is_merged(publisher: SoakPublisher) -> bool:
    return bool(publisher.ask("merged")["is_merged"])


def _has_read(subscriber: SoakSubscriber, end: int) -> bool:
    return subscriber.position >= end


def kept_bytes(directory: Path) -> int:
    """Return the size of a log's segments on the disk in bytes; 0 if there is no log."""
    size = 0
    try:
        for entry in os.scandir(directory):
            if entry.name.startswith("log."):
                size += _size(entry)
    except FileNotFoundError:
        pass
    return size


def _size(entry: os.DirEntry[str]) -> int:
    try:
        return entry.stat().st_size
    except FileNotFoundError:  # It was trimmed meanwhile.
        return 0
