"""Cost of a round of the Raft loop: no unneeded PySyncObj calls, messages or wake-ups."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import pysyncobj.syncobj
import pytest
from raft_bench import Clock, Driven, Lockstep, config_of, of_kind

from sequencer.raft.core.core import SyncObj
from sequencer.raft.core.pysyncobj_adapter import COMMANDS_MAX, CommandQueue, Peer
from sequencer.raft.model.messages import AppendEntries, AppendEntriesReply

NAMES = ["n1", "n2", "n3"]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record the name of the node at each call of PySyncObj's `_onTick`."""
    asked: list[str] = []
    on_tick = pysyncobj.syncobj.SyncObj._onTick

    def noted(self: Any, timeout_s: float) -> None:
        asked.append(self._name)
        on_tick(self, timeout_s)

    monkeypatch.setattr(SyncObj, "_onTick", noted)
    return asked


def leader(clock: Clock) -> Driven:
    driven = Driven(clock, config_of("n1", NAMES))
    driven.adopt()
    driven.lead()
    driven.acknowledge("n2", driven.log.last.index)
    driven.acknowledge("n3", driven.log.last.index)
    driven.step()
    return driven


# --- Calls of PySyncObj ----------------------------------------------------------------------------------


def test_follower_calls_pysyncobj_only_when_election_is_due(clock: Clock, asked: list[str]) -> None:
    driven = Driven(clock, config_of("n1", NAMES))
    driven.adopt()
    driven.append(3, driven.log.last)
    asked.clear()
    for _ in range(5):
        driven.append(3, driven.log.last)
    assert asked == []
    driven.time_out()
    assert asked


def test_leader_calls_pysyncobj_for_commit_but_not_for_second_acknowledgement(
    clock: Clock, asked: list[str]
) -> None:
    driven = leader(clock)
    (future,) = driven.propose(b"one")
    asked.clear()
    driven.step()
    assert asked == []
    reply = AppendEntriesReply(driven.raft.term, True, 0, driven.log.last.index, driven.node.claim)
    driven.hear("n2", reply._replace(claim=driven.raft.peer_disks.claims["n2"]))
    assert len(asked) == 1
    assert future.result(0) == 1
    driven.hear("n3", reply._replace(claim=driven.raft.peer_disks.claims["n3"]))
    assert len(asked) == 1


def test_leader_calls_pysyncobj_per_heartbeat_and_steps_down_without_replies(
    clock: Clock, asked: list[str]
) -> None:
    driven = leader(clock)
    asked.clear()
    clock.advance(driven.config.heartbeat_ms / 1000 + 0.001)
    assert len(of_kind(driven.step(), AppendEntries)) == 2
    assert len(asked) == 1
    clock.advance(driven.config.election_ms_max / 1000 + 0.001)
    driven.step()
    assert driven.raft.role == "follower"


def test_pysyncobj_command_queue_is_bounded() -> None:
    waiting = CommandQueue()
    for number in range(COMMANDS_MAX):
        waiting.put_nowait(number)
    with pytest.raises(pysyncobj.syncobj.Queue.Full):
        waiting.put_nowait(None)
    assert [waiting.get_nowait(), waiting.get_nowait(), len(waiting)] == [0, 1, COMMANDS_MAX - 2]
    waiting.clear()
    with pytest.raises(pysyncobj.syncobj.Queue.Empty):
        waiting.get_nowait()


def test_peer_equals_only_itself() -> None:
    one, other = Peer("n1"), Peer("n1")
    assert {one, other, one} == {other, one}
    assert len({one, other}) == 2
    assert one != other
    assert one.id == one.name == "n1"


# --- What is sent ----------------------------------------------------------------------------------------


def test_two_peers_get_one_shared_append_message(clock: Clock) -> None:
    driven = leader(clock)
    driven.propose(b"one")
    appends = of_kind(driven.step(), AppendEntries)
    assert len(appends) == 2
    assert appends[0] is appends[1]


def test_second_acknowledgement_without_more_entries_sends_no_message(clock: Clock) -> None:
    driven = leader(clock)
    driven.propose(b"one")
    driven.step()
    notices = of_kind(driven.acknowledge("n2", driven.log.last.index), AppendEntries)
    assert [(len(notice.entries), notice.wants_reply) for notice in notices] == [(0, False)] * 2
    assert driven.acknowledge("n3", driven.log.last.index) == []


def test_proposal_made_on_apply_is_sent_in_same_message_as_commit_index(clock: Clock) -> None:
    calls: deque[Callable[[], None]] = deque()
    driven = leader(clock)
    driven.node._calls = calls
    (future,) = driven.propose(b"one")
    driven.step()
    future.add_done_callback(lambda _: calls.append(lambda: driven.propose(b"two") and None))
    appends = of_kind(driven.acknowledge("n2", driven.log.last.index), AppendEntries, "n2")
    assert [(append.commit, len(append.entries)) for append in appends] == [(driven.log.last.index - 1, 1)]


# --- What ends a wait ------------------------------------------------------------------------------------


def test_loop_is_woken_once_and_only_while_waiting(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    driven = leader(clock)
    wakes: list[int] = []
    monkeypatch.setattr(driven.wire, "wake", lambda: wakes.append(1))
    driven.node._is_waiting = False
    driven.propose(b"in a round")
    driven.node.wake()
    assert wakes == []
    driven.step()
    assert driven.node.wait_s() > 0
    driven.propose(b"while it waits")
    driven.propose(b"and another")
    driven.node.wake()
    assert wakes == [1]


def test_pending_call_keeps_loop_from_waiting(clock: Clock) -> None:
    driven = leader(clock)
    made: list[str] = []
    driven.step()
    assert driven.node.wait_s() > 0
    driven.node._calls.append(lambda: made.append("call"))
    assert driven.node.wait_s() == 0
    driven.step()
    assert made == ["call"]
    assert driven.node.wait_s() > 0


def test_pending_call_is_made_without_leader(clock: Clock) -> None:
    cluster = Lockstep(clock)
    made: list[str] = []
    alone = cluster.members["n1"]
    alone.node._calls.append(lambda: made.append("call"))
    alone.node.step()
    assert made == ["call"]
