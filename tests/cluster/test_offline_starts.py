"""Runs of a publisher started many times offline are merged in order, even while nodes are killed."""

from __future__ import annotations

from pathlib import Path

import pytest
from faults import WAIT_S, Faults

import rt
from sequencer.state.session_commands import SEALED_RUNS_MAX

pytestmark = pytest.mark.slow

STARTS = {"leaders killed": SEALED_RUNS_MAX + 44, "a node away": 100, "data killed": 100}
"""Number of starts for each failure. The first number exceeds the runs that one command opens."""


def start_offline(root: Path, session: str, first: int, count: int) -> list[bytes]:
    """Start a publisher `count` times without any node; return the published values."""
    values = [b"%d" % number for number in range(first, first + count)]
    for value in values:
        with rt.Publisher(root, "s", publisher_id=session) as publisher:
            publisher.publish(value)
    return values


def merged_values(faults: Faults, session: str, node: str) -> list[bytes]:
    with rt.LogReader(faults.nodes.merged_directory(node)) as log:
        return [message.value for message in log if message.session == session]


@pytest.mark.parametrize(("fault", "starts"), STARTS.items(), ids=STARTS)
def test_offline_runs_are_merged_in_order_despite_node_failures(
    faults: Faults, tmp_path: Path, fault: str, starts: int
) -> None:
    nodes, session = faults.nodes, f"offline-{fault.replace(' ', '-')}"
    values = start_offline(tmp_path, session, 0, starts)
    leader = nodes.wait_ready()
    away = next(name for name in nodes.names if name != leader)
    position = max(map(nodes.merged_position, nodes.names))
    tls = nodes.certificate("publisher", session)
    if fault == "a node away":
        nodes.kill(away)
    with rt.Publisher(tmp_path, "s", publisher_id=session, endpoints=nodes.endpoints, tls=tls) as publisher:
        if fault in {"leaders killed", "data killed"}:
            for share in (1, starts // 3, starts // 2):
                faults.wait(
                    lambda share=share: max(map(nodes.merged_position, nodes.running)) >= position + share,  # type: ignore[misc]
                    "a share of the starts to be merged",
                )
                if fault == "leaders killed":
                    faults.wait(nodes.leader, "a leader")
                    name = nodes.leader()
                    assert name is not None
                    nodes.kill(name)
                    nodes.start(name)
                else:
                    nodes.kill(away)
                    nodes.start(away)
        publisher.wait(publisher.publish(b"last"), "merged", timeout=WAIT_S)
    if fault == "a node away":
        nodes.start(away)
    nodes.wait_ready()
    nodes.wait_merged(position + starts + 1)
    for name in nodes.names:
        assert merged_values(faults, session, name) == [*values, b"last"]
    faults.verdict(others={session: starts + 1})


def test_later_offline_runs_are_merged_after_earlier_ones(faults: Faults, tmp_path: Path) -> None:
    """The publisher repeatedly works offline and then pushes. Runs that were opened before go first."""
    nodes, session = faults.nodes, "offline-again"
    nodes.wait_ready()
    position = max(map(nodes.merged_position, nodes.names))
    tls = nodes.certificate("publisher", session)
    values: list[bytes] = []
    for turn in range(3):
        values += start_offline(tmp_path, session, len(values), 20)
        with rt.Publisher(
            tmp_path, "s", publisher_id=session, endpoints=nodes.endpoints, tls=tls
        ) as publisher:
            publisher.wait(publisher.publish(b"online %d" % turn), "merged", timeout=WAIT_S)
        values.append(b"online %d" % turn)
    nodes.wait_merged(position + len(values))
    for name in nodes.names:
        assert merged_values(faults, session, name) == values
    faults.verdict(others={session: len(values)})
