"""Membership changes on real Raft nodes with threads, TLS on the loopback and disks."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from pathlib import Path

import pytest
from raft_bench import ListMachine
from raft_members import HOST

from rt.errors import Closed, Overloaded
from rt.net.dev_pki import init_ca, issue
from rt.net.identity import Identity
from rt.net.tls import TLS
from sequencer.localcluster.loopback import free_port
from sequencer.raft.model.config import RaftConfig
from sequencer.raft.model.members import (
    AddLearner,
    MemberChange,
    MemberChangeNotReady,
    MemberRemoved,
    Members,
    PromoteLearner,
    RemoveMember,
)
from sequencer.raft.raft import Raft

NAMES = ("n1", "n2", "n3", "n4", "n5")
DEADLINE_S = 120.0


def wait_for(condition: Callable[[], object], said: Callable[[], object] = lambda: None) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, said()
        time.sleep(0.005)


class Node:
    """A node with its own directory, and its runs."""

    def __init__(self, cluster: RealCluster, name: str, *known: str, bootstrap: bool = False) -> None:
        self.cluster, self.name, self.known, self.bootstrap = cluster, name, [name, *known], bootstrap
        self.directory = str(cluster.directory / name)
        self.reported: list[Members] = []
        self.error: BaseException | None = None
        self.open()

    def open(self) -> None:
        self.error, self.machine = None, ListMachine()
        config = RaftConfig(
            name=self.name,
            members={name: self.cluster.addresses[name] for name in self.known},
            directory=self.directory,
            stream="s",
            bootstrap=self.bootstrap,
            snapshot_ms=200,
            keep_entries=50,
        )
        self.raft = Raft(
            config,
            self.machine,
            tls=self.cluster.tls[self.name],
            on_members=self.reported.append,
            on_failure=self.on_failure,
        )

    def on_failure(self, error: BaseException) -> None:
        self.error = error


class RealCluster:
    def __init__(self, directory: Path) -> None:
        self.directory = directory
        ca = directory / "ca"
        init_ca(ca)
        self.tls = {name: TLS(*issue(ca, Identity("s", "node", name), loopback=True)) for name in NAMES}
        self.addresses = {name: f"{HOST}:{free_port()}" for name in NAMES}
        self.nodes: dict[str, Node] = {}
        self.acknowledged: list[tuple[int, bytes]] = []
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._propose)

    def start(self, name: str, *known: str, bootstrap: bool = False) -> Node:
        node = self.nodes[name] = Node(self, name, *known, bootstrap=bootstrap)
        return node

    def leader(self) -> Raft:
        leaders: list[Raft] = []
        wait_for(
            lambda: leaders.extend(one.raft for one in self.nodes.values() if one.raft.is_leader) or leaders
        )
        return leaders[0]

    def change(self, change: MemberChange) -> None:
        """Let the current leader make the change, and retry while it is not ready."""
        deadline = time.monotonic() + DEADLINE_S
        while (error := self.leader().change_members(change).exception(DEADLINE_S)) is not None:
            if not isinstance(error, MemberChangeNotReady) or time.monotonic() > deadline:
                raise error
            self.restart_listed()
            time.sleep(0.05)

    def restart_listed(self) -> None:
        """Do as the supervisor does: restart each node that was removed and added again while it ran."""
        for node in self.nodes.values():
            if isinstance(node.error, MemberRemoved) and node.error.is_listed:
                node.raft.stop()
                node.open()

    def add(self, name: str) -> None:
        self.start(name, "n1")
        self.change(AddLearner(name, self.addresses[name]))
        self.change(PromoteLearner(name))

    def remove(self, name: str) -> MemberRemoved:
        node = self.nodes[name]
        node.raft.transfer_leadership(10.0)
        self.change(RemoveMember(name))
        return self.ended(name)

    def ended(self, name: str) -> MemberRemoved:
        """Wait until the node has ended because it is no member, and return its error."""
        node = self.nodes[name]
        wait_for(lambda: node.error is not None, node.raft.status)
        error = node.error
        assert isinstance(error, MemberRemoved)
        node.raft.stop()
        del self.nodes[name]
        return error

    @contextlib.contextmanager
    def proposing(self) -> Iterator[None]:
        self._thread.start()
        try:
            yield
        finally:
            self._is_over.set()
            self._thread.join()

    def _propose(self) -> None:
        waiting: list[tuple[Future[int], bytes]] = []
        for number in itertools.count():
            if self._is_over.wait(0.002):
                break
            nodes, command = list(self.nodes.values()), b"%d" % number
            with contextlib.suppress(Closed, Overloaded):
                waiting.append((nodes[number % len(nodes)].raft.propose(command), command))
        for future, command in waiting:
            with contextlib.suppress(Closed, FutureTimeout):
                self.acknowledged.append((future.result(DEADLINE_S), command))

    def close(self) -> None:
        for node in self.nodes.values():
            node.raft.stop()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[RealCluster]:
    made = RealCluster(tmp_path)
    yield made
    made.close()


@pytest.mark.slow
@pytest.mark.usefixtures("no_pushes")
def test_cluster_grows_to_five_and_shrinks_to_three_under_load(cluster: RealCluster) -> None:
    """A removed node that returns reports that it is removed, until it is added again."""
    first = cluster.start("n1", bootstrap=True)
    with cluster.proposing():
        for name in NAMES[1:]:
            cluster.add(name)
        assert {one.name: one.votes for one in first.raft.status().members} == dict.fromkeys(NAMES, True)
        wait_for(lambda: all(node.reported[-1] == first.raft.members for node in cluster.nodes.values()))
        for name in ("n1", "n5"):  # The lowest name, which dials no node, and the highest name.
            assert not cluster.remove(name).is_listed
        assert set(cluster.leader().members) == {"n2", "n3", "n4"}
        for name in ("n1", "n5"):
            cluster.start(name, "n2")
            assert "add it to the cluster again" in str(cluster.ended(name))
        cluster.change(AddLearner("n1", cluster.addresses["n1"]))
        cluster.start("n1", "n2")
        cluster.change(PromoteLearner("n1"))
        before = len(cluster.nodes["n1"].machine.commands)
        wait_for(lambda: len(cluster.nodes["n1"].machine.commands) > before + 100)
    _check(cluster)


@pytest.mark.slow
@pytest.mark.usefixtures("no_pushes")
@pytest.mark.parametrize("name", ["n1", "n3"])
def test_offline_removed_node_learns_of_removal_at_each_start(cluster: RealCluster, name: str) -> None:
    """This holds before and after the others dial the node. n1 dials no node while it hears a leader."""
    for one in NAMES[:3]:
        cluster.start(one, *({*NAMES[:3]} - {one}), bootstrap=True)
    cluster.leader()
    wait_for(lambda: all(node.raft.status().cluster for node in cluster.nodes.values()))
    node = cluster.nodes.pop(name)
    node.raft.stop()
    cluster.change(RemoveMember(name))
    others = [other.raft for other in cluster.nodes.values()]
    wait_for(lambda: not any(name in raft._node.membership._parting for raft in others))
    for _ in range(2):
        node.open()
        cluster.nodes[name] = node
        assert not cluster.ended(name).is_listed
    refused = sum((raft._mesh.refused for raft in others), Counter[str]())
    assert set(refused) <= {"member", "direction"}


@pytest.mark.slow
@pytest.mark.usefixtures("no_pushes")
def test_new_node_joins_knowing_only_one_follower(cluster: RealCluster) -> None:
    """Its first snapshot is older than the first member list, and contains no addresses."""
    three(cluster)
    follower = next(name for name in cluster.nodes if not cluster.nodes[name].raft.is_leader)
    cluster.start("n4", follower)
    cluster.change(AddLearner("n4", cluster.addresses["n4"]))
    cluster.change(PromoteLearner("n4"))
    assert cluster.leader().members["n4"].votes


@pytest.mark.slow
@pytest.mark.usefixtures("no_pushes")
@pytest.mark.parametrize("name", ["n1", "n3"])
def test_returning_node_finds_replaced_members_with_one_configured_member(
    cluster: RealCluster, name: str
) -> None:
    three(cluster)
    cluster.change(AddLearner("n4", cluster.addresses["n4"]))
    cluster.change(RemoveMember("n4"))
    node, changed = cluster.nodes[name], cluster.leader().status().members_index
    wait_for(lambda: node.raft.status().members_index == changed)
    del cluster.nodes[name]
    node.raft.stop()
    others = list(cluster.nodes)
    for new in ("n4", "n5"):
        cluster.start(new, *others)
        cluster.change(AddLearner(new, cluster.addresses[new]))
        cluster.change(PromoteLearner(new))
    for gone in others:
        cluster.remove(gone)
    node.known, node.bootstrap = [name, "n5"], False
    node.open()
    cluster.nodes[name] = node
    wait_for(lambda: set(node.raft.members) == {name, "n4", "n5"} and node.raft.status().leader)


def three(cluster: RealCluster) -> None:
    """Start n1, n2 and n3, and wait until their disks count."""
    for one in NAMES[:3]:
        cluster.start(one, *({*NAMES[:3]} - {one}), bootstrap=True)
    cluster.leader()
    nodes = list(cluster.nodes.values())
    wait_for(lambda: all(one.is_counted for node in nodes for one in node.raft.status().members))


def _check(cluster: RealCluster) -> None:
    """Check that all nodes have applied the same commands, and each acknowledged command once."""
    machines = [node.machine for node in cluster.nodes.values()]
    last = max(index for index, _ in cluster.acknowledged)
    wait_for(lambda: all(len(machine.applied) >= last for machine in machines))
    commands = machines[0].commands[:last]
    assert all(machine.commands[:last] == commands for machine in machines)
    assert len(set(commands)) == len(commands)
    assert all(commands[index - 1] == command for index, command in cluster.acknowledged)
    assert len(cluster.acknowledged) > 100
