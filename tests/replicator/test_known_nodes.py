"""Which endpoints a client uses: its seeds, the members that nodes report, and which node answered where."""

from __future__ import annotations

from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replicator.protocol.handshake import PullStart
from replicator.protocol.known_nodes import (
    MEMBERS_MAX,
    NO_NODES,
    SEED_FAILURES_MAX,
    ClientEndpoints,
    EndpointState,
    KnownNode,
    KnownNodes,
    choose_endpoints,
)
from replicator.protocol.messages import LogOffset
from replicator.pull.node_channels import NodeChannels
from rt.cluster_epoch import epoch_of
from rt.net.grpc_errors import Unreachable

CLUSTER = bytes(range(16))


def members(*names: str, version: int = 1) -> KnownNodes:
    """Nodes with their addresses in the member list."""
    return KnownNodes(tuple(KnownNode(name, f"{name}.example:5002") for name in names), version)


def seed(node: str | None = None, failures: int = 0) -> EndpointState:
    return EndpointState(node, failures)


THREE = members("n1", "n2", "n3")
TABLE = [
    # The list never changed: the seeds only.
    ({"s1:1": seed("n1"), "s2:1": seed()}, NO_NODES, []),
    # Seeds that were not tried yet may lead to any node.
    ({"s1:1": seed("n1"), "s2:1": seed()}, THREE, []),
    # If no seed leads to a node, the node's own address is used, in the order of the list.
    ({"s1:1": seed("n2")}, THREE, ["n1.example:5002", "n3.example:5002"]),
    # A seed equals a node's own address.
    ({"n1.example:5002": seed("n1")}, THREE, ["n2.example:5002", "n3.example:5002"]),
    # That address is not used twice, even before it answered.
    ({"n1.example:5002": seed(failures=1)}, THREE, ["n2.example:5002", "n3.example:5002"]),
    # After a few failures a seed still stands for the node that answered last.
    ({"s1:1": seed("n1", SEED_FAILURES_MAX - 1)}, THREE, ["n2.example:5002", "n3.example:5002"]),
    # After more failures it does not.
    ({"s1:1": seed("n1", SEED_FAILURES_MAX)}, THREE, [node.endpoint for node in THREE.nodes]),
    # A seed that never answered stands for no node.
    ({"s1:1": seed(failures=1)}, THREE, [node.endpoint for node in THREE.nodes]),
    # A seed of a node that left is kept, and stands for no member.
    ({"s9:1": seed("n9")}, THREE, [node.endpoint for node in THREE.nodes]),
    # Two seeds lead to one node, as two proxies may.
    ({"s1:1": seed("n1"), "s2:1": seed("n1")}, THREE, ["n2.example:5002", "n3.example:5002"]),
    # All are reached through seeds.
    ({f"s{index}:1": seed(f"n{index}") for index in (1, 2, 3)}, THREE, []),
]


@pytest.mark.parametrize("index", range(len(TABLE)))
def test_endpoints_in_use_are_seeds_and_members_that_no_seed_reaches(index: int) -> None:
    seeds, known, learned = TABLE[index]
    assert choose_endpoints(seeds, known) == (*seeds, *learned)


def test_member_endpoint_that_reached_another_node_is_not_used() -> None:
    assert choose_endpoints({"s1:1": seed("n1")}, THREE, {"n2.example:5002"}) == ("s1:1", "n3.example:5002")


states = st.builds(
    EndpointState, st.none() | st.sampled_from([f"n{index}" for index in range(6)]), st.integers(0, 4)
)
lists = st.lists(st.sampled_from([f"n{index}" for index in range(6)]), unique=True, max_size=5).map(
    lambda names: members(*names, version=bool(names))
)
endpoints = st.sampled_from([f"n{index}.example:5002" for index in range(6)] + ["s1:1", "s2:1"])


@given(st.dictionaries(endpoints, states, min_size=1, max_size=4), lists, st.sets(endpoints))
def test_chosen_endpoints_reach_every_member_without_duplicates(
    seeds: dict[str, EndpointState], known: KnownNodes, wrong: set[str]
) -> None:
    chosen = choose_endpoints(seeds, known, wrong)
    assert chosen[: len(seeds)] == tuple(seeds)
    assert len(set(chosen)) == len(chosen)
    by_endpoint = {node.endpoint: node.name for node in known.nodes}
    learned = {by_endpoint[endpoint] for endpoint in chosen[len(seeds) :]}
    by_seeds = {one.node for one in seeds.values() if one.node and one.failures < SEED_FAILURES_MAX}
    assert not learned & by_seeds
    if all(one.was_tried for one in seeds.values()):
        reached = by_seeds | learned | {by_endpoint.get(one) for one in {*seeds, *wrong}}
        assert known.names <= reached
    else:
        assert not learned


def test_member_list_with_highest_version_is_used_whichever_node_reports_it() -> None:
    client = ClientEndpoints(["s1:1"])
    client.record_answer("s1:1", "n1")
    assert not client.learn(CLUSTER, 0, NO_NODES)
    assert client.learn(CLUSTER, 0, members("n1", "n2", version=2))
    assert not client.learn(CLUSTER, 0, members("n1", version=1))  # From a node that was cut off.
    assert not client.learn(CLUSTER, 0, NO_NODES)  # Of an older node.
    assert not client.learn(bytes(16), 0, members("x1", version=9))  # Of another cluster.
    assert client.in_use == ("s1:1", "n2.example:5002")
    assert client.learn(CLUSTER, 0, members("n1", "n3", version=3))
    assert client.in_use == ("s1:1", "n3.example:5002")


def test_member_list_of_later_epoch_takes_precedence_over_higher_version() -> None:
    client = ClientEndpoints(["s1:1"])
    assert client.learn(CLUSTER, 1, members("n1", version=7))
    assert not client.learn(CLUSTER, 2, NO_NODES)  # The node does not know the list yet.
    assert client.known.version == 7
    assert not client.learn(CLUSTER, 1, members("n5", version=99))
    assert client.learn(CLUSTER, 3, members("n2", version=4))
    forced = epoch_of(1 << 16, 5)
    assert client.learn(CLUSTER, forced, NO_NODES)  # The list never changed after this forced reset.
    assert client.known is NO_NODES
    # From a competing forced reset.
    assert not client.learn(CLUSTER, epoch_of(1 << 16, 6), members("n5", version=99))


def test_learned_endpoint_reaching_another_node_is_dropped_until_member_list_changes() -> None:
    client = ClientEndpoints(["s1:1"])
    client.record_answer("s1:1", "n1")
    client.learn(CLUSTER, 0, members("n1", "n2"))
    assert client.record_answer("n2.example:5002", "n2")
    assert not client.record_answer("n2.example:5002", "n1")
    assert client.in_use == ("s1:1",)
    client.learn(CLUSTER, 0, members("n1", "n2", "n3", version=2))
    assert client.in_use == ("s1:1", "n2.example:5002", "n3.example:5002")


def test_endpoint_of_non_member_or_of_member_reached_elsewhere_is_irrelevant() -> None:
    client = ClientEndpoints(["s1:1", "s2:1"])
    client.record_answer("s1:1", "n1")
    assert not client.is_beside("s1:1", [])
    assert not client.is_beside("s2:1", ["n1"])  # Without a member list, every seed matters.
    client.learn(CLUSTER, 0, members("n2", "n3"))
    assert client.is_beside("s1:1", [])
    assert not client.is_beside("s2:1", ["n2"])  # It may lead to n3.
    assert client.is_beside("s2:1", ["n2", "n3"])
    client.record_answer("s2:1", "n2")
    assert not client.is_beside("s2:1", ["n3"])
    assert client.is_beside("s2:1", ["n2", "n3"])


def test_failing_seed_and_own_address_of_its_node_count_once() -> None:
    channels = NodeChannels(["s1:1", "s2:1"], Mock(), 0)
    channels.record_answer(start_of("n1", NO_NODES), {})
    channels.advance()
    channels.record_answer(start_of("n2", THREE), {})
    assert channels.targets == channels.counted == ["s1:1", "s2:1", "n3.example:5002"]
    for _ in range(SEED_FAILURES_MAX):
        channels.record_failure()
    assert channels.targets == ["s1:1", "s2:1", "n2.example:5002", "n3.example:5002"]
    assert channels.counted == ["s1:1", "n2.example:5002", "n3.example:5002"]
    channels.record_answer(start_of("n2", THREE), {})
    channels.record_answer(start_of("n2", members("n1", "n3", version=2)), {"s1:1", "n3.example:5002"})
    assert channels.targets == ["s1:1", "n3.example:5002", "s2:1"]  # Members first.
    assert channels.counted == ["s1:1", "n3.example:5002"]
    with pytest.raises(Unreachable, match="no member"):
        channels.record_answer(start_of("n2", NO_NODES), {"s1:1"})


def start_of(node: str, nodes: KnownNodes) -> PullStart:
    return PullStart(CLUSTER, 0, node, LogOffset(0, 0, 0), 0, nodes=nodes)


GOOD = KnownNode("n1", "n1.example:5002")


@pytest.mark.parametrize(
    ("nodes", "version"),
    [
        ((GOOD,), 0),
        ((), 1),
        ((GOOD,), -1),
        ((GOOD,), 2**63),
        ((GOOD, GOOD), 1),
        ((GOOD, KnownNode("n2", GOOD.endpoint)), 1),
        ((GOOD, KnownNode("n1", "n2.example:5002")), 1),
        ((KnownNode("../n1", "n1.example:5002"),), 1),
        ((KnownNode("n1", "n1.example"),), 1),
        ((KnownNode("n1", "http://n1.example:5002"),), 1),
        ((KnownNode("n1", "n1.example:05002"),), 1),
        (tuple(KnownNode(f"n{index}", f"n{index}:1") for index in range(MEMBERS_MAX + 1)), 1),
    ],
)
def test_invalid_member_list_raises_value_error(nodes: tuple[KnownNode, ...], version: int) -> None:
    with pytest.raises(ValueError, match=r"."):
        KnownNodes(nodes, version)
