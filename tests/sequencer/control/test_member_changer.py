"""How one leader carries out a step of a membership change."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

from sequencer.control import member_changer
from sequencer.control.member_changer import MemberChanger
from sequencer.raft.model.members import MemberChange, MemberChangeNotReady, MemberChangeRefused, RemoveMember
from sequencer.state.operations.membership import SettleMembers

STEP = RemoveMember("n3")


class Consensus:
    """Records the requested member changes."""

    def __init__(self) -> None:
        self.asked: list[tuple[MemberChange, Future[None]]] = []

    def change_members(self, change: MemberChange) -> Future[None]:
        self.asked.append((change, Future()))
        return self.asked[-1][1]


def test_refusal_reason_of_member_change_is_cleared_when_change_is_no_longer_pending(
    monkeypatch: Any,
) -> None:
    monkeypatch.setattr(member_changer, "AGAIN_NS", 0)
    settled: list[SettleMembers] = []
    changer, raft = MemberChanger(settled.append), Consensus()
    changer.carry_out(STEP, 1, raft)  # type: ignore[arg-type]
    changer.carry_out(STEP, 1, raft)  # type: ignore[arg-type]
    ((change, done),) = raft.asked
    assert change == STEP
    done.set_exception(MemberChangeNotReady("too few voters"))
    assert changer.refused == "too few voters"
    changer.carry_out(None, 1, raft)  # type: ignore[arg-type]
    assert changer.refused == "", "the leader waits for something else, or the change was cancelled"
    changer.carry_out(STEP, 1, raft)  # type: ignore[arg-type]
    raft.asked[1][1].set_exception(MemberChangeRefused("no such member"))
    assert settled == [SettleMembers(1, "no such member")]
