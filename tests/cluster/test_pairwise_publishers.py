"""Publishers that reach some of the nodes only: no node is sent everything."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from faults import Faults
from sending import Sender

pytestmark = pytest.mark.slow


@pytest.fixture
def senders(faults: Faults, tmp_path: Path) -> Iterator[list[Sender]]:
    """Three publishers, each of which reaches a different two of the nodes."""
    nodes = faults.nodes
    with contextlib.ExitStack() as running:
        for left_out, endpoint in zip(nodes.names, nodes.endpoints, strict=True):
            session = f"{tmp_path.name[-20:]}-{left_out}"
            reached = [one for one in nodes.endpoints if one != endpoint]
            tls = nodes.certificate("publisher", session)
            sender = Sender(tmp_path / session, session, reached, tls)
            faults.senders.append(running.enter_context(sender))
        yield faults.senders


def test_publishers_that_each_reach_another_two_of_three_nodes_flow_without_end(
    faults: Faults, senders: list[Sender]
) -> None:
    nodes = faults.nodes
    for _ in range(10):
        faults.wait_flow(*senders)
        nodes.wait_merged(max(map(nodes.merged_position, nodes.names)))
    for sender in senders:
        sender.close()
    faults.verdict()


def test_a_publisher_that_never_rests_and_reaches_one_node_only_flows_too(faults: Faults) -> None:
    nodes, session = faults.nodes, "lonely"
    tls = nodes.certificate("publisher", session)
    with Sender(nodes.root / session, session, nodes.endpoints[:1], tls) as sender:
        faults.senders.append(sender)
        for _ in range(3):
            faults.wait_flow(sender)
            nodes.wait_merged(max(map(nodes.merged_position, nodes.names)))
        sender.close()
        faults.verdict()


def test_what_no_node_has_alone_is_merged_after_all_nodes_were_killed_and_one_lost_its_disk(
    faults: Faults, senders: list[Sender]
) -> None:
    nodes = faults.nodes
    faults.wait_flow(*senders)
    nodes.kill(*nodes.names)
    nodes.wipe("n2")
    nodes.start()
    nodes.wait_ready()
    faults.wait_flow(*senders)
    for sender in senders:
        sender.close()
    faults.verdict()
