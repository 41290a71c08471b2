"""A simulated operator that adds, promotes and removes members during all other events.

Laws. A member's disk is lost only if a majority of whole disks remains in every list that may come into
force: the committed list, the lists in some log that may yet be committed, and the lists that were requested
and are not answered. A removed member learns of its removal.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sequencer.raft.model.members import (
    AddLearner,
    MemberChange,
    MemberChangeNotReady,
    MemberChangeRefused,
    MemberRemoved,
    PromoteLearner,
    RemoveMember,
    changed,
    voters_of,
)
from sequencer.raft.model.messages import NOWHERE
from simulation.history import require

if TYPE_CHECKING:
    from simulation.cluster import Cluster
    from simulation.run import NodeRun

ASK_EVERY_S = 0.15
VOTERS_WANTED = 5
"""With this number of voters, a member is removed. With two, a member is added."""


@dataclass(eq=False, slots=True)
class Request:
    run: NodeRun
    done: Future[None]
    voters: frozenset[str]
    """The voters of the list after the change."""

    @property
    def is_open(self) -> bool:
        return self.run.is_alive and not self.done.done()


class MemberRequests:
    """The member changes of one simulation. There are none without spares."""

    def __init__(self, cluster: Cluster) -> None:
        self.is_over = False
        self._cluster, self._rng = cluster, cluster.rng
        self._open: list[Request] = []

    def begin(self) -> None:
        if self._cluster.settings.spares:
            self._cluster.timeline.after(self._rng.expovariate(1 / ASK_EVERY_S), self._act)

    def voters(self) -> Iterator[frozenset[str]]:
        """Yield the voters of each list that is in force or may come into force."""
        yield from self._cluster.checks.voters_in_play()
        self._open = [one for one in self._open if one.is_open]
        for one in self._open:
            yield one.voters

    def _act(self) -> None:
        if self.is_over:
            return
        runs, drawn = self._cluster.runs(), self._rng.random()
        # Also a leader that has committed nothing yet.
        leaders = [run for run in runs if run.node._raft.leads]
        run = self._rng.choice((runs if drawn < 0.1 else leaders) or [None])
        if run is not None and run.view is not None and run.machine.line == self._cluster.line:
            self._ask(run)
        self.begin()

    def _ask(self, run: NodeRun) -> None:
        change = self._chosen(run)
        if change is None:
            return
        cluster, done = self._cluster, Future[None]()
        try:
            voters = voters_of(changed(run.node.membership.members, change))
        except MemberChangeRefused:
            return
        cluster.trace("asks", run.name, *change)
        self._open.append(Request(run, done, voters))

        def report(done: Future[None]) -> None:
            error = done.exception()
            cluster.trace("answers", run.name, "done" if error is None else getattr(error, "what", error))
            cluster.seen["changed" if error is None else "refused"] += 1
            assert error is None or isinstance(error, MemberChangeNotReady), error

        done.add_done_callback(report)
        run.change_members(change, done)

    def _chosen(self, run: NodeRun) -> MemberChange | None:
        rng, members = self._rng, run.node.membership.members
        voters = voters_of(members)
        learners = sorted(members.keys() - voters)
        others = sorted(self._cluster.members.keys() - members.keys())
        is_large, is_small = len(voters) >= VOTERS_WANTED, len(voters) < 3
        if learners and not is_large and rng.random() < 0.7:
            return PromoteLearner(rng.choice(learners))
        if others and len(learners) < 2 and (is_small or rng.random() < 0.5):
            name = rng.choice(others)
            self._prepare(name)
            return AddLearner(name, f"{name}:1")
        if is_large or rng.random() < (0.1 if is_small else 0.6):
            return RemoveMember(rng.choice(sorted(members)))
        return None

    def _prepare(self, name: str) -> None:
        """Start a node before it is added, sometimes with an empty directory."""
        cluster = self._cluster
        in_play = any(name in voters for voters in self.voters())
        if not in_play and self._rng.random() < 0.4:
            cluster.replace_disk(name)
        cluster.timeline.after(0.5 * self._rng.random(), lambda: cluster.start(name))

    # Removed members

    def on_removed(self, run: NodeRun, error: MemberRemoved) -> None:
        cluster, name = self._cluster, run.name
        lists = [members for checks in cluster.epochs.values() for members in checks.committed_lists()]
        is_known = error.is_listed or any(name not in members for members in lists)
        require(is_known, "a member ends as if it were removed", name)
        cluster.seen["rejoined" if error.is_listed else "removed"] += 1
        cluster.kill(name)
        if error.is_listed or self._rng.random() < 0.7:
            cluster.timeline.after(self._rng.random(), lambda: cluster.start(name))

    def unaware(self) -> list[str]:
        """Return the removed members that run and do not know of their removal."""
        cluster = self._cluster
        members = cluster.names_in_force()
        return [
            run.name for run in cluster.runs() if run.name not in members and run.node.claim.joined != NOWHERE
        ]
