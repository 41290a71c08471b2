"""The responses of the REST endpoints, computed from a snapshot of a node."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from msgspec.structs import replace
from rest_node import (
    NOW,
    OPERATOR,
    OTHER,
    PUBLISHER,
    SUBSCRIBER,
    T0,
    at,
    history,
    node_view,
    standing,
)

import rt
from rt.log.format.segment import SegmentId
from rt.log.format.segment_table import TrimReason
from rt.net.grpc_errors import Unreachable
from rt.net.identity import Identity
from rt.net.rest_client import RestResponse, error_in
from rt.units import format_time
from rt.v1 import sequencer_pb2 as pb
from sequencer.rest.base.errors import BadRequest, error_body, http_status
from sequencer.rest.base.fields import parse_query
from sequencer.rest.base.node_snapshot import (
    LAG_BYTES_MAX,
    ClientConnection,
    MergeStatus,
    NodeSnapshot,
    RetainedSize,
)
from sequencer.rest.base.request import json_bytes
from sequencer.rest.views import admin_views, client_views, cluster_views
from sequencer.rest.views.cluster_views import Liveness, Readiness
from sequencer.rest.views.context import RequestContext, Response
from sequencer.rest.views.endpoints import ENDPOINTS
from sequencer.rest.views.log_history import LatestOutPosition, latest_out_position, log_history
from sequencer.state.state import LeaseState, MergedEnd, MergedSegment, SequencerState

HISTORY = next(one for one in ENDPOINTS if one.path == "/log-history")


def asked(
    node: NodeSnapshot | None = None, identity: Identity | None = OPERATOR, **query: Any
) -> RequestContext:
    return RequestContext(node or node_view(), identity, query)


def body(answer: Response) -> Any:
    assert answer.status == 200
    return json.loads(json_bytes(answer.body))


# /log-history


def test_log_history_lists_segments_oldest_first_including_trimmed_and_active() -> None:
    found = body(log_history(asked()))

    assert [one["state"] for one in found] == ["trimmed", "sealed", "sealed", "active"]
    assert found[0] == {
        "logPath": "s/merged/log.0.0",
        "logTime": "2026-01-01T00:00:00.000000000Z",
        "logTimeNs": str(T0),
        "logPos": 0,
        "logEnd": 100,
        "logSize": 1000,
        "logAge": 50,
        "sealTime": "2026-01-01T00:09:59.999999995Z",
        "truncationTime": "2026-01-01T00:40:00.000000000Z",
        "truncationReason": "time",
        "state": "trimmed",
    }
    assert found[3] == {
        "logPath": "s/merged/log.0.3",
        "logTime": "2026-01-01T00:30:00.000000000Z",
        "logTimeNs": str(at(30)),
        "logPos": 300,
        "logEnd": 360,
        "logSize": 640,
        "logAge": -1,
        "sealTime": "",
        "truncationTime": "",
        "truncationReason": "",
        "state": "active",
    }


def test_log_history_is_identical_on_every_node() -> None:
    here = body(log_history(asked()))
    there = node_view(node="n2", standing=standing(node="n2", leader=""), merging=None, clients=())

    assert body(log_history(asked(there))) == here


@pytest.mark.parametrize(
    ("query", "wanted"),
    [
        ("", [0, 1, 2, 3]),
        ("from=0", [0, 1, 2, 3]),
        ("from=99", [0, 1, 2, 3]),
        ("from=100", [1, 2, 3]),
        ("from=299", [2, 3]),
        ("from=360", [3]),
        ("from=999999", [3]),
        ("to=0", []),
        ("to=1", [0]),
        ("to=100", [0]),
        ("to=101", [0, 1]),
        ("from=100&to=300", [1, 2]),
        ("from=300&to=100", []),
        ("from=2026-01-01T00:10:00Z", [1, 2, 3]),
        ("from=2026-01-01T00:09:59.999999994Z", [0, 1, 2, 3]),
        ("from=2099-01-01T00:00:00Z", [3]),
        ("to=2026-01-01T00:10:00Z", [0]),
        ("to=2026-01-01T01:10:00.000000001%2B01:00", [0, 1]),
        ("from=150&to=2026-01-01T00:30:00Z", [1, 2]),
        ("state=trimmed", [0]),
        ("state=sealed", [1, 2]),
        ("state=active", [3]),
        ("limit=2", [0, 1]),
        ("limit=2&offset=1", [1, 2]),
        ("offset=3", [3]),
        ("offset=4", []),
        ("state=sealed&limit=1&offset=1", [2]),
    ],
)
def test_log_history_is_filtered_by_query(query: str, wanted: list[int]) -> None:
    pairs = [tuple(part.replace("%2B", "+").split("=")) for part in query.split("&") if part]
    parsed = parse_query(pairs, HISTORY.parameters)  # type: ignore[arg-type]

    found = body(log_history(asked(**parsed)))

    assert [one["logPath"] for one in found] == [f"s/merged/log.0.{roll}" for roll in wanted]


def test_log_history_is_empty_and_latest_position_minus_1_for_stream_without_messages() -> None:
    node = node_view(state=SequencerState(b"\1" * 16))

    assert body(log_history(asked(node))) == []
    assert body(latest_out_position(asked(node))) == {"latestOutPosition": -1}


def test_log_age_of_inactive_segments_is_zero_if_clock_precedes_sequencing_time() -> None:
    found = body(log_history(asked(node_view(now_ns=T0))))

    assert [one["logAge"] for one in found] == [0, 0, 0, -1]


# Others


def test_latest_out_position_is_position_of_last_message() -> None:
    assert body(latest_out_position(asked())) == {"latestOutPosition": 359}


def test_views_of_cluster_state_return_retriable_503_before_node_joins() -> None:
    for state in (None, SequencerState(bytes(16))):
        node = node_view(state=state)
        for view in (
            latest_out_position,
            log_history,
            client_views.sessions,
            admin_views.holds,
            admin_views.configuration,
            client_views.dedup_clients,
        ):
            with pytest.raises(Unreachable, match="has not joined") as refused:
                view(asked(node))
            answer = RestResponse(http_status(refused.value), "", json_bytes(error_body(refused.value)))
            told = error_in(answer)
            assert told is not None
            assert (answer.status, told.retriable) == (503, True)
        assert body(cluster_views.status(asked(node)))["cluster"] == ""


def test_status_lists_members_by_name_and_details_of_answering_node() -> None:
    found = body(cluster_views.status(asked(node_view(merging=MergeStatus(16, 340, 300)))))

    assert [(one["name"], one["isLeader"], one["isConnected"]) for one in found["members"]] == [
        ("n1", False, True),
        ("n2", True, True),
        ("n3", False, False),
    ]
    merged = {"instruction": 17, "position": 360, "bytes": 5000, "checksum": "0000abcd"}
    assert found["committed"] == merged
    assert found["members"][2]["merged"] == merged
    assert found["node"]["lagMessages"] == 20
    assert found["node"]["lagBytes"] == 640 // 3
    assert found["node"]["obstacles"] == []
    assert found["node"]["version"] == rt.__version__


def test_sessions_are_listed_by_id_with_merged_progress() -> None:
    first, second = body(client_views.sessions(asked()))

    assert (first["id"], first["isSuperseded"], first["isConnected"]) == (1, True, False)
    assert first["lastMergedRun"] == 3
    assert (first["runsCutShort"], second["runsCutShort"]) == (2, 0)
    assert first["consumed"] == {"rollNumber": 1, "offset": 64, "number": 40}
    end = {"rollNumber": 1, "offset": 128, "number": 50}
    assert first["runs"] == [{"runNumber": 4, "isFenced": True, "end": end}]
    assert (second["dedupId"], second["waitsFor"], second["consumed"]) == ("d1", 1, None)
    assert second["isConnected"]


def test_sessions_are_filtered_by_name_and_paged() -> None:
    assert body(client_views.sessions(asked(name="nobody"))) == []
    assert [one["id"] for one in body(client_views.sessions(asked(name="feed", offset=1)))] == [2]


@pytest.mark.parametrize(
    ("identity", "wanted"),
    [
        (OPERATOR, ["feed", "sub", "other"]),
        (PUBLISHER, ["feed"]),
        (SUBSCRIBER, ["sub"]),
        (OTHER, ["other"]),
        (Identity("s", "publisher", "sub"), []),
        (Identity("s", "node", "n2"), []),
        (None, []),
    ],
)
def test_non_operator_sees_only_clients_of_its_own_role_and_name(
    identity: Identity | None, wanted: list[str]
) -> None:
    assert [one["name"] for one in body(client_views.clients(asked(None, identity)))] == wanted


def test_client_reports_position_and_lag() -> None:
    feed, sub, other = body(client_views.clients(asked()))

    assert (feed["position"], feed["lag"], feed["session"]) == (55, 5, "feed")
    assert (sub["position"], sub["lag"], sub["active"]) == (300, 60, True)
    assert (other["lag"], other["active"]) == (330, False)
    assert other["disconnectTime"] == format_time(at(5))


@pytest.mark.parametrize(
    ("query", "wanted"),
    [
        ("kind=subscriber", ["sub", "other"]),
        ("kind=operator", []),
        ("name=feed", ["feed"]),
        ("active=true", ["feed", "sub"]),
        ("active=false", ["other"]),
        ("limit=1&offset=1", ["sub"]),
    ],
)
def test_clients_are_filtered_by_query_and_paged(query: str, wanted: list[str]) -> None:
    clients = next(one for one in ENDPOINTS if one.path == "/rt-clients")
    parsed = parse_query([tuple(part.split("=")) for part in query.split("&")], clients.parameters)  # type: ignore[misc]

    assert [one["name"] for one in body(client_views.clients(asked(**parsed)))] == wanted


def test_client_reports_directory_of_log_it_writes_or_reads() -> None:
    pushing = ClientConnection(PUBLISHER, "", "feed", T0, incarnation=b"\2" * 16)
    unknown = ClientConnection(PUBLISHER, "", "feed~new", T0, incarnation=b"\3" * 16)
    merged = ClientConnection(SUBSCRIBER, "", None, T0)
    copied = ClientConnection(Identity("s", "node", "n2"), "", None, T0, is_of_merged=False, session_id=1)

    found = body(client_views.clients(asked(node_view(clients=(pushing, unknown, merged, copied)))))

    told = {(one["kind"], one["session"]): one["directory"] for one in found}
    assert told == {
        ("publisher", "feed"): "s/sessions/2",
        ("publisher", "feed~new"): "",
        ("subscriber", None): "s/merged",
        ("node", None): "s/sessions/1",
    }


# Holds


def test_holds_are_listed_by_name_with_retained_bytes() -> None:
    late, sub = body(admin_views.holds(asked()))

    assert late == {
        "name": "late",
        "position": 50,
        "lag": 310,
        "bytes": 1001 + 1002 + 640,
        "updateTime": format_time(at(20)),
        "isOverridden": True,
    }
    assert (sub["name"], sub["bytes"], sub["isOverridden"]) == ("sub", 501 + 640, False)


@pytest.mark.parametrize(
    ("identity", "wanted"),
    [
        (OPERATOR, ["late", "sub"]),
        (SUBSCRIBER, ["sub"]),
        (OTHER, []),
        (Identity("s", "publisher", "sub"), []),
        (None, []),
    ],
)
def test_subscriber_sees_only_its_own_hold(identity: Identity | None, wanted: list[str]) -> None:
    assert [one["name"] for one in body(admin_views.holds(asked(None, identity)))] == wanted


def test_lease_tables_are_listed_with_owner_and_size() -> None:
    node = asked().node
    told = body(admin_views.lease_tables(RequestContext(node, OPERATOR)))
    row = {"name": "app/queue/gone", "owner": "", "commits": 3, "rows": 1, "bytes": 135}
    assert told == [row]
    assert node.state is not None
    node.state.leases["app/queue/gone"] = LeaseState("h1~a", 7, 1000, b"", 0)
    told = body(admin_views.lease_tables(RequestContext(node, OPERATOR)))
    assert told == [{**row, "owner": "h1~a"}]


def test_leases_are_listed_by_name_with_owner_and_token() -> None:
    node = asked().node
    assert node.state is not None
    node.state.leases = {
        "g/q2": LeaseState("h1", 2**62 + 1, 1500, b"Q" * 16, 4),
        "g/q1": LeaseState("h2~a", 8, 60_000, b"Q" * 16, 0),
    }
    told = body(admin_views.leases(RequestContext(node, OPERATOR)))
    assert [one["name"] for one in told] == ["g/q1", "g/q2"]
    assert told[1] == {
        "name": "g/q2",
        "owner": "h1",
        "token": str(2**62 + 1),
        "durationSeconds": 1.5,
        "renewals": 4,
    }


def test_dedup_clients_are_listed_by_id_with_next_number_and_sessions() -> None:
    first, second = body(client_views.dedup_clients(asked()))

    assert (first["dedupId"], first["wanted"]) == ("d1", 40)
    assert first["sessions"] == [
        {
            "id": 2,
            "name": "feed",
            "isSuperseded": False,
            "isOpen": True,
            "isConnected": True,
            "number": 0,
            "lag": 40,
        }
    ]
    assert second == {"dedupId": "d2", "wanted": 7, "sessions": []}


def test_publisher_sees_dedup_ids_of_its_certificate_and_only_its_own_sessions() -> None:
    feed = Identity("s", "publisher", "feed", frozenset({"d1", "d9"}))
    other = Identity("s", "publisher", "other", frozenset({"d1"}))

    def seen(identity: Identity) -> list[Any]:
        found = body(client_views.dedup_clients(asked(None, identity)))
        return [(one["dedupId"], len(one["sessions"])) for one in found]

    assert seen(feed) == [("d1", 1)]
    assert seen(other) == [("d1", 0)]
    assert seen(PUBLISHER) == []


def test_dedup_clients_are_filtered_by_name() -> None:
    (found,) = body(client_views.dedup_clients(asked(name="d2")))
    assert found["dedupId"] == "d2"
    assert body(client_views.dedup_clients(asked(name="d2~a"))) == []


def test_status_reports_retention_configuration_and_alarms() -> None:
    status = body(cluster_views.status(asked()))

    assert status["retention"] == {
        "logStart": 100,
        "segments": 3,
        "segmentsTrimmed": 1,
        "bytes": 1001 + 1002 + 640,
        "oldestMinutes": 40,
        "lastTrimTime": format_time(at(40)),
        "lastTrimReason": "time",
        "holds": 2,
        "holdBytes": 1001 + 1002 + 640,
    }
    assert status["configuration"] == body(admin_views.configuration(asked()))
    assert [one["name"] for one in status["alarms"]] == ["member-unreachable", "hold-overridden"]


# Readiness


READY = MergeStatus(17, 360, 350)


@pytest.mark.parametrize(
    ("changes", "obstacle"),
    [
        ({"failure": "disk"}, "the data process has failed"),
        ({"is_control_up": False}, "the control process is not connected"),
        ({"standing": standing(leader="")}, "no leader is known"),
        ({"standing": standing(role="joining")}, "this node is neither leader nor follower"),
        ({"standing": standing(role="stalled")}, "this node is neither leader nor follower"),
        ({"standing": standing(is_caught_up=False)}, "no entry of the current term was applied yet"),
        ({"merging": None}, "the state of the cluster was not received yet"),
        ({"merging": replace(READY, failure="differs: /secret")}, "the merger has failed"),
        ({"merging": replace(READY, is_behind_gap=True)}, "the merged log is being copied"),
        ({"merging": replace(READY, damage="a bad block")}, "the merged log is corrupt"),
    ],
)
def test_readiness_returns_503_with_the_single_obstacle(changes: dict[str, Any], obstacle: str) -> None:
    answer = cluster_views.readiness(asked(node_view(**changes), None))

    assert answer == Response(Readiness(False, [obstacle]), 503)


def test_readiness_returns_200_for_leader_or_follower_that_keeps_up() -> None:
    for role, leader in (("follower", "n2"), ("leader", "n1")):
        node = node_view(standing=standing(role=role, leader=leader))
        assert cluster_views.readiness(asked(node, None)) == Response(Readiness(True, []))


def test_node_without_any_state_is_alive_but_not_ready() -> None:
    blank = NodeSnapshot("s", "n1", NOW, T0, pb.Standing(), is_control_up=False)

    assert cluster_views.readiness(asked(blank, None)).status == 503
    assert cluster_views.liveness(asked(blank, None)).status == 200


def test_node_with_too_much_lag_is_not_ready() -> None:
    state = history()
    state.merged = replace(state.merged, offset=LAG_BYTES_MAX + 600)

    def ready(position: int) -> int:
        return cluster_views.readiness(
            asked(node_view(state=state, merging=replace(READY, position=position)), None)
        ).status

    assert (ready(300), ready(301), ready(360)) == (503, 200, 200)


def test_liveness_returns_503_with_reason_after_failure() -> None:
    for changes, reason in (
        ({"failure": "x"}, "the data process has failed"),
        ({"merging": replace(READY, failure="x")}, "the merger has failed"),
        ({"control_silent_s": 5.0}, "control-hung: the control process has not answered for 5 s."),
    ):
        answer = cluster_views.liveness(asked(node_view(**changes), None))
        assert isinstance(answer.body, Liveness)
        assert (answer.status, answer.body.alive) == (503, False)
        (obstacle,) = answer.body.obstacles
        assert obstacle.startswith(reason)


def test_public_endpoints_reveal_no_failure_details() -> None:
    node = node_view(failure="/secret/path", merging=replace(READY, failure="/secret/path"))

    for endpoint in ENDPOINTS:
        if endpoint.is_public:
            assert "secret" not in str(endpoint.view(asked(node, None)).body)


# Lag compared with its definition


@given(
    sizes=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 500)), max_size=6),
    trimmed=st.integers(0, 6),
    position=st.integers(0, 60),
)
def test_retained_bytes_from_position_equal_size_of_untrimmed_messages(
    sizes: list[tuple[int, int]], trimmed: int, position: int
) -> None:
    segments, first = [], 0
    for roll, (count, each) in enumerate(sizes):
        segment = MergedSegment(SegmentId(0, roll), first, first + count, count * each, 1, 2)
        segments.append(segment.trimmed(TrimReason.TIME, 3) if roll < trimmed else segment)
        first += count
    state = SequencerState(b"\1" * 16, position=first + 3)
    state.segments.extend(segments)
    state.merged = MergedEnd(SegmentId(0, len(sizes)), 21, first)
    per_message = [
        0 if segment.trimmed_ns else each
        for segment, (count, each) in zip(segments, sizes, strict=True)
        for _ in range(count)
    ] + [7, 7, 7]

    assert RetainedSize(state).bytes_from(position) == sum(per_message[position:])


# Parameters


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        (
            [("nope", "1")],
            "unknown parameter (at query): got 'nope', expected from, to, state, limit, offset",
        ),
        ([("limit", "1"), ("limit", "1")], "the parameter occurs twice (at parameter limit)"),
        ([("limit", "0")], "got '0', expected a whole number from 1 to 100000"),
        ([("limit", "-1")], "got '-1'"),
        ([("limit", "²")], "got '²'"),
        ([("limit", "1" * 20)], "expected a whole number"),
        ([("offset", "")], "got '', expected a whole number from 0"),
        ([("state", "gone")], "got 'gone', expected active or sealed or trimmed"),
        ([("from", str(2**63))], "expected a position, or a time such as 2026-01-31T12:00:00Z"),
        ([("to", "2026-01-01T00:00:00 01:00")], "Encode + as %2B."),
    ],
)
def test_invalid_query_parameter_is_named_in_error(pairs: list[tuple[str, str]], message: str) -> None:
    with pytest.raises(BadRequest) as caught:
        parse_query(pairs, HISTORY.parameters)
    assert message in str(caught.value)


# Schemas


@pytest.mark.parametrize("endpoint", ENDPOINTS, ids=lambda one: one.path)
@pytest.mark.parametrize("node", ["whole", "blank"])
def test_endpoint_response_matches_its_schema(endpoint: Any, node: str) -> None:
    blank = NodeSnapshot("s", "n1", NOW, T0, pb.Standing())
    try:
        answer = endpoint.view(asked(node_view() if node == "whole" else blank))
    except Unreachable:
        assert node == "blank"
        return

    made = answer.body if isinstance(answer.body, str) else json.loads(json_bytes(answer.body))
    Draft202012Validator(msgspec.json.schema(endpoint.answer)).validate(made)


def test_schema_rejects_unknown_fields() -> None:
    answer = {**body(latest_out_position(asked())), "more": 1}

    assert not Draft202012Validator(msgspec.json.schema(LatestOutPosition)).is_valid(answer)
