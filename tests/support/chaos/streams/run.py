"""One run: clusters, hosts and publishers under faults, then the verdict.

Invariant: whatever happens in a run, no process is left after it.
"""

from __future__ import annotations

import math
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Final

from chaos.streams.cast import CLUSTERS, Cast, streams_of
from chaos.streams.faults import CLOCK_KINDS, KINDS, Faults
from chaos.streams.results import read_rows
from chaos.streams.verdict import KEEPERS, Verdict
from rt.errors import RtError, Timeout
from sequencer.localcluster.processes import nothing_left

WAIT_S: Final = 240.0
"""The longest wait for something that must happen. Then the run ends with a problem."""
_POLL_S: Final = 0.05


@dataclass(slots=True)
class Outcome:
    seed: int
    seconds: float = 0.0
    published: int = 0
    calls: int = 0
    late_calls: int = 0
    """Number of consumer calls that started after the host had lost the lease."""
    repeats: int = 0
    """Number of times that consumers without tokens received an event again."""
    faults: Counter[str] = field(default_factory=Counter)
    served_s: dict[str, list[float]] = field(default_factory=dict)
    """By kind of fault: seconds until all queues were served, one for each fault."""
    slowest: float = 0.0
    """Longest time from an event's publication to its delivery, in seconds."""
    problems: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        counts = f"published={self.published} calls={self.calls} repeats={self.repeats}"
        more = f"late_calls={self.late_calls} slowest_event_s={self.slowest:.1f}"
        lines = [f"seed={self.seed} seconds={self.seconds:.0f} {counts} {more} load={os.getloadavg()[1]:.0f}"]
        for kind, times in sorted(self.served_s.items()):
            lines.append(
                f"{kind:15} {len(times):3} times, served again after {median(times):5.1f} s (median), "
                f"{max(times):5.1f} s (most)"
            )
        return "\n".join([*lines, *(f"problem: {problem}" for problem in self.problems)])


class StreamChaos:
    """Ends after `seconds` or after `decks` of faults, whichever comes first. A deck has each kind once.

    `lease_s`: how long leases of hosts last. `away_s`: how long a cluster is away. `limit_s`: the longest
    time that a fault may leave a queue unserved. `rest_s_max`: the longest rest between two faults.
    """

    def __init__(
        self,
        root: Path,
        *,
        seed: int,
        seconds: float = math.inf,
        decks: float = math.inf,
        clusters: int = 2,
        nodes: int = 3,
        rate_hz: float = 100.0,
        lease_s: float = 8.0,
        away_s: float = 40.0,
        limit_s: float = 15.0,
        rest_s_max: float = 3.0,
        kinds: Sequence[str] = KINDS,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._seconds, self._decks, self._limit_s, self.say = seconds, decks, limit_s, say
        self._size = {"clusters": clusters, "nodes": nodes}
        self._root, self._rate_hz, self._rest_s_max, self._kinds = root, rate_hz, rest_s_max, kinds
        self._lease_s, self._away_s = lease_s, away_s
        names = CLUSTERS[:clusters]
        self._verdict = Verdict({stream: name for name in names for stream in streams_of(name)})
        self._outcome = Outcome(seed)

    def run(self) -> Outcome:
        """Run all phases. The outcome contains the problems."""
        outcome, begun_s = self._outcome, time.monotonic()
        with nothing_left():
            has_clocks = not {*CLOCK_KINDS}.isdisjoint(self._kinds)
            self._cast = Cast(self._root, **self._size, hosts=3, lease_s=self._lease_s, has_clocks=has_clocks)
            try:
                with self._cast:
                    self._play()
            except (RtError, OSError) as error:
                outcome.problems.append(f"{type(error).__name__}: {error}")
            self._read()
        outcome.seconds = time.monotonic() - begun_s
        self._judge()
        return outcome

    def _play(self) -> None:
        cast = self._cast
        faults = Faults(
            cast,
            self._verdict,
            self,
            seed=self._outcome.seed,
            kinds=self._kinds,
            lease_s=self._lease_s,
            away_s=self._away_s,
        )
        self._outcome.faults = faults.done
        for host in cast.hosts.values():
            host.start()
        self.wait(self._verdict.is_subscribed, "the hosts to start and to subscribe")
        for feed in cast.feeds:
            feed.start(self._rate_hz / len(cast.feeds), self._verdict.published)
        self.wait(self._verdict.has_begun, "each subscription to have an event")
        self.say("all subscriptions are served")
        until_s, struck = time.monotonic() + self._seconds, 0
        while time.monotonic() < until_s and struck < self._decks * len(self._kinds):
            faults.strike()
            self.rest(time.monotonic() + faults.rest_s(self._rest_s_max))
            struck += 1
        for feed in cast.feeds:
            feed.finish()
        self.say("all is published")
        self.wait(self._verdict.has_all, "each subscription to have every event")
        for host in cast.hosts.values():
            if status := host.drain():
                self.problem(f"{host.life} ended with status {status} after SIGTERM")

    def _judge(self) -> None:
        outcome, verdict = self._outcome, self._verdict
        results = {
            reader: read_rows(self._cast.results / f"{reader.subscription}.{reader.stream.partition('/')[2]}")
            for reader in verdict.readers(*self._cast.clusters)
            if reader.subscription in KEEPERS
        }
        outcome.problems += verdict.problems(results, self._limit_s)
        outcome.published = sum(map(len, verdict.published.values()))
        outcome.calls = len(verdict.calls)
        outcome.late_calls = verdict.late_calls()
        outcome.repeats = verdict.repeats()
        for watch in verdict.watches:
            outcome.served_s.setdefault(watch.kind, []).append(watch.slowest_s)
        outcome.slowest = max((late_s for late_s, _ in verdict.delays().values()), default=0.0)
        if not outcome.published:
            outcome.problems.append("nothing was published: the run proves nothing")

    # Director

    def wait(self, is_met: Callable[[], object], what: str) -> None:
        deadline = time.monotonic() + WAIT_S
        while not is_met():
            self._cast.check()
            if time.monotonic() > deadline:
                raise Timeout(f"waited for {what}", expected=f"{WAIT_S:g} s")
            time.sleep(_POLL_S)
            self._read()

    def rest(self, until_s: float) -> None:
        while (left_s := until_s - time.monotonic()) > 0:
            self._cast.check()
            time.sleep(min(left_s, _POLL_S))
            self._read()

    def problem(self, text: str) -> None:
        self.say(text)
        self._outcome.problems.append(text)

    def _read(self) -> None:
        for host in self._cast.hosts.values():
            for life, notes in host.notes():
                self._verdict.take(life, notes)
