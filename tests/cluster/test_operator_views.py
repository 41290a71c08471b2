"""Operators see holds, member phases and alarms of real nodes through the gRPC port."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from chaos.wired_nodes import WiredNodes
from faults import WAIT_S, Faults
from operator_calls import told

import rt
from rt.sidecar.push_control import ListRequested, PushesListed, find_push_processes
from sequencer.ipc.silence import HUNG_S

pytestmark = pytest.mark.slow


class Operator:
    """An operator that sends requests to nodes through the tunnel."""

    def __init__(self, nodes: WiredNodes) -> None:
        self._nodes = nodes

    def told(self, target: str, name: str = "", *, body: dict[str, Any] | None = None) -> Any:
        """Return the answer of this node (default: of any running node)."""
        return told(self._nodes, target, body, by=name)

    def holds(self) -> dict[str, int]:
        return {one["name"]: one["position"] for one in self.told("/holds")}

    def alarms(self, asked: str) -> dict[str, str]:
        """The texts of a node's alarms, by name."""
        return {one["name"]: one["text"] for one in self.told("/status", asked)["alarms"]}

    def nodes_of(self, client: str, asked: str) -> set[str]:
        """Return the nodes that a client is connected to, as the node `asked` reports them."""
        found = self.told("/cluster-clients", asked)["clients"]
        return {one["node"] for one in found if one["name"] == client}

    def member(self, name: str, asked: str) -> dict[str, Any]:
        """Return how one node sees another node or itself. The phase is empty while it knows of no
        members.
        """
        members = self.told("/status", asked)["members"]
        return next((one for one in members if one["name"] == name), {"phase": ""})


@pytest.fixture
def operator(faults: Faults) -> Operator:
    return Operator(faults.nodes)


def publish(faults: Faults, operator: Operator, root: Path, session: str, count: int) -> int:
    """Publish `count` messages and wait until all nodes have merged them; return the position after them."""
    tls = faults.nodes.certificate("publisher", session)
    with rt.Publisher(
        root, "s", publisher_id=session, endpoints=faults.nodes.endpoints, tls=tls
    ) as publisher:
        numbers = publisher.publish_many([b"x" * 100] * count)
        publisher.wait(numbers[-1], "merged", timeout=WAIT_S)
    newest = [operator.told("/latest-out-position", name) for name in faults.nodes.names]
    end = 1 + max(int(one["latestOutPosition"]) for one in newest)
    faults.nodes.wait_merged(end)
    return end


def test_hold_of_named_subscriber_follows_its_acks_until_operator_releases_it(
    faults: Faults, operator: Operator, tmp_path: Path
) -> None:
    end = publish(faults, operator, tmp_path / "out", "held", 10)
    with rt.Subscriber(
        tmp_path / "in",
        "s",
        endpoints=faults.nodes.endpoints,
        tls=faults.nodes.certificate("subscriber", "holder"),
        connect_timeout=None,
        name="holder",
        position=end - 9,
    ) as subscriber:
        faults.wait(lambda: operator.holds().get("holder") == end - 9, "a hold where it began")
        faults.wait(
            lambda: all(operator.nodes_of("holder", name) for name in faults.nodes.names),
            "each node to know which one it is connected to",
        )
        while subscriber.position < end:
            assert subscriber.poll(timeout=WAIT_S)
        operator.told("/release-hold", body={"name": "holder"})
        faults.wait(lambda: "holder" not in operator.holds(), "the hold to be released")
        subscriber.ack(end - 4)
        faults.wait(lambda: operator.holds().get("holder") == end - 4, "a hold behind what it acknowledged")
    operator.told("/release-hold", body={"name": "holder"})


def test_node_with_lost_disk_is_reported_unreachable_then_copying_or_merging_then_ready(
    faults: Faults, operator: Operator, tmp_path: Path
) -> None:
    nodes = faults.nodes
    end = publish(faults, operator, tmp_path / "out", "before-the-loss", 10)
    faults.wait(lambda: operator.member("n3", "n1")["phase"] == "ready", "n3 to keep up")
    nodes.kill("n3")
    nodes.wipe("n3")
    faults.wait(lambda: operator.member("n3", "n1")["phase"] == "unreachable", "n3 to be missed")
    for peer in ("n1", "n2"):
        nodes.pause(peer, "data")
    nodes.start("n3")
    nodes.wait_ready()

    def is_behind() -> bool:
        """Return whether n3 still catches up. With a snapshot of Raft it copies merged bytes; with every
        command it merges again.
        """
        seen = operator.member("n3", "n3")
        return seen["phase"] in {"copying", "merging"} and seen["phaseDone"] < seen["phaseTotal"] == end

    faults.wait(is_behind, "n3 to make up for what it lacks")
    for peer in ("n1", "n2"):
        nodes.resume(peer, "data")
    faults.wait(lambda: operator.member("n3", "n1")["phase"] == "ready", "n3 to be back")
    nodes.wait_merged(end)
    faults.verdict()


def test_hung_process_raises_alarm_of_its_node_and_report_age_grows(
    faults: Faults, operator: Operator
) -> None:
    nodes = faults.nodes
    leader = nodes.wait_ready()
    one, other = (name for name in nodes.names if name != leader)
    faults.wait(lambda: operator.member(one, leader)["phase"] == "ready", "all to keep up")
    nodes.pause(one, "data")
    nodes.pause(other, "control")
    try:
        faults.wait(lambda: "data-hung" in operator.alarms(leader), "the hung data process to be named")
        text = operator.alarms(leader)["data-hung"]
        assert f"The data process of {one} has not answered" in text
        assert "pgrep -af 'child_main data'" in text
        assert operator.member(one, leader)["phase"] == "data-hung"
        faults.wait(lambda: "control-hung" in operator.alarms(other), "the hung control process to be named")
        obstacles = operator.told("/status", other)["node"]["obstacles"]
        assert any("control-hung: the control process has not answered" in one for one in obstacles)
        assert operator.member(leader, other)["reportAgeSeconds"] >= HUNG_S
    finally:
        nodes.resume(one, "data")
        nodes.resume(other, "control")
    faults.wait(lambda: "data-hung" not in operator.alarms(leader), "the data process to answer")
    faults.wait(lambda: "control-hung" not in operator.alarms(other), "the control process to answer")


def test_stopped_push_process_raises_push_stuck_alarm_on_each_node_until_resumed(
    faults: Faults, operator: Operator, tmp_path: Path
) -> None:
    nodes = faults.nodes

    def stuck(name: str) -> str:
        alarms = [one for one in operator.told("/status", name)["alarms"] if one["name"] == "push-stuck"]
        # Alarms about sessions of other tests may still be reported.
        return next((one["text"] for one in alarms if "session stopped " in one["text"]), "")

    tls = nodes.certificate("publisher", "stopped")
    with rt.Publisher(tmp_path, "s", publisher_id="stopped", endpoints=nodes.endpoints, tls=tls) as publisher:
        publisher.wait(publisher.publish(b"before"), "merged", timeout=WAIT_S)
        pid = push_of(publisher.directory)
        os.kill(pid, signal.SIGSTOP)
        try:
            number = publisher.publish(b"while it is stopped")
            publisher.flush()
            faults.wait(
                lambda: all("session stopped has reported nothing" in stuck(name) for name in nodes.names),
                "the alarm of each node",
            )
            faults.wait(
                lambda: all("until its connection ended" in stuck(name) for name in nodes.names),
                "the alarm after the nodes have ended the connection",
            )
        finally:
            os.kill(pid, signal.SIGCONT)
        publisher.wait(number, "merged", timeout=WAIT_S)
        faults.wait(lambda: not any(map(stuck, nodes.names)), "the end of the alarms")


def push_of(directory: str) -> int:
    """Return the id of the process that pushes this session."""
    for process in find_push_processes():
        if process.stopped() is None:
            with contextlib.suppress(rt.RtError):  # A push process of another test may have ended.
                answer = process.ask(ListRequested(), seconds=WAIT_S)
                if isinstance(answer, PushesListed) and directory in {one.directory for one in answer.pushes}:
                    return process.pid
    raise AssertionError(f"no process pushes {directory}")
