"""Faults of hosts, nodes and whole clusters, in an order that a seed decides.

Faults come one after the other: the next one starts when all queues are served again. Only while a cluster is
away, a host has a fault as well.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from chaos.streams.cast import Cast, Host
from chaos.streams.verdict import Absence, Verdict, Watch

CLOCK_KINDS: Final = ("clock", "sleep")
"""`clock`: the wall clock of one host jumps. `sleep`: the clock of leases jumps on all hosts. Both need a C
compiler.
"""
KINDS: Final = (
    *("kill", "replace", "pause", "drain", "roll", "kill_node", "stop_cluster", "freeze_cluster"),
    *CLOCK_KINDS,
)
"""`replace` kills a host and its disk. `kill_node` needs clusters of three nodes or more."""
JUMPS_S: Final = (86_400 * 30, -80_000, 3_600, -5)
"""Jumps within the validity of the certificates."""
DURING_ABSENCE: Final = ("kill", "pause", "drain")
PAST_LEASE_S: Final = 2.0
"""A host is paused for the duration of its lease plus this time."""


class Director(Protocol):
    """Waits, and reads notes meanwhile."""

    def wait(self, is_met: Callable[[], object], what: str) -> None: ...

    def rest(self, until_s: float) -> None: ...

    def problem(self, text: str) -> None: ...

    def say(self, text: str) -> None: ...


class Faults:
    def __init__(
        self,
        cast: Cast,
        verdict: Verdict,
        director: Director,
        *,
        seed: int,
        kinds: Sequence[str],
        lease_s: float,
        away_s: float,
    ) -> None:
        self._cast, self._verdict, self._director = cast, verdict, director
        self._kinds = kinds
        self._draw = random.Random(seed)
        self._lease_s, self._away_s = lease_s, away_s
        self._away: set[str] = set()
        self._deck: list[str] = []
        self.done: Counter[str] = Counter()

    def strike(self) -> None:
        """Do the next fault and heal it. Return when all queues are served."""
        if not self._deck:
            self._deck = self._draw.sample(self._kinds, len(self._kinds))
        kind = self._deck.pop()
        if kind.endswith("_cluster"):
            self._leave_cluster(kind)
        else:
            self._strike(kind)

    def rest_s(self, most_s: float) -> float:
        """Return how long to rest before the next fault."""
        return self._draw.uniform(0.0, most_s)

    def _strike(self, kind: str) -> None:
        match kind:
            case "kill" | "replace":
                self._kill(kind, is_disk_lost=kind == "replace")
            case "pause":
                self._pause()
            case "drain":
                self._drain("drain", self._victim())
            case "roll":
                for host in self._cast.hosts.values():
                    self._drain("roll", host)
            case "kill_node":
                self._kill_node()
            case "clock":
                self._set_clock()
            case "sleep":
                self._sleep()

    # Hosts

    def _kill(self, kind: str, *, is_disk_lost: bool) -> None:
        host = self._victim()
        watch = self._watch(kind, host.name)
        host.kill(is_disk_lost=is_disk_lost)
        self._await(watch)
        self.start_host(host)

    def _pause(self) -> None:
        """Pause a host for longer than its lease. Other hosts serve its queues meanwhile."""
        host = self._victim()
        watch = self._watch("pause", host.name)
        with host.paused():
            self._director.rest(watch.since_s + self._lease_s + PAST_LEASE_S)
            self._await(watch)
            watch = self._watch("resume", host.name)
        self._await(watch)

    def _drain(self, kind: str, host: Host) -> None:
        watch = self._watch(kind, host.name)
        if status := host.drain():
            self._director.problem(f"{host.life} ended with status {status} after SIGTERM")
        self._await(watch)
        self.start_host(host)

    def _set_clock(self) -> None:
        """Let the clock of a host jump, and later jump back."""
        host = self._victim()
        for seconds in (self._draw.choice(JUMPS_S), 0):
            watch = self._watch("clock", host.name)
            host.set_clock(seconds)
            self._await(watch)

    def _sleep(self) -> None:
        """Let all hosts sleep for less than their leases, and then for longer."""
        for share in (0.5, 2.0):
            watch = self._watch("sleep", "all hosts")
            for host in self._cast.running:
                host.sleep(round(share * self._lease_s))
            self._await(watch)

    def start_host(self, host: Host) -> None:
        """Start a host. Return when it has started and all queues are served."""
        host.start()
        self._director.wait(lambda: host.life in self._verdict.started, f"the start of {host.life}")
        self._await(self._watch("join", host.name))

    # Clusters

    def _kill_node(self) -> None:
        """Kill a node, in half of the cases the leader."""
        name = self._draw.choice(list(self._cast.clusters))
        nodes = self._cast.clusters[name]
        leader = nodes.leader()
        node = leader if leader is not None and self._draw.random() < 0.5 else self._draw.choice(nodes.names)
        watch = self._watch("kill_leader" if node == leader else "kill_node", f"{name} {node}")
        nodes.kill(node)
        self._await(watch)
        nodes.start(node)
        nodes.wait_ready()
        self._await(self._watch("node_back", f"{name} {node}"))

    def _leave_cluster(self, kind: str) -> None:
        """Stop or pause all nodes of a cluster for a while."""
        name = self._draw.choice(list(self._cast.clusters))
        nodes = self._cast.clusters[name]
        begun_s = time.monotonic()
        self._away.add(name)
        watch = self._watch(kind, name)
        if kind == "stop_cluster":
            nodes.kill(*nodes.names)
        else:
            for node in nodes.names:
                nodes.pause(node)
        self._await(watch)
        self._strike(self._draw.choice(DURING_ABSENCE))
        self._director.rest(begun_s + self._away_s)
        if kind == "stop_cluster":
            nodes.start()
            nodes.wait_ready()
        else:
            for node in nodes.names:
                nodes.resume(node)
        self._away.discard(name)
        back = self._watch("cluster_back", name)
        self._verdict.absences.append(Absence(name, begun_s, back.since_s))
        self._await(back)

    # Helpers

    def _victim(self) -> Host:
        """Draw a host, usually one that serves a queue."""
        lives = [self._verdict.owner(queue) for queue in self._cast.clusters if queue not in self._away]
        owners = sorted({life.partition(".")[0] for life in lives if life is not None})
        if owners and self._draw.random() < 0.8:
            return self._cast.hosts[self._draw.choice(owners)]
        return self._draw.choice(list(self._cast.hosts.values()))

    def _watch(self, kind: str, what: str) -> Watch:
        self.done[kind] += 1
        self._director.say(f"{kind} {what}")
        fault = f"{kind} of {what}" + "".join(f", {name} away" for name in sorted(self._away))
        present = [queue for queue in self._cast.clusters if queue not in self._away]
        return self._verdict.watch(kind, fault, time.monotonic(), *present)

    def _await(self, watch: Watch) -> None:
        self._director.wait(lambda: not watch.waiting, f"all queues to be served after {watch.fault}")
        served = " ".join(f"{queue}={after_s:.1f}s" for queue, after_s in sorted(watch.served_s.items()))
        self._director.say(f"  served {served}")
