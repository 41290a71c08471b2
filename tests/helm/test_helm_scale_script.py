"""The scaling script decides the next member change for each cluster state, and reports its failures."""

from __future__ import annotations

import importlib.util
import json
from types import ModuleType
from typing import Any

import pytest
from chart_bench import CHART

NODES = {f"t-rt-{ordinal}": f"host{ordinal}:7000" for ordinal in range(3)}


def _load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("scale", CHART / "files" / "scale.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


scale = _load()


def status(
    *names: str, learners: tuple[str, ...] = (), leader: str = "t-rt-0", **more: Any
) -> dict[str, Any]:
    members = [
        {"name": name, "role": "learner" if name in learners else "voter", "isLeader": name == leader}
        for name in (*names, *learners)
    ]
    said = {"memberChange": None, "memberChangeWaitsFor": "", "settledMemberChange": None}
    return {"members": members, **said, **more}


def change(adds: str = "", removes: str = "") -> dict[str, Any]:
    return {"number": 4, "adds": adds, "raftAddress": "", "removes": removes}


@pytest.mark.parametrize(
    ("said", "adds", "words"),
    [
        (status(*NODES), True, None),
        (status("t-rt-0"), True, "member add t-rt-1 host1:7000 --no-wait"),
        (status("t-rt-0"), False, None),
        (status("t-rt-0", "t-rt-2"), True, "member add t-rt-1 host1:7000 --no-wait"),
        (status("t-rt-0", learners=("t-rt-1",)), True, "member add t-rt-1 host1:7000 --no-wait"),
        (status(*NODES, "t-rt-3", "t-rt-10", "t-rt-9"), False, "member remove t-rt-10 --no-wait"),
        (status("t-rt-0", "t-rt-3"), True, "member remove t-rt-3 --no-wait"),
        (status(*NODES, learners=("t-rt-3",)), True, "member remove t-rt-3 --no-wait"),
        (status(*NODES, memberChange=change(adds="t-rt-4")), False, "member cancel"),
        (status(*NODES, memberChange=change(adds="t-rt-4")), True, "member cancel"),
        (status(*NODES, "by-hand", "other-rt-7", "t-rt-x"), True, None),
    ],
)
def test_decide_returns_next_command_or_done(said: dict[str, Any], adds: bool, words: str | None) -> None:
    step = scale.decide(said, NODES, adds=adds)

    assert step == (scale.Done() if words is None else scale.Run(tuple(words.split())))


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (status(*NODES, "t-rt-3", leader=""), "The nodes have no leader."),
        (status(memberChange=None), "The nodes have no leader."),
        (status("t-rt-0", memberChange=change(adds="t-rt-1")), "Change 4: it is carried out."),
        (
            status(*NODES, memberChange=change(removes="t-rt-3"), memberChangeWaitsFor="t-rt-1 must be up"),
            "Change 4: t-rt-1 must be up.",
        ),
    ],
)
def test_decide_waits_without_leader_or_during_member_change(said: dict[str, Any], why: str) -> None:
    for adds in (True, False):
        assert scale.decide(said, NODES, adds=adds) == scale.Wait(why)


class Cluster:
    """A fake `rt` that repeats its last answer."""

    def __init__(self, *answers: dict[str, Any], level: int = 2) -> None:
        self.answers, self.level, self.ran = [*answers], level, [""]

    def __call__(self, *words: str) -> str:
        match words[:2]:
            case ("member", "list"):
                return json.dumps(self.answers.pop(0) if len(self.answers) > 1 else self.answers[0])
            case ("features", "list"):
                return json.dumps({"featureLevel": self.level})
            case ("features", "raise"):
                self.level = int(words[2])
        self.ran.append(" ".join(words))
        return "Done."


def run(
    monkeypatch: pytest.MonkeyPatch, cluster: Cluster, *, raises: bool = False, seconds: float = 60
) -> None:
    monkeypatch.setattr(scale, "run_rt", cluster)
    monkeypatch.setattr(scale, "POLL_S", 0)
    monkeypatch.setenv("SCALE_NODES", ",".join(f"{name}={address}" for name, address in NODES.items()))
    monkeypatch.setenv("SCALE_RAISES", str(raises).lower())
    monkeypatch.setenv("SCALE_SECONDS", str(seconds))
    scale.main("match")


def test_feature_level_is_raised_only_if_operator_permits(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = Cluster(status("t-rt-0", "t-rt-1"), status(*NODES), level=1)
    with pytest.raises(SystemExit):
        run(monkeypatch, cluster)
    assert "scaling.raiseFeatureLevel=true" in capsys.readouterr().out
    assert cluster.ran == [""]

    cluster = Cluster(status("t-rt-0", "t-rt-1"), status(*NODES), level=1)
    run(monkeypatch, cluster, raises=True)
    assert cluster.ran[1:] == ["features raise 2", "member add t-rt-2 host2:7000 --no-wait"]


def test_feature_level_is_kept_if_no_member_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(status(*NODES), level=1)

    run(monkeypatch, cluster, raises=True)

    assert cluster.level == 1


def test_cancelled_member_change_fails_script_with_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before, after = {"number": 1, "why": "of before"}, {"number": 2, "why": "an operator cancelled it"}
    answers = (status("t-rt-0", settledMemberChange=one) for one in (before, after))

    with pytest.raises(SystemExit):
        run(monkeypatch, Cluster(*answers))

    said = capsys.readouterr().out
    assert "change 2 of the members was not carried out whole: an operator cancelled it" in said


def test_member_change_cancelled_by_script_is_not_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    cancelled = {"number": 4, "why": "an operator cancelled it"}
    cluster = Cluster(
        status(*NODES, memberChange=change(adds="t-rt-4")),
        status(*NODES, learners=("t-rt-4",), settledMemberChange=cancelled),
        status(*NODES, settledMemberChange={"number": 5, "why": ""}),
    )

    run(monkeypatch, cluster)

    assert cluster.ran[1:] == ["member cancel", "member remove t-rt-4 --no-wait"]


def test_script_timeout_exits_with_last_wait_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        run(monkeypatch, Cluster(status(leader="")), seconds=-1)

    assert capsys.readouterr().out.splitlines() == [
        "The nodes have no leader.",
        "Failed: the members are not as they should be in time. Last: The nodes have no leader.",
    ]
