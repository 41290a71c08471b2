"""Watches which host serves which queue: checks the invariants, and measures the times without service.

Invariants that are checked, each time a host reports a change and once a second:
- No two hosts serve a queue at the same time, each by its own clock.
- A queue is served again within the bound, if no other host failed meanwhile. A host that has failed counts
  as present until its lease ends: until then other hosts leave free queues to it, up to its share. So the
  bound is counted from the last fault; the times without service are counted from the first fault.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Final

from msgspec import Struct, field

from rt.streams.simulate.host import Host

VIOLATIONS_MAX: Final = 20
"""The maximum number of violations that are recorded. Later violations are only counted."""


class PhaseFigures(Struct):
    """The figures that were measured in one phase."""

    moves: int = 0
    """Queues that are served by another process than before."""
    streams_moved: int = 0
    gaps_s: list[float] = field(default_factory=list)
    """The times without service, of queues served again."""


class ServiceWatch:
    """`streams_of`: the number of streams of each queue, by name."""

    def __init__(
        self, now_s: Callable[[], float], bound_s: float, streams_of: Mapping[str, int], queues: Iterable[str]
    ) -> None:
        self.figures = PhaseFigures()
        self.violations: list[str] = []
        self.violation_count = 0
        self._now_s, self._bound_s, self._streams_of = now_s, bound_s, streams_of
        self._claims: dict[str, set[Host]] = {}
        """By queue: the processes that have reported that they serve it."""
        self._of_host: dict[Host, set[str]] = {}
        self._last: dict[str, Host] = {}
        self._unserved: dict[str, float] = {}
        """By queue without service: the time since which it is not served."""
        self._last_fault_s = 0.0
        self._excused = set[str]()
        self._late = set[str]()
        self.expect(queues)

    # What should be served

    def expect(self, queues: Iterable[str]) -> None:
        """From now on these queues should be served, and their time without service counts."""
        for queue in queues:
            self._excused.discard(queue)
            if not any(host.is_working for host in self._claims.get(queue, ())):
                self._unserved[queue] = self._now_s()

    def excuse(self, queues: Iterable[str]) -> None:
        """They cannot be served from now on: their cluster is away or removed."""
        for queue in queues:
            self._excused.add(queue)
            self._unserved.pop(queue, None)

    def fault(self, host: Host) -> None:
        """The host serves nothing from now on, even if it assumes that it does."""
        self._last_fault_s = self._now_s()
        for queue in self._of_host.get(host, ()):
            if queue not in self._excused:
                self._unserved.setdefault(queue, self._now_s())

    @property
    def unserved(self) -> Collection[str]:
        return self._unserved.keys()

    # What is served

    def queues_changed(self, host: Host) -> None:
        now, before = {queue.name for queue in host.serving()}, self._of_host.get(host, set())
        for queue in sorted(before - now):
            self._claims[queue].discard(host)
            if not self._claims[queue] and queue not in self._excused:
                self._unserved.setdefault(queue, self._now_s())
        for queue in sorted(now - before):
            self._won(queue, host)
        if now:
            self._of_host[host] = now
        else:
            self._of_host.pop(host, None)

    def _won(self, queue: str, host: Host) -> None:
        for other in self._claims.setdefault(queue, set()):
            if any(each.name == queue for each in other.serving()):
                self._violated(f"{queue}: served by {other.leases.owner} and {host.leases.owner}")
        self._claims[queue].add(host)
        if (last := self._last.get(queue)) is not None and last is not host:
            self.figures.moves += 1
            self.figures.streams_moved += self._streams_of.get(queue, 0)
        self._last[queue] = host
        if host.is_working and (since_s := self._unserved.pop(queue, None)) is not None:
            self.figures.gaps_s.append(self._now_s() - since_s)
            self._check_gap(queue, since_s)
            self._late.discard(queue)

    # Checks

    def check(self, hosts: Iterable[Host]) -> None:
        """Check all invariants, independent of the reports of the hosts."""
        owners = Counter(queue.name for host in hosts for queue in host.serving())
        for queue, count in owners.items():
            if count > 1:
                self._violated(f"{queue}: served by {count} hosts")
        for queue, since_s in self._unserved.items():
            self._check_gap(queue, since_s)

    def _check_gap(self, queue: str, since_s: float) -> None:
        waited_s = self._now_s() - max(since_s, self._last_fault_s)
        if waited_s > self._bound_s and queue not in self._late:
            self._late.add(queue)
            self._violated(f"{queue}: not served for more than {self._bound_s:g} s")

    def _violated(self, what: str) -> None:
        self.violation_count += 1
        if len(self.violations) < VIOLATIONS_MAX:
            self.violations.append(f"at {self._now_s():.3f} s: {what}")
