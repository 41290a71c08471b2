"""One run of a simulated node: a process from its start to its end, on a disk that remains after it.

Invariant: a run that has ended does nothing more. Its disk is off, its queued background work is not started,
and its unsent messages are lost.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING

from disks import MemoryDisk, PowerCut

from rt.errors import ClusterMismatch, DiskFull, Overloaded, StorageError
from sequencer.leader.lease_expiry import LeaseExpiry
from sequencer.raft.lifecycle.services import NodeEnvironment
from sequencer.raft.model.epochs import EpochOver
from sequencer.raft.model.members import MemberChange, MemberRemoved
from sequencer.raft.model.messages import Message, RaftEntry
from sequencer.raft.node import RaftNode
from sequencer.state.apply_result import Outcome
from sequencer.state.command_codec import encode_command
from sequencer.state.commands import Command as LeaseCommand
from simulation.background_worker import SteppedWorker
from simulation.endpoint import Endpoint
from simulation.history import RESETS, History, Violation, require
from simulation.machine import FORCES, Command, Machine
from simulation.promises import View
from simulation.timeline import NodeClock

if TYPE_CHECKING:
    from simulation.cluster import Cluster

ROUND_S = 0.00005
"""The minimum duration of one round of the loop."""


class NodeRun:
    """A running node. `open` starts it, `end` ends it; in between, events drive it."""

    def __init__(self, cluster: Cluster, name: str, number: int, disk: MemoryDisk) -> None:
        self.cluster, self.name, self.number, self.disk = cluster, name, number, disk
        self.is_alive = True
        self.paused_until = 0.0
        self.sync_s = 0.0005
        self.apply_s = 0.0
        self.full_until = 0.0
        self.dies_of_full_disk = False
        self.in_flight: deque[tuple[Command, bytes, Future[int]]] = deque()
        self.proposed = 0
        self.view: View | None = None
        self.fork: History | None = None
        """The separate history of this node after a force, whether or not the force becomes durable."""
        self.checks = cluster.checks
        """The checks of the node's current epoch."""
        self.clock = NodeClock(
            cluster.timeline,
            offset=cluster.rng.uniform(0.0, 1e6),
            rate=1.0 + cluster.rng.uniform(-0.5, 0.5) * cluster.settings.drift,
        )
        self.endpoint = Endpoint(name, cluster.wires, self._on_flush)
        self.endpoint.on_arrival = self.wake
        self.machine = Machine(self, cluster.settings.padding, has_leases=cluster.settings.holders > 0)
        self._steady = NodeClock(cluster.timeline, offset=0.0, rate=self.clock.rate)
        """Has the rate of `clock`, but never jumps."""
        self._lease_clock = LeaseExpiry(self.machine.leases)
        self._lease_term = 0
        self._calls: deque[Callable[[], None]] = deque()
        self._worker = SteppedWorker(self._later, self.wake)
        self._busy_until = 0.0
        self._wakes_at = float("inf")
        self._node: RaftNode | None = None

    @property
    def node(self) -> RaftNode:
        """The node, after it has opened its directory."""
        assert self._node is not None
        return self._node

    def open(self) -> None:
        """Open the directory and schedule the first round."""
        self.do(self._open)

    def _open(self) -> None:
        cluster = self.cluster
        cluster.wires.attach(self.endpoint)
        self._node = cluster.node_class(
            cluster.config_of(self.name),
            self.machine,
            NodeEnvironment(
                self.endpoint, self._worker, cluster.rng, lambda: cluster.rng.randbytes(16), self.disk
            ),
            on_disk_full=self._on_disk_full,
            calls=self._calls,
        )
        self._node._snapshots._disk = self._worker.disk(self.disk)
        on_commit = self._node.on_commit

        def watched(entry: RaftEntry) -> None:
            if self.fork is None:
                self.checks.on_entry(self._viewed(), entry)
            on_commit(entry)

        self._node.on_commit = watched  # type: ignore[method-assign]
        self._viewed()
        self.wake()

    def _viewed(self) -> View:
        checks = self.cluster.checks_of(self)
        if self.view is None or (checks is not self.checks and self.node.state.epoch):
            self.checks = checks
            self.view = checks.on_open(self.name, self.number, self.node)
        return self.view

    def wake(self, after: float = 0.0) -> None:
        """Schedule a round in `after` seconds, but not while the node is busy or paused. An earlier wake
        stays.
        """
        timeline = self.cluster.timeline
        when = max(timeline.now + after, self._busy_until, self.paused_until)
        if when < self._wakes_at:
            self._wakes_at = when
            timeline.at(when, partial(self._on_wake, when))

    def pause(self, seconds: float) -> None:
        """Pause the process, as SIGSTOP does."""
        self.paused_until = max(self.paused_until, self.cluster.timeline.now + seconds)

    def propose(self, size: int, lease: bytes = b"") -> bool:
        """Propose a new command; `lease` is its lease command, if any. Return False if the node is
        overloaded.
        """
        command = Command(self.number, self.proposed + 1)
        content = command.encode(size, lease)
        try:
            future = self.node.propose(content)
        except Overloaded:
            return False
        self.proposed += 1
        self.in_flight.append((command, content, future))
        self.wake()
        return True

    def change_members(self, change: MemberChange, done: Future[None]) -> None:
        self._calls.append(lambda: self.node.change_members(change, done))
        self.wake()

    def transfer_leadership(self, seconds: float) -> None:
        """Transfer the leadership to another node if this node leads."""
        self._calls.append(lambda: self.node.transfers.start(seconds, Future()))
        self.wake()

    def reset(self) -> None:
        """Ask for the end of the epoch, if this node can propose it."""
        content = Command(RESETS, self.number).encode(0)
        self._calls.append(lambda: self.node.reset(content))
        self.wake()

    @property
    def history(self) -> History:
        """The history of the line of epochs that the node is in."""
        return self.fork or self.cluster.history_of(self)

    def force(self, line: int) -> None:
        """Force this node to continue alone, if it accepts; `line` is the number of the new history."""

        def act() -> None:
            if self.fork is not None or self.node.is_over():
                return
            self.fork = self.history.forked(self.machine.index)
            if self.node.force(Command(FORCES, line).encode(0)) is None:
                self.cluster.on_forced(self, line, self.fork)
            else:
                self.fork = None

        self._calls.append(act)
        self.wake()

    def do(self, action: Callable[[], None]) -> None:
        """Run the node's code and handle its outcome."""
        if not self.is_alive:
            return
        self.clock.spent = 0.0
        self.cluster.running = self.name
        try:
            with self.cluster.clocks.running(self.clock):
                action()
        except PowerCut:
            self.cluster.on_power_cut(self)
        except ClusterMismatch as error:
            self.cluster.trace("left_out", self.name, error.what)
            self.cluster.on_left_out(self)
        except EpochOver as over:
            self.cluster.trace("epoch_over", self.name, over.epoch)
            self.cluster.on_epoch_over(self)
        except MemberRemoved as error:
            self.cluster.trace("removed", self.name, error.what)
            self.cluster.member_requests.on_removed(self, error)
        except Violation:
            raise
        except StorageError as error:
            if not self.cluster.is_disk_faulty(self):
                raise
            self.cluster.trace("stops", self.name, error.what)
            self.cluster.on_stopped(self)
        finally:
            self._busy_until = max(self._busy_until, self.cluster.timeline.now + self.clock.spent)
            self.clock.spent = 0.0

    def end(self) -> None:
        """End the process and its background work."""
        self.is_alive = False
        self._worker.unwind()

    def _later(self, action: Callable[[], None]) -> None:
        """Schedule background work: it takes time, and waits while the process is paused."""
        timeline = self.cluster.timeline

        def act() -> None:
            if self.paused_until > timeline.now:
                timeline.at(self.paused_until, act)
            else:
                self.do(action)

        worker_s = self.cluster.settings.worker_s + self.sync_s
        timeline.after(worker_s * self.cluster.rng.random(), act)

    def _on_wake(self, when: float) -> None:
        if when != self._wakes_at:
            return  # An earlier wake replaced this one.
        self._wakes_at = float("inf")
        if max(self._busy_until, self.paused_until) > self.cluster.timeline.now:
            self.wake()
        else:
            self.do(self._round)

    def _round(self) -> None:
        """Deliver arrived messages, then run one round of the loop until its next wait."""
        node = self.node
        self.clock.spent = ROUND_S * (1.0 + self.cluster.rng.random())
        self.endpoint.deliver()
        if node._log.is_dirty:
            self.clock.spent += self.sync_s * (0.5 + self.cluster.rng.random())
        node.step()
        if self.fork is None:
            self.checks.look(self._viewed())
        while self.in_flight and self.in_flight[0][2].done():
            _, content, future = self.in_flight.popleft()
            self.history.on_acknowledged(future.result(), content)
        self._expire_leases()
        wait = 0.0 if self.endpoint.inbox else self.clock.real(node.wait_s())
        self.wake(self.clock.spent + max(wait, ROUND_S))

    def _expire_leases(self) -> None:
        """Expire leases as a leader does, with a new lease clock in each term."""
        raft, state = self.node._raft, self.machine.leases
        if not state.leases or not self.node.is_leader:
            return
        if self._lease_term != raft.term or self._lease_clock.state is not state:
            self._lease_term, self._lease_clock = raft.term, LeaseExpiry(state)
        over = self._lease_clock.due(int(self._steady.read() * 1e9))
        if over is not None:
            self.propose(0, encode_command(over))

    def _on_flush(self, queued: list[tuple[str, Message]]) -> None:
        require(self.fork is None, "it speaks after it was forced", self.name)
        self.endpoint.departs_after = self.clock.spent
        view = self._viewed()
        self.checks.promises.on_flush(view, queued)
        self.cluster.trace("sends", self.name, [(peer, *_brief(message)) for peer, message in queued])

    def _on_disk_full(self, error: DiskFull) -> None:
        if self.dies_of_full_disk:
            raise error
        self.clock.spent += 0.1
        if self.cluster.timeline.now + self.clock.spent >= self.full_until:
            self.disk.capacity_bytes = None

    # Machine events

    def on_apply(self, machine: Machine, index: int, command: bytes) -> None:
        """See `machine.Watcher`."""
        self.clock.spent += self.apply_s
        self.history.on_apply(machine, index, command)

    def on_applied(self, machine: Machine) -> None:
        """See `machine.Watcher`."""
        self.history.on_applied(machine)

    def on_lease(self, command: LeaseCommand, outcome: Outcome) -> None:
        """See `machine.Watcher`."""
        self.cluster.holders.on_applied(self, command, outcome)
        self.cluster.requests.on_applied(self, command, outcome)


def _brief(message: Message) -> tuple[object, ...]:
    return (type(message).__name__, *(field for field in message if isinstance(field, (int, bool))))
