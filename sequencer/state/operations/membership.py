"""Operators' requests to change the members of the cluster: one at a time, carried out by the leader. Pure.

A request is part of the state until it is done, so a new leader continues it. The list of members itself is
kept by Raft (`sequencer.raft.model.members`). The leader changes it step by step
(`sequencer.leader.member_steps`).
"""

from __future__ import annotations

from msgspec import Struct

from rt.names import check_name
from sequencer.state.apply_result import CommandRejected, MembersRequested, MembersSettled, Outcome
from sequencer.state.feature_level import MEMBER_CHANGES
from sequencer.state.state import MemberRequest, SequencerState, SettledMembers

ADDRESS_CHARACTERS_MAX = 300
WHY_CHARACTERS_MAX = 500


class RequestMembers(Struct, frozen=True):
    """Add a node, remove a node, or do both to replace a node. `address`: host:port of the new node's
    Raft.
    """

    adds: str = ""
    address: str = ""
    removes: str = ""

    def __post_init__(self) -> None:
        for name in (self.adds, self.removes):
            if name:
                check_name(name, kind="node")
        if not (self.adds or self.removes) or self.adds == self.removes:
            raise ValueError(f"a change of members that adds {self.adds!r} and removes {self.removes!r}")
        if bool(self.adds) != bool(self.address) or len(self.address) > ADDRESS_CHARACTERS_MAX:
            raise ValueError(f"a change of members that adds {self.adds!r} at {self.address[:100]!r}")


class CancelMembers(Struct, frozen=True):
    """End the request that is being carried out. What was changed until then stays."""


class SettleMembers(Struct, frozen=True):
    """The leader has carried out request `number`, or could not. If it could not, `why` is the reason."""

    number: int
    why: str = ""

    def __post_init__(self) -> None:
        if not 1 <= self.number < 2**63 or len(self.why) > WHY_CHARACTERS_MAX:
            raise ValueError(f"the end of request {self.number}, {len(self.why)} characters")


def why_not_permitted(level: int) -> str:
    """Why a cluster of this feature level cannot change its members; empty if it can."""
    if level >= MEMBER_CHANGES:
        return ""
    return (
        f"members can be changed from feature level {MEMBER_CHANGES} on, and the cluster has level {level}: "
        "raise it once every node runs a version of rt that knows it"
    )


def request_members(state: SequencerState, command: RequestMembers) -> Outcome:
    if why := why_not_permitted(state.feature_level):
        return CommandRejected(why)
    if state.member_request is not None:
        return CommandRejected(
            f"another change of members is being carried out: {state.member_request.brief}"
        )
    state.member_requests += 1
    state.member_request = MemberRequest(
        state.member_requests, command.adds, command.address, command.removes
    )
    return MembersRequested(state.member_requests)


def cancel_members(state: SequencerState, _: CancelMembers) -> Outcome:
    request = state.member_request
    if request is None:
        return CommandRejected("no change of members is being carried out")
    return _settle(state, request, "an operator cancelled it")


def settle_members(state: SequencerState, command: SettleMembers) -> Outcome:
    request = state.member_request
    if request is None or request.number != command.number:
        return CommandRejected(f"change {command.number} of the members is not being carried out")
    if not command.why:
        state.disks.pop(request.removes, None)
    return _settle(state, request, command.why)


def _settle(state: SequencerState, request: MemberRequest, why: str) -> Outcome:
    state.member_request = None
    state.settled_members = SettledMembers(request.number, why)
    return MembersSettled(request, why)
