"""`rt status` combines the answers of nodes and sets its exit status (loopback servers, no cluster)."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from module_shadow import shadow
from msgspec.structs import replace
from receiving_node import make_pki, tls_of
from rest_node import OPERATOR, OTHER, PUBLISHER, SUBSCRIBER, at, history, node_view, standing

from rt.cli.commands import status as status_module
from rt.cli.formats.cluster_summary import CLIENTS_MAX, ClusterSummary, NodeAnswer, status_lines
from rt.cli.main import cli
from rt.net.grpc_channel import serve
from rt.v1 import sequencer_pb2 as pb
from sequencer.localcluster.loopback import free_port
from sequencer.rest.base.node_snapshot import ClientConnection, NodeSnapshot
from sequencer.rest.base.request import json_bytes
from sequencer.rest.http.dispatcher import Dispatcher
from sequencer.rest.http.tunnel import TUNNEL_ROLES, rest_service
from sequencer.rest.views import admin_views, client_views, cluster_views
from sequencer.rest.views.context import RequestContext
from sequencer.rest.views.endpoints import ENDPOINTS
from sequencer.state.state import SubscriberHold

COMMAND = ("status", "--insecure", "--connect-timeout", "60", "--endpoints")


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait longer for answers than an operator does, because the machine may be loaded."""
    monkeypatch.setattr(status_module, "ASK_S", 60.0)


def all_there(*away: str, **changes: Any) -> pb.Standing:
    made = standing(**changes)
    for one in made.nodes:
        one.is_connected = one.name not in away
        one.summary.step = "unreachable" if one.name in away else "ready"
    return made


def view(node: str = "n1", *away: str, **changes: Any) -> NodeSnapshot:
    """Return the snapshot of a healthy node, as it sees the cluster."""
    state = history()
    state.holds = {"sub": SubscriberHold(250, at(35))}
    told = all_there(*away, node=node, role="leader" if node == "n2" else "follower")
    return node_view(**{"node": node, "standing": told, "state": state, **changes})


def said(node: NodeSnapshot, endpoint: str = "n1:5002") -> NodeAnswer:
    asked = RequestContext(node, OPERATOR)
    views = (cluster_views.status, client_views.clients, admin_views.holds, client_views.cluster_clients)
    answers = [one(asked) for one in views]
    return NodeAnswer(endpoint, *(json.loads(json_bytes(answer.body)) for answer in answers))


def text_of(*nodes: NodeSnapshot) -> str:
    return "\n".join(status_lines(ClusterSummary(tuple(map(said, nodes)))))


# Text made from the answers


def test_healthy_cluster_shows_leader_merged_log_and_clients() -> None:
    text = text_of(view("n1"), view("n2", clients=()))

    lines = text.splitlines()
    assert lines[0] == "healthy"
    assert "stream s, cluster 40414243, epoch 1: leader n2 in term 5, reported by n1, n2" in lines
    (leader,) = [line.split() for line in lines if line.startswith("n2 ")]
    assert leader == ["n2", "leader", "ready", "360", "0", "0", "B", "60.0", "%", "400", "B"]
    assert "merged log from position 100: 3 segments kept, 1 trimmed, the last at" in text
    (feed,) = [line.split() for line in lines if line.startswith("feed ")]
    assert feed == ["feed", "1", "nodes", "55", "5", "0.0", "s", "0", "B/s"]
    (sub,) = [line.split() for line in lines if line.startswith("sub ")]
    assert sub == ["sub", "n1", "300", "60", "0.0", "s", "10", "B/s", "1.1", "kB"]
    assert "subscribers: 1 connected, 1 disconnected within a day, 1 holding data back" in lines
    assert all(line.isprintable() for line in lines)


def test_retention_rules_are_shown_beside_current_use() -> None:
    lines = text_of(view()).splitlines()

    at_table = lines.index("rule   policy    now")
    rows = [line.split(maxsplit=1)[0] for line in lines[at_table + 1 : at_table + 5]]
    assert rows == ["age", "size", "disk", "holds"]
    assert lines[at_table + 1].split() == ["age", "7.0", "days", "40", "min"]
    assert lines[at_table + 2].split() == ["size", "off", "2.6", "kB"]
    assert lines[at_table + 3].endswith("60.0 % on n3")


def test_unreachable_node_is_shown_from_answers_of_other_nodes() -> None:
    down = NodeAnswer("n3:5002", error="no connection")
    overview = ClusterSummary((down, said(view("n1", "n3")), said(view("n2", "n3"))))

    assert overview.problems == ["n3:5002 does not answer", "member-unreachable"]
    text = "\n".join(status_lines(overview))
    assert text.startswith("unhealthy: n3:5002 does not answer, member-unreachable\n")
    assert "no answer from n3:5002: no connection" in text
    (gone,) = [line.split() for line in text.splitlines() if line.startswith("n3 ")]
    assert gone[1] == "unreachable"


def test_isolated_node_is_not_chosen_as_source_of_cluster_status() -> None:
    alone = view("n1", "n2", "n3")
    alone = replace(alone, standing=all_there("n2", "n3", leader="", term=9), applied_index=500)
    overview = ClusterSummary((said(alone), said(view("n2", "n1"))))

    assert overview.best.status["node"]["name"] == "n2"
    assert "no-leader" in overview.problems


def test_lag_of_silent_member_is_taken_from_reports_of_another_node() -> None:
    told = all_there()
    for one in told.nodes:
        if one.name == "n3":
            one.summary.merged.position, one.summary.merged.bytes = 350, 4000
    members = {one["name"]: one for one in ClusterSummary((said(view(standing=told)),)).members}

    assert (members["n3"]["lagMessages"], members["n3"]["lagBytes"]) == (10, 1000)
    assert members["n1"]["lagMessages"] == 0
    assert [members[name]["role"] for name in ("n1", "n2", "n3")] == ["follower", "leader", "follower"]


def test_unreported_disk_is_shown_without_percentage() -> None:
    told = all_there()
    (silent,) = [one for one in told.nodes if one.name == "n3"]
    silent.summary.disk_bytes = silent.summary.disk_free_bytes = 0
    text = text_of(view(standing=told))
    (line,) = [line for line in text.splitlines() if line.startswith("n3 ")]
    assert "%" not in line
    assert line.count(" B") == 1, "what it is behind, and nothing free"


def test_progress_of_phase_is_shown_as_percentage() -> None:
    told = all_there()
    told.nodes[0].summary.step = "copying"
    told.nodes[0].summary.step_done, told.nodes[0].summary.step_total = 30, 120

    assert "copying 25 %" in text_of(view(standing=told))


def test_subscriber_reconnected_to_another_node_is_shown_as_connected() -> None:
    here = ClientConnection(SUBSCRIBER, "", None, at(1), at(5), position=300)
    there = ClientConnection(SUBSCRIBER, "", None, at(5), position=310)
    overview = ClusterSummary((said(view("n1", clients=(here,))), said(view("n2", clients=(there,)))))

    assert [(one["node"], one["active"]) for one in overview.clients] == [("n2", True)]


def test_client_disconnected_from_all_nodes_is_listed_once() -> None:
    gone = (ClientConnection(OTHER, "", None, at(1), at(5), position=300),)
    overview = ClusterSummary((said(view("n1", clients=gone)), said(view("n2", clients=gone))))

    assert [(one["name"], one["active"]) for one in overview.clients] == [("other", False)]


def test_session_table_shows_only_sessions_with_most_lag() -> None:
    clients = tuple(
        ClientConnection(PUBLISHER, "", f"feed~{index}", at(1), position=index, merged=0)
        for index in range(50)
    )

    text = text_of(view(clients=clients))

    assert "sessions: 50 pushed, 0 disconnected within a day" in text
    assert "feed~49 " in text
    assert "feed~29 " not in text
    assert f"and {50 - CLIENTS_MAX} more with less lag" in text


def test_terminal_control_characters_of_node_are_escaped() -> None:
    told = all_there()
    told.nodes[0].summary.merged.stopped = "\x1b[2J"

    text = text_of(view(standing=told))

    assert "\x1b" not in text
    assert "\\x1b[2J" in text


def test_node_without_cluster_is_shown_as_unhealthy_without_leader() -> None:
    blank = NodeSnapshot("s", "n1", at(60), at(0), pb.Standing(node="n1"))
    status = json.loads(json_bytes(cluster_views.status(RequestContext(blank, OPERATOR)).body))

    text = "\n".join(status_lines(ClusterSummary((NodeAnswer("n1:5002", status),))))

    assert "unhealthy: no-leader" in text
    assert "cluster none yet" in text


# The command


@contextlib.contextmanager
def nodes(pki: Path | None, *shown: NodeSnapshot) -> Iterator[str]:
    """Start nodes that answer with the snapshots in `shown`; yield their endpoints. Without `pki` every
    caller is an operator.
    """
    ready, done = threading.Event(), threading.Event()
    endpoints: list[str] = []

    async def whole() -> None:
        with ThreadPoolExecutor(1) as pool:
            servers = []
            for node in shown:
                answering = Dispatcher(ENDPOINTS, lambda node=node: node, pool, stream="s")  # type: ignore[misc]
                who: dict[str, Any] = {"insecure_as": lambda: OPERATOR}
                if pki is not None:
                    who = {"tls": tls_of(pki, "n1")}
                service = rest_service(lambda answering=answering: answering)  # type: ignore[misc]
                servers.append(await serve("127.0.0.1:0", [service], roles=TUNNEL_ROLES, **who))
            endpoints.extend(f"localhost:{server.port}" for server in servers)
            ready.set()
            await asyncio.get_running_loop().run_in_executor(None, done.wait)
            for server in servers:
                await server.stop()

    thread = threading.Thread(target=asyncio.run, args=(whole(),))
    thread.start()
    try:
        assert ready.wait(60)
        yield ",".join(endpoints)
    finally:
        done.set()
        thread.join()


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, arguments)


def test_healthy_cluster_exits_with_0() -> None:
    with nodes(None, view("n1"), view("n2")) as endpoints:
        result = run(*COMMAND, endpoints)

    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.startswith("healthy\n")


def test_unreachable_node_is_named_and_exits_with_1() -> None:
    nobody = f"localhost:{free_port()}"
    with nodes(None, view("n1"), view("n2")) as endpoints:
        result = run(*COMMAND, f"{nobody},{endpoints}")

    assert result.exit_code == 1
    assert result.stderr == f"rt: unhealthy: {nobody} does not answer\n"
    assert "leader n2 in term 5, reported by n1, n2" in result.stdout


def test_cluster_without_answers_exits_with_1_and_names_each_endpoint() -> None:
    ports = [free_port(), free_port()]

    result = run(*COMMAND, ",".join(f"localhost:{port}" for port in ports))

    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith("rt: no node answers: got localhost:")
    assert all(f"localhost:{port}" in result.stderr for port in ports)
    assert "`curl http://localhost:8080/readiness` (its health port, unless its settings" in result.stderr


def test_json_output_has_full_status_in_one_line() -> None:
    with nodes(None, view("n1", "n3")) as endpoints:
        result = run(*COMMAND, endpoints, "--json")

    (line,) = result.stdout.splitlines()
    told = json.loads(line)
    assert result.exit_code == 1
    assert (told["healthy"], told["problems"]) == (False, ["member-unreachable"])
    assert told["asked"] == [{"endpoint": endpoints, "error": ""}]
    assert [one["name"] for one in told["members"]] == ["n1", "n2", "n3"]
    assert [one["name"] for one in told["holds"]] == ["sub"]
    assert told["status"]["retention"]["logStart"] == 100


@pytest.mark.parametrize(
    "arguments",
    [
        ["status"],
        ["status", "--endpoints", "localhost:1"],
        ["status", "--endpoints", ",", "--insecure"],
        ["status", "--endpoints", "localhost:1", "--insecure", "--watch", "0"],
        ["status", "--endpoints", "localhost:1", "--insecure", "--nope"],
    ],
)
def test_invalid_options_exit_with_2(arguments: list[str]) -> None:
    assert run(*arguments).exit_code == 2


def test_watch_repeats_status_also_when_no_node_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[float] = []

    def sleep(seconds: float) -> None:
        looks.append(seconds)
        if len(looks) == 3:
            raise KeyboardInterrupt

    shadow(monkeypatch, status_module, "time", sleep=sleep)
    with nodes(None, view("n1")) as endpoints:
        result = run(*COMMAND, endpoints, "--json", "--watch", "2")
    assert (result.exit_code, looks) == (130, [2.0] * 3)
    assert len(result.stdout.splitlines()) == 3
    looks.clear()
    assert run(*COMMAND, f"localhost:{free_port()}", "--watch", "2").stderr.count("no node answers") == 3


def test_certificate_without_operator_role_is_rejected(tmp_path: Path) -> None:
    pki = make_pki(tmp_path)

    def asked(name: str) -> Result:
        files = [f"--ca={pki}/ca.crt", f"--cert={pki}/{name}.crt", f"--key={pki}/{name}.key"]
        return run("status", "--endpoints", endpoints, *files)

    with nodes(pki, view("n1")) as endpoints:
        assert asked("op").exit_code == 0
        refused = asked("sub")

    assert refused.exit_code == 1
    assert "this role may not read this path" in refused.stderr


def test_clients_of_unreachable_node_are_shown_from_reports_of_other_nodes() -> None:
    told = all_there(node="n1", role="follower")
    for one in told.nodes:
        one.summary.clients.clients.add(role="subscriber", name=f"of-{one.name}", lag_s=2.0)
    known = said(view(standing=told))
    overview = ClusterSummary((known, NodeAnswer("n2:5002", error="no connection")))
    assert [(one["node"], one["name"]) for one in overview.elsewhere] == [("n2", "of-n2"), ("n3", "of-n3")]
    lines = list(status_lines(overview))
    assert "connected to nodes that gave no answer here: 2" in lines
    assert any(line.split() == ["of-n2", "pulls", "n2", "2.0", "s"] for line in lines)
    all_answer = ClusterSummary((known, said(view("n2"), "n2:5002"), said(view("n3"), "n3:5002")))
    assert all_answer.elsewhere == []
    too_old = ClusterSummary((NodeAnswer("n1:5002", known.status, everywhere={}),))
    assert too_old.elsewhere == []
