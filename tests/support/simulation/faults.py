"""The faults of a simulation, and their repair.

Each fault ends by itself after a while. `heal` ends all of them at once.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from disks import Keep

from simulation.cluster import Cluster, Member
from simulation.settings import Fault

Directions = set[tuple[str, str]]

_KEEPS: Final[tuple[Keep, ...]] = ("all", "none", "some", "some")


class Nemesis:
    """Causes faults at random times, until `heal`."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster, self._rng = cluster, cluster.rng
        self._is_over = False
        self._calm = replace(cluster.weather)
        self._blocks: list[Directions] = []
        self._deck: list[Fault] = []
        self._acts: dict[Fault, Callable[[Member], None]] = {
            "kill": lambda member: cluster.stop_and_restart(member.name, "all"),
            "kill_in_change": lambda member: self._cut_in_change(member, "all"),
            "power_cut": lambda member: cluster.stop_and_restart(member.name, self._keep()),
            "power_cut_in_change": lambda member: self._cut_in_change(member, self._keep()),
            "power_cut_all": self._power_cut_all,
            "wipe": self._wipe,
            "old_disk": self._old_disk,
            "pause": self._pause,
            "break": self._break,
            "cut_off": lambda member: self._block(self._around(member.name)),
            "cut_off_leader": self._cut_off_leader,
            "one_way": self._one_way,
            "split": self._split,
            "bridge": self._bridge,
            "storm": self._storm,
            "jump": self._jump,
            "full": self._full,
            "failed_sync": self._failed_sync,
            "slow_disk": self._slow_disk,
            "slow_machine": self._slow_machine,
            "hand_over": self._hand_over,
            "reset": self._reset,
            "force": self._force,
        }

    def begin(self) -> None:
        """Start causing faults."""
        self._cluster.timeline.after(
            self._rng.expovariate(1 / self._cluster.settings.fault_every_s), self._strike
        )

    def heal(self) -> None:
        """Stop causing faults, and repair everything."""
        self._is_over = True
        self._cluster.trace("heals")
        self._cluster.wires.unblock(set(self._cluster.wires.blocked))
        self._clear_up()
        weather = self._cluster.weather
        weather.lost = weather.doubled = weather.overtaken = 0.0
        for member in self._cluster.members.values():
            member.disk.capacity_bytes = None
            if member.run is not None:
                member.run.full_until = member.run.paused_until = 0.0
                member.run.sync_s, member.run.apply_s = 0.0005, 0.0
                member.run.wake()

    def _strike(self) -> None:
        if self._is_over:
            return
        if not self._deck:  # So that each fault comes, as often as its weight says.
            weights = self._cluster.settings.faults
            self._deck = [fault for fault, weight in weights.items() for _ in range(weight)]
            self._rng.shuffle(self._deck)
        fault = self._deck.pop()
        member = self._rng.choice(list(self._cluster.members.values()))
        self._cluster.trace("fault", fault, member.name)
        self._acts[fault](member)
        self.begin()

    def _later(self, seconds: float, action: Callable[[], None]) -> None:
        """Do it later, unless everything was healed before."""
        self._cluster.timeline.after(seconds, lambda: None if self._is_over else action())

    def _keep(self) -> Keep:
        return self._rng.choice(_KEEPS)

    # Processes and disks

    def _cut_in_change(self, member: Member, keep: Keep) -> None:
        member.keep = keep
        if not member.disk.is_off:
            member.disk.cut_power_at(member.disk.changes + self._rng.randint(1, 30))
        if member.run is None:
            self._cluster.start(member.name)

    def _power_cut_all(self, _member: Member) -> None:
        for name in self._cluster.members:
            self._cluster.stop_and_restart(name, self._keep())

    def _wipe(self, member: Member) -> None:
        if not self._cluster.may_wipe(member.name) or member.is_wiped:
            return
        self._cluster.replace_disk(member.name)
        self._later(self._rng.random(), lambda: self._cluster.start(member.name))

    def _old_disk(self, member: Member) -> None:
        if member.attic is None or not self._cluster.may_wipe(member.name):
            return
        self._cluster.replace_disk(member.name, by=member.attic)
        self._later(self._rng.random(), lambda: self._cluster.start(member.name))

    def _pause(self, member: Member) -> None:
        if member.run is not None:
            member.run.pause(self._rng.uniform(0.1, 3.0))

    def _jump(self, member: Member) -> None:
        if member.run is not None:
            member.run.clock.jump(self._rng.choice((0.1, 1.0, 3600.0)) * self._rng.random())

    def _full(self, member: Member) -> None:
        run, seconds = member.run, self._rng.uniform(0.1, 1.0)
        member.disk.capacity_bytes = member.disk.used_bytes + self._rng.randint(0, 3000)
        member.is_faulty = True
        if run is not None:
            run.full_until = self._cluster.timeline.now + seconds
            run.dies_of_full_disk = self._rng.random() < 0.3
        self._later(seconds, lambda: self._make_room(member))

    def _make_room(self, member: Member) -> None:
        member.disk.capacity_bytes = None

    def _failed_sync(self, member: Member) -> None:
        member.is_faulty = True
        member.disk.fail("sync", at=self._rng.randint(1, 5))

    def _slow_disk(self, member: Member) -> None:
        run = member.run
        if run is not None:
            run.sync_s = self._rng.uniform(0.01, 0.3)
            self._later(self._rng.uniform(0.2, 2.0), lambda: setattr(run, "sync_s", 0.0005))

    def _slow_machine(self, member: Member) -> None:
        run = member.run
        if run is not None:
            run.apply_s = self._rng.uniform(0.0005, 0.02)
            self._later(self._rng.uniform(0.2, 2.0), lambda: setattr(run, "apply_s", 0.0))

    def _hand_over(self, member: Member) -> None:
        """Transfer the leadership. This is no fault, but other faults may come before it times out."""
        run, seconds = self._cluster.leader() or member.run, self._rng.choice((0.02, 0.2, 2.0))
        if run is not None and run.view is not None:
            run.transfer_leadership(seconds)

    def _reset(self, member: Member) -> None:
        """Request a reset (no fault), mostly from the leader: other nodes may be cut off from it."""
        run = member.run if self._rng.random() < 0.3 else self._cluster.leader()
        if run is not None and run.view is not None:
            run.reset()

    def _force(self, member: Member) -> None:
        """Act as an operator that considers all nodes but one lost, and forces that one to continue.

        Some of the other nodes become blank. The rest is away for a while. A node that returns has its old
        state, in an epoch that is over.
        """
        cluster, rng, run = self._cluster, self._rng, member.run
        voters = cluster.voters()
        if run is None or run.view is None or len(voters) == 1 or not cluster.may_wipe(member.name):
            return
        if member.name not in voters or len(set(cluster.member_requests.voters())) > 1:
            return
        is_whole = not any(cluster.members[name].is_wiped for name in voters)
        if not is_whole or not run.node.state.epoch or run.machine.line != cluster.line:
            return
        others = [name for name in cluster.members if name != member.name and name in voters]
        rng.shuffle(others)
        blank, away = others[: len(others) // 2], others[len(others) // 2 :]
        for name in blank:
            cluster.replace_disk(name)
            self._later(rng.random(), lambda name=name: cluster.start(name))  # type: ignore[misc]
        for name in away:
            cluster.kill(name)
            self._later(rng.uniform(1.0, 5.0), lambda name=name: cluster.start(name))  # type: ignore[misc]
        for at in range(10):
            self._later(0.4 * at + rng.random(), lambda: self._force_now(member))

    def _force_now(self, member: Member) -> None:
        run = member.run
        if run is not None and run.view is not None:
            run.force(self._cluster.next_line())

    # The network

    def _break(self, member: Member) -> None:
        connections = [one for one in self._cluster.wires.connections() if member.name in one.ends]
        if connections:
            self._cluster.wires.sever(
                self._rng.choice(connections), notice_after=self._rng.choice((0.001, 0.3, 2.0))
            )

    def _around(self, name: str) -> Directions:
        others = [other for other in self._cluster.members if other != name]
        return {(name, other) for other in others} | {(other, name) for other in others}

    def _cut_off_leader(self, member: Member) -> None:
        leader = self._cluster.leader()
        name = member.name if leader is None else leader.name
        around = self._around(name)
        if self._rng.random() < 0.5:
            self._block(around)
        else:  # It can send but not receive, or the other way round.
            is_deaf = self._rng.random() < 0.5
            self._block({direction for direction in around if (direction[1] == name) == is_deaf})

    def _one_way(self, member: Member) -> None:
        others = [other for other in self._cluster.members if other != member.name]
        if others:
            self._block({(member.name, self._rng.choice(others))})

    def _split(self, _member: Member) -> None:
        names = list(self._cluster.members)
        self._rng.shuffle(names)
        at = self._rng.randint(1, max(1, len(names) - 1))
        self._block(_between(names[:at], names[at:]))

    def _bridge(self, member: Member) -> None:
        """Split the nodes into two halves that are connected only through one member."""
        names = [name for name in self._cluster.members if name != member.name]
        self._rng.shuffle(names)
        self._block(_between(names[: len(names) // 2], names[len(names) // 2 :]))

    def _block(self, directions: Directions) -> None:
        wires, rng = self._cluster.wires, self._rng
        wires.blocked |= directions
        self._blocks.append(directions)
        for connection in wires.connections():
            one, two = [*connection.ends, "", ""][:2]
            if {(one, two), (two, one)} & directions and rng.random() < 0.7:
                self._later(rng.uniform(0.1, 1.5), lambda connection=connection: wires.sever(connection))  # type: ignore[misc]
        self._later(rng.uniform(0.1, 3.0), lambda: self._unblock(directions))

    def _unblock(self, directions: Directions) -> None:
        self._blocks.remove(directions)
        still: Directions = set().union(*self._blocks)
        self._cluster.wires.unblock(directions - still)

    def _storm(self, _member: Member) -> None:
        weather, rng = self._cluster.weather, self._rng
        weather.delay, weather.delay_spread = rng.choice(((0.001, 0.05), (0.02, 0.02), (0.1, 0.1)))
        weather.late, weather.late_delay = rng.choice((0.0, 0.05)), rng.choice((0.1, 1.0))
        self._later(rng.uniform(0.1, 2.0), self._clear_up)

    def _clear_up(self) -> None:
        weather, calm = self._cluster.weather, self._calm
        weather.delay, weather.delay_spread = calm.delay, calm.delay_spread
        weather.late, weather.late_delay = calm.late, calm.late_delay


def _between(some: list[str], others: list[str]) -> Directions:
    return {pair for one, two in itertools.product(some, others) for pair in ((one, two), (two, one))}


def spread(rng: random.Random, mean_s: float) -> float:
    """Draw the time until the next event, if events occur every `mean_s` seconds on average."""
    return rng.expovariate(1 / mean_s)
