"""What a node does about its child processes: when one is started again, in which order they stop.

Pure: events and the time go in, what to do comes out. Laws:
- A child that ended is started again, after a pause that doubles while it keeps ending soon, unless its exit
  status says that starting it again cannot help. Then the others are stopped, and the node ends with it too.
  Behind a reset of the cluster there is no pause.
- Children stop one after the other, the last of `children` first: each is asked, and killed if it has not
  ended in time. Once stopping has begun, nothing is started.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Final, TypeAlias

from rt.errors import RtError


class ExitStatus(IntEnum):
    """How a child ends, and the node."""

    STOPPED = 0
    """As it was asked to."""
    FAILED = 1
    """Starting it again cannot help: bad settings, damaged files."""
    MISUSED = 2
    """The command line is wrong; as FAILED."""
    FELL = 70
    """The disk or consensus failed, or the program is broken; a new start may recover. EX_SOFTWARE."""
    DIVERGED = 71
    """This replica differs from the others: it must not go on, and its files are kept."""
    RESET = 72
    """A reset of the cluster: it goes on when it is started again, at once."""


class RestartLater(RtError):
    """The process has to be started again, as nothing is open then."""


FINAL: Final = frozenset({ExitStatus.FAILED, ExitStatus.MISUSED, ExitStatus.DIVERGED})
"""Those that end the node. Any other, and any signal, leads to another start."""


@dataclass(frozen=True, slots=True)
class RestartTimes:
    """Seconds."""

    pause_s_min: float = 0.1
    """Before a child is started again; doubles ..."""
    pause_s_max: float = 5.0
    """... up to this, ..."""
    calm_s: float = 30.0
    """... and begins anew when a child has lived for so long."""
    stop_s: float = 10.0
    """For each child, from being asked to stop to being killed."""


@dataclass(frozen=True, slots=True)
class StartChild:
    """Start the child."""

    child: str


@dataclass(frozen=True, slots=True)
class SignalChild:
    """Send the child a signal."""

    child: str
    number: signal.Signals


Action: TypeAlias = StartChild | SignalChild


@dataclass(slots=True)
class _Child:
    is_running: bool = False
    started_s: float = 0.0
    pause_s: float = 0.0
    """Before its latest start."""
    start_at_s: float | None = None
    kill_at_s: float | None = None
    is_asked: bool = False


class RestartPolicy:
    """Decides for `children`, in the order in which they are started; all of them at `begin`."""

    def __init__(self, children: Sequence[str], times: RestartTimes) -> None:
        self._children = {name: _Child() for name in children}
        self._times = times
        self._is_stopping = False
        self._result = ExitStatus.STOPPED

    @property
    def is_stopping(self) -> bool:
        """Whether the node is on its way to its end."""
        return self._is_stopping

    @property
    def result(self) -> ExitStatus | None:
        """The node's exit status, once it is stopping and no child runs."""
        if not self._is_stopping or any(child.is_running for child in self._children.values()):
            return None
        return self._result

    @property
    def wake_at_s(self) -> float | None:
        """When `tick` has something to do; None: not before another event."""
        times = [
            at_s
            for child in self._children.values()
            for at_s in (child.start_at_s, child.kill_at_s)
            if at_s is not None
        ]
        return min(times, default=None)

    def restart_at_s(self, name: str) -> float | None:
        """When a child is started again; None if it is not waiting for that."""
        return self._children[name].start_at_s

    def begin(self, now_s: float) -> list[Action]:
        """Start them all."""
        for child in self._children.values():
            child.start_at_s = now_s
        return self.tick(now_s)

    def ended(self, name: str, status: int, now_s: float) -> list[Action]:
        """A child has ended, or could not even be started; `status` is negative for a signal."""
        child = self._children[name]
        child.is_running, child.kill_at_s = False, None
        if self._is_stopping:
            if status == ExitStatus.DIVERGED:
                self._result = ExitStatus.DIVERGED
            return self._stop_next(now_s)
        if status in FINAL:
            self._result = ExitStatus.DIVERGED if status == ExitStatus.DIVERGED else ExitStatus.FAILED
            return self.stop(now_s)
        if status == ExitStatus.RESET:
            child.start_at_s = now_s
            return self.tick(now_s)
        times = self._times
        if now_s - child.started_s >= times.calm_s:
            child.pause_s = 0.0
        child.pause_s = min(max(2 * child.pause_s, times.pause_s_min), times.pause_s_max)
        child.start_at_s = now_s + child.pause_s
        return []

    def stop(self, now_s: float) -> list[Action]:
        """The node is asked to end. More than once is no reason to hurry: some send every signal twice."""
        if self._is_stopping:
            return []
        self._is_stopping = True
        for child in self._children.values():
            child.start_at_s = None
        return self._stop_next(now_s)

    def tick(self, now_s: float) -> list[Action]:
        """Do what the time has come for."""
        actions: list[Action] = []
        for name, child in self._children.items():
            if child.start_at_s is not None and child.start_at_s <= now_s:
                child.start_at_s, child.started_s, child.is_running = None, now_s, True
                actions.append(StartChild(name))
            if child.kill_at_s is not None and child.kill_at_s <= now_s:
                child.kill_at_s = None
                actions.append(SignalChild(name, signal.SIGKILL))
        return actions

    def _stop_next(self, now_s: float) -> list[Action]:
        """Ask the last child that runs, unless one was asked that still does."""
        for name, child in reversed(self._children.items()):
            if child.is_running:
                if child.is_asked:
                    return []
                child.is_asked, child.kill_at_s = True, now_s + self._times.stop_s
                return [SignalChild(name, signal.SIGTERM)]
        return []
