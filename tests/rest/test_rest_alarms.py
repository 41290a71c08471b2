"""Alarms: when each is raised, its severity and text, and that a healthy node has none."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace
from rest_node import (
    MINUTE,
    NOW,
    PUBLISHER,
    SECOND,
    SUBSCRIBER,
    T0,
    at,
    history,
    node_view,
    standing,
)

from rt.v1 import sequencer_pb2 as pb
from sequencer.rest.base.admin_ports import ResetStatus
from sequencer.rest.base.node_snapshot import (
    ClientConnection,
    Counts,
    DamageCounter,
    DamagedSegment,
    MergeStatus,
    NodeSnapshot,
    UnopenedReplica,
    obstacles,
)
from sequencer.rest.views.alarms import CLIENT_LAG_S, DAMAGE_S, MERGE_LAG_BYTES, RESET_S, alarms_of
from sequencer.state.configuration import Configuration
from sequencer.state.state import SequencerState, SubscriberHold

DAY_S = 24 * 3600


def whole(*away: str, count: int = 3, **changes: Any) -> pb.Standing:
    """A standing in which all members are connected, except the names in `away`."""
    made = standing(**changes)
    for number in range(4, count + 1):
        made.nodes.add().CopyFrom(made.nodes[0])
        made.nodes[-1].name = f"n{number}"
    for one in made.nodes:
        one.is_connected = one.name not in away
    return made


def healthy(**changes: Any) -> NodeSnapshot:
    """A follower in a cluster of three connected members. Nothing is retained beyond the log's start."""
    state = history()
    state.holds = {"sub": SubscriberHold(250, at(35))}
    return node_view(**{"standing": whole(), "state": state, "clients": (), **changes})


def found(node: NodeSnapshot) -> list[tuple[str, str]]:
    return [(one.name, one.severity) for one in alarms_of(node)]


def the_text(node: NodeSnapshot) -> str:
    (one,) = alarms_of(node)
    return one.text


def test_healthy_node_has_no_alarms() -> None:
    assert alarms_of(healthy()) == []


def test_blank_node_raises_only_control_down_alarm() -> None:
    blank = NodeSnapshot("s", "n1", NOW, T0, pb.Standing(), is_control_up=False)

    assert found(blank) == [("control-down", "critical")]


# The cluster


def test_missing_leader_raises_critical_no_leader_alarm() -> None:
    assert found(healthy(standing=whole(leader=""))) == [("no-leader", "critical")]


def test_silent_control_process_raises_control_hung_alarm_and_blocks_readiness() -> None:
    assert found(healthy(control_silent_s=4.9)) == []
    node = healthy(control_silent_s=5.0)
    assert found(node) == [("control-hung", "critical")]
    assert "has not answered for 5 s" in the_text(node)
    assert "pgrep -af 'child_main control'" in the_text(node)
    (obstacle,) = obstacles(node)
    assert obstacle.startswith("control-hung: the control process has not answered for 5 s.")
    assert "pgrep -af 'child_main control'" in obstacle
    assert found(healthy(control_silent_s=9, is_control_up=False)) == [("control-down", "critical")]


def test_silent_data_process_raises_data_hung_alarm_while_report_is_recent() -> None:
    told = whole()
    told.nodes[0].summary.data_silent_s = 4.9
    assert found(healthy(standing=told)) == []
    told.nodes[0].summary.data_silent_s = 5
    assert found(healthy(standing=told)) == [("data-hung", "critical")]
    assert "The data process of n3 has not answered for 5 s" in the_text(healthy(standing=told))
    told.nodes[0].summary_age_s = 60
    assert found(healthy(standing=told)) == []  # An old report says nothing of now.


def test_running_reset_raises_reset_running_alarm_instead_of_control_down() -> None:
    told = whole(is_resetting=True)
    away = {"standing": told, "is_control_up": False}
    assert found(healthy(**away)) == [("reset-running", "warning")]
    assert found(healthy(**away, control_silent_s=RESET_S)) == [("control-down", "critical")]
    running = ResetStatus("running", "soft", 2, NOW)
    assert found(healthy(is_control_up=False, reset=running)) == [("reset-running", "warning")]
    assert "rt rest /reset-status" in the_text(healthy(**away))


@pytest.mark.parametrize(
    ("offsets", "wanted"),
    [
        ((0, 0, 0), ""),
        ((1.0, 0, 0), ""),
        ((61, 0, 0), "The clock of n3 is 61 s ahead of those"),
        ((-8, 0, 0), "The clock of n3 is 8 s behind those"),
        ((-8, 0, -8.5), "The clock of n1 is 8 s ahead of those"),
    ],
)
def test_clock_over_one_second_from_median_raises_clock_skew_alarm(
    offsets: tuple[float, float, float], wanted: str
) -> None:
    told = whole()
    for one, offset_s in zip(told.nodes, offsets, strict=True):  # the order is n3, n1, n2
        one.clock_offset_s = offset_s
    assert found(healthy(standing=told)) == ([("clock-skew", "warning")] if wanted else [])
    if wanted:
        assert the_text(healthy(standing=told)).startswith(wanted)


def test_found_corruption_raises_alarm_with_its_offset_for_one_day() -> None:
    def node(age_s: int) -> NodeSnapshot:
        damage = DamageCounter(3, 2, "/rt/s/merged/log.0.3 at offset 4096", NOW - age_s * SECOND)
        return healthy(counts=Counts(damage=damage))

    assert found(node(0)) == found(node(DAMAGE_S - 1)) == [("damage-found", "warning")]
    assert "/rt/s/merged/log.0.3 at offset 4096" in the_text(node(0))
    assert "found 3 corrupt segments and repaired 2" in the_text(node(0))
    assert found(node(DAMAGE_S)) == []


def test_unopened_replicas_raise_one_alarm_critical_if_no_other_node_has_them() -> None:
    one, other = UnopenedReplica("feed", "it is a link."), UnopenedReplica("other", "it is newer.")
    assert found(healthy(unopened=(one, other))) == [("replica-unopened", "warning")]
    assert "of session feed and 1 more: it is a link. The node" in the_text(healthy(unopened=(one, other)))
    alone = pb.Standing(node="n1", leader="n1", term=5, role="leader", epoch=1, is_caught_up=True)
    alone.nodes.add(name="n1", address="n1:5002", is_counted=True)
    node = healthy(standing=alone, unopened=(one,))
    assert ("replica-unopened", "critical") in found(node)
    assert "of session feed: it is a link. No other node" in next(
        alarm.text for alarm in alarms_of(node) if alarm.name == "replica-unopened"
    )


@pytest.mark.parametrize(
    ("count", "away", "severity", "text"),
    [
        (3, ["n2"], "critical", "one more failure would stop the stream"),
        (3, ["n2", "n3"], "critical", "the cluster has no majority"),
        (5, ["n2"], "warning", "continues without it"),
        (5, ["n2", "n3"], "critical", "one more failure would stop the stream"),
    ],
)
def test_unreachable_member_alarm_is_critical_if_no_further_failure_is_tolerated(
    count: int, away: list[str], severity: str, text: str
) -> None:
    alarms = alarms_of(healthy(standing=whole(*away, count=count)))

    assert [(one.name, one.severity) for one in alarms] == [("member-unreachable", severity)] * len(away)
    assert all(name in one.text and text in one.text for name, one in zip(away, alarms, strict=True))


def test_answering_node_raises_no_unreachable_alarm_for_itself() -> None:
    assert alarms_of(healthy(standing=whole("n1"))) == []


def test_member_halted_alarm_reports_why_member_stopped_merging() -> None:
    told = whole()
    told.nodes[2].summary.merged.stopped = "chain 0x1, expected 0x2"

    assert found(healthy(standing=told)) == [("member-halted", "critical")]
    text = the_text(healthy(standing=told))
    assert "n2 has stopped merging: chain 0x1, expected 0x2." in text
    assert "If more than one node has stopped, empty none." in text


def test_failed_node_raises_exactly_one_critical_alarm() -> None:
    assert found(healthy(failure="fsync failed")) == [("node-failed", "critical")]
    assert found(healthy(merging=MergeStatus(1, 360, 360, failure="x"))) == [("node-failed", "critical")]
    told = whole()
    told.nodes[1].summary.merged.stopped = "x"
    assert found(healthy(standing=told, failure="x")) == [("member-halted", "critical")]


@pytest.mark.parametrize(
    ("free", "policy", "wanted"),
    [
        (100, 90, []),
        (99, 90, [("disk", "warning")]),
        (50, 90, [("disk", "warning")]),
        (49, 90, [("disk", "critical")]),
        (300, 60, [("disk", "warning")]),
        (99, 0, [("disk", "warning")]),
        (100, 0, []),
        (1, 99, [("disk", "critical")]),
        (0, 100, []),
    ],
)
def test_disk_fuller_than_retention_policy_raises_disk_alarm(
    free: int, policy: int, wanted: list[Any]
) -> None:
    told, state = whole(), history()
    told.nodes[0].summary.disk_free_bytes = free
    state.holds, state.configuration = {}, Configuration(retention_disk_percent=policy)

    assert found(healthy(standing=told, state=state)) == wanted


@pytest.mark.parametrize(
    ("left_s", "wanted"),
    [
        (14 * DAY_S, []),
        (14 * DAY_S - 1, [("certificate", "warning")]),
        (3 * DAY_S, [("certificate", "warning")]),
        (3 * DAY_S - 1, [("certificate", "critical")]),
        (-1, [("certificate", "critical")]),
    ],
)
def test_certificate_near_expiry_raises_certificate_alarm(left_s: int, wanted: list[Any]) -> None:
    node = healthy(counts=Counts(certificate_end_s=NOW / SECOND + left_s))

    assert found(node) == wanted
    if wanted:
        assert ("expired on" if left_s < 0 else "expires on") in the_text(node)


# Lag


def test_reachable_member_over_merge_lag_limit_raises_merge_lag_alarm() -> None:
    def node(behind: int, *away: str) -> NodeSnapshot:
        state, told = history(), whole(*away)
        state.holds = {}
        state.merged = replace(state.merged, total_bytes=5000 + behind)
        for one in told.nodes:
            one.summary.merged.bytes = 5000 + behind if one.name != "n3" else 5000
        return healthy(state=state, standing=told)

    assert found(node(MERGE_LAG_BYTES)) == []
    assert found(node(MERGE_LAG_BYTES + 1)) == [("merge-lag", "warning")]
    assert "n3 has 268 MB of committed data to merge" in the_text(node(MERGE_LAG_BYTES + 1))
    assert found(node(MERGE_LAG_BYTES + 1, "n3")) == [("member-unreachable", "critical")]


def test_session_with_long_waiting_messages_raises_replication_lag_alarm() -> None:
    def node(lag_s: float, ended_ns: int = 0) -> NodeSnapshot:
        client = ClientConnection(PUBLISHER, "", "feed", at(1), ended_ns, lag_ns=int(lag_s * SECOND))
        return healthy(clients=(client,))

    assert found(node(CLIENT_LAG_S)) == []
    assert found(node(300)) == [("replication-lag", "warning")]
    assert "session feed have waited 5 minutes to be merged" in the_text(node(300))
    assert found(node(300, at(2))) == []


def test_hold_below_log_start_raises_hold_overridden_alarm() -> None:
    def node(position: int) -> NodeSnapshot:
        state = history()
        state.holds = {"late": SubscriberHold(position, at(1))}
        return healthy(state=state)

    assert found(node(100)) == []
    assert found(node(99)) == [("hold-overridden", "warning")]
    assert 'Subscriber "late" has read up to 99; positions 99 to 99 were trimmed' in the_text(node(99))


@pytest.mark.parametrize(("count", "what"), [(3, "fetches good bytes from a peer"), (1, "POST /hard-reset")])
def test_corrupt_merged_log_raises_critical_alarm_with_remedy(count: int, what: str) -> None:
    alone = whole()
    del alone.nodes[count:]
    node = healthy(standing=alone, merging=replace(healthy().merging, damage="a bad block (at log.0.0)"))
    assert ("log-corrupt", "critical") in found(node)
    (text,) = [one.text for one in alarms_of(node) if one.name == "log-corrupt"]
    assert "a bad block (at log.0.0)" in text
    assert what in text


def test_refused_hold_raises_hold_refused_alarm_with_reason() -> None:
    node = healthy(counts=Counts(refused_holds={"sub2": "1000 subscribers hold data back"}))
    assert found(node) == [("hold-refused", "warning")]
    assert 'subscriber "sub2" was refused: 1000 subscribers hold data back. Release holds' in the_text(node)


def test_hold_limit_alarm_is_raised_when_held_bytes_due_for_trim_near_limit() -> None:
    def node(limit: int, retention_minutes: int, *positions: int) -> NodeSnapshot:
        state = history()
        state.holds = {f"h{position}": SubscriberHold(position, at(1)) for position in positions}
        state.configuration = Configuration(hold_bytes_max=limit, retention_minutes=retention_minutes)
        return healthy(state=state)

    both, first = 1001 + 1002, 1001
    assert found(node(both, 30, 350, 100)) == [("hold-limit", "warning")]
    assert (
        'Subscriber "h100" is furthest behind. Data above the limit is trimmed despite holds. Start it. If '
        'it is retired: `rt rest /release-hold --data \'{"name": "h100"}\'`.'
    ) in the_text(node(both, 30, 350, 100))
    assert found(node(both - 1, 30, 100)) == [("hold-limit", "critical")]
    assert found(node(both * 5 // 4, 30, 100)) == [("hold-limit", "warning")]
    assert found(node(both * 5 // 4 + 2, 30, 100)) == []
    assert found(node(first, 35, 100)) == [("hold-limit", "warning")]
    assert found(node(both, 35, 100)) == []
    assert found(node(1, 41, 100)) == []
    assert found(node(first, 30, 300)) == []
    assert found(node(0, 30, 100)) == []


def test_hold_limit_alarm_counts_held_bytes_due_by_retention_size() -> None:
    state = history()
    state.holds = {"far": SubscriberHold(100, at(1))}
    state.configuration = Configuration(retention_minutes=0, retention_bytes=2643, hold_bytes_max=1)

    assert found(healthy(state=state)) == []
    state.configuration = replace(state.configuration, retention_bytes=2642)
    assert found(healthy(state=state)) == [("hold-limit", "critical")]


@pytest.mark.parametrize(
    ("position", "configuration", "wanted"),
    [
        (150, Configuration(retention_minutes=50), [("subscriber-lag", "warning")]),
        (200, Configuration(retention_minutes=50), []),
        (150, Configuration(retention_minutes=51), []),
        (150, Configuration(retention_minutes=0), []),
        (150, Configuration(retention_minutes=0, retention_bytes=3300), [("subscriber-lag", "warning")]),
        (150, Configuration(retention_minutes=0, retention_bytes=3310), []),
    ],
)
def test_subscriber_in_oldest_segment_near_trim_raises_subscriber_lag_alarm(
    position: int, configuration: Configuration, wanted: list[Any]
) -> None:
    state = history()
    state.configuration, state.holds = configuration, {}
    client = ClientConnection(SUBSCRIBER, "", None, at(1), position=position)

    assert found(healthy(state=state, clients=(client,))) == wanted
    assert found(healthy(state=state, clients=(replace(client, ended_ns=at(2)),))) == []


def test_subscriber_with_own_hold_raises_no_lag_alarm_unless_holds_are_disabled() -> None:
    state = history()
    state.configuration, state.holds = (
        Configuration(retention_minutes=50),
        {"sub": SubscriberHold(120, at(1))},
    )
    node = healthy(state=state, clients=(ClientConnection(SUBSCRIBER, "", None, at(1), position=150),))

    assert found(node) == []
    state.configuration = replace(state.configuration, hold_bytes_max=0)
    assert found(node) == [("subscriber-lag", "warning")]


def test_empty_sequencer_state_raises_no_alarms() -> None:
    assert alarms_of(healthy(state=SequencerState(bytes(16)))) == []


def test_critical_alarms_are_listed_before_warnings() -> None:
    state = history()
    node = healthy(
        state=state,
        standing=whole("n3"),
        counts=Counts(certificate_end_s=(NOW + 10 * DAY_S * SECOND + MINUTE) / SECOND),
    )
    state.holds = {"late": SubscriberHold(1, at(1))}

    assert [severity for _, severity in found(node)] == ["critical", "warning", "warning"]


# Corrupt segments


@pytest.mark.parametrize(
    ("count", "tries", "is_growing", "severity", "texts"),
    [
        (3, 0, False, "warning", ["fetches good bytes from the other nodes"]),
        (3, 1, False, "critical", ["No other node has good bytes", 'POST /trim {"position": 200}']),
        (1, 0, False, "critical", ["No other node has good bytes", "a subscriber's copy"]),
        (3, 2, True, "critical", ['POST /configuration {"rollMinutes": 1}', 'POST /trim {"position": 200}']),
    ],
)
def test_corrupt_segment_raises_alarm_with_positions_and_remedy(
    count: int, tries: int, is_growing: bool, severity: str, texts: list[str]
) -> None:
    damaged = (DamagedSegment("log.0.1", 4096, 100, 200, tries, is_growing),)
    node = healthy(standing=whole(), damaged=damaged)
    if count == 1:
        del node.standing.nodes[1:]
    assert found(node) == [("segment-corrupt", severity)]
    text = the_text(node)
    assert "log.0.1 of n1 is corrupt from offset 4096 on. It holds positions 100 to 199." in text
    assert all(each in text for each in texts)
    assert ("rollMinutes" in text) == is_growing
