"""What a data process is told of how the nodes stand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rt.v1 import sequencer_pb2 as pb
from sequencer.control.holdings import Standings
from sequencer.control.standing import Nodes, summary_of
from sequencer.raft.consensus import Leadership, MemberStatus, Status

MEMBERS = (
    MemberStatus("n1", "a:7000", True, True, "d1", True, 7),
    MemberStatus("n2", "b:7000", False, False, "", None, None),
)
STATUS = Status(
    name="n1",
    role="leader",
    leader="n1",
    term=4,
    cluster="ab" * 16,
    epoch=1,
    index=9,
    log_start=1,
    log_end=10,
    committed=9,
    applied=9,
    chain=5,
    snapshot=0,
    in_flight=0,
    members=MEMBERS,
)


@pytest.fixture
def nodes() -> Nodes:
    return Nodes("n1", {"n1": "a:5002", "n2": "b:5002"})


def standing(nodes: Nodes, *, may_take: bool = True, **changes: object) -> pb.Standing:
    return nodes.standing(replace(STATUS, **changes), Leadership("n1", 4, True), may_take=may_take)


def test_each_node_stands_with_its_data_address_and_what_it_last_said(nodes):
    for clock_ns in (1, 2):
        nodes.on_summary("n2", pb.Summary(clock_ns=clock_ns))
    one, other = standing(nodes).nodes
    assert (one.name, one.address, one.is_connected, one.is_counted) == ("n1", "a:5002", True, True)
    assert (other.name, other.address, other.is_connected, other.is_counted) == ("n2", "b:5002", False, False)
    assert not one.HasField("summary")
    assert other.summary.clock_ns == 2


def test_bytes_are_welcome_only_in_a_cluster_with_a_leader(nodes):
    assert standing(nodes).is_caught_up
    assert not standing(nodes, may_take=False).is_caught_up
    assert not standing(nodes, cluster="").is_caught_up
    assert not standing(nodes, leader=None).is_caught_up


def test_a_node_says_its_clock_its_merging_and_its_disk():
    standings = Standings(pb.MergedReport(instruction=3), 100, 40)
    told = summary_of(standings, 7)
    assert (told.clock_ns, told.merged.instruction, told.disk_bytes, told.disk_free_bytes) == (7, 3, 100, 40)
