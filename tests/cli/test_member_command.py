"""`rt member`: what it lists, asks for and says at the end; against a node's REST views."""

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
    """Runs a command. The last change ended as `settled` says."""

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


def test_the_members_are_listed_with_the_change_that_is_under_way(run: Any) -> None:
    result, _ = run("list", request=MemberRequest(3, "n4", "n4.example:7000", "n1"))
    assert result.exit_code == 0, result.output
    head, *rows = result.output.splitlines()
    assert head.split() == ["member", "role", "raft", "data", "connected", "phase"]
    assert [row.split()[0] for row in rows[:3]] == ["n1", "n2", "n3"]
    assert "n2.example:7000" in rows[1]
    assert rows[-1] == "change 3: replace n1 by n4"


def test_the_list_says_why_the_last_change_was_not_carried_out_whole(run: Any) -> None:
    result, _ = run("list", settled=SettledMembers(2, "an operator cancelled it"))
    assert result.output.splitlines()[-1] == ("change 2 was not carried out whole: an operator cancelled it")


def test_the_list_is_json_if_asked_for(run: Any) -> None:
    result, _ = run("list", "--json", settled=SettledMembers(2, ""))
    said = json.loads(result.output)
    assert [one["name"] for one in said["members"]] == ["n1", "n2", "n3"]
    assert (said["memberChange"], said["settledMemberChange"]) == (None, {"number": 2, "why": ""})


def test_a_change_is_requested_and_its_end_waited_for(run: Any) -> None:
    result, served = run("add", "n4", "n4.example:7000", settled=SettledMembers(1, ""))
    assert result.exit_code == 0, result.output
    assert result.output.splitlines() == ["Change 1 has started: add n4.", "Done."]
    assert served.data.follower.state.member_request == MemberRequest(1, "n4", "n4.example:7000", "")


def test_a_change_that_was_not_carried_out_whole_fails_and_says_why(run: Any) -> None:
    result, _ = run("remove", "n3", settled=SettledMembers(1, "n3 is the only voter: add another node first"))
    assert isinstance(result.exception, MemberChangeFailed)
    assert result.exception.got == "n3 is the only voter: add another node first"


def test_a_change_that_ended_long_ago_is_not_taken_for_this_one(run: Any) -> None:
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
def test_what_cannot_be_is_refused_with_the_nodes_words(
    run: Any, arguments: tuple[str, ...], level: int, said: str
) -> None:
    result, _ = run(*arguments, level=level)
    assert result.exit_code == 1
    assert said in str(result.exception)
