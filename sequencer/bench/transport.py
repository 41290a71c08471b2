"""The benchmark of the whole transport: nodes, publishers and subscribers are processes.

Everything is synced before it is acknowledged. Every hop uses mutual TLS on the loopback. Each part starts
its own cluster; `merging` needs none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias, assert_never, get_args

from rt.bench.measure import Figure
from sequencer.bench.backlog import backlog
from sequencer.bench.failover import failover
from sequencer.bench.merge_speed import merging
from sequencer.bench.offline_starts import offline_starts
from sequencer.bench.speed import latency, many, throughput
from sequencer.bench.stage import Setup

Part: TypeAlias = Literal["throughput", "latency", "failover", "many", "backlog", "offline-starts", "merging"]
PARTS: Final[tuple[Part, ...]] = get_args(Part)


@dataclass(frozen=True, slots=True)
class TransportBench:
    """One run in `directory`: `publishers` publishers send messages of `value_bytes` to `nodes` nodes."""

    directory: str | None
    nodes: int = 3
    publishers: int = 4
    value_bytes: Sequence[int] = (1024, 128)
    seconds: float = 30.0
    rate_hz: float = 1000.0
    failovers: int = 20
    many: int = 200
    backlog_bytes: int = 10**10
    offline_starts: int = 1000
    merging_bytes: int = 10**9
    parts: Sequence[Part] = PARTS

    def run(self, on_figure: Callable[[Figure], None]) -> None:
        """Measure. Reports each figure when it is known, and leaves no files.

        If a part fails, the error names a file with all logs: `rt.Timeout`, `rt.Diverged` if messages were
        lost, `ProcessEnded` if a process ended.
        """
        for part in self.parts:
            for figure in self._figures(part):
                on_figure(figure)

    def _figures(self, part: Part) -> Iterator[Figure]:
        setup = Setup(self.directory, self.nodes)
        match part:
            case "throughput":
                return throughput(
                    setup, publishers=self.publishers, value_bytes=self.value_bytes, seconds=self.seconds
                )
            case "latency":
                return latency(setup, rate_hz=self.rate_hz, seconds=self.seconds)
            case "failover":
                return failover(setup, publishers=self.publishers, kills=self.failovers)
            case "many":
                return many(setup, publishers=self.many, seconds=self.seconds)
            case "backlog":
                return backlog(setup, publishers=self.publishers, size_bytes=self.backlog_bytes)
            case "offline-starts":
                return offline_starts(setup, starts=self.offline_starts)
            case "merging":
                return merging(self.directory, sessions=self.publishers, size_bytes=self.merging_bytes)
        assert_never(part)
