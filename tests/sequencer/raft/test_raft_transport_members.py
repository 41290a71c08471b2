"""Member changes in the mesh: added and removed members, changed addresses, notices to non-members."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from raft_transport_bench import HELLO, HOST, Net

from rt.net.tls import TLS
from sequencer.raft.model.entry_codec import encode_members
from sequencer.raft.model.members import RaftMember
from sequencer.raft.model.messages import Forward, MemberList

NOTICE = MemberList(9, True, encode_members({"n1": RaftMember("n1:1")}))


@pytest.fixture
def three(node_tls: dict[str, TLS]) -> Iterator[Net]:
    made = Net(dict(node_tls))
    yield made
    for mesh in made.inboxes:
        mesh.close()


def test_added_member_is_connected(three: Net) -> None:
    two = {name: three.members[name] for name in ("n1", "n2")}
    first, second = (three.mesh(name, members=two) for name in two)
    third = three.mesh("n3")
    three.drive(lambda: first.refused["member"] and second.refused["member"])
    assert set(third.connected) == set()
    for mesh in (first, second):
        mesh.set_members(three.members, None)
    three.drive(lambda: all(len(mesh.connected) == 2 for mesh in (first, second, third)))


@pytest.mark.slow
def test_removed_member_is_disconnected_and_receives_notice(three: Net) -> None:
    first, third = three.mesh("n1"), three.mesh("n3")
    three.drive(lambda: first.connected and third.connected)
    inbox, before = three.inboxes[first], three.inboxes[third]
    first.set_members({"n1": three.members["n1"], "n2": three.members["n2"]}, NOTICE)
    three.drive(lambda: before.messages("n1"))
    assert before.messages("n1") == [NOTICE]
    assert before.count("up", "n1", HELLO) == 2
    assert third.send("n1", Forward(b"of no member"))
    third.flush()
    three.drive(lambda: before.count("down", "n1") == 2)
    assert (inbox.count("up"), inbox.count("down"), inbox.count("message")) == (1, 1, 0)
    assert first.refused["member"]


def test_refused_node_is_connected_when_it_becomes_member(three: Net) -> None:
    two = {name: three.members[name] for name in ("n1", "n2")}
    first = three.mesh("n1", members=two)
    first.set_members(two, NOTICE)
    third = three.mesh("n3")
    three.drive(lambda: three.inboxes[third].messages("n1"))
    first.set_members(three.members, NOTICE)
    three.drive(lambda: first.connected)
    assert set(first.connected) == {"n3"}


def test_member_with_lowest_name_dials_others_only_on_demand(three: Net) -> None:
    """Without these connections it would never learn that the others do not dial it any more."""
    two = {name: three.members[name] for name in ("n2", "n3")}
    first, third = three.mesh("n1"), three.mesh("n3", members=two)
    third.set_members(two, NOTICE)
    first.dial_all(is_wanted=True)
    three.drive(lambda: three.inboxes[first].messages("n3"))
    assert three.inboxes[first].messages("n3") == [NOTICE]
    first.dial_all(is_wanted=False)
    assert set(first._dialers._dialers) == set()


def test_member_with_changed_address_is_dialed_at_new_address(three: Net) -> None:
    wrong = {**three.members, "n1": f"{HOST}:1"}
    third, first = three.mesh("n3", members=wrong), three.mesh("n1")
    three.drive(lambda: third._dialers._dialers["n1"].failures)
    third.set_members(three.members, None)
    three.drive(lambda: first.connected)


def test_member_without_address_is_not_dialed(three: Net) -> None:
    third = three.mesh("n3")
    third.set_members({**three.members, "n1": "", "n2": ""}, None)
    assert set(third._dialers._dialers) == set()


def test_certificate_of_another_stream_is_refused_without_notice(three: Net, pki: object) -> None:
    first = three.mesh("n1")
    first.set_members(dict(three.members), NOTICE)
    three.tls["n3"] = pki.tls("n3", stream="other")  # type: ignore[attr-defined]
    third = three.mesh("n3")
    three.drive(lambda: first.refused["stream"])
    assert three.inboxes[third].events == []
