"""When a node's child process is started again, and in which order children stop.

Pure: events and the time go in, actions come out. Invariants:
- A child that ended is started again after a pause. The pause doubles as long as the child ends soon after
  each
  start. There is no pause after a reset of the cluster. If the exit status of the child shows that a restart
  cannot help, the other children are stopped, and the node ends with that status.
- Children stop one after the other, the last of `children` first: each gets SIGTERM, and SIGKILL after a time
  limit. Once stopping has started, nothing is started.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from enum import IntEnum
from typing import Final, TypeAlias

from msgspec import Struct

from rt.child_process import RestartBackoff
from rt.errors import RtError


class ExitStatus(IntEnum):
    """The exit status of a child and of the node."""

    STOPPED = 0
    """As requested."""
    FAILED = 1
    """A restart cannot help: invalid settings, corrupt files."""
    MISUSED = 2
    """Wrong command line. Handled like FAILED."""
    FELL = 70
    """The disk or consensus failed, or a bug. A restart may help. EX_SOFTWARE."""
    DIVERGED = 71
    """This replica differs from the others: it must not continue, and its files are kept."""
    RESET = 72
    """The cluster was reset: restart at once."""


class RestartLater(RtError):
    """The process must be restarted, because it cannot continue with closed files."""


FINAL: Final = frozenset({ExitStatus.FAILED, ExitStatus.MISUSED, ExitStatus.DIVERGED})
"""Statuses that end the node. After any other status, and any signal, the child is restarted."""


class RestartTimes(Struct, frozen=True):
    """In seconds."""

    pause_s_min: float = 0.1
    """First pause before a restart. It doubles up to `pause_s_max`."""
    pause_s_max: float = 5.0
    calm_s: float = 30.0
    """The pause starts again at the minimum when a child has run for this long."""
    stop_s: float = 10.0
    """For each child, from SIGTERM to SIGKILL."""


class StartChild(Struct, frozen=True):
    child: str


class SignalChild(Struct, frozen=True):
    child: str
    number: signal.Signals


Action: TypeAlias = StartChild | SignalChild


class _Child(Struct):
    restarts: RestartBackoff
    is_running: bool = False
    start_at_s: float | None = None
    kill_at_s: float | None = None
    is_asked: bool = False


class RestartPolicy:
    """Decides for `children`, in the order in which `start` starts them."""

    def __init__(self, children: Sequence[str], times: RestartTimes) -> None:
        pauses = times.pause_s_min, times.pause_s_max, times.calm_s
        self._children = {name: _Child(RestartBackoff(*pauses)) for name in children}
        self._stop_s = times.stop_s
        self._is_stopping = False
        self._result = ExitStatus.STOPPED

    @property
    def is_stopping(self) -> bool:
        return self._is_stopping

    @property
    def result(self) -> ExitStatus | None:
        """The node's exit status, once it is stopping and no child runs."""
        if not self._is_stopping or any(child.is_running for child in self._children.values()):
            return None
        return self._result

    @property
    def wake_at_s(self) -> float | None:
        """When `tick` must be called. None: not before another event."""
        times = [
            at_s
            for child in self._children.values()
            for at_s in (child.start_at_s, child.kill_at_s)
            if at_s is not None
        ]
        return min(times, default=None)

    def restart_at_s(self, name: str) -> float | None:
        """When a child will be restarted. None if it is not waiting for that."""
        return self._children[name].start_at_s

    def start(self, now_s: float) -> list[Action]:
        for child in self._children.values():
            child.start_at_s = now_s
        return self.tick(now_s)

    def ended(self, name: str, status: int, now_s: float) -> list[Action]:
        """Handle the end of a child, or a failed start. `status` is negative for a signal."""
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
        child.start_at_s = now_s + child.restarts.record_end(now_s)
        return []

    def stop(self, now_s: float) -> list[Action]:
        """Stop the node. Repeated calls change nothing: some systems send every signal twice."""
        if self._is_stopping:
            return []
        self._is_stopping = True
        for child in self._children.values():
            child.start_at_s = None
        return self._stop_next(now_s)

    def tick(self, now_s: float) -> list[Action]:
        """Return the actions that are due."""
        actions: list[Action] = []
        for name, child in self._children.items():
            if child.start_at_s is not None and child.start_at_s <= now_s:
                child.start_at_s, child.is_running = None, True
                child.restarts.record_start(now_s)
                actions.append(StartChild(name))
            if child.kill_at_s is not None and child.kill_at_s <= now_s:
                child.kill_at_s = None
                actions.append(SignalChild(name, signal.SIGKILL))
        return actions

    def _stop_next(self, now_s: float) -> list[Action]:
        """Stop the last running child, unless it is already stopping."""
        for name, child in reversed(self._children.items()):
            if child.is_running:
                if child.is_asked:
                    return []
                child.is_asked, child.kill_at_s = True, now_s + self._stop_s
                return [SignalChild(name, signal.SIGTERM)]
        return []
