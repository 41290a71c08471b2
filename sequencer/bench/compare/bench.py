"""The rounds of a comparison. Each round starts every system in turn, empty, with a publisher and a consumer.

Latency is from the time at which a message was due to be published until the consumer has it. Throughput is
the number of messages that the publisher knows to be acknowledged. Processor time is the time of all
processes, from the start of publishing at full speed until the consumer has received everything.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from msgspec import Struct

from rt.bench.measure import Figure
from rt.bench.processes import ProcessTable
from rt.errors import Timeout
from sequencer.bench.compare.programs import Programs
from sequencer.bench.compare.system import ClientSettings, Facts, Options, RunningServers, system
from sequencer.bench.compare.table import Compared
from sequencer.bench.stage import STILL_S, logs_kept
from sequencer.bench.traffic import PERCENTS
from sequencer.localcluster.processes import Answer, Process, nothing_left

_MODULE: Final = "sequencer.bench.compare.traffic"
_WARM_UP_S: Final = 2.0
_ASK_S: Final = 300.0
_POLL_S: Final = 0.05


class CompareBench(Struct, frozen=True):
    """rt and `peers` in `directory` (default: the system's temporary directory)."""

    directory: str | None
    peers: Sequence[str]
    tls: bool
    fsync: bool
    message_bytes: int
    seconds: float
    rounds: int
    rates_hz: Sequence[float]

    def run(self, on_start: Callable[[int, str], object]) -> list[Compared]:
        """Measure. `on_start` is called with the round and the name of each system before it starts.

        Raises `NotInstalled` before anything starts, `rt.Timeout` if a consumer does not receive everything,
        `ProcessEnded` if a process ends. The error names a file with all logs. Leaves no other file, and no
        process.
        """
        names = ["rt", *dict.fromkeys(self.peers)]
        for name in names:
            system(name).check()
        rounds: dict[str, list[_Round]] = {name: [] for name in names}
        for number in range(self.rounds):
            for name in names:
                on_start(number, name)
                rounds[name].append(self._measure(name))
        return [_joined(name, each) for name, each in rounds.items()]

    def _measure(self, name: str) -> _Round:
        with self._opened(name) as stage:
            values: dict[tuple[str, str], float] = {}
            for rate_hz in self.rates_hz:
                for percent, ms in zip(PERCENTS, stage.latencies_ms(rate_hz, self.seconds), strict=True):
                    values[f"publish to consumer at {rate_hz:g} messages/s, p{percent}", "ms"] = ms
            flood = stage.flood(self.seconds)
            gb = self.message_bytes / 1e9
            values["acknowledged", "messages/s"] = flood.acknowledged / flood.seconds
            values["the same in bytes", "MB/s"] = flood.acknowledged * gb * 1000 / flood.seconds
            values["received meanwhile", "MB/s"] = flood.received * gb * 1000 / flood.seconds
            all_s = flood.servers_s + flood.clients_s
            values["processor time of all processes", "s/GB"] = all_s / (flood.published * gb)
            values["of that, servers", "s/GB"] = flood.servers_s / (flood.published * gb)
            counts = stage.consumer.ask("counts")
        return _Round(stage.cluster.facts, values, counts)

    @contextlib.contextmanager
    def _opened(self, name: str) -> Iterator[_Stage]:
        with (
            tempfile.TemporaryDirectory(prefix="rt", dir=self.directory) as path,
            logs_kept(root := Path(path), self.directory),
            nothing_left(),
            Programs(root) as programs,
        ):
            cluster = system(name).start(Options(root, self.tls, self.fsync), programs)
            with (
                self._client(name, "publisher", cluster.publisher, root) as publisher,
                self._client(name, "consumer", cluster.consumer, root) as consumer,
            ):
                yield _Stage(cluster, programs, publisher, consumer)

    @contextlib.contextmanager
    def _client(self, name: str, role: str, client: ClientSettings, root: Path) -> Iterator[Process]:
        settings = {"system": name, "role": role, "client": client, "value_bytes": self.message_bytes}
        with Process(_MODULE, settings, root / f"{role}.log") as process:
            process.ask("counts", timeout_s=_ASK_S)
            yield process


class _Round(NamedTuple):
    facts: Facts
    values: dict[tuple[str, str], float]
    """By name and unit of the figure."""
    counts: Answer


class _Flood(Struct, frozen=True):
    seconds: float
    acknowledged: int
    received: int
    published: int
    """Messages published since the start of the flood. The processor time is the time for these messages."""
    servers_s: float
    clients_s: float


class _Stage(Struct, frozen=True):
    cluster: RunningServers
    programs: Programs
    publisher: Process
    consumer: Process

    def latencies_ms(self, rate_hz: float, seconds: float) -> list[float]:
        """Percentiles `PERCENTS` of messages at this rate."""
        received = self.consumer.ask("counts")["received"]
        self.publisher.ask("drip", rate_hz=rate_hz)
        self._wait(lambda: int(self.consumer.ask("counts")["received"]), received + 1, "messages")
        time.sleep(_WARM_UP_S)
        self.consumer.ask("forget")
        time.sleep(seconds)
        self._wait(lambda: len(self.consumer.ask("latencies")["ns"]), 1, "a message")
        found = self.consumer.ask("latencies")["ns"]
        self._drain()
        return [latency_ns / 1e6 for latency_ns in found]

    def flood(self, seconds: float) -> _Flood:
        before, cpu = self.publisher.ask("counts"), self._cpu_s()
        self.publisher.ask("flood")
        time.sleep(_WARM_UP_S)
        first, received = self.publisher.ask("counts"), self.consumer.ask("counts")["received"]
        begun = time.monotonic()
        time.sleep(seconds)
        self._wait(
            lambda: int(self.publisher.ask("counts")["acknowledged"]), first["acknowledged"] + 1, "messages"
        )
        last, received = self.publisher.ask("counts"), self.consumer.ask("counts")["received"] - received
        lasted_s = time.monotonic() - begun
        published = self._drain() - before["published"]
        servers_s, clients_s = (after - before for after, before in zip(self._cpu_s(), cpu, strict=True))
        acknowledged = last["acknowledged"] - first["acknowledged"]
        return _Flood(lasted_s, acknowledged, received, published, servers_s, clients_s)

    def _drain(self) -> int:
        """Stop publishing, and wait until everything is received. Returns the messages published so far."""
        published = int(self.publisher.ask("stop", timeout_s=_ASK_S)["published"])
        self._wait(lambda: int(self.consumer.ask("counts")["received"]), published, "messages")
        return published

    def _wait(self, count: Callable[[], int], end: int, what: str) -> None:
        """Wait until `count()` reaches `end`. `rt.Timeout` if there is no progress for `STILL_S`."""
        best, since = -1, time.monotonic()
        while (now := count()) < end:
            self.programs.check_alive()
            if now > best:
                best, since = now, time.monotonic()
            elif time.monotonic() - since > STILL_S:
                version = self.cluster.facts.version
                raise Timeout(f"{version}: no more {what} for {STILL_S:g} s", got=now, expected=end)
            time.sleep(_POLL_S)

    def _cpu_s(self) -> tuple[float, float]:
        """Processor time of the servers, and of the clients, with their children."""
        processes = ProcessTable()
        servers_s, clients_s = (
            sum(processes.cpu_s(pid) + processes.descendants_cpu_s(pid) for pid in pids)
            for pids in (self.cluster.pids, (self.publisher.pid, self.consumer.pid))
        )
        return servers_s, clients_s


def _joined(name: str, rounds: Sequence[_Round]) -> Compared:
    received, lost, wrong = (
        sum(each.counts[key] for each in rounds) for key in ("received", "lost", "wrong")
    )
    figures = tuple(
        Figure(key[0], tuple(each.values[key] for each in rounds), key[1]) for key in rounds[0].values
    )
    return Compared(name, rounds[0].facts, received, lost, wrong, figures)
