"""Runs a cluster of real processes under random faults from a seed, and checks what all its processes did.

`python -m chaos.run --seconds 1800 --nodes 3 --seed 7` starts one by hand. The seed decides the order and the
duration of the faults. Their effect depends on the machine. Invariant: no process remains after a run.
"""

from __future__ import annotations

import math
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from chaos.checks import Verdict, check_lives
from chaos.cluster import Cluster
from chaos.faults import Faults
from rt.errors import RtError, Timeout
from sequencer.localcluster.processes import Answer

HEAL_S_MAX = 180.0
"""How long a healed cluster may take until every node has applied the proposals made since the heal."""
_POLL_S = 0.05


@dataclass(slots=True)
class Outcome:
    """The faults of one run, and its result."""

    seed: int
    verdict: Verdict
    faults: Counter[str] = field(default_factory=Counter)
    lost_changes: int = 0
    """Number of file changes that power cuts undid."""
    term: int = 0
    problems: list[str] = field(default_factory=list)
    """Broken guarantees. None are expected."""

    def __str__(self) -> str:
        verdict = self.verdict
        faults = " ".join(f"{name}={count}" for name, count in sorted(self.faults.items()))
        return (
            f"seed={self.seed} commands={verdict.commands} acknowledged={verdict.acknowledged} "
            f"lives={verdict.lives} installs={verdict.installs} term={self.term} "
            f"lost_changes={self.lost_changes} faults: {faults}"
            + "".join(f"\n  problem: {problem}" for problem in self.problems)
        )


class Chaos:
    """One run. It ends after `seconds` or after `strikes` faults, whichever comes first.

    `rest_s_max` is the longest rest between two faults. `pause_s` is the average pause of a proposer between
    bursts.
    """

    def __init__(
        self,
        root: Path,
        *,
        nodes: int = 3,
        seconds: float = math.inf,
        strikes: float = math.inf,
        seed: int,
        rest_s_max: float = 1.5,
        pause_s: float = 0.03,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._draw = random.Random(seed)
        self._seconds, self._strikes, self._rest_s_max = seconds, strikes, rest_s_max
        self._say = say
        self._cluster = Cluster(root, nodes, seed=seed, pause_s=pause_s)
        self._faults = Faults(self._cluster, seed, say)
        self._outcome = Outcome(seed, Verdict())

    def run(self) -> Outcome:
        """Run all phases. The outcome contains the problems."""
        outcome, cluster = self._outcome, self._cluster
        with cluster:
            try:
                for name in cluster.names:
                    cluster.start(name)
                self._settle()
                self._torment(time.monotonic() + self._seconds)
                self._finish()
            except RtError as error:
                outcome.problems.append(f"{type(error).__name__}: {error}")
        outcome.faults, outcome.lost_changes = self._faults.done, self._faults.lost_changes
        directories = {name: cluster.out(name) for name in cluster.names}
        outcome.verdict = check_lives(directories, is_settled=not outcome.problems)
        outcome.problems += outcome.verdict.problems
        if not outcome.verdict.acknowledged:
            outcome.problems.append("nothing was acknowledged: the run proves nothing")
        return outcome

    def _torment(self, until: float) -> None:
        struck = 0
        while True:
            for _ in range(self._draw.randint(5, 12)):
                if struck >= self._strikes or time.monotonic() > until:
                    return
                self._faults.strike()
                struck += 1
                self._faults.wait(self._draw.uniform(0.05, self._rest_s_max))
            self._settle()
            if self._draw.random() < 0.6:
                self._faults.wipe()

    def _settle(self) -> None:
        """Heal everything, and wait until all nodes count and apply new commands."""
        self._faults.heal()
        reached = max(status["index"] for status in self._cluster.statuses())
        self._await("nodes that count and apply new commands", lambda statuses: _is_sound(statuses, reached))
        self._say("settled")

    def _finish(self) -> None:
        """Stop the proposals. Every node must end with the same commands and the same state."""
        self._faults.heal()
        for process in self._cluster.running.values():
            process.ask("quiet")
        statuses = self._await("the same end on all nodes", _is_same)
        self._outcome.term = max(status["term"] for status in statuses)
        for name, process in self._cluster.running.items():
            if status := process.terminate(60):
                self._outcome.problems.append(f"{name} did not end well: status {status}")
        self._cluster.running.clear()

    def _await(self, what: str, is_met: Callable[[list[Answer]], bool]) -> list[Answer]:
        deadline = time.monotonic() + HEAL_S_MAX
        while True:
            statuses = self._cluster.statuses()
            if is_met(statuses):
                return statuses
            if time.monotonic() > deadline:
                for process in self._cluster.running.values():
                    process.signal(signal.SIGUSR1)
                raise Timeout("the healed cluster did not come together", expected=what, got=_brief(statuses))
            time.sleep(_POLL_S)


def _is_sound(statuses: list[Answer], reached: int) -> bool:
    leaders = {status["leader"] for status in statuses}
    members = [member for status in statuses if status["role"] == "leader" for member in status["members"]]
    return (
        len(leaders) == 1
        and all(status["role"] in {"leader", "follower"} and status["index"] > reached for status in statuses)
        and bool(members)
        and all(member["is_counted"] for member in members)
    )


def _is_same(statuses: list[Answer]) -> bool:
    """Whether nothing is in flight, and all nodes have applied the same commands, by consensus and by the
    state machine.
    """
    keys = ("index", "hash", "applied", "chain", "committed", "log_end", "cluster", "leader")
    ends = {tuple(status[key] for key in keys) for status in statuses}
    return len(ends) == 1 and all(
        status["in_flight"] == 0 and status["machine"] == status["index"] for status in statuses
    )


def _brief(statuses: list[Answer]) -> list[dict[str, Any]]:
    wanted = ("name", "role", "leader", "term", "index", "applied", "committed", "log_end", "in_flight")
    return [{key: status[key] for key in wanted} for status in statuses]


if __name__ == "__main__":
    from chaos.command import main

    raise SystemExit(main())
