"""Reports what the processes of a node do: to the log, to systemd, and to probes while the data process is
silent.

For the supervisor's thread. Invariants:
- Nothing here blocks.
- systemd's watchdog gets notifications of this node while none of its processes hangs.
"""

from __future__ import annotations

import logging
import select
import socket
from collections.abc import Sequence
from typing import Final

from rt.sidecar.systemd_notify import READY, STOPPING, WATCHDOG, ServiceNotifier
from sequencer.node.health_answers import health_answer
from sequencer.node.health_port import HealthPort
from sequencer.node.heartbeats import ChildState, Heartbeats

TICK_S: Final = 1.0
LOG_S: Final = 60.0
"""Minimum time between two log records about one hung process."""
_STOPPING: Final = "the node is stopping"
_ANSWERS_AGAIN: Final = "the data process answers again: repeat the request"

logger = logging.getLogger("sequencer.node.node_watch")


class NodeWatch:
    """Watches `children` of `node`. Without `listening` it answers no probes."""

    def __init__(
        self,
        children: Sequence[str],
        node: str = "",
        listening: socket.socket | None = None,
        notifier: ServiceNotifier | None = None,
    ) -> None:
        self._node = node
        self._heartbeats = Heartbeats(children)
        self._notifier = notifier or ServiceNotifier({})
        self._health = None if listening is None else HealthPort(listening, self._answer)
        self._is_ready = self._is_stopping = False
        self._status = ""
        self._watchdog_due_s = 0.0
        self._logged_s: dict[str, float] = {}
        """By child, when it was last logged as hung."""
        self._hung: dict[str, float] = {}
        """The children that were logged as hung and do not answer yet, with their silence."""

    def inherited(self, child: str) -> tuple[int, ...]:
        """The descriptors that a child inherits."""
        return () if self._health is None or child != "data" else (self._health.fd,)

    def started(self, child: str, pid: int) -> None:
        self._heartbeats.started(child, pid)

    def ended(self, child: str) -> None:
        self._heartbeats.ended(child)
        self._hung.pop(child, None)

    def heard(self, child: str) -> None:
        """Record that a heartbeat of a child has arrived."""
        self._heartbeats.record(child)
        if (silent_s := self._hung.pop(child, None)) is not None:
            logger.warning("child_answers child=%s silent_s=%.0f", child, silent_s)

    def stopping(self) -> None:
        """Record that the node stops. Repeated calls change nothing."""
        self._is_stopping = True

    def register(self, poll: select.poll, now_s: float) -> None:
        """Make `poll` return when `tick` has work. `tick` also has work every `TICK_S`."""
        if self._health is not None:
            self._health.register(poll, now_s, is_needed=self._is_needed)

    def tick(self, now_s: float) -> None:
        """Do what is due. All heartbeats that have arrived must be recorded before."""
        self._heartbeats.update(now_s)
        if not self._is_stopping:
            for child in self._heartbeats.hung:
                self._log(child, now_s)
            self._notify(now_s)
        elif self._status != _STOPPING and self._notifier.send(STOPPING, f"STATUS={_STOPPING}"):
            self._status = _STOPPING
        if self._health is not None:
            self._health.exchange(now_s, is_needed=self._is_needed)

    def close(self) -> None:
        if self._health is not None:
            self._health.close()

    @property
    def _is_needed(self) -> bool:
        """Whether the data process does not answer on the health port."""
        return self._is_stopping or not self._heartbeats.children["data"].is_serving

    def _answer(self, request: bytes) -> bytes:
        children = self._heartbeats.children
        obstacles = [_STOPPING] if self._is_stopping else self._heartbeats.obstacles or [_ANSWERS_AGAIN]
        return health_answer(request, self._node, obstacles, children["data"], children["control"])

    def _log(self, child: ChildState, now_s: float) -> None:
        if now_s - self._logged_s.get(child.name, float("-inf")) >= LOG_S:
            self._logged_s[child.name] = now_s
            self._hung[child.name] = child.silence.silent_s
            logger.error(
                "child_hung child=%s pid=%d silent_s=%.0f hint=%r",
                child.name,
                child.pid,
                child.silence.silent_s,
                child.next_step,
            )
        elif child.name in self._hung:
            self._hung[child.name] = child.silence.silent_s

    def _notify(self, now_s: float) -> None:
        obstacles = self._heartbeats.obstacles
        if not obstacles and not self._is_ready:
            self._is_ready = self._notifier.send(READY)
        status = " ".join(obstacles) or "serving"
        if status != self._status and self._notifier.send(f"STATUS={status}"):
            self._status = status
        is_due = self._notifier.watchdog_s and now_s >= self._watchdog_due_s
        if is_due and not self._heartbeats.hung:
            self._watchdog_due_s = now_s + self._notifier.watchdog_s
            self._notifier.send(WATCHDOG)
