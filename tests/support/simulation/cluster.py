"""A simulated cluster: its members, each with a disk and at most one run, and what may happen to them.

Laws. A disk is lost only while a majority of the other disks has everything that it promised. At any time, at
most a minority of the members has no disk that counts. An operator may force a node to continue alone. Then
the whole state of that node continues as a separate history, and the newest such history must not lose data.
A disk that counts in another history never enters it. In the end, the operator empties every node that is not
in the newest history.
"""

from __future__ import annotations

import itertools
import random
import zlib
from collections import Counter, deque
from dataclasses import dataclass

from disks import Keep, MemoryDisk

from rt.cluster_epoch import is_succeeded
from sequencer.raft.model.config import RaftConfig
from sequencer.raft.model.messages import NOWHERE
from sequencer.raft.node import RaftNode
from simulation.checks import Checks
from simulation.history import History, require
from simulation.lease_holders import Holders
from simulation.member_requests import MemberRequests
from simulation.network import Weather, Wires
from simulation.owner_requests import OwnerRequests
from simulation.run import NodeRun
from simulation.settings import Settings
from simulation.timeline import Clocks, Timeline

TRACE_EVENTS = 300


@dataclass(eq=False, slots=True)
class Member:
    """One member, running or not."""

    name: str
    disk: MemoryDisk
    run: NodeRun | None = None
    has_joined: bool = False
    """Whether it was ever in the cluster: whether it has received its first state."""
    is_wiped: bool = False
    """Whether its disk does not count: it is not the first disk, and the cluster has not accepted it yet."""
    keep: Keep = "all"
    """The data that remains after the next power cut inside a disk change."""
    attic: MemoryDisk | None = None
    """A disk that was taken out earlier."""
    is_faulty: bool = False
    """Whether storage errors are expected."""


class Cluster:
    """The whole simulation. `rng` makes all random decisions."""

    def __init__(self, settings: Settings, rng: random.Random, node_class: type[RaftNode] = RaftNode) -> None:
        self.settings, self.rng, self.node_class = settings, rng, node_class
        self.timeline = Timeline()
        self.clocks = Clocks()
        self.first_names = [f"n{at}" for at in range(1, settings.nodes + 1)]
        self.epochs: dict[int, Checks] = {1: Checks(voters=self.first_names)}
        """By epoch of the cluster. Each epoch is a Raft of its own."""
        self.histories: dict[int, History] = {0: History()}
        """By the force with which they started; 0 is the first history."""
        self.line = 0
        """The current history: the newest one that has become durable."""
        self._forks: dict[int, tuple[NodeRun, History]] = {}
        self._newest = 1
        """The newest epoch of the current history."""
        self._counted: dict[bytes, int] = {}
        """The history in which each disk counted last."""
        self._lines = itertools.count(1)
        self.weather = Weather(lost=settings.lost, doubled=settings.doubled, overtaken=settings.overtaken)
        self.wires = Wires(self.timeline, rng, self.weather)
        self.members = {name: Member(name, MemoryDisk()) for name in self.first_names}
        for at in range(1, settings.spares + 1):
            self.members[f"s{at}"] = Member(f"s{at}", MemoryDisk(), is_wiped=True)
        self.recent: deque[tuple[object, ...]] = deque(maxlen=TRACE_EVENTS)
        self.digest = 0
        self.seen: Counter[str] = Counter()
        """How often each kind of event was traced. Faults and log lines count by their names."""
        self.runs_started = 0
        self.holders = Holders(self)
        self.requests = OwnerRequests(self)
        self.member_requests = MemberRequests(self)
        self.running = ""
        """The member whose code runs, or ran last."""

    # Histories and epochs

    @property
    def checks(self) -> Checks:
        """The checks of the newest epoch of the current history."""
        return self.epochs[self._newest]

    @property
    def history(self) -> History:
        """The current history."""
        return self.histories[self.line]

    def checks_of(self, run: NodeRun) -> Checks:
        """Return the checks of the node's epoch. The first node of an epoch has the epoch's initial state."""
        node = run.node
        epoch, line = node.state.epoch, run.machine.line
        if not epoch:
            return self.checks
        if epoch not in self.epochs:
            self.epochs[epoch] = Checks(node.state)
        if line == self.line and not is_succeeded(epoch, self._newest):
            self._newest = epoch
        if node._raft.is_counted_here:
            counted = self._counted.setdefault(node.claim.disk, line)
            is_own = line in self._forks and self._forks[line][0].name == run.name
            require(
                counted == line or is_own, "a disk that counts changes its history", run.name, counted, line
            )
            self._counted[node.claim.disk] = line
        return self.epochs[epoch]

    @property
    def is_forking(self) -> bool:
        """Whether a forced node has not been started again yet. It may still start a new history."""
        return max(self._forks, default=0) > self.line

    def next_line(self) -> int:
        """Return the name of the history that the next force starts."""
        return next(self._lines)

    def on_forced(self, run: NodeRun, line: int, fork: History) -> None:
        """Record that a node was forced to continue alone. Its next start shows whether it does."""
        self.trace("forced", run.name, line)
        self._forks[line] = run, fork

    def history_of(self, run: NodeRun) -> History:
        """Return the history of a started node. The first node of a history must have its initial content."""
        line = run.machine.line
        if line not in self.histories:
            forced, fork = self._forks[line]
            require(run.name == forced.name, "somebody else is in a forced epoch first", run.name)
            require(run.machine.index == len(fork.commands), "a forced epoch begins with less", run.name)
            self.histories[line], self.line = fork, line
            for member in self.members.values():
                member.is_wiped = member.name != run.name
        return self.histories[line]

    def on_left_out(self, run: NodeRun) -> None:
        """A node ended because the cluster continues without it. Its operator empties it."""
        require(run.machine.line != self.line, "a node ends that the cluster goes on with", run.name)
        self.replace_disk(run.name)
        self.timeline.after(self.rng.random(), lambda: self.start(run.name))

    def trace(self, *event: object) -> None:
        """Record an event. The last events are shown at a failure. All of them are in `digest`."""
        is_named = event[0] in {"fault", "logs"}
        self.seen[str(event[-1 if event[0] == "logs" else is_named]).split(" ", maxsplit=1)[0]] += 1
        line = (round(self.timeline.now, 6), *event)
        self.recent.append(line)
        self.digest = zlib.crc32(repr(line).encode(), self.digest)

    def config_of(self, name: str) -> RaftConfig:
        """Return the configuration of a member."""
        keep = self.settings.keep_entries
        names, has_list = self.first_names, self.checks.has_list
        is_blank = not any("snapshot." in path for path in self.members[name].disk.paths())
        if has_list and is_blank:  # An operator names existing members.
            names = self.names_in_force()
        names = [*names, *({name} - {*names})]
        return RaftConfig(
            name=name,
            members={member: f"{member}:1" for member in names},
            directory="/raft",
            stream="simulated",
            bootstrap=name in self.first_names and not has_list,
            snapshot_ms=self.settings.snapshot_ms,
            segment_bytes=self.settings.segment_bytes,
            retry_ms=self.settings.retry_ms,
            keep_entries=keep[list(self.members).index(name) % len(keep)],
        )

    def runs(self) -> list[NodeRun]:
        """Return the runs whose directory is open."""
        return [m.run for m in self.members.values() if m.run is not None and m.run.view is not None]

    def leader(self) -> NodeRun | None:
        """Return the leader of the latest term in the latest epoch of the current history."""
        runs = [run for run in self.runs() if run.machine.line == self.line]
        leaders = [run for run in runs if run.node.is_leader]
        return max(leaders, key=lambda run: (run.node.state.epoch, run.node._raft.term), default=None)

    def names_in_force(self) -> list[str]:
        """The members, by the newest list that was applied."""
        return sorted(self.checks.disks_that_count) or self.first_names

    def voters(self) -> list[str]:
        """Return the voters of the newest committed list."""
        return sorted(next(iter(self.checks.voters_in_play())))

    # Runs

    def start(self, name: str) -> None:
        """Start a run, unless the member runs already."""
        member = self.members[name]
        if member.run is not None:
            return
        self.runs_started += 1
        run = member.run = NodeRun(self, name, self.runs_started, member.disk)
        self.trace("starts", name, run.number)
        run.open()

    def kill(self, name: str, *, keep: Keep = "all") -> None:
        """End a run: "all" as by kill -9, otherwise as by a power cut. The next run gets the disk."""
        member = self.members[name]
        is_process = keep == "all"
        self.trace("ends", name, keep)
        member.disk = member.disk.after_power_cut(keep, self.rng.getrandbits(32))
        if member.run is not None:
            if member.run.view is not None:
                member.run.checks.scan(member.run.view)
            member.run.end()
            notice = self.rng.uniform(0.0, 0.004) if is_process else self.rng.uniform(0.0, 2.0)
            self.wires.detach(member.run.endpoint, notice_after=notice)
            member.run = None

    def on_power_cut(self, run: NodeRun) -> None:
        """The disk lost its power inside a change."""
        self.stop_and_restart(run.name, self.members[run.name].keep)

    def on_stopped(self, run: NodeRun) -> None:
        """The node ended by itself because of its disk."""
        self.stop_and_restart(run.name, "all")

    def stop_and_restart(self, name: str, keep: Keep) -> None:
        """End a run, and start another one some time later."""
        self.kill(name, keep=keep)
        self.timeline.after(self.rng.choice((0.01, 0.3, 2.0)) * self.rng.random(), lambda: self.start(name))

    def on_epoch_over(self, run: NodeRun) -> None:
        """The node continues in another epoch after its next start."""
        self.stop_and_restart(run.name, "all")

    def is_disk_faulty(self, run: NodeRun) -> bool:
        """Whether an error of its disk is expected."""
        return self.members[run.name].is_faulty

    def close(self) -> None:
        """End everything. No thread remains."""
        for run in self.runs():
            run.disk.after_power_cut("none")
            run.end()

    # Disks

    def empty_if_left_out(self, name: str) -> None:
        """Empty a node of an abandoned history, as an operator does."""
        run = self.members[name].run
        if run is None or run.view is None or run.fork is not None:
            return
        # A node that does not count joins by itself, unless it counted before it was removed.
        has_counted = run.node._raft.is_counted_here
        if self.settings.spares:
            has_counted |= run.node.claim.joined != NOWHERE
        if run.machine.line != self.line and has_counted:
            self.replace_disk(name)

    @property
    def is_made(self) -> bool:
        """Whether a majority has the first state. Before that, the cluster may need every disk and member."""
        joined = sum(self.members[name].has_joined for name in self.first_names)
        return 2 * joined > len(self.first_names)

    def may_wipe(self, name: str = "") -> bool:
        """Whether this disk, or another one, may be lost now. Updates which lost disks are replaced."""
        for run in self.runs():
            member = self.members[run.name]
            member.has_joined |= run.node.claim.joined != NOWHERE
            if member.is_wiped or self.settings.spares:
                member.is_wiped = self.checks.disks_that_count.get(run.name) != run.node.claim
        if not self.settings.spares:
            wiped = sum(member.is_wiped for member in self.members.values())
            return self.is_made and wiped + 1 <= (len(self.members) - 1) // 2
        lists = list(self.member_requests.voters())
        return self.is_made and all(self._is_whole_without(name, voters) for voters in lists)

    def _is_whole_without(self, name: str, voters: frozenset[str]) -> bool:
        wiped = [voter for voter in voters if voter == name or self.members[voter].is_wiped]
        return name not in voters or len(wiped) <= (len(voters) - 1) // 2

    def replace_disk(self, name: str, *, by: MemoryDisk | None = None) -> None:
        """Stop the node and take its disk out. Insert a new disk, or one that was taken out before."""
        self.kill(name)
        member = self.members[name]
        self.trace("replaces_disk", name, by is not None)
        member.attic, member.disk, member.is_wiped = member.disk, by or MemoryDisk(), True
