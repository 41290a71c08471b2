"""Holders of leases in a simulation, and the laws for their leases.

Each holder has its own clock, asks any running node, may repeat a request to another node much later, and may
never receive the answer. The laws: two holders never rely on one lease at the same moment, each by its own
clock. A new token is greater than all earlier tokens. A history that starts with a force may have lost grants
of other nodes, so there only the tokens decide; see `sequencer.state.operations.resets`.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, TypeAlias

from rt.streams.balancer.lease import DRIFT
from sequencer.state.apply_result import LeasesExpired, LeasesGranted, Outcome
from sequencer.state.command_codec import encode_command
from sequencer.state.leases.leases import AcquireLeases, HeldLease, ReleaseLeases, RenewLeases
from simulation.history import require
from simulation.timeline import NodeClock

if TYPE_CHECKING:
    from sequencer.state.commands import Command
    from simulation.cluster import Cluster
    from simulation.run import NodeRun

DURATION_MS: Final = 1000
NAMES: Final = ("g/a", "g/b")
ASK_EVERY_S: Final = 0.15

LeaseCommand: TypeAlias = AcquireLeases | RenewLeases | ReleaseLeases


@dataclass(frozen=True, slots=True)
class Belief:
    """A lease on which a holder relies until `until_s` of its clock. `line`: the history that granted it."""

    token: int
    until_s: float
    line: int


@dataclass(eq=False, slots=True)
class Holder:
    """One owner of leases."""

    name: str
    clock: NodeClock
    beliefs: dict[str, Belief] = field(default_factory=dict)
    asked: dict[str, tuple[bytes, float]] = field(default_factory=dict)
    """By lease: the request that is not answered yet, and its start by the holder's clock."""

    def counts_on(self, lease: str) -> Belief | None:
        """Return the belief that is still valid now; None if there is none."""
        belief = self.beliefs.get(lease)
        return belief if belief is not None and self.clock.read() < belief.until_s else None


class Holders:
    """All holders of a simulation. There are none if the settings say so."""

    def __init__(self, cluster: Cluster) -> None:
        self.is_over = False
        self.seen: Counter[str] = Counter()
        """Results of lease requests, each counted once per history."""
        self._cluster = cluster
        settings, state = cluster.settings, cluster.rng.getstate()
        # Separate random numbers: other events do not depend on holders.
        self._rng = random.Random(repr(state[1][:8]))
        self._share = 1 - max(DRIFT, settings.drift)
        self.all = [
            Holder(f"h{at}", NodeClock(cluster.timeline, offset=0.0, rate=self._rate()))
            for at in range(settings.holders)
        ]
        self._given: dict[int, dict[int, tuple[bytes, str]]] = {}
        """By history, then by token: the request and the lease that got the token."""
        self._heard: dict[int, int] = {}
        """By history: the index up to which the outcomes of commands were recorded."""

    def begin(self) -> None:
        """Start asking."""
        for holder in self.all:
            self._ask_later(holder)

    # Asking

    def _ask_later(self, holder: Holder) -> None:
        def act() -> None:
            if not self.is_over:
                self._ask(holder, self._rng.choice(NAMES))
                self._ask_later(holder)

        # Sometimes a holder pauses, so that its leases expire.
        rest_s = self._rng.uniform(0.5, 2.0) if self._rng.random() < 0.1 else 0.0
        self._cluster.timeline.after(self._rng.expovariate(1 / ASK_EVERY_S) + rest_s, act)

    def _ask(self, holder: Holder, lease: str) -> None:
        request, drawn = self._rng.randbytes(16), self._rng.random()
        belief = holder.counts_on(lease)
        command: LeaseCommand
        if belief is None:
            command = AcquireLeases(request, holder.name, DURATION_MS, (lease,))
        elif drawn < 0.15:
            del holder.beliefs[lease]  # A holder stops relying on a lease before it releases it.
            command = ReleaseLeases(request, holder.name, (HeldLease(lease, belief.token),))
        elif drawn < 0.7:
            command = RenewLeases(request, holder.name, (HeldLease(lease, belief.token),))
        else:
            return
        holder.asked[lease] = request, holder.clock.read()
        content = encode_command(command)
        self._send(content, self._rng.choice((0.001, 0.02, 0.5)))
        if self._rng.random() < 0.3:
            self._send(content, self._rng.choice((0.1, 1.0, 3.0)))

    def _send(self, content: bytes, delay_s: float) -> None:
        def arrive() -> None:
            runs = self._cluster.runs()
            if runs and not self.is_over:
                self._rng.choice(runs).propose(0, content)

        self._cluster.timeline.after(delay_s * self._rng.random(), arrive)

    # Answers

    def on_applied(self, run: NodeRun, command: Command, outcome: Outcome) -> None:
        """A node applied a command about leases."""
        line, index = run.machine.line, run.machine.index
        if index > self._heard.get(line, 0):
            self._heard[line] = index
            self._note(line, command, outcome)
        if not isinstance(command, AcquireLeases | RenewLeases) or not isinstance(outcome, LeasesGranted):
            return
        if self._rng.random() < 0.8:
            delay_s = self._rng.choice((0.001, 0.02, 0.5)) * self._rng.random()
            self._cluster.timeline.after(delay_s, lambda: self._hear(line, command, outcome))

    def _note(self, line: int, command: Command, outcome: Outcome) -> None:
        """Record the outcome of a command, once per history, and check new tokens."""
        if isinstance(outcome, LeasesExpired):
            self.seen["expired"] += len(outcome.names)
        if not isinstance(outcome, LeasesGranted):
            return
        self.seen["renewed"] += outcome.renewed
        self.seen["released"] += outcome.released
        if not isinstance(command, AcquireLeases):
            return
        for name, token in zip(command.names, outcome.tokens, strict=True):
            given = self._given.setdefault(line, {})
            if not token or given.get(token) == (command.request, name):
                continue
            before = max((max(each) for at, each in self._given.items() if at <= line and each), default=0)
            require(token > before, "a token that is not greater", name, command.owner, line, token, before)
            given[token] = command.request, name
            self.seen["granted"] += 1

    def _hear(self, line: int, command: AcquireLeases | RenewLeases, outcome: LeasesGranted) -> None:
        """Deliver the answer to the holder, if it still waits for it."""
        holder = next(one for one in self.all if one.name == command.owner)
        names = command.names if isinstance(command, AcquireLeases) else [one.name for one in command.leases]
        for name, token in zip(names, outcome.tokens, strict=True):
            request, asked_s = holder.asked.get(name, (b"", 0.0))
            if request != command.request:
                continue
            del holder.asked[name]
            if not token:
                holder.beliefs.pop(name, None)
                continue
            holder.beliefs[name] = Belief(token, self._until_s(holder, asked_s), line)
            self._require_alone(holder, name)

    def _until_s(self, _holder: Holder, asked_s: float) -> float:
        return asked_s + DURATION_MS / 1000 * self._share

    def _require_alone(self, holder: Holder, lease: str) -> None:
        own = holder.counts_on(lease)
        for other in self.all:
            belief = other.counts_on(lease)
            if own is not None and belief is not None and other is not holder:
                is_apart = belief.line != own.line
                require(is_apart, "two holders of one lease", lease, holder.name, own, other.name, belief)

    def _rate(self) -> float:
        return 1.0 + self._rng.uniform(-0.5, 0.5) * self._cluster.settings.drift
