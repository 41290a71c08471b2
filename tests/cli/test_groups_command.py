"""`rt groups` lists, shows, resets and deletes groups, over the REST views of a node."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from operator_command import run_command
from receiving_node import make_pki
from rest_node import Served, at

from rt.cli import log_goals
from rt.cli.commands.groups import groups
from rt.cli.formats.group_table import groups_in, list_lines
from rt.streams.balancer.lease_balancer import HOSTS, QUEUES
from rt.streams.group.partitions import Partitions
from sequencer.state.state import LeaseState, SequencerState, SubscriberHold

WORKERS = Partitions("workers", ["a/*"], 3)
FIRST, SECOND, THIRD = map(WORKERS.position_name, WORKERS.queues)


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_pki(tmp_path_factory.mktemp("pki"))


def lease(owner: str, token: int) -> LeaseState:
    return LeaseState(owner, token, 10_000, bytes(16), 0)


def fill(served: Served) -> None:
    """Add the group workers with one member, which handles two of three partitions, and the group old without
    members.
    """
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


MEMBER = "workers~0a1b"
OLD = Partitions("old", ["*"], 1).position_name(Partitions("old", ["*"], 1).queues[0])


class NodesLog:
    """The merged log of the nodes, as the replicator reads it."""

    def __init__(self) -> None:
        self.found = 0
        self.bounds_asked = self.is_closed = False
        self.on_bounds: Callable[[], None] = lambda: None

    def load(self) -> Callable[..., NodesLog]:
        return lambda *_, **__: self

    def bounds(self) -> tuple[int, int]:
        self.bounds_asked = True
        self.on_bounds()
        return 100, 360

    def find_time(self, start: int, end: int, timestamp_ns: int) -> int:
        assert timestamp_ns >= at(0)
        return min(max(self.found, start), end)

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> NodesLog:
    log = NodesLog()
    monkeypatch.setattr(log_goals, "entry_points", lambda **_: (log,))
    return log


@pytest.fixture
def run(pki: Path, tmp_path: Path) -> Callable[..., tuple[Result, Served]]:
    def run(*arguments: str, change: Callable[[Any], None] = lambda _: None) -> tuple[Result, Served]:
        def prepare(served: Served) -> None:
            fill(served)
            change(served.data.follower.state)

        return run_command(groups, *arguments, pki=pki, root=tmp_path, prepare=prepare)

    return run


def test_list_prints_all_groups_with_lag_and_members(run: Any) -> None:
    result, _ = run("list")
    assert result.exit_code == 0, result.output
    header, *rows = (line.split() for line in result.stdout.splitlines())
    assert header == ["group", "partitions", "unhandled", "members", "lag", "kept"]
    assert [row[:5] for row in rows] == [["old", "1", "1", "0", "360"], ["workers", "3", "1", "1", "310"]]

    as_json, _ = run("list", "--json")
    assert [json.loads(line)["group"] for line in as_json.stdout.splitlines()] == ["old", "workers"]


def test_show_prints_position_lag_and_member_of_each_partition(run: Any) -> None:
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


def test_delete_removes_group_only_if_it_has_no_members(run: Any) -> None:
    refused, served = run("delete", "workers")
    assert "workers~0a1b" in str(refused.exception)
    assert {FIRST, SECOND, THIRD} <= served.data.follower.state.holds.keys()

    deleted, served = run("delete", "workers", change=lambda state: state.leases.clear())
    assert (deleted.exit_code, deleted.stdout) == (0, "Deleted 3 positions of workers.\n")
    holds = served.data.follower.state.holds
    assert not [name for name in holds if name.startswith("workers~")]
    assert {"sub", "late", "sub~other"} <= holds.keys(), "others keep theirs"


def test_reset_moves_group_to_position_unless_dry_run(run: Any, log: NodesLog) -> None:
    tried, served = run("reset", "old", "--to", "200", "--dry-run")
    assert tried.exit_code == 0, tried.output
    assert tried.stdout.splitlines()[1].split() == ["p000", "0", "200"]
    assert tried.stdout.endswith("Nothing was changed (--dry-run).\n")
    assert served.data.follower.state.holds[OLD].position == 0
    done, served = run("reset", "old", "--to", "200")
    assert done.stdout.endswith("Reset 1 positions of old.\n")
    assert served.data.follower.state.holds[OLD].position == 200


@pytest.mark.parametrize(
    ("to", "position"),
    [("earliest", 100), ("latest", 360), ("360", 360), ("2026-01-01", 250), ("2026-01-01T00:30:00Z", 250)],
)
def test_reset_accepts_earliest_latest_position_or_time(
    run: Any, log: NodesLog, to: str, position: int
) -> None:
    log.found = 250
    result, served = run("reset", "workers", "--to", to, "--json", change=lambda state: state.leases.clear())
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert (found["group"], found["position"], found["is_dry_run"]) == ("workers", position, False)
    assert [(one["from"], one["to"]) for one in found["partitions"]] == [
        (350, position),
        (340, position),
        (50, position),
    ]
    holds = served.data.follower.state.holds
    assert {holds[name].position for name in (FIRST, SECOND, THIRD)} == {position}
    assert (log.bounds_asked, log.is_closed) == (True, True)


@pytest.mark.parametrize("dry", [[], ["--dry-run"]])
def test_reset_of_group_with_members_is_rejected(run: Any, log: NodesLog, dry: list[str]) -> None:
    refused, served = run("reset", "workers", "--to", "earliest", *dry)
    assert refused.exit_code == 1
    assert "workers~0a1b" in str(refused.exception)
    assert served.data.follower.state.holds[FIRST].position == 350


@pytest.mark.parametrize("to", ["99", "361"])
def test_reset_to_position_outside_log_is_rejected(run: Any, log: NodesLog, to: str) -> None:
    refused, served = run("reset", "old", "--to", to)
    assert "100 to 360" in str(refused.exception)
    assert served.data.follower.state.holds[OLD].position == 0


@pytest.mark.parametrize("to", ["", "-1", "yesterday", "12:00", "1.5", "earliest ", "9" * 5000])
def test_reset_to_malformed_position_exits_with_2(run: Any, to: str) -> None:
    result, _ = run("reset", "old", "--to", to)
    assert result.exit_code == 2
    assert "--to" in result.output


def test_reset_and_delete_are_rejected_if_member_starts_meanwhile(run: Any, log: NodesLog) -> None:
    """The nodes reject it, although the command has seen no member."""

    def start_late(state: SequencerState) -> None:
        state.leases.clear()
        log.on_bounds = lambda: state.leases.update({f"workers/start/{MEMBER}": lease(MEMBER, 1)})

    refused, served = run("reset", "workers", "--to", "earliest", change=start_late)
    assert "group workers has members: workers~0a1b" in str(refused.exception)
    assert served.data.follower.state.holds[FIRST].position == 350
    early, _ = run("delete", "workers", change=lambda state: only(state, f"workers/start/{MEMBER}"))
    assert MEMBER in str(early.exception), "a member that starts is one"


def only(state: SequencerState, name: str) -> None:
    state.leases.clear()
    state.leases[name] = lease(MEMBER, 1)


def test_list_of_cluster_without_groups_is_empty() -> None:
    assert groups_in([], []) == []
    assert list(list_lines([])) == ["group  partitions  unhandled  members  lag  kept"]
