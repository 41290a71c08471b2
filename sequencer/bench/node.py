"""A node of a benchmark: makes load on request, and measures what a caller sees.

`python -m sequencer.bench.node '<settings as JSON>'`.
"""

from __future__ import annotations

import itertools
import json
import logging
import math
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Final

from msgspec import to_builtins

from rt.errors import Closed, Overloaded
from rt.net.tls import TLS
from sequencer.localcluster.processes import Answer, serve
from sequencer.raft.model.config import RaftConfig
from sequencer.raft.raft import Raft

GROW: Final = b"g"
"""First byte of a command that the state keeps. Other commands leave nothing."""
_GROW_BYTES: Final = 512 * 1024
_OVERLOADED_PAUSE_S: Final = 0.001


class BenchState:
    """A cheap state machine. `GROW` commands make its state larger."""

    def __init__(self) -> None:
        self.index = 0
        self._parts: list[bytes] = []
        self._awaited = math.inf
        self._reached = threading.Event()

    def apply(self, index: int, command: bytes) -> None:
        self.index = index
        if command[:1] == GROW:
            self._parts.append(command)
        if index >= self._awaited:
            self._reached.set()

    def snapshot(self) -> Callable[[], bytes]:
        parts = tuple(self._parts)
        return lambda: b"".join(parts)

    def digest(self) -> bytes:
        return self.index.to_bytes(8, "little")

    def check(self, state: bytes) -> None:
        """Accept every state: there is only one version."""

    def restore(self, index: int, state: bytes, _cluster: bytes = b"") -> None:
        self.index, self._parts = index, [state] if state else []
        if index >= self._awaited:
            self._reached.set()

    def reach(self, index: int, within_s: float) -> bool:
        """Wait until command `index` is applied. False if it was not applied in time."""
        self._reached.clear()
        self._awaited = index
        is_reached = self.index >= index or self._reached.wait(within_s)
        self._awaited = math.inf
        return is_reached


class Probe:
    """Commits small commands one after the other, in a thread, and notes when each started and ended."""

    def __init__(self, raft: Raft) -> None:
        self._raft = raft
        self._done: list[tuple[float, float]] = []
        self._changed = threading.Condition()
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name="probe", daemon=True)
        self._thread.start()

    def first_after(self, since: float, within_s: float) -> float | None:
        """When the first command that started at `since` or later ended. None if no such command ended in
        time.
        """
        with self._changed:
            self._changed.wait_for(lambda: bool(self._done) and self._done[-1][0] >= since, within_s)
            return next((done for begun, done in self._done if begun >= since), None)

    def stop(self) -> None:
        self._is_stopping = True
        self._thread.join()

    def _run(self) -> None:
        while not self._is_stopping:
            begun = time.monotonic()
            try:
                self._raft.propose(b"probe").result()
            except Closed:
                return
            with self._changed:
                self._done.append((begun, time.monotonic()))
                self._changed.notify_all()


def load(raft: Raft, *, size: int, in_flight: int, seconds: float) -> Answer:
    """Keep `in_flight` commands of `size` bytes in flight. Returns count, CPU time and latencies."""
    command = b"x" + os.urandom(size - 1)
    _round(raft, command, in_flight, min(0.5, seconds / 5))
    cpu_s, begun = time.process_time(), time.perf_counter()
    latencies = _round(raft, command, in_flight, seconds)
    lasted_s = time.perf_counter() - begun
    latencies.sort()
    count = len(latencies)
    return {
        "count": count,
        "seconds": lasted_s,
        "cpu_s": time.process_time() - cpu_s,
        "p50_ms": 1000 * latencies[count // 2],
        "p99_ms": 1000 * latencies[count * 99 // 100],
    }


def _round(raft: Raft, command: bytes, in_flight: int, seconds: float) -> list[float]:
    """Return the latency of each command. The caller always waits for the oldest command in flight."""
    clock = time.perf_counter
    latencies: list[float] = []
    waiting: deque[tuple[float, Future[int]]] = deque()
    until = clock() + seconds
    while clock() < until:
        while len(waiting) < in_flight:
            waiting.append((clock(), raft.propose(command)))
        begun, future = waiting.popleft()
        future.result()
        latencies.append(clock() - begun)
    for _, future in waiting:
        future.result()
    return latencies


def grow(raft: Raft, size: int) -> None:
    futures: deque[Future[int]] = deque()
    for left in itertools.takewhile(lambda left: left > 0, itertools.count(size, -_GROW_BYTES)):
        command = GROW + os.urandom(min(left, _GROW_BYTES) - 1)
        while True:
            try:
                futures.append(raft.propose(command))
                break
            except Overloaded:
                time.sleep(_OVERLOADED_PAUSE_S)
    for future in futures:
        future.result()


def main() -> None:
    settings = json.loads(sys.argv[1])
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.INFO)
    machine = BenchState()
    config = RaftConfig(bootstrap=True, **settings["config"])
    raft = Raft(config, machine, tls=TLS(*settings["tls"]), listen=("127.0.0.1", settings["port"]))
    probe: Probe | None = None

    def answer(do: str, arguments: Answer) -> Answer:
        nonlocal probe
        match do:
            case "load":
                return load(raft, **arguments)
            case "grow":
                grow(raft, arguments["size"])
            case "reach":
                return {"is_reached": machine.reach(**arguments), "at": time.monotonic()}
            case "probe":
                probe = Probe(raft)
            case "first_after" if probe is not None:
                return {"at": probe.first_after(**arguments)}
            case "hand_over":
                return {"is_led_by_another": raft.transfer_leadership(arguments["seconds"])}
            case "unprobe" if probe is not None:
                probe.stop()
            case _:
                return {**to_builtins(raft.status()), "machine": machine.index}
        return {}

    serve(answer)
    raft.stop()


if __name__ == "__main__":
    main()
