"""Member changes of real clusters while a publisher publishes and a subscriber reads."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from growing_cluster import GrowingCluster

import rt

pytestmark = pytest.mark.slow

PAUSE_S = 0.05
"""The pause between two messages, in seconds."""


class Traffic:
    """A publisher that publishes each message after the one before it is merged."""

    def __init__(self, cluster: GrowingCluster, root: Path, *endpoints_of: str) -> None:
        self.count = 0
        self._publisher = rt.Publisher(
            root / "published",
            cluster.stream,
            publisher_id="p",
            endpoints=cluster.endpoints_of(*endpoints_of),
            tls=cluster.certificate("publisher", "p"),
        )
        self._stopping = threading.Event()
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self._stopping.wait(PAUSE_S):
                number = self._publisher.publish(b"%d" % self.count)
                self._publisher.wait(number, timeout=120)
                self.count = number + 1
        except Exception as error:  # noqa: BLE001 - the test raises it
            self._failure = error

    def wait_flow(self, cluster: GrowingCluster) -> None:
        """Wait until another message is merged."""
        before = self.count
        cluster.wait(lambda: self._failure or self.count > before, "more to be merged")
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        self._stopping.set()
        self._thread.join()
        self._publisher.close(timeout=120)
        if self._failure is not None:
            raise self._failure


@contextlib.contextmanager
def traffic(cluster: GrowingCluster, root: Path, *endpoints_of: str) -> Iterator[Traffic]:
    flow = Traffic(cluster, root, *endpoints_of)
    try:
        yield flow
    finally:
        flow.close()


@contextlib.contextmanager
def reader(cluster: GrowingCluster, root: Path, *endpoints_of: str) -> Iterator[rt.Subscriber]:
    with rt.Subscriber(
        root / "read",
        cluster.stream,
        position="earliest",
        endpoints=cluster.endpoints_of(*endpoints_of),
        tls=cluster.certificate("subscriber", "r"),
    ) as subscriber:
        yield subscriber


@pytest.fixture
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with a path short enough for sockets."""
    return tmp_path_factory.mktemp("m")


def grown(cluster: GrowingCluster, *names: str) -> None:
    for name in names:
        cluster.start(name)
        done(cluster, "add", name, cluster.raft_address(name), of=("n1",))


def done(cluster: GrowingCluster, *words: str, of: tuple[str, ...]) -> None:
    found = cluster.member(*words, of=of)
    assert (found.returncode, found.stdout.splitlines()[-1:]) == (0, ["Done."]), found


def values(path: Path) -> list[bytes]:
    with rt.LogReader(path) as reader:
        return [message.value for message in reader]


def check_logs(cluster: GrowingCluster, count: int, *names: str) -> None:
    """Check that the merged logs of these nodes have all messages once and in order, and have equal bytes."""
    cluster.wait_merged(count, *names)
    expected = [b"%d" % number for number in range(count)]
    for name in names:
        assert values(cluster.merged_directory(name)) == expected
    assert not cluster.compare_of(*names)


def test_single_node_cluster_grows_to_five_nodes_and_shrinks_to_three_under_load(root: Path) -> None:
    with GrowingCluster(root, 5, 1) as cluster:
        cluster.start("n1")
        cluster.wait_ready()
        refused = cluster.member("add", "n2", cluster.raft_address("n2"))
        assert refused.returncode == 1
        assert "members can be changed from feature level 2 on" in refused.stderr
        cluster.raise_level()
        # The clients know only n1, which is removed. They learn the other nodes.
        with traffic(cluster, root, "n1") as flow, reader(cluster, root, "n1") as subscriber:
            flow.wait_flow(cluster)
            grown(cluster, "n2", "n3", "n4", "n5")
            assert cluster.roles() == dict.fromkeys(cluster.names, "voter")
            flow.wait_flow(cluster)
            for _ in range(2):
                leader = cluster.leader()
                others = [name for name in cluster.running if name != leader]
                assert leader is not None
                done(cluster, "remove", leader, of=(others[0],))
                assert cluster.wait_ended(leader) == 1, "it says why, and does not start again"
                assert "this node was removed from the cluster" in cluster.last_words(leader, 40)
                flow.wait_flow(cluster)
            left = tuple(cluster.running)
            assert cluster.roles() == dict.fromkeys(left, "voter")
            received: list[bytes] = []
            while len(received) < flow.count:
                messages = subscriber.poll(timeout=120)
                assert messages, f"{len(received)} messages, then none"
                received += [message.value for message in messages]
            assert received == [b"%d" % number for number in range(len(received))]
        check_logs(cluster, flow.count, *left)

        gone = next(name for name in cluster.names if name not in left)
        cluster.start(gone)
        assert cluster.wait_ended(gone) == 1, "it is told at once, though all it knows is its old list"
        assert "this node was removed from the cluster" in cluster.last_words(gone, 40)


def test_dead_node_replacement_completes_after_all_other_nodes_are_killed(root: Path) -> None:
    with GrowingCluster(root, 4, 3) as cluster:
        cluster.start("n1", "n2", "n3")
        cluster.wait_ready()
        cluster.raise_level()
        with traffic(cluster, root, *cluster.names) as flow:
            flow.wait_flow(cluster)
            dead = next(name for name in cluster.running if name != cluster.leader())
            cluster.kill(dead)
            cluster.wipe(dead)
            flow.wait_flow(cluster)
            started = cluster.member("replace", dead, "n4", cluster.raft_address("n4"), "--no-wait")
            assert started.stdout == f"Change 1 has started: replace {dead} by n4.\n", started
            alive = cluster.running
            cluster.kill(*alive)
            cluster.start(*alive, "n4")
            flow.wait_flow(cluster)
            cluster.wait(
                lambda: cluster.settled(of=alive) == {"number": 1, "why": ""}, "the change to be done"
            )
            names = (*alive, "n4")
            assert cluster.roles(of=names) == dict.fromkeys(sorted(names), "voter")
            flow.wait_flow(cluster)
            cluster.kill(alive[0])
            flow.wait_flow(cluster)
            cluster.start(alive[0])
        check_logs(cluster, flow.count, *names)
