"""`rt member` lists members, requests changes and reports their end, over a node's REST views."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from operator_command import run_command
from receiving_node import make_pki
from rest_node import Served

from rt.cli.cluster.member import MemberChangeFailed, member
from sequencer.state.feature_level import MEMBER_CHANGES
from sequencer.state.state import MemberRequest, SequencerState, SettledMembers


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_pki(tmp_path_factory.mktemp("pki"))


@pytest.fixture
def run(pki: Path, tmp_path: Path) -> Callable[..., tuple[Result, Served]]:
    """Return a function that runs a command. `settled` is the result of the last member change."""

    def run(
        *arguments: str,
        settled: SettledMembers | None = None,
        request: MemberRequest | None = None,
        level: int = MEMBER_CHANGES,
    ) -> tuple[Result, Served]:
        def prepare(served: Served) -> None:
            state: Any = served.data.follower.state
            assert isinstance(state, SequencerState)
            state.feature_level, state.settled_members, state.member_request = level, settled, request
            for one in served.data.follower.standing.nodes:
                one.raft_address = f"{one.name}.example:7000"

        return run_command(member, *arguments, pki=pki, root=tmp_path, prepare=prepare)

    return run


def test_list_prints_members_and_change_in_progress(run: Any) -> None:
    result, _ = run("list", request=MemberRequest(3, "n4", "n4.example:7000", "n1"))
    assert result.exit_code == 0, result.output
    head, *rows = result.output.splitlines()
    assert head.split() == ["member", "role", "raft", "data", "connected", "phase"]
    assert [row.split()[0] for row in rows[:3]] == ["n1", "n2", "n3"]
    assert "n2.example:7000" in rows[1]
    assert rows[-1] == "change 3: replace n1 by n4"


def test_list_prints_reason_for_incomplete_last_change(run: Any) -> None:
    result, _ = run("list", settled=SettledMembers(2, "an operator cancelled it"))
    assert result.output.splitlines()[-1] == ("change 2 was not carried out whole: an operator cancelled it")


def test_list_prints_json_with_json_option(run: Any) -> None:
    result, _ = run("list", "--json", settled=SettledMembers(2, ""))
    said = json.loads(result.output)
    assert [one["name"] for one in said["members"]] == ["n1", "n2", "n3"]
    assert (said["memberChange"], said["settledMemberChange"]) == (None, {"number": 2, "why": ""})


def test_add_requests_change_and_waits_for_its_end(run: Any) -> None:
    result, served = run("add", "n4", "n4.example:7000", settled=SettledMembers(1, ""))
    assert result.exit_code == 0, result.output
    assert result.output.splitlines() == ["Change 1 has started: add n4.", "Done."]
    assert served.data.follower.state.member_request == MemberRequest(1, "n4", "n4.example:7000", "")


def test_incomplete_change_raises_member_change_failed_with_reason(run: Any) -> None:
    result, _ = run("remove", "n3", settled=SettledMembers(1, "n3 is the only voter: add another node first"))
    assert isinstance(result.exception, MemberChangeFailed)
    assert result.exception.got == "n3 is the only voter: add another node first"


def test_replace_ignores_end_of_earlier_change(run: Any) -> None:
    result, served = run("replace", "n3", "n4", "n4.example:7000", "--no-wait", settled=SettledMembers(0, ""))
    assert result.output == "Change 1 has started: replace n3 by n4.\n"
    assert served.data.follower.state.member_request == MemberRequest(1, "n4", "n4.example:7000", "n3")


@pytest.mark.parametrize(
    ("arguments", "level", "said"),
    [
        (("remove", "n9"), MEMBER_CHANGES, "no such member"),
        (("add", "n2", "n9.example:7000"), MEMBER_CHANGES, "it is a member already"),
        (("add", "n 9", "n9.example:7000"), MEMBER_CHANGES, "field name"),
        (("add", "n4", "n4.example"), MEMBER_CHANGES, "field raftAddress"),
        (("remove", "n3"), MEMBER_CHANGES - 1, "from feature level 2 on"),
        (("cancel",), MEMBER_CHANGES, "no change of members is being carried out"),
    ],
)
def test_invalid_change_is_rejected_with_message_of_node(
    run: Any, arguments: tuple[str, ...], level: int, said: str
) -> None:
    result, _ = run(*arguments, level=level)
    assert result.exit_code == 1
    assert said in str(result.exception)
