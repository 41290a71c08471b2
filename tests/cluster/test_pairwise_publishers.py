"""Messages of publishers that reach only some nodes are merged on all nodes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from faults import Faults
from senders import Sender

pytestmark = pytest.mark.slow


@pytest.fixture
def senders(faults: Faults, tmp_path: Path) -> Iterator[list[Sender]]:
    """Start three publishers. Each one reaches a different pair of nodes."""
    nodes = faults.nodes
    with contextlib.ExitStack() as running:
        for left_out, endpoint in zip(nodes.names, nodes.endpoints, strict=True):
            session = f"{tmp_path.name[-20:]}-{left_out}"
            reached = [one for one in nodes.endpoints if one != endpoint]
            tls = nodes.certificate("publisher", session)
            sender = Sender(tmp_path / session, session, reached, tls)
            faults.senders.append(running.enter_context(sender))
        yield faults.senders


def test_publishers_reaching_different_pairs_of_nodes_keep_merging(
    faults: Faults, senders: list[Sender]
) -> None:
    nodes = faults.nodes
    for _ in range(10):
        faults.wait_flow(*senders)
        nodes.wait_merged(max(map(nodes.merged_position, nodes.names)))
    for sender in senders:
        sender.close()
    faults.verdict()


def test_busy_publisher_reaching_only_one_node_keeps_merging(faults: Faults) -> None:
    nodes, session = faults.nodes, "lonely"
    tls = nodes.certificate("publisher", session)
    with Sender(nodes.root / session, session, nodes.endpoints[:1], tls) as sender:
        faults.senders.append(sender)
        for _ in range(3):
            faults.wait_flow(sender)
            nodes.wait_merged(max(map(nodes.merged_position, nodes.names)))
        sender.close()
        faults.verdict()


def test_pairwise_publishers_keep_merging_after_all_nodes_are_killed_and_one_disk_is_lost(
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
