"""Running an engine with its sources and sinks: one loop, which pumps, fires, delivers and checkpoints."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from rt.query.engine import QueryEngine
from rt.query.errors import Backlogged
from rt.query.scheduling import NS_PER_S, RealScheduler


class PumpedSource(Protocol):
    """A `MessageSource`, or another that hands on values when it is asked to."""

    def pump(self, max_messages: int = 1000, timeout: float = 0.0) -> int:
        """Hand on up to so many, waiting `timeout` seconds for the first; how many."""


class PumpedSink(Protocol):
    """A `MessageSink`, or another that acknowledges when it is asked to."""

    def pump(self) -> None:
        """Acknowledge what is done."""


class EngineRunner:
    """For one thread. `checkpoint_s`: how often to checkpoint, and so how late outputs that wait for it are.

    Nothing is handled that fails: what sources, sinks or commits raise comes out, and it may be called again,
    or the process ended: the next life goes on.
    """

    def __init__(
        self,
        engine: QueryEngine,
        sources: Sequence[PumpedSource],
        sinks: Sequence[PumpedSink] = (),
        *,
        checkpoint_s: float = 0.5,
        idle_s: float = 0.1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine: Final = engine
        self._sources: Final = sources
        self._sinks: Final = sinks
        self._checkpoint_s: Final = checkpoint_s
        self._idle_s: Final = idle_s
        self._clock: Final = clock
        self._last_checkpoint = clock()

    def run_once(self, timeout: float = 0.0) -> int:
        """One turn, waiting `timeout` seconds for the first message; how many messages were processed."""
        taken = 0
        if not self._engine.is_backlogged:
            for index, source in enumerate(self._sources):
                with contextlib.suppress(Backlogged):
                    taken += source.pump(timeout=0.0 if taken or index else timeout)
        self._engine.run_due()
        self._engine.deliver()
        for sink in self._sinks:
            sink.pump()
        if self._clock() - self._last_checkpoint >= self._checkpoint_s:
            self.checkpoint()
        return taken

    def run(self, until: Callable[[], bool]) -> None:
        """Turns until that is so; ends with checkpoints until all outputs are sent."""
        is_idle = False
        pause = threading.Event()
        while not until():
            if is_idle and self._engine.is_backlogged:
                pause.wait(self._idle_s / 10)
            is_idle = not self.run_once(self._wait_s() if is_idle else 0.0)
        while self.checkpoint():
            pass

    def checkpoint(self) -> bool:
        """Checkpoint now, and deliver what waited for it; whether anything did."""
        self._engine.checkpoint()
        delivered = self._engine.deliver()
        for sink in self._sinks:
            sink.pump()
        self._last_checkpoint = self._clock()
        return delivered

    def _wait_s(self) -> float:
        """Until something is due: a checkpoint or a timer, at most `idle_s`."""
        left = [self._idle_s, self._last_checkpoint + self._checkpoint_s - self._clock()]
        scheduler = self._engine.scheduler
        if isinstance(scheduler, RealScheduler) and scheduler.next_due_ns is not None:
            left.append((scheduler.next_due_ns - scheduler.now_ns) / NS_PER_S)
        return max(0.0, min(left))
