"""The benchmark of the whole transport: nodes, publishers and subscribers are processes.

Everything is synced before it is acknowledged. Every hop uses mutual TLS on the loopback. Each part starts
its own cluster; `merging` needs none.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from typing import Final

from msgspec import Struct

from rt.bench.measure import Figure
from sequencer.bench.backlog import backlog, offline_starts
from sequencer.bench.failover import failover
from sequencer.bench.member_changes import member_changes
from sequencer.bench.merge_speed import merging
from sequencer.bench.speed import latency, many, throughput
from sequencer.bench.stage import Setup
from sequencer.bench.stages import stages

PARTS: Final = (
    *("throughput", "latency", "stages", "failover", "members", "many"),
    *("backlog", "offline-starts", "merging"),
)


class TransportBench(Struct, frozen=True):
    """One run in `directory`: `publishers` publishers send messages of `value_bytes` to `nodes` nodes."""

    directory: str | None
    nodes: int
    publishers: int
    subscribers: int
    rounds: int
    value_bytes: Sequence[int]
    seconds: float
    rates_hz: Sequence[float]
    failovers: int
    many: int
    backlog_gb: float
    starts: int
    merging_gb: float
    parts: Sequence[str]

    def figures(self) -> Generator[Figure, None, None]:
        """Leaves no files.

        If a part fails, the error names a file with all logs: `rt.Timeout`, `rt.Diverged` if messages were
        lost, `ProcessEnded` if a process ended.
        """
        for part in self.parts:
            yield from self._measure(part)

    def _measure(self, part: str) -> Iterator[Figure]:
        setup = Setup(self.directory, self.nodes)
        match part:
            case "throughput":
                return throughput(
                    setup,
                    publishers=self.publishers,
                    subscribers=self.subscribers,
                    value_bytes=self.value_bytes,
                    seconds=self.seconds,
                    rounds=self.rounds,
                )
            case "latency":
                return latency(setup, rates_hz=self.rates_hz, seconds=self.seconds, rounds=self.rounds)
            case "stages":
                return stages(setup, seconds=self.seconds, rounds=self.rounds)
            case "failover":
                return failover(setup, publishers=self.publishers, kills=self.failovers)
            case "members":
                return member_changes(setup, publishers=self.publishers)
            case "many":
                return many(setup, publishers=self.many, seconds=self.seconds)
            case "backlog":
                return backlog(setup, publishers=self.publishers, size_bytes=int(self.backlog_gb * 1e9))
            case "offline-starts":
                return offline_starts(setup, starts=self.starts)
            case "merging":
                size_bytes = int(self.merging_gb * 1e9)
                return merging(self.directory, sessions=self.publishers, size_bytes=size_bytes)
        raise ValueError(f"unknown part: got {part!r}, expected one of {', '.join(PARTS)}")
