"""A small model of a stream, without bytes: publishers, nodes and leaders with random faults.

One seed decides everything. The model is the simple truth that the tests compare plan and apply with: the
publishers' messages, each node's data, and the merged ranges. Commands commit one after another. The commands
that a failed leader had in flight commit or vanish, in order.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from sequencer_core import Writing, new_state, newest_of

from sequencer.leader.merge_planner import Speculation, plan_merge
from sequencer.leader.replication_tracker import (
    ReplicationTracker,
    SegmentKey,
    pack_boundaries,
    unpack_boundaries,
)
from sequencer.leader.session_close import DiskRestoration, SessionCloser
from sequencer.merged.session_retention import SessionRetention
from sequencer.sessions.input_planner import peers_ahead
from sequencer.state.apply import apply
from sequencer.state.apply_result import (
    CommandRejected,
    DiskJoined,
    DiskRestored,
    Outcome,
    RangesMerged,
    RunClosed,
    RunFenced,
    RunOpened,
)
from sequencer.state.command_codec import decode_command, encode_command
from sequencer.state.commands import Command, Configure, JoinDisk, MergeInstruction, MergeRange, RestoreDisk
from sequencer.state.operations.membership import CancelMembers, RequestMembers, SettleMembers
from sequencer.state.session_commands import CloseRun, FenceRun, OpenRun, OpenSealedRuns, SealedRun
from sequencer.state.state import End
from sequencer.state.state_codec import decode_state, encode_state
from sequencer.state.write_plan import BlockWrite, SessionEnd, WritePlan

SIZES: Final = (8, 8, 160, 160, 1 << 20, 20 << 20)
IN_FLIGHT_MAX: Final = 8
ROUNDS_MAX: Final = 2000
NOTHING: Final = End(0, 0, 0)


@dataclass(slots=True)
class Directory:
    """A session directory: its runs, and the end of each on the publisher's disk."""

    name: str
    incarnation: bytes
    dedup_id: str | None
    active_runs: list[Writing] = field(default_factory=list)
    ends: dict[int, End] = field(default_factory=dict)
    """Ends of the runs that are over."""
    session_id: int = 0
    reach: frozenset[str] = frozenset()
    """The nodes that the publisher reaches."""
    deleted: dict[int, End] = field(default_factory=dict)
    """By run: the end of the merged data that the publisher has deleted."""

    def end(self, active: Writing) -> End:
        return self.ends.get(active.run, active.end)


@dataclass(slots=True)
class Node:
    name: str
    is_up: bool = True
    applied: int = 0
    disk: int = 0
    """The number of disks that the node lost before this one."""
    holds: dict[tuple[int, int], End] = field(default_factory=dict)
    """Durable ends, by session id and run."""
    fenced: dict[tuple[int, int], End] = field(default_factory=dict)
    announced: dict[tuple[int, int], SessionEnd] = field(default_factory=dict)
    lost: dict[tuple[int, int], End] = field(default_factory=dict)
    """The ends that the previous disk held. They count until the new disk has joined."""
    is_anew: bool = False
    """The node has not reported since its restart or disk loss: the leader's information about it is
    older.
    """
    parts: dict[tuple[int, int], list[tuple[End, End]]] = field(default_factory=dict)
    """The session bytes that the node keeps, by session id and run. `holds` has only their ends."""
    consumed: dict[tuple[int, int], End] = field(default_factory=dict)
    """The end of each run's merged data, according to the commands that the node has applied."""
    merged: int = 0
    """The last instruction in the node's merged log."""
    durable: int = 0
    """The last instruction in the merged log that survives a power cut."""
    retention: SessionRetention = field(default_factory=lambda: SessionRetention("", ()))

    def take(self, place: tuple[int, int], start: End, end: End) -> None:
        """Store session bytes."""
        self.parts.setdefault(place, []).append((start, end))
        self.holds[place] = max(end, self.holds.get(place, NOTHING))

    def keeps(self, place: tuple[int, int], start: tuple[int, int], end: tuple[int, int]) -> bool:
        """Return whether the node keeps the session bytes of a range."""
        at = start
        for begin, behind in sorted(self.parts.get(place, ())):
            if begin[:2] <= at < behind[:2]:
                at = behind[:2]
        return at >= end

    def keeps_input(self, block: BlockWrite) -> bool:
        """Return whether the node keeps the input of a block."""
        return self.keeps((block.session_id, block.run), (block.roll, block.start), (block.roll, block.end))

    def release(self, place: tuple[int, int], end: End) -> None:
        """Drop session bytes before `end`."""
        parts = self.parts.get(place, ())
        self.parts[place] = [(max(begin, end), behind) for begin, behind in parts if behind > end]


@dataclass(slots=True)
class InFlight:
    data: bytes
    is_planned: bool


class World:
    """The whole model. `step` makes a random change; `heal` repairs everything until nothing changes.

    If `is_harsh`, disks are often lost, one after another, and merging is slow.
    """

    def __init__(self, seed: int, *, is_harsh: bool | None = None) -> None:
        self.rng = rng = random.Random(seed)
        self.state = new_state()
        self.nodes = [Node(f"n{i}") for i in range(rng.choice([1, 3, 3, 5]))]
        self.directories: list[Directory] = []
        self.present: list[Directory] = []
        self.masters: dict[tuple[int, int], Writing] = {}
        self.log: list[Outcome] = []
        self.queue: list[InFlight] = []
        self.is_dirty = False
        """Commands of the previous leader may still commit, and make this leader's plans wrong."""
        self.now_ns = 1
        self.position = 0
        self.reached: dict[tuple[int, int], int] = {}
        """The end number of the merged data, by session id and run."""
        self.opened_at: dict[tuple[int, int], int] = {}
        self.joined_at: dict[tuple[str, int], int] = {}
        self.acknowledged: dict[tuple[int, int], End] = {}
        """By session id and run: the furthest end that a majority has ever held."""
        self.wanted: dict[str, int] = {}
        self.orders: dict[int, WritePlan] = {}
        """The write plan of each instruction."""
        self.merged: dict[str, int] = {}
        """The last instruction that each node reported as durably merged."""
        for node in self.nodes:
            node.retention = SessionRetention(node.name, [one.name for one in self.nodes])
        self.is_harsh = rng.random() < 0.3 if is_harsh is None else is_harsh
        twins = rng.random() < 0.4
        for index in range(rng.randint(1, 4)):
            self._new_directory(f"p{index}", "twins" if twins and index < 2 else None)
        self._lead()
        self._commit(Configure(session_bytes_max=rng.choice([1, 300, 16 << 20])), is_planned=False)
        for node in self.nodes:
            self._ask_to_join(node)

    def _lead(self) -> None:
        self.tracker = ReplicationTracker(len(self.nodes))
        self.speculation = Speculation(self.state)
        self.endings = SessionCloser(self.state, self.tracker)
        self.restoring = DiskRestoration(self.state, self.tracker)
        self.told: dict[str, int] = {}
        """By node: the number of joined disks when the node last reported everything that it holds."""

    @property
    def majority(self) -> int:
        return len(self.nodes) // 2 + 1

    # Publishers

    def _new_directory(self, name: str, dedup_id: str | None) -> None:
        incarnation = len(self.directories).to_bytes(16, "little")
        reached = self.rng.sample(
            [node.name for node in self.nodes], self.rng.randint(self.majority, len(self.nodes))
        )
        made = Directory(name, incarnation, dedup_id, reach=frozenset(reached))
        self.directories.append(made)
        self.present.append(made)
        self._begin_life(made, 0, 0)
        for _ in range(self.rng.choice([0, 0, 2, 6])):
            # The publisher restarts before it reaches any node.
            if self.rng.random() < 0.8:
                self._append(made)
            self._restart(made)

    def _begin_life(self, directory: Directory, run: int, first: int) -> None:
        salt = self.directories.index(directory) << 32
        directory.active_runs.append(Writing(run, first, salt))

    def append(self) -> None:
        self._append(self.rng.choice(self.present))

    def _append(self, directory: Directory) -> None:
        active = directory.active_runs[-1]
        for _ in range(self.rng.randint(1, 6)):
            if self.rng.random() < 0.15 and len(active.segments[-1]) > 1:
                active.roll()
            active.append(self.rng.choice(SIZES), self.rng.randint(1, 4))

    def restart(self) -> None:
        """Restart a publisher. It may lose the tail of its log, including data that nodes already have."""
        self._restart(self.rng.choice(self.present))

    def _restart(self, directory: Directory) -> None:
        active = directory.active_runs[-1]
        ends = active.ends()
        end = ends[-1 - min(self.rng.choice([0, 0, 1, 2, 100]), len(ends) - 1)]
        directory.ends[active.run] = end
        self._begin_life(directory, active.run + self.rng.randint(1, 3), end.number)

    def lose_directory(self) -> None:
        directory = self.rng.choice(self.present)
        self.present.remove(directory)
        self._new_directory(directory.name, directory.dedup_id)

    # Nodes

    def push(self) -> None:
        directory = self.rng.choice(self.present)
        for node in self.nodes:
            is_reached = node.name in directory.reach and self.rng.random() < 0.6
            if node.is_up and self._has_joined(node) and is_reached:
                self._push(node, directory, self.rng.randint(1, 8))
        self._acknowledge()

    def _acknowledge(self) -> None:
        for place in self.masters:
            self.acknowledged[place] = max(
                self.held_by_majority(*place), self.acknowledged.get(place, NOTHING)
            )

    def lose_disk(self) -> None:
        """Give a node an empty disk, if then at most a minority of the nodes has lost data."""
        node = self.rng.choice(self.nodes)
        broken = self._broken()
        if len({*broken, node.name}) > len(self.nodes) - self.majority:
            return
        if self.is_harsh and node.name in broken:
            return  # First this disk is restored, so that another one can be lost.
        node.disk += 1
        node.lost, node.holds = node.holds, {}
        node.parts, node.merged, node.durable = {}, 0, 0
        node.retention = SessionRetention(node.name, [one.name for one in self.nodes])
        node.announced.clear()
        node.fenced = dict.fromkeys(node.fenced, End(0, 64, 0))
        node.is_anew = True
        self._ask_to_join(node)
        self.check_supplied()

    def _broken(self) -> list[str]:
        """The nodes whose disk does not yet hold the data of its predecessor."""
        disks = self.state.disks
        return [
            node.name
            for node in self.nodes
            if node.name not in disks
            or not disks[node.name].is_whole
            or disks[node.name].id != _disk_id(node)
        ]

    def _forget(self, node: Node) -> None:
        self.tracker.forget_node(node.name)
        self.told.pop(node.name, None)

    def _ask_to_join(self, node: Node) -> None:
        if (node.name, node.disk) not in self.joined_at:
            data = encode_command(JoinDisk(node.name, _disk_id(node)))
            if all(one.data != data for one in self.queue):
                self.queue.append(InFlight(data, is_planned=False))

    def _has_joined(self, node: Node) -> bool:
        return self.joined_at.get((node.name, node.disk), node.applied) < node.applied

    def _push(self, node: Node, directory: Directory, count: int) -> bool:
        """Push up to `count` boundaries of the directory's next incomplete run. Return whether the node got
        any.
        """
        for active in directory.active_runs:
            if not self._is_open(node, directory, active.run):
                self._ask_to_open(directory, active)
                return False
            place, end = (directory.session_id, active.run), directory.end(active)
            if place in node.fenced:
                if active.run in directory.ends and self._is_closed(place):
                    node.announced[place] = SessionEnd(directory.session_id, active.run, *end)
                continue
            held, consumed = node.holds.get(place, NOTHING), node.consumed.get(place, NOTHING)
            if directory.deleted.get(active.run, NOTHING) > held or self.rng.random() < 0.1:
                if directory.deleted.get(active.run, NOTHING) > consumed:
                    return False  # The node has not applied the merge of these data yet.
                held = max(held, consumed)
            missing = [one for one in active.ends() if held < one <= end]
            if missing:
                node.take(place, held, missing[:count][-1])
                return True
            if active.run in directory.ends:
                node.announced[place] = SessionEnd(directory.session_id, active.run, *end)
        return False

    def _is_closed(self, place: tuple[int, int]) -> bool:
        active = self.state.sessions[place[0]].run_of(place[1])
        return active is None or active.end is not None

    def _is_open(self, node: Node, directory: Directory, run: int) -> bool:
        return self.opened_at.get((directory.session_id, run), node.applied) < node.applied

    def _ask_to_open(self, directory: Directory, active: Writing) -> None:
        life_id = active.run.to_bytes(8, "little")
        newest = newest_of(self.state, directory.name)
        whose = directory.name, directory.incarnation, directory.dedup_id
        command: Command = OpenRun(*whose, active.run, life_id, newest)
        over = [one for one in directory.active_runs if active.run <= one.run and one.run in directory.ends]
        if over and self.rng.random() < 0.7:
            ids = [(one.run, one.run.to_bytes(8, "little")) for one in over]
            runs = [SealedRun(run, run_id, directory.ends[run]) for run, run_id in ids]
            command = OpenSealedRuns(*whose, tuple(runs[: self.rng.randint(1, 8)]), newest)
        data = encode_command(command)
        if all(one.data != data for one in self.queue):
            self.queue.append(InFlight(data, is_planned=False))

    def catch_up(self) -> None:
        """Nodes apply committed commands, and fetch missing data of closed runs from other nodes."""
        for node in self.nodes:
            if self.rng.random() < 0.5:
                self._apply_on(node, self.rng.randint(1, 6))
                self._fetch(node, self.rng.choice(self.nodes))
                if self.rng.random() < 0.2:
                    self.supply(node, self.rng.choice(self.nodes))
                self._acknowledge()
                self._ask_to_join(node)

    def _apply_on(self, node: Node, count: int) -> None:
        for outcome in self.log[node.applied : node.applied + count]:
            if isinstance(outcome, RunFenced):
                for run in (outcome.run, *outcome.later):
                    place = outcome.session_id, run
                    node.fenced.setdefault(place, node.holds.get(place, End(0, 64, 0)))
            if isinstance(outcome, RangesMerged):
                for one in outcome.plan.consumed:
                    node.consumed[one.session_id, one.run] = End(one.roll, one.offset, one.number)
        node.applied = min(node.applied + count, len(self.log))

    def _fetch(self, node: Node, peer: Node) -> None:
        if not (node.is_up and peer.is_up and self._has_joined(node)):
            return
        for closed in self.log[: node.applied]:
            if isinstance(closed, RunClosed):
                self._copy(node, peer, (closed.session_id, closed.run), closed.end)

    def _copy(self, node: Node, peer: Node, place: tuple[int, int], end: End) -> None:
        """Copy a run's missing data up to `end` from a peer to a node, if the peer keeps all of them."""
        end = min(peer.holds.get(place, NOTHING), end)
        start = max(node.holds.get(place, NOTHING), node.consumed.get(place, NOTHING))
        if start < end and peer.keeps(place, start[:2], end[:2]):
            node.take(place, start, end)

    def supply(self, node: Node, peer: Node) -> None:
        """Copy missing data of open runs from a peer to a node."""
        if node.is_up and peer.is_up and self._has_joined(node):
            for place, opened in self.opened_at.items():
                if opened < node.applied and place not in node.fenced:
                    self._copy(node, peer, place, peer.holds.get(place, NOTHING))

    # Merged logs

    def merge(self) -> None:
        """Nodes carry out instructions if some node has the input, or copy a peer's merged log; some of it
        becomes durable.
        """
        for node in self.nodes:
            if node.is_up and self.rng.random() < 0.5:
                self._merge(node, self.rng.randint(1, 4))
                if self.rng.random() < 0.7:
                    node.durable = node.merged

    def _merge(self, node: Node, count: int) -> bool:
        """Carry out up to `count` instructions. Return whether the node advanced."""
        before = node.merged
        last = sum(isinstance(one, RangesMerged) for one in self.log[: node.applied])
        peers = [peer for peer in self.nodes if peer.is_up and peer is not node]
        while node.merged < min(last, before + count):
            order = self.orders[node.merged + 1]
            blocks = [block for block in order.blocks if not block.is_declaration]
            if not all(any(one.keeps_input(block) for one in [node, *peers]) for block in blocks):
                break
            node.merged += 1
        if node.merged == before < last:
            ends = {peer.name: peer.merged for peer in peers}
            ahead = peers_ahead(ends, node.merged, is_cut_off=False)
            node.merged = max([node.merged, *(ends[name] for name in ahead)])
        return node.merged > before

    def tell_merged(self) -> None:
        """Exchange merge progress between nodes, and drop session bytes that no node needs any more."""
        for node in self.nodes:
            if node.is_up and self.rng.random() < 0.5:
                heard = [peer for peer in self.nodes if peer.is_up and self.rng.random() < 0.7]
                node.retention.on_merged({peer.name: peer.durable for peer in heard})
                self._release(node)
        self.check_supplied()

    def _release(self, node: Node) -> None:
        for instruction in range(1, node.retention.released(node.durable) + 1):
            for one in self.orders[instruction].consumed:
                node.release((one.session_id, one.run), End(one.roll, one.offset, one.number))

    def delete_published(self) -> None:
        """Delete a publisher's data that a node has reported as merged."""
        directory = self.rng.choice(self.present)
        for active in directory.active_runs:
            ends = [node.consumed.get((directory.session_id, active.run), NOTHING) for node in self.nodes]
            directory.deleted[active.run] = max(
                directory.deleted.get(active.run, NOTHING), self.rng.choice(ends)
            )

    def check_supplied(self) -> None:
        """Check that some disk has the bytes of every committed range: as session bytes or in a merged
        log.
        """
        first = min(node.durable for node in self.nodes)
        for instruction in range(first + 1, len(self.orders) + 1):
            for block in self.orders[instruction].blocks:
                if not block.is_declaration:
                    assert any(
                        node.durable >= instruction or node.keeps_input(block) for node in self.nodes
                    ), f"nobody has the input of instruction {instruction}: {block}"

    def go_down_or_up(self) -> None:
        node = self.rng.choice(self.nodes)
        node.is_up = not node.is_up or self.rng.random() < 0.6
        node.is_anew |= node.is_up
        node.merged = node.durable  # It may have lost power.

    def report(self) -> None:
        """Nodes report in random order; some boundaries and some reports are lost."""
        for node in self.nodes:
            if node.is_up and self._has_joined(node) and self.rng.random() < 0.5:
                self._report(node, self.rng.choice([0.3, 1, 1]))

    def _report(self, node: Node, share: float) -> None:
        if node.is_anew:
            node.is_anew = False
            self._forget(node)
        said: list[Callable[[], None]] = []
        for (session_id, run), held in node.holds.items():
            for roll, marks in self.masters[session_id, run].up_to(held):
                told = unpack_boundaries(pack_boundaries(one for one in marks if self.rng.random() <= share))
                key = SegmentKey(session_id, run, roll)
                said.append(lambda key=key, told=told: self.tracker.on_boundaries(node.name, key, told))  # type: ignore[misc]
        for place, end in node.fenced.items():
            final = SessionEnd(*place, *max(end, node.holds.get(place, NOTHING)))
            marks = self.masters[place].segments[final.roll]
            chain = next((one.chain for one in marks if one[:2] == final[3:]), None)
            said.append(lambda final=final, chain=chain: self.tracker.on_final(node.name, final, chain))  # type: ignore[misc]
        for announced in node.announced.values():
            said.append(lambda announced=announced: self.tracker.on_announced(announced))  # type: ignore[misc]
        self.rng.shuffle(said)
        for one in said:
            if self.rng.random() <= share:
                one()
        if share == 1:
            self.told[node.name] = sum(isinstance(one, DiskJoined) for one in self.log[: node.applied])
            self.merged[node.name] = node.durable

    # Leaders

    def plan(self) -> None:
        if len(self.queue) < IN_FLIGHT_MAX:
            self._take_news()
            is_alone = not any(isinstance(decode_command(one.data), MergeInstruction) for one in self.queue)
            if is_alone and not self.is_dirty:
                self.speculation.reconcile()
            merge = plan_merge(self.speculation, self.tracker, self.now_ns)
            if merge is not None:
                self.queue.append(InFlight(encode_command(merge), is_planned=True))
            elif is_alone and not self.is_dirty:
                anew = plan_merge(Speculation(self.state), self.tracker, self.now_ns)
                assert anew is None, f"{anew} was not looked for"

    def plan_ends(self) -> None:
        self._take_news()
        found = self.endings.plan()
        assert set(found) == set(SessionCloser(self.state, self.tracker).plan())
        on_the_way = [decode_command(one.data) for one in self.queue]
        ends = {(one.session_id, one.run) for one in on_the_way if isinstance(one, FenceRun | CloseRun)}
        for command in found:
            if (command.session_id, command.run) not in ends:
                self.queue.append(InFlight(encode_command(command), is_planned=True))
        for close in self.endings.plan_lost(self.told):
            if (close.session_id, close.run) not in ends:
                self.queue.append(InFlight(encode_command(close), is_planned=True))
        for restore in self.restoring.plan(self.told, self.merged, self.speculation.instruction):
            if restore not in on_the_way:
                self.queue.append(InFlight(encode_command(restore), is_planned=True))

    def _take_news(self) -> None:
        news = self.tracker.take_news()
        self.speculation.pending |= news
        self.endings.on_news(news)

    def change_leader(self) -> None:
        del self.queue[self.rng.randint(0, len(self.queue)) :]
        if self.rng.random() < 0.5:
            self.commit_all()
        self.is_dirty = bool(self.queue)
        self._lead()
        for node in self.nodes:
            if node.is_up and self._has_joined(node) and self.rng.random() < 0.5:
                self._report(node, 1)
        self.plan()

    def restore(self) -> None:
        """Restore the leader's state from a snapshot: the result must not depend on how the state was
        built.
        """
        if not self.queue:
            self.state = decode_state(encode_state(self.state))
            self._lead()

    def commit(self) -> None:
        if self.queue:
            one = self.queue.pop(0)
            self._commit(decode_command(one.data), is_planned=one.is_planned)
            if not self.queue and self.is_dirty:
                self.is_dirty = False
                self.speculation.reset()

    def commit_all(self) -> None:
        while self.queue:
            self.commit()

    def _commit(self, command: Command, *, is_planned: bool) -> None:
        outcome = apply(self.state, command)
        self.log.append(outcome)
        self.speculation.on_applied(outcome)
        self.endings.on_applied(outcome)
        match command, outcome:
            case _, CommandRejected(why):
                # A disk may be lost again while its `RestoreDisk` is in flight.
                is_late = isinstance(command, RestoreDisk)
                assert self.is_dirty or not is_planned or is_late, f"{command} was planned, but {why}"
                if isinstance(command, MergeInstruction):
                    self.speculation.reset()
            case MergeInstruction(), RangesMerged(order):
                self._check_merge(command, order)
                self.orders[order.instruction] = order
                self.check_supplied()
                for end in order.consumed:
                    self.tracker.prune_before(*end[:4])
            case OpenRun(), RunOpened():
                self._note_opening(command, outcome)
            case OpenSealedRuns(), RunOpened():
                for one in command.opens:
                    if one.run <= self.state.sessions[outcome.session_id].last_run:
                        self._note_opening(one, RunOpened(outcome.session_id, one.run))
            case CloseRun(), RunClosed():
                self._check_close(command)
            case JoinDisk(), DiskJoined():
                self._note_joining(command)
            case RestoreDisk(), DiskRestored():
                self._check_restored(command)
            case _:
                harmless = FenceRun | Configure | RequestMembers | CancelMembers | SettleMembers
                assert isinstance(command, harmless)

    def _note_opening(self, command: OpenRun, opened: RunOpened) -> None:
        directory = next(one for one in self.directories if one.incarnation == command.incarnation)
        directory.session_id = opened.session_id
        active = next(one for one in directory.active_runs if one.run == opened.run)
        self.masters[opened.session_id, opened.run] = active
        self.opened_at.setdefault((opened.session_id, opened.run), len(self.log) - 1)

    def _note_joining(self, join: JoinDisk) -> None:
        self.joined_at[join.node, join.disk[0]] = len(self.log) - 1
        node = next(one for one in self.nodes if one.name == join.node)
        node.lost = {}
        self._forget(node)

    # Checks

    def held_by_majority(self, session_id: int, run: int) -> End:
        place = session_id, run
        held = (max(node.holds.get(place, NOTHING), node.lost.get(place, NOTHING)) for node in self.nodes)
        return sorted(held, reverse=True)[self.majority - 1]

    def _check_merge(self, merge: MergeInstruction, order: WritePlan) -> None:
        assert order.first_position == self.position
        counts = {
            (b.session_id, b.run, b.roll): b.message_count for b in order.blocks if not b.is_declaration
        }
        for one in merge.ranges:
            self._check_range(one, counts.get((one.session_id, one.run, one.roll), 0))
        self.position += sum(counts.values())
        assert self.position == order.end_position == self.state.position

    def _check_range(self, one: MergeRange, count: int) -> None:
        session = self.state.sessions[one.session_id]
        active = self.masters[one.session_id, one.run]
        assert active.boundary_at(one.roll, one.start) == (one.start, one.first, one.chain_start)
        assert active.boundary_at(one.roll, one.end) == (one.end, one.end_number, one.chain_end)
        assert self.acknowledged[one.session_id, one.run][:2] >= (one.roll, one.end)
        assert one.first == self.reached.get((one.session_id, one.run), active.first)
        for session_id, run in self.reached:
            if self.state.sessions[session_id].name == session.name:
                assert (session_id, run) <= (one.session_id, one.run)
        self.reached[one.session_id, one.run] = one.end_number
        if session.dedup_id is None:
            assert count == one.count
            return
        wanted = self.wanted.get(session.dedup_id, one.first)
        assert one.first <= wanted
        assert count == max(one.end_number - max(one.first, wanted), 0)
        self.wanted[session.dedup_id] = max(wanted, one.end_number)

    def _check_close(self, close: CloseRun) -> None:
        acknowledged = self.acknowledged.get((close.session_id, close.run), NOTHING)
        assert (close.roll, close.offset) >= acknowledged[:2], (
            f"{close} drops what was replicated: {acknowledged}"
        )
        for run in close.later:
            acknowledged = self.acknowledged.get((close.session_id, run), NOTHING)
            assert acknowledged[:2] <= (0, 64), f"{close} drops what was replicated of {run}: {acknowledged}"

    def _check_restored(self, restore: RestoreDisk) -> None:
        """Check that every majority of whole disks includes a node with the acknowledged data of each open
        run.
        """
        whole = [node for node in self.nodes if node.name not in self._broken()]
        for session in self.state.sessions.values():
            for active in session.active_runs:
                place = session.id, active.run
                end = self.acknowledged.get(place, NOTHING)
                if active.end is None and not self._is_merged(place, end):
                    without = sum(node.holds.get(place, NOTHING) < end for node in whole)
                    assert without < self.majority, f"{restore}, but {end} of {place} would be forgotten"

    # Runs

    def step(self) -> None:
        self.now_ns += 1_000_000
        actions = self.actions()
        ((action, _),) = self.rng.choices(actions, [weight for _, weight in actions])
        action()

    def actions(self) -> list[tuple[Callable[[], None], int]]:
        """Return the possible actions, each with its weight."""
        actions: list[tuple[Callable[[], None], int]] = [
            (self.append, 12),
            (self.push, 30),
            (self.report, 30),
            (self.catch_up, 20),
            (self.plan, 40),
            (self.plan_ends, 10),
            (self.commit, 40),
            (self.restart, 2),
            (self.go_down_or_up, 2),
            (self.change_leader, 4),
            (self.restore, 1),
            (self.lose_disk, 20 if self.is_harsh else 2),
            (self.merge, 2 if self.is_harsh else 20),
            (self.tell_merged, 10),
            (self.delete_published, 4),
        ]
        if len(self.directories) < 7:
            actions.append((self.lose_directory, 1))
        return actions

    def heal(self) -> None:
        """Start all nodes and exchange everything until nothing changes."""
        for node in self.nodes:
            node.is_up = True
        for _ in range(ROUNDS_MAX):
            before = len(self.log), [dict(node.holds) for node in self.nodes]
            self.commit_all()
            for node in self.nodes:
                self._apply_on(node, len(self.log))
                for peer in self.nodes:
                    self._fetch(node, peer)
                    self.supply(node, peer)
                self._ask_to_join(node)
                for directory in self.present:
                    if self._has_joined(node) and node.name in directory.reach:
                        self._push(node, directory, 1000)
                while self._merge(node, 1000):
                    pass
                node.durable = node.merged
                if self._has_joined(node):
                    self._report(node, 1)
            self._acknowledge()
            self.plan()
            self.plan_ends()
            if not self.queue and before == (len(self.log), [dict(node.holds) for node in self.nodes]):
                return
        raise AssertionError("it does not come to rest")

    def check_whole(self) -> None:
        """Check that all data that a majority held, or that a publisher still has, are merged."""
        for place in self.masters:
            held = self.acknowledged.get(place, NOTHING)
            if held > NOTHING:
                assert self._is_merged(place, held), f"{place}: {held} is not merged"
        assert not self._broken()
        for node in self.nodes:
            assert node.merged == self.state.instruction, f"{node.name} never merges {node.merged + 1}"
        for directory in self.present:
            for active in directory.active_runs:
                place, end = (directory.session_id, active.run), directory.end(active)
                assert place in self.masters
                assert self._is_merged(place, end), f"{place}: {end} was written, and is not merged"
        last = {one.id for one in self.state.sessions.values() if not one.is_superseded}
        assert all(len(one.active_runs) == (one.id in last) for one in self.state.sessions.values())

    def _is_merged(self, place: tuple[int, int], end: End) -> bool:
        return self.reached.get(place, self.masters[place].first) >= end.number


def _disk_id(node: Node) -> bytes:
    return bytes([node.disk]) + node.name.encode().ljust(15)
