"""`rt groups`: who handles what of a group, how far, and its end; against the REST views of a node."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from receiving_node import make_pki
from rest_node import Served, at, serving

from rt.cli.commands.groups import groups
from rt.cli.formats.group_table import groups_in, list_lines
from rt.net.grpc_channel import serve
from rt.streams.balancer.lease_balancer import HOSTS, QUEUES
from rt.streams.group.partitions import Partitions
from sequencer.rest.http.dispatcher import Dispatcher
from sequencer.rest.http.tunnel import TUNNEL_ROLES, Tunnel
from sequencer.state.state import LeaseState, SubscriberHold

WORKERS = Partitions("workers", ["a/*"], 3)
FIRST, SECOND, THIRD = map(WORKERS.position_name, WORKERS.queues)


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_pki(tmp_path_factory.mktemp("pki"))


def lease(owner: str, token: int) -> LeaseState:
    return LeaseState(owner, token, 10_000, bytes(16), 0)


def fill(served: Served) -> None:
    """Group workers has one member, which handles two of three partitions; old has none."""
    state = served.data.follower.state
    state.holds |= {
        FIRST: SubscriberHold(350, at(35)),
        SECOND: SubscriberHold(340, at(30)),
        THIRD: SubscriberHold(50, at(20)),
        Partitions("old", ["*"], 1).position_name(Partitions("old", ["*"], 1).queues[0]): SubscriberHold(
            0, 1
        ),
        "sub~other": SubscriberHold(7, at(1)),
    }
    member = "workers~0a1b"
    state.leases |= {
        f"workers/{HOSTS}{member}": lease(member, 1),
        f"workers/{QUEUES}{WORKERS.queues[0].name}": lease(member, 2),
        f"workers/{QUEUES}{WORKERS.queues[1].name}": lease(member, 3),
        "workers/create": lease("workers~ffff", 4),
        f"elsewhere/{QUEUES}q1": lease("app", 5),
    }


@pytest.fixture
def run(pki: Path, tmp_path: Path) -> Callable[..., tuple[Result, Served]]:
    def run(*arguments: str, change: Callable[[Any], None] = lambda _: None) -> tuple[Result, Served]:
        async def main() -> tuple[Result, Served]:
            async with serving(pki, tmp_path) as served:
                fill(served)
                change(served.data.follower.state)
                answering = served.rest.answering["rest"]
                assert isinstance(answering, Dispatcher)
                tunnel = Tunnel(lambda: answering)
                server = await serve("127.0.0.1:0", [tunnel.register], roles=TUNNEL_ROLES, tls=served.tls)
                try:
                    files = [f"--{name}={pki / file}" for name, file in FILES.items()]
                    line = [*arguments, f"--endpoints=localhost:{server.port}", *files]
                    return await asyncio.to_thread(CliRunner().invoke, groups, line), served
                finally:
                    await server.stop()

        return asyncio.run(main())

    return run


FILES = {"ca": "ca.crt", "cert": "op.crt", "key": "op.key"}


def test_all_groups_are_listed_with_their_lag_and_members(run: Any) -> None:
    result, _ = run("list")
    assert result.exit_code == 0, result.output
    header, *rows = (line.split() for line in result.stdout.splitlines())
    assert header == ["group", "partitions", "unhandled", "members", "lag", "kept"]
    assert [row[:5] for row in rows] == [["old", "1", "1", "0", "360"], ["workers", "3", "1", "1", "310"]]

    as_json, _ = run("list", "--json")
    assert [json.loads(line)["group"] for line in as_json.stdout.splitlines()] == ["old", "workers"]


def test_a_group_is_shown_by_its_partitions(run: Any) -> None:
    result, _ = run("show", "workers", "--json")
    assert result.exit_code == 0, result.output
    (found,) = map(json.loads, result.stdout.splitlines())
    assert (found["group"], found["members"], found["lag"]) == ("workers", ["workers~0a1b"], 310)
    assert [
        (one["partition"], one["position"], one["lag"], one["member"]) for one in found["partitions"]
    ] == [
        ("p000", 350, 10, "workers~0a1b"),
        ("p001", 340, 20, "workers~0a1b"),
        ("p002", 50, 310, None),
    ]
    assert [one["is_trimmed"] for one in found["partitions"]] == [False, False, True]
    assert found["partitions"][0]["acknowledged_ns"] == at(35)

    text, _ = run("show", "workers")
    lines = [line.split() for line in text.stdout.splitlines()]
    assert lines[0] == ["partition", "position", "lag", "acknowledged", "member"]
    assert lines[3][:3] == ["p002", "50", "310"]
    assert "none, messages were trimmed" in text.stdout
    assert "members: workers~0a1b" in text.stdout

    unknown, _ = run("show", "nobodys")
    assert "one of old, workers" in str(unknown.exception)


def test_a_group_with_members_is_not_deleted_and_one_without_is(run: Any) -> None:
    refused, served = run("delete", "workers")
    assert "workers~0a1b" in str(refused.exception)
    assert {FIRST, SECOND, THIRD} <= served.data.follower.state.holds.keys()

    deleted, served = run("delete", "workers", change=lambda state: state.leases.clear())
    assert (deleted.exit_code, deleted.stdout) == (0, "Deleted 3 positions of workers.\n")
    holds = served.data.follower.state.holds
    assert not [name for name in holds if name.startswith("workers~")]
    assert {"sub", "late", "sub~other"} <= holds.keys(), "others keep theirs"


def test_a_cluster_without_groups_has_an_empty_list() -> None:
    assert groups_in([], []) == []
    assert list(list_lines([])) == ["group  partitions  unhandled  members  lag  kept"]
