"""The speed of consensus: each node is a process, with mutual TLS on loopback, and syncs every commit.

The load is made inside a node's process, as by the sequencer. A latency is from `propose` to the caller's
future: it contains encoding, both fsyncs, the network and the wake-ups between threads. The CPU time of a
node that makes load contains that work.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Final

from msgspec import Struct

from rt.bench.measure import Figure
from rt.errors import Timeout
from sequencer.bench.cluster import BenchCluster
from sequencer.localcluster.processes import Answer

PARTS: Final = ("speed", "idle", "snapshots", "failover", "catch-up", "single")
_PARTS_OF_ONE_NODE: Final = {"speed", "idle", "snapshots"}
_MIB: Final = 2**20
_STATE_BYTES: Final = _MIB // 2
"""Size of the state when snapshots are measured. A state above 1 MiB is not written in each interval."""
_NEVER_MS: Final = 10**9
_WAIT_S: Final = 120.0
_COMPACT = {"snapshot_ms": 500, "keep_entries": 16, "keep_bytes": _MIB}


class RaftBench(Struct, frozen=True):
    """One run: `rounds` of each measurement, `seconds` each, on `nodes` nodes in `directory`.

    `failovers` leaders are killed. `catch_up_mb` is the size of the snapshot that a node must receive.
    `snapshot_ms` is the interval of snapshots in the measurement of snapshots.
    """

    directory: str | None
    nodes: int
    rounds: int
    seconds: float
    failovers: int
    catch_up_mb: float
    snapshot_ms: int
    parts: Sequence[str]

    def figures(self) -> Generator[Figure, None, None]:
        """Leaves no files."""
        measures = {
            "speed": self._speed,
            "idle": self._idle,
            "snapshots": self._snapshots,
            "failover": self._failover,
            "catch-up": self._catch_up,
            "single": self._single,
        }
        for part in self.parts:
            if self.nodes > 1 or part in _PARTS_OF_ONE_NODE:
                yield from measures[part]()

    def _cluster(self, nodes: int | None = None, **config: int) -> BenchCluster:
        return BenchCluster(self.directory, nodes or self.nodes, **config)

    def _name(self, text: str) -> str:
        return f"{self.nodes} node{'s' * (self.nodes > 1)}: {text}"

    # Speed

    def _speed(self) -> Iterator[Figure]:
        one, few, many, large, follower, costs = [], [], [], [], [], []
        with self._cluster() as cluster:
            for _ in range(self.rounds):
                leader, others = cluster.settle()
                one.append(self._load(cluster, leader, 200, 1))
                before = [cluster.cpu_s(name) for name in others]
                few.append(self._load(cluster, leader, 200, 64))
                used = [cluster.cpu_s(name) - b for name, b in zip(others, before, strict=True)]
                costs.append(1e6 * statistics.mean(used) / few[-1]["count"] if used else 0.0)
                many.append(self._load(cluster, leader, 200, 1024))
                large.append(self._load(cluster, leader, 16 * 1024, 64))
                if others:
                    follower.append(self._load(cluster, others[0], 200, 1))
        name = self._name
        yield Figure(name("200 B, one in flight, p50"), _each(one, "p50_ms"), "ms", 2)
        yield Figure(name("200 B, one in flight, p99"), _each(one, "p99_ms"), "ms", 10)
        yield Figure(name("200 B, 64 in flight"), _rates(few), "commands/s", 20_000)
        yield Figure(name("200 B, 1024 in flight"), _rates(many), "commands/s")
        yield Figure(name("16 KiB, 64 in flight"), _rates(large, 16 * 1024 / 1e6), "MB/s", 40)
        leaders = tuple(1e6 * answer["cpu_s"] / answer["count"] for answer in few)
        yield Figure(name("200 B, 64 in flight, CPU of the leader"), leaders, "us/command")
        if follower:
            yield Figure(name("200 B, 64 in flight, CPU of a follower"), tuple(costs), "us/command")
            yield Figure(name("200 B, one in flight on a follower, p50"), _each(follower, "p50_ms"), "ms")

    def _single(self) -> Iterator[Figure]:
        with self._cluster(1) as cluster:
            leader, _ = cluster.settle()
            answers = [self._load(cluster, leader, 200, 1) for _ in range(self.rounds)]
        yield Figure("1 node: 200 B, one in flight, p50", _each(answers, "p50_ms"), "ms")

    def _load(
        self, cluster: BenchCluster, name: str, size: int, in_flight: int, seconds: float | None = None
    ) -> Answer:
        seconds = seconds or self.seconds
        return cluster.nodes[name].ask(
            "load", timeout_s=2 * seconds + _WAIT_S, size=size, in_flight=in_flight, seconds=seconds
        )

    # Costs of an idle cluster and of snapshots

    def _idle(self) -> Iterator[Figure]:
        leading, following = [], []
        with self._cluster() as cluster:
            for _ in range(self.rounds):
                leader, others = cluster.settle()
                begun = time.monotonic()
                before = {name: cluster.cpu_s(name) for name in cluster.names}
                time.sleep(self.seconds)
                lasted_s = time.monotonic() - begun
                used = {name: 100 * (cluster.cpu_s(name) - before[name]) / lasted_s for name in cluster.names}
                leading.append(used[leader])
                following += [used[name] for name in others]
        yield Figure(self._name("idle, CPU of the leader"), tuple(leading), "% of a core", 2)
        if following:
            yield Figure(self._name("idle, CPU of a follower"), tuple(following), "% of a core", 2)

    def _snapshots(self) -> Iterator[Figure]:
        """Measure with and without snapshots in each round. Each measurement lasts for at least two
        snapshots.
        """
        found: dict[int, list[Answer]] = {self.snapshot_ms: [], _NEVER_MS: []}
        for _ in range(self.rounds):
            for snapshot_ms, answers in found.items():
                with self._cluster(snapshot_ms=snapshot_ms) as cluster:
                    leader, _ = cluster.settle()
                    cluster.nodes[leader].ask("grow", size=_STATE_BYTES)
                    seconds = max(self.seconds, 2.5 * self.snapshot_ms / 1000)
                    answers.append(self._load(cluster, leader, 200, 1, seconds))
        with_, without = found.values()
        text = f"0.5 MiB of state, a snapshot every {self.snapshot_ms / 1000:g} s, p99"
        yield Figure(self._name(text), _each(with_, "p99_ms"), "ms")
        yield Figure(self._name("0.5 MiB of state, no snapshots, p99"), _each(without, "p99_ms"), "ms")

    # Failover and catch-up

    def _failover(self) -> Iterator[Figure]:
        with self._cluster() as cluster:
            ways: dict[str, tuple[Callable[[str], float], Callable[[str], None]]] = {
                "killed": (cluster.kill, cluster.start),
                "paused": (cluster.pause, cluster.resume),
                "hands over": (cluster.hand_over, lambda _: None),
            }
            for way, (stop, go_on) in ways.items():
                taken_s = [self._failed_over(cluster, stop, go_on) for _ in range(self.failovers)]
                name = self._name(f"leader {way}, next commit at a follower")
                yield Figure(name, tuple(taken_s), "s", 0.5 if way == "killed" else None)
                yield Figure(f"{name}, p90", (sorted(taken_s)[len(taken_s) * 9 // 10],), "s")

    def _failed_over(
        self, cluster: BenchCluster, stop: Callable[[str], float], go_on: Callable[[str], None]
    ) -> float:
        """Seconds from the end of a leader to the next commit that a client on a follower sees.

        For a leadership transfer, the time starts with the request.
        """
        leader, others = cluster.settle()
        client = cluster.nodes[others[0]]
        client.ask("probe")
        client.ask("first_after", timeout_s=_WAIT_S, since=time.monotonic(), within_s=_WAIT_S / 2)
        stopped = stop(leader)
        done = client.ask("first_after", timeout_s=_WAIT_S, since=stopped, within_s=_WAIT_S / 2)["at"]
        if done is None:
            raise Timeout("no commit after the leader ended", where=leader)
        client.ask("unprobe")
        go_on(leader)
        return float(done) - stopped

    def _catch_up(self) -> Iterator[Figure]:
        taken_s = []
        for _ in range(self.rounds):
            with self._cluster(**_COMPACT) as cluster:
                taken_s.append(self._caught_up(cluster))
        text = f"caught up by a snapshot of {self.catch_up_mb:g} MB"
        yield Figure(self._name(f"{text}, from the start"), tuple(total for total, _ in taken_s), "s", 2)
        yield Figure(self._name(f"{text}, once it is open"), tuple(since for _, since in taken_s), "s")

    def _caught_up(self, cluster: BenchCluster) -> tuple[float, float]:
        """Seconds until the node has caught up: since its process was started, and since the process
        answers.
        """
        leader, (late, *_) = cluster.settle()
        old_end = cluster.status(late)["log_end"]
        cluster.kill(late)
        cluster.nodes[leader].ask("grow", timeout_s=_WAIT_S, size=int(self.catch_up_mb * 1e6))
        while not all(cluster.status(name)["log_start"] > old_end for name in cluster.nodes):
            self._load(cluster, leader, 16 * 1024, 64, 0.2)  # The log drops whole segments only.
        end = cluster.status(leader)["index"]
        begun = time.monotonic()
        cluster.start(late)
        cluster.status(late)
        opened = time.monotonic()
        reached = cluster.nodes[late].ask("reach", timeout_s=_WAIT_S, index=end, within_s=_WAIT_S / 2)
        if not reached["is_reached"]:
            raise Timeout("a node did not catch up", where=late, expected=end)
        return reached["at"] - begun, reached["at"] - opened


def _each(answers: Sequence[Answer], key: str) -> tuple[float, ...]:
    return tuple(float(answer[key]) for answer in answers)


def _rates(answers: Sequence[Answer], times: float = 1.0) -> tuple[float, ...]:
    return tuple(times * answer["count"] / answer["seconds"] for answer in answers)
