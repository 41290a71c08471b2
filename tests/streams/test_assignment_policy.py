"""Assignment policies: hosts with the same view agree on queue owners, and few queues move."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from rt.streams.balancer.assignment_policy import (
    Assignment,
    AssignmentPolicy,
    HostView,
    MaturePolicy,
    RingPolicy,
    SharePolicy,
    StaticPolicy,
    best_fit,
    ideal_fit,
    ring_parts,
    share_of,
)
from rt.streams.core.stream_id import RING_SIZE, QueueId
from rt.streams.queue.mapper import HashRingQueueMapper

HOSTS = st.sets(st.sampled_from("ABCDEF"), min_size=1, max_size=6)


def test_best_fit_moves_resources_of_missing_bucket_to_buckets_with_fewest() -> None:
    assert ideal_fit("ABC", range(7)) == {"A": [0, 1, 2], "B": [3, 4], "C": [5, 6]}
    assert best_fit("ABC", range(7), "AC") == {"A": [0, 1, 2, 4], "C": [5, 6, 3]}
    assert best_fit("ABC", range(7)) == ideal_fit("ABC", range(7))
    assert best_fit("ABC", range(7), "") == {}
    assert best_fit("ABC", []) == {"A": [], "B": [], "C": []}


def test_best_fit_raises_value_error_for_unknown_bucket_or_no_buckets() -> None:
    with pytest.raises(ValueError, match="unknown bucket: D"):
        best_fit("ABC", range(7), "AD")
    with pytest.raises(ValueError, match="no buckets"):
        best_fit("", range(7))


@given(HOSTS, st.integers(0, 20), st.data())
@settings(max_examples=60)
def test_best_fit_is_complete_independent_of_order_and_keeps_ideal_shares(
    buckets: set[str], count: int, data: st.DataObject
) -> None:
    active = data.draw(st.sets(st.sampled_from(sorted(buckets)), min_size=1))
    fit = best_fit(buckets, range(count), active)
    assert sorted(one for share in fit.values() for one in share) == [*range(count)]
    ideal = ideal_fit(buckets, range(count))
    for bucket in active:
        assert fit[bucket][: len(ideal[bucket])] == ideal[bucket]
    sizes = {len(share) for share in ideal.values()}
    assert max(sizes) - min(sizes) <= 1
    again = best_fit(sorted(buckets, reverse=True) * 2, [*range(count)][::-1], sorted(active)[::-1])
    assert again == fit
    again[min(active)].append(99)
    assert best_fit(buckets, range(count), active) == fit, "nothing is shared between two answers"


@given(HOSTS, st.integers(0, 20))
@settings(max_examples=30)
def test_shares_add_up_to_all_queues_and_differ_by_at_most_one(hosts: set[str], count: int) -> None:
    shares = [share_of(host, hosts, count) for host in hosts]
    assert sum(shares) == count
    assert max(shares) - min(shares) <= 1
    assert share_of("Z", hosts, count) == 0


@given(st.sets(st.sampled_from("ABCDEF"), min_size=1), st.integers(0, RING_SIZE - 1))
@settings(max_examples=40)
def test_ring_position_belongs_to_exactly_one_host(hosts: set[str], place: int) -> None:
    for at in (place, 0, RING_SIZE - 1):
        owners = [host for host in hosts if any(at in part for part in ring_parts(host, hosts, points=8))]
        assert len(owners) == 1
    assert ring_parts("Z", hosts) == ring_parts("Z", []) == ()


def test_ring_moves_queues_only_to_new_host_and_keeps_shares_about_equal() -> None:
    def owners(hosts: str) -> dict[QueueId, str]:
        mapper = HashRingQueueMapper(500)
        return {
            queue: host
            for host in hosts
            for part in ring_parts(host, hosts)
            for queue in mapper.queues_in(part)
        }

    before, after = owners("ABC"), owners("ABCD")
    assert len(before) == len(after) == 500
    assert {after[queue] for queue in before if before[queue] != after[queue]} == {"D"}
    for host in "ABCD":
        assert 60 < sum(owner == host for owner in after.values()) < 200


MAPPER = HashRingQueueMapper(7, "q")


def view(
    host: str, hosts: str, held: Collection[int] = (), taken: Collection[int] = (), now_s: float = 0.0
) -> HostView:
    queues = MAPPER.queues
    mine, others = [queues[one] for one in held], frozenset(queues[one] for one in taken)
    return HostView(host, frozenset(hosts), MAPPER, mine, others, now_s)


def said(decision: Assignment) -> tuple[list[str], list[str]]:
    return [queue.name for queue in decision.give_up], [queue.name for queue in decision.take]


def test_static_policy_ignores_presence_of_hosts() -> None:
    policy = StaticPolicy("ABC")
    assert said(policy.assign(view("A", "A"))) == ([], ["q-0", "q-1", "q-2"])
    assert said(policy.assign(view("B", "BC", held=[6, 3], taken=[4]))) == (["q-6"], [])


def test_mature_policy_counts_initial_hosts_at_once_and_joined_hosts_after_delay() -> None:
    policy = MaturePolicy("ABC", maturity_s=100.0)
    assert said(policy.assign(view("A", "AC"))) == ([], ["q-0", "q-1", "q-2"]), "just its own, at first"
    assert said(policy.assign(view("A", "AC", held=[0, 1, 2], now_s=99.0))) == ([], [])
    assert said(policy.assign(view("A", "AC", held=[0, 1, 2], now_s=100.0))) == ([], ["q-4"])
    # B joins: no other host serves B's ideal share from now on. B gets more once it is mature.
    assert said(policy.assign(view("A", "ABC", held=[0, 1, 2, 4], now_s=150.0))) == (["q-4"], [])
    assert said(policy.assign(view("A", "ABC", held=[0, 1, 2], now_s=250.0))) == ([], [])
    # B leaves: the others share its queues again.
    assert said(policy.assign(view("A", "AC", held=[0, 1, 2], now_s=251.0))) == ([], ["q-4"])
    # C leaves and returns: it is no longer mature.
    policy.assign(view("A", "A", now_s=252.0))
    assert said(policy.assign(view("A", "AC", held=[*range(7)], now_s=260.0)))[0] == ["q-5", "q-6"]


def test_mature_policy_gives_no_queues_to_host_outside_deployment() -> None:
    policy = MaturePolicy("ABC", maturity_s=0.0)
    assert said(policy.assign(view("A", "ABCZ"))) == ([], ["q-0", "q-1", "q-2"])
    assert said(MaturePolicy("ABC", 0.0).assign(view("Z", "ABCZ", held=[1]))) == (["q-1"], [])


def test_share_policy_gives_up_oldest_surplus_queues_and_takes_free_queues() -> None:
    policy = SharePolicy(random.Random(1))
    assert said(policy.assign(view("A", "ABC", held=[6, 5, 4, 3]))) == (["q-6"], [])
    assert said(policy.assign(view("B", "ABC", held=[6, 5]))) == ([], [])
    give_up, take = said(policy.assign(view("A", "ABC", held=[6], taken=[0, 1, 2, 3])))
    assert (give_up, sorted(take)) == ([], ["q-4", "q-5"])
    assert said(policy.assign(view("A", "ABC", held=[6], taken=range(6)))) == ([], [])
    orders = {tuple(said(policy.assign(view("A", "AB")))[1]) for _ in range(20)}
    assert len(orders) > 5
    assert {len(order) for order in orders} == {4}


@pytest.mark.parametrize("policy", [RingPolicy(), StaticPolicy("AB"), MaturePolicy("AB", 0.0), SharePolicy()])
def test_policies_request_no_queue_held_by_another_host(policy: AssignmentPolicy) -> None:
    assert policy.assign(view("A", "AB", taken=range(7))) == Assignment()


@pytest.mark.parametrize(
    "make",
    [RingPolicy, lambda: StaticPolicy("ABC"), lambda: MaturePolicy("ABC", 0.0)],
    ids=["ring", "static", "mature"],
)
def test_policies_assign_queue_to_one_host_able_to_reach_it(make: Callable[[], AssignmentPolicy]) -> None:
    """A reaches only the clusters of q-5 and q-6, and C does not reach the cluster of q-0. Each host sees the
    others so.
    """
    reach = {f"q-{number}": frozenset("BC") for number in range(1, 5)}
    reach["q-0"] = frozenset("B")
    served: dict[str, str] = {}
    for host in "ABC":
        seen = {name: hosts for name, hosts in reach.items() if host in hosts}
        policy, found = make(), view(host, "ABC")
        queues = frozenset(queue for queue in MAPPER.queues if queue.name in served)
        taken = policy.assign(replace(found, reach=seen, taken=queues)).take
        for queue in taken:
            if host in reach.get(queue.name, "ABC"):  # It gets no lease from a cluster that it cannot reach.
                assert served.setdefault(queue.name, host) == host
    assert len(served) == 7
    given_up = make().assign(replace(view("C", "ABC", held=[0]), reach=reach)).give_up
    assert [queue.name for queue in given_up] == ["q-0"]
