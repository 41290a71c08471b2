"""Does the faults of a soak to its nodes, publishers and subscribers, and undoes them.

Rules: A fault is left out if its victim already has one. A disk is lost only while no node has a fault and
all disks lost before are restored, because the promises hold for one lost disk at a time.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, assert_never

from chaos.soak_cast import SoakPublisher, SoakSubscriber
from chaos.soak_faults import LEADER, Fault, Kind
from chaos.wired_nodes import CLIENTS, WiredNodes
from rt.errors import RtError
from rt.net.rest_client import RestResponse, ask
from sequencer.localcluster.nodes import Part

Undo = Callable[[], None]

ROLL_BYTES: Final = (64 << 10, 128 << 10, 256 << 10)
LIMIT_BYTES: Final = (512 << 10, 1 << 20, 2 << 20)
"""Retention limits from which a configuration is drawn. They are small, so the log is trimmed all the
time.
"""
HOLD_LIMIT_BYTES: Final = 32 << 20
_ASK_S: Final = 5.0
_RESTORED: Final = b"proposal_submitted RestoreDisk("
_EVERYBODY: Final = "everybody"


class Acts:
    """The faults done so far, by kind, and the faults still to be undone."""

    def __init__(
        self,
        nodes: WiredNodes,
        publishers: Sequence[SoakPublisher],
        subscribers: Sequence[SoakSubscriber],
        seed: int,
    ) -> None:
        self.done: Counter[Kind] = Counter()
        self.left_out: Counter[Kind] = Counter()
        self.retention_bytes = LIMIT_BYTES[1]
        """The retention limit of the last configuration that a node accepted."""
        self._nodes, self._publishers, self._subscribers = nodes, publishers, subscribers
        self._operator = nodes.certificate("operator", "soak")
        self._draw = random.Random(seed)
        self._busy: set[str] = set()
        self._lost = 0

    def begin(self, fault: Fault) -> Undo | None:
        """Start a fault, and return a function that undoes it. Return None if the fault is left out."""
        victim = self._victim(fault)
        if victim is None or victim in self._busy or (fault.kind == "wipe" and not self._is_whole()):
            self.left_out[fault.kind] += 1
            return None
        undo = self._do(fault.kind, victim)
        if undo is None:
            self.left_out[fault.kind] += 1
            return None
        self.done[fault.kind] += 1
        self._busy.add(victim)

        def undo_all() -> None:
            self._busy.discard(victim)
            undo()

        return undo_all

    def _victim(self, fault: Fault) -> str | None:
        match fault.kind:
            case "kill_publisher" | "restart_publisher":
                return self._publishers[fault.victim].name
            case "kill_subscriber" | "stop_subscriber":
                return self._subscribers[fault.victim].name
            case "cut_clients" | "soft_reset" | "configure":
                return _EVERYBODY
        return self._nodes.leader() if fault.victim == LEADER else self._nodes.names[fault.victim]

    def _is_whole(self) -> bool:
        return not self._busy.intersection(self._nodes.names) and self._lost == self._restored()

    def _restored(self) -> int:
        """Return how often a lost disk was found to be complete again."""
        return sum(
            Path(self._nodes.root, f"{name}.log").read_bytes().count(_RESTORED) for name in self._nodes.names
        )

    def _do(self, kind: Kind, victim: str) -> Undo | None:
        nodes = self._nodes
        match kind:
            case "kill_node":
                nodes.kill(victim)
                return lambda: nodes.start(victim)
            case "kill_control":
                return self._kill_part(victim, "control")
            case "kill_data":
                return self._kill_part(victim, "data")
            case "pause_node":
                return self._pause(victim, "node")
            case "pause_control":
                return self._pause(victim, "control")
            case "pause_data":
                return self._pause(victim, "data")
            case "wipe":
                nodes.kill(victim)
                nodes.wipe(victim)
                self._lost += 1
                return lambda: nodes.start(victim)
            case "cut":
                nodes.cut(victim)
                return lambda: nodes.heal(victim)
            case "silence":
                nodes.silence(victim)
                return lambda: nodes.heal(victim)
            case "cut_clients":
                nodes.cut(CLIENTS)
                return lambda: nodes.heal(CLIENTS)
            case "hand_over":
                nodes.stop(victim)
                return lambda: nodes.start(victim)
            case "soft_reset":
                return self._post("/soft-reset", force=False)
            case "configure":
                return self.configure(self._draw.choice(ROLL_BYTES), self._draw.choice(LIMIT_BYTES))
            case "kill_publisher" | "restart_publisher":
                publisher = next(one for one in self._publishers if one.name == victim)
                if kind == "kill_publisher":
                    publisher.kill()
                else:
                    publisher.close(0)
                return publisher.start
            case "kill_subscriber" | "stop_subscriber":
                subscriber = next(one for one in self._subscribers if one.name == victim)
                subscriber.kill()
                return subscriber.start
        assert_never(kind)

    def _kill_part(self, victim: str, part: Part) -> Undo:
        self._nodes.kill(victim, part=part)
        return _nothing

    def _pause(self, victim: str, part: Part) -> Undo:
        self._nodes.pause(victim, part)

        def undo() -> None:
            # Resume the whole node: a part that ended while it was stopped may have a successor.
            self._nodes.resume(victim)

        return undo

    # Operator requests

    def configure(self, roll_bytes: int, retention_bytes: int) -> Undo | None:
        """Configure these sizes, without a limit by age or by share of the disk."""
        undo = self._post(
            "/configuration",
            rollBytes=roll_bytes,
            retentionBytes=retention_bytes,
            holdBytesMax=HOLD_LIMIT_BYTES,
            retentionMinutes=0,
            retentionDiskPercent=0,
        )
        if undo is not None:
            self.retention_bytes = retention_bytes
        return undo

    def asked(self, target: str, body: dict[str, Any] | None = None) -> RestResponse | None:
        """Send an operator's request to the running nodes. Return the answer; None if no node answers."""
        endpoints = [f"127.0.0.1:{self._nodes.data_ports[name]}" for name in self._nodes.running]
        method, data = ("GET", None) if body is None else ("POST", json.dumps(body).encode())
        try:
            return asyncio.run(ask(endpoints, self._operator, method, target, data, timeout_s=_ASK_S))
        except RtError:
            return None

    def _post(self, target: str, **body: Any) -> Undo | None:
        answer = self.asked(target, body)
        return _nothing if answer is not None and answer.status < 300 else None


def _nothing() -> None:
    """Undo a fault that is over at once."""
