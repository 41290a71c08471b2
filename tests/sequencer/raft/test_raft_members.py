"""Lists of members: changes, refusals, encoding, and their effect on the cluster's state."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from dump import Dump
from hypothesis import given
from hypothesis import strategies as st
from raft_bench import CLUSTER, claim_of, commands_entry, disk_id

from rt.errors import FormatError, UnknownVersion
from sequencer.raft.model import cluster_state, entry_codec
from sequencer.raft.model.cluster_state import (
    NO_DISK,
    ClusterState,
    decode_state,
    encode_state,
    initial_state,
)
from sequencer.raft.model.entry_codec import (
    JoinEntry,
    MembersEntry,
    decode_content,
    decode_members,
    encode_join,
    encode_members,
)
from sequencer.raft.model.members import (
    MEMBERS_MAX,
    AddLearner,
    MemberChange,
    MemberChangeNotReady,
    MemberChangeRefused,
    Members,
    PromoteLearner,
    RaftMember,
    RemoveMember,
    changed,
    voters_of,
)
from sequencer.raft.model.messages import DiskClaim, LogIndex, RaftEntry

THREE = {name: RaftMember(f"{name}:1") for name in ("n1", "n2", "n3")}
WITH_LEARNER = {**THREE, "n4": RaftMember("n4:1", votes=False)}
FULL = {f"n{at}": RaftMember(f"n{at}:1", at == 1) for at in range(MEMBERS_MAX)}
SEVEN = {f"n{at}": RaftMember(f"n{at}:1") for at in range(1, 8)}


def test_new_member_is_learner_then_voter_then_removed() -> None:
    with_learner = changed(THREE, AddLearner("n4", "n4:1"))
    assert with_learner == WITH_LEARNER
    assert voters_of(with_learner) == {"n1", "n2", "n3"}
    with_voter = changed(with_learner, PromoteLearner("n4"))
    assert voters_of(with_voter) == {"n1", "n2", "n3", "n4"}
    assert changed(with_voter, RemoveMember("n4")) == changed(with_learner, RemoveMember("n4")) == THREE


@pytest.mark.parametrize(
    ("members", "change", "why"),
    [
        (THREE, PromoteLearner("n4"), "no such member"),
        (THREE, RemoveMember("n4"), "no such member"),
        (THREE, AddLearner("n2", "n4:1"), "exists already"),
        (THREE, AddLearner("n4", "n2:1"), "another member has this address"),
        (THREE, PromoteLearner("n2"), "votes already"),
        (THREE, AddLearner("", "n4:1"), "not a valid name"),
        (THREE, AddLearner("no name", "n4:1"), "not a valid name"),
        (THREE, AddLearner("n4", "n4"), "the port is missing"),
        (THREE, AddLearner("n4", ""), "the port is missing"),
        (THREE, AddLearner("n4", "https://n4:1"), "no scheme"),
        (THREE, AddLearner("n4", "[::1%é]:1"), "not in ASCII"),
        ({"n1": RaftMember("n1:1")}, RemoveMember("n1"), "the last voter"),
        ({"n1": RaftMember("n1:1"), "n2": RaftMember("n2:1", False)}, RemoveMember("n1"), "the last voter"),
        (SEVEN | {"n8": RaftMember("n8:1", False)}, PromoteLearner("n8"), "as many voters"),
        (FULL, AddLearner("n99", "n99:1"), "as many members"),
    ],
)
def test_invalid_member_change_is_refused_as_not_retriable(
    members: Members, change: MemberChange, why: str
) -> None:
    with pytest.raises(MemberChangeRefused, match=why) as refused:
        changed(members, change)
    assert not isinstance(refused.value, MemberChangeNotReady)
    assert not refused.value.retriable


names = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,20}", fullmatch=True)
members_made = st.builds(RaftMember, st.from_regex(r"[a-z]{0,9}:[0-9]", fullmatch=True), st.booleans())
lists = st.dictionaries(names, members_made, min_size=1, max_size=MEMBERS_MAX).filter(voters_of)


@given(lists)
def test_member_list_survives_encode_and_decode(members: dict[str, RaftMember]) -> None:
    content = encode_members(members)
    assert decode_content(content) == MembersEntry(members)
    for end in range(len(content)):
        with pytest.raises(FormatError):
            decode_members(content[:end]) if end else decode_content(b"")


@pytest.mark.parametrize(
    "content",
    [
        encode_members(THREE) + b"x",
        encode_members({"n1": RaftMember("n1:1", votes=False)}),
        encode_members(THREE)[:2] + bytes(6),
        encode_members(THREE).replace(b"n2n2:1", b"n1n2:1"),
        encode_members(THREE).replace(b"n2n2:1", b"n\xff2:1"),
        encode_members(THREE).replace(b"\x02\x01\x04", b"\x02\x02\x04"),
    ],
)
def test_invalid_member_list_raises_format_error(content: bytes) -> None:
    with pytest.raises(FormatError):
        decode_content(content)


def test_member_list_of_later_version_raises_unknown_version() -> None:
    with pytest.raises(UnknownVersion):
        decode_content(b"\x12\x02" + encode_members(THREE)[2:])


# --- The cluster's state ---------------------------------------------------------------------------------


def state_of(*contents: bytes) -> ClusterState:
    """Return the state of a three-node cluster after entries with these contents in term 1."""
    state = initial_state(CLUSTER, 1, {name: disk_id(name) for name in THREE})
    for content in contents:
        state.apply(RaftEntry(content, state.applied.index + 1, 1))
    return state


def test_added_member_has_no_disk_until_it_joins() -> None:
    state = state_of(encode_members(WITH_LEARNER))
    assert state.disks["n4"] == NO_DISK
    state.apply(RaftEntry(encode_join(JoinEntry("n4", disk_id("n4"))), 3, 1))
    assert state.disks["n4"] == claim_of("n4", joined=LogIndex(3, 1))


def test_join_of_non_member_is_ignored() -> None:
    state = state_of(encode_join(JoinEntry("n4", disk_id("n4"))))
    assert set(state.disks) == set(THREE)


def test_removed_member_loses_its_disk_and_its_commands_are_ignored() -> None:
    state = state_of(commands_entry(2, 1, b"a", proposer="n3").content)
    assert disk_id("n3") in state.proposers
    state.apply(RaftEntry(encode_members(changed(THREE, RemoveMember("n3"))), 3, 1))
    assert (set(state.disks), state.proposers) == ({"n1", "n2"}, {})
    state.apply(commands_entry(4, 1, b"b", proposer="n3", sequence=2))
    assert state.index == 1


def test_removed_and_readded_disk_joins_again() -> None:
    state = state_of(
        encode_members(changed(THREE, RemoveMember("n3"))),
        encode_members({**THREE, "n3": RaftMember("n3:1", votes=False)}),
    )
    assert state.disks["n3"] == NO_DISK
    state.apply(RaftEntry(encode_join(JoinEntry("n3", disk_id("n3"))), 4, 1))
    assert state.disks["n3"] == DiskClaim(disk_id("n3"), LogIndex(4, 1))


def test_state_with_member_list_survives_encode_and_decode() -> None:
    state = state_of(commands_entry(2, 1, b"a").content, encode_members(WITH_LEARNER))
    assert decode_state(encode_state(state) + b"machine") == (state, b"machine")
    assert (state.members, state.members_index) == (WITH_LEARNER, 3)


def test_state_without_member_list_matches_golden_bytes_of_version_1(golden: Callable[..., bytes]) -> None:
    state = state_of(commands_entry(2, 1, b"a").content, encode_join(JoinEntry("n3", disk_id("n3", 1))))
    dump = Dump(encode_state(state))
    dump.title("The state of a cluster of three without a list of members.")
    dump.part(len(encode_state(state)), f"see {cluster_state.__name__}")
    data = golden("raft/state/v1", encode_state(state), dump.text())
    assert decode_state(data)[0] == state
    assert data[8:10] == b"\x01\x00"


def test_state_with_member_list_matches_golden_bytes_of_version_2(golden: Callable[..., bytes]) -> None:
    state = state_of(commands_entry(2, 1, b"a").content, encode_members(WITH_LEARNER))
    content = encode_state(state)
    dump, size = Dump(content), 12 + len(encode_members(WITH_LEARNER))
    dump.title("The state of a cluster of three voters and a learner.")
    dump.part(len(content) - size, f"as version 1: see {cluster_state.__name__}")
    dump.part(size, f"index of the list, its length, and an entry: see {entry_codec.__name__}")
    data = golden("raft/state/v2", content, dump.text())
    assert decode_state(data)[0] == state
    assert data[8:10] == b"\x02\x00"


def test_state_with_different_members_and_disks_raises_format_error() -> None:
    state = state_of(encode_members(WITH_LEARNER))
    state.members = THREE
    with pytest.raises(FormatError, match="invalid list of members"):
        decode_state(encode_state(state))
