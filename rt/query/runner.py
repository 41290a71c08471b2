"""Runs an engine with its sources and sinks in one loop: pump, fire timers, deliver, checkpoint."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from rt.option_checks import TIMEOUT_SECONDS_MAX, check_range
from rt.query.core.errors import Backlogged
from rt.query.core.scheduler import NS_PER_S, RealScheduler
from rt.query.engine import QueryEngine


class PumpedSource(Protocol):
    """A source that sends values when it is asked, such as a `MessageSource`."""

    def pump(self, max_messages: int = 1000, timeout: float = 0.0) -> int:
        """Send up to `max_messages`, waiting `timeout` seconds for the first one.

        Returns how many were accepted.
        """


class PumpedSink(Protocol):
    """A sink that acknowledges values when it is asked, such as a `MessageSink`."""

    def pump(self) -> None:
        """Acknowledge the finished values."""


class EngineRunner:
    """For one thread. `checkpoint_s`: seconds between checkpoints. Outputs may wait for a checkpoint.

    Errors of sources, sinks and commits are raised. After an error, call the method again, or end the
    process: the next run continues.
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
        self._checkpoint_s: Final = check_range(checkpoint_s, 0, math.inf, name="checkpoint_s")
        self._idle_s: Final = check_range(idle_s, 0, TIMEOUT_SECONDS_MAX, name="idle_s")
        self._clock: Final = clock
        self._last_checkpoint = clock()
        self._has_fired = False
        """Whether the last round fired a timer: then more may be due."""

    def run_once(self, timeout: float = 0.0) -> int:
        """Run one round, waiting `timeout` seconds for the first message.

        While calls of `map_async` run, a finished call ends the wait, and the sources are polled every tenth
        of `idle_s`. Returns how many messages were processed.
        """
        processed = 0
        wait_s = 0.0 if self._engine.calls.open_count else timeout
        if not self._engine.is_backlogged:
            for source in self._sources:
                with contextlib.suppress(Backlogged):
                    processed += source.pump(timeout=0.0 if processed else wait_s)
                    wait_s = 0.0  # not set if the source is refused: it did not wait
        if timeout and not processed and self._engine.calls.open_count:
            self._engine.calls.wait(min(timeout, self._idle_s / 10))
        self._engine.event_time.check_idle(self._clock())
        self._has_fired = self._engine.run_due()
        self._engine.deliver()
        for sink in self._sinks:
            sink.pump()
        if self._clock() - self._last_checkpoint >= self._checkpoint_s:
            self.checkpoint()
        return processed

    def run(self, until: Callable[[], bool]) -> None:
        """Run rounds until `until()` is true, then checkpoint until all outputs are sent."""
        is_idle = False
        while not until():
            if is_idle and self._engine.is_backlogged:
                self._engine.calls.wait(self._idle_s / 10)
            is_idle = not self.run_once(self._wait_s() if is_idle else 0.0) and not self._has_fired
        while self.checkpoint():
            pass

    def checkpoint(self) -> bool:
        """Checkpoint and deliver the values that waited for it. Returns whether there were any."""
        self._engine.checkpoint()
        delivered = self._engine.deliver()
        for sink in self._sinks:
            sink.pump()
        self._last_checkpoint = self._clock()
        return delivered

    def _wait_s(self) -> float:
        """Seconds until the next checkpoint or timer is due, at most `idle_s`."""
        left = [self._idle_s, self._last_checkpoint + self._checkpoint_s - self._clock()]
        scheduler = self._engine.scheduler
        if isinstance(scheduler, RealScheduler) and scheduler.next_due_ns is not None:
            left.append((scheduler.next_due_ns - scheduler.now_ns) / NS_PER_S)
        return max(0.0, min(left))
