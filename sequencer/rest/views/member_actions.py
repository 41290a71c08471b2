"""The actions that change the members of the cluster, and the notes about the members in `/status`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from sequencer.rest.base.answer import Answer, Count, doc
from sequencer.rest.base.errors import Conflict
from sequencer.rest.base.fields import address_of, name_of
from sequencer.rest.base.node_snapshot import NodeSnapshot
from sequencer.rest.views.context import Action, ActionContext, Response, joined
from sequencer.state.apply_result import MembersRequested, MembersSettled
from sequencer.state.operations.membership import CancelMembers, RequestMembers, why_not_permitted
from sequencer.state.state import MemberRequest, SequencerState


class MemberChangeReport(Answer):
    """A change of the members that runs in the background."""

    number: Annotated[Count, doc("Number of the change, from 1.")]
    adds: Annotated[str, doc("Name of the new node. Empty: none.")]
    raft_address: Annotated[str, doc("host:port of its Raft.")]
    removes: Annotated[str, doc("Name of the node that goes. Empty: none.")]


class SettledMemberChange(Answer):
    """The last change of the members that ended."""

    number: Annotated[Count, doc("Number of the change.")]
    why: Annotated[str, doc("Why it was not carried out whole. Empty: it was.")]


def member_change(state: SequencerState) -> MemberChangeReport | None:
    request = state.member_request
    return None if request is None else _report(request)


def settled_member_change(state: SequencerState) -> SettledMemberChange | None:
    settled = state.settled_members
    return None if settled is None else SettledMemberChange(settled.number, settled.why)


def bootstrap_notes(node: NodeSnapshot) -> Iterator[str]:
    """A sentence for operators if members that lost their disks could make another cluster."""
    names = sorted(one.name for one in node.standing.nodes if one.summary.bootstraps)
    if node.standing.members_version and names:
        yield (
            f"The members have changed, and {', '.join(names)} may bootstrap. Set bootstrap = false in the "
            "configuration: a node that lost its disk could make another cluster."
        )


async def add_member(acting: ActionContext) -> Response:
    name, address = acting.body["name"], acting.body["raftAddress"]
    _check_new(acting, name, address)
    return await _request(acting, RequestMembers(name, address))


async def remove_member(acting: ActionContext) -> Response:
    name = acting.body["name"]
    _check_known(acting, name)
    return await _request(acting, RequestMembers(removes=name))


async def replace_member(acting: ActionContext) -> Response:
    name, new, address = acting.body["name"], acting.body["newName"], acting.body["raftAddress"]
    if name == new:
        raise Conflict("a node cannot replace itself", got=name, hint="The new node needs another name.")
    _check_known(acting, name)
    _check_new(acting, new, address)
    return await _request(acting, RequestMembers(new, address, name))


async def cancel_member_change(acting: ActionContext) -> Response:
    _check_level(acting)
    outcome = await acting.run(CancelMembers())
    assert isinstance(outcome, MembersSettled), outcome
    return Response(SettledMemberChange(outcome.request.number, outcome.why))


async def _request(acting: ActionContext, request: RequestMembers) -> Response:
    _check_level(acting)
    outcome = await acting.run(request)
    assert isinstance(outcome, MembersRequested), outcome
    made = MemberRequest(outcome.number, request.adds, request.address, request.removes)
    return Response(_report(made), 202)


def _report(request: MemberRequest) -> MemberChangeReport:
    return MemberChangeReport(request.number, request.adds, request.address, request.removes)


def _check_level(acting: ActionContext) -> None:
    """Check the feature level here first: a member of an older rt could not read the request, and would
    stop.
    """
    why = why_not_permitted(joined(acting.snapshot()).feature_level)
    if why:
        raise Conflict(why, hint="Nothing was changed.")


def _check_known(acting: ActionContext, name: str) -> None:
    names = sorted(one.name for one in acting.snapshot().standing.nodes)
    if name not in names:
        raise Conflict("no such member", where="field name", got=name, expected=" or ".join(names))


def _check_new(acting: ActionContext, name: str, address: str) -> None:
    """Check that the member is new. A learner that remains from a cancelled change is a member already, and
    may be continued.
    """
    for one in acting.snapshot().standing.nodes:
        if one.name == name and not (one.is_learner and one.raft_address == address):
            raise Conflict("it is a member already", got=name, hint="`rt member list` shows the members.")
        if one.name != name and one.raft_address == address:
            raise Conflict("another member has this address", where=one.name, got=address)


_NAME = name_of("name", "Name of the new node, as in its configuration and its certificate.", "node")
_GOES = name_of("name", "Name of the node that goes. It may be dead.", "node")
_NEW_NAME = name_of("newName", "Name of the new node, as in its configuration and its certificate.", "node")
_ADDRESS = address_of("raftAddress", "host:port at which the members reach the Raft port of the new node.")

MEMBER_ACTIONS: tuple[Action, ...] = (
    Action(
        "/member-add",
        "Adds a node: it copies the merged log and the state without a vote, and votes once it has them. "
        "Runs in the background: see memberChange in /status.",
        add_member,
        (_NAME, _ADDRESS),
        MemberChangeReport,
        202,
    ),
    Action(
        "/member-remove",
        "Removes a node, dead or alive, once the others have everything that it may be needed for. "
        "Runs in the background: see memberChange in /status.",
        remove_member,
        (_GOES,),
        MemberChangeReport,
        202,
    ),
    Action(
        "/member-replace",
        "Adds a node, then removes another one. Runs in the background: see memberChange in /status.",
        replace_member,
        (_GOES, _NEW_NAME, _ADDRESS),
        MemberChangeReport,
        202,
    ),
    Action(
        "/member-cancel",
        "Ends the change of the members that is being carried out. What was done stays: a new node may be a "
        "member without a vote.",
        cancel_member_change,
        (),
        SettledMemberChange,
    ),
)
