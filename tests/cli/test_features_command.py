"""`rt features` lists feature levels of cluster and members, and raises one, over a node's REST views."""

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

from rt.cli.cluster.features import _lines, features
from sequencer.state import feature_level


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_pki(tmp_path_factory.mktemp("pki"))


@pytest.fixture
def run(pki: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Result, Served]]:
    """Return a function that runs a command. The program knows level 2, and member n3 knows level
    `latest`.
    """
    monkeypatch.setattr(feature_level, "LATEST", 2)
    monkeypatch.setitem(feature_level.PERMITS, 2, "something new")

    def run(*arguments: str, latest: int = 2) -> tuple[Result, Served]:
        def prepare(served: Served) -> None:
            for member in served.data.follower.standing.nodes:
                member.summary.feature_level_latest = latest if member.name == "n3" else 2
                member.summary.rt_version = "1.2.3"

        return run_command(features, *arguments, pki=pki, root=tmp_path, prepare=prepare)

    return run


def test_list_prints_levels_and_suggests_raise_if_all_members_know_next_level(run: Any) -> None:
    result, _ = run("list")
    assert result.exit_code == 0, result.output
    level, note, _, *rows = result.stdout.splitlines()
    assert level == "feature level 1"
    assert "feature level 2 (something new)" in note
    assert "`rt features raise 2`" in note
    assert [row.split() for row in rows][1:] == [[name, "1.2.3", "2"] for name in ("n1", "n2", "n3")]


def test_list_suggests_no_raise_if_a_member_does_not_know_next_level(run: Any) -> None:
    result, _ = run("list", "--json", latest=0)
    assert json.loads(result.stdout) == {
        "featureLevel": 1,
        "members": [
            {"name": name, "featureLevelLatest": level, "version": "1.2.3"}
            for name, level in (("n1", 2), ("n2", 2), ("n3", 1))
        ],
    }
    result, _ = run("list", latest=0)
    assert "raise" not in result.stdout


def test_nodes_without_feature_levels_are_listed_with_level_1() -> None:
    level, _, _, row = _lines({"members": [{"name": "n1"}]})
    assert level == "feature level 1"
    assert row.split() == ["n1", "1"]


def test_raise_sets_level_if_all_members_know_it(run: Any) -> None:
    result, served = run("raise", "2")
    assert (result.exit_code, result.stdout) == (0, "The cluster has feature level 2.\n")
    assert served.data.follower.state.feature_level == 2


def test_raise_fails_naming_member_without_the_level(run: Any) -> None:
    result, served = run("raise", "2", latest=1)
    assert result.exit_code != 0
    assert "(at member n3): got rt 1.2.3 with level 1 at most, expected level 2" in str(result.exception)
    assert served.data.follower.state.feature_level == 1
