"""Virtual time: the pending events and each node's clock.

Invariant: nothing here reads a real clock. Events of the same time happen in the order of their insertion.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
from collections.abc import Callable, Iterator

from sequencer.raft.core import pysyncobj_adapter


class Timeline:
    """The pending events; `now` is the time of the current event, in seconds."""

    def __init__(self) -> None:
        self.now = 0.0
        self._numbers = itertools.count()
        self._events: list[tuple[float, int, Callable[[], None]]] = []

    def at(self, when: float, action: Callable[[], None]) -> None:
        """Schedule `action` at `when`, or now if that is past."""
        heapq.heappush(self._events, (max(when, self.now), next(self._numbers), action))

    def after(self, delay: float, action: Callable[[], None]) -> None:
        """Schedule `action` in `delay` seconds."""
        self.at(self.now + delay, action)

    def run(self, until: float) -> None:
        """Run all events up to `until`."""
        events = self._events
        while events and events[0][0] <= until:
            self.now, _, action = heapq.heappop(events)
            action()
        self.now = until


class NodeClock:
    """A monotonic clock that runs at its own rate, and may jump forward.

    `spent` is the duration of the node's current round so far, in real seconds. The time of the other nodes
    does not include it yet.
    """

    def __init__(self, timeline: Timeline, *, offset: float, rate: float) -> None:
        self._timeline = timeline
        self._offset = offset
        self.rate = rate
        self.spent = 0.0

    def read(self) -> float:
        """Return the time that the node sees."""
        return self._offset + self.rate * (self._timeline.now + self.spent)

    def jump(self, seconds: float) -> None:
        """Jump forward, as a clock does after its machine was suspended."""
        self._offset += seconds

    def real(self, seconds: float) -> float:
        """Return the real time in which this clock advances by `seconds`."""
        return seconds / self.rate


class Clocks:
    """Selects the current node's clock. `installed` puts it in the place of the only clock that nodes
    read.
    """

    def __init__(self) -> None:
        self._current: NodeClock | None = None

    def read(self) -> float:
        """Read the clock of the running node."""
        assert self._current is not None, "a clock was read outside every node"
        return self._current.read()

    @contextlib.contextmanager
    def running(self, clock: NodeClock) -> Iterator[None]:
        """Make `clock` the current clock."""
        before, self._current = self._current, clock
        try:
            yield
        finally:
            self._current = before

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Replace the clock that all nodes read."""
        with pysyncobj_adapter.clock(self.read):
            yield
