"""The run of the demo: nodes, publishers and a subscriber as processes; a steady phase, a burst, the checks.

Invariants:
- Figures and verdicts come from what publishers and subscriber noted and from the bytes on disk, never from
  what nodes report about themselves.
- Leaving the demo ends everything that it started.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final, Literal, Self

from msgspec import Struct

from rt.cli.formats.console import Bar, progress
from rt.errors import Timeout
from rt.log.check.verify import verify
from rt.log.scan.directory import merged_directory
from sequencer.demo.checks import Verdict, check_logs, check_messages
from sequencer.demo.figures import Burst, DeliveryTimes, Failover, Latency, longest_pause_s, sequenced_ns
from sequencer.demo.tally import Total
from sequencer.localcluster.clients import client_settings
from sequencer.localcluster.nodes import LocalCluster
from sequencer.localcluster.processes import Answer, Process, nothing_left

STREAM: Final = "demo"
RATE_HZ: Final = 200
"""Rate of all publishers together in the steady phase: low enough for two busy cores."""
LOAD_S_MAX: Final = 120.0
STILL_S_MAX: Final = 120.0
"""A wait without progress for this long fails."""
SETTLE_S_MAX: Final = 10.0
"""Maximum time to wait until the messages from before the first merge are read. Latency counts after that."""
SETTLED_MESSAGES: Final = RATE_HZ // 10
"""Latency counts once at most this many published messages are unread."""
AFTERMATH_S: Final = 1.5
"""Time from when messages flow again until the killed node is started."""
_POLL_S: Final = 0.1
_STOP_S: Final = 10.0


class DemoPlan(Struct, frozen=True):
    """Settings of a run. `data` is "builtin" or a path."""

    nodes: int
    publishers: int
    data: str
    is_leader_killed: bool
    steady_s: float = 6.0


class DemoResult(Struct, frozen=True):
    messages: int
    value_bytes: int
    latency: Latency | None
    failover: Failover | None
    burst: Burst
    verdicts: Sequence[Verdict]


class Demo:
    """One run of `plan` in `root`. `say` receives a line for each step. Leaving it ends all processes."""

    def __init__(self, root: Path, plan: DemoPlan, say: Callable[[str], object]) -> None:
        self._root, self._plan, self._say = root, plan, say
        self._stack = ExitStack()
        self._publishers: dict[str, Process] = {}
        self._statuses: dict[str, Answer] = {}
        """The last status of each publisher."""
        self._received = 0

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            stack.enter_context(nothing_left())
            self._nodes = stack.enter_context(LocalCluster(self._root, self._plan.nodes, stream=STREAM))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def run(self) -> DemoResult:
        """Run everything. Raises `rt.RtError` if a process ends or makes no progress."""
        self._start()
        latency_window = self._publish_steadily()
        failover = self._kill_leader() if self._plan.is_leader_killed else None
        total = self._publish_all()
        finished = self._subscriber.ask("finish", times=str(self._times_file))
        self._say("comparing the merged logs byte by byte")
        with self._report_timeout():
            self._nodes.wait_merged(total)
        verdicts = self._judge(finished, total)
        self._stop()
        times = DeliveryTimes.load(self._times_file)
        return DemoResult(
            total,
            sum(status["total"]["value_bytes"] for status in self._statuses.values()),
            times.latency(*latency_window),
            None if failover is None else self._failover(*failover, times),
            self._burst(int(times.arrived_ns.max(initial=0))),
            verdicts,
        )

    @property
    def _times_file(self) -> Path:
        return self._root / "times.npy"

    @property
    def _copy(self) -> Path:
        return Path(merged_directory(self._root / "subscriber", STREAM))

    # The phases

    def _start(self) -> None:
        count = self._plan.publishers
        self._say(f"starting {len(self._nodes.names)} nodes, {count} publishers, a subscriber")
        self._nodes.start()
        for index in range(count):
            name = f"publisher-{index + 1}"
            share = {"data": self._plan.data, "index": index, "count": count}
            self._publishers[name] = self._start_client("publish", "publisher", name, **share)
        self._subscriber = self._start_client("subscribe", "subscriber", "subscriber")
        for name, publisher in self._publishers.items():
            self._statuses[name] = publisher.ask("status", timeout_s=LOAD_S_MAX)
        leader = self._nodes.wait_ready()
        self._say(f"{', '.join(self._nodes.names)} are up with mutual TLS, {leader} leads")

    def _start_client(
        self, module: str, role: Literal["publisher", "subscriber"], name: str, **settings: object
    ) -> Process:
        root = self._root / ("publishers" if role == "publisher" else "subscriber")
        everything = client_settings(self._nodes, role, name, root, **settings)
        process = Process(f"sequencer.demo.{module}", everything, self._root / f"{name}.log")
        return self._stack.enter_context(process)

    def _publish_steadily(self) -> tuple[int, int]:
        """Start publishing at a steady rate. Returns the time range in which latency counts."""
        rate_hz = RATE_HZ / len(self._publishers)
        for publisher in self._publishers.values():
            publisher.ask("steady", rate_hz=rate_hz)
        self._until(lambda: self._all_merged(0), "the first message of each publisher to be merged")
        self._say(f"publishing {RATE_HZ:,} messages/s for {self._plan.steady_s:g} s, for latency")
        settled_s = time.monotonic() + SETTLE_S_MAX
        self._until(
            lambda: self._unread() <= SETTLED_MESSAGES or time.monotonic() > settled_s,
            "the subscriber to catch up",
        )
        start_ns, (before, _, _) = time.time_ns(), self._ask_progress()
        with progress("steady", total=int(self._plan.steady_s * RATE_HZ), unit="msg") as bar:
            self._hold(self._plan.steady_s, bar)
        self._until(lambda: self._sum("published") > before, "messages whose latency counts")
        return start_ns, time.time_ns()

    def _kill_leader(self) -> tuple[str, str, int, int]:
        """Kill the leader while messages flow. Returns the old and the new leader, and the measured time."""
        leader = self._leader("a node to lead")
        self._say(f"kill -9 {leader}, which leads")
        killed_ns = time.time_ns()
        self._nodes.kill(leader)
        self._leader("another node to lead")
        published = max(status["published"] for status in self._statuses.values())
        received = self._received
        self._until(
            lambda: self._all_merged(published) and self._received > received,
            "messages to be merged under the new leader",
        )
        self._hold(AFTERMATH_S)
        end_ns = time.time_ns()
        took_over = self._nodes.leader() or "no node"
        self._say(f"{took_over} took over; {leader} is started again and catches up")
        self._nodes.start(leader)
        return leader, took_over, killed_ns, end_ns

    def _leader(self, what: str) -> str:
        """Wait until a node leads. Returns its name."""
        while (leader := self._nodes.leader()) is None:
            self._until(lambda: self._nodes.leader() is not None, what)
        return leader

    def _publish_all(self) -> int:
        """Have all publish their share at full speed. Returns the number of messages of the whole run."""
        to_come = self._sum("to_come")
        expected = to_come + self._sum("published")
        self._say(f"publishing {to_come:,} messages as fast as it goes, for throughput")
        for publisher in self._publishers.values():
            publisher.ask("burst")
        with ExitStack() as bars:
            shown = {
                what: bars.enter_context(progress(what, total=expected, unit="msg"))
                for what in ("published", "merged", "received")
            }
            self._until(self._is_done, "all messages to be merged", shown)
            total = sum(int(status["total"]["count"]) for status in self._statuses.values())
            with self._report_timeout():
                self._until(lambda: self._received >= total, "all messages to be read", shown)
        return total

    @contextmanager
    def _report_timeout(self) -> Iterator[None]:
        """Only print a timeout: the verdicts report what is missing."""
        try:
            yield
        except Timeout as error:
            self._say(str(error))

    def _is_done(self) -> bool:
        return all(status["is_done"] for status in self._statuses.values())

    def _judge(self, finished: Answer, total: int) -> list[Verdict]:
        sent = {name: Total(**status["total"]) for name, status in self._statuses.items()}
        got = {name: Total(**status) for name, status in finished["totals"].items()}
        comparison = self._nodes.compare(self._copy)
        with progress("verifying", unit="B") as bar:
            report = verify(self._nodes.merged_directory(self._nodes.names[0]), on_progress=bar.reach)
        return [
            *check_messages(sent, got, finished["fault"]),
            *check_logs(comparison, total, [str(problem) for problem in report.damage]),
        ]

    def _stop(self) -> None:
        clients = [*self._publishers.values(), self._subscriber]
        for process in clients:
            process.signal(signal.SIGTERM)
        for process in clients:
            process.terminate(_STOP_S)
        self._nodes.stop()

    # Waiting

    def _sum(self, count: str) -> int:
        """The sum of a count in the last statuses of all publishers."""
        return sum(int(status[count]) for status in self._statuses.values())

    def _unread(self) -> int:
        return self._sum("published") - self._received

    def _all_merged(self, number: int) -> bool:
        return all(status["merged"] > number for status in self._statuses.values())

    def _ask_progress(self) -> tuple[int, int, int]:
        """Ask every process for its progress. Returns the published, merged and received messages."""
        self._nodes.check_alive()
        for name, publisher in self._publishers.items():
            self._statuses[name] = publisher.ask("status")
        self._received = self._subscriber.ask("status")["received"]
        return self._sum("published"), self._sum("merged"), self._received

    def _until(self, is_met: Callable[[], bool], what: str, bars: dict[str, Bar] | None = None) -> None:
        """Wait until the condition holds. Raises `rt.Timeout` without progress for `STILL_S_MAX`."""
        before, moved_s = self._ask_progress(), time.monotonic()
        while not is_met():
            time.sleep(_POLL_S)
            now = self._ask_progress()
            for bar, done, last in zip((bars or {}).values(), now, before, strict=False):
                bar.add(done - last)
            if now[1:] != before[1:]:
                moved_s = time.monotonic()
            elif time.monotonic() - moved_s > STILL_S_MAX:
                raise Timeout(
                    f"no progress for {STILL_S_MAX:g} s while waiting for {what}",
                    where=self._root,
                    got=self._describe(),
                    hint="Run it again with --keep DIR, and look at the logs in that directory.",
                )
            before = now

    def _describe(self) -> str:
        published, merged, received = self._ask_progress()
        words = [f"{name}: {self._nodes.last_words(name, 3)}" for name in self._nodes.names]
        return "\n".join([f"{published} published, {merged} merged, {received} received", *words])

    def _hold(self, seconds: float, bar: Bar | None = None) -> None:
        """Wait. `bar` shows what is published in that time."""
        end_s, (before, _, _) = time.monotonic() + seconds, self._ask_progress()
        while (left_s := end_s - time.monotonic()) > 0:
            time.sleep(min(_POLL_S, left_s))
            published, _, _ = self._ask_progress()
            if bar is not None:
                bar.add(published - before)
            before = published

    # Figures

    def _failover(
        self, killed: str, took_over: str, killed_ns: int, end_ns: int, times: DeliveryTimes
    ) -> Failover:
        merged_ns = sequenced_ns(self._nodes.merged_directory(self._nodes.names[0]))
        return Failover(
            killed,
            took_over,
            longest_pause_s(merged_ns, killed_ns, end_ns),
            longest_pause_s(times.arrived_ns, killed_ns, end_ns),
        )

    def _burst(self, end_ns: int) -> Burst:
        statuses = self._statuses.values()
        count, value_bytes = (
            sum(status["total"][what] - status["burst"][what] for status in statuses)
            for what in ("count", "value_bytes")
        )
        start_ns = min(status["burst"]["start_ns"] for status in statuses)
        return Burst(count, value_bytes, max(0, end_ns - start_ns) / 1e9)
