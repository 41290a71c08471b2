"""The members of a cluster, and changes of one member at a time. Pure. (Ongaro's dissertation, chapter 4.)

Invariants:
- A list differs from the one before by one voter at most, so any two majorities of adjacent lists intersect.
- A list has at least one voter and at most `VOTERS_MAX`.
- No two members have the same address.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple, TypeAlias

from rt.endpoints import parse_endpoint
from rt.errors import InvalidName, InvalidOption, RtError
from rt.names import check_name

VOTERS_MAX: Final = 7
MEMBERS_MAX: Final = 16
"""Maximum number of members: voters and learners."""


class RaftMember(NamedTuple):
    address: str
    """Raft address `host:port`. Empty if this node does not know it."""
    votes: bool = True
    """False for a learner: it receives everything, and counts in no majority."""


Members: TypeAlias = Mapping[str, RaftMember]
"""The members by name."""


class AddLearner(NamedTuple):
    """The first step of a new member: it gets the log, and does not vote."""

    name: str
    address: str


class PromoteLearner(NamedTuple):
    """The second step: the learner votes."""

    name: str


class RemoveMember(NamedTuple):
    name: str


MemberChange: TypeAlias = AddLearner | PromoteLearner | RemoveMember


class MemberChangeRefused(RtError):
    """A change of the members that is not possible. Nothing was changed."""

    grpc_status = "FAILED_PRECONDITION"


class MemberChangeNotReady(MemberChangeRefused):
    """A change of the members that is not possible now. The hint says what must happen before."""

    grpc_status = "UNAVAILABLE"
    retriable = True


class MemberRemoved(RtError):
    """This node is no longer a member. If `is_listed`, it was added again, and must be opened again."""

    grpc_status = "FAILED_PRECONDITION"

    is_listed = False


def changed(members: Members, change: MemberChange) -> Members:
    """The full list after the change. Raises `MemberChangeRefused`."""
    match change:
        case AddLearner(name, address):
            return _with_learner(members, name, address)
        case PromoteLearner(name):
            return _with_voter(members, name)
        case RemoveMember(name):
            return _without(members, name)


def voters_of(members: Members) -> frozenset[str]:
    return frozenset(name for name, member in members.items() if member.votes)


def is_majority(some: int, voters: int) -> bool:
    return 2 * some > voters


def removed_error(name: str, where: str) -> MemberRemoved:
    return MemberRemoved(
        "this node was removed from the cluster",
        where=where,
        got=name,
        expected="a member",
        hint="Set bootstrap = false and empty the node's directories, or add it to the cluster again. Then "
        "start it.",
    )


def rejoined_error(name: str, where: str) -> MemberRemoved:
    error = MemberRemoved(
        "this node's disk counted for nothing for a while, and has joined the cluster again",
        where=where,
        got=name,
        hint="Start it again. The outcome of commands in flight is unknown.",
    )
    error.is_listed = True
    return error


def _with_learner(members: Members, name: str, address: str) -> Members:
    _check_member(name, address)
    if name in members:
        raise MemberChangeRefused(
            "the member exists already",
            where=name,
            got=members[name].address,
            hint="To change its address, remove it and add it again.",
        )
    same = [other for other, member in members.items() if member.address == address]
    if same:
        raise MemberChangeRefused(
            "another member has this address", where=name, got=address, expected=f"not that of {same[0]}"
        )
    if len(members) >= MEMBERS_MAX:
        raise MemberChangeRefused(
            "the cluster has as many members as it may have",
            got=len(members) + 1,
            expected=f"at most {MEMBERS_MAX}",
            hint="Remove a member first.",
        )
    return {**members, name: RaftMember(address, votes=False)}


def _with_voter(members: Members, name: str) -> Members:
    member = _known(members, name)
    if member.votes:
        raise MemberChangeRefused("the member votes already", where=name, expected="a learner")
    voters = len(voters_of(members))
    if voters >= VOTERS_MAX:
        raise MemberChangeRefused(
            "the cluster has as many voters as it may have",
            where=name,
            got=voters + 1,
            expected=f"at most {VOTERS_MAX}",
            hint="Remove a voter first.",
        )
    return {**members, name: member._replace(votes=True)}


def _without(members: Members, name: str) -> Members:
    _known(members, name)
    rest = {other: member for other, member in members.items() if other != name}
    if not voters_of(rest):
        raise MemberChangeRefused(
            "the last voter cannot be removed", where=name, hint="Add and promote another member first."
        )
    return rest


def _known(members: Members, name: str) -> RaftMember:
    if name not in members:
        raise MemberChangeRefused("no such member", got=repr(name)[:200], expected=", ".join(sorted(members)))
    return members[name]


def _check_member(name: str, address: str) -> None:
    try:
        check_name(name, kind="member")
        name.encode("idna")  # It is a host name in the certificate.
        parse_endpoint(address, where=f"member {name}")
        address.encode("ascii")  # In a list, even the zone of an IPv6 address must be ASCII.
    except (InvalidName, InvalidOption) as error:
        raise MemberChangeRefused(
            error.what,
            where=error.where or "members",
            got=error.got,
            expected=error.expected,
            hint=error.hint,
        ) from error
    except UnicodeError as error:
        raise MemberChangeRefused(
            "the name is no host name, or the address is not in ASCII",
            where=repr(name)[:200],
            got=repr(address)[:200],
        ) from error
