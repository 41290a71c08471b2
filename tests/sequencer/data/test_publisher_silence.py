"""Silent publishers: the time that counts, the limits that a node proposes, and the alarm."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest
from rest_node import node_view
from sequencer_core import do_merge, do_open, new_state, opening, piece

from replicator.protocol.handshake import PushHello, SilenceLimit
from rt.exposition import exposition
from rt.v1 import sequencer_pb2 as pb
from sequencer.data.publisher_silence import GRACE_S, PROPOSE_AGAIN_S, RECOVERY_S, PublisherSilence
from sequencer.ipc.state_follower import StateFollower
from sequencer.rest.base.node_snapshot import SilentPublisher
from sequencer.rest.views.alarms import TOLD_MAX, alarms_of
from sequencer.rest.views.node_metrics import metrics_of
from sequencer.state.apply import apply
from sequencer.state.command_codec import decode_command
from sequencer.state.session_commands import CloseSession, LimitSilence

LIMIT_S = 10


class Watched:
    """A node that follows a state, and its clock."""

    def __init__(self, *, promises: bool = True) -> None:
        self.proposed: list[bytes] = []
        self.follower = StateFollower(lambda _: None, lambda *_: None)
        self.state = self.follower.state = new_state()
        self.follower.standing = pb.Standing(leader="n1")
        do_open(self.state)
        if promises:
            apply(self.state, LimitSilence(1, 0, LIMIT_S * 1000))
        self.silence = PublisherSilence(self.follower, self.proposed.append)
        self.now_s = 0.0
        self.received: dict[str, int] = {}
        self.wait(0)

    def wait(self, seconds: float) -> None:
        for _ in range(int(seconds) or 1):
            self.now_s += min(seconds, 1)
            self.silence.update(self.now_s, lambda: self.received)

    @property
    def silent(self) -> list[str]:
        return [one.session for one in self.silence.silent()]


def test_publisher_is_silent_from_deadline_until_next_message() -> None:
    node = Watched()
    node.wait(LIMIT_S + GRACE_S - 1)
    assert node.silent == []
    node.wait(1)
    assert node.silence.silent() == (SilentPublisher("a", LIMIT_S + GRACE_S, LIMIT_S),)
    do_merge(node.state, piece())
    node.wait(1)
    assert node.silent == []
    node.wait(LIMIT_S + GRACE_S)
    assert node.silent == ["a"]


def test_silence_is_not_measured_without_limit() -> None:
    node = Watched(promises=False)

    def never() -> Mapping[str, int]:
        raise AssertionError("the pushes were asked")

    node.silence.update(1.0, never)
    node.wait(10 * LIMIT_S)
    assert node.silent == []


@pytest.mark.parametrize("end", ["in order", "an operator", "a later run", "a newer directory"])
def test_ended_limit_raises_no_alarm_on_node_previously_cut_off(end: str) -> None:
    """The limit ended while the node was cut off. The node catches up with the committed end."""
    node = Watched()
    node.follower.standing = pb.Standing()
    node.wait(5 * LIMIT_S)
    match end:
        case "in order":
            apply(node.state, LimitSilence(1, 0, 0))
        case "an operator":
            apply(node.state, CloseSession("a"))
        case "a later run":
            apply(node.state, opening("a", run=1, newest=1))
        case "a newer directory":
            apply(node.state, opening("a", 1, newest=1))
    node.follower.standing = pb.Standing(leader="n1")
    node.wait(5 * LIMIT_S)
    assert node.silent == []


@pytest.mark.parametrize("before_s", [0, 50, 100, 200], ids=lambda seconds: f"after {seconds} s")
def test_elections_delay_alarm_briefly_and_do_not_clear_it(before_s: int) -> None:
    node = Watched(promises=False)
    apply(node.state, LimitSilence(1, 0, 100_000))
    node.wait(before_s)
    node.follower.standing = pb.Standing()
    node.wait(500)
    assert node.silent == []
    node.follower.standing = pb.Standing(leader="n2")
    left_s = max(100 + GRACE_S - before_s, RECOVERY_S)
    node.wait(left_s - 3)
    assert node.silent == []
    node.wait(6)
    assert node.silent == ["a"]
    for leader in ("", "n1"):
        node.follower.standing = pb.Standing(leader=leader)
        node.wait(1)
    node.wait(RECOVERY_S)
    assert node.silent == ["a"]


def test_stopped_control_process_makes_no_publisher_silent() -> None:
    """Its last information about the leader is out of date, and the node learns of no merges."""
    node = Watched()
    for second in range(100):
        node.silence.update(second, dict, float(second))
    assert node.silent == []
    node.now_s = 100
    node.wait(LIMIT_S + GRACE_S)
    assert node.silent == ["a"]


def test_silence_excludes_time_without_leader_and_time_while_node_was_stopped() -> None:
    node = Watched()
    node.follower.standing = pb.Standing()
    node.wait(5 * LIMIT_S)
    node.follower.standing = pb.Standing(leader="n2")
    node.wait(1)
    assert node.silent == []
    node.now_s += 3600
    node.wait(1)
    assert node.silent == []


def test_received_unmerged_message_ends_silence() -> None:
    node = Watched()
    node.received["a"] = 5
    node.wait(LIMIT_S + GRACE_S + 1)
    assert node.silent == ["a"]
    node.received["a"] = 6
    node.wait(1)
    assert node.silent == []
    del node.received["a"]  # The connection ended: no message.
    node.wait(LIMIT_S + GRACE_S)
    node.received["a"] = 6
    node.wait(1)
    assert node.silent == ["a"]


def test_message_received_after_clock_was_set_back_ends_silence() -> None:
    node = Watched()
    node.received["a"] = 3_600_000_000_006
    node.wait(LIMIT_S + GRACE_S + 1)
    assert node.silent == ["a"]
    node.received["a"] = 6
    node.wait(1)
    assert node.silent == []
    node.wait(LIMIT_S + GRACE_S)
    assert node.silent == ["a"]


def test_limit_is_proposed_again_after_delay_until_committed() -> None:
    node = Watched(promises=False)
    hello, limit = PushHello("s", "a", node.state.sessions[1].incarnation), SilenceLimit(0, 5000)

    async def play() -> None:
        assert node.silence.commit(hello, limit) is None
        assert node.silence.commit(hello, limit) is None
        assert [decode_command(one) for one in node.proposed] == [LimitSilence(1, 0, 5000)]
        node.silence.update(asyncio.get_running_loop().time() + PROPOSE_AGAIN_S, dict)
        assert node.silence.commit(hello, limit) is None
        assert len(node.proposed) == 2
        for command in node.proposed:
            apply(node.state, decode_command(command))
        assert node.silence.commit(hello, limit) == limit
        assert len(node.proposed) == 2

    asyncio.run(play())


@pytest.mark.parametrize(
    ("hello", "limit", "is_settled"),
    [
        ({}, SilenceLimit(1, 5000), False),
        ({"session": "b"}, SilenceLimit(0, 5000), False),
        ({"incarnation": b"\x99" * 16}, SilenceLimit(0, 5000), False),
        ({"incarnation": None}, SilenceLimit(0, 5000), True),
    ],
    ids=["a run that is not open", "an unknown session", "an unknown directory", "a superseded directory"],
)
def test_limit_of_unknown_run_or_superseded_directory_is_not_proposed(
    hello: dict[str, Any], limit: SilenceLimit, is_settled: bool
) -> None:
    node = Watched(promises=False)
    known = node.state.sessions[1].incarnation
    if hello.get("incarnation", known) is None:
        apply(node.state, opening("a", 1, newest=1))
        hello = {"incarnation": known}
    said = PushHello(**{"stream": "s", "session": "a", "incarnation": known, **hello})

    async def play() -> None:
        assert node.silence.commit(said, limit) == (limit if is_settled else None)

    asyncio.run(play())
    assert node.proposed == []


def silences(*sessions: str) -> tuple[SilentPublisher, ...]:
    return tuple(SilentPublisher(one, 75.0, 60.0) for one in sessions)


def texts(silent: tuple[SilentPublisher, ...]) -> list[str]:
    return [one.text for one in alarms_of(node_view(silent=silent)) if one.name == "publisher-silent"]


def test_alarm_names_session_limit_and_next_commands() -> None:
    (text,) = texts(silences("feed~2"))
    assert "Session feed~2 gives no message" in text
    assert "at least every 60 s" in text
    assert "connected to no node that reports" in text
    assert "`rt pushes list`" in text
    assert '`rt rest /close-session --data \'{"session": "feed~2"}\'`' in text
    assert "rt_silent_publishers 1" in exposition(metrics_of(node_view(silent=silences("feed~2"))))
    assert texts(()) == []
    (text,) = texts((SilentPublisher("feed", 3e6, 2_592_000.5),))
    assert "at least every 2,592,000.5 s" in text


def test_alarms_of_one_certificate_do_not_hide_those_of_others() -> None:
    found = texts(silences(*(f"many~{number}" for number in range(100)), "other"))
    assert len(found) == TOLD_MAX + 2
    assert any("Session other " in text for text in found)
    assert any(f"{100 - TOLD_MAX} more publishers of many" in text for text in found)
