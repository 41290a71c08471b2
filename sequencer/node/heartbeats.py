"""Which processes of a node serve, and which hang. Pure: heartbeats and the time go in, texts come out.

A process is starting until its first heartbeat: opening a large log takes long. After that it is hung if it
is silent for `HUNG_S`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from msgspec import Struct, field

from sequencer.ipc.silence import HUNG_S, SilenceDetector, next_step

START_S_MAX: Final = 900.0
"""A process that starts for longer counts as hung. The startup probe of the chart allows the same."""


class ChildState(Struct):
    name: str
    pid: int = 0
    """0: it does not run."""
    has_sent_heartbeat: bool = False
    """Whether it has sent a heartbeat since it was started."""
    has_served: bool = False
    """Whether it, or an earlier process of that name, has sent a heartbeat."""
    silence: SilenceDetector = field(default_factory=SilenceDetector)
    restarts_at_update: bool = False
    """Whether the silence is counted from the next update. The time before that update is not silence."""

    def restart_silence(self) -> None:
        self.silence.record_message()
        self.restarts_at_update = True

    def update(self, now_s: float) -> None:
        self.silence.update(now_s)
        if self.restarts_at_update:
            self.silence.record_message()
        self.restarts_at_update = False

    @property
    def silent_s(self) -> float:
        """Seconds since its last heartbeat, start or end. 0 until a process of this name has sent a
        heartbeat.
        """
        return self.silence.silent_s if self.has_served else 0.0

    @property
    def is_hung(self) -> bool:
        return bool(self.pid) and self.silence.silent_s >= (
            HUNG_S if self.has_sent_heartbeat else START_S_MAX
        )

    @property
    def is_serving(self) -> bool:
        return bool(self.pid) and self.has_sent_heartbeat and not self.is_hung

    @property
    def obstacle(self) -> str:
        """Why the process does not serve, and the next step; empty if it serves."""
        name = self.name
        if self.is_serving:
            return ""
        if not self.pid:
            return (
                f"{name}-down: the {name} process does not run. The node starts it again. See the node's log."
            )
        for_s = f"for {self.silence.silent_s:.0f} s"
        if not self.is_hung:
            return f"{name}-starting: the {name} process (pid {self.pid}) has been starting {for_s}."
        return f"{name}-hung: the {name} process (pid {self.pid}) has not answered {for_s}. {self.next_step}"

    @property
    def next_step(self) -> str:
        """The commands that help if it is hung."""
        return next_step(self.name, "its machine or in its container", self.pid)


class Heartbeats:
    """The states of `children`. Call `update` about once a second."""

    def __init__(self, children: Sequence[str]) -> None:
        self.children: Final = {name: ChildState(name) for name in children}

    def started(self, name: str, pid: int) -> None:
        child = self.children[name]
        child.pid, child.has_sent_heartbeat = pid, False
        child.restart_silence()

    def ended(self, name: str) -> None:
        child = self.children[name]
        child.pid, child.has_sent_heartbeat = 0, False
        child.restart_silence()

    def record(self, name: str) -> None:
        """Record that a heartbeat has arrived."""
        child = self.children[name]
        child.has_sent_heartbeat = child.has_served = True
        child.restart_silence()

    def update(self, now_s: float) -> None:
        """Set the time to `now_s`. All heartbeats that have arrived must be recorded before."""
        for child in self.children.values():
            child.update(now_s)

    @property
    def hung(self) -> list[ChildState]:
        return [child for child in self.children.values() if child.is_hung]

    @property
    def obstacles(self) -> list[str]:
        """Why processes do not serve; empty if all processes serve."""
        return [child.obstacle for child in self.children.values() if child.obstacle]
