"""REST actions of operators: commands sent to the cluster, responses, and rejected requests."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
from jsonschema import Draft202012Validator
from msgspec.structs import replace
from rest_node import NOW, OPERATOR, OTHER, PUBLISHER, SUBSCRIBER, FakeCommanding, FakeResets, at, node_view

from rt.errors import RtError, Timeout
from rt.log.format.segment_table import TrimReason
from rt.net.grpc_errors import Unreachable
from rt.net.identity import Identity
from sequencer.rest.base.admin_ports import AdminPorts, DroppedMessages, ResetStatus
from sequencer.rest.base.fields import BODY_BYTES_MAX
from sequencer.rest.base.node_snapshot import NodeSnapshot
from sequencer.rest.base.request import Reply, Request
from sequencer.rest.http.dispatcher import Dispatcher
from sequencer.rest.views.admin_actions import ACTIONS
from sequencer.rest.views.context import Action
from sequencer.rest.views.endpoints import ENDPOINTS
from sequencer.state import feature_level
from sequencer.state.apply_result import CommandRejected, Outcome
from sequencer.state.commands import Configure, RaiseFeatureLevel, ReleaseHold, TrimSegments
from sequencer.state.configuration import Configuration
from sequencer.state.feature_level import FeatureLevelRefused
from sequencer.state.operations.membership import CancelMembers, RequestMembers
from sequencer.state.state import MemberRequest, SubscriberHold

GIB = 2**30
CHANGE = MemberRequest(7, "n4", "n4.example:7001", "n3")
GOOD: dict[str, dict[str, Any]] = {
    "/configuration": {"rollBytes": "1Gi"},
    "/trim": {"position": 200},
    "/release-hold": {"name": "sub"},
    "/delete-lease-table": {"lease": "app/queue/gone"},
    "/reset-group": {"group": "workers", "position": 200},
    "/delete-group": {"group": "workers"},
    "/close-session": {"session": "feed"},
    "/raise-feature-level": {"level": 2},
    "/member-add": {"name": "n4", "raftAddress": "n4.example:7001"},
    "/member-remove": {"name": "n3"},
    "/member-replace": {"name": "n3", "newName": "n4", "raftAddress": "[::1]:7001"},
    "/member-cancel": {},
    "/soft-reset": {},
    "/hard-reset": {"stream": "s"},
}
"""A body that each action takes."""


class Node:
    """A node that answers, and does at once what it is asked for."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self.view = node_view()
        self.data = self
        self.follower = self
        self.commands = FakeCommanding(self)  # type: ignore[arg-type]
        self.resets = FakeResets()
        operations = AdminPorts(self.commands, self.resets)
        self.answering = Dispatcher(
            ENDPOINTS, self.look, pool, stream="s", actions=ACTIONS, operations=operations
        )

    @property
    def state(self) -> Any:
        return self.view.state

    def look(self) -> NodeSnapshot:
        return replace(self.view, reset=self.resets.status())

    def reply(self, request: Request, identity: Identity | None = OPERATOR) -> Reply:
        return asyncio.run(self.answering.answer(request, identity))

    def post(self, path: str, body: object, identity: Identity | None = OPERATOR) -> tuple[int, Any]:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        reply = self.reply(Request.of("POST", path, content), identity)
        return reply.status, json.loads(reply.body)

    def get(self, path: str) -> tuple[int, Any]:
        reply = self.reply(Request("GET", path))
        return reply.status, json.loads(reply.body)

    @property
    def was_changed(self) -> bool:
        return bool(self.commands.ran or self.resets.begun)


@pytest.fixture
def node() -> Iterator[Node]:
    with ThreadPoolExecutor(1) as pool:
        yield Node(pool)


# Each action


def test_configuration_post_sets_given_fields_and_returns_full_configuration(node: Node) -> None:
    body = {
        "rollBytes": "2Gi",
        "retentionMinutes": 60,
        "retentionBytes": 10**9,
        "retentionDiskPercent": 0,
        "holdBytesMax": "0",
    }

    status, answer = node.post("/configuration", body)

    assert status == 200
    assert node.commands.ran == [
        Configure(
            roll_bytes=2 * GIB,
            retention_minutes=60,
            retention_bytes=10**9,
            retention_disk_percent=0,
            hold_bytes_max=0,
        )
    ]
    before = Configuration()
    assert answer == {
        "rollBytes": 2 * GIB,
        "rollMinutes": before.roll_minutes,
        "sessionBytesMax": before.session_bytes_max,
        "retentionMinutes": 60,
        "retentionBytes": 10**9,
        "retentionDiskPercent": 0,
        "holdBytesMax": 0,
        "sessionsMax": before.sessions_max,
        "sessionsPerNameMax": before.sessions_per_name_max,
        "sessionIdleMinutes": before.session_idle_minutes,
        "setByNode": [],
    }
    assert node.get("/configuration") == (200, answer)


def test_empty_configuration_post_changes_nothing(node: Node) -> None:
    assert node.post("/configuration", {}) == node.get("/configuration")
    assert not node.was_changed


def test_configuration_field_set_in_node_settings_is_rejected_with_409(node: Node) -> None:
    node.view = replace(node.view, configured=frozenset({"retention_bytes", "roll_bytes"}))

    status, answer = node.post("/configuration", {"retentionBytes": "1Gi", "retentionMinutes": 5})

    assert (status, answer["error"], answer["where"]) == (409, "Conflict", "field retentionBytes")
    assert not node.was_changed
    assert node.get("/configuration")[1]["setByNode"] == ["rollBytes", "retentionBytes"]
    assert node.post("/configuration", {"retentionMinutes": 5})[0] == 200


@pytest.mark.parametrize(
    ("position", "segments", "start"), [(200, 1, 200), (299, 1, 200), (300, 2, 300), (360, 2, 300)]
)
def test_trim_removes_sealed_segments_ending_at_or_below_position(
    position: int, segments: int, start: int, node: Node
) -> None:
    status, answer = node.post("/trim", {"position": position})

    (command,) = node.commands.ran
    assert isinstance(command, TrimSegments)
    assert (command.up_to, command.reason) == (position, TrimReason.REQUEST)
    assert status == 200
    assert answer["segments"] == segments
    assert answer["logStart"] == start == node.state.log_start
    assert answer["holdsOverridden"] == (["late"] if start <= 250 else ["late", "sub"])


@pytest.mark.parametrize("position", [0, 100, 200])
def test_repeated_trim_returns_200_and_reports_zero_segments(position: int, node: Node) -> None:
    first = node.post("/trim", {"position": position})
    again = node.post("/trim", {"position": position})

    start = max(position, 100)
    assert again == (200, {"logStart": start, "segments": 0, "bytes": 0, "holdsOverridden": ["late"]})
    assert first[0] == 200
    assert first[1].items() >= {"logStart": start, "holdsOverridden": ["late"]}.items()


def test_trim_beyond_log_end_is_rejected_with_409(node: Node) -> None:
    status, answer = node.post("/trim", {"position": 361})

    assert (status, answer["error"]) == (409, "Conflict")
    assert answer["what"] == "position 361 is beyond the merged log, which ends at 360"
    assert node.state.log_start == 100


def test_release_hold_returns_remaining_holds_and_409_if_repeated(node: Node) -> None:
    status, answer = node.post("/release-hold", {"name": "late"})

    assert (status, [one["name"] for one in answer]) == (200, ["sub"])
    assert node.commands.ran == [ReleaseHold("late")]
    status, answer = node.post("/release-hold", {"name": "late"})
    assert (status, answer["what"]) == (409, "late holds nothing back")


@pytest.mark.parametrize(
    ("path", "body", "begun"),
    [
        ("/soft-reset", {}, ("soft", False)),
        ("/soft-reset", {"force": True}, ("soft", True)),
        ("/hard-reset", {"stream": "s"}, ("hard", False)),
        ("/hard-reset", {"stream": "s", "force": True}, ("hard", True)),
    ],
)
def test_reset_starts_and_reports_running_status(
    path: str, body: dict[str, Any], begun: object, node: Node
) -> None:
    status, answer = node.post(path, body)

    assert node.resets.begun == [begun]
    assert (status, answer["state"], answer["epoch"]) == (202, "running", 2)
    assert node.get("/reset-status") == (503, answer)


def test_second_reset_while_one_runs_returns_503_with_retry_after(node: Node) -> None:
    node.post("/soft-reset", {})

    reply = node.reply(Request.of("POST", "/hard-reset", b'{"stream": "s"}'))

    assert (reply.status, reply.headers["Retry-After"]) == (503, "1")
    assert json.loads(reply.body)["what"] == "a reset runs already"
    assert len(node.resets.begun) == 1


def test_hard_reset_naming_another_stream_is_rejected_with_409(node: Node) -> None:
    status, answer = node.post("/hard-reset", {"stream": "production"})

    assert (status, answer["got"], answer["expected"]) == (409, "production", "s")
    assert not node.was_changed


def test_reset_status_reports_dropped_messages_by_session(node: Node) -> None:
    dropped = DroppedMessages("feed", 2, 3, 40, 47)
    node.resets.now = ResetStatus("done", "hard", 3, NOW, NOW + 1, (dropped,), may_lose="")

    status, answer = node.get("/reset-status")

    assert status == 200
    assert answer["dropped"] == [{"session": "feed", "sessionId": 2, "runNumber": 3, "first": 40, "end": 47}]
    assert (answer["state"], answer["kind"], answer["error"]) == ("done", "hard", "")


def test_reset_status_is_idle_before_first_reset(node: Node) -> None:
    status, answer = node.get("/reset-status")

    assert (status, answer["state"], answer["kind"], answer["startTime"]) == (200, "idle", "", "")


# All actions


@pytest.fixture(params=ACTIONS, ids=lambda one: one.path)
def action(request: pytest.FixtureRequest, node: Node, monkeypatch: pytest.MonkeyPatch) -> Action:
    found: Action = request.param
    if "level" in GOOD[found.path]:
        monkeypatch.setattr(feature_level, "LATEST", 2)
        for member in node.view.standing.nodes:
            member.summary.feature_level_latest = 2
            member.summary_age_s = 0.5
    if found.path.startswith("/member-"):
        node.state.feature_level = feature_level.MEMBER_CHANGES
        node.state.member_request = CHANGE if found.path == "/member-cancel" else None
    if "group" in GOOD[found.path]:
        assert node.view.state is not None
        node.view.state.holds["workers~0123456789abcdef.p000"] = SubscriberHold(100, at(9))
    return found


def test_action_response_matches_its_schema(action: Action, node: Node) -> None:
    status, answer = node.post(action.path, GOOD[action.path])

    assert status == action.status
    Draft202012Validator(msgspec.json.schema(action.answer)).validate(answer)
    assert node.was_changed


@pytest.mark.parametrize("identity", [SUBSCRIBER, PUBLISHER, OTHER, Identity("s", "node", "n1")])
def test_action_by_role_other_than_operator_is_rejected_with_403(
    identity: Identity, action: Action, node: Node
) -> None:
    status, answer = node.post(action.path, GOOD[action.path], identity)

    assert (status, answer["error"], answer["expected"]) == (403, "CertificateError", "role operator")
    assert not node.was_changed


@pytest.mark.parametrize("identity", [None, Identity("elsewhere", "operator", "op")])
def test_action_without_identity_or_of_another_stream_is_rejected_with_403(
    identity: Identity | None, action: Action, node: Node
) -> None:
    assert node.post(action.path, GOOD[action.path], identity)[0] == 403
    assert not node.was_changed


def test_action_without_body_is_rejected_with_400(action: Action, node: Node) -> None:
    reply = node.reply(Request("POST", action.path))

    assert reply.status == 400
    assert json.loads(reply.body)["what"] == "the body is missing"
    assert not node.was_changed


@pytest.mark.parametrize("kind", ["", "text/plain", "application/x-www-form-urlencoded", "application/jsonp"])
def test_action_body_without_json_content_type_is_rejected_with_415(
    kind: str, action: Action, node: Node
) -> None:
    async def body() -> bytes:
        return json.dumps(GOOD[action.path]).encode()

    reply = node.reply(Request("POST", action.path, kind, body))

    assert (reply.status, json.loads(reply.body)["expected"]) == (415, "application/json")
    assert not node.was_changed
    said = Request("POST", action.path, "Application/JSON; charset=utf-8", body)
    assert node.reply(said).status == action.status


def test_action_body_above_size_limit_is_rejected_with_413(action: Action, node: Node) -> None:
    content = json.dumps(GOOD[action.path]).encode()

    status, answer = node.post(action.path, content + b" " * (BODY_BYTES_MAX + 1 - len(content)))

    assert (status, answer["error"]) == (413, "TooLarge")
    assert not node.was_changed
    assert node.post(action.path, content + b" " * (BODY_BYTES_MAX - len(content)))[0] == action.status


def test_action_waiting_for_slow_body_occupies_no_request_slot(action: Action, node: Node) -> None:
    async def check() -> None:
        came = asyncio.Event()

        async def body() -> bytes:
            await came.wait()
            return json.dumps(GOOD[action.path]).encode()

        slow = Request("POST", action.path, "application/json", body)
        asked = asyncio.create_task(node.answering.answer(slow, OPERATOR))
        done, _ = await asyncio.wait([asked], timeout=0)
        await asyncio.sleep(0)
        assert not done
        assert not node.answering.busy
        came.set()
        assert (await asked).status == action.status

    asyncio.run(check())


def test_action_with_unknown_field_is_rejected_with_list_of_known_fields(action: Action, node: Node) -> None:
    status, answer = node.post(action.path, {**GOOD[action.path], "nope": 1})

    assert (status, answer["error"], answer["got"]) == (400, "BadRequest", "'nope'")
    assert answer["expected"] == (", ".join(one.name for one in action.fields) or "none")
    assert not node.was_changed


def test_action_with_query_parameters_is_rejected_with_400(action: Action, node: Node) -> None:
    status, answer = node.post(f"{action.path}?force=true", GOOD[action.path])

    assert (status, answer["what"]) == (400, "unknown parameter")
    assert not node.was_changed


def test_action_path_changes_nothing_with_methods_other_than_post(action: Action, node: Node) -> None:
    for method in ("GET", "HEAD", "PUT", "DELETE", "PATCH", "OPTIONS"):
        node.reply(Request(method, action.path))
    assert not node.was_changed


@pytest.mark.parametrize(
    ("failure", "status"),
    [(Timeout("not seen applied"), 504), (Unreachable("not joined"), 503), (KeyError("secret"), 500)],
)
def test_failed_command_returns_5xx_without_internal_details(failure: Any, status: int, node: Node) -> None:
    node.commands.failure = failure

    got, answer = node.post("/trim", {"position": 200})

    assert got == status
    assert "secret" not in json.dumps(answer)


def test_trim_returns_503_while_node_has_no_cluster_state(node: Node) -> None:
    node.view = replace(node.view, state=None)

    assert node.post("/trim", {"position": 1})[0] == 503
    assert not node.was_changed


def test_action_request_and_result_are_logged_with_caller_identity(
    node: Node, caplog: pytest.LogCaptureFixture, logged: Callable[[str], list[str]]
) -> None:
    with caplog.at_level("INFO", "sequencer"):
        node.post("/release-hold", {"name": "late"})
        node.post("/release-hold", {"name": "late"})

    asked, done, _, refused = logged("sequencer")
    assert asked == 'rest_request path=/release-hold by=rt://s/operator/op body={"name": "late"}'
    assert done.startswith("rest_completed path=/release-hold by=rt://s/operator/op")
    assert refused.startswith("rest_rejected path=/release-hold by=rt://s/operator/op")


def test_dispatcher_of_port_without_certificates_rejects_actions(tmp_path: Path) -> None:
    with ThreadPoolExecutor(1) as pool, pytest.raises(AssertionError):
        Dispatcher(ENDPOINTS, node_view, pool, stream=None, actions=ACTIONS)


# The feature level


def test_feature_level_unknown_to_member_is_rejected_before_command_is_sent(node: Node) -> None:
    for one in node.view.standing.nodes:
        one.summary.feature_level_latest = 1 if one.name == "n3" else 2
        one.summary.rt_version = "1.2.3"

    status, answer = node.post("/raise-feature-level", {"level": 2})

    assert (status, answer["error"], answer["where"]) == (409, "FeatureLevelRefused", "member n3")
    assert answer["got"] == "rt 1.2.3 with level 1 at most"
    assert "Install a newer rt on n3" in answer["hint"]
    assert not node.was_changed


def test_feature_level_refusal_by_leader_returns_409_with_reason_and_hint(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The leader has its own reports. A report of a member may be missing there although the asked node has
    it.
    """
    for one in node.view.standing.nodes:
        one.summary.feature_level_latest = 2
    refused = FeatureLevelRefused("no report", where="member n1", hint="Start it. Then try again.")

    async def run(_: object) -> Outcome:
        return CommandRejected(str(refused))

    monkeypatch.setattr(node.commands, "run", run)

    status, answer = node.post("/raise-feature-level", {"level": 2})

    assert (status, answer["error"]) == (409, "Conflict")
    expected = "no report (at member n1). Start it. Then try again. Nothing was changed."
    assert str(RtError(answer["what"], hint=answer["hint"])) == expected


def test_status_reports_feature_level_of_cluster_and_each_member(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feature_level, "LATEST", 2)
    monkeypatch.setitem(feature_level.PERMITS, 2, "something new")
    for one in node.view.standing.nodes:
        one.summary.feature_level_latest = 2
        one.summary.rt_version = "1.2.3"
    _, before = node.get("/status")
    assert before["featureLevel"] == 1
    assert {(one["featureLevelLatest"], one["version"]) for one in before["members"]} == {(2, "1.2.3")}
    assert ["something new" in note for note in before["notes"]] == [True]

    for _ in range(2):  # A client without an answer repeats its request.
        assert node.post("/raise-feature-level", {"level": 2}) == (200, {"featureLevel": 2})

    assert node.commands.ran == [RaiseFeatureLevel(2)]
    _, after = node.get("/status")
    assert (after["featureLevel"], after["notes"]) == (2, [])
    assert "\nrt_feature_level 2\n" in node.reply(Request("GET", "/metrics")).body.decode()


# The members


def with_addresses(node: Node, **addresses: str) -> None:
    node.state.feature_level = feature_level.MEMBER_CHANGES
    for one in node.view.standing.nodes:
        one.raft_address = addresses.get(one.name, f"{one.name}.example:7001")


@pytest.mark.parametrize(
    ("path", "body", "ran"),
    [
        ("add", {"name": "n4", "raftAddress": "n4.example:7001"}, RequestMembers("n4", "n4.example:7001")),
        ("remove", {"name": "n2"}, RequestMembers(removes="n2")),
        (
            "replace",
            {"name": "n2", "newName": "n4", "raftAddress": "10.0.0.4:7001"},
            RequestMembers("n4", "10.0.0.4:7001", "n2"),
        ),
    ],
)
def test_member_change_starts_and_is_reported_in_status(
    node: Node, path: str, body: dict[str, str], ran: RequestMembers
) -> None:
    with_addresses(node)

    status, answer = node.post(f"/member-{path}", body)

    assert (status, node.commands.ran) == (202, [ran])
    assert answer == {"number": 1, "adds": ran.adds, "raftAddress": ran.address, "removes": ran.removes}
    _, after = node.get("/status")
    assert after["memberChange"] == answer
    assert after["settledMemberChange"] is None
    status, answer = node.post("/member-remove", {"name": "n3"})
    assert (status, answer["error"]) == (409, "Conflict")
    assert "another change of members is being carried out" in answer["what"]


@pytest.mark.parametrize("path", ["/member-add", "/member-remove", "/member-replace", "/member-cancel"])
def test_member_change_below_required_feature_level_is_rejected_with_409(node: Node, path: str) -> None:
    with_addresses(node)
    node.state.feature_level = feature_level.MEMBER_CHANGES - 1

    status, answer = node.post(path, GOOD[path])

    assert (status, node.was_changed) == (409, False)
    assert answer["what"].startswith("members can be changed from feature level 2 on")


ADDRESSES = [
    *("n4:1", "n4:60001", "n4:65535", "n_4.example:7001", "10.0.0.4:60000"),
    *("[::1]:7001", "[::]:7001", "[fd00::4]:7001", "[2001:DB8::1:2]:7001", "[1:2:3:4:5:6:7::]:7001"),
]


@pytest.mark.parametrize("address", ADDRESSES)
def test_member_add_accepts_valid_raft_address(node: Node, address: str) -> None:
    with_addresses(node)

    status, answer = node.post("/member-add", {"name": "n4", "raftAddress": address})

    assert (status, answer["raftAddress"]) == (202, address)


@pytest.mark.parametrize(
    "address", ["n4:0", "n4:65536", "[1::2::3]:1", "[1:2:3:4:5:6:7:8:9]:1", "[:1]:1", "::1:7001", "[::1%é]:1"]
)
def test_member_add_with_invalid_raft_address_is_rejected_with_400(node: Node, address: str) -> None:
    with_addresses(node)

    assert node.post("/member-add", {"name": "n4", "raftAddress": address})[0] == 400
    assert not node.was_changed


def test_cancelled_member_change_is_settled_with_reason(node: Node) -> None:
    with_addresses(node)
    node.state.member_request = CHANGE

    status, answer = node.post("/member-cancel", {})

    assert (status, node.commands.ran) == (200, [CancelMembers()])
    assert answer == {"number": 7, "why": "an operator cancelled it"}
    assert node.get("/status")[1]["settledMemberChange"] == answer


@pytest.mark.parametrize(
    ("path", "body", "message", "got"),
    [
        ("remove", {"name": "n9"}, "no such member", "n9"),
        ("add", {"name": "n2", "raftAddress": "n9.example:7001"}, "it is a member already", "n2"),
        (
            "add",
            {"name": "n9", "raftAddress": "n2.example:7001"},
            "another member has this",
            "n2.example:7001",
        ),
        (
            "replace",
            {"name": "n9", "newName": "n4", "raftAddress": "n4.example:7001"},
            "no such member",
            "n9",
        ),
    ],
)
def test_impossible_member_change_is_rejected_with_409(
    node: Node, path: str, body: dict[str, str], message: str, got: str
) -> None:
    with_addresses(node)

    status, answer = node.post(f"/member-{path}", body)

    assert (status, answer["got"], node.was_changed) == (409, got, False)
    assert answer["what"].startswith(message)


def test_member_replace_of_node_by_itself_is_rejected_with_409(node: Node) -> None:
    with_addresses(node)
    learner = node.view.standing.nodes[-1]
    learner.is_learner = True
    body = {"name": learner.name, "newName": learner.name, "raftAddress": learner.raft_address}

    status, answer = node.post("/member-replace", body)

    assert (status, answer["what"], node.was_changed) == (409, "a node cannot replace itself", False)


def test_learner_left_by_cancelled_member_change_can_be_added_again(node: Node) -> None:
    with_addresses(node)
    learner = node.view.standing.nodes[-1]
    learner.is_learner = True

    status, _ = node.post("/member-add", {"name": learner.name, "raftAddress": learner.raft_address})

    assert status == 202
    roles = {one["name"]: one["role"] for one in node.get("/status")[1]["members"]}
    assert roles[learner.name] == "learner"
    assert sorted(roles.values()) == ["learner", "voter", "voter"]


def test_status_names_members_able_to_bootstrap_after_member_change(node: Node) -> None:
    with_addresses(node)
    for one in node.view.standing.nodes:
        one.summary.bootstraps = one.name != "n2"
    assert not any("bootstrap" in note for note in node.get("/status")[1]["notes"])
    node.view.standing.members_version = 9
    (note,) = [note for note in node.get("/status")[1]["notes"] if "bootstrap" in note]
    assert note.startswith("The members have changed, and n1, n3 may bootstrap.")
