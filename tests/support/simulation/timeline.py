"""Virtual time: what happens next, and what each node's clock says.

Law: nothing here reads a real clock. Events of one moment happen in the order they were put in.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
from collections.abc import Callable, Iterator

from sequencer.raft.core import pysyncobj_adapter


class Timeline:
    """The events to come; `now` is the moment of the one that happens, in seconds."""

    def __init__(self) -> None:
        self.now = 0.0
        self._numbers = itertools.count()
        self._events: list[tuple[float, int, Callable[[], None]]] = []

    def at(self, when: float, action: Callable[[], None]) -> None:
        """Have `action` called at `when`, or now if that is past."""
        heapq.heappush(self._events, (max(when, self.now), next(self._numbers), action))

    def after(self, delay: float, action: Callable[[], None]) -> None:
        """Have `action` called `delay` seconds from now."""
        self.at(self.now + delay, action)

    def run(self, until: float) -> None:
        """Let everything happen up to `until`."""
        events = self._events
        while events and events[0][0] <= until:
            self.now, _, action = heapq.heappop(events)
            action()
        self.now = until


class NodeClock:
    """A monotonic clock that runs at its own rate, and may jump forward.

    `spent` is what the node's present round has taken, in real seconds: the others are not that far yet.
    """

    def __init__(self, timeline: Timeline, *, offset: float, rate: float) -> None:
        self._timeline = timeline
        self._offset = offset
        self.rate = rate
        self.spent = 0.0

    def read(self) -> float:
        """What the node sees."""
        return self._offset + self.rate * (self._timeline.now + self.spent)

    def jump(self, seconds: float) -> None:
        """As after a suspended machine: forward, never back."""
        self._offset += seconds

    def real(self, seconds: float) -> float:
        """How long it takes until this clock has advanced by `seconds`."""
        return seconds / self.rate


class Clocks:
    """Which node's clock counts now. `installed` puts it in the place of the only clock that nodes read."""

    def __init__(self) -> None:
        self._current: NodeClock | None = None

    def read(self) -> float:
        """The clock of the node that runs."""
        assert self._current is not None, "a clock was read outside every node"
        return self._current.read()

    @contextlib.contextmanager
    def running(self, clock: NodeClock) -> Iterator[None]:
        """Let a node run."""
        before, self._current = self._current, clock
        try:
            yield
        finally:
            self._current = before

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Replace the one clock of all nodes."""
        with pysyncobj_adapter.clock(self.read):
            yield
